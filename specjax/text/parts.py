"""Parts of a setting and their texts.

A text such as `Survival(OnlineEstimate(shared=True), 0.6)` calls classes with literals and other
parts, in Python's notation. So a part is a plain value, which can be compared, hashed, and written
in JSON and gin files. A text is data: it names only the classes of `PARTS`, and nothing is imported
or evaluated to read it.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafting, processors, rules, verification
from specjax.decoding import BiLDCascade, OracleCascade, SequenceCascade, TokenCascade
from specjax.errors import UserError

PLACE = "{}"
_EXAMPLE = "write a text such as 'OPT(0.2)'"
# Limits of a text, for texts of strangers.
_LONGEST, _DEEPEST, _LARGEST = 100_000, 50, 2**63
_NOTHING = object()


@dataclasses.dataclass(frozen=True)
class VerifierAlone:
    """The verifier decodes by itself, token by token: the baseline."""


@dataclasses.dataclass(frozen=True)
class DrafterAlone:
    """The drafter decodes by itself, token by token."""


# The methods in which a single model writes at a time.
CASCADES = (TokenCascade, BiLDCascade, OracleCascade, SequenceCascade)
# What a text may name, by the field of `Setting`; then the parts of other parts.
BY_FIELD: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "rule": (*rules.ALL_RULES, rules.Budgeted, *rules.SEQUENTIAL_RULES),
        "verification": verification.ALL_VERIFICATIONS,
        "stopping": drafting.ALL_POLICIES,
        "drafting": drafting.ALL_DRAFTS,
        "method": (*CASCADES, VerifierAlone, DrafterAlone),
        "processors": processors.ALL_PROCESSORS,
        "": (*rules.ALL_AGGREGATIONS, *drafting.ALL_ESTIMATES),
    }
)
# Name -> class: all that a text may name. `register_part` adds the user's own.
PARTS: dict[str, type] = {one.__name__: one for kind in BY_FIELD.values() for one in kind}
SHIPPED = tuple(PARTS)
_Class = TypeVar("_Class", bound=type)


def register_part(kind: _Class) -> _Class:
    """Lets texts name a class of your own, in this process: `register_part(Mine)`, then `Mine(3)`.

    It is also a decorator. A class replaces an earlier one of its name, but no part of specjax.
    """
    if not isinstance(kind, type):
        raise UserError(f"register_part needs a class, got {kind!r}: write register_part(Mine)")
    same = {_plain(name): name for name in PARTS}.get(_plain(kind.__name__))
    if same is not None and PARTS[same] is kind:
        return kind
    if same in SHIPPED:
        raise UserError(f"register_part: {same} is a part of specjax: rename {kind.__qualname__}")
    if same is not None:
        del PARTS[same]
    PARTS[kind.__name__] = kind
    _made.cache_clear()
    return kind


class Part(NamedTuple):
    """A class and its arguments.

    Attributes:
      name: the name of the class, in `PARTS`.
      arguments: by position: numbers, texts, None, tuples and dicts of these, or parts.
      named: (name, value) of keyword arguments.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str, what: str = "the part", fields: Iterable[str] = ()) -> Self:
        """Reads a text.

        Classes get their standard names, and arguments without a default are given by position:
        `min_p(min_p=0.05)` is `MinP(0.05)`. A number that is written stays, even a default.

        Args:
          text: such as `OPT(0.2)`; a class without arguments needs no parentheses.
          what: its name in messages, and the field of `Setting` whose part it is.
          fields: several such fields.
        """
        if not isinstance(text, str):
            raise UserError(f"{what} must be a text such as 'OPT(0.2)', got {text!r}")
        if len(text) > _LONGEST:
            raise UserError(f"{what}={text!r} is too long: write at most {_LONGEST:,} characters")
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            node = None
        reader = _TextReader(f"{what}={text!r}", what)
        if not isinstance(node, ast.Name | ast.Attribute | ast.Call):
            raise reader.refused("is not a class with arguments")
        return cls(*reader.part(node, _DEEPEST, names_of(*(fields or (what,)))))

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """The part that makes an object: its real numbers, and what is not the default.

        None if its class is not in `PARTS`, or no text makes an equal part.
        """
        kind = type(value)
        if PARTS.get(kind.__name__) is not kind or not dataclasses.is_dataclass(kind):
            return None
        part = cls._written(value)
        try:
            again = None if part is None else cls._written(cls.parse(str(part)).make())
        except UserError:
            return None
        return part if part == again else None

    @classmethod
    def _written(cls, value: Any) -> Self | None:
        kind = type(value)
        arguments, named, is_next, last = [], [], True, 0
        for one in inspect.signature(kind).parameters.values():
            given = getattr(value, one.name, _NOTHING)
            held = _literal(given)
            if held is None and given is not None:
                return None
            is_next &= one.kind is one.POSITIONAL_OR_KEYWORD
            is_next &= one.default is one.empty or isinstance(held, float)
            if is_next:
                arguments.append(held)
                # Numbers at their defaults are needed only before others.
                usual = one.default is not one.empty and held == _literal(one.default)
                last = last if usual else len(arguments)
            elif one.default is one.empty or held != _literal(one.default):
                named.append((one.name, held))
        return cls(kind.__name__, tuple(arguments[: last or None]), tuple(named))

    def __str__(self) -> str:
        arguments = [_written(value) for value in self.arguments]
        arguments += [f"{name}={_written(value)}" for name, value in self.named]
        return f"{self.name}({', '.join(arguments)})" if arguments else self.name

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

    def make(self) -> Any:
        """Calls the class, which checks its arguments."""
        kind = PARTS[self.name]
        arguments = [_value_of(value) for value in self.arguments]
        named = {name: _value_of(value) for name, value in self.named}
        try:
            inspect.signature(kind).bind(*arguments, **named)
        except TypeError as error:
            raise UserError(f"{self.name}: {error}") from None
        return kind(*arguments, **named)


def make_part(field: str, value: Any) -> Any:
    """Makes the object of a field of `Setting` from its text; any other value stays."""
    return _made(field, value) if isinstance(value, str) else value


@functools.lru_cache(maxsize=4096)  # grids ask for the same few
def _made(field: str, text: str) -> Any:
    part = Part.parse(text, field)
    try:
        return part.make()
    except UserError as error:
        raise UserError(f"{field}={text!r}: {error}") from None


def _plain(name: str) -> str:
    """A name without what is ignored."""
    return name.replace("_", "").lower()


def registered_parts() -> tuple[type, ...]:
    """Returns the classes that the user has registered."""
    return tuple(kind for name, kind in PARTS.items() if name not in SHIPPED)


def names_of(*fields: str) -> list[str]:
    """Returns the parts of fields of `Setting`, or all, and the user's own."""
    shipped = [one.__name__ for field in fields for one in BY_FIELD.get(field, ())]
    return [*(shipped or SHIPPED), *(kind.__name__ for kind in registered_parts())]


class _TextReader(NamedTuple):
    """Reads the syntax tree of a text, which is `shown` in messages under the name `what`."""

    shown: str
    what: str

    def refused(self, why: str) -> UserError:
        return UserError(f"{self.shown} {why}: {_EXAMPLE}")

    def part(self, node: ast.expr, depth: int, names: Iterable[str] | None = None) -> Part:
        """A part; `names` are those that are allowed, by default all."""
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if isinstance(call.func, ast.Attribute):
            raise UserError(
                f"{self.shown} has a name with dots, and nothing is imported for a text: give your "
                "own class to specjax.register_part, and write its name without dots"
            )
        if not isinstance(call.func, ast.Name):
            raise self.refused("is not a class with arguments")
        known = {_plain(one): one for one in (PARTS if names is None else names)}
        name = known.get(_plain(call.func.id))
        if name is None:
            given, near = call.func.id, difflib.get_close_matches(_plain(call.func.id), known, n=1)
            if near:
                meant = known[near[0]]
                raise UserError(
                    f"{self.what}={given!r}: there is no such name; did you mean {meant}?"
                )
            if names is not None:
                raise UserError(f"{self.what} must be one of {', '.join(names)}, got {given!r}")
            raise UserError(
                f"{self.shown}: there is no part {given}: give your own class to "
                "specjax.register_part"
            )
        arguments = [self.value(each, depth - 1) for each in call.args]
        named: dict[str, Any] = {}
        for word in call.keywords:
            if word.arg is None or word.arg in named:
                raise self.refused("has an argument twice, or **")
            named[word.arg] = self.value(word.value, depth - 1)
        for one in list(inspect.signature(PARTS[name]).parameters.values())[len(arguments) :]:
            by_position = one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty
            if not by_position or one.name not in named:
                break
            arguments.append(named.pop(one.name))
        return Part(name, tuple(arguments), tuple(named.items()))

    def value(self, node: ast.expr | None, depth: int, *, in_dict: bool = False) -> Any:
        """A number, a text, True, False, None, a tuple or a dict of values, or a part.

        A dict has no parts, and its lists stay lists.
        """
        if depth <= 0:
            raise self.refused(f"is nested deeper than {_DEEPEST} levels")
        if isinstance(node, ast.Name | ast.Attribute | ast.Call) and not in_dict:
            return self.part(node, depth)
        if isinstance(node, ast.List) or (isinstance(node, ast.Tuple) and not in_dict):
            several = [self.value(each, depth - 1, in_dict=in_dict) for each in node.elts]
            return several if in_dict else tuple(several)
        if isinstance(node, ast.Dict):
            if any(isinstance(key, ast.Dict | ast.List) for key in node.keys):
                raise self.refused("has a dict whose key is no number or text")
            keys = [self.value(key, 1, in_dict=True) for key in node.keys]
            values = [self.value(each, depth - 1, in_dict=True) for each in node.values]
            return dict(zip(keys, values, strict=True))
        sign, signed = 1, isinstance(node, ast.UnaryOp)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            sign = -1 if isinstance(node.op, ast.USub) else 1
            node = node.operand
        value: Any = node.value if isinstance(node, ast.Constant) else ...
        if type(value) not in (bool, int, float, str, type(None)) or (
            signed and not _is_number(value)
        ):
            raise self.refused("has an argument that is not a literal")
        if type(value) is int and abs(value) >= _LARGEST:
            raise self.refused("has a number that is too large")
        return sign * value if _is_number(value) else value


def _written(value: Any) -> str:
    if isinstance(value, Part):
        return str(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' * (len(value) == 1)})"
    # Python writes "inf", which is a name.
    return repr(value).replace("inf", "1e999") if isinstance(value, float) else repr(value)


def _value_of(value: Any) -> Any:
    if isinstance(value, Part):
        return value.make()
    return tuple(map(_value_of, value)) if isinstance(value, tuple) else value


def _literal(value: Any) -> Any:
    """What `_value_of` turns into a value: a number, a text, a tuple, a dict or a part; or None."""
    if isinstance(value, np.ndarray | jax.Array) and np.ndim(value) == 1:
        return _literal(tuple(np.asarray(value)))
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not np.ndim(value):
        # As a user wrote it: 0.2, not the nearest float32.
        value = np.asarray(value)
        if value.dtype.kind in "biu":
            return value.item()
        return float(str(value)) if jnp.issubdtype(value.dtype, jnp.floating) else None
    if isinstance(value, dict):
        several = _literal(tuple(value.values()))
        return None if several is None else dict(zip(value, several, strict=True))
    if isinstance(value, tuple | list):
        several = [_literal(one) for one in value]
        if any(
            one is None and given is not None for one, given in zip(several, value, strict=True)
        ):
            return None
        return tuple(several) if isinstance(value, tuple) else several
    if type(value) in (bool, int, float, str):
        return value
    return Part.of(value)


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
    values = [*inner, *(each for _, each in named)]

    # From the last by position; numbers by name come after these, and those of parts last.
    def order(i: int) -> tuple[bool, bool, int]:
        return _is_number(values[i]), i < len(inner), i

    for i in sorted(range(len(values)), key=order, reverse=True):
        values[i], number = _cut(values[i])
        if number is not None:
            break
    else:
        return value, None
    arguments = tuple(values[: len(inner)])
    if not isinstance(value, Part):
        return arguments, number
    names = [name for name, _ in named]
    cut = tuple(zip(names, values[len(inner) :], strict=True))
    return value._replace(arguments=arguments, named=cut), number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
