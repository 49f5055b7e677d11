"""The verifier's pass over drafted blocks, no wider than the longest block.

Axes: B rows, G longest block, N = G + 1 nodes, V vocabulary, D width, W tokens of a pass.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from specjax.checks import checked_scores
from specjax.decoding.tree import part_of, shape_of
from specjax.errors import UserError
from specjax.platforms import rows_in_tiles
from specjax.processing import distributions_along
from specjax.sampling import confidence
from specjax.types import Cache, LanguageModel, Params, Sampling


class Scored(NamedTuple):
    """The verifier's output for a block.

    Attributes:
      p: its distributions; arbitrary past the width of the pass.
      p_conf: its confidences, or None.
      hidden: the hidden states behind them, or None.
      logits: of `p`, or None.
      cache: its cache with the block in it.
    """

    p: Float32[Array, "B N V"]
    p_conf: Float32[Array, "B N V"] | None
    hidden: Float[Array, "B N D"] | None
    logits: Float32[Array, "B N V"] | None
    cache: Cache


class Wanted(NamedTuple):
    """The requested outputs of a pass.

    Attributes:
      sampling: fields `[B]`.
      with_confidence: whether to return confidences (static).
      with_hidden: whether to return hidden states (static).
      with_logits: whether to return logits (static).
      parents: if blocks are trees; else None.
      skipped: tokens before the first distribution to return; None for 0.
      rows: with `skipped`, the number of distributions to return (static).
    """

    sampling: Sampling
    with_confidence: bool
    with_hidden: bool = False
    with_logits: bool = False
    parents: Int32[Array, "B G"] | None = None
    skipped: Int32[Array, " B"] | None = None
    rows: int = 0


def score(
    model: LanguageModel,
    params: Params,
    cache: Cache,
    tokens: Int32[Array, "B W"],
    positions: Int32[Array, " B"],
    longest: Int32[Array, ""],
    widths: Sequence[int],
    wanted: Wanted,
) -> Scored:
    """Reads blocks in the smallest of `widths` that holds the `longest`; each width is compiled.

    `positions` are those of the first tokens. There may be more than G + 1 tokens, up to the
    largest width, if `wanted` skips some.
    """
    full, tree = widths[-1], shape_of(wanted.parents)
    if len(widths) == 1:
        read_now = tokens[:, :full]
        given = () if tree is None else (part_of(tree, 0, full),)
        with jax.named_scope("verifier_pass"):
            read = model.extend(params, cache, read_now, positions, *given)
        return Scored(*_outputs(wanted, read.logits, read.hidden, read_now), read.cache)

    def branch(width: int, tokens: Array, positions: Array) -> Any:
        read_now = tokens[:, :width]
        with jax.named_scope("verifier_pass"):
            if tree is None:
                returned = model.score(params, cache, read_now, positions)
            else:
                of_width = part_of(tree, 0, width)
                returned = model.score_tree(params, cache, read_now, positions, of_width)
        logits, hidden, updates = checked_scores(model, returned, read_now)
        return *_outputs(wanted, logits, hidden, read_now), updates

    like = jax.eval_shape(functools.partial(branch, full), tokens, positions)

    def pad(x: Array, like: Any) -> Array:
        return jnp.pad(x, [(0, all_ - now) for now, all_ in zip(x.shape, like.shape, strict=True)])

    def padded(width: int, tokens: Array, positions: Array) -> Any:
        # Padded to one shape: entries past the width are masked, or overwritten before they are
        # read.
        return jax.tree.map(pad, branch(width, tokens, positions), like)

    index = jnp.searchsorted(jnp.asarray(widths, jnp.int32), longest)
    branches = [functools.partial(padded, width) for width in widths]
    p, p_conf, hidden, logits, updates = lax.switch(index, branches, tokens, positions)
    # Outside of the switch: its branches would copy the cache.
    with jax.named_scope("verifier_pass"):
        cache = model.write(cache, updates, positions)
        return Scored(p, p_conf, hidden, logits, cache)


def _outputs(
    wanted: Wanted, logits: Array, hidden: Array, tokens: Array
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """`Scored` but for its cache, from logits `[B, W, V]` and hidden states of `tokens [B, W]`."""
    parents = None if wanted.parents is None else wanted.parents[:, : tokens.shape[1] - 1]
    if wanted.skipped is not None:
        place = wanted.skipped[:, None] + jnp.arange(wanted.rows, dtype=jnp.int32)[None]
        pick = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))
        logits, tokens = pick(logits, place), pick(tokens, place)
    with jax.named_scope("distribution"):
        logits = rows_in_tiles(logits)
        p = rows_in_tiles(distributions_along(logits, wanted.sampling, tokens[:, 1:], parents))
        p_conf = jax.vmap(jax.vmap(confidence))(logits) if wanted.with_confidence else None
    p_conf = None if p_conf is None else rows_in_tiles(p_conf)
    hidden_or_none = hidden if wanted.with_hidden else None
    return p, p_conf, hidden_or_none, logits if wanted.with_logits else None


def powers_of_two(full: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `full`, and `full`."""
    return (*(1 << i for i in range((full - 1).bit_length())), full)


def check_widths(widths: Any, full: int) -> None:
    """Raises UserError unless widths are a tuple that increases up to `full`."""
    whole = isinstance(widths, tuple) and all(type(width) is int for width in widths)
    rising = whole and list(widths) == sorted({*widths, full}) and widths[0] >= 1
    if not rising or widths[-1] != full:
        raise UserError(
            f"widths must be a tuple of whole numbers that increases from at least 1 to G + 1 = "
            f"{full}, got {widths}"
        )
