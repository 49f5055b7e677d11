"""T5X checkpoints on disk: a msgpack file that refers to zarr arrays. No T5X, no TensorFlow.

    checkpoint_<step>/checkpoint      flax msgpack {"version": 3, "optimizer": {"target", "state"}}
    checkpoint_<step>/target.<name>/  one zarr array

A leaf of the msgpack is an array, or a TensorStore spec whose `kvstore` has a path inside the
directory. The spec's driver (`file`, `gfile`, `gcs`) names where T5X wrote it, not where it is now.
T5X's Orbax form (`checkpoint_<step>/state/_METADATA`) is read by `OrbaxReader`.

Source: `t5x/checkpoints.py`.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import flax.serialization
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from specjax.checkpoints.arrays import (
    ArrayReader,
    ArraySpec,
    check_sizes,
    condense,
    copy_as,
    flatten,
    unflatten,
)
from specjax.checkpoints.orbax import OrbaxReader, brief, is_orbax
from specjax.errors import MissingFileError, UserError

VERSION = 3
CHUNK_BYTES = 64 * 2**20
_STEP = re.compile(r"checkpoint_(\d+)")


def step_of(directory: Path) -> int | None:
    """The step in a checkpoint's name."""
    match = _STEP.fullmatch(directory.name)
    return int(match.group(1)) if match else None


def t5x_directory(path: Path) -> Path | None:
    """`checkpoint_<step>` itself, or the latest checkpoint in a model directory."""
    if _is_checkpoint(path):
        return path
    places = filter(Path.is_dir, path.iterdir())
    steps = {step: place for place in places if (step := step_of(place)) is not None}
    latest = steps[max(steps)] if steps else None
    if latest is not None and not _is_checkpoint(latest):
        raise UserError(
            f"{latest} has neither a file 'checkpoint' nor Orbax's state/_METADATA; copy the whole "
            "checkpoint"
        )
    return latest


def _is_checkpoint(directory: Path) -> bool:
    return (directory / "checkpoint").is_file() or is_orbax(directory / "state")


def t5x_reader(directory: Path) -> ArrayReader:
    """The arrays of a `checkpoint_<step>` under T5X's own names."""
    if (directory / "checkpoint").is_file():
        return T5XReader(directory)
    return OrbaxReader(directory / "state", "target")


class T5XReader:
    """The parameters (`target`) of a checkpoint in T5X's own format."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / "checkpoint"
        target = _read_target(path)
        # A TensorStore spec is a leaf.
        leaves = flatten(target, is_leaf=lambda _, value: "driver" in value and "kvstore" in value)
        folders = {
            name: self._folder(path, name, leaf)
            for name, leaf in leaves.items()
            if not isinstance(leaf, np.ndarray)
        }
        absent = [folder.name for folder in folders.values() if not (folder / ".zarray").is_file()]
        if absent:
            raise MissingFileError(
                f"{directory}: {len(absent)} of {len(leaves)} arrays are missing "
                f"({condense(absent)}); copy the whole checkpoint"
            )
        opened = {name: _open(folder) for name, folder in folders.items()}
        for name, array in opened.items():
            _check_chunks(folders[name], name, array)
        self._leaves = {**leaves, **opened}
        self.specs = {
            name: ArraySpec(
                tuple(leaf.shape), _true_dtype(getattr(leaf.dtype, "numpy_dtype", leaf.dtype))
            )
            for name, leaf in self._leaves.items()
        }
        check_sizes(directory, self.specs)

    def _folder(self, path: Path, name: str, leaf: Any) -> Path:
        spec = leaf if isinstance(leaf, dict) else {}
        kvstore = spec["kvstore"] if isinstance(spec.get("kvstore"), dict) else {}
        drivers = spec.get("driver"), kvstore.get("driver")
        if drivers not in (("zarr", "file"), ("zarr", "gfile"), ("zarr", "gcs")):
            raise UserError(
                f"{path}: {name} is neither an array nor zarr on file, gfile or gcs, which can be "
                "read; copy the file again"
            )
        # TensorStore before 0.1.14 kept the path outside the kvstore.
        inside = PurePosixPath(kvstore.get("path") or spec.get("path") or f"target.{name}")
        if inside.is_absolute() or ".." in inside.parts:
            raise UserError(f"{path}: {name} points to {inside}, outside the checkpoint")
        return self.directory / inside

    def read(self, name: str) -> np.ndarray:
        leaf = self._leaves[name]
        if not isinstance(leaf, np.ndarray):
            try:
                leaf = leaf.read().result()
            except ValueError as error:
                raise UserError(
                    f"{self.directory}: {name} is damaged ({brief(error)}); copy it again"
                ) from None
        return leaf.view(_true_dtype(leaf.dtype))


def _open(folder: Path) -> ts.TensorStore:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder.absolute()}/"}}
    try:
        return ts.open(spec, read=True).result()
    except ValueError as error:
        raise UserError(
            f"{folder} is not a readable zarr array ({brief(error)}); copy it again"
        ) from None


# The file of every chunk must exist: zarr reads a missing chunk as zeros.
def _check_chunks(folder: Path, name: str, array: ts.TensorStore) -> None:
    metadata = array.spec().to_json()["metadata"]
    if metadata.get("fill_value") is not None:
        return
    sizes = zip(metadata["shape"], metadata["chunks"], strict=True)
    grid = [-(-n // chunk) for n, chunk in sizes] or [1]
    separator = metadata.get("dimension_separator", ".")
    # A damaged shape may claim more chunks than can be listed.
    absent = math.prod(grid)
    for path in folder.rglob("*"):
        places = path.relative_to(folder).as_posix().split(separator)
        if (
            path.is_file()
            and len(places) == len(grid)
            and all(x.isdecimal() and x == str(int(x)) for x in places)
        ):
            absent -= all(int(place) < n for place, n in zip(places, grid, strict=True))
    if absent:
        raise MissingFileError(
            f"{folder.parent}: {absent} of {math.prod(grid)} chunks of {name} are missing in "
            f"{folder.name}; copy the whole checkpoint"
        )


def _read_target(path: Path) -> dict[str, Any]:
    packed = path.read_bytes()
    if packed.startswith(b"model_checkpoint_path"):
        raise UserError(
            f"{path} is a TensorFlow checkpoint of Mesh TensorFlow's T5; convert it with T5X's "
            "convert_tf_checkpoint first"
        )
    try:
        contents = flax.serialization.msgpack_restore(packed)
    except Exception as error:  # msgpack and flax raise a dozen kinds
        raise UserError(
            f"{path} is cut short or damaged ({type(error).__name__}: {brief(error)}); copy it "
            "again"
        ) from None
    optimizer = contents.get("optimizer") if isinstance(contents, dict) else None
    target = optimizer.get("target") if isinstance(optimizer, dict) else None
    if not isinstance(target, dict):
        raise UserError(
            f"{path} is not a T5X checkpoint: it has no optimizer/target; give another file"
        )
    return target


# T5X before version 3 wrote bfloat16 as uint16 of the same bits.
def _true_dtype(stored: np.dtype) -> np.dtype:
    return jnp.dtype("bfloat16") if stored == np.uint16 else stored


def write_t5x(directory: Path, params: Mapping[str, Any], *, step: int, dtype: np.dtype) -> None:
    """Writes T5's parameters by path into `checkpoint_<step>/`, without optimizer state."""
    checkpoint = directory / f"checkpoint_{step}"
    checkpoint.mkdir()
    target: dict[str, Any] = {}
    for path, value in params.items():
        folder = f"target.{path.replace('/', '.')}"
        array = copy_as(np.asarray(value), dtype)
        # Halves the longest even side until a chunk has at most `CHUNK_BYTES`.
        sides = list(array.shape)
        while math.prod(sides) * dtype.itemsize > CHUNK_BYTES:
            even = [side if side % 2 == 0 else 0 for side in sides]
            if not any(even):
                break
            sides[even.index(max(even))] //= 2
        spec = {
            "driver": "zarr",
            "dtype": dtype.name,
            "kvstore": {"driver": "file", "path": f"{folder}/"},
            "metadata": {
                "chunks": sides,
                "compressor": {"id": "gzip", "level": 1},
                "shape": list(array.shape),
            },
        }
        absolute = {"driver": "file", "path": f"{(checkpoint / folder).absolute()}/"}
        ts.open({**spec, "kvstore": absolute}, create=True).result().write(array).result()
        target[path] = spec
    # An integer array, as T5X expects the step.
    state = {"step": np.asarray(step, np.int32)}
    contents = {"version": VERSION, "optimizer": {"target": unflatten(target), "state": state}}
    (checkpoint / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(contents))
