"""Decoding methods: the loop in which each row advances by itself, and the state of its rows.

Axes: B rows, P prompt length, F prefix length, N longest output, G longest block, T tokens of a
step, L tokens of a beginning.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from specjax.checks import check_part, check_static
from specjax.compilation import jit, jit_at, placement, step_options
from specjax.decoding.history import put_at
from specjax.errors import UserError
from specjax.memory import nbytes
from specjax.models.beginnings import Beginning, continuing, noting
from specjax.partitioning import Partitioner
from specjax.platforms import compiled_for
from specjax.processing import advance, initial_processing, with_params, with_processing
from specjax.rules import Lossless
from specjax.types import (
    EOS,
    LENGTH,
    NAN,
    RUNNING,
    STOP,
    Axes,
    DecodeInfo,
    DecodeState,
    LogProbs,
    Params,
    PromptBatch,
    Prompts,
    StopState,
    row_axes,
)

# More steps than a loop ever takes.
_FOREVER = 2**31 - 1


class MethodParams(NamedTuple):
    """The parameters of a method; there is no drafter if a method has only a verifier.

    Attributes:
      verifier: the verifier's parameters.
      drafter: the drafter's; see `Drafting.bind`.
      rule: the rule, its strengths scalar or `[B]`.
      processors: for each processor of the sampling, the arrays that rows share.
    """

    verifier: Params
    drafter: Params = ()
    rule: Any = Lossless()
    processors: tuple[Params, ...] = ()


class ByToken(NamedTuple):
    """Whether `DecodeInfo` has log-probabilities per token, and where each token came from."""

    log_probs: bool = False
    sources: bool = False


class Step(NamedTuple):
    """The tokens and statistics of a step; the loop adds them to the rows.

    In finished rows everything but `inner` is ignored.

    Attributes:
      counts: the number of real tokens.
      inner: the method's own state for the next step.
      calls: model's name -> int32, scalar or `[B]`: its passes.
      log_probs: of the tokens, `[B, T]`; `plain` is ignored unless
        `DecodeState.wants_log_probs`. None leaves one out, and makes those per token NaN.
      drafted: the number of drafted tokens.
      accepted: the number of accepted tokens.
      deferrals: int32, scalar or `[B]`: see `DecodeInfo`.
      rollbacks: whether drafted tokens were rejected.
      token_sum: see `DecodeInfo`; None for 0.
      block_sum: likewise.
      nan_in: `[B]` int32, the index into `Method.nan_sources` of the source of NaN, which ends the
        row; -1 for none. None if NaN is not looked for.
      sources: the index into `Method.source_names` of where each token came from; None unless
        `DecodeState.wants_sources`.
      nodes: which nodes of a tree were drafted and accepted; None of chains.
    """

    tokens: Int32[Array, "B T"]
    counts: Int32[Array, " B"]
    inner: Any
    calls: Mapping[str, Any]
    log_probs: LogProbs = LogProbs()
    drafted: Any = 0
    accepted: Any = 0
    deferrals: Any = 0
    rollbacks: Bool[Array, " B"] | None = None
    token_sum: Float32[Array, " B"] | None = None
    block_sum: Float32[Array, " B"] | None = None
    nan_in: Any = None
    sources: Int32[Array, "B T"] | None = None
    nodes: Int32[Array, "B 2 G"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """A decoding method: static and hashable; all arrays are in its parameters and the state.

    A subclass defines how its models read prompts, and a step. Its parameters are `MethodParams`,
    or a NamedTuple of its own, with a field `processors` if it supports processors.

    Attributes:
      eos_ids: tokens that end a row.
      partitioner: the layout of arrays on a mesh; None for one device.
    """

    eos_ids: tuple[int, ...] = ()
    partitioner: Partitioner | None = None

    def __post_init__(self) -> None:
        check_eos_ids(self.eos_ids, self.vocab_size)

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """V."""

    @property
    @abc.abstractmethod
    def model_names(self) -> tuple[str, ...]:
        """The keys of `DecodeInfo.calls`; the first is the model whose tokens are committed."""

    @abc.abstractmethod
    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """The cache positions of the prompts, in the model where they take most."""

    @abc.abstractmethod
    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Any:
        """The step's `inner` after the prompt; traced."""

    @abc.abstractmethod
    def step(self, params: Params, state: DecodeState) -> Step:
        """One step of all rows; traced.

        `state.inner` is the `inner` of the step before. `specjax.decoding.step_uniforms` gives the
        step's random numbers.
        """

    def stepped(self, params: Params, before: DecodeState, after: DecodeState) -> DecodeState:
        """The state after a step's tokens are appended; unchanged by default."""
        return after

    @property
    def max_draft(self) -> int:
        """G, 0 without a drafter."""
        return 0

    @property
    def min_draft(self) -> int:
        """The smallest draft limit of a row: 0, or G if all blocks must have a fixed length."""
        return 0

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are trees, whose nodes are counted."""
        return False

    @property
    def independent_rows(self) -> bool:
        """Whether a row's result, with its counts, does not depend on the other rows.

        Rows then have draft limits of G. False is always safe. True allows a resumed call to leave
        out finished rows, without changing any bit of the others.
        """
        return False

    @property
    def predictions(self) -> int:
        """The number of texts of `PromptBatch.predictions` that drafts are copied from."""
        return 0

    @property
    def nan_sources(self) -> tuple[str, ...]:
        """The possible sources of NaN; see `DecodeInfo.nan_in`."""
        return self.model_names

    @property
    def source_names(self) -> tuple[str, ...]:
        """Where a token can come from; see `DecodeInfo.sources`."""
        return self.model_names

    def committed(self, state: DecodeState) -> Any:
        """The parts of `inner` whose caches the next turn of a chat may begin with.

        They have a property `cached`; see `reads`. By default there are none, so
        that each turn reads the whole conversation.
        """
        return ()

    def inner_axes(self, inner: Any) -> Axes:
        """The logical axis names of `inner`; by default only rows are spread."""
        return row_axes(inner)

    def check_rule(self, rule: Any) -> None:
        """Raises UserError if the method does not support this rule."""
        raise UserError(f"rule must be left out, got {rule!r}: {type(self).__name__} uses no rule")

    def describe(self) -> dict[str, Any]:
        """The settings that determine the outputs besides the parameters, as JSON values."""
        return {"method": type(self).__name__, "max_draft": self.max_draft}

    def cache_length(self, prompt_length: int, prefix_length: int, max_new: int) -> int:
        """S, the number of cache positions for such prompts and an output of `max_new` tokens."""
        prompt = int(np.max(self.prompt_positions(prompt_length, prefix_length)))
        return prompt + max_new + self.max_draft + 1

    def init(
        self,
        params: Params,
        prompts: PromptBatch,
        *,
        max_new: int,
        max_length: int | None = None,
        log_probs: bool = False,
        sources: bool = False,
        copies: int = 1,
        beginning: Beginning | None = None,
    ) -> DecodeState:
        """Reads prompts.

        Values are not checked here: `Decoder` and `Engine` check their requests. `max_length` must
        hold the longest prompt, its output and a block.

        Args:
          params: the method's parameters.
          prompts: B prompts.
          max_new: N, the longest output (static).
          max_length: S, cache positions (static); by default `cache_length`.
          log_probs: whether `DecodeInfo` has log-probabilities per token.
          sources: whether it has where each token came from.
          copies: n, the number of rows of each prompt (static); the prompt is read once. Rows of a
            prompt with id i are adjacent, and get the ids i * n .. i * n + n - 1.
          beginning: from `begin`, with the number of its first tokens with which each prompt
            begins, less than the prompt's length; only the rest of the prompt is read.

        Returns:
          A state for `run`.
        """
        self.check_params(params, np.shape(prompts.inputs)[0] * copies)
        processors = prompts.sampling.processors or ()
        arrays = getattr(params, "processors", ())
        assert len(arrays) == len(processors), "params.processors must have one for each processor"
        forced = 0 if prompts.prefix is None else np.shape(prompts.prefix)[1]
        if max_length is None:
            max_length = self.cache_length(np.shape(prompts.inputs)[1], forced, max_new)
        prompts = prompts._replace(
            seeds=np.asarray(prompts.seeds).astype(np.uint32),
            ids=np.asarray(prompts.ids).astype(np.uint32),
        )
        by_token = ByToken(bool(log_probs), bool(sources))
        static = (max_new, int(max_length), by_token, copies)
        shared: tuple[Beginning, ...] = ()
        if beginning is not None:
            shares = np.broadcast_to(beginning.lengths, np.shape(prompts.input_lengths))
            assert np.all(shares < np.asarray(prompts.input_lengths)), "prompts must be longer"
            if self.partitioner is not None:
                shares = self.partitioner.place_rows(shares)
            shared = (Beginning(beginning.caches, shares),)
        where = None
        if self.partitioner is not None:
            prompts = self.partitioner.place_rows(prompts)
            where = first_state(self, static, params, prompts)[1]
        return jitted_init(where)(self, *static, params, prompts, *shared)

    def begin(self, params: Params, tokens: Any) -> Beginning:
        """Reads the common beginning of prompts, for `init`.

        The caches of `tokens [L]` are empty if no model can continue a prompt; prompts must be
        longer than the L >= 1 tokens.
        """
        tokens = np.asarray(tokens, np.int32)
        rows = 1 if self.partitioner is None else self.partitioner.row_multiple
        # A prefill leaves the last token to the loop. Few widths need few programs.
        width = 1 << tokens.size.bit_length()
        inputs = np.pad(tokens, (0, width - tokens.size), mode="edge")
        ones = np.ones(rows, np.int32)
        prompts = PromptBatch(np.tile(inputs, (rows, 1)), ones * (tokens.size + 1), ones, ones)
        if self.partitioner is not None:
            prompts = self.partitioner.place_rows(prompts)
        caches = _jitted_begin(self, self.cache_length(width, 0, 0), params, prompts)
        return Beginning(caches, np.int32(tokens.size))

    def traced(
        self,
        params: Params,
        prompts: PromptBatch,
        *,
        max_new: int,
        max_length: int,
        copies: int = 1,
        place: Callable[[DecodeState, Axes], DecodeState] | None = None,
    ) -> DecodeState:
        """Decodes to the end as part of the caller's own jitted function.

        Nothing is checked, because values may be traced (see `init`): limits must be at most
        `max_new`.

        Args:
          params: the method's parameters; strengths of a rule scalar or `[B * copies]`.
          prompts: a field per row may have B or B * copies rows.
          max_new: N (static).
          max_length: S, cache positions (static).
          copies: see `init`.
          place: (first state, the logical names of its axes) -> the same state, with its layout.
        """
        inner = self.prefill(params, prompts.prompts, max_length)
        inner, prompts = _copied(inner, prompts, copies)
        state = self.begun(params, inner, prompts, max_new, ByToken())
        if place is not None:
            state = place(state, _state_axes(self, state))
        # The caller knows its devices.
        return _loop(self, params, state, jnp.int32(_FOREVER), jnp.int32(state.limits.size), None)

    def least_memory(
        self,
        params: Params,
        prompts: PromptBatch,
        *,
        max_new: int,
        max_length: int,
        log_probs: bool = False,
        sources: bool = False,
    ) -> int:
        """The bytes of the parameters and of an initial state per device; it allocates nothing.

        Only the compiler knows what else a program needs. Arguments are those of `init`; shapes of
        the prompts suffice.
        """
        seeds, ids = (
            jax.ShapeDtypeStruct(np.shape(x), np.uint32) for x in (prompts.seeds, prompts.ids)
        )
        by_token = ByToken(bool(log_probs), bool(sources))
        static = (max_new, int(max_length), by_token, 1)
        shapes, where = first_state(self, static, params, prompts._replace(seeds=seeds, ids=ids))
        devices = 1 if self.partitioner is None else self.partitioner.mesh.size
        return nbytes(shapes, where and list(where[1])) + nbytes(params) // devices

    def run(
        self,
        params: Params,
        state: DecodeState,
        stop_after: int | Array,
        until_finished: int | Array | None = None,
        stop_table: Array | None = None,
    ) -> DecodeState:
        """Continues decoding. The state is donated: use the result.

        Args:
          params: the method's parameters.
          state: from `init`, `run` or an engine.
          stop_after: return after this many steps.
          until_finished: return once this many rows are finished, with rows that were finished
            before; all by default. Both numbers are traced.
          stop_table: see `StopState`; only if the state has one.
        """
        assert (state.stop is None) == (stop_table is None), "stop_table must match state.stop"
        # The shape of `finished` would need its own program.
        until_finished = state.ended_by.shape[0] if until_finished is None else until_finished
        assert min(stop_after, until_finished) >= 1, "a loop of no steps would never end"
        stops = np.int32(stop_after), np.int32(until_finished)
        return jitted_run(placement(state))(self, params, state, *stops, stop_table)

    def check_params(self, params: Params, rows: int) -> None:
        """Raises UserError if the parameters do not fit the method or the batch."""
        return None

    def begun(
        self, params: Params, inner: Any, prompts: PromptBatch, max_new: int, by_token: ByToken
    ) -> DecodeState:
        """The state without output yet; a row with limit 0 is finished at once. Traced."""
        shared = getattr(params, "processors", ())
        # Drafts may reach past the end of an output.
        longest = self.max_draft
        room = max_new + longest + 1
        processing = initial_processing(prompts, self.vocab_size, room, shared)

        def key(seed: Array, row: Array) -> Array:
            # JAX's default generator may differ, and vmapped draws of others depend on each other.
            return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), row)

        keys = jax.vmap(key)(jnp.broadcast_to(prompts.seeds, jnp.shape(prompts.ids)), prompts.ids)
        rows = keys.shape[0]
        counts = jnp.zeros((rows,), jnp.int32)
        sums = jnp.zeros((rows,), jnp.float32)
        lengths = jnp.zeros((rows, longest + 1), jnp.int32)
        limits = jnp.copy(prompts.limits.astype(jnp.int32))
        draft_limits = prompts.draft_limits
        if draft_limits is None:
            draft_limits = jnp.full((rows,), longest, jnp.int32)
        log_probs = None
        if by_token.log_probs:
            # Not zero: that would be probability 1 for tokens that the method does not report.
            log_probs = LogProbs(*[jnp.full((rows, max_new), jnp.nan, jnp.float32)] * 3)
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
                calls=dict.fromkeys(self.model_names, counts),
                drafted_lengths=lengths,
                accepted_lengths=lengths,
                token_sum=sums,
                block_sum=sums,
                log_prob=LogProbs(sums if by_token.log_probs else None, sums, sums),
                nan_in=counts - 1,
                deferrals=counts,
                rollbacks=counts,
                log_probs=log_probs,
                sources=sources,
                nodes=jnp.zeros((rows, 2, longest), jnp.int32) if self.drafts_trees else None,
            ),
        )


def step_uniforms(state: DecodeState, count: int) -> Float32[Array, "B count"]:
    """Uniforms in [0, 1) for the rows' next step.

    One call of the generator for a whole step: several calls cost more than their numbers.
    """

    def draw(key: Array, step: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, step), (count,), jnp.float32)

    return jax.vmap(draw)(state.keys, state.steps)


def check_pair(method: Method, params: Any, rows: int) -> None:
    """Raises UserError unless parameters and their rule fit a method and a batch."""
    assert isinstance(params, MethodParams), f"params must be MethodParams, got {type(params)}"
    method.check_rule(params.rule)
    check_strengths(params.rule, rows)


def per_row(rule: Any, rows: Array) -> Any:
    """The rule with strengths `[B]`; `rows` is any `[B]`."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, rows.shape), rule)


def _start(
    method: Method,
    max_new: int,
    max_length: int,
    by_token: ByToken,
    copies: int,
    params: Params,
    prompts: PromptBatch,
    beginning: Beginning | None = None,
) -> DecodeState:
    with compiled_for(method.partitioner), continuing(beginning):
        inner = method.prefill(params, prompts.prompts, max_length)
    inner, prompts = _copied(inner, prompts, copies)
    return method.begun(params, inner, prompts, max_new, by_token)


def _words_of_start(method: Method, *arguments: Any) -> str:
    rows, length = arguments[5].inputs.shape
    return f"the prefill of {rows} prompt{'s' * (rows > 1)} of up to {length} tokens"


jitted_init = jit_at(_start, words=_words_of_start, static_argnums=(0, 1, 2, 3, 4))


@functools.partial(jit, static_argnums=(0, 1))
def _jitted_begin(
    method: Method, max_length: int, params: Params, prompts: PromptBatch
) -> tuple[Any, ...]:
    with compiled_for(method.partitioner), noting() as caches:
        method.prefill(params, prompts.prompts, max_length)
    return tuple(caches)


def _copied(inner: Any, prompts: PromptBatch, copies: int) -> tuple[Any, PromptBatch]:
    """The rows of `copies` outputs of each prompt; fields of the prompts may have them already."""
    if copies == 1:
        return inner, prompts
    rows = prompts.inputs.shape[0]

    def spread(leaf: Any) -> Any:
        by_row = jnp.ndim(leaf) > 0 and leaf.shape[0] == rows
        return jnp.repeat(leaf, copies, axis=0) if by_row else leaf

    inner, prompts = jax.tree.map(spread, (inner, prompts))
    nth = jnp.arange(prompts.ids.size, dtype=prompts.ids.dtype) % copies
    return inner, prompts._replace(ids=prompts.ids * copies + nth)


def first_state(
    method: Method, static: tuple[int, int, ByToken, int], params: Params, prompts: PromptBatch
) -> tuple[DecodeState, Any]:
    """The shapes of the result of `init`, and its `placement`; nothing is allocated.

    `static` has N, S, the statistics per token, and the copies of a prompt. Shapes of parameters
    and prompts suffice.
    """
    leaves, structure = jax.tree.flatten((params, prompts))
    return _first_state(method, static, structure, tuple(map(_kind, leaves)))


def _kind(leaf: Any) -> tuple[tuple[int, ...], Any, Any]:
    """Shape, dtype and sharding of an array, a shape, or a number such as a rule's strength."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return np.shape(leaf), dtype, getattr(leaf, "sharding", None)


# Cached: every call of a Decoder needs it, and tracing takes as long as decoding some tokens.
@functools.lru_cache(maxsize=256)
def _first_state(
    method: Method, static: tuple[int, int, ByToken, int], structure: Any, kinds: tuple[Any, ...]
) -> tuple[DecodeState, Any]:
    shapes = [jax.ShapeDtypeStruct(*kind[:2], sharding=kind[2]) for kind in kinds]
    params, prompts = jax.tree.unflatten(structure, shapes)
    # `init` uses this trace again.
    state = jitted_init().trace(method, *static, params, prompts).out_info
    if method.partitioner is None:
        return state, None
    leaves, where = jax.tree.flatten(
        method.partitioner.shardings(state, _state_axes(method, state))
    )
    return state, (where, tuple(leaves))


def _state_axes(method: Method, state: DecodeState) -> Axes:
    return row_axes(state._replace(inner=()))._replace(inner=method.inner_axes(state.inner))


def _run(
    method: Method,
    params: Params,
    state: DecodeState,
    stop_after: Array,
    until_finished: Array,
    stop_table: Array | None = None,
) -> DecodeState:
    """Steps until `until_finished` rows are finished or `stop_after` steps are done (int32)."""
    with compiled_for(method.partitioner):
        return _loop(method, params, state, stop_after, until_finished, stop_table)


def _loop(
    method: Method,
    params: Params,
    state: DecodeState,
    stop_after: Array,
    until_finished: Array,
    stop_table: Array | None,
) -> DecodeState:
    """`_run` as part of any program."""
    shared = getattr(params, "processors", ())

    def unfinished(carry):
        state, steps = carry
        finished = jnp.sum(state.finished, dtype=jnp.int32)
        return (steps < stop_after) & (finished < until_finished)

    def body(carry):
        before, steps = carry
        before = _with_shared(before, stop_table, shared)
        after = add_step(before, method.step(params, before), method.eos_ids)
        return _with_shared(method.stepped(params, before, after), None, None), steps + 1

    return lax.while_loop(unfinished, body, (state, jnp.int32(0)))[0]


def _with_shared(state: DecodeState, table: Array | None, processors: Params) -> DecodeState:
    """The state with the arrays that rows share; it has them while a method steps."""
    stop = None if state.stop is None else state.stop._replace(table=table)
    return state._replace(stop=stop, sampling=with_params(state.sampling, processors))


def _words_of_run(method: Method, _: Params, state: DecodeState, *__: Any) -> str:
    rows, longest = state.tokens.shape
    step = f"round of {method.max_draft + 1} tokens" if method.max_draft else "step of a token"
    return f"the {step} for {rows} row{'s' * (rows > 1)} of up to {longest} new tokens"


jitted_run = jit_at(
    _run, options=step_options, words=_words_of_run, static_argnums=0, donate_argnums=2
)


def add_step(state: DecodeState, step: Step, eos_ids: tuple[int, ...]) -> DecodeState:
    """The rows after a step: its tokens appended, its counts added, ends noted."""
    active = ~state.finished
    once = active.astype(jnp.int32)
    new, kept = append(state, step.tokens, step.counts, eos_ids)
    info = new.info
    log_prob, log_probs = info.log_prob, info.log_probs
    for name in LogProbs._fields:
        logs, before = getattr(step.log_probs, name), getattr(log_prob, name)
        if logs is None or before is None:
            continue
        log_prob = log_prob._replace(**{name: before + jnp.where(kept, logs, 0.0).sum(axis=1)})
        if log_probs is not None:
            by_token = put_at(getattr(log_probs, name), logs, state.lengths, kept)
            log_probs = log_probs._replace(**{name: by_token})
    info = info._replace(log_prob=log_prob, log_probs=log_probs)
    if info.sources is not None and step.sources is not None:
        codes = step.sources.astype(info.sources.dtype)
        info = info._replace(sources=put_at(info.sources, codes, state.lengths, kept))
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
    if step.nan_in is None:
        return new
    nan_in = jnp.where(active, step.nan_in, -1)
    ends = (nan_in >= 0) & ~new.finished
    info = new.info._replace(nan_in=jnp.where(ends, nan_in, new.info.nan_in))
    return new._replace(ended_by=jnp.where(ends, NAN, new.ended_by), info=info)


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


def beginning_of(method: Method, params: Params, state: DecodeState, row: int) -> Beginning | None:
    """A copy of the caches of a finished row, for the next prompt that begins with its tokens.

    It has the number of the prompt's and the output's tokens that all caches have. None if the
    state does not show what its models have read.
    """
    leaves, structure = jax.tree.flatten(params)
    kinds = tuple((np.shape(x), jnp.result_type(x)) for x in leaves)
    order = _order(method, structure, kinds)
    caches_read = reads(method.committed(state))
    if not order or max(order) >= len(caches_read):
        return None
    ordered = [caches_read[i] for i in order]
    lengths = np.min([np.asarray(one.cached)[row] for one in ordered])
    rows = 1 if method.partitioner is None else method.partitioner.row_multiple
    caches = tuple(one.cache for one in ordered)
    return Beginning(_take(placement(caches))(rows, caches, np.int32(row)), np.int32(lengths))


def reads(parts: Any) -> list[Any]:
    """All parts with a `cache` and a property `cached`, `[B]` int32, in their order.

    Entries of the cache below `cached` belong to the prompt and the committed tokens, in order.
    """
    if not isinstance(parts, tuple | list):
        return []
    first = [parts] if hasattr(parts, "cached") else []
    return first + [one for part in parts for one in reads(part)]


@functools.lru_cache(maxsize=64)
def _order(method: Method, structure: Any, kinds: tuple[Any, ...]) -> tuple[int, ...]:
    """The places in `reads` of the caches of a `Beginning`, in its order; () if one is missing."""
    order: list[int] = []

    def trace(params: Params) -> None:
        prompts = Prompts(jnp.zeros((1, 2), jnp.int32), jnp.full(1, 2, jnp.int32))
        with noting() as noted:
            state = method.prefill(params, prompts, method.cache_length(2, 0, 1))
        # The same traced arrays.
        first = {id(jax.tree.leaves(one.cache)[0]): i for i, one in enumerate(reads(state))}
        places = [first.get(id(jax.tree.leaves(cache)[0])) for cache in noted]
        order.extend(place for place in places if place is not None)
        if len(order) < len(noted):
            order.clear()

    jax.eval_shape(trace, jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in kinds]))
    return tuple(order)


def _row(rows: int, caches: Any, row: Array) -> Any:
    def take(leaf: Array) -> Array:
        return jnp.repeat(jax.lax.dynamic_slice_in_dim(leaf, row, 1), rows, axis=0)

    return jax.tree.map(take, caches)


_take = jit_at(_row, static_argnums=0)


def check_eos_ids(eos_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises UserError unless `eos_ids` is a tuple of token ids."""
    if not isinstance(eos_ids, tuple):
        raise UserError(f"eos_ids must be a tuple of token ids, got {eos_ids!r}: write (1,)")
    for eos in eos_ids:
        if not 0 <= eos < vocab_size:
            raise UserError(f"eos_ids must lie in [0, {vocab_size - 1}], got {eos}")


def check_model(name: str, model: Any) -> None:
    """Raises UserError unless the argument `name` is a language model, and hashable."""
    needed = ("vocab_size", "prefill", "score", "write", "extend")
    check_part(name, model, needed, "models.model_from_config(config)")
    check_static(name, model)


def check_rollback(model: Any, tokens: int, what: str) -> None:
    """Raises UserError unless the model's rows may go back by so many tokens, as `what` may ask."""
    most = model.most_rollback
    if most is not None and tokens > most:
        raise UserError(
            f"{what} may go back by {tokens} tokens, but {type(model).__name__} can go back by at "
            f"most {most} with its recurrent layers: give drafts that are shorter by "
            f"{tokens - most}, or in Python a model with a larger `rollback`"
        )


def check_drafter(name: str, drafter: Any) -> None:
    """Raises UserError unless the argument `name` is a drafter, and hashable."""
    needed = ("prefill", "draft_limits", "propose", "bonus", "commit", "mark", "rewind")
    check_part(name, drafter, needed, "drafting.Chain(model, 5)")
    check_static(name, drafter)


def check_vocabularies(verifier: Any, drafter: Any) -> None:
    """Raises UserError unless a verifier and a drafter have the same vocabulary size."""
    if verifier.vocab_size != drafter.vocab_size:
        raise UserError(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens, the verifier's "
            f"{verifier.vocab_size}: they must be the same"
        )


def check_strengths(rule: Any, rows: int) -> None:
    """Raises UserError unless every strength of a rule is scalar or `[B]`."""
    for name, leaf in jax.tree_util.tree_leaves_with_path(rule):
        if np.shape(leaf) not in ((), (rows,)):
            raise UserError(
                f"rule{jax.tree_util.keystr(name)} must be scalar or [B] = {(rows,)}, got shape "
                f"{np.shape(leaf)}"
            )
