"""gin files and overrides for the commands: `--gin_file=FILE --gin.NAME=value`.

gin reads the files; what stands here turns its errors into one line, finds the recipes that specjax
ships, and refuses names that nothing uses. A gin file lists on top the names (macros) that must be
given, then those that one commonly overrides, each below a comment that says what it is:

    # A directory.
    DATA_DIR = %gin.REQUIRED
    # Updates in all.
    NUM_STEPS = 20_000

gin is imported here and nowhere in the library.
"""

import argparse
import difflib
import itertools
import logging
import os
import re
import textwrap
import tokenize
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import resource_reader

from specjax.checks import check_path
from specjax.cli import gin_errors
from specjax.cli.failures import is_refusal
from specjax.cli.gin_references import check_references
from specjax.runs.processes import LostProcessError

_PACKAGE = Path(__file__).parents[1]
# The names that `register` has made configurable.
_configurables: set[str] = set()
_MODULE = "specjax"
# The names that the command line has bound.
_overrides: list[str] = []
# The recipes that are part of the package.
SHIPPED = _PACKAGE / "gin_configs"
# A file is also looked up in the folder of this name above any other gin file.
_ROOT = "gin_configs"
_DEFINITION = re.compile(r"^([A-Za-z_]\w*)\s*=\s*(.*)$")
_REFERENCE = re.compile(r"%([A-Za-z_]\w*)(?![\w.])")
# Python's words, and gin's for the name under which it knows what was called.
_MISSING = re.compile(
    r"missing \d+ required [^\n]*arguments?: ([^\n]*).*?In call to configurable '([\w.]+)'", re.S
)


def _is_in_a_package(path: str) -> bool:
    """Whether gin finds a file in an importable package; a folder `runs` here is none."""
    try:
        return resource_reader.system_path_file_exists(path)
    except TypeError:  # gin's, of a folder without __init__.py
        return False


gin.config._FILE_READERS[1:] = [(resource_reader.system_path_reader, _is_in_a_package)]


def add_arguments(
    parser: argparse.ArgumentParser,
    default: str | None = None,
    groups: Mapping[str, str] | None = None,
) -> None:
    """Adds gin's options, named as in T5X; `specjax` also takes `--gin.NAME=VALUE`.

    Args:
      parser: of the command.
      default: the file to read where none is given; without it one must be given. Its names are
        listed below the options.
      groups: folder of shipped gin files, or a pattern of their names -> what they are; listed with
        the names that they add.
    """
    parser.add_argument(
        "--gin_file",
        action="append",
        required=default is None,
        metavar="FILE",
        help="a gin file, looked up here, in the search paths and among specjax's own; may be "
        + (f"repeated, read in order (default: {default})" if default else "repeated"),
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
    if default:
        parser.set_defaults(default_gin_file=default)
        parser.epilog = "\n".join(_describe(default, groups or {}))


def configure_from(args: argparse.Namespace) -> None:
    """Like `configure`, with what `add_arguments` has added."""
    files = args.gin_file or [args.default_gin_file]
    configure(files, args.gin_binding, args.gin_search_paths)


def register(*configurables: Callable[..., Any], **named: Callable[..., Any]) -> None:
    """Makes library functions and classes configurable; those that are already stay so.

    Args:
      *configurables: under their own names.
      **named: under these names.
    """
    _configurables.update(c.__name__ for c in configurables)
    _configurables.update(named)
    for name, configurable in ({c.__name__: c for c in configurables} | named).items():
        try:
            gin.get_configurable(configurable)
        except ValueError:
            # A command run before this one in the same process has locked the configuration.
            with gin.unlock_config():
                gin.external_configurable(configurable, name=name, module=_MODULE)


def configure(
    files: Sequence[str], bindings: Sequence[str], search_paths: Sequence[str] = ()
) -> None:
    """Reads gin files and overrides into gin's global configuration.

    Args:
      files: gin files, each a path or a name that is found in the search paths, in the folders of
        the other files, or among the recipes that specjax ships (`runs/infer.gin`).
      bindings: `NAME=value`, from the command line. A value that gin cannot read is taken as a
        string, so that paths need no quotes.
      search_paths: folders in which files and includes are looked up.

    Raises:
      OSError: a gin file or an included file is not found.
      ValueError: a syntax error, an unknown name, a name that nothing uses, or a required name
        without a value; one line.
    """
    for folder in search_paths:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"--gin_search_paths: {folder} is not a folder")
    folders = [str(folder) for folder in (*search_paths, *_folders_of(files), SHIPPED)]
    for path in files:
        check_path(path, "--gin_file=")
    reading = ""  # the file or the override that gin is at
    gin.clear_config()
    # gin has no call that forgets the folders of an earlier configuration, which would go first.
    del gin.config._LOCATION_PREFIXES[1:]
    for folder in folders:
        gin.add_config_file_search_path(folder)
    try:
        # gin logs every folder in which a file is not.
        logging.disable(logging.ERROR)
        parsed: list[gin.config.ParsedConfigFileIncludesAndImports] = []
        for file in files:
            reading = f"--gin_file={file}"
            parsed += gin.parse_config_files_and_bindings([file], None, finalize_config=False)
        reading = ""
        texts = list(_texts(parsed, ["", *folders]))
        defined = [m[1] for text in texts for line in text if (m := _DEFINITION.match(line))]
        used = {name for text in texts for line in text for name in _REFERENCE.findall(line)}
        used.update(name for binding in bindings for name in _REFERENCE.findall(binding))
        _overrides[:] = [binding.partition("=")[0].strip() for binding in bindings]
        for binding in bindings:
            reading = f"--gin.{binding}"
            _override(binding, set(defined), used)
        reading = ""
        _refuse_unused(defined, used)
        _refuse_missing(defined)
        gin.finalize()
    except gin_errors.READING as error:
        raise gin_errors.told(error, reading, _configurables) from None
    finally:
        logging.disable(logging.NOTSET)


def call(configurable: Callable[..., Any], *first: Any, **arguments: Any) -> Any:
    """Calls a registered function with its configured arguments.

    Args:
      configurable: the function.
      *first: its first arguments; what is bound to them is not evaluated.
      **arguments: given to it as they are.

    Returns:
      What it returns.

    Raises:
      ValueError: as the function does, or where an argument has no value or one of a type that
        specjax refuses; without gin's notes on who called whom.
      OSError: likewise.
      ImportError: likewise. Errors that specjax has not made itself pass as they are.
    """
    own = {f"{_MODULE}.{name}" for name in _configurables}
    check_references(gin.config._inverse_lookup(configurable).selector, _overrides, own)
    return call_part(configurable, *first, **arguments)


def call_part(configurable: Callable[..., Any], *first: Any, **arguments: Any) -> Any:
    """Like `call`, for a part of what the overrides are for: some may belong to other parts."""
    called = gin.get_configurable(configurable)
    try:
        return called(*first, **arguments)
    except Exception as error:
        if "Required bindings" in str(error):
            raise ValueError(gin_errors.one_line(error)) from None
        if isinstance(error, TypeError) and _raised_in(error) == gin.config.__file__:
            missing = _MISSING.search(str(error))
            if not missing:
                raise ValueError(gin_errors.one_line(error)) from None
            names, name = re.findall(r"'(\w+)'", missing[1]), missing[2]
            raise ValueError(
                f"{name} has no value for {', '.join(names)}; add a gin file that binds them, "
                f"or --gin.{name}.{names[0]}=... and so on"
            ) from None
        if not is_refusal(error):
            raise
        kinds = (OSError, ImportError, LostProcessError)
        kind = next((k for k in kinds if isinstance(error, k)), ValueError)
        raise kind(gin_errors.one_line(error)) from None


def find(file: str, search_paths: Sequence[str] = ()) -> Path | None:
    """Where a gin file is that `configure` would read; None if it is nowhere."""
    places = (Path(folder, file) for folder in ("", *search_paths, str(SHIPPED)))
    return next((path for path in places if path.is_file()), None)


def definitions(file: Path) -> dict[str, str]:
    """The names that a gin file itself defines, in order, and their values (their first lines)."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return {match[1]: match[2] for line in lines if (match := _DEFINITION.match(line))}


def binding_of(parameter: str) -> str:
    """What is bound to a parameter, as "%MAX_DRAFT" to `Decoder.max_draft`; "None" for nothing."""
    try:
        return str(gin.query_parameter(parameter))
    except ValueError:
        return "None"


def value_of(parameter: str, default: Any = None) -> Any:
    """What is bound to a parameter, a name by its value; `default` for nothing."""
    try:
        found = gin.query_parameter(parameter)
    except ValueError:
        return default
    if isinstance(found, gin.config.ConfigurableReference) and found.evaluate:
        return found.scoped_configurable_fn()
    return found


def _raised_in(error: Exception) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].filename


def operative_config() -> str:
    """The values of all parameters that the calls so far have read, in gin's language."""
    return gin.operative_config_str()


def _folders_of(files: Iterable[str]) -> Iterator[Path]:
    """The folders in which the includes of these files are looked up."""
    for file in map(Path, files):
        if file.is_file():
            yield from (parent for parent in file.absolute().parents if parent.name == _ROOT)
            yield file.absolute().parent


def _texts(
    parsed: Iterable[gin.config.ParsedConfigFileIncludesAndImports], folders: Sequence[str]
) -> Iterator[list[str]]:
    """The lines of all files that gin has read, found as gin finds them."""
    for file in parsed:
        candidates = [Path(folder, file.filename) for folder in folders]
        path = next(path for path in candidates if path.is_file())
        yield path.read_text(encoding="utf-8").splitlines()
        yield from _texts(file.includes, folders)


def _override(binding: str, defined: set[str], used: set[str]) -> None:
    """Binds `NAME=value`, a name that exists to what gin reads from the value, or to its text."""
    name, equals, value = (part.strip() for part in binding.partition("="))
    if not equals:
        raise ValueError(f"--gin.{binding}: must have the form --gin.NAME=value")
    if "\n" in binding or "\r" in binding:
        raise ValueError(f"--gin.{name}: the value has a line break: give it in one line")
    if "." not in name and name not in defined | used:
        near = difflib.get_close_matches(name, defined, n=1)
        undefined = ", ".join(sorted(used - defined))
        raise ValueError(
            f"--gin.{name}: no such name; "
            + (f"did you mean {near[0]}? " if near else "")
            + f"The gin files define {', '.join(sorted(defined)) or 'none'}"
            + (f"; they use {undefined}: add the file that defines these" if undefined else "")
        )
    try:
        gin.parse_config(f"{name} = {value}")
    except (SyntaxError, tokenize.TokenError):
        if value[:1] in ("@", "%"):
            raise ValueError(f"--gin.{binding}: {value} is not a gin reference") from None
        gin.parse_config(f"{name} = {value!r}")


def _refuse_unused(defined: Iterable[str], used: set[str]) -> None:
    unused = sorted(set(defined) - used)
    if unused:
        near = difflib.get_close_matches(unused[0], used, n=1)
        raise ValueError(
            f"the gin files define {', '.join(unused)}, which nothing in them uses; "
            + (f"did you mean {near[0]}?" if near else "delete it")
        )


def _refuse_missing(defined: Iterable[str]) -> None:
    missing = [
        name
        for name in sorted(set(defined))
        if str(gin.query_parameter(f"{name}/macro.value")) == "%gin.REQUIRED"
    ]
    if missing:
        raise ValueError(
            f"required but not given: {', '.join(missing)}; add "
            + " ".join(f"--gin.{name}=..." for name in missing)
        )


def _describe(default: str, groups: Mapping[str, str]) -> Iterator[str]:
    """The lines below the options: the names that can be set, then the files that can be added."""
    own = list(_names_in(SHIPPED / default))
    yield f"names in {default}, each set by --gin.NAME=VALUE:"
    yield ""
    yield from _columns(own, "  ")
    known = {name for name, _ in own}
    for folder, what in groups.items():
        yield ""
        yield f"{what}:"
        yield ""
        files = sorted(SHIPPED.glob(folder if "*" in folder else f"{folder}/*.gin"))
        width = 2 + max(len(file.stem) for file in files)
        for file in files:
            yield from _columns([(file.stem, _header(file))], "  ", width)
            yield from _columns(list(_names_in(file, known)), "      ")


def _names_in(file: Path, known: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Each name that a file defines but the known ones: the comment above it and its default."""
    comment: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            comment.append(line.removeprefix("#").strip())
            continue
        if (match := _DEFINITION.match(line)) and match[1] not in known:
            name, value = match.groups()
            value += {"{": "...}", "(": "...)", "[": "...]"}.get(value, "")  # of several lines
            default = "required" if value == "%gin.REQUIRED" else f"default: {value}"
            yield name, " ".join([*comment, f"({default})"])
        comment = []


def _header(file: Path) -> str:
    """The first paragraph of the comment on top of a file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    header = itertools.takewhile(lambda line: line.startswith("# "), lines)
    return " ".join(line.removeprefix("#").strip() for line in header)


def _columns(rows: Sequence[tuple[str, str]], margin: str, width: int = 0) -> Iterator[str]:
    """Names on the left, texts on the right, wrapped."""
    width = max([width, *(len(name) + 2 for name, _ in rows)])
    for name, text in rows:
        yield textwrap.fill(
            text,
            width=100,
            initial_indent=f"{margin}{name:<{width}}",
            subsequent_indent=margin + " " * width,
            break_long_words=False,
            break_on_hyphens=False,
        )
