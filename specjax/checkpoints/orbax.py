"""Orbax directories: our own (`specjax.json`, `params/`), T5X's (`state/`), MaxText's, tunix's."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from specjax.checkpoints.arrays import ArraySpec, check_shards, check_sizes, flatten, unflatten
from specjax.errors import MissingFileError, UserError
from specjax.types import Params

PARAMS = "params"
_AS_NUMPY = ocp.RestoreArgs(restore_type=np.ndarray)


def is_orbax(directory: Path) -> bool:
    """Whether Orbax wrote a tree of arrays into this directory."""
    return (directory / "_METADATA").is_file()


def last_tree(directory: Path, *places: str) -> Path | None:
    """The tree that Orbax wrote at one of these patterns of paths, that of the last step."""
    found = [path for place in places for path in directory.glob(place) if is_orbax(path)]
    steps = {int(path.parent.name) if path.parent.name.isdecimal() else -1: path for path in found}
    return steps[max(steps)] if steps else None


class OrbaxReader:
    """The arrays of an Orbax tree, or those under a key, `target` in T5X's checkpoints."""

    def __init__(self, directory: Path, prefix: str = "") -> None:
        self.directory = directory.absolute()
        self._prefix = f"{prefix}/" if prefix else ""
        if not is_orbax(directory):
            raise MissingFileError(f"{directory} has no Orbax arrays; copy the whole directory")
        _check_ocdbt(self.directory)
        with quiet():
            self._checkpointer = ocp.PyTreeCheckpointer()
            try:
                tree = self._checkpointer.metadata(self.directory).item_metadata.tree
            except Exception as error:  # Orbax and TensorStore raise many kinds
                raise UserError(_damage(directory, error)) from None
        self.specs = {
            name.removeprefix(self._prefix): ArraySpec(tuple(leaf.shape), np.dtype(leaf.dtype))
            for name, leaf in flatten(tree).items()
            if name.startswith(self._prefix) and getattr(leaf, "shape", None) is not None
        }
        check_sizes(directory, self.specs)

    def shards(
        self, dtype: np.dtype, shardings: Mapping[str, jax.sharding.Sharding], check: bool
    ) -> dict[str, Any]:
        """All arrays, straight into their shards; a process reads only the parts of its devices."""
        flat = {}
        for name, spec in self.specs.items():
            where = ocp.ArrayRestoreArgs(
                dtype=dtype, sharding=shardings[name], global_shape=spec.shape
            )
            flat[name] = self.read(name, where)
            if check:
                check_shards(f"{self.directory}: {name}", flat[name])
        return unflatten(flat)

    def read(self, name: str, how: Any = _AS_NUMPY) -> Any:
        """An array, by default as one of NumPy.

        A call of Orbax per array: one for all would hold all their buffers at once.
        """
        item = unflatten({f"{self._prefix}{name}": 0})
        ways = jax.tree.map(lambda _: how, item)
        args = ocp.args.PyTreeRestore(item, ways, partial_restore=True)
        try:
            with quiet():
                (value,) = flatten(self._checkpointer.restore(self.directory, args)).values()
        except jax.errors.JaxRuntimeError:
            raise  # another process has failed, not the checkpoint
        except Exception as error:
            raise UserError(_damage(self.directory, error)) from None
        return value


def _check_ocdbt(directory: Path) -> None:
    manifest = directory / "manifest.ocdbt"
    if not manifest.is_file():
        if os.path.lexists(manifest) or any(directory.glob("ocdbt.process_*")):
            raise UserError(_damage(directory, FileNotFoundError(f"{manifest.name} is no file")))
        return
    try:
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{directory}/"}).result()
        described = [k for k in store.list().result() if k.endswith((b".zarray", b"zarr.json"))]
        for reading in [store.read(key) for key in described]:
            reading.result()
    except ValueError as error:
        raise UserError(_damage(directory, error)) from None


def _damage(directory: Path, error: Exception) -> str:
    what = f"{type(error).__name__}: {brief(error)}"
    return f"{directory} is cut short or damaged ({what}); copy it again"


def brief(error: Exception) -> str:
    """An error's first line, shortened."""
    return (str(error).splitlines() or [""])[0][:160]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences Orbax, which warns about files that T5X's older directories lack."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # important damage also raises
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def quiet_writes() -> Iterator[None]:
    """Like `quiet`; a failure is raised without 200 additional lines.

    TensorStore continues to write, and calls the event loop that Orbax has closed. So after a
    failure, what nobody can catch stays silent.
    """
    asyncio_log, before = logging.getLogger("asyncio"), sys.unraisablehook
    level = asyncio_log.level
    asyncio_log.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda report: None
    with quiet():
        yield
    sys.unraisablehook = before
    asyncio_log.setLevel(level)


def write_orbax(directory: Path, params: Params) -> None:
    """Writes `params/` into a directory; in a program of several processes, each must call it."""
    with quiet_writes(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / PARAMS, params)
