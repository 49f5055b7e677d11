"""What holds of every start of a command, whatever its files and options are."""

import contextlib
import io
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specjax.cli.main import main


class Ended(NamedTuple):
    """How a start ended.

    Attributes:
      status: 0 or 2.
      refusal: the line that says why; "" after a success.
    """

    status: int
    refusal: str


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory for one case, which is also the working and the home directory."""
    home = os.environ.get("HOME")
    with tempfile.TemporaryDirectory(prefix="specjax-fuzz-") as name:
        os.environ["HOME"] = name
        try:
            with contextlib.chdir(name):
                yield Path(name)
        finally:
            os.environ.pop("HOME") if home is None else os.environ.update(HOME=home)


def start(argv: Sequence[str]) -> Ended:
    """Runs the command; asserts that it succeeds or refuses in one line."""
    told = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(told),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")  # a user reads them, and goes on
        status = main(argv)
    lines = told.getvalue().splitlines()
    assert status in (0, 2), lines
    assert "Traceback" not in told.getvalue(), lines
    refusals = [line for line in lines if line.startswith("specjax infer: ")]
    assert len(refusals) == (status == 2), lines
    others = [line for line in lines if line not in refusals]
    assert all(line.startswith("specjax: ") for line in others), lines
    return Ended(status, refusals[0] if refusals else "")


def contents(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a directory: the kind, content and time of each thing, by its path."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        what: object = None
        if stat.S_ISLNK(about.st_mode):
            what = os.readlink(path)
        elif stat.S_ISREG(about.st_mode):
            what = path.read_bytes()
        # The time of a directory changes with what the run makes in it.
        time = None if stat.S_ISDIR(about.st_mode) else about.st_mtime_ns
        found[str(path.relative_to(root))] = (stat.S_IFMT(about.st_mode), what, time)
    return found


def assert_untouched(
    before: dict[str, tuple[object, ...]], after: dict[str, tuple[object, ...]], own: set[str]
) -> None:
    """Asserts that all things but those of the run are what they were."""
    for name in sorted({*before, *after}):
        if name not in own:
            assert after.get(name) == before.get(name), name
