"""How rows draw their tokens: processors change the logits, and follow the tokens.

A processor's state is the state after a row's committed tokens. Code that looks ahead, along a
block, advances a copy; so nothing has to be rolled back.

Axes: B rows, T nodes of a block, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.checks import check_array, check_like
from specjax.sampling import distribution, drawn
from specjax.types import Array, Processing, Processor, PromptBatch, Sampling
from specjax.types.pytrees import where_rows


def distributions(logits: Array, sampling: Sampling) -> Array:
    """`sampling.distribution` of rows `[B, V]`, their logits processed."""
    logits, sampling = _processed(logits, sampling)
    return jax.vmap(distribution)(logits, sampling)


def draws(logits: Array, sampling: Sampling, uniforms: Array) -> tuple[Array, Array]:
    """`sampling.drawn` of rows: `[B, V]` probabilities, and a token of each `[B]`."""
    logits, sampling = _processed(logits, sampling)
    return jax.vmap(drawn)(logits, sampling, uniforms)


def distributions_along(
    logits: Array, sampling: Sampling, tokens: Array, parents: Array | None = None
) -> Array:
    """The distributions after each node of a block, `[B, T, V]`.

    Args:
      logits: `[B, T, V]`; the first follow the last committed token, node 0.
      sampling: how that first token is drawn, fields `[B]`.
      tokens: `[B, T - 1]` int32, the tokens of the other nodes.
      parents: `[B, T - 1]` int32, the node that each token follows; None for a chain.
    """
    if sampling.processing is not None:
        logits = _processed_along(sampling.processing, logits, tokens, parents)
        sampling = _with(sampling, None)
    return jax.vmap(jax.vmap(distribution, in_axes=(0, None)))(logits, sampling)


def begun(processor: Processor | None, prompts: PromptBatch) -> Processing | None:
    """A processor after the prompts and the forced beginnings of their outputs."""
    if processor is None:
        return None
    inputs, lengths = jnp.asarray(prompts.inputs, jnp.int32), jnp.asarray(prompts.input_lengths)
    begun = Processing(processor, None, processor.init(inputs, lengths))
    if prompts.prefix is None:
        return begun
    prefix = jnp.asarray(prompts.prefix, jnp.int32)
    forced = prompts.prefix_lengths
    counts = jnp.full(lengths.shape, prefix.shape[1]) if forced is None else jnp.asarray(forced)
    return _advanced(begun, prefix, counts)


def bound(sampling: Sampling, params: Any) -> Sampling:
    """The same sampling with its processor's parameters; None removes them."""
    if sampling.processing is None:
        return sampling
    return _with(sampling, dataclasses.replace(sampling.processing, params=params))


def advance(sampling: Sampling, tokens: Array, counts: Array) -> Sampling:
    """The sampling after the first `counts [B]` (int32 or bool) of `tokens [B, T]`."""
    if sampling.processing is None:
        return sampling
    return _with(sampling, _advanced(sampling.processing, tokens, counts))


def with_processing(sampling: Sampling, processing: Processing | None) -> Sampling:
    """The sampling with a processor at another place, such as further along a draft."""
    return sampling if processing is None else _with(sampling, processing)


def _with(sampling: Sampling, processing: Processing | None) -> Sampling:
    return dataclasses.replace(sampling, processing=processing)


def _processed(logits: Array, sampling: Sampling) -> tuple[Array, Sampling]:
    if sampling.processing is None:
        return logits, sampling
    now = sampling.processing
    return _process(now, now.state, logits), _with(sampling, None)


def _process(now: Processing, state: Any, logits: Array) -> Array:
    logits = logits.astype(jnp.float32)
    new = now.processor.process(now.params, state, logits)
    where = f"{type(now.processor).__name__}.process: logits"
    check_array(where, new, "[B, V]", logits.shape, jnp.float32)
    return new


def _after(now: Processing, state: Any, tokens: Array) -> Any:
    """The state after `tokens [B]`."""
    new = now.processor.advance(state, tokens)
    check_like(f"{type(now.processor).__name__}.advance: state", new, state)
    return new


def _advanced(now: Processing, tokens: Array, counts: Array) -> Processing:
    def step(state: Any, at: tuple[Array, Array]) -> tuple[Any, None]:
        token, index = at
        return where_rows(index < counts, _after(now, state, token), state), None

    index, counts = jnp.arange(tokens.shape[1], dtype=jnp.int32), counts.astype(jnp.int32)
    state, _ = lax.scan(step, now.state, (tokens.T, index))
    return dataclasses.replace(now, state=state)


def _processed_along(now: Processing, logits: Array, tokens: Array, parents: Array | None) -> Array:
    """The logits `[B, T, V]` after each node, processed; see `distributions_along`."""
    columns = jnp.swapaxes(logits, 0, 1)
    if parents is None:

        def step(state: Any, at: tuple[Array, Array]) -> tuple[Any, Array]:
            token, own = at
            return _after(now, state, token), _process(now, state, own)

        following = jnp.pad(tokens, ((0, 0), (0, 1)))
        return jnp.swapaxes(lax.scan(step, now.state, (following.T, columns))[1], 0, 1)

    def grow(states: Any, at: tuple[Array, Array, Array]) -> tuple[Any, None]:
        token, parent, node = at
        pick = jax.vmap(lambda x, i: lax.dynamic_index_in_dim(x, i, keepdims=False), (1, 0))
        new = _after(now, jax.tree.map(lambda x: pick(x, parent), states), token)
        return jax.tree.map(lambda x, y: x.at[node].set(y), states, new), None

    count = logits.shape[1]
    states = jax.tree.map(lambda x: jnp.repeat(x[None], count, axis=0), now.state)
    nodes = jnp.arange(1, count, dtype=jnp.int32)
    states, _ = lax.scan(grow, states, (tokens.T, parents.T, nodes))
    return jnp.swapaxes(lax.map(lambda at: _process(now, *at), (states, columns)), 0, 1)
