"""Where the end of a text has occurred before.

Axes: B rows, C tokens of context.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from specjax.types import Array

# Tokens compared in one pass over the context: few texts match on for longer.
_AT_ONCE = 8


class Match(NamedTuple):
    """The longest ending of each row's context that occurs earlier in it, too.

    Attributes:
      lengths: `[B]` int32, how many tokens agree; 0 where the last token is new.
      places: `[B]` int32, where the token after the earlier occurrence is.
    """

    lengths: Array  # [B]
    places: Array  # [B]


def longest_match(
    context: Array, lengths: Array, *, most: int | None = None, latest: bool = False
) -> Match:
    """Finds the longest ending that occurs earlier, overlaps included.

    A scan for every round, and no index kept by `commit`: a scan reads the context once for each
    eight tokens that match, which beside a pass of a verifier is nothing, and needs no prefill.

    Args:
      context: `[B, C]` int32, of which `lengths [B]` tokens are real.
      lengths: `[B]` int32, at least 1.
      most: matches of more tokens count as of so many; None for no limit.
      latest: of several longest ones the last is taken, not the first.

    Returns:
      The matches. An earlier occurrence ends before the last token, so one follows it.
    """
    width = context.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    real = (place >= 1) & (place < lengths[:, None])
    found = _agreeing(context, lengths, real, width if most is None else most)
    longest = jnp.max(found, axis=1)
    best = real & (found == longest[:, None])
    if latest:
        return Match(longest, jnp.max(jnp.where(best, place, 0), axis=1))
    return Match(longest, jnp.min(jnp.where(best, place, width - 1), axis=1))


def _agreeing(context: Array, lengths: Array, real: Array, most: int) -> Array:
    """For each place, how many tokens before it are those at the context's end; `[B, C]` int32."""
    width = context.shape[1]

    def shift(text: Array) -> Array:
        return jnp.pad(text[:, :width], ((0, 0), (_AT_ONCE, 0)), constant_values=-1)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        done, shifted, found = carry  # shifted[:, j + _AT_ONCE] is context[:, j - done]
        at = lengths[:, None] - 1 - done - jnp.arange(_AT_ONCE, dtype=jnp.int32)[None]
        end = jnp.take_along_axis(context, jnp.maximum(at, 0), axis=1)
        # Before the start there is no token, and the two sides differ.
        end = jnp.where(at >= 0, end, -2)
        same = real & (found == done)
        for i in range(_AT_ONCE):
            before = shifted[:, _AT_ONCE - 1 - i :][:, :width]
            same &= (before == end[:, i : i + 1]) & (done + i < most)
            found += same.astype(jnp.int32)
        return done + _AT_ONCE, shift(shifted), found

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[0] < most) & jnp.any(real & (carry[2] == carry[0]))

    none = jnp.zeros(context.shape, jnp.int32)
    return lax.while_loop(unfinished, step, (jnp.int32(0), shift(context), none))[2]
