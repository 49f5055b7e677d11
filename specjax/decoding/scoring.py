"""The verifier's pass over drafted blocks, no wider than the longest of them.

Axes: B rows, G longest block, V vocabulary, W tokens that a pass reads.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import checked_scores
from specjax.platforms import rows_in_tiles
from specjax.sampling import confidence, distribution
from specjax.types import Array, Cache, LanguageModel, Params, Sampling


class Scored(NamedTuple):
    """What the verifier says of a block.

    Attributes:
      p: `[B, G + 1, V]` float32, its distributions; past the width that was read anything.
      p_conf: `[B, G + 1, V]` float32, its confidences, or None.
      cache: its cache with the block in it.
    """

    p: Array  # [B, G + 1, V]
    p_conf: Array | None  # [B, G + 1, V]
    cache: Cache


def score(
    model: LanguageModel,
    params: Params,
    cache: Cache,
    tokens: Array,
    positions: Array,
    longest: Array,
    widths: Sequence[int],
    sampling: Sampling,
    *,
    with_confidence: bool,
    skipped: Array | None = None,
    rows: int | None = None,
) -> Scored:
    """Reads blocks in the least of the widths that holds them.

    Args:
      model: the verifier.
      params: its parameters.
      cache: its cache.
      tokens: `[B, G + 1]` int32, or more, as `widths` says.
      positions: `[B]` int32, where the first of them belongs.
      longest: int32 scalar, how many tokens of a row must be read.
      widths: increasing; each is compiled.
      sampling: fields `[B]`.
      with_confidence: whether the rule reads confidences (static).
      skipped: `[B]` int32, how many tokens come before the first whose distribution is wanted; None
        for none in any row.
      rows: with `skipped`, how many distributions are wanted (static).

    Returns:
      A `Scored`.
    """

    def said(logits: Array) -> tuple[Array, Array | None]:
        if skipped is not None:
            place = skipped[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
            logits = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(logits, place)
        with jax.named_scope("distribution"):
            logits = rows_in_tiles(logits)
            p = rows_in_tiles(jax.vmap(jax.vmap(distribution, in_axes=(0, None)))(logits, sampling))
            p_conf = jax.vmap(jax.vmap(confidence))(logits) if with_confidence else None
        return p, None if p_conf is None else rows_in_tiles(p_conf)

    full = widths[-1]
    if len(widths) == 1:
        with jax.named_scope("verifier_pass"):
            read = model.extend(params, cache, tokens[:, :full], positions)
        return Scored(*said(read.logits), read.cache)

    def branch(width: int, tokens: Array, positions: Array) -> Any:
        read_now = tokens[:, :width]
        with jax.named_scope("verifier_pass"):
            returned = model.score(params, cache, read_now, positions)
        logits, _, updates = checked_scores(model, returned, read_now)
        return *said(logits), updates

    like = jax.eval_shape(functools.partial(branch, full), tokens, positions)

    def padded(width: int, tokens: Array, positions: Array) -> Any:
        # Padded to one shape: what lies past the width is masked, or overwritten unseen.
        return jax.tree.map(_pad_to, branch(width, tokens, positions), like)

    index = jnp.searchsorted(jnp.asarray(widths, jnp.int32), longest)
    branches = [functools.partial(padded, width) for width in widths]
    p, p_conf, updates = lax.switch(index, branches, tokens, positions)
    # Outside of the switch, whose branches would copy the cache.
    with jax.named_scope("verifier_pass"):
        return Scored(p, p_conf, model.write(cache, updates, positions))


def powers_of_two(full: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `full`, and `full`."""
    return (*(1 << i for i in range((full - 1).bit_length())), full)


def check_widths(widths: Any, full: int) -> None:
    """Raises ValueError unless widths are a tuple that increases up to `full`."""
    whole = isinstance(widths, tuple) and all(type(width) is int for width in widths)
    if not whole or not widths or widths[0] < 1 or list(widths) != sorted({*widths, full}):
        raise ValueError(
            f"widths must be a tuple of whole numbers that increases from at least 1 to G + 1 = "
            f"{full}, got {widths}"
        )
    if widths[-1] != full:
        raise ValueError(f"widths must end with G + 1 = {full}, got {widths}")


def _pad_to(x: Array, like: Any) -> Array:
    """Pads every axis at its end."""
    return jnp.pad(x, [(0, after - now) for now, after in zip(x.shape, like.shape, strict=True)])
