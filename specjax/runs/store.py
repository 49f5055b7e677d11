"""Records of a run on disk, by key: each is a file, complete or absent, and sealed to its run.

A file is a safetensors file: the arrays, the value as compressed JSON, and a seal. The seal is a
checksum over the content, the key and the run's fingerprint. It detects damaged records, and those
of another run or key. File names are derived from keys, never from the content of a record.
"""

import hashlib
import json
import re
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from specjax.errors import UserError
from specjax.memory import mappers
from specjax.runs.run_directory import RunDirectory
from specjax.writing import naming_failures, write_atomically

Key = str | int | tuple[str | int, ...]

_SUFFIX = ".safetensors"
_VALUE = "value.json"  # the array that holds the compressed value
_SEAL = "seal"


class Record(NamedTuple):
    """The value and the arrays of a key.

    Attributes:
      value: a JSON value.
      arrays: by name.
    """

    value: Any
    arrays: dict[str, np.ndarray]


class Store:
    """Records of a run, by key.

    Keys are texts, whole numbers, or tuples of them. Values are JSON values without NaN. Equal
    keys, values and arrays give equal bytes in every run with the same configuration, also in the
    parts of a run and in another environment.

    The run's directory is claimed; to read records, `run.peek()` is enough. `name` is the directory
    of the records, one of `RunDirectory`'s `makes`.
    """

    def __init__(self, run: RunDirectory, name: str):
        self._run, self._name = run, name

    def __contains__(self, key: Key) -> bool:
        return self.path(key).exists()

    def path(self, key: Key) -> Path:
        """Returns the file of a key, which may be absent."""
        text = _text(key)
        words = re.sub(r"[^A-Za-z0-9]+", "-", text)[:48].strip("-")
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._run.path / self._name / f"{words}-{digest}{_SUFFIX}"

    def get(self, key: Key, *, mapped: bool = False) -> Record | None:
        """Reads the record of a key; None if it is absent.

        With `mapped`, arrays are mapped into memory instead of loaded. They are read once in any
        case, to compare the checksum.
        """
        path = self.path(key)
        seal = self._seal(path)
        if seal is None:
            return None
        if seal["key"] != json.loads(_text(key)):
            raise _refused(path, f"its key is {seal['key']!r}")
        try:
            arrays = _mapped(path, seal["arrays"]) if mapped else _loaded(path)
            if {name: _layout(array) for name, array in arrays.items()} != seal["arrays"]:
                raise _refused(path, "it was changed")
            value = json.loads(zlib.decompress(arrays.pop(_VALUE).data))
        except (safetensors.SafetensorError, zlib.error) as error:
            raise _refused(path, f"it is damaged: {error}") from None
        return Record(value, arrays)

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

    def remove(self, key: Key) -> None:
        """Removes the record of a key, if there is one."""
        self.path(key).unlink(missing_ok=True)

    def keys(self) -> list[Key]:
        """Returns the keys of all records, sorted by their texts, without reading the arrays."""
        keys: dict[str, Key] = {}
        for path in sorted((self._run.path / self._name).glob(f"*{_SUFFIX}")):
            seal = self._seal(path)
            if seal is None:  # removed meanwhile
                continue
            key = tuple(seal["key"]) if isinstance(seal["key"], list) else seal["key"]
            if self.path(key) != path:
                raise _refused(path, f"its key is {key!r}")
            keys[_text(key)] = key
        return [keys[text] for text in sorted(keys)]

    def _seal(self, path: Path) -> dict[str, Any] | None:
        """The checked seal of a file, None if there is no file."""
        try:
            # Opening a pipe would block; a link may lead out of the run.
            if not stat.S_ISREG(path.lstat().st_mode):
                raise _refused(path, "it is not a regular file")
            with safetensors.safe_open(path, "numpy") as file:
                seal = json.loads((file.metadata() or {}).get(_SEAL, "null"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OSError(f"{path} cannot be read ({error.strerror}): make it readable") from None
        except (safetensors.SafetensorError, json.JSONDecodeError, RecursionError) as error:
            raise _refused(path, f"it is damaged: {error}") from None
        if not isinstance(seal, dict) or not seal.keys() >= {"arrays", "fingerprint", "key"}:
            raise _refused(path, "it has no seal")
        if seal["fingerprint"] != self._run.fingerprint:
            raise _refused(path, "it is from a run of another configuration")
        if seal.pop("checksum", None) != _checksum(seal):
            raise _refused(path, "it was changed")
        return seal


def _text(key: Key) -> str:
    return json.dumps(key)


def _loaded(path: Path) -> dict[str, np.ndarray]:
    with safetensors.safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _mapped(path: Path, layouts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    maps = mappers(path)
    return {name: maps[name](dtype, shape) for name, (dtype, shape, _) in layouts.items()}


def _checksum(seal: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(seal, sort_keys=True).encode()).hexdigest()


def _layout(array: np.ndarray) -> list[Any]:
    """The dtype and shape of an array, and a checksum of its content."""
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [array.dtype.str, list(array.shape), hashlib.sha256(content.data).hexdigest()]


def _refused(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} is not a valid record of this run ({reason}): delete it, and run the same command "
        "again"
    )
