"""From the arrays of a checkpoint to the parameters of a model, one array at a time."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from specjax.checkpoints.gguf_blocks import QuantisedMatrix
from specjax.checks import join_names
from specjax.errors import UserError
from specjax.memory import check_fits
from specjax.models.config import FLOATS

_READABLE = (*FLOATS, "float64")
# In place of a file's dtype that NumPy lacks, or that no array here has.
UNREAD = np.dtype("V1")
# The number of entries that are checked, or compared, together.
_BLOCK = 2**22

# A nested dict as `{"decoder/layers_0/mlp/wo/kernel": leaf}`, and back.
flatten = functools.partial(flax.traverse_util.flatten_dict, sep="/")
unflatten = functools.partial(flax.traverse_util.unflatten_dict, sep="/")


class ArraySpec(NamedTuple):
    """Shape and dtype of an array that has not been read.

    Attributes:
      dtype: `UNREAD` if it is not read.
      label: the file's name of the dtype, if it differs.
      stored_bytes: in the file, if it is quantised there.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    label: str = ""
    stored_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ArrayReader(Protocol):
    """An open checkpoint; `specs` are its arrays, by their names in the checkpoint."""

    directory: Path
    specs: dict[str, ArraySpec]

    def read(self, name: str) -> Any:
        """An array, perhaps a memory map, a `Stack` or a `QuantisedMatrix`."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices that are one array; they are copied one by one, into their places.

    They are arrays, or have a shape, slices, and become arrays where they are copied.
    """

    matrices: Sequence[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.matrices), *self.matrices[0].shape)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.matrices)

    def __getitem__(self, index: Any) -> "Stack":
        return Stack([matrix[index[1:]] for matrix in self.matrices[index[0]]])


View = np.ndarray | Stack | QuantisedMatrix


class Piece(NamedTuple):
    """A parameter's source in a checkpoint: an array, and its view as the parameter.

    Of a parameter that stacks several `arrays`, it is the first of them.
    """

    source: str
    view: Callable[[Any], View] = np.asarray
    arrays: int = 1


def check_same(
    path: Path,
    stored: Mapping[str, ArraySpec],
    expected: Mapping[str, tuple[int, ...]],
    remedy: str,
    unknown: Iterable[str] | None = None,
) -> None:
    """Checks that a checkpoint's `stored` arrays are those that a configuration needs.

    `unknown` are those that are not expected; by default those of other names.
    """
    unknown = set(stored) - set(expected) if unknown is None else unknown
    wrong = [
        f"{name} is {stored[name].shape} but should be {shape}"
        for name, shape in sorted(expected.items())
        if name in stored and stored[name].shape != shape
    ]
    differences = {
        "missing": sorted(set(expected) - set(stored)),
        "of a wrong shape": wrong,
        "unknown": sorted(unknown),
    }
    parts = [
        f"{len(names)} array{'s' if len(names) > 1 else ''} {kind}: {condense(names)}"
        for kind, names in differences.items()
        if names
    ]
    if parts:
        raise UserError(f"{path}: {'; '.join(parts)}. {remedy}")


def condense(names: Iterable[str]) -> str:
    """Lists names; numbers of layers and experts are merged: `block.*.wo`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        pattern = re.sub(r"(layers_|layers\.|block\.|experts\.)\d+", r"\1*", name)
        groups.setdefault(pattern, []).append(name)
    return join_names(key if len(group) > 1 else group[0] for key, group in groups.items())


def check_floating(path: Path, specs: Mapping[str, ArraySpec]) -> None:
    """Refuses quantised checkpoints; `specs` are the arrays that are parameters."""
    quantised = sorted(name for name, s in specs.items() if s.dtype.name not in _READABLE)
    if quantised:
        spec = specs[quantised[0]]
        raise UserError(
            f"{path}: {condense(quantised)} has dtype {spec.label or spec.dtype}, but quantised "
            "checkpoints are not supported; use the float32 or bfloat16 checkpoint"
        )


def check_sizes(path: Path, specs: Mapping[str, ArraySpec]) -> None:
    """Refuses arrays that do not fit into memory, such as those with a damaged shape."""
    if not specs:
        return
    name = max(specs, key=lambda name: specs[name].nbytes)
    what = f"{path}: the array {name} of shape {specs[name].shape}"
    check_fits(what, specs[name].nbytes, "copy the whole checkpoint again")


def materialise(
    reader: ArrayReader,
    pieces: Mapping[str, Piece],
    *,
    dtype: np.dtype,
    shardings: Mapping[str, jax.sharding.Sharding],
    check: bool = True,
    others: Mapping[str, Callable[[View], Any]] | None = None,
) -> dict[str, Any]:
    """Reads parameters straight into their dtype and sharding.

    Besides the finished parameters, the host holds at most one source array (none if it is a memory
    map) and the copies of one parameter in the target dtype. The largest arrays come first, while
    there is most memory. With `check`, each array is searched for NaN and infinity. `others` has,
    for the paths of parameters in another form, a function that makes and places it.
    """
    users: dict[str, list[str]] = {}
    for path, piece in pieces.items():
        users.setdefault(piece.source, []).append(path)

    def size(source: str) -> int:
        return reader.specs[source].nbytes * pieces[users[source][0]].arrays

    def stored(source: str) -> int:
        return reader.specs[source].stored_bytes or size(source)

    largest_first = sorted(users, key=size, reverse=True)
    flat: dict[str, Any] = {}
    shown: Any = {"total": sum(map(stored, users)), "unit": "B", "unit_scale": True, "leave": False}
    with tqdm.tqdm(**shown, desc=reader.directory.name, disable=None, delay=2.0) as bar:
        for source in largest_first:
            array = reader.read(source)
            for path in users[source]:
                view = pieces[path].view(array)
                if others is not None and path in others:
                    flat[path] = others[path](view)
                    continue
                flat[path] = _place(view, dtype, shardings[path])
                if check:
                    check_shards(f"{reader.directory}: {path}", flat[path])
            del array  # before the reader reads the next array
            bar.update(stored(source))
    return unflatten({path: flat[path] for path in pieces})


def _place(view: View, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(view, QuantisedMatrix) and len(sharding.device_set) == 1:
        return view.place(dtype, sharding).block_until_ready()
    placed = jax.make_array_from_callback(
        view.shape, sharding, lambda index: copy_as(view[index], dtype)
    )
    # Otherwise the host copies of several arrays could exist at once.
    return placed.block_until_ready()


def check_shards(name: str, array: jax.Array) -> None:
    """`check_finite` of this process's part of an array."""
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            begins = tuple(at.start or 0 for at in shard.index)
            check_finite(name, np.asarray(shard.data), begins)


def check_finite(name: str, values: np.ndarray, begins: tuple[int, ...]) -> None:
    """Refuses NaN and infinity in a part of an array, which begins at `begins`."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        if block.dtype == jnp.bfloat16:
            # The functions of ml_dtypes are 20 times slower.
            finite = (block.view(np.uint16) & 0x7F80) != 0x7F80
        else:
            finite = np.isfinite(block)
        if not finite.all():
            index = start + int(np.argmin(finite))
            place = np.unravel_index(index, values.shape)
            at = tuple(int(i + j) for i, j in zip(begins, place, strict=True))
            raise UserError(
                f"{name} has {flat[index]} at {at}: copy the checkpoint again, or load it with "
                "check_weights=False (convert: --no-check-weights)"
            )


def copy_as(view: View, dtype: np.dtype) -> np.ndarray:
    """A C-ordered copy in `dtype`; transposed matrices block by block, which is faster."""
    if isinstance(view, np.ndarray) and (view.ndim != 2 or view.flags.c_contiguous):
        return np.array(view, dtype=dtype, order="C")
    if isinstance(view, QuantisedMatrix):
        return np.asarray(view, dtype)
    out = np.empty(view.shape, dtype)
    for matrix, place in matrices_of(view, out):
        for start in range(0, matrix.shape[1], 64):
            # Rounding and transposing at once would take longer.
            place[:, start : start + 64] = np.asarray(matrix[:, start : start + 64], dtype)
    return out


def matrices_of(view: View, *others: np.ndarray) -> Iterable[tuple[Any, ...]]:
    """The matrices of a stack, or the only one, each with its part of the other arrays."""
    return zip(view, *others, strict=True) if len(view.shape) == 3 else [(view, *others)]


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have equal bits, compared a few rows at a time."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.reshape(x.shape[0] if x.ndim else 1, -1) for x in (a, b))
    rows = max(1, _BLOCK // max(1, a.shape[1]))
    return all(
        a[i : i + rows].tobytes() == b[i : i + rows].tobytes() for i in range(0, len(a), rows)
    )
