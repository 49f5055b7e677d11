"""Parts of a decoder as texts: `OPT(0.2)`, `Survival(OnlineEstimate(shared=True), 0.6)`.

A text calls classes with literals and other parts, in Python's notation. So a part is a plain
value, which can be compared, hashed, and written in JSON and gin files.
"""

import ast
import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

PLACE = "{}"
_EXAMPLE = "write a text such as 'OPT(0.2)'"


class Part(NamedTuple):
    """A class and its arguments.

    Attributes:
      name: the name of the class; with dots a class in a user's own module.
      arguments: by position: numbers, texts, None, tuples of these, or parts.
      named: (name, value) of keyword arguments.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str, what: str = "the part") -> Self:
        """Parses a text.

        Args:
          text: such as `OPT(0.2)`; a class without arguments needs no parentheses.
          what: its name in messages.

        Raises:
          TypeError: `text` is not a text.
          ValueError: the text is not a call of a class with literals and parts.
        """
        if not isinstance(text, str):
            raise TypeError(f"{what} must be a text such as 'OPT(0.2)', got {text!r}")
        try:
            found = _value(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError):
            found = None
        if not isinstance(found, Part):
            raise ValueError(f"{what}={text!r} is not a class with arguments: {_EXAMPLE}")
        return cls(*found)

    def __str__(self) -> str:
        """The text for `parse`."""
        given = [_written(value) for value in self.arguments]
        given += [f"{name}={_written(value)}" for name, value in self.named]
        return f"{self.name}({', '.join(given)})" if given else self.name

    @property
    def number(self) -> float | None:
        """A rule's strength, a policy's threshold: its last number, otherwise that of its parts.

        A number by position counts before one by name: 0.3 of `TokenV2(0.3, top_k=10)`.
        """
        return _cut(self)[1]

    @property
    def template(self) -> str:
        """The text with `{}` instead of `number`."""
        return str(_cut(self)[0])

    def make(self, known: Mapping[str, Callable[..., Any]], what: str = "the part") -> Any:
        """Calls the class.

        Args:
          known: name -> class.
          what: its name in messages.

        Raises:
          TypeError: the class does not take these arguments.
          ValueError: the class is unknown, or an argument is out of range.
        """
        kind = self.kind(known, what)
        arguments = [_made(value, known, what) for value in self.arguments]
        named = {name: _made(value, known, what) for name, value in self.named}
        try:
            inspect.signature(kind).bind(*arguments, **named)
        except TypeError as error:
            raise TypeError(f"{what}={str(self)!r}: {self.name}: {error}") from None
        return kind(*arguments, **named)

    def kind(self, known: Mapping[str, Callable[..., Any]], what: str) -> Callable[..., Any]:
        """Returns the class; see `make`."""
        if "." not in self.name:
            return known[known_name(what, self.name, known)]
        module, _, name = self.name.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            remedy = f"; write {name} without {module}" if name in known else ""
            raise ValueError(
                f"{what}={str(self)!r}: {self.name} cannot be imported: {error}{remedy}"
            ) from None

    def canonical(self, known: Mapping[str, Any], what: str = "the part") -> "Part":
        """Returns the part with standard names of classes, so that equal parts have equal texts.

        Arguments without a default are given by position: `MinP(min_p=0.05)` is `MinP(0.05)`.
        """

        def of(value: Any) -> Any:
            if isinstance(value, Part):
                return value.canonical(known, what)
            return tuple(map(of, value)) if isinstance(value, tuple) else value

        name = self.name if "." in self.name else known_name(what, self.name, known)
        named = {key: of(value) for key, value in self.named}
        arguments = list(map(of, self.arguments))
        parameters = inspect.signature(self.kind(known, what)).parameters.values()
        for one in list(parameters)[len(arguments) :]:
            by_position = one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty
            if not by_position or one.name not in named:
                break
            arguments.append(named.pop(one.name))
        return Part(name, tuple(arguments), tuple(named.items()))

    def without_defaults(self, known: Mapping[str, Any], what: str = "the part") -> "Part":
        """Returns the part without arguments that are their defaults.

        Arguments with a default are given by name: `f(1, "both")` is `f(1)` if "both" is the
        default, and `f(1, "prompt")` is `f(1, over="prompt")`.

        Raises:
          TypeError: the class does not take these arguments.
        """
        bound = inspect.signature(self.kind(known, what)).bind(*self.arguments, **dict(self.named))
        parameters, positions, named = bound.signature.parameters, [], []
        for name, value in bound.arguments.items():
            one = parameters[name]
            if one.kind is not one.POSITIONAL_OR_KEYWORD and one.kind is not one.KEYWORD_ONLY:
                return self
            if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD:
                positions.append(value)
            elif type(value) is not type(one.default) or value != one.default:
                named.append((name, value))
        return self._replace(arguments=tuple(positions), named=tuple(named))

    def bindings(self, known: Mapping[str, Callable[..., Any]], scope: str = "") -> dict[str, str]:
        """Returns the gin bindings with which a reference to the class, in a scope, is the part."""
        kind = self.kind(known, "the part")
        names = list(inspect.signature(kind).parameters)
        found: dict[str, str] = {}
        for name, value in [*zip(names, self.arguments, strict=False), *self.named]:
            text, below = _in_gin(value, known, f"{scope}{name}/")
            found[f"{scope}{self.name.rpartition('.')[2]}.{name}"] = text
            found |= below
        return found


def known_name(what: str, given: str, known: Mapping[str, Any]) -> str:
    """Finds a name in a table, ignoring case and underscores.

    Raises:
      TypeError: the name is not a text.
      ValueError: the name is not in the table.
    """
    if not isinstance(given, str):
        raise TypeError(f"{what} must be a name such as {next(iter(known))!r}, got {given!r}")
    plain = {name.replace("_", "").lower(): name for name in known}
    found = plain.get(given.replace("_", "").lower())
    if found is None:
        near = difflib.get_close_matches(given.replace("_", "").lower(), plain, n=1)
        meant = f"; did you mean {plain[near[0]]}?" if near else ""
        raise ValueError(f"{what} must be one of {', '.join(known)}, got {given!r}{meant}")
    return found


def _value(node: ast.expr) -> Any:
    """A literal, a tuple of values or a part; ValueError for anything else."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if not all(word.isidentifier() for word in name.split(".")):
            raise ValueError(name)
        if any(keyword.arg is None for keyword in node.keywords):
            raise ValueError(name)
        named = tuple((str(word.arg), _value(word.value)) for word in node.keywords)
        return Part(name, tuple(map(_value, node.args)), named)
    if isinstance(node, ast.Name | ast.Attribute):
        name = ast.unparse(node)
        if not all(word.isidentifier() for word in name.split(".")):
            raise ValueError(name)
        return Part(name)
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(map(_value, node.elts))
    return ast.literal_eval(node)


def _written(value: Any) -> str:
    if isinstance(value, tuple) and not isinstance(value, Part):
        return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
    return str(value) if isinstance(value, Part) else repr(value)


def _made(value: Any, known: Mapping[str, Any], what: str) -> Any:
    if isinstance(value, Part):
        return value.make(known, what)
    return tuple(_made(each, known, what) for each in value) if isinstance(value, tuple) else value


class _Place:
    """Stands for the number of a part."""

    def __repr__(self) -> str:
        return PLACE


def _cut(value: Any) -> tuple[Any, float | None]:
    """A value with a `_Place` for its number, and the number; see `Part.number`."""
    if _is_number(value):
        return _Place(), float(value)
    if not isinstance(value, tuple):
        return value, None
    named = value.named if isinstance(value, Part) else ()
    inner = value.arguments if isinstance(value, Part) else value
    given = [*inner, *(each for _, each in named)]

    # From the last by position; numbers by name come after these, and those of parts last.
    def order(i: int) -> tuple[bool, bool, int]:
        return _is_number(given[i]), i < len(inner), i

    for i in sorted(range(len(given)), key=order, reverse=True):
        given[i], number = _cut(given[i])
        if number is not None:
            break
    else:
        return value, None
    arguments = tuple(given[: len(inner)])
    if not isinstance(value, Part):
        return arguments, number
    names = [name for name, _ in named]
    cut = tuple(zip(names, given[len(inner) :], strict=True))
    return value._replace(arguments=arguments, named=cut), number


def _in_gin(value: Any, known: Mapping[str, Any], scope: str) -> tuple[str, dict[str, str]]:
    """A value as gin code, and the bindings that it needs."""
    if isinstance(value, Part):
        name = value.name.rpartition(".")[2]
        return f"@{scope}{name}()", value.bindings(known, scope)
    if not isinstance(value, tuple):
        return repr(value), {}
    texts: list[str] = []
    found: dict[str, str] = {}
    for i, each in enumerate(value):
        text, below = _in_gin(each, known, f"{scope[:-1]}_{i}/")
        texts.append(text)
        found |= below
    return f"({', '.join(texts)}{',' * (len(texts) == 1)})", found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
