"""What gin says of a file or an override that it cannot read, in one line that names it."""

import difflib
import re
import tokenize
from collections.abc import Collection

# What gin and Python raise while they read.
READING = (
    OSError, ImportError, RecursionError, ValueError, TypeError, SyntaxError, RuntimeError,
    tokenize.TokenError,
)  # fmt: skip
_NOT_FOUND = re.compile(
    r"Unable to open file: (.*?)\. Searched config paths: (.*)\."
    r"(?:\n  In file \"(.*)\", line (\d+))?"
)
# gin's words for a name on the left of a binding, and for one on the right.
_UNKNOWN = re.compile(r"No configurable matching (?:reference )?'([^']*)'")
_IN_FILE = re.compile(r'In file "(.*?)", line \d+')
_UNDEFINED = re.compile(r"No bindings specified for '(?:\w+/)*(\w+)/(?:gin\.)?macro'")


def told(error: Exception, reading: str, known: Collection[str]) -> Exception:
    """The error to raise instead.

    Args:
      error: one of `READING`, of gin or of specjax.
      reading: the option that gin is at, `--gin_file=FILE` or `--gin.NAME=value`; "" for none.
      known: names of functions and classes that gin can use.

    Returns:
      An error of one line.
    """
    text = one_line(error)
    place = reading.partition("=")[0] if reading.startswith("--gin.") else reading
    if isinstance(error, OSError):
        return _not_found(error)
    if isinstance(error, ImportError):
        return ValueError(f"{text}; install what is imported, or name its folder in PYTHONPATH")
    if isinstance(error, RecursionError):
        files = _IN_FILE.findall(str(error))
        if len(files) == len(set(files)):
            where = files[0] if files else place
            return ValueError(f"{where}: the value is nested too deeply: give a flat one")
        return ValueError(
            f"{files[0]}: this gin file includes itself, perhaps by way of others: remove the "
            "include"
        )
    if undefined := _UNDEFINED.search(str(error)):
        return ValueError(
            f"the gin files use %{undefined[1]}, but none defines it; add the file that does, "
            f"or --gin.{undefined[1]}=..."
        )
    if unknown := _UNKNOWN.search(str(error)):
        return ValueError(_unknown(unknown[1], reading, str(error), known))
    if place and not text.startswith("--gin") and not _IN_FILE.search(text):
        text = f"{place}: {text}"
    return ValueError(text)


def _unknown(name: str, reading: str, message: str, known: Collection[str]) -> str:
    """What to say of a function or class that gin does not know, in an override or in a file."""
    mark = "@" if name.startswith("@") else ""
    call = "()" if name.endswith("()") else ""
    plain = name.removeprefix("@").removesuffix("()").split("/")[-1].split(".")[-1]
    near = difflib.get_close_matches(plain, known, n=1)
    in_file = re.search(r'In file "(.*)", line (\d+)', message)
    place = f"{in_file[1]}:{in_file[2]}" if in_file else reading
    if near:
        remedy = f"did you mean {mark}{near[0]}{call}?"
    else:
        remedy = f"gin files can name {', '.join(sorted(known))}"
    return f"{place}: {name} is no function or class that gin can use; {remedy}"


def _not_found(error: OSError) -> OSError:
    """What gin says of a file that it has not found, in one line and with a remedy."""
    match = _NOT_FOUND.search(str(error))
    if not match:
        return OSError(one_line(error))
    name, folders, includer, line = match.groups()
    folders = folders.replace("'', ", "")  # the working directory
    where = f"{includer}:{line}: include {name!r}" if includer else f"--gin_file={name}"
    return FileNotFoundError(
        f"{where}: no such file, neither here nor in {folders}; give its full path, or its folder "
        "in --gin_search_paths"
    )


def one_line(error: BaseException) -> str:
    """An error's message without gin's notes on who called whom."""
    text = str(error).split("\n  In call to configurable")[0]
    return " ".join(text.split())
