"""From the arrays of a checkpoint to the parameters of a model, one array at a time."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Params

FLOATS = ("float32", "bfloat16", "float16")
_READABLE = (*FLOATS, "float64")
# Numbers that are looked at together.
_BLOCK = 2**22


class ArraySpec(NamedTuple):
    """Shape and dtype of an array that has not been read.

    Attributes:
      shape: its shape.
      dtype: its dtype; uint8 for those that NumPy lacks.
      label: the file's own word for the dtype, where that is another.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    label: str = ""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class NotFiniteError(ValueError):
    """An array has a NaN or an infinity."""


class Reader(Protocol):
    """An open checkpoint.

    Attributes:
      specs: what it holds, by the names it uses itself.
      directory: where it lies.
    """

    directory: Path
    specs: dict[str, ArraySpec]

    def arrays(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields `(name, array)` in the order asked for; an array may be a memory map."""


class Piece(NamedTuple):
    """A parameter, and where in a checkpoint it comes from.

    Attributes:
      source: the checkpoint's name of an array.
      view: from that array to the parameter, without copying.
    """

    source: str
    view: Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass
class Mismatch:
    """How a checkpoint differs from what a configuration asks for.

    Attributes:
      missing: names asked for and not there.
      extra: names there and not asked for.
      wrong: (name, shape found, shape asked for).
    """

    missing: list[str] = dataclasses.field(default_factory=list)
    extra: list[str] = dataclasses.field(default_factory=list)
    wrong: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = dataclasses.field(
        default_factory=list
    )

    def raise_if_any(self, path: Path, remedy: str) -> None:
        """Raises an error that names every difference in one line.

        Args:
          path: the checkpoint.
          remedy: what the user can do.

        Raises:
          ValueError: if there is any difference.
        """
        parts = []
        if self.missing:
            parts.append(f"{_count(self.missing)} missing: {condense(self.missing)}")
        if self.wrong:
            described = [
                f"{name} is {found} and should be {asked}" for name, found, asked in self.wrong
            ]
            parts.append(f"{_count(self.wrong)} of a wrong shape: {condense(described)}")
        if self.extra:
            parts.append(f"{_count(self.extra)} unknown: {condense(self.extra)}")
        if parts:
            raise ValueError(f"{path}: {'; '.join(parts)}. {remedy}")


def _count(items: Sequence[Any]) -> str:
    return f"{len(items)} array{'s' if len(items) > 1 else ''}"


def compare(found: Mapping[str, ArraySpec], asked: Mapping[str, tuple[int, ...]]) -> Mismatch:
    """Compares names and shapes.

    Args:
      found: what a checkpoint holds.
      asked: what a configuration asks for.

    Returns:
      The differences, each list sorted.
    """
    return Mismatch(
        missing=sorted(set(asked) - set(found)),
        extra=sorted(set(found) - set(asked)),
        wrong=[
            (name, found[name].shape, shape)
            for name, shape in sorted(asked.items())
            if name in found and found[name].shape != shape
        ],
    )


def condense(names: Iterable[str]) -> str:
    """Lists names, those that differ in the layer's number only as one: `block.{0-11}.wo`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.search(r"(?:layers_|layers\.|block\.)(\d+)", name)
        if match is None:
            groups.setdefault((name, ""), [])
        else:
            key = (name[: match.start(1)], name[match.end() :])
            groups.setdefault(key, []).append(int(match[1]))
    return ", ".join(f"{head}{_ranges(numbers)}{tail}" for (head, tail), numbers in groups.items())


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` as `{0-2,5}`; one number as itself."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return text if len(numbers) < 2 else f"{{{text}}}"


def float_dtype(value: Any, name: str = "dtype") -> np.dtype:
    """Checks a dtype for parameters.

    Args:
      value: a dtype, or its name.
      name: of the argument, for messages.

    Returns:
      The NumPy dtype.

    Raises:
      ValueError: if it is not one of `FLOATS`.
    """
    try:
        dtype = jnp.dtype(value)
    except Exception:  # NumPy takes a text for a format, and Python's parser for a tuple
        dtype = None
    if dtype is None or dtype.name not in FLOATS:
        raise ValueError(f"`{name}` must be one of {', '.join(FLOATS)}, got {value!r}")
    return dtype


def check_floating(path: Path, specs: Mapping[str, ArraySpec]) -> None:
    """Refuses quantised checkpoints.

    Args:
      path: the checkpoint, for messages.
      specs: those of its arrays that are parameters.

    Raises:
      ValueError: for arrays that are not floating.
    """
    quantised = sorted(name for name, s in specs.items() if s.dtype.name not in _READABLE)
    if quantised:
        spec = specs[quantised[0]]
        raise ValueError(
            f"{path}: {condense(quantised)} has dtype {spec.label or spec.dtype}, but quantised "
            "checkpoints are not read; use the float32 or bfloat16 one"
        )


def own_dtype(specs: Iterable[ArraySpec]) -> np.dtype:
    """The dtype that holds a checkpoint's parameters without loss.

    Args:
      specs: of the arrays that are parameters.

    Returns:
      bfloat16 or float16 if all arrays are, else float32 (float64 is rounded to it).
    """
    dtypes = {spec.dtype for spec in specs}
    only = dtypes.pop() if len(dtypes) == 1 else None
    return only if only is not None and only.itemsize == 2 else np.dtype(np.float32)


def flatten(tree: Params) -> dict[str, Any]:
    """A nested dict as `{"decoder/layers_0/mlp/wo/kernel": leaf}`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        *parents, last = path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def materialise(
    reader: Reader,
    pieces: Mapping[str, Piece],
    *,
    dtype: np.dtype,
    shardings: Mapping[str, jax.sharding.Sharding],
    check_finite: bool = True,
) -> dict[str, Any]:
    """Reads parameters straight into their dtype and sharding.

    At any moment the host holds, besides the parameters that are done, one source array (nothing,
    where it is a memory map) and the copies of one parameter in the target dtype. The largest
    arrays come first, while there is most room.

    Args:
      reader: the open checkpoint.
      pieces: by parameter path.
      dtype: of all parameters.
      shardings: by parameter path.
      check_finite: whether to search each array for NaN and infinity.

    Returns:
      The nested dict of parameters.

    Raises:
      NotFiniteError: an array is not finite.
    """
    users: dict[str, list[str]] = {}
    for path, piece in pieces.items():
        users.setdefault(piece.source, []).append(path)
    largest_first = sorted(users, key=lambda name: -reader.specs[name].nbytes)
    flat: dict[str, Any] = {}
    for source, array in reader.arrays(largest_first):
        if check_finite:
            _check_finite(source, array)
        for path in users[source]:
            flat[path] = _place(pieces[path].view(array), dtype, shardings[path])
        del array  # before the reader brings the next one
    return unflatten({path: flat[path] for path in pieces})


def check_shards(name: str, array: jax.Array) -> None:
    """Raises NotFiniteError if what this process has of an array is not finite."""
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            begins = tuple(at.start or 0 for at in shard.index)
            _check_finite(name, np.asarray(shard.data), begins)


def _check_finite(name: str, array: np.ndarray, begins: tuple[int, ...] = ()) -> None:
    for start, block in _blocks(array):
        if block.dtype == jnp.bfloat16:
            # ml_dtypes is 20 times slower.
            finite = (block.view(np.uint16) & 0x7F80) != 0x7F80
        else:
            finite = np.isfinite(block)
        if not finite.all():
            at = np.unravel_index(int(np.argmin(finite)), block.shape)
            place = tuple(int(i + j) for i, j in zip(start, at, strict=True))
            value = array[place]
            if begins:
                place = tuple(i + j for i, j in zip(begins, place, strict=True))
            raise NotFiniteError(f"{name} has {value} at {place}")


def _blocks(array: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Views that make up an array, each of at most `_BLOCK` numbers, and where each begins."""
    if array.size <= _BLOCK:
        yield (0,) * array.ndim, array
        return
    # Along the axis whose slices lie together.
    axis = int(np.argmax(np.where(np.array(array.shape) > 1, np.abs(array.strides), -1)))
    rows = max(1, _BLOCK * array.shape[axis] // array.size)
    for i in range(0, array.shape[axis], rows):
        part = array[(slice(None),) * axis + (slice(i, i + rows),)]
        for start, block in _blocks(part):
            yield (*start[:axis], start[axis] + i, *start[axis + 1 :]), block


def _place(view: np.ndarray, dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    placed = jax.make_array_from_callback(
        view.shape, sharding, lambda index: copy_as(view[index], dtype)
    )
    # Else the host copies of several arrays could be alive at once.
    return placed.block_until_ready()


def copy_as(view: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A fresh, C-ordered copy in `dtype`; transposed matrices block by block, which is faster."""
    if view.ndim != 2 or view.flags.c_contiguous:
        return np.array(view, dtype=dtype, order="C")
    out = np.empty(view.shape, dtype)
    for start in range(0, view.shape[1], 64):
        out[:, start : start + 64] = view[:, start : start + 64]
    return out


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal bit for bit, compared a few rows at a time."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.reshape(x.shape[0] if x.ndim else 1, -1) for x in (a, b))
    rows = max(1, 2**22 // max(1, a.shape[1]))
    return all(
        a[i : i + rows].tobytes() == b[i : i + rows].tobytes() for i in range(0, len(a), rows)
    )
