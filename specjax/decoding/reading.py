"""The caches of a finished row, as the beginning of a next prompt.

Axes: B rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compilation import jit_at, placement
from specjax.decoding.loop import Method
from specjax.models.beginnings import Beginning, noting
from specjax.types import Array, Cache, DecodeState, Params, Prompts


class Read(NamedTuple):
    """A model's cache in a state.

    Attributes:
      cache: its cache.
      length: `[B]` int32; its entries below it belong to the prompt and the committed tokens.
    """

    cache: Cache
    length: Array


def beginning_of(method: Method, params: Params, state: DecodeState, row: int) -> Beginning | None:
    """Takes the caches of a row, for the next prompt that begins with its tokens.

    Args:
      method: the method.
      params: its parameters.
      state: the state of its rows.
      row: the row, which is finished.

    Returns:
      A copy of the caches, and the number of the prompt's and the output's tokens that all of them
      have; None if the state does not show what its models have read.
    """
    leaves, structure = jax.tree.flatten(params)
    kinds = tuple((np.shape(x), jnp.result_type(x)) for x in leaves)
    order = _order(method, structure, kinds)
    found = reads(method.committed(state))
    if not order or max(order) >= len(found):
        return None
    taken = [found[i] for i in order]
    lengths = np.min([np.asarray(one.length)[row] for one in taken])
    rows = 1 if method.partitioner is None else method.partitioner.row_multiple
    caches = tuple(one.cache for one in taken)
    return Beginning(_take(placement(caches))(rows, caches, np.int32(row)), np.int32(lengths))


def reads(parts: Any) -> list[Read]:
    """All parts with a `cache` and a property `cached`, `[B]` int32, in their order.

    Entries of the cache below `cached` belong to the prompt and the committed tokens, in order.
    """
    if not isinstance(parts, tuple | list):
        return []
    own = [Read(parts.cache, parts.cached)] if hasattr(parts, "cached") else []  # type: ignore[union-attr]
    return own + [one for part in parts for one in reads(part)]


@functools.lru_cache(maxsize=64)
def _order(method: Method, structure: Any, kinds: tuple[Any, ...]) -> tuple[int, ...]:
    """The places in `reads` of the caches of a `Beginning`, in its order; () if one is missing."""
    found: list[int] = []

    def trace(params: Params) -> None:
        prompts = Prompts(jnp.zeros((1, 2), jnp.int32), jnp.full(1, 2, jnp.int32))
        prompts = Prompts(jnp.zeros((1, 2), jnp.int32), jnp.full(1, 2, jnp.int32))
        with noting() as noted:
            state = method.prefill(params, prompts, method.cache_length(2, 0, 1))
        # The same traced arrays.
        first = {id(jax.tree.leaves(one.cache)[0]): i for i, one in enumerate(reads(state))}
        places = [first.get(id(jax.tree.leaves(cache)[0])) for cache in noted]
        found.extend(place for place in places if place is not None)
        if len(found) < len(noted):
            found.clear()

    jax.eval_shape(trace, jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in kinds]))
    return tuple(found)


def _row(rows: int, caches: Any, row: Array) -> Any:
    """`rows` copies of a row."""

    def take(leaf: Array) -> Array:
        return jnp.repeat(jax.lax.dynamic_slice_in_dim(leaf, row, 1), rows, axis=0)

    return jax.tree.map(take, caches)


_take = jit_at(_row, static_argnums=0)
