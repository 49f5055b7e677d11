"""What all decoding loops share: the rows' state, and how a step's tokens are committed.

Axes: B rows, N longest output, G longest block.
"""

import abc
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.sampling import Sampling
from specjax.types import Array, LanguageModel, Params


class DecodeInfo(NamedTuple):
    """Totals per row since its start.

    Attributes:
      rounds: `[B]` int32.
      drafter_calls: `[B]` int32, passes of the drafter while the row was unfinished. A pass serves
        the whole batch, so rows beside this one can add passes.
      verifier_calls: `[B]` int32, passes of the verifier likewise.
      drafted: `[B]` int32, tokens drafted.
      accepted: `[B]` int32, drafted tokens accepted; those past an EOS or the limit count too.
      emitted: `[B]` int32, tokens emitted (those past an EOS or the limit are not).
      drafted_at: `[B, G]` int32, blocks that reached draft position i.
      accepted_at: `[B, G]` int32, blocks accepted up to draft position i.
      token_sum: `[B]` float32, the sum of `RoundInfo.token_sum`.
      block_sum: `[B]` float32, the sum of `RoundInfo.block_sum`.
      log_p: `[B]` float32, log-probability of the emitted tokens under the verifier, in nats; -inf
        if a rule emitted a token that the verifier could not.
      log_target: `[B]` float32, the same under the target distributions.
    """

    rounds: Array  # [B]
    drafter_calls: Array  # [B]
    verifier_calls: Array  # [B]
    drafted: Array  # [B]
    accepted: Array  # [B]
    emitted: Array  # [B]
    drafted_at: Array  # [B, G]
    accepted_at: Array  # [B, G]
    token_sum: Array  # [B]
    block_sum: Array  # [B]
    log_p: Array  # [B]
    log_target: Array  # [B]

    @property
    def discarded(self) -> Array:
        """`[B]` int32, drafted tokens that verification rejected."""
        return self.drafted - self.accepted


class DecodeState(NamedTuple):
    """The rows between two calls of a loop; the leading axis of every array is the batch.

    Attributes:
      tokens: `[B, N]` int32, the output; zero past `info.emitted`.
      limits: `[B]` int32, how many tokens each row may emit; at most N.
      finished: `[B]` bool. A finished row stays frozen.
      keys: `[B]` keys, one stream per row.
      sampling: fields `[B]`.
      inner: what the loop's step carries.
      info: totals.
    """

    tokens: Array  # [B, N]
    limits: Array  # [B]
    finished: Array  # [B]
    keys: Array  # [B]
    sampling: Sampling
    inner: Any
    info: DecodeInfo


class PromptBatch(NamedTuple):
    """What a model is prefilled with; see `Loop.init`."""

    inputs: Array  # [B, P]
    input_lengths: Array  # [B]
    prefix: Array | None  # [B, F]
    prefix_lengths: Array | None  # [B]


class Loop(abc.ABC):
    """What takes prompts in; a loop adds how its models are prefilled, and `run`."""

    @property
    @abc.abstractmethod
    def max_draft(self) -> int:
        """G, 0 without a drafter."""

    @property
    @abc.abstractmethod
    def main_model(self) -> LanguageModel:
        """The model whose tokens are committed."""

    @abc.abstractmethod
    def prefill(self, params: Params, prompt: PromptBatch, max_length: int) -> Any:
        """What the loop's step carries, after the prompt; traced."""

    def init(
        self,
        params: Params,
        inputs: Array,
        input_lengths: Array,
        *,
        seed: int | Array,
        ids: Array,
        limits: Array,
        sampling: Sampling,
        max_new: int,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> DecodeState:
        """Takes prompts in.

        Args:
          params: the loop's.
          inputs: `[B, P]` int32 prompts, padded on the right.
          input_lengths: `[B]` int32, at least 1.
          seed: of the run, or `[B]` of an integer dtype, one per row.
          ids: `[B]` int32; a row's random stream depends on the seed and its id alone.
          limits: `[B]` int32, how many tokens each row may emit.
          sampling: fields scalar or `[B]`.
          max_new: N, the longest output (static).
          max_length: S, cache positions (static); at least the prompt's positions + N + G + 1.
          prefix: `[B, F]` int32, forced first tokens (encoder-decoder models), or None.
          prefix_lengths: `[B]` int32, or None for F in each row.

        Returns:
          A state for `run`.

        Raises:
          ValueError: naming the argument that is of a wrong shape or out of range.
        """
        prompt = PromptBatch(inputs, input_lengths, prefix, prefix_lengths)
        sizes = (max_new, max_length, self.max_draft)
        check_prompts(self.main_model, prompt, seed, ids, limits, sampling, *sizes)
        streams = (np.asarray(seed).astype(np.uint32), np.asarray(ids).astype(np.uint32))
        return _init(self, max_new, max_length, params, prompt, streams, limits, sampling)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _init(
    loop: Loop,
    max_new: int,
    max_length: int,
    params: Params,
    prompt: PromptBatch,
    streams: tuple[Array, Array],
    limits: Array,
    sampling: Sampling,
) -> DecodeState:
    inner = loop.prefill(params, prompt, max_length)
    return initial_state(inner, row_keys(*streams), limits, sampling, max_new, loop.max_draft)


def row_keys(seed: int | Array, ids: Array) -> Array:
    """One key per row: `fold_in(key(seed), id)`.

    Args:
      seed: one, or `[B]` of an integer dtype; in [0, 2^32).
      ids: `[B]` of an integer dtype, in [0, 2^32).

    Returns:
      `[B]` keys.
    """

    def key(seed: Array, row: Array) -> Array:
        # Whatever JAX's default is: vmapped draws of its other generators depend on each other.
        return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), row)

    return jax.vmap(key)(jnp.broadcast_to(seed, jnp.shape(ids)), ids)


def step_uniforms(state: DecodeState, count: int) -> Array:
    """`[B, count]` float32 in [0, 1) for the rows' next step.

    One call of the generator for all that a step draws: several cost more than their numbers.
    """

    def draw(key: Array, step: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, step), (count,), jnp.float32)

    return jax.vmap(draw)(state.keys, state.info.rounds)


def initial_state(
    inner: Any, keys: Array, limits: Array, sampling: Sampling, max_new: int, max_draft: int
) -> DecodeState:
    """A state with nothing emitted yet.

    Args:
      inner: what the loop's step carries.
      keys: `[B]` keys.
      limits: `[B]` int32, at most N; a row with limit 0 is finished at once.
      sampling: fields scalar or `[B]`.
      max_new: N.
      max_draft: G, 0 without a drafter.
    """
    rows = keys.shape[0]
    counts = jnp.zeros((rows,), jnp.int32)
    sums = jnp.zeros((rows,), jnp.float32)
    by_position = jnp.zeros((rows, max_draft), jnp.int32)
    limits = jnp.copy(limits.astype(jnp.int32))
    return DecodeState(
        tokens=jnp.zeros((rows, max_new), jnp.int32),
        limits=limits,
        finished=limits <= 0,
        keys=keys,
        # Copied: the state is donated, and must not take the caller's arrays along.
        sampling=jax.tree.map(lambda x: jnp.copy(jnp.broadcast_to(x, (rows,))), sampling),
        inner=inner,
        info=DecodeInfo(*[counts] * 6, *[by_position] * 2, *[sums] * 4),
    )


def run_loop(
    step: Callable[[DecodeState], DecodeState],
    state: DecodeState,
    stop_after: Array,
    until_finished: Array,
) -> DecodeState:
    """Steps until `until_finished` rows are, or `stop_after` steps are done (int32 scalars)."""

    def unfinished(carry):
        state, steps = carry
        finished = jnp.sum(state.finished, dtype=jnp.int32)
        return (steps < stop_after) & (finished < until_finished)

    def body(carry):
        state, steps = carry
        return step(state), steps + 1

    return lax.while_loop(unfinished, body, (state, jnp.int32(0)))[0]


def append(
    state: DecodeState, tokens: Array, counts: Array, eos_ids: tuple[int, ...]
) -> tuple[DecodeState, Array]:
    """Appends a step's tokens to the rows that are not finished.

    Args:
      state: the rows.
      tokens: `[B, T]` int32.
      counts: `[B]` int32, how many of them are real.
      eos_ids: what ends a row; it is kept.

    Returns:
      The state with `tokens`, `finished` and `info.emitted` moved on, and `[B, T]` bool: which
      tokens were appended (not those past an EOS or the row's limit).
    """
    emitted = state.info.emitted
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    ends = jnp.zeros(tokens.shape, bool)
    for eos in eos_ids:
        ends |= tokens == eos
    before = jnp.cumsum(ends.astype(jnp.int32), axis=1) - ends.astype(jnp.int32)
    kept = (index < counts[:, None]) & (before == 0) & ~state.finished[:, None]
    kept &= index < (state.limits - emitted)[:, None]
    # Whatever is not kept is written past the end, where it is dropped.
    width = state.tokens.shape[1]
    slots = jnp.where(kept, emitted[:, None] + index, width)
    out = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(
        state.tokens, slots, tokens
    )
    emitted += kept.sum(axis=1, dtype=jnp.int32)
    finished = state.finished | (ends & kept).any(axis=1) | (emitted >= state.limits)
    info = state.info._replace(emitted=emitted)
    return state._replace(tokens=out, finished=finished, info=info), kept


@functools.partial(jax.jit, donate_argnums=0)
def insert_rows(state: DecodeState, rows: Array, new: DecodeState) -> DecodeState:
    """Puts new rows into the slots of finished ones. The state is donated: use the result.

    Args:
      state: B rows.
      rows: `[n]` int32, the slots; each once.
      new: n rows with the same N, cache length and prompt length.

    Returns:
      B rows.
    """
    return jax.tree.map(lambda old, fresh: old.at[rows].set(fresh), state, new)


def check_prompts(
    model: LanguageModel,
    prompt: PromptBatch,
    seed: int | Array,
    ids: Array,
    limits: Array,
    sampling: Sampling,
    max_new: int,
    max_length: int,
    max_draft: int,
) -> None:
    """Checks, on the host, what a loop is started with: arguments as in `Loop.init`, and G.

    Raises:
      ValueError: naming the argument, its value and what it must be.
    """
    inputs, input_lengths, prefix, prefix_lengths = prompt
    if jnp.ndim(inputs) != 2:
        raise ValueError(f"inputs must be [B, P], got shape {jnp.shape(inputs)}")
    rows, width = jnp.shape(inputs)
    per_row: dict[str, Any] = {"input_lengths": input_lengths, "ids": ids, "limits": limits}
    forced = 0
    if prefix is not None:
        if jnp.ndim(prefix) != 2 or jnp.shape(prefix)[0] != rows:
            raise ValueError(f"prefix must be [B, F] = [{rows}, F], got shape {jnp.shape(prefix)}")
        forced = jnp.shape(prefix)[1]
        if prefix_lengths is None:
            prefix_lengths = jnp.full((rows,), forced, jnp.int32)
        per_row["prefix_lengths"] = prefix_lengths
    elif prefix_lengths is not None:
        raise ValueError("prefix_lengths without prefix: give both, or neither")
    for name, value in per_row.items():
        if jnp.shape(value) != (rows,):
            raise ValueError(f"{name} must be [B] = [{rows}], got shape {jnp.shape(value)}")
    if np.shape(seed) not in ((), (rows,)):
        raise ValueError(f"seed must be scalar or [B] = [{rows}], got shape {np.shape(seed)}")
    for name in ("temperature", "top_k", "top_p"):
        setting = getattr(sampling, name)
        if setting is not None and jnp.shape(setting) not in ((), (rows,)):
            raise ValueError(
                f"sampling.{name} must be scalar or [B] = [{rows}], got shape {jnp.shape(setting)}"
            )
    spans: list[tuple[str, Any, int, int]] = [
        ("inputs", inputs, 0, model.vocab_size - 1),
        ("input_lengths", input_lengths, 1, width),
        ("limits", limits, 0, max_new),
        ("seed", seed, 0, 2**32 - 1),
        ("ids", ids, 0, 2**32 - 1),
    ]
    if prefix is not None:
        spans.append(("prefix", prefix, 0, model.vocab_size - 1))
        spans.append(("prefix_lengths", prefix_lengths, 0, forced))
    for name, value, low, high in spans:
        array = np.asarray(value)
        if array.size and array.dtype.kind not in "iuO":  # O: whole numbers past 64 bits
            raise ValueError(f"{name} must be of an integer dtype, got {array.dtype}")
        bad = (array < low) | (array > high)
        if bad.any():
            where = f" in row {np.argwhere(bad)[0][0]}" if array.ndim else ""
            raise ValueError(f"{name} must lie in [{low}, {high}], got {array[bad][0]}{where}")
    prefixes = np.zeros((rows,), np.int32) if prefix is None else np.asarray(prefix_lengths)
    longest = int(np.max(model.prompt_positions(np.asarray(input_lengths), prefixes), initial=0))
    if max_length < longest + max_new + max_draft + 1:
        raise ValueError(
            f"max_length={max_length} is too small: the longest prompt takes {longest} positions, "
            f"the output {max_new} and a block {max_draft + 1}; use "
            f"{longest + max_new + max_draft + 1} or more"
        )


def check_eos_ids(eos_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises unless `eos_ids` is a tuple of token ids."""
    if not isinstance(eos_ids, tuple):
        raise TypeError(f"eos_ids must be a tuple of token ids, got {eos_ids!r}: write (1,)")
    for eos in eos_ids:
        if not 0 <= eos < vocab_size:
            raise ValueError(f"eos_ids must lie in [0, {vocab_size - 1}], got {eos}")


def check_stops(
    state: DecodeState, stop_after: int | Array, until_finished: int | Array | None
) -> tuple[Any, Any]:
    """When a loop returns, as int32 scalars; all rows must be finished if nothing is said.

    Raises:
      ValueError: unless both are at least 1: a loop of no steps never ends.
    """
    rows = state.finished.shape[0]
    until_finished = rows if until_finished is None else until_finished
    for name, value in (("stop_after", stop_after), ("until_finished", until_finished)):
        if int(value) < 1:
            raise ValueError(f"{name} must be at least 1, got {int(value)}")
    return np.int32(stop_after), np.int32(until_finished)
