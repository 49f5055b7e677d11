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
import logging
import os
import re
import tokenize
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gin

_PACKAGE = Path(__file__).parents[1]
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
_UNDEFINED = re.compile(r"No bindings specified for '(?:\w+/)*(\w+)/(?:gin\.)?macro'")


def add_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Adds gin's options, named as in T5X; `specjax` also takes `--gin.NAME=VALUE`.

    Args:
      parser: of the command.
      default: the file to read where none is given; without it one must be given. Its names are
        listed below the options.
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
        methods = sorted(file.stem for file in (SHIPPED / "methods").glob("*.gin"))
        parser.epilog = (
            f"names in {default}, each set by --gin.NAME=VALUE:\n\n"
            + "\n".join(_list_names(SHIPPED / default))
            + f"\n\nmethods, each chosen by --gin_file={default} --gin_file=methods/METHOD.gin:\n\n"
            + "  "
            + ", ".join(methods)
        )


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
            _override(binding, set(defined), used)
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


def _list_names(file: Path) -> Iterator[str]:
    """Each name that a file defines, with its default and the comment above it."""
    comment: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            comment.append(line.removeprefix("#").strip())
        elif match := _DEFINITION.match(line):
            name, value = match.groups()
            default = "required" if value == "%gin.REQUIRED" else f"default: {value}"
            yield f"  {name:<16}{' '.join(comment)} ({default})"
            comment = []
        else:
            comment = []


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
