"""The programs of a method on a mesh, lowered for shapes: nothing is allocated.

The devices may be those of another machine (`jax.experimental.topologies`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from specjax.compilation import placement
from specjax.decoding.method import (
    ByToken,
    Method,
    first_state,
    jitted_init,
    jitted_insert,
    jitted_run,
)
from specjax.types import DecodeState, Params, PromptBatch


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """The shapes of a pytree, each with its sharding of a pytree like it."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


def lower_init(
    method: Method, params: Params, prompts: PromptBatch, *, max_new: int, max_length: int
) -> tuple[jax.stages.Lowered, DecodeState]:
    """The program of `method.init`, and the shapes of its result.

    Args:
      method: with a partitioner.
      params: the shapes of its parameters, with shardings.
      prompts: the shapes of its prompts, with shardings.
      max_new: N.
      max_length: S, cache positions.

    Returns:
      The lowered program, and the state's shapes with shardings.
    """
    static = (max_new, max_length, ByToken(), 1)
    shapes, where = first_state(method, static, params, prompts)
    lowered = jitted_init(where).lower(method, *static, params, prompts)
    leaves, structure = jax.tree.flatten(shapes)
    return lowered, jax.tree.unflatten(structure, with_shardings(leaves, list(where[1])))


def lower_run(method: Method, params: Params, state: DecodeState) -> jax.stages.Lowered:
    """The program of `method.run`; `state` from `lower_init`."""
    stop = _whole((), state)
    return jitted_run(placement(state)).lower(method, params, state, stop, stop)


def lower_insert(state: DecodeState, new: DecodeState) -> jax.stages.Lowered:
    """The program of `insert_rows`; both states from `lower_init`."""
    return jitted_insert(placement(state)).lower(state, _whole(new.lengths.shape, state), new)


def _whole(shape: tuple[int, ...], state: DecodeState) -> jax.ShapeDtypeStruct:
    """The shape of int32 numbers that every device has in whole."""
    where = state.lengths.sharding
    assert isinstance(where, NamedSharding)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(where.mesh, jax.P()))
