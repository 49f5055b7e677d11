"""The state of rows: how it begins, how steps change it, how slots are refilled.

Axes: B rows, N longest output, G longest block, T tokens of a step.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key

from specjax.compilation import jit_at, placement
from specjax.decoding.history import put_at
from specjax.processing import advance, with_processing
from specjax.types import (
    EOS,
    LENGTH,
    NAN,
    RUNNING,
    STOP,
    DecodeInfo,
    DecodeState,
    Processing,
    PromptBatch,
    StopState,
)


class ByToken(NamedTuple):
    """The statistics per token that are kept in `DecodeInfo`.

    Attributes:
      log_probs: whether it has log-probabilities.
      sources: whether it has where the tokens came from.
    """

    log_probs: bool = False
    sources: bool = False


def row_keys(seeds: int | Array, ids: Array) -> Key[Array, " B"]:
    """One key per row: `fold_in(key(seed), id)`; seeds and ids lie in [0, 2^32)."""

    def key(seed: Array, row: Array) -> Array:
        # JAX's default generator may differ, and vmapped draws of others depend on each other.
        return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), row)

    return jax.vmap(key)(jnp.broadcast_to(seeds, jnp.shape(ids)), ids)


def step_uniforms(state: DecodeState, count: int) -> Float32[Array, "B count"]:
    """Uniforms in [0, 1) for the rows' next step.

    One call of the generator for a whole step: several calls cost more than their numbers.
    """

    def draw(key: Array, step: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, step), (count,), jnp.float32)

    return jax.vmap(draw)(state.keys, state.steps)


def initial_state(
    inner: Any,
    prompts: PromptBatch,
    *,
    max_new: int,
    max_draft: int,
    model_names: Sequence[str],
    by_token: ByToken,
    of_nodes: bool = False,
    processing: Processing | None = None,
) -> DecodeState:
    """A state without output yet; a row with limit 0 is finished at once."""
    keys = row_keys(prompts.seeds, prompts.ids)
    rows = keys.shape[0]
    counts = jnp.zeros((rows,), jnp.int32)
    sums = jnp.zeros((rows,), jnp.float32)
    lengths = jnp.zeros((rows, max_draft + 1), jnp.int32)
    limits = jnp.copy(prompts.limits.astype(jnp.int32))
    draft_limits = prompts.draft_limits
    if draft_limits is None:
        draft_limits = jnp.full((rows,), max_draft, jnp.int32)
    # Not zero: that would be probability 1 for tokens that the method does not report.
    log_probs = jnp.full((rows, max_new), jnp.nan, jnp.float32) if by_token.log_probs else None
    sources = jnp.full((rows, max_new), -1, jnp.int8) if by_token.sources else None
    # Copied: the state is donated, but the caller's arrays must not be.
    sampling = jax.tree.map(lambda x: jnp.copy(jnp.broadcast_to(x, (rows,))), prompts.sampling)
    return DecodeState(
        tokens=jnp.zeros((rows, max_new), jnp.int32),
        lengths=counts,
        limits=limits,
        draft_limits=jnp.copy(draft_limits.astype(jnp.int32)),
        ended_by=jnp.where(limits > 0, RUNNING, LENGTH),
        keys=keys,
        steps=counts,
        sampling=with_processing(sampling, processing),
        inner=inner,
        info=DecodeInfo(
            calls=dict.fromkeys(model_names, counts),
            drafted_lengths=lengths,
            accepted_lengths=lengths,
            token_sum=sums,
            block_sum=sums,
            log_conf=sums if by_token.log_probs else None,
            log_p=sums,
            log_target=sums,
            nan_in=counts - 1,
            deferrals=counts,
            rollbacks=counts,
            token_log_conf=log_probs,
            token_log_p=log_probs,
            token_log_target=log_probs,
            token_sources=sources,
            nodes=jnp.zeros((rows, 2, max_draft), jnp.int32) if of_nodes else None,
        ),
    )


class Step(NamedTuple):
    """The tokens and statistics of a step; the loop adds them to the rows.

    In finished rows everything but `inner` is ignored.

    Attributes:
      counts: the number of real tokens.
      inner: the method's own state for the next step.
      calls: model's name -> int32, scalar or `[B]`: its passes.
      log_conf: the tokens' log-probabilities under the verifier itself (see `DecodeInfo`), NaN if
        it has not read them; ignored unless `DecodeState.wants_log_conf`. None leaves them out, and
        makes those per token NaN. So it is with the next two.
      log_p: the same after temperature, filters and processors.
      log_target: log-probabilities under the target.
      drafted: the number of drafted tokens.
      accepted: the number of accepted tokens.
      deferrals: int32, scalar or `[B]`: see `DecodeInfo`.
      rollbacks: whether drafted tokens were rejected.
      token_sum: see `DecodeInfo`; None for 0.
      block_sum: likewise.
      nan_in: the index into `Method.nan_sources` of the source of NaN, which ends the row; -1 for
        none. None if NaN is not looked for.
      sources: the index into `Method.source_names` of where each token came from; None unless
        `DecodeState.wants_sources`.
      nodes: which nodes of a tree were drafted and accepted; None of chains.
    """

    tokens: Int32[Array, "B T"]
    counts: Int32[Array, " B"]
    inner: Any
    calls: Mapping[str, Any]
    log_conf: Float32[Array, "B T"] | None = None
    log_p: Float32[Array, "B T"] | None = None
    log_target: Float32[Array, "B T"] | None = None
    drafted: Any = 0
    accepted: Any = 0
    deferrals: Any = 0
    rollbacks: Bool[Array, " B"] | None = None
    token_sum: Float32[Array, " B"] | None = None
    block_sum: Float32[Array, " B"] | None = None
    nan_in: Int32[Array, " B"] | None = None
    sources: Int32[Array, "B T"] | None = None
    nodes: Int32[Array, "B 2 G"] | None = None


def add_step(state: DecodeState, step: Step, eos_ids: tuple[int, ...]) -> DecodeState:
    """The rows after a step: its tokens appended, its counts added, ends noted."""
    active = ~state.finished
    once = active.astype(jnp.int32)
    new, kept = append(state, step.tokens, step.counts, eos_ids)
    info = new.info
    info = _add_log_probs(info, kept, step, state.lengths)
    if info.token_sources is not None and step.sources is not None:
        codes = step.sources.astype(info.token_sources.dtype)
        codes = put_at(info.token_sources, codes, state.lengths, kept)
        info = info._replace(token_sources=codes)
    if info.nodes is not None and step.nodes is not None:
        info = info._replace(nodes=info.nodes + jnp.where(active[:, None, None], step.nodes, 0))
    real = active if step.nan_in is None else active & (step.nan_in < 0)
    lengths = jnp.arange(info.drafted_lengths.shape[1])[None]

    def counted(before: Array, number: Any) -> Array:
        hit = (lengths == jnp.broadcast_to(number, active.shape)[:, None]) & active[:, None]
        return before + hit.astype(jnp.int32)

    def summed(before: Array, more: Array | None) -> Array:
        return before if more is None else before + jnp.where(real, more, 0.0)

    rolled = step.rollbacks
    info = info._replace(
        calls={name: info.calls[name] + once * step.calls[name] for name in info.calls},
        drafted_lengths=counted(info.drafted_lengths, step.drafted),
        accepted_lengths=counted(info.accepted_lengths, step.accepted),
        token_sum=summed(info.token_sum, step.token_sum),
        block_sum=summed(info.block_sum, step.block_sum),
        deferrals=info.deferrals + once * step.deferrals,
        rollbacks=info.rollbacks + (0 if rolled is None else (active & rolled).astype(jnp.int32)),
    )
    new = new._replace(inner=step.inner, info=info, steps=state.steps + once)
    return new if step.nan_in is None else _end_by_nan(new, jnp.where(active, step.nan_in, -1))


def append(
    state: DecodeState,
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
    eos_ids: tuple[int, ...],
) -> tuple[DecodeState, Bool[Array, "B T"]]:
    """Appends a step's tokens to the rows that are running.

    Tokens in `eos_ids` end a row, and are kept.

    Returns:
      The state with `tokens`, `lengths`, `ended_by`, `stop` and its processor updated, and which
      tokens were appended: none past an EOS, a stop string or the row's limit.
    """
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    eos = end_tokens(tokens, eos_ids)
    ends, texts = eos, None
    if state.stop is not None:
        texts = _read_texts(state.stop, tokens)
        ends = eos | (texts[:, 1:] == _final_state(state.stop))
    before = jnp.cumsum(ends.astype(jnp.int32), axis=1) - ends.astype(jnp.int32)
    kept = (index < counts[:, None]) & (before == 0) & ~state.finished[:, None]
    kept &= index < (state.limits - state.lengths)[:, None]
    out = put_at(state.tokens, tokens, state.lengths, kept)
    lengths = state.lengths + kept.sum(axis=1, dtype=jnp.int32)
    reason = jnp.where(lengths >= state.limits, LENGTH, RUNNING)
    stop = state.stop
    if stop is not None and texts is not None:
        reason = jnp.where((ends & kept).any(axis=1), STOP, reason)
        appended = (lengths - state.lengths)[:, None]
        stop = stop._replace(states=jnp.take_along_axis(texts, appended, axis=1)[:, 0])
    reason = jnp.where((eos & kept).any(axis=1), EOS, reason)
    ended_by = jnp.where(state.finished, state.ended_by, reason)
    sampling = advance(state.sampling, tokens, lengths - state.lengths)
    new = state._replace(tokens=out, lengths=lengths, ended_by=ended_by, stop=stop)
    return new._replace(sampling=sampling), kept


def _final_state(stop: StopState) -> int:
    """The automaton's state after a complete stop string."""
    assert stop.table is not None
    return stop.table.shape[0] - 1


def _read_texts(stop: StopState, tokens: Array) -> Array:
    """`[B, T + 1]`, the automaton's states before each of `tokens [B, T]` and after the last."""

    def read(states: Array, token: Array) -> tuple[Array, Array]:
        after = _after(stop, states, token)
        return after, after

    _, after = lax.scan(read, stop.states, tokens.T)
    return jnp.concatenate([stop.states[None], after]).T


def read_token(stop: StopState | None, token: Array) -> tuple[StopState | None, Array]:
    """The texts after `token [B]`, and `[B]` bool: those with a complete stop string."""
    if stop is None:
        return None, jnp.zeros(token.shape, bool)
    states = _after(stop, stop.states, token)
    return stop._replace(states=states), states == _final_state(stop)


def _after(stop: StopState, states: Array, token: Array) -> Array:
    assert stop.table is not None
    return stop.table[states, token].astype(jnp.int32)


def watch_stops(state: DecodeState, first: Any = 0) -> DecodeState:
    """A state of `init` whose rows also end by stop strings; `run` then needs their table.

    `first` is the automaton's state before the first token, a number or `[B]`.
    """
    stop = StopState(*_jitted_first(placement(state.lengths))(state.lengths, np.int32(first)))
    return state._replace(stop=stop)


_jitted_first = jit_at(lambda lengths, first: (jnp.zeros_like(lengths) + first,) * 2)


def end_tokens(tokens: Array, eos_ids: tuple[int, ...]) -> Array:
    """Tells which of `tokens`, of any shape, end a row."""
    ends = jnp.zeros(tokens.shape, bool)
    for eos in eos_ids:
        ends |= tokens == eos
    return ends


def _add_log_probs(info: DecodeInfo, kept: Array, step: Step, lengths: Array) -> DecodeInfo:
    """Adds a step's log-probabilities of the kept tokens `[B, T]`, appended at `lengths` `[B]`."""
    new = {}
    for name in ("log_conf", "log_p", "log_target"):
        logs, by_token = getattr(step, name), getattr(info, f"token_{name}", None)
        if logs is None or getattr(info, name) is None:
            continue
        new[name] = getattr(info, name) + jnp.where(kept, logs, 0.0).sum(axis=1)
        if by_token is not None:
            new[f"token_{name}"] = put_at(by_token, logs, lengths, kept)
    return info._replace(**new)


def _end_by_nan(state: DecodeState, nan_in: Array) -> DecodeState:
    """Ends the running rows whose `nan_in [B]` names a source (is not negative)."""
    ends = (nan_in >= 0) & ~state.finished
    info = state.info._replace(nan_in=jnp.where(ends, nan_in, state.info.nan_in))
    return state._replace(ended_by=jnp.where(ends, NAN, state.ended_by), info=info)


def insert_rows(state: DecodeState, rows: Int32[Array, " n"], new: DecodeState) -> DecodeState:
    """Puts new rows into the slots `rows` of finished rows. The state is donated: use the result.

    The new rows have the same N, cache length and prompt length; each slot occurs once.
    """
    return jitted_insert(placement(state))(state, rows, new)


def _insert(state: DecodeState, rows: Array, new: DecodeState) -> DecodeState:
    return jax.tree.map(lambda old, fresh: old.at[rows].set(fresh), state, new)


jitted_insert = jit_at(_insert, donate_argnums=0)


def end_row(state: DecodeState, row: int, reason: int) -> DecodeState:
    """Ends a row with a code of `ENDED_BY`; the caller's state is not donated."""
    ended_by = _jitted_end(placement(state.ended_by))(state.ended_by, np.int32(row), reason)
    return state._replace(ended_by=ended_by)


_jitted_end = jit_at(lambda ended_by, row, reason: ended_by.at[row].set(reason))
