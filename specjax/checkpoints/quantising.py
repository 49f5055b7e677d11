"""Quantises matrices while they are read, with Qwix.

What Qwix saves has no stable structure, so checkpoints keep their floats, and a model is quantised
whenever it is loaded.
"""

import functools
from collections.abc import Callable, Mapping
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
from specjax.errors import UserError
from specjax.models.int8 import Int8Weight, int8_form
from specjax.platforms import host_cpu

# Blocks are copied and quantised beside each other; each takes a few times its floats.
_THREADS = 2
# The number of entries that are quantised together.
_BLOCK = 2**20


def int8_placers(
    shapes: Mapping[str, tuple[int, ...]],
    shardings: Mapping[str, Sharding],
    form: str | None,
    check: Path | None,
) -> dict[str, Callable[[View], Int8Weight]]:
    """The functions that quantise and place the matrices of a model, by path.

    `form` is that of `specjax.models.int8.int8_form`; `check` the checkpoint, to search its
    matrices for NaN and infinity; None: not to.
    """
    placers: dict[str, Callable[[View], Int8Weight]] = {}
    for path, shape in shapes.items():
        if (kind := int8_form(path, shape, form)) is not None:
            name = None if check is None else f"{check}: {path}"
            places = shardings[path], _of_scales(path, shape, shardings[path], kind)
            _quantiser(kind)  # says at once that Qwix is missing
            placers[path] = functools.partial(_quantise, kind=kind, name=name, places=places)
    return placers


def _quantise(
    view: View, *, kind: type[Int8Weight], name: str | None, places: tuple[Sharding, Sharding]
) -> Int8Weight:
    axis, of_block = kind.channel_axis(), _quantiser(kind)
    values = np.empty(view.shape, np.int8)
    scales = np.empty((*view.shape[:-2], view.shape[-2:][axis]), np.float32)

    def fill(
        number: int, matrix: Any, in_8_bits: np.ndarray, of_channels: np.ndarray, channels: slice
    ) -> None:
        at = (slice(None),) * axis + (channels,)
        block = copy_as(matrix[at], np.dtype(np.float32))
        if name is not None:
            begins = (number, 0, channels.start) if axis else (number, channels.start, 0)
            dims = len(view.shape)
            check_finite(name, block[(None,) * (dims - 2)], begins[-dims:])
        in_8_bits[at], of_channels[channels] = map(np.asarray, of_block(block))

    with ThreadPoolExecutor(_THREADS) as pool:
        for number, parts in enumerate(matrices_of(view, values, scales)):
            channels, others = parts[0].shape[axis], parts[0].shape[1 - axis]
            step = max(1, _BLOCK // max(1, others))
            slices = [slice(start, start + step) for start in range(0, channels, step)]
            list(pool.map(functools.partial(fill, number, *parts), slices))
    return kind(_place(values, places[0]), _place(scales, places[1]))


def _place(array: np.ndarray, sharding: Sharding) -> jax.Array:
    cut = jax.make_array_from_callback(
        array.shape, sharding, lambda index: np.ascontiguousarray(array[index])
    )
    return cut.block_until_ready()


def _of_scales(
    path: str, shape: tuple[int, ...], sharding: Sharding, kind: type[Int8Weight]
) -> Sharding:
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
        return NamedSharding(sharding.mesh, jax.P(*kind.axes(spec).scales))
    if len(sharding.device_set) > 1:
        raise UserError(
            f"`shardings` of quantised matrices must be NamedShardings, got {sharding} for {path}"
        )
    return sharding


@functools.cache
def _quantiser(kind: type[Int8Weight]) -> Callable[[np.ndarray], tuple[Any, Any]]:
    qwix = require("qwix", "int8")

    @jit
    def quantise(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        matrix = qwix.quantize(block, jnp.int8, channelwise_axes=(kind.channel_axis(),))
        return matrix.qvalue, matrix.scale.reshape(-1)

    def on_host(block: np.ndarray) -> tuple[Any, Any]:
        # Qwix needs JAX's default promotions.
        with (
            jax.default_device(host_cpu()),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            return quantise(block)

    return on_host
