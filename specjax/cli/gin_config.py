"""gin files and overrides for the commands: `--gin_file=FILE --gin.NAME=value`.

A gin file lists on top the names that must be given, and those one commonly overrides:

    DATA_DIR = %gin.REQUIRED
    NUM_STEPS = 20_000

gin is imported here and nowhere in the library.
"""

import argparse
import difflib
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

_PACKAGE = str(Path(__file__).parents[1])
# Python's words, and gin's for the name under which it knows what was called.
_MISSING = re.compile(
    r"missing \d+ required [^\n]*arguments?: ([^\n]*).*?In call to configurable '([\w.]+)'", re.S
)
_ROOT = "gin_configs"  # includes are also looked up in the folder of this name above a gin file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--gin_file` and `--gin_binding`, which `specjax` lets one write `--gin.NAME=VALUE`."""
    parser.add_argument(
        "--gin_file", action="append", required=True, metavar="FILE", help="repeatable, in order"
    )
    parser.add_argument(
        "--gin_binding",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a name of the gin files, or a parameter such as AdamW.weight_decay; "
        "short: --gin.NAME=VALUE",
    )


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


def configure(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Parses gin files and overrides into gin's global configuration.

    Args:
      files: paths of gin files.
      bindings: `NAME=value`, from the command line. A value that is no Python literal, gin
        reference or macro is taken as a string, so that paths need no quotes.

    Raises:
      FileNotFoundError: a gin file or an included file is missing.
      ValueError: a syntax error, an unknown name, a name that nothing uses, or a required name
        without a value; one line.
    """
    gin.clear_config()
    for file in files:
        if not os.path.isfile(file):
            raise FileNotFoundError(f"--gin_file={file}: no such file")
    roots = [str(root) for file in files for root in _search_paths(Path(file))]
    names: dict[str, Any] = {}
    references = _References()
    try:
        for file in files:
            names.update(_names(Path(file), roots, references))
        overrides = [_override(binding, names, references) for binding in bindings]
        unused = sorted(names.keys() - references.used)
        if unused:
            near = difflib.get_close_matches(unused[0], references.used, n=1)
            raise ValueError(
                f"the gin files define {', '.join(unused)}, which nothing in them uses; "
                + (f"did you mean {near[0]}?" if near else "delete it")
            )
        names.update(overrides)
        missing = sorted(name for name, value in names.items() if _is_required(value))
        if missing:
            raise ValueError(
                f"required but not given: {', '.join(missing)}; add "
                + " ".join(f"--gin.{name}=..." for name in missing)
            )
        for root in roots:
            gin.add_config_file_search_path(root)
        # gin logs every folder in which an include is not.
        logging.disable(logging.ERROR)
        gin.parse_config_files_and_bindings(
            files, [f"{name} = {value}" for name, value in overrides]
        )
    except ImportError as error:
        raise ValueError(
            f"{_one_line(error)}; install what is imported, or name its folder in PYTHONPATH"
        ) from None
    except (ValueError, SyntaxError, RuntimeError) as error:
        raise ValueError(_one_line(error)) from None
    finally:
        logging.disable(logging.NOTSET)


def call(configurable: Callable[..., Any]) -> Any:
    """Calls a registered function with its configured arguments.

    Args:
      configurable: the function.

    Returns:
      What it returns.

    Raises:
      ValueError: as the function does, or where an argument has no value or one of a type that
        specjax refuses; without gin's notes on who called whom.
      OSError: likewise.
    """
    try:
        return gin.get_configurable(configurable)()
    except OSError as error:
        raise OSError(_one_line(error)) from None
    except (ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "Required bindings" not in str(error):
            raise
        raise ValueError(_one_line(error)) from None
    except TypeError as error:
        raised = traceback.extract_tb(error.__traceback__)[-1].filename
        missing = _MISSING.search(str(error))
        if missing and raised == gin.config.__file__:
            arguments, name = re.findall(r"'(\w+)'", missing[1]), missing[2]
            raise ValueError(
                f"{name} has no value for {', '.join(arguments)}; add a gin file that binds them, "
                f"or --gin.{name}.{arguments[0]}=... and so on"
            ) from None
        # The library's own refusals; what a library below it raises is a fault of ours.
        if not raised.startswith(_PACKAGE):
            raise
        raise ValueError(_one_line(error)) from None


class _References(config_parser.ParserDelegate):
    """Keeps references and macros as text: only names are of interest before gin parses.

    Attributes:
      used: the macros that were referred to.
    """

    def __init__(self) -> None:
        self.used: set[str] = set()

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> str:
        return f"@{scoped_configurable_name}" + ("()" if evaluate else "")

    def macro(self, macro_name: str) -> str:
        self.used.add(macro_name)
        return f"%{macro_name}"


def _is_required(value: Any) -> bool:
    return isinstance(value, str) and value == "%gin.REQUIRED"


def _search_paths(file: Path) -> Iterator[Path]:
    yield from (parent for parent in file.absolute().parents if parent.name == _ROOT)
    yield file.absolute().parent


def _names(file: Path, roots: Sequence[str], references: _References) -> dict[str, Any]:
    """The macros that a gin file and its includes define, with their values."""
    names: dict[str, Any] = {}
    with file.open(encoding="utf-8") as text:
        for statement in config_parser.ConfigParser(text, references):
            if isinstance(statement, config_parser.IncludeStatement):
                names.update(_names(_find(statement.filename, roots, file), roots, references))
            elif isinstance(statement, config_parser.BindingStatement) and not statement.arg_name:
                names[statement.selector] = statement.value
    return names


def _find(name: str, roots: Sequence[str], includer: Path) -> Path:
    for candidate in (Path(name), *(Path(root) / name for root in roots)):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"{includer}: include {name!r} is not found in {', '.join(roots)}")


def _override(binding: str, names: dict[str, Any], references: _References) -> tuple[str, str]:
    """`NAME=value` as a name that exists and a value that gin can parse."""
    name, equals, value = (part.strip() for part in binding.partition("="))
    if not equals:
        raise ValueError(f"--gin.{binding}: must have the form --gin.NAME=value")
    if "." not in name and name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise ValueError(
            f"--gin.{name}: no such name; "
            + (f"did you mean {near[0]}? " if near else "")
            + f"The gin files define {', '.join(names) or 'none'}"
        )
    try:
        parser = config_parser.ConfigParser(f"x = {value}", references)
        list(parser)
    except (SyntaxError, ValueError):
        if value[:1] in ("@", "%"):
            raise ValueError(f"--gin.{binding}: {value} is not a gin reference") from None
        value = repr(value)
    return name, value


def _one_line(error: BaseException) -> str:
    """An error's message without gin's notes on who called whom."""
    text = str(error).split("\n  In call to configurable")[0]
    return " ".join(text.split())
