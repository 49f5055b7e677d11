"""Quantises matrices while they are read: to 8 bits with Qwix.

What Qwix saves has no stable structure, so checkpoints keep their floats, and a model is quantised
whenever it is loaded.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from specjax.checkpoints.arrays import View, check_finite, copy_as, matrices_of
from specjax.checks import require
from specjax.compilation import jit
from specjax.models.int4 import Int4Weight
from specjax.models.quantised import QuantisedWeight, quantised_form
from specjax.platforms import host_cpu

# Blocks are copied and quantised beside each other; each takes a few times its floats.
_THREADS = 2
# The number of entries that are quantised together.
_BLOCK = 2**20


def quantised_placers(
    shapes: Mapping[str, tuple[int, ...]],
    shardings: Mapping[str, Sharding],
    form: str | None,
    check: Path | None,
) -> dict[str, Callable[[View], QuantisedWeight]]:
    """The functions that quantise and place the matrices of a model, by path.

    `form` is that of `specjax.models.quantised.quantised_form`; `check` the checkpoint, to search
    its matrices for NaN and infinity; None: not to.
    """
    placers: dict[str, Callable[[View], QuantisedWeight]] = {}
    for path, shape in shapes.items():
        if (kind := quantised_form(path, shape, form)) is not None:
            name = None if check is None else f"{check}: {path}"
            places = _of_arrays(shape, shardings[path], kind)
            _quantiser(kind)  # says at once that Qwix is missing
            placers[path] = functools.partial(_quantise, kind=kind, name=name, places=places)
    return placers


def _quantise(
    view: View, *, kind: type[QuantisedWeight], name: str | None, places: Sequence[Sharding]
) -> QuantisedWeight:
    axis, of_block = kind.channel_axis, _quantiser(kind)
    last = axis == 1 or kind.is_transposed  # the channels are the last axis of the arrays
    shapes, tree = jax.tree.flatten(kind.abstract(view.shape))
    arrays = [np.empty(x.shape, x.dtype) for x in shapes]

    def fill(number: int, matrix: Any, parts: list[np.ndarray], channels: slice) -> None:
        at = (slice(None),) * axis + (channels,)
        block = copy_as(matrix[at], np.dtype(np.float32))
        if name is not None:
            begins = (number, 0, channels.start) if axis else (number, channels.start, 0)
            dims = len(view.shape)
            check_finite(name, block[(None,) * (dims - 2)], begins[-dims:])
        for part, numbers in zip(parts, of_block(block), strict=True):
            part[(..., channels) if last else channels] = np.asarray(numbers)

    with ThreadPoolExecutor(_THREADS) as pool:
        for number, (matrix, *parts) in enumerate(matrices_of(view, *arrays)):
            channels, others = matrix.shape[axis], matrix.shape[1 - axis]
            step = max(1, _BLOCK // max(1, others))
            slices = [slice(start, start + step) for start in range(0, channels, step)]
            list(pool.map(functools.partial(fill, number, matrix, parts), slices))
    return jax.tree.unflatten(tree, map(_place, arrays, places))


def _place(array: np.ndarray, sharding: Sharding) -> jax.Array:
    cut = jax.make_array_from_callback(
        array.shape, sharding, lambda index: np.ascontiguousarray(array[index])
    )
    return cut.block_until_ready()


def _of_arrays(
    shape: tuple[int, ...], sharding: Sharding, kind: type[QuantisedWeight]
) -> list[Sharding]:
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
        axes = dataclasses.astuple(kind.axes(spec))
        return [NamedSharding(sharding.mesh, jax.P(*names)) for names in axes]
    return [sharding] * len(dataclasses.fields(kind))


@functools.cache
def _quantiser(kind: type[QuantisedWeight]) -> Callable[[np.ndarray], Sequence[Any]]:
    if issubclass(kind, Int4Weight):
        quantise: Any = jit(lambda block: tuple(jax.tree.leaves(kind.of(block))))
    else:
        quantise = _to_8_bits(kind.channel_axis)

    def on_host(block: np.ndarray) -> Sequence[Any]:
        # Qwix needs JAX's default promotions.
        with (
            jax.default_device(host_cpu()),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            return quantise(block)

    return on_host


def _to_8_bits(axis: int) -> Callable[[Any], Sequence[Any]]:
    qwix = require("qwix", "int8")

    @jit
    def quantise(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        matrix = qwix.quantize(block, jnp.int8, channelwise_axes=(axis,))
        return matrix.qvalue, matrix.scale.reshape(-1)

    return quantise
