"""The record of a run: a directory that a single process owns, with a manifest and sealed records.

Every command locks its directory, checks everything, claims the directory for its configuration,
records how the run was started, and writes. The manifest has the configuration, and lists the files
that the run has made; no other file is ever replaced or removed.
"""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import safetensors
import safetensors.numpy

from specjax.checks import PathLike, check_path
from specjax.environment import environment
from specjax.errors import UserError, tell
from specjax.memory import mappers
from specjax.writing import (
    append,
    locked,
    naming_failures,
    read_regular,
    remove_proven,
    write_atomically,
)

GIN_NAME = "config.gin"
RUNS_NAME = "runs.jsonl"
# The key of a configuration for the device and versions.
ENVIRONMENT = "environment"
# Keys in the manifest that are not part of the configuration.
_FILES, _KEPT, MODEL_NAMES = "files", "kept", "model_names"
_BESIDE = (_FILES, _KEPT, MODEL_NAMES)
# The longest value that is shown whole.
_LONGEST = 100
_LOCK_NAME = ".specjax.lock"
# The names of files that show that a directory holds a model; loading it would read some names of a
# run (T5X: `config.gin`). Other files, such as inputs and logs, may be beside a run.
_OF_MODELS = ("config.json", "specjax.json", "*.safetensors", "checkpoint_*")


class RunDirectory:
    """The directory of one run, locked while the context is open.

    A start that fails leaves the directory as it was: it removes its claim, its files, and the
    directory if it made that, unless `keep` was called now or in an earlier start. A claim that a
    killed process left without `keep` is replaced by the next claim.

    The directory is made, with its parents, when the context opens. `config_name` is the manifest;
    `makes` are the names of all other files and directories that the run may write.
    """

    def __init__(self, path: PathLike, *, config_name: str, makes: Sequence[str]):
        check_path(path, "output_dir=")
        try:
            # Shells do not expand --name=~/directory.
            self.path = Path(path).expanduser().absolute()
        except RuntimeError as error:
            raise UserError(f"output_dir={path}: {error}: give the full path") from None
        self._config = self.path / config_name
        self._makes = (GIN_NAME, RUNS_NAME, *makes)
        self._stack = contextlib.ExitStack()
        self._claimed_here = False
        self._manifest: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_make_directory(self.path))
            in_use = f"output_dir={self.path} is used by another process: wait, or choose another"
            stack.enter_context(locked(self.path / _LOCK_NAME, in_use))
            self.peek()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
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
        # A run lists a file before it writes it. So the names that are there before the manifest
        # is read are listed in it, even if another process writes meanwhile.
        there = [name for name in self._makes if os.path.lexists(self.path / name)]
        if self._config.is_symlink():
            raise _foreign(self._config)
        self._manifest = stored = read_config(self._config)
        models = sorted(path for name in _OF_MODELS for path in self.path.glob(name))
        if models and stored is None:
            raise FileExistsError(
                f"output_dir={self.path} holds a model ({models[0].name}): choose another directory"
            )
        files = [] if stored is None else stored[_FILES]
        # A changed list must not make the run remove other files.
        if not {*files} <= {*self._makes}:
            raise _damaged(self._config)
        for name in there:
            # Names of files have a suffix, names of directories have none. A link is neither:
            # writing would change, and replacing remove, its target.
            is_own = stat.S_ISREG if Path(name).suffix else stat.S_ISDIR
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                if not is_own((self.path / name).lstat().st_mode) or name not in files:
                    raise _foreign(self.path / name)
        return stored

    @property
    def kept(self) -> bool:
        """Whether this start or an earlier start has called `keep`."""
        return self._manifest is not None and self._manifest[_KEPT]

    @property
    def fingerprint(self) -> str:
        """A hash of the configuration without its environment."""
        assert self._manifest is not None, "the directory must be claimed, or have a configuration"
        return fingerprint_of(self._manifest)

    @property
    def owner(self) -> dict[str, str]:
        """The owner of the run's files, for `specjax.writing.write_checksums`."""
        return {"run": self.fingerprint}

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
        if self._manifest is None or not self.kept:
            self._take_back()
            self._store({**ours, _FILES: [], _KEPT: False})
            self._claimed_here = True
            return
        if apart := difference(self._manifest, ours):
            if not replace:
                self._check_environment_alone(ours, apart, allow_other_environment)
            self._store({**ours, _FILES: self._manifest[_FILES], _KEPT: True})

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
        """Returns the path of one of `makes`, and lists it as made by the run."""
        assert self._manifest is not None, "the directory must be claimed before it is written"
        assert name in self._makes, name
        if name not in self._manifest[_FILES]:
            self._store({**self._manifest, _FILES: [*self._manifest[_FILES], name]})
        return self.path / name

    def keep(self) -> None:
        """Records that a failure must not remove the run's files."""
        assert self._manifest is not None, "the directory must be claimed before it is written"
        if not self.kept:
            self._store({**self._manifest, _KEPT: True})

    def write(self, name: str, data: bytes) -> Path:
        """Writes a file of the run completely or not at all; see `own`."""
        path = self.own(name)
        write_atomically(path, data)
        return path

    def write_json(self, name: str, values: Any) -> Path:
        """Writes JSON values without NaN; see `write`."""
        return self.write(name, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())

    def makes(self, path: PathLike) -> bool:
        """Whether a path is this directory or a file of the run in it; follows links."""
        inside, place = Path(path).expanduser().resolve(), self.path.resolve()
        if not inside.is_relative_to(place):
            return False
        return inside == place or inside.relative_to(place).parts[0] in self._makes

    def _check_environment_alone(self, ours: dict[str, Any], apart: str, allowed: bool) -> None:
        """Refuses a configuration that differs from the recorded one, as `apart` tells."""
        here = {ENVIRONMENT: ours.get(ENVIRONMENT)}
        elsewhere = not difference({**(self._manifest or {}), **here}, ours)
        if elsewhere and allowed:
            tell(f"warning: continuing the run, although {apart}")
            return
        allow = ", or set allow_other_environment=True (rounding may then differ)" * elsewhere
        raise UserError(
            f"output_dir={self.path} has a run of another configuration ({apart}): choose "
            f"another output_dir, or use the same configuration to continue the run{allow}"
        )

    def _take_back(self) -> None:
        """Removes the files of a run without `keep`; of directories, only what it can prove."""
        if self._manifest is None:
            return
        for path in (self.path / name for name in self._manifest[_FILES]):
            if path.is_dir():
                remove_proven(path, owner=self.owner)
            else:
                path.unlink(missing_ok=True)
        self._config.unlink(missing_ok=True)
        self._manifest = None

    def _store(self, values: dict[str, Any]) -> None:
        write_atomically(self._config, json.dumps(values, indent=1, sort_keys=True).encode())
        self._manifest = values


def _foreign(path: Path) -> FileExistsError:
    return FileExistsError(
        f"{path} is not a file of this run: choose another output_dir, or move it"
    )


def _damaged(path: Path) -> UserError:
    return UserError(
        f"{path} is damaged, or not the configuration of a run: choose another output_dir, or "
        "empty this directory"
    )


@contextlib.contextmanager
def _make_directory(directory: Path) -> Iterator[None]:
    """Makes a directory and its parents; at the end, removes those that are empty."""
    # `os.path.exists` returns False for a name that is too long; mkdir then raises.
    absent = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    if os.path.isfile(directory):
        raise FileExistsError(f"{directory} is a file: give a new directory")
    try:
        with naming_failures(directory):
            _make_writable(directory)
        yield
    finally:
        with contextlib.suppress(OSError):  # such as: not empty
            for path in absent:
                path.rmdir()


def _make_writable(directory: Path, attempts: int = 5) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Only an attempt shows whether it is writable: root passes every permission check.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileNotFoundError:  # another start has just failed and removed the directory
        if not attempts:
            raise
        _make_writable(directory, attempts - 1)


def fingerprint_of(configuration: Mapping[str, Any]) -> str:
    """Returns a hash of a configuration without its environment."""
    ignored = (*_BESIDE, ENVIRONMENT)
    counted = {key: value for key, value in configuration.items() if key not in ignored}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def read_config(path: Path) -> dict[str, Any] | None:
    """Reads the manifest of a run; None if it is absent."""
    try:
        stored = json.loads(read_regular(path))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        stored = None
    if not (
        isinstance(stored, dict)
        and isinstance(stored.get(_KEPT), bool)
        and isinstance(stored.get(_FILES), list)
        and all(isinstance(name, str) for name in stored[_FILES])
        and all(isinstance(stored.get(name, {}), dict) for name in (MODEL_NAMES, "models"))
    ):
        raise _damaged(path)
    return stored


def difference(theirs: Any, ours: Any) -> str:
    """Describes the first differences of two configurations."""
    parts = dict(_differences(theirs, ours))
    if parts:  # names alone make no difference
        named = {}
        for role, here in ours.get(MODEL_NAMES, {}).items():
            there = theirs.get(MODEL_NAMES, {}).get(role, here)
            hashes = [each.get("models", {}).get(role) for each in (theirs, ours)]
            if there != here and (None in hashes or hashes[0] != hashes[1]):
                named[role.upper()] = f"{there} there, {here} here"
                parts.pop(f"models.{role}", None)
        parts = named | parts
    shown = [f"{key}: {text}" for key, text in parts.items()]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


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


Key = str | int | tuple[str | int, ...]

_SUFFIX = ".safetensors"
_VALUE = "value.json"  # the array that holds the compressed value
_SEAL = "seal"


class Record(NamedTuple):
    """The JSON value and the arrays, by name, of a key; arrays are mapped from the file."""

    value: Any
    arrays: dict[str, np.ndarray]


class Store:
    """Records of a run, by key: each is a file, complete or absent, and sealed to its run.

    Keys are texts, whole numbers, or tuples of them. Values are JSON values without NaN. Equal
    keys, values and arrays give equal bytes in every run with the same configuration, also in
    another environment.

    A file is a safetensors file: the arrays, the value as compressed JSON, and a seal: a checksum
    over the content, the key and the run's fingerprint. File names are derived from keys.

    The run's directory is claimed; to read records, `run.peek()` is enough. `name` is the directory
    of the records, one of `RunDirectory`'s `makes`.
    """

    def __init__(self, run: RunDirectory, name: str):
        self._run, self._name = run, name

    def __contains__(self, key: Key) -> bool:
        return self.path(key).exists()

    def path(self, key: Key) -> Path:
        """Returns the file of a key, which may be absent."""
        text = json.dumps(key)
        words = re.sub(r"[^A-Za-z0-9]+", "-", text)[:48].strip("-")
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._run.path / self._name / f"{words}-{digest}{_SUFFIX}"

    def get(self, key: Key) -> Record | None:
        """Reads the record of a key; None if it is absent."""
        path = self.path(key)
        if (seal := self._seal(path)) is None:
            return None
        maps, layouts = mappers(path), seal["arrays"]
        arrays = {name: maps[name](*layouts[name][:2]) for name in maps if name in layouts}
        if {name: _layout(array) for name, array in arrays.items()} != layouts:
            raise _refusal(path, "it was changed")
        return Record(json.loads(zlib.decompress(arrays.pop(_VALUE).data)), arrays)

    def read(self, key: Key) -> Record:
        """Reads the record of a key; raises FileNotFoundError if it is absent."""
        if (record := self.get(key)) is None:
            raise FileNotFoundError(
                f"{self.path(key)} was removed meanwhile: run the same command again"
            )
        return record

    def put(self, key: Key, value: Any, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Writes or replaces the record of a key; the run is then kept."""
        content = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
        assert _VALUE not in content, _VALUE
        text = json.dumps(value, allow_nan=False).encode()
        content[_VALUE] = np.frombuffer(zlib.compress(text), np.uint8)
        seal = {
            "arrays": {name: _layout(array) for name, array in content.items()},
            "fingerprint": self._run.fingerprint,
            "key": key,
        }
        seal["checksum"] = _checksum(seal)
        data = safetensors.numpy.save(content, {_SEAL: json.dumps(seal)})
        directory = self._run.own(self._name)
        with naming_failures(directory):
            directory.mkdir(exist_ok=True)
        write_atomically(self.path(key), data)
        self._run.keep()

    def keys(self) -> list[Key]:
        """Returns the keys of all records, sorted by their texts, without reading the arrays."""
        paths = (self._run.path / self._name).glob(f"*{_SUFFIX}")
        seals = filter(None, map(self._seal, paths))  # None: removed meanwhile
        keys = (seal["key"] for seal in seals)
        return sorted((tuple(x) if isinstance(x, list) else x for x in keys), key=json.dumps)

    def _seal(self, path: Path) -> dict[str, Any] | None:
        """The checked seal of a file, None if there is no file."""
        try:
            # Opening a pipe would block; a link may lead out of the run.
            if not stat.S_ISREG(path.lstat().st_mode):
                raise _refusal(path, "it is not a regular file")
            with safetensors.safe_open(path, "numpy") as file:
                seal = json.loads((file.metadata() or {}).get(_SEAL, "{}"))
        except FileNotFoundError:
            return None
        except (safetensors.SafetensorError, json.JSONDecodeError, RecursionError) as error:
            raise _refusal(path, f"it is damaged: {error}") from None
        if not isinstance(seal, dict) or seal.pop("checksum", None) != _checksum(seal):
            raise _refusal(path, "it was changed")
        if seal["fingerprint"] != self._run.fingerprint:
            raise _refusal(path, "it is from a run of another configuration")
        if self.path(seal["key"]) != path:
            raise _refusal(path, f"its key is {seal['key']!r}")
        return seal


def _checksum(seal: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(seal, sort_keys=True).encode()).hexdigest()


def _layout(array: np.ndarray) -> list[Any]:
    """The dtype and shape of an array, and a checksum of its content."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [array.dtype.str, list(array.shape), hashlib.sha256(content.data).hexdigest()]


def _refusal(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} is not a valid record of this run ({reason}): delete it, and run the same command "
        "again"
    )
