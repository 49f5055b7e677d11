"""gin files and overrides for the commands: `--gin_file=FILE --gin.NAME=value`.

gin reads the statements of the files; what stands here finds the files, the recipes that specjax
ships among them, refuses names that nothing uses, and says what is wrong in one line. A gin file
lists on top the names (macros) that must be given, then those that one commonly overrides, each
below a comment that says what it is:

    # A directory.
    DATA_DIR = %gin.REQUIRED
    # Updates in all.
    NUM_STEPS = 20_000

gin is imported here and nowhere in the library.
"""

import argparse
import contextlib
import inspect
import os
import re
import tokenize
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config_parser
from gin.config import ConfigurableReference, ParserDelegate, iterate_references

from specjax.checks import check_path
from specjax.cli.failures import is_refusal, one_line
from specjax.cli.help_format import SHIPPED, definitions, names_and_files
from specjax.cli.renamed import hint
from specjax.runs.processes import LostProcessError

# A file is also looked up in the folder of this name above any other gin file.
_ROOT = "gin_configs"
# The folder of the files that say all of a command.
_RUNS = "runs"
_MODULE = "specjax"
_MACRO = "gin.macro"
_CONSTANT, _REQUIRED = "gin.constant", "%gin.REQUIRED"
# What gin and Python raise while they read.
_READING = (
    OSError, ImportError, RecursionError, ValueError, TypeError, SyntaxError, RuntimeError,
    tokenize.TokenError,
)  # fmt: skip
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# What `register` has made configurable, by name.
_registered: dict[str, Callable[..., Any]] = {}
# The names that the command line has bound.
_overrides: list[str] = []


def add_arguments(
    parser: argparse.ArgumentParser,
    default: str,
    groups: Mapping[str, str] | None = None,
) -> None:
    """Adds gin's options, named as in T5X; `specjax` also takes `--gin.NAME=VALUE`.

    Args:
      parser: of the command.
      default: the run file of the command, which is read first unless another one is given. Its
        names are listed below the options.
      groups: folder of shipped gin files, or a pattern of their names -> what they are; listed with
        the names that they add.
    """
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a gin file, looked up here, in the search paths and among specjax's own; may be "
        f"repeated; read in order, after {default} unless another file of {_RUNS}/ is given",
    )
    parser.add_argument(
        "--gin_search_paths",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar="DIR,DIR",
        help="folders in which gin files are looked up",
    )
    parser.add_argument(
        "--gin_bindings",
        dest="gin_binding",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a name of the gin files, or a parameter such as AdamW.weight_decay; may be "
        "repeated; short: --gin.NAME=VALUE",
    )
    parser.set_defaults(default_gin_file=default)
    parser.epilog = "\n".join(names_and_files(default, groups or {}))


def configure_from(args: argparse.Namespace) -> None:
    """Like `configure`, with what `add_arguments` has added."""
    configure(args.gin_file, args.gin_binding, args.gin_search_paths, args.default_gin_file)


def recorder(args: argparse.Namespace) -> Callable[..., None]:
    """A function `on_start(run, paths=None)` that records how a run was started."""

    def record(run: Any, paths: Any = None) -> None:
        run.record(command=args.command_line, config=operative_config(), paths=paths)

    return record


def register(*configurables: Callable[..., Any], **named: Callable[..., Any]) -> None:
    """Makes library functions and classes configurable; those that are already stay so.

    Where a gin file hands over one of them to be called later, as in `infer.make_decoder =
    @Decoder`, the caller gives no argument that it needs.

    Args:
      *configurables: under their own names.
      **named: under these names.
    """
    for name, configurable in ({c.__name__: c for c in configurables} | named).items():
        _registered[name] = configurable
        try:
            gin.get_configurable(configurable)
        except ValueError:
            gin.external_configurable(configurable, name=name, module=_MODULE)


def configure(
    files: Sequence[str],
    bindings: Sequence[str],
    search_paths: Sequence[str] = (),
    default: str | None = None,
) -> None:
    """Reads gin files and overrides into gin's global configuration.

    Args:
      files: gin files, each a path or a name that is found in the search paths, in the folders of
        the other files, or among the recipes that specjax ships (`runs/infer.gin`).
      bindings: `NAME=value`, from the command line. A value that gin cannot read is taken as a
        string, so that paths need no quotes.
      search_paths: folders in which files and includes are looked up.
      default: the file that is read first, unless one of the files is, or includes, a file of a
        folder `runs`.

    Raises:
      OSError: a gin file or an included file is not found.
      ValueError: a syntax error, an unknown name, or a name that nothing uses; one line.
    """
    for folder in search_paths:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"--gin_search_paths: {folder} is not a folder")
    for path in files:
        check_path(path, "--gin_file=")
    reader = _Reader(files, search_paths)
    if default is not None and not any(path.parent.name == _RUNS for path in reader.read):
        reader = _Reader([default, *files], search_paths)
    _overrides[:] = [binding.partition("=")[0].strip() for binding in bindings]
    for binding in bindings:
        reader.override(binding)
    reader.check_names()


class _Delegate(ParserDelegate):
    """Makes references as gin does; notes which names are used, and refuses unknown ones."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        name = scoped_configurable_name.rpartition("/")[2]
        _check_known(name)
        return super().configurable_reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Any:
        found = super().macro(macro_name)
        if found.configurable.selector == _MACRO:  # else a constant
            self.used.add(macro_name)
        return found


class _Reader:
    """Reads gin files into gin's configuration, which it clears.

    Args:
      files: see `configure`.
      search_paths: see `configure`.

    Attributes:
      read: the files that were read, with those that they include.
      defined: the names (macros) that they define.
    """

    def __init__(self, files: Sequence[str], search_paths: Sequence[str]) -> None:
        gin.clear_config()
        self.read: list[Path] = []
        self.defined: set[str] = set()
        self._delegate = _Delegate()
        self._folders = list(search_paths)
        for file in files:
            self._look_around(Path(file))
        for file in files:
            self._include(file, f"--gin_file={file}", [])

    def _include(self, name: str, place: str, within: list[Path]) -> None:
        path = self._find(name, place)
        if path in within:
            raise _NamedError(
                f"{path}: this gin file includes itself, perhaps by way of others: remove the "
                "include"
            )
        self.read.append(path)
        self._look_around(path)
        with path.open(encoding="utf-8") as file, _naming(str(path)):
            statements = config_parser.ConfigParser(file, self._delegate)
            while True:
                with _naming(str(path), statements):
                    statement: Any = next(statements, None)
                if statement is None:
                    return
                place = f"{path}:{statement.location.line_num}"
                if isinstance(statement, config_parser.IncludeStatement):
                    included = f"{place}: include {statement.filename!r}"
                    self._include(statement.filename, included, [*within, path])
                else:
                    with _naming(place):
                        self._execute(statement)

    def _look_around(self, file: Path) -> None:
        """Adds the folders in which the includes of a file are looked up."""
        if file.is_file():
            folder = file.absolute().parent
            roots = [parent for parent in folder.parents if parent.name == _ROOT]
            self._folders += [str(x) for x in (*roots, folder) if str(x) not in self._folders]

    def _find(self, name: str, place: str) -> Path:
        candidates = (Path(folder, name) for folder in ("", *self._folders, str(SHIPPED)))
        found = next((path for path in candidates if path.is_file()), None)
        if found is not None:
            return found.absolute()
        remedy = hint(name, (), "give its full path, or its folder in --gin_search_paths")
        raise FileNotFoundError(
            f"{place}: no such file, neither here nor in {[*self._folders, str(SHIPPED)]}; {remedy}"
        )

    def _execute(self, statement: Any) -> None:
        if isinstance(statement, config_parser.ImportStatement):
            gin.parse_config(statement.format())
        elif isinstance(statement, config_parser.BlockDeclaration):
            _check_known(statement.selector)
        elif statement.arg_name:
            _check_known(statement.selector, statement.arg_name)
            gin.bind_parameter(statement[:3], statement.value)
        else:
            name = "/".join(filter(None, statement[:2]))
            self.defined.add(name)
            gin.bind_parameter((name, _MACRO, "value"), statement.value)

    def override(self, binding: str) -> None:
        """Binds `NAME=value`, a name that exists to what gin reads from the value, or its text."""
        name, equals, value = (part.strip() for part in binding.partition("="))
        if not equals:
            raise ValueError(f"--gin.{binding}: must have the form --gin.NAME=value")
        if "\n" in binding or "\r" in binding:
            raise ValueError(f"--gin.{name}: the value has a line break: give it in one line")
        if "." not in name and name not in self.defined | self._delegate.used:
            absent = ", ".join(sorted(self._delegate.used - self.defined))
            rest = f"; they use {absent}: add the file that defines these" if absent else ""
            known = f"the gin files define {', '.join(sorted(self.defined)) or 'none'}{rest}"
            raise ValueError(f"--gin.{name}: no such name; {hint(name, self.defined, known)}")
        with _naming(f"--gin.{name}"):
            try:
                statements = self._parsed(f"{name} = {value}")
            except (SyntaxError, tokenize.TokenError):
                if value[:1] in ("@", "%"):
                    raise ValueError(f"{value} is not a gin reference") from None
                statements = self._parsed(f"{name} = {value!r}")
            for statement in statements:
                self._execute(statement)

    def _parsed(self, text: str) -> list[Any]:
        return list(config_parser.ConfigParser(text, self._delegate))

    def check_names(self) -> None:
        """Raises ValueError unless each name is defined and used, here or by another command.

        So one file can say all of a task, from its prompts to its metrics.
        """
        used = self._delegate.used
        others = {name for file in (SHIPPED / _RUNS).glob("*.gin") for name in definitions(file)}
        if unused := sorted(self.defined - used - others):
            raise ValueError(
                f"the gin files define {', '.join(unused)}, which nothing in them uses; "
                + hint(unused[0], used, "delete it")
            )
        if undefined := sorted(used - self.defined):
            raise ValueError(
                f"the gin files use %{undefined[0]}, but none defines it; add the file that does, "
                f"or --gin.{undefined[0]}=..."
            )


class _NamedError(ValueError):
    """Names the file and the line, or the option."""


@contextlib.contextmanager
def _naming(place: str, parser: Any = None) -> Iterator[None]:
    """Turns what gin and Python raise while they read into one line that begins with a place."""

    def named(text: str) -> _NamedError:
        line = "" if parser is None else f":{parser.current_token.start[0]}"
        return _NamedError(f"{place}{line}: {text}")

    try:
        yield
    except (_NamedError, FileNotFoundError):
        raise
    except RecursionError:
        raise named("the value is nested too deeply: give a flat one") from None
    except ImportError as error:
        raise named(
            f"{one_line(error)}; install what is imported, or name its folder in PYTHONPATH"
        ) from None
    except SyntaxError as error:
        raise named(error.msg) from None
    except _READING as error:
        raise named(one_line(error)) from None


def _check_known(name: str, parameter: str | None = None) -> None:
    """Raises ValueError unless gin has a function or class of this name, with this parameter."""
    plain = name.rpartition(".")[2]
    try:
        gin.get_configurable(name)
    except ValueError:
        known = f"gin files can name {', '.join(sorted(_registered))}"
        raise ValueError(
            f"{name} is no function or class that gin can use; {hint(plain, _registered, known)}"
        ) from None
    if parameter is not None and plain in _registered:
        parameters = dict(inspect.signature(_registered[plain]).parameters)
        parameters.pop("unknown", None)  # `Decoder` takes these to refuse them
        variadic = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if parameter not in parameters and not variadic:
            known = f"it has {', '.join(parameters)}"
            raise ValueError(f"{plain} has no {parameter}; {hint(parameter, parameters, known)}")


def call(
    configurable: Callable[..., Any],
    *first: Any,
    before: Callable[[], None] = lambda: None,
    **arguments: Any,
) -> Any:
    """Calls a registered function with its configured arguments.

    Args:
      configurable: the function.
      *first: its first arguments; what is bound to them is not evaluated.
      before: is called before anything that is bound is evaluated.
      **arguments: given to it as they are.

    Returns:
      What it returns.

    Raises:
      ValueError: a required name has no value, an argument has none, a name is defined by itself,
        or an override binds what nothing uses; or the function refuses a value. Names of gin
        files stand in the place of parameters to which they are bound. Errors that specjax has
        not made itself pass as they are.
    """
    name = next(name for name, known in _registered.items() if known is configurable)
    walk = _Walk()
    given = [*list(inspect.signature(configurable).parameters)[: len(first)], *arguments]
    walk.start(f"{_MODULE}.{name}", configurable, given)
    walk.check_overrides(_overrides)
    try:
        before()
        return gin.get_configurable(configurable)(*first, **arguments)
    except LostProcessError:
        raise
    except Exception as error:
        if not is_refusal(error):
            raise
        raise ValueError(walk.in_names_of_files(one_line(error))) from error


class _Walk:
    """Which bindings of gin's configuration a call will read, found before the call."""

    def __init__(self) -> None:
        self._done: set[_Key] = set()
        self._used: set[tuple[str, str]] = set()
        self._handed_over: list[tuple[tuple[str, ...], ConfigurableReference]] = []
        self._missing: list[str] = []
        # Parameter -> the names (macros) that are bound to it, in all that is called.
        self._names: dict[str, set[str]] = {}

    def start(self, selector: str, function: Callable[..., Any], given: Sequence[str]) -> None:
        """Follows all references from a function that will be called.

        Args:
          selector: its name in gin.
          function: it.
          given: the parameters that the caller gives.

        Raises:
          ValueError: a name refers to itself, or a required name or an argument has no value.
        """
        self._follow(((), selector), function, [], given)
        while self._handed_over:  # each by itself: handing over a function does not call it
            scopes, reference = self._handed_over.pop()
            wrapped = reference.configurable.wrapped
            # Who calls a user's own function may give it arguments.
            called = wrapped if wrapped in _registered.values() else None
            self._follow((scopes, reference.configurable.selector), called, [])
        if self._missing:
            # First the names of files, which say what they are.
            names = sorted(dict.fromkeys(self._missing), key=lambda name: "." in name)
            raise ValueError(
                f"required but not given: {', '.join(names)}; add a gin file that gives "
                f"{'it' if len(names) == 1 else 'them'}, or "
                + " ".join(f"--gin.{name}=..." for name in names)
            )

    def _follow(
        self,
        key: "_Key",
        function: Callable[..., Any] | None,
        path: list["_Key"],
        given: Sequence[str] = (),
    ) -> None:
        if key in path:
            circle = [*path[path.index(key) :], key]
            raise ValueError(
                f"the gin files define {_shown(key)} by itself "
                f"({' -> '.join(map(_shown, circle))}): give one of them another value"
            )
        if key in self._done:
            return
        self._done.add(key)
        scopes, selector = key
        # As gin looks them up: the inner scope overrides.
        self._used |= {("/".join(scopes[:i]), selector) for i in range(len(scopes) + 1)}
        bindings = gin.get_bindings("/".join((*scopes, selector)), resolve_references=False)
        self._note_missing(key, function, {*bindings, *given})
        for parameter, value in bindings.items():
            if parameter in given:
                continue
            if isinstance(value, ConfigurableReference) and str(value).startswith("%"):
                self._names.setdefault(parameter, set()).add(str(value)[1:])
            if str(value) == _REQUIRED:
                self._missing.append(_shown(key).removeprefix("%"))
            for reference in iterate_references(value):
                inner = tuple(reference.scopes) or scopes
                target = reference.configurable
                if not reference.evaluate:
                    self._handed_over.append((inner, reference))
                elif target.selector != _CONSTANT:
                    self._follow((inner, target.selector), target.wrapped, [*path, key])

    def _note_missing(
        self, key: "_Key", function: Callable[..., Any] | None, known: Collection[str]
    ) -> None:
        if function is None or key[1] == _MACRO:
            return
        for name, parameter in inspect.signature(function).parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
            if needed and name not in known:
                self._missing.append(f"{_shown(key)}.{name}")

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Raises ValueError if the command line has bound a parameter that nothing reads.

        A user's own function may be called in Python, too.
        """
        for name in (name for name in overrides if "." in name):
            scope, selector, _ = config_parser.parse_binding_key(name)
            plain = selector.removeprefix(f"{_MODULE}.")
            if plain in _registered and (scope, f"{_MODULE}.{plain}") not in self._used:
                where = f" in the scope {scope}" if scope else ""
                raise ValueError(
                    f"--gin.{name}: nothing here uses {selector}{where}: leave it out, or choose "
                    "what it belongs to"
                )

    def in_names_of_files(self, text: str) -> str:
        """A message, with the names of gin files in the place of parameters."""
        for parameter, names in self._names.items():
            if len(names) > 1:
                continue
            word = rf"\b{re.escape(parameter)}\b"
            if "_" not in parameter:
                # A word of English is a parameter where it is marked as one.
                word = rf"(?:^|(?<=: )){word}(?= must\b| is\b)|(?<=`){word}(?=`)|{word}(?==)"
            text = re.sub(word, next(iter(names)), text)
        return text


_Key = tuple[tuple[str, ...], str]


def _shown(key: _Key) -> str:
    scopes, selector = key
    return "%" + "/".join(scopes) if selector == _MACRO else selector.rpartition(".")[2]


def value_of(parameter: str, default: Any = None) -> Any:
    """What is bound to a parameter, a name by its value; `default` for nothing."""
    try:
        found = gin.query_parameter(parameter)
    except ValueError:
        return default
    if isinstance(found, ConfigurableReference) and found.evaluate:
        return found.scoped_configurable_fn()
    return found


def operative_config() -> str:
    """The values of all parameters that the calls so far have read, in gin's language."""
    return gin.operative_config_str()


def call_part(configurable: Callable[..., Any], *first: Any, **arguments: Any) -> Any:
    """Like `call`, for a part of what the overrides are for: some may belong to other parts."""
    return gin.get_configurable(configurable)(*first, **arguments)


def binding_of(parameter: str) -> str:
    """What is bound to a parameter, as "%MAX_DRAFT" to `Decoder.max_draft`; "None" for nothing."""
    try:
        return str(gin.query_parameter(parameter))
    except ValueError:
        return "None"
