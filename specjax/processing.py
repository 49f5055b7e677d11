"""How rows draw their tokens: processors change the distribution, and follow the tokens.

A processor's state is the state after a row's committed tokens. Code that looks ahead, along a
block, advances a copy; so nothing has to be rolled back.

Axes: B rows, T nodes of a block, M = T - 1 drafted nodes, V vocabulary, U uniforms of a draw.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from specjax.platforms import entry
from specjax.sampling.distributions import (
    distribution,
    draw_from_logits,
    log_confidence,
    log_distribution,
)
from specjax.sampling.draws import TINY
from specjax.types import LogProbs, Processing, PromptBatch, Sampling
from specjax.types.pytrees import where_rows

# Processors of this order or a larger one read what temperature, top-k and top-p leave.
_LATE = 100
# Larger logits are cut to this, so that no sum of them overflows.
_LARGEST = 1e37


def distributions(logits: Float[Array, "B V"], sampling: Sampling) -> Float32[Array, "B V"]:
    """`sampling.distribution` of rows, their logits processed."""
    logits, sampling = _process_rows(logits, sampling)
    return jax.vmap(distribution)(logits, sampling)


def draws(
    logits: Float[Array, "B V"], sampling: Sampling, uniforms: Float32[Array, "B *U"]
) -> tuple[Float32[Array, "B V"], Int32[Array, " B"]]:
    """`sampling.draw_from_logits` of rows: probabilities, and a token of each."""
    logits, sampling = _process_rows(logits, sampling)
    return jax.vmap(draw_from_logits)(logits, sampling, uniforms)


def distributions_along(
    logits: Float[Array, "B T V"],
    sampling: Sampling,
    tokens: Int32[Array, "B M"],
    parents: Int32[Array, "B M"] | None = None,
) -> Float32[Array, "B T V"]:
    """The distributions after node 0, the last committed token, and after the other `tokens`.

    `sampling` is that of the first token, fields `[B]`; `parents` is None for a chain.
    """
    if sampling.processing is not None:
        logits, sampling = _process_along(sampling, logits, tokens, parents)
    return jax.vmap(jax.vmap(distribution, in_axes=(0, None)))(logits, sampling)


def logs_along(
    probs: Float32[Array, "B T V"],
    logits: Float[Array, "B T V"] | None,
    sampling: Sampling,
    tokens: Int32[Array, "B T"],
    counted: Bool[Array, "B T"],
    *,
    with_plain: bool,
) -> LogProbs:
    """`LogProbs` of a block's tokens but for `target`, also where a probability rounds to 0.

    Args:
      probs: `distributions_along` of `logits` and the tokens.
      logits: None if all tokens have probability and `plain` is not requested.
      sampling: how the first token is drawn, fields `[B]`.
      counted: other tokens may get -inf.
      with_plain: whether to return `plain` (static): it takes another pass over the logits.
    """
    of_each = lambda function, *of: jax.vmap(jax.vmap(function))(*of, tokens)  # noqa: E731
    p = jnp.log(of_each(entry, probs))
    if logits is None:
        return LogProbs(None, p)
    plain = of_each(log_confidence, logits) if with_plain else None
    rare = (p == -jnp.inf) & counted & ~_greedy(sampling)[:, None]
    below = of_each(entry, logits).astype(jnp.float32) - jnp.max(logits, axis=-1)
    if sampling.processing is None:
        if sampling.top_k is None and sampling.top_p is None:
            # The most probable token has the same normalizer.
            by_top = below / jnp.asarray(sampling.temperature)[:, None] + jnp.log(
                jnp.max(probs, axis=-1)
            )
            return LogProbs(plain, jnp.where(rare, by_top, p))
        # Other tokens that have no probability are left out by a filter.
        least = jnp.log(TINY * logits.shape[-1]) * sampling.temperature
        rare &= below <= 0.9 * least[:, None]

    def exact(p: Array) -> Array:
        changed, after = logits, sampling
        if sampling.processing is not None:
            changed, after = _process_along(sampling, logits, tokens[:, :-1], None)
        logs = jax.vmap(jax.vmap(log_distribution, in_axes=(0, None)))(changed, after)
        return jnp.where(rare, of_each(entry, logs), p)

    return LogProbs(plain, lax.cond(jnp.any(rare), exact, lambda p: p, p))


def initial_processing(
    prompts: PromptBatch, vocab_size: int, room: int, params: Any
) -> Processing | None:
    """The processors after the prompts.

    `params` are the arrays that rows share, for each processor; for `room` see `Processor.init`.
    """
    processors = prompts.sampling.processors
    if processors is None:
        return None
    rows = prompts.ids.shape
    processors = jax.tree.map(lambda x: jnp.broadcast_to(x, rows), processors)
    assert prompts.prefix is None, "processors read an output from its first token"
    prompts = prompts._replace(
        inputs=jnp.asarray(prompts.inputs, jnp.int32),
        input_lengths=jnp.asarray(prompts.input_lengths, jnp.int32),
        limits=jnp.asarray(prompts.limits, jnp.int32),
    )
    states = tuple(
        processor.init(shared, prompts, vocab_size, room)
        for processor, shared in zip(processors, params, strict=True)
    )
    return Processing(None, states)


def with_params(sampling: Sampling, params: Any) -> Sampling:
    """The same sampling with the arrays that rows share; None removes them."""
    if sampling.processing is None:
        return sampling
    processing = dataclasses.replace(sampling.processing, params=params)
    return with_processing(sampling, processing)


def advance(sampling: Sampling, tokens: Int32[Array, "B T"], counts: Array) -> Sampling:
    """The sampling after each row's first `counts` (int32 or bool) of the tokens."""
    if sampling.processing is None:
        return sampling

    def step(state: Any, at: tuple[Array, Array]) -> tuple[Any, None]:
        token, index = at
        return where_rows(index < counts, _after(sampling, state, token), state), None

    index, counts = jnp.arange(tokens.shape[1], dtype=jnp.int32), counts.astype(jnp.int32)
    state, _ = lax.scan(step, sampling.processing.state, (tokens.T, index))
    processing = dataclasses.replace(sampling.processing, state=state)
    return with_processing(sampling, processing)


def with_processing(sampling: Sampling, processing: Processing | None) -> Sampling:
    """The sampling with its processors at another place, such as further along a draft."""
    return sampling if processing is None else dataclasses.replace(sampling, processing=processing)


def unprocessed(sampling: Sampling) -> Sampling:
    """The sampling without processors."""
    return dataclasses.replace(sampling, processors=None, processing=None)


def _process_rows(logits: Array, sampling: Sampling) -> tuple[Array, Sampling]:
    if sampling.processing is None:
        return logits, sampling
    return _process(sampling, sampling.processing.state, logits), _runs_late(sampling)


def _runs_late(sampling: Sampling) -> Sampling:
    """The sampling of logits that `_process` has changed."""
    assert sampling.processors is not None
    if all(processor.order < _LATE for processor in sampling.processors):
        return unprocessed(sampling)
    return Sampling(jnp.where(_greedy(sampling), 0.0, 1.0).astype(jnp.float32))


def _greedy(sampling: Sampling) -> Array:
    return jnp.asarray(sampling.temperature) < TINY


def _process(sampling: Sampling, states: Any, logits: Array) -> Array:
    assert sampling.processors is not None and sampling.processing is not None
    every = list(zip(sampling.processors, sampling.processing.params, states, strict=True))
    logits = logits.astype(jnp.float32)
    for processor, params, state in every:
        if processor.order < _LATE:
            logits = _changed(processor, params, state, logits)
    late = [(x, params, state) for x, params, state in every if x.order >= _LATE]
    if not late:
        return logits
    # A token that these leave out is left out of what follows.
    left = jnp.log(jax.vmap(distribution)(logits, unprocessed(sampling)))
    for processor, params, state in late:
        left = _changed(processor, params, state, jax.nn.log_softmax(left))
    return jnp.where(_greedy(sampling)[:, None], logits, left)


def _changed(processor: Any, params: Any, state: Any, logits: Array) -> Array:
    new = processor.process(params, state, logits)
    name = type(processor).__name__
    assert new.shape == logits.shape, f"{name}.process returns {new.shape} for {logits.shape}"
    assert new.dtype == jnp.float32, f"{name}.process must return float32, got {new.dtype}"
    if processor.forbids or processor.order >= _LATE:
        new = jnp.where(jnp.all(new == -jnp.inf, axis=1, keepdims=True), logits, new)
    else:
        # A sum that overflows must not forbid a token.
        new = jnp.where(logits == -jnp.inf, logits, jnp.clip(new, -_LARGEST, _LARGEST))
    # A processor must not hide a NaN.
    return jnp.where(jnp.any(jnp.isnan(logits), axis=1, keepdims=True), jnp.nan, new)


def _after(sampling: Sampling, states: Any, tokens: Array) -> Any:
    assert sampling.processors is not None and sampling.processing is not None
    every = zip(sampling.processors, sampling.processing.params, states, strict=True)
    return tuple(processor.advance(params, state, tokens) for processor, params, state in every)


def _process_along(
    sampling: Sampling, logits: Array, tokens: Array, parents: Array | None
) -> tuple[Array, Sampling]:
    assert sampling.processing is not None
    columns, first = jnp.swapaxes(logits, 0, 1), sampling.processing.state
    if parents is None:

        def step(state: Any, at: tuple[Array, Array]) -> tuple[Any, Array]:
            token, logits = at
            return _after(sampling, state, token), _process(sampling, state, logits)

        following = jnp.pad(tokens, ((0, 0), (0, 1)))
        changed = lax.scan(step, first, (following.T, columns))[1]
        return jnp.swapaxes(changed, 0, 1), _runs_late(sampling)

    def grow(states: Any, at: tuple[Array, Array, Array]) -> tuple[Any, None]:
        token, parent, node = at
        pick = jax.vmap(lambda x, i: lax.dynamic_index_in_dim(x, i, keepdims=False), (1, 0))
        new = _after(sampling, jax.tree.map(lambda x: pick(x, parent), states), token)
        return jax.tree.map(lambda x, y: x.at[node].set(y), states, new), None

    count = logits.shape[1]
    states = jax.tree.map(lambda x: jnp.repeat(x[None], count, axis=0), first)
    nodes = jnp.arange(1, count, dtype=jnp.int32)
    states, _ = lax.scan(grow, states, (tokens.T, parents.T, nodes))
    changed = lax.map(lambda at: _process(sampling, *at), (states, columns))
    return jnp.swapaxes(changed, 0, 1), _runs_late(sampling)
