"""The directory of a run: a single process owns it and replaces only files that the run has made.

Every command locks its directory, checks everything, claims the directory for its configuration,
records how the run was started, and writes. The file of the configuration lists the files that the
run has made; no other file is ever replaced or removed.
"""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specjax.checks import check_path
from specjax.environment import environment
from specjax.errors import UserError
from specjax.writing import (
    append,
    locked,
    new_directory,
    read_regular,
    write_atomically,
)

GIN_NAME = "config.gin"
RUNS_NAME = "runs.jsonl"
# Keys of a configuration: the device and versions, and the process.
ENVIRONMENT, PART = "environment", "part"
# Keys in the file that are not part of the configuration; earlier versions wrote a fingerprint.
_FILES, _KEPT, MODEL_NAMES = "files", "kept", "model_names"
_BESIDE = (_FILES, _KEPT, "fingerprint", MODEL_NAMES)
# The longest value that is shown whole.
_LONGEST = 100
_RECORDS = (GIN_NAME, RUNS_NAME)
_LOCK_NAME = ".specjax.lock"
# The names of files that show that a directory holds a model; loading it would read some names of a
# run (T5X: `config.gin`). Other files, such as inputs and logs, may be beside a run.
_OF_MODELS = ("config.json", "specjax.json", "*.safetensors", "checkpoint_*")


class RunDirectory:
    """The directory of one run, locked while the context is open.

    A start that fails leaves the directory as it was: it removes its claim, its files, and the
    directory if it made that, unless `keep` was called now or in an earlier start. A claim that a
    killed process left without `keep` is replaced by the next claim.

    The directory is made, with its parents, when the context opens. `config_name` is the file of
    the configuration; `makes` are the names of all files and directories that the run may write.
    """

    def __init__(self, path: str | os.PathLike[str], *, config_name: str, makes: Sequence[str]):
        check_path(path, "output_dir=")
        if not os.fspath(path):  # an empty path would mean the working directory
            raise UserError("output_dir is empty: give a directory")
        try:
            # Shells do not expand --name=~/directory.
            self.path = Path(path).expanduser().absolute()
        except RuntimeError as error:
            raise UserError(f"output_dir={path}: {error}: give the full path") from None
        self._config = self.path / config_name
        self._makes = (*_RECORDS, *makes)
        self._stack = contextlib.ExitStack()
        self._claimed_here = False
        self._stored: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_made(self.path))
            in_use = (
                f"output_dir={self.path} is used by another process: wait for it, or choose "
                "another directory"
            )
            stack.enter_context(locked(self.path / _LOCK_NAME, in_use))
            self.peek()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._claimed_here and not self.kept:
                if kind is None:
                    self.keep()
                else:
                    self._take_back()
        finally:
            self._stack.__exit__(kind, error, trace)

    def peek(self) -> dict[str, Any] | None:
        """Reads the recorded configuration, or None, without a lock; raises like opening."""
        # A run lists a file before it writes it. So the names that are there before the
        # configuration is read are listed in it, even if another process writes meanwhile.
        there = [name for name in self._makes if os.path.lexists(self.path / name)]
        if self._config.is_symlink():
            raise _a_link(self._config)
        self._stored = read_config(self._config)
        self._refuse_foreign(there)
        return self._stored

    @property
    def kept(self) -> bool:
        """Whether this start or an earlier start has called `keep`."""
        return self._stored is not None and self._stored[_KEPT]

    @property
    def fingerprint(self) -> str:
        """A hash of the configuration without its environment and its process."""
        assert self._stored is not None, "the directory must be claimed, or have a configuration"
        return fingerprint_of(self._stored)

    def claim(
        self,
        configuration: Mapping[str, Any],
        *,
        allow_other_environment: bool = False,
        replace: bool = False,
    ) -> None:
        """Records the configuration of the run, or compares it with the recorded one.

        Its keys `environment` and `model_names` are optional; names of models are for messages
        only. With `allow_other_environment` a run of another environment is continued, with a
        warning. With `replace` a different configuration replaces the recorded one.
        """
        ours = json.loads(json.dumps(configuration))  # so that tuples and lists are equal
        theirs = self._stored
        if not self.kept:
            self._take_back()
            self._store({**ours, _FILES: [], _KEPT: False})
            self._claimed_here = True
        elif theirs is not None and difference(theirs, ours):
            if not replace:
                self._compare(theirs, ours, allow_other_environment)
            self._store({**ours, _FILES: theirs[_FILES], _KEPT: True})

    def _compare(self, theirs: Any, ours: Any, allow_other_environment: bool) -> None:
        apart = difference(theirs, ours)
        remedy = "choose another output_dir, or use the same configuration to continue the run"
        if not difference({**theirs, ENVIRONMENT: ours.get(ENVIRONMENT)}, ours):
            if allow_other_environment:
                print(f"specjax: warning: continuing the run, although {apart}", file=sys.stderr)
                return
            remedy += (
                ", or set allow_other_environment=True to continue here (rounding may then differ)"
            )
        raise UserError(
            f"output_dir={self.path} has a run of another configuration ({apart}): {remedy}"
        )

    def record(
        self,
        *,
        command: Sequence[str],
        config: str | None = None,
        paths: Mapping[str, str] | None = None,
    ) -> None:
        """Saves the gin configuration, and adds a line about this process to `runs.jsonl`.

        `paths` has names and absolute paths of the files that the run reads.
        """
        if config is not None:
            self.write(GIN_NAME, config.encode())
        line: dict[str, Any] = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(command),
            "working_directory": os.getcwd(),
            "host": platform.node(),
            "paths": {**(paths or {}), "output_dir": str(self.path)},
            "python": platform.python_version(),
            **environment(),
        }
        append(self.own(RUNS_NAME), (json.dumps(line) + "\n").encode())

    def own(self, name: str) -> Path:
        """Returns the path of a file or directory, and lists it as made by the run.

        Args:
          name: one of the names in `makes`.
        """
        assert self._stored is not None, "the directory must be claimed before it is written"
        assert name in self._makes, name
        if name not in self._stored[_FILES]:
            self._store({**self._stored, _FILES: [*self._stored[_FILES], name]})
        return self.path / name

    def keep(self) -> None:
        """Records that a failure must not remove the run's files."""
        assert self._stored is not None, "the directory must be claimed before it is written"
        if not self.kept:
            self._store({**self._stored, _KEPT: True})

    def write(self, name: str, data: bytes) -> Path:
        """Writes a file of the run completely or not at all; see `own`."""
        path = self.own(name)
        write_atomically(path, data)
        return path

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Yields a directory that replaces `name` if the context ends without an error."""
        with new_directory(self.own(name), replace=True) as partial:
            yield partial

    def makes(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path is this directory or a file of the run in it; follows links."""
        inside, place = Path(path).expanduser().resolve(), self.path.resolve()
        if not inside.is_relative_to(place):
            return False
        return inside == place or inside.relative_to(place).parts[0] in self._makes

    def _take_back(self) -> None:
        """Removes the files of a run without `keep`."""
        if self._stored is None:
            return
        for path in (self.path / name for name in self._makes if name in self._stored[_FILES]):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        self._config.unlink(missing_ok=True)
        self._stored = None

    def _store(self, values: dict[str, Any]) -> None:
        write_atomically(self._config, (json.dumps(values, indent=1, sort_keys=True)).encode())
        self._stored = values

    def _refuse_foreign(self, there: Sequence[str]) -> None:
        """Raises an error unless the run has made these files of the directory."""
        files = [] if self._stored is None else self._stored[_FILES]
        models = sorted(path for name in _OF_MODELS for path in self.path.glob(name))
        if models and self._stored is None:
            raise FileExistsError(
                f"output_dir={self.path} holds a model ({models[0].name}): choose another directory"
            )
        # A changed list must not make the run remove other files.
        if foreign := [name for name in files if name not in self._makes]:
            raise UserError(
                f"{self._config} lists {foreign[0]!r}, which is not a file of this run: choose "
                "another output_dir"
            )
        for name in there:
            path = self.path / name
            if not os.path.lexists(path):  # removed meanwhile
                continue
            # Writing would change, and replacing remove, the target of the link.
            if path.is_symlink():
                raise _a_link(path)
            if not files and (other := self._other_command()):
                raise FileExistsError(
                    f"output_dir={self.path} has a run of another command ({other}): choose "
                    "another output_dir"
                )
            if name not in files:
                raise FileExistsError(
                    f"{path} exists, but {self._config.name} does not list it as a file of a run: "
                    "choose another output_dir, or move it"
                )
            # Names of files have a suffix, names of directories have none.
            if not (path.is_file() if path.suffix else path.is_dir()):
                raise FileExistsError(
                    f"{path} is not the {'file' if path.suffix else 'directory'} that the run has "
                    "made: choose another output_dir, or move it"
                )

    def _other_command(self) -> str | None:
        """The name of another command's configuration in the directory, if there is one."""
        for path in sorted(self.path.glob("*_config.json")):
            # A model's directory has other files with such names.
            with contextlib.suppress(OSError, ValueError):
                if path != self._config and read_config(path) is not None:
                    return path.name
        return None


def _a_link(path: Path) -> FileExistsError:
    return FileExistsError(
        f"{path} is a link, not a file of a run: choose another output_dir, or move it"
    )


@contextlib.contextmanager
def _made(directory: Path) -> Iterator[None]:
    """Makes a directory and its parents; at the end, removes those that are empty."""
    # `os.path.exists` returns False for a name that is too long; mkdir then raises.
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise NotADirectoryError(f"output_dir={directory} is a file: choose a directory")
    if os.path.islink(directory) and not os.path.exists(directory):
        raise NotADirectoryError(f"output_dir={directory} is a broken link: choose a directory")
    absent = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        try:
            _make_writable(directory)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OSError(
                f"output_dir={directory} cannot be written ({reason}): choose another directory"
            ) from None
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # such as: not empty
            for path in absent:
                path.rmdir()


def _make_writable(directory: Path, attempts: int = 5) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    try:
        # Only an attempt shows whether it is writable: root passes every permission check.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileNotFoundError:  # another start has just failed and removed the directory
        if not attempts:
            raise
        _make_writable(directory, attempts - 1)


def fingerprint_of(configuration: Mapping[str, Any]) -> str:
    """Returns a hash of a configuration without its environment and its process."""
    ignored = (*_BESIDE, ENVIRONMENT, PART)
    counted = {key: value for key, value in configuration.items() if key not in ignored}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def read_config(path: Path) -> dict[str, Any] | None:
    """Reads the file of a run's configuration; None if it is absent."""
    try:
        stored = json.loads(read_regular(path))
    except FileNotFoundError:
        if not path.is_symlink():
            return None
        stored = None
    except OSError as error:
        raise OSError(
            f"{path} cannot be read ({error.strerror}): make it readable, or choose another "
            "output_dir"
        ) from None
    except (ValueError, RecursionError):
        stored = None
    if not (
        isinstance(stored, dict)
        and isinstance(stored.get(_KEPT), bool)
        and isinstance(stored.get(_FILES), list)
        and all(isinstance(name, str) for name in stored[_FILES])
    ):
        raise UserError(
            f"{path} is damaged, or not the configuration of a run: choose another output_dir, or "
            "empty this directory"
        )
    return stored


def difference(theirs: Any, ours: Any) -> str:
    """Describes the first differences of two configurations."""
    parts = dict(_differences(theirs, ours))
    if parts:  # names alone make no difference
        named = dict(_other_models(theirs, ours))
        hashes = {f"models.{role}" for role in named}
        rest = {key: text for key, text in parts.items() if key not in hashes}
        parts = {role.upper(): text for role, text in named.items()} | rest
    shown = [f"{key}: {text}" for key, text in parts.items()]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _other_models(theirs: Any, ours: Any) -> Iterator[tuple[str, str]]:
    """The roles of the models that differ, with both names."""
    for role, here in ours.get(MODEL_NAMES, {}).items():
        there = theirs.get(MODEL_NAMES, {}).get(role, here)
        hashes = [each.get("models", {}).get(role) for each in (theirs, ours)]
        if there != here and (None in hashes or hashes[0] != hashes[1]):
            yield role, f"{there} there, {here} here"


def _differences(theirs: Any, ours: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The keys of different values, with both values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted({*theirs, *ours}):
            if theirs.get(key) != ours.get(key) and (name or key not in _BESIDE):
                inner = f"{name}.{key}" if name else key
                yield from _differences(theirs.get(key), ours.get(key), inner)
        return
    texts = repr(theirs), repr(ours)
    start = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    start = max(0, start - _LONGEST // 3) if max(map(len, texts)) > _LONGEST else 0
    there, here = (
        "..." * (start > 0)
        + text[start : start + _LONGEST]
        + "..." * (len(text) > start + _LONGEST)
        for text in texts
    )
    yield name, f"{there} there, {here} here"
