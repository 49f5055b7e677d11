"""Drafting until the drafter is unsure: the first half of a step of token cascades and BiLD.

Axes: B rows, G longest draft, V vocabulary, U uniforms of a draw.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.decoding.history import put_column
from specjax.decoding.pair_method import log_at
from specjax.decoding.state import end_tokens, read_token
from specjax.sampling import confidence, distribution, draw
from specjax.types import Array, Cache, DecodeState, LanguageModel, Params, StopState


class Drafted(NamedTuple):
    """What the drafter has written. Past `counts` the arrays hold anything.

    Attributes:
      tokens: `[B, G + 1]` int32.
      counts: `[B]` int32, 0 .. G.
      log_q: `[B, G + 1]` float32, the tokens' log-probabilities as they were drawn.
      probs: `[B, G + 1, V]` float32, what they were drawn from, or None unless asked for.
      confidences: `[B, G + 1, V]` float32, likewise.
      calls: `[B]` int32, how many passes read a token of the row.
      ended: `[B]` bool, whether the row ends with the last of them: by an end-of-sequence token or
        its limit.
      stopped: `[B]` bool, whether the last of them completes a stop string.
      nan: `[B]` bool, whether the drafter gave NaN.
      cache: the drafter's cache; it holds all that is drafted, unless the draft has ended a text.
    """

    tokens: Array  # [B, G + 1]
    counts: Array  # [B]
    log_q: Array  # [B, G + 1]
    probs: Array | None  # [B, G + 1, V]
    confidences: Array | None  # [B, G + 1, V]
    calls: Array  # [B]
    ended: Array  # [B]
    stopped: Array  # [B]
    nan: Array  # [B]
    cache: Cache


class _Drafting(NamedTuple):
    """What the loop carries."""

    step: Array
    drafted: Drafted
    last: Array  # [B]
    going: Array  # [B]
    stop: StopState | None  # with the drafted tokens read


def draft_until_fallback(
    model: LanguageModel,
    params: Params,
    state: DecodeState,
    fallback: Any,
    uniforms: Array,
    eos_ids: tuple[int, ...],
    *,
    keep_probs: bool,
    keep_confidences: bool,
) -> Drafted:
    """Draws tokens until the fallback rule defers, the row's limit is reached, or the text ends.

    The decision is made before the token is drawn, from the distribution at its place. A row at its
    limit still reads its last token, in a pass of one token: so the drafter never lags.

    Args:
      model: the drafter.
      params: its parameters.
      state: the rows; `state.inner` is a `CascadeState`.
      fallback: a deferral rule that reads the drafter alone; strengths `[B]`.
      uniforms: `[B, G, U]` float32 in [0, 1), independent.
      eos_ids: tokens that end a row.
      keep_probs: whether `probs` are wanted (static).
      keep_confidences: whether `confidences` are wanted (static).

    Returns:
      What was drafted; nothing in rows that are finished.
    """
    rows, longest, _ = uniforms.shape
    start = state.inner.drafter

    def step(carry: _Drafting) -> _Drafting:
        index, drafted = carry.step, carry.drafted
        logits, _, cache = model.extend(
            params, drafted.cache, carry.last[:, None], start.positions + index
        )
        q = jax.vmap(distribution)(logits[:, 0], state.sampling)
        reads = fallback.reads_draft_confidence or keep_confidences
        q_conf = jax.vmap(confidence)(logits[:, 0]) if reads else None
        defers = jax.vmap(lambda rule, *of: rule.defers(of[0], None, of[1], None))(
            fallback, q, q_conf
        )
        nan = carry.going & jnp.isnan(q[:, 0])
        draws = carry.going & ~defers & ~nan & (index < state.draft_limits)
        uniform = lax.dynamic_index_in_dim(uniforms, index, axis=1, keepdims=False)
        token = jax.vmap(draw)(q, uniform)
        full = state.lengths + index + 1 >= state.limits
        ended = draws & (end_tokens(token, eos_ids) | full)
        stop, complete = read_token(carry.stop, token)
        stopped = draws & complete
        drafted = Drafted(
            tokens=put_column(drafted.tokens, token, index),
            counts=drafted.counts + draws.astype(jnp.int32),
            log_q=put_column(drafted.log_q, log_at(q, token), index),
            probs=None if drafted.probs is None else put_column(drafted.probs, q, index),
            confidences=(
                None
                if drafted.confidences is None
                else put_column(drafted.confidences, q_conf, index)
            ),
            calls=drafted.calls + carry.going.astype(jnp.int32),
            ended=drafted.ended | ended,
            stopped=drafted.stopped | stopped,
            nan=drafted.nan | nan,
            cache=cache,
        )
        return _Drafting(index + 1, drafted, token, draws & ~ended & ~stopped, stop)

    def unfinished(carry: _Drafting) -> Array:
        return (carry.step <= longest) & jnp.any(carry.going)

    nothing = jnp.zeros((rows,), bool)
    wide = jnp.zeros((rows, longest + 1, model.vocab_size), jnp.float32)
    empty = Drafted(
        tokens=jnp.zeros((rows, longest + 1), jnp.int32),
        counts=jnp.zeros((rows,), jnp.int32),
        log_q=jnp.zeros((rows, longest + 1), jnp.float32),
        probs=wide if keep_probs else None,
        confidences=wide if keep_confidences else None,
        calls=jnp.zeros((rows,), jnp.int32),
        ended=nothing,
        stopped=nothing,
        nan=nothing,
        cache=start.cache,
    )
    first = _Drafting(jnp.int32(0), empty, state.inner.tokens, ~state.finished, state.stop)
    return lax.while_loop(unfinished, step, first).drafted
