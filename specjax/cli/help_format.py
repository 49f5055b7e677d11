"""The text of `--help`: the options, then the names and files of gin; and hints at names."""

import argparse
import difflib
import itertools
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.checks import ELSEWHERE

# The gin files of the package.
SHIPPED = Path(__file__).parents[1] / "gin_configs"
# How many names `--help` shows, from the first of the file.
_FIRST = 20
_REQUIRED = "(required)"
_DEFINITION = re.compile(r"^([A-Za-z_]\w*)\s*=\s*(.*)$")


def hint(name: str, choices: Collection[str], otherwise: str) -> str:
    """A similar name among the choices, or `otherwise`."""
    names = name.lower(), ELSEWHERE.get(name.lower(), "").partition("=")[0]
    near = [other for each in names for other in choices if other.lower() == each]
    near = near or difflib.get_close_matches(name, sorted(choices), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows informative defaults as they are typed; keeps the line breaks below the options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        silent = default is None or default is False or default in ([], argparse.SUPPRESS)
        if action.help is None or action.required or silent:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{action.help} (default: {shown.replace('%', '%%')})"


class FullHelp(argparse.Action):
    """The option `--helpfull`; its `const` has the arguments of `names_and_files`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.epilog = "\n".join(names_and_files(*self.const))
        parser.print_help()
        parser.exit()


def names_and_files(default: str, groups: Mapping[str, str], *, full: bool = True) -> Iterator[str]:
    """Yields the lines below the options: the names to set, then the files to add.

    Args:
      default: the run file of the command.
      groups: folder or pattern of gin files -> their description.
      full: whether all names are shown, and what each file is for.
    """
    names = list(_names_in(SHIPPED / default))
    in_default = {name for name, _ in names}
    shown = names if full else names[:_FIRST]
    rest = f" ({len(names) - _FIRST} more: --helpfull)" if len(shown) < len(names) else ""
    yield f"names in {default}, set with --gin.NAME=VALUE{rest}:"
    yield ""
    yield from _columns(shown, "  ")
    for folder, what in groups.items():
        yield ""
        yield f"{what}:"
        yield ""
        files = sorted(SHIPPED.glob(folder if "*" in folder else f"{folder}/*.gin"))
        if not full:
            needed = [
                name
                for file in files
                for name, text in _names_in(file, in_default)
                if text.endswith(_REQUIRED)
            ]
            yield from _columns([("", ", ".join(file.stem for file in files))], "")
            if needed:
                yield from _columns([("", f"They need {', '.join(dict.fromkeys(needed))}.")], "")
            continue
        width = 2 + max(len(file.stem) for file in files)
        for file in files:
            # The first paragraph of its first comment.
            lines = file.read_text(encoding="utf-8").splitlines()
            header = itertools.takewhile(lambda line: line.startswith("# "), lines)
            what = " ".join(line.removeprefix("#").strip() for line in header)
            yield from _columns([(file.stem, what)], "  ", width)
            yield from _columns(list(_names_in(file, in_default)), "      ")


def definitions(file: Path) -> dict[str, str]:
    """Returns the names that a gin file defines, in order, with the first line of their values."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return {match[1]: match[2] for line in lines if (match := _DEFINITION.match(line))}


def _names_in(file: Path, without: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Each name that a file defines and `without` lacks, with its comment and its default."""
    comment: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            comment.append(line.removeprefix("#").strip())
            continue
        if (match := _DEFINITION.match(line)) and match[1] not in without:
            name, value = match.groups()
            value += {"{": "...}", "(": "...)", "[": "...]"}.get(value, "")  # of several lines
            default = _REQUIRED if value == "%gin.REQUIRED" else f"(default: {value})"
            yield name, " ".join([*comment, default])
        comment = []


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
