"""gin files and overrides for the commands: `--gin_file=FILE --gin.NAME=value`.

gin parses the statements. This module finds the files, among them the recipes of specjax, rejects
unused names, and reports errors in one line. A gin file defines first the names (macros) that
users must give, then those that they often override, each below a comment that describes it:

    # A directory.
    DATA_DIR = %gin.REQUIRED
    # Number of updates.
    NUM_STEPS = 20_000

Only this module imports gin.
"""

import argparse
import contextlib
import difflib
import inspect
import os
import re
import tokenize
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gin
from gin import config_parser
from gin.config import ConfigurableReference, ParserDelegate, iterate_references

from specjax.checks import in_names, one_line
from specjax.cli.help_format import SHIPPED, FullHelp, definitions, hint, names_and_files
from specjax.errors import REFUSALS, MissingFileError, UserError

# Files are also looked up in a parent folder of this name.
_ROOT = "gin_configs"
# The folder of the main files of the commands.
_RUNS = "runs"
_MODULE = "specjax"
_MACRO = "gin.macro"
_CONSTANT, _REQUIRED = "gin.constant", "%gin.REQUIRED"
# The errors that gin and Python raise for a malformed file.
_READING = (
    OSError, ImportError, RecursionError, ValueError, TypeError, SyntaxError, RuntimeError,
    tokenize.TokenError,
)  # fmt: skip
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# The functions and classes given to `register`, by name.
_configurables: dict[str, Callable[..., Any]] = {}
# The names bound on the command line.
_overrides: list[str] = []


def add_arguments(
    parser: argparse.ArgumentParser,
    default: str,
    groups: Mapping[str, str] | None = None,
) -> None:
    """Adds gin's options, named as in T5X; `specjax` also takes `--gin.NAME=VALUE`.

    `default` is the run file of the command, read first unless another run file is given. The help
    lists its names, and the files of `groups`: folder or pattern -> description.
    """
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a gin file: a path, or a name in the search paths or in specjax's gin_configs; "
        f"repeatable; files are read in order, after {default} unless another file of {_RUNS}/ is "
        "given",
    )
    parser.add_argument(
        "--gin_search_paths",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar="DIR,DIR",
        help="folders to search for gin files",
    )
    parser.add_argument(
        "--gin_bindings",
        dest="gin_binding",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a name of the gin files, or a parameter such as AdamW.weight_decay; repeatable; "
        "short form: --gin.NAME=VALUE",
    )
    parser.set_defaults(default_gin_file=default)
    parser.add_argument(
        "--helpfull",
        action=FullHelp,
        nargs=0,
        const=(default, groups or {}),
        default=argparse.SUPPRESS,
        help="show all names, and what each gin file is for",
    )
    parser.epilog = "\n".join(names_and_files(default, groups or {}, full=False))


def configure_from(args: argparse.Namespace) -> None:
    """Calls `configure` with the options of `add_arguments`."""
    configure(args.gin_file, args.gin_binding, args.gin_search_paths, args.default_gin_file)


def recorder(args: argparse.Namespace) -> Callable[..., None]:
    """Returns a function `on_start(run, paths=None)` that records how a run was started."""

    def record(run: Any, paths: Any = None) -> None:
        run.record(command=args.command_line, config=operative_config(), paths=paths)

    return record


def register(*configurables: Callable[..., Any], **named: Callable[..., Any]) -> None:
    """Makes functions and classes configurable; repeated calls are allowed.

    A gin file may pass a function on without calling it, as in `infer.make_decoder =
    @make_decoder`. Its required arguments must then be bound.
    """
    for name, configurable in ({c.__name__: c for c in configurables} | named).items():
        _configurables[name] = configurable
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
      files: gin files, each a path or a name in the search paths, in the folders of the other
        files, or in specjax's gin_configs (`runs/infer.gin`).
      bindings: `NAME=value`, from the command line. A value that gin cannot parse is a string, so
        paths need no quotes.
      search_paths: folders to search for files and includes.
      default: the file to read first, unless `files` or their includes have a file of `runs`.
    """
    for folder in search_paths:
        if not os.path.isdir(folder):
            raise MissingFileError(f"--gin_search_paths: {folder} is not a folder: check the path")
    reader = _Reader(files, search_paths)
    if default is not None and not any(path.parent.name == _RUNS for path in reader.read):
        reader = _Reader([default, *files], search_paths)
    _overrides[:] = [binding.partition("=")[0].strip() for binding in bindings]
    for binding in bindings:
        reader.override(binding)
    reader.check_names()


def _files_with(names: Collection[str]) -> str:
    """Returns a hint at the networks or tasks that define all these names; "" without."""
    files: dict[str, list[str]] = {}
    for path in sorted(SHIPPED.glob("[mt]*/*.gin")) if names else []:
        text = path.read_text(encoding="utf-8")
        if all(re.search(rf"^{re.escape(name)} *=", text, re.M) for name in names):
            files.setdefault(path.parent.name, []).append(path.stem)
    wanted = [f"--gin_file={at}/NAME.gin, NAME: {', '.join(all_)}" for at, all_ in files.items()]
    return f"add {' or '.join(wanted)}" if wanted else ""


def _near_file(name: str) -> str:
    """Returns a hint at the files of specjax with a similar name; "" without one."""
    paths = [path.relative_to(SHIPPED) for path in sorted(SHIPPED.glob("[!.]*/**/*.gin"))]
    paths = [path for path in paths if path.parts[0] != "t5x"]  # read by T5X's programs
    near = difflib.get_close_matches(Path(name).stem, [path.stem for path in paths], n=1)
    names = [path.as_posix() for path in paths if path.stem in near]
    return f"did you mean {' or '.join(names)}?" if names else ""


class _Reader(ParserDelegate):
    """Clears gin's configuration and reads gin files into it.

    Attributes:
      read: the files read so far, includes among them.
      defined: the names (macros) that these files define.
      used: those that values refer to.
    """

    def __init__(self, files: Sequence[str], search_paths: Sequence[str]) -> None:
        super().__init__()
        gin.clear_config()
        self.read: list[Path] = []
        self.defined: set[str] = set()
        self.used: set[str] = set()
        self._folders = list(search_paths)
        for file in files:
            self._look_around(Path(file))
        for file in files:
            self._include(file, f"--gin_file={file}", [])

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        _check_known(scoped_configurable_name.rpartition("/")[2])
        return super().configurable_reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Any:
        macro = super().macro(macro_name)
        if macro.configurable.selector == _MACRO:  # not a constant
            self.used.add(macro_name)
        return macro

    def _include(self, name: str, place: str, within: list[Path]) -> None:
        path = self._find(name, place)
        if path in within:
            raise _NamedError(
                f"{path}: this gin file includes itself, directly or through others: remove the "
                "include"
            )
        self.read.append(path)
        self._look_around(path)
        with path.open(encoding="utf-8") as file, _naming(str(path)):
            statements = config_parser.ConfigParser(file, self)
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
        """Adds the folders to search for the includes of a file."""
        if file.is_file():
            folder = file.absolute().parent
            roots = [parent for parent in folder.parents if parent.name == _ROOT]
            self._folders += [str(x) for x in (*roots, folder) if str(x) not in self._folders]

    def _find(self, name: str, place: str) -> Path:
        candidates = (Path(folder, name) for folder in ("", *self._folders, str(SHIPPED)))
        file = next((path for path in candidates if path.is_file()), None)
        if file is not None:
            return file.absolute()
        if Path(name).is_dir():
            raise IsADirectoryError(f"{place}: this is a directory: give the path of a file")
        remedy = _near_file(name) or "give its full path, or add its folder to --gin_search_paths"
        folders = ", ".join((".", *self._folders, str(SHIPPED)))
        raise MissingFileError(f"{place}: file not found in {folders}; {remedy}")

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
        """Binds an existing name to a value; a value that gin cannot parse is a string."""
        name, equals, value = (part.strip() for part in binding.partition("="))
        if not equals:
            raise UserError(f"--gin.{binding}: the form must be --gin.NAME=value")
        if "\n" in binding or "\r" in binding:
            raise UserError(f"--gin.{name}: the value has a line break: write it in one line")
        if "." not in name and name not in self.defined | self.used:
            absent = ", ".join(sorted(self.used - self.defined))
            rest = f"; they use {absent}: add the file that defines these names" if absent else ""
            names = f"the gin files define {', '.join(sorted(self.defined)) or 'no names'}{rest}"
            remedy = hint(name, self.defined, _files_with([name]) or names)
            raise UserError(f"--gin.{name}: no such name; {remedy}")
        with _naming(f"--gin.{name}"):
            try:
                statements = [*config_parser.ConfigParser(f"{name} = {value}", self)]
            except (SyntaxError, tokenize.TokenError):
                if value[:1] in ("@", "%"):
                    raise UserError(f"{value} is not a valid gin reference") from None
                statements = [*config_parser.ConfigParser(f"{name} = {value!r}", self)]
            for statement in statements:
                self._execute(statement)

    def check_names(self) -> None:
        """Raises UserError for a name that is used but not defined, or defined but not used.

        Names of other commands may be unused, so a single file can describe a whole task.
        """
        used = self.used
        others = {name for file in (SHIPPED / _RUNS).glob("*.gin") for name in definitions(file)}
        if unused := sorted(self.defined - used - others):
            raise UserError(
                f"the gin files define but do not use {', '.join(unused)}; "
                + hint(unused[0], used, "delete it")
            )
        if undefined := sorted(used - self.defined):
            raise UserError(
                f"the gin files use but do not define %{undefined[0]}; add the file that defines "
                f"it, or --gin.{undefined[0]}=..."
            )


class _NamedError(UserError):
    """Its message names the file and line, or the option."""


@contextlib.contextmanager
def _naming(place: str, parser: Any = None) -> Iterator[None]:
    """Turns errors of gin and Python into one line that begins with the file or option."""

    def named(text: str) -> _NamedError:
        line = "" if parser is None else f":{parser.current_token.start[0]}"
        return _NamedError(f"{place}{line}: {text}")

    try:
        yield
    except (_NamedError, FileNotFoundError, IsADirectoryError):
        raise
    except RecursionError:
        raise named("the value is nested too deeply: simplify it") from None
    except ImportError as error:
        raise named(
            f"{one_line(error)}; install the module, or add its folder to PYTHONPATH"
        ) from None
    except SyntaxError as error:
        raise named(error.msg) from None
    except _READING as error:
        raise named(one_line(error)) from None


def _check_known(name: str, parameter: str | None = None) -> None:
    """Raises UserError unless gin has a function or class of this name, with this parameter."""
    plain = name.rpartition(".")[2]
    try:
        gin.get_configurable(name)
    except ValueError:
        known = (
            f"the known names are {', '.join(sorted(_configurables))}; rules and other parts of "
            "decoding are texts, such as RULE = 'OPT(0.2)'"
        )
        raise UserError(
            f"{name} is not a function or class for gin files; {hint(plain, _configurables, known)}"
        ) from None
    if parameter is not None and plain in _configurables:
        parameters = dict(inspect.signature(_configurables[plain]).parameters)
        variadic = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if parameter not in parameters and not variadic:
            remedy = hint(parameter, parameters, f"its parameters are {', '.join(parameters)}")
            raise UserError(f"{plain} has no parameter {parameter}; {remedy}")


def call(
    configurable: Callable[..., Any],
    *first: Any,
    before: Callable[[], None] = lambda: None,
    parts: Mapping[Callable[..., Any], Sequence[str]] = MappingProxyType({}),
    **arguments: Any,
) -> Any:
    """Calls a registered function with its configured arguments.

    Args:
      configurable: the function.
      *first: its first arguments; bindings of these are not evaluated.
      before: called before the bindings are evaluated.
      parts: the functions that it calls by `call_part`, with the parameters that it gives them.
      **arguments: further arguments, passed unchanged.
    """
    name = next(name for name, function in _configurables.items() if function is configurable)
    walk = _Walk()
    passed = [*list(inspect.signature(configurable).parameters)[: len(first)], *arguments]
    walk.start(f"{_MODULE}.{name}", configurable, passed)
    for part, names in parts.items():
        walk.start(f"{_MODULE}.{part.__name__}", part, names)
    walk.check_overrides(_overrides)
    try:
        before()
        return gin.get_configurable(configurable)(*first, **arguments)
    except REFUSALS as error:
        raise UserError(walk.in_names_of_files(one_line(error))) from error
    except RecursionError:
        raise UserError("the gin files define a value by itself: change one of them") from None


class _Walk:
    """Finds the bindings of gin's configuration that a call will read, before the call."""

    def __init__(self) -> None:
        # The scopes and selectors of what is called.
        self._done: set[tuple[tuple[str, ...], str]] = set()
        self._missing: list[str] = []
        # Parameter -> the names (macros) bound to it; of a command's own function without one, such
        # as load_models.check_weights, this text.
        self._names: dict[str, set[str]] = {}
        self._own_names: dict[str, set[str]] = {}

    def start(self, selector: str, function: Callable[..., Any], passed: Sequence[str]) -> None:
        """Follows all references from a function that will be called with parameters `passed`."""
        self._follow((), selector, function, passed)
        if not self._missing:
            return
        # Names of gin files first: the files describe them.
        names = sorted(dict.fromkeys(self._missing), key=lambda name: "." in name)
        users = [name for name in names if "." not in name or not _files_with([name])]
        remedies = [_files_with([name for name in names if name not in users])]
        if users:
            wanted = " ".join(f"--gin.{name}=..." for name in users)
            what = "it" if len(users) == 1 else "them"
            remedies[:0] = [f"add a gin file that defines {what}, or {wanted}"]
        remedy = "; ".join(filter(None, remedies))
        raise UserError(f"required but not given: {', '.join(names)}; {remedy}")

    def _follow(
        self,
        scopes: tuple[str, ...],
        selector: str,
        function: Callable[..., Any] | None,
        passed: Sequence[str] = (),
    ) -> None:
        """Notes what a function reads, and its missing arguments; None: a name, or unknown."""
        if (scopes, selector) in self._done:
            return
        self._done.add((scopes, selector))
        # The name of gin files, or the function.
        shown = "/".join(scopes) if selector == _MACRO else selector.rpartition(".")[2]
        bindings = gin.get_bindings("/".join((*scopes, selector)), resolve_references=False)
        parameters = {} if function is None else inspect.signature(function).parameters
        is_own = str(getattr(function, "__module__", "")).startswith("specjax.cli.")
        for name, parameter in parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
            if needed and name not in {*bindings, *passed}:
                self._missing.append(f"{shown}.{name}")
            if is_own and "_" in name and name not in passed:
                self._own_names.setdefault(name, set()).add("/".join((*scopes, f"{shown}.{name}")))
        for parameter, value in bindings.items():
            if parameter in passed:
                continue
            if isinstance(value, ConfigurableReference) and str(value).startswith("%"):
                self._names.setdefault(parameter, set()).add(str(value)[1:])
            if str(value) == _REQUIRED:
                self._missing.append(shown)
            for reference in iterate_references(value):
                target = reference.configurable
                # A user's function that is passed on may get arguments from its caller.
                known = reference.evaluate or target.wrapped in _configurables.values()
                called = target.wrapped if known and target.selector != _MACRO else None
                if target.selector != _CONSTANT:
                    self._follow(tuple(reference.scopes) or scopes, target.selector, called)

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Raises UserError for an override of a parameter that nothing reads.

        A user's own functions are not checked, because Python code may call them.
        """
        # gin reads the bindings of all enclosing scopes.
        used = {
            ("/".join(scopes[:i]), selector)
            for scopes, selector in self._done
            for i in range(len(scopes) + 1)
        }
        for name in (name for name in overrides if "." in name):
            scope, selector, _ = config_parser.parse_binding_key(name)
            plain = selector.removeprefix(f"{_MODULE}.")
            if plain in _configurables and (scope, f"{_MODULE}.{plain}") not in used:
                where = f" in the scope {scope}" if scope else ""
                raise UserError(
                    f"--gin.{name}: {selector}{where} is not used: leave it out, or select the "
                    "component that uses it"
                )

    def in_names_of_files(self, text: str) -> str:
        """Replaces parameters in a message by the names of the gin files."""
        names = self._own_names | self._names
        text = in_names(text, {x: min(all_) for x, all_ in names.items() if len(all_) == 1})
        meant = re.search(r"must be like .*, got '(\w+)'$", text)
        return f"{text}: write @{meant[1]}()" if meant and meant[1] in _configurables else text


def value_of(parameter: str) -> Any:
    """Returns the value bound to a parameter; None if nothing is bound."""
    try:
        value = gin.query_parameter(parameter)
    except ValueError:
        return None
    if isinstance(value, ConfigurableReference) and value.evaluate:
        return value.scoped_configurable_fn()
    return value


def operative_config() -> str:
    """Returns the values of all parameters that the calls so far have read, as gin code."""
    return gin.operative_config_str()


def whole_config() -> str:
    """Returns all bindings as gin code, for `parse` in another process."""
    return gin.config_str()


def parse(config: str) -> None:
    """Replaces the configuration by that of `whole_config`."""
    gin.clear_config()
    gin.parse_config(config)


def call_part(configurable: Callable[..., Any], *first: Any, **arguments: Any) -> Any:
    """Calls a registered function without checking that it uses every override."""
    return gin.get_configurable(configurable)(*first, **arguments)
