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

_PACKAGE = Path(__file__).parents[1]
# The names that `register` has made configurable.
_configurables: set[str] = set()
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
_NOT_FOUND = re.compile(
    r"Unable to open file: (.*?)\. Searched config paths: (.*)\."
    r"(?:\n  In file \"(.*)\", line (\d+))?"
)
# gin's words for a name on the left of a binding, and for one on the right.
_UNKNOWN = re.compile(r"No configurable matching (?:reference )?'([^']*)'")
_UNDEFINED = re.compile(r"No bindings specified for '(?:\w+/)*(\w+)/(?:gin\.)?macro'")


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
      groups: folder of shipped gin files -> what they are; listed with the names that they add.
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
                gin.external_configurable(configurable, name=name, module="specjax")


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
    reading = ""  # the override that gin is at
    gin.clear_config()
    for folder in folders:
        gin.add_config_file_search_path(folder)
    try:
        # gin logs every folder in which a file is not.
        logging.disable(logging.ERROR)
        parsed = gin.parse_config_files_and_bindings(files, None, finalize_config=False)
        texts = list(_texts(parsed, ["", *folders]))
        defined = [m[1] for text in texts for line in text if (m := _DEFINITION.match(line))]
        used = {name for text in texts for line in text for name in _REFERENCE.findall(line)}
        used.update(name for binding in bindings for name in _REFERENCE.findall(binding))
        for binding in bindings:
            reading = f"--gin.{binding}"
            _override(binding, set(defined), used)
        reading = ""
        _refuse_unused(defined, used)
        _refuse_missing(defined)
        gin.finalize()
    except OSError as error:
        raise _not_found(error) from None
    except ImportError as error:
        raise ValueError(
            f"{_one_line(error)}; install what is imported, or name its folder in PYTHONPATH"
        ) from None
    except (ValueError, SyntaxError, RuntimeError, tokenize.TokenError) as error:
        if undefined := _UNDEFINED.search(str(error)):
            raise ValueError(
                f"the gin files use %{undefined[1]}, but none defines it; add the file that does, "
                f"or --gin.{undefined[1]}=..."
            ) from None
        if unknown := _UNKNOWN.search(str(error)):
            raise ValueError(_unknown(unknown[1], reading, str(error))) from None
        raise ValueError(_one_line(error)) from None
    finally:
        logging.disable(logging.NOTSET)


def call(configurable: Callable[..., Any], **arguments: Any) -> Any:
    """Calls a registered function with its configured arguments.

    Args:
      configurable: the function.
      **arguments: given to it as they are.

    Returns:
      What it returns.

    Raises:
      ValueError: as the function does, or where an argument has no value or one of a type that
        specjax refuses; without gin's notes on who called whom.
      OSError: likewise.
      ImportError: likewise.
    """
    try:
        return gin.get_configurable(configurable)(**arguments)
    except OSError as error:
        raise OSError(_one_line(error)) from None
    except ImportError as error:
        raise ImportError(_one_line(error)) from None
    except (ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "Required bindings" not in str(error):
            raise
        raise ValueError(_one_line(error)) from None
    except TypeError as error:
        raised = traceback.extract_tb(error.__traceback__)[-1].filename
        missing = _MISSING.search(str(error))
        if missing and raised == gin.config.__file__:
            names, name = re.findall(r"'(\w+)'", missing[1]), missing[2]
            raise ValueError(
                f"{name} has no value for {', '.join(names)}; add a gin file that binds them, "
                f"or --gin.{name}.{names[0]}=... and so on"
            ) from None
        # The library's own refusals; what a library below it raises is a fault of ours.
        if not raised.startswith(str(_PACKAGE)):
            raise
        raise ValueError(_one_line(error)) from None


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
        files = sorted((SHIPPED / folder).glob("*.gin"))
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


def _unknown(name: str, reading: str, message: str) -> str:
    """What to say of a function or class that gin does not know, in an override or in a file."""
    mark = "@" if name.startswith("@") else ""
    call = "()" if name.endswith("()") else ""
    plain = name.removeprefix("@").removesuffix("()").split("/")[-1].split(".")[-1]
    near = difflib.get_close_matches(plain, _configurables, n=1)
    in_file = re.search(r'In file "(.*)", line (\d+)', message)
    place = f"{in_file[1]}:{in_file[2]}" if in_file else reading
    if near:
        remedy = f"did you mean {mark}{near[0]}{call}?"
    else:
        remedy = f"gin files can name {', '.join(sorted(_configurables))}"
    return f"{place}: {name} is no function or class that gin can use; {remedy}"


def _not_found(error: OSError) -> OSError:
    """What gin says of a file that it has not found, in one line and with a remedy."""
    match = _NOT_FOUND.search(str(error))
    if not match:
        return OSError(_one_line(error))
    name, folders, includer, line = match.groups()
    folders = folders.replace("'', ", "")  # the working directory
    where = f"{includer}:{line}: include {name!r}" if includer else f"--gin_file={name}"
    return FileNotFoundError(
        f"{where}: no such file, neither here nor in {folders}; give its full path, or its folder "
        "in --gin_search_paths"
    )


def _one_line(error: BaseException) -> str:
    """An error's message without gin's notes on who called whom."""
    text = str(error).split("\n  In call to configurable")[0]
    return " ".join(text.split())
