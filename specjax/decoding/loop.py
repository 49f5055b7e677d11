"""The base class of decoding methods and its loop, in which each row advances by itself.

Axes: B rows, N longest output, G longest block, L tokens of a beginning.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from specjax.compilation import jit, jit_at, placement, step_options
from specjax.decoding.guards import (
    check_eos_ids,
    check_prompts,
    check_strengths,
)
from specjax.decoding.state import ByToken, Step, add_step, initial_state
from specjax.errors import UserError
from specjax.memory import nbytes
from specjax.models.beginnings import Beginning, continuing, noting
from specjax.partitioning import Partitioner
from specjax.platforms import compiled_for
from specjax.processing import bound, initial_processing
from specjax.rules import Lossless
from specjax.types import (
    Axes,
    Cache,
    DecodeState,
    Params,
    Processing,
    PromptBatch,
    Prompts,
    row_axes,
)

# More steps than a loop ever takes.
_FOREVER = 2**31 - 1


class MethodParams(NamedTuple):
    """The parameters of a method; there is no drafter if a method has only a verifier.

    Attributes:
      verifier: the verifier's parameters.
      drafter: the drafter's; a neural drafter's are `drafting.NeuralDrafterParams`.
      rule: the rule, its strengths scalar or `[B]`.
      processors: for each processor of the sampling, the arrays that rows share.
    """

    verifier: Params
    drafter: Params = ()
    rule: Any = Lossless()
    processors: tuple[Params, ...] = ()


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
    def nan_sources(self) -> tuple[str, ...]:
        """The possible sources of NaN; see `DecodeInfo.nan_in`."""
        return self.model_names

    @property
    def source_names(self) -> tuple[str, ...]:
        """Where a token can come from; see `DecodeInfo.token_sources`."""
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
        token_log_probs: bool = False,
        token_sources: bool = False,
        copies: int = 1,
        beginning: Beginning | None = None,
    ) -> DecodeState:
        """Reads prompts.

        Args:
          params: the method's parameters.
          prompts: B prompts.
          max_new: N, the longest output (static).
          max_length: S, cache positions (static); by default `cache_length`.
          token_log_probs: whether `DecodeInfo` has log-probabilities per token.
          token_sources: whether it has where each token came from.
          copies: n, the number of rows of each prompt (static); the prompt is read once. Rows of a
            prompt with id i are adjacent, and get the ids i * n .. i * n + n - 1.
          beginning: from `begin`, with the number of its first tokens with which each prompt
            begins, less than the prompt's length; only the rest of the prompt is read.

        Returns:
          A state for `run`.
        """
        check_prompts(self, prompts, copies, max_new)
        self.check_params(params, np.shape(prompts.inputs)[0] * copies)
        processors = prompts.sampling.processors or ()
        arrays = getattr(params, "processors", ())
        assert len(arrays) == len(processors), "params.processors must have one for each processor"
        forced = 0 if prompts.prefix is None else np.shape(prompts.prefix)[1]
        lengths = (prompts.input_lengths, prompts.prefix_lengths)
        positions = self.prompt_positions(
            *(np.asarray(forced if length is None else length) for length in lengths)
        )
        longest = int(np.max(positions, initial=0))
        needed = longest + max_new + self.max_draft + 1
        if max_length is None:
            max_length = self.cache_length(np.shape(prompts.inputs)[1], forced, max_new)
        if max_length < needed:
            raise UserError(
                f"max_length must be at least {needed}, got {max_length}: the longest prompt takes "
                f"{longest} positions, the output {max_new} and a block {self.max_draft + 1}"
            )
        prompts = prompts._replace(
            seeds=np.asarray(prompts.seeds).astype(np.uint32),
            ids=np.asarray(prompts.ids).astype(np.uint32),
        )
        by_token = ByToken(bool(token_log_probs), bool(token_sources))
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

        Nothing is checked, because values may be traced: limits must be at most `max_new`, and
        `max_length` must hold the longest prompt, its output and a block (see `init`).

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
        state = self._begun(params, inner, prompts, max_new, ByToken())
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
        token_log_probs: bool = False,
        token_sources: bool = False,
    ) -> int:
        """The bytes of the parameters and of an initial state per device; it allocates nothing.

        Only the compiler knows what else a program needs. Arguments are those of `init`; shapes of
        the prompts suffice.
        """
        seeds, ids = (
            jax.ShapeDtypeStruct(np.shape(x), np.uint32) for x in (prompts.seeds, prompts.ids)
        )
        by_token = ByToken(bool(token_log_probs), bool(token_sources))
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

    def _begun(
        self, params: Params, inner: Any, prompts: PromptBatch, max_new: int, by_token: ByToken
    ) -> DecodeState:
        return initial_state(
            inner,
            prompts,
            max_new=max_new,
            max_draft=self.max_draft,
            model_names=self.model_names,
            by_token=by_token,
            of_nodes=self.drafts_trees,
            processing=self.initial_processing(params, prompts, max_new),
        )

    def initial_processing(
        self, params: Params, prompts: PromptBatch, max_new: int
    ) -> Processing | None:
        """The processors after the prompts; traced."""
        shared = getattr(params, "processors", ())
        # Drafts may reach past the end of an output.
        return initial_processing(prompts, self.vocab_size, max_new + self.max_draft + 1, shared)


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
    with continuing(beginning):
        inner = method.prefill(params, prompts.prompts, max_length)
    inner, prompts = _copied(inner, prompts, copies)
    return method._begun(params, inner, prompts, max_new, by_token)


jitted_init = jit_at(_start, static_argnums=(0, 1, 2, 3, 4))


@functools.partial(jit, static_argnums=(0, 1))
def _jitted_begin(
    method: Method, max_length: int, params: Params, prompts: PromptBatch
) -> tuple[Any, ...]:
    with noting() as caches:
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
    return state._replace(stop=stop, sampling=bound(state.sampling, processors))


jitted_run = jit_at(_run, options=step_options, static_argnums=0, donate_argnums=2)


class Read(NamedTuple):
    """A model's cache in a state.

    Attributes:
      cache: its cache.
      length: its entries below it belong to the prompt and the committed tokens.
    """

    cache: Cache
    length: Int32[Array, " B"]


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
    lengths = np.min([np.asarray(one.length)[row] for one in ordered])
    rows = 1 if method.partitioner is None else method.partitioner.row_multiple
    caches = tuple(one.cache for one in ordered)
    return Beginning(_take(placement(caches))(rows, caches, np.int32(row)), np.int32(lengths))


def reads(parts: Any) -> list[Read]:
    """All parts with a `cache` and a property `cached`, `[B]` int32, in their order.

    Entries of the cache below `cached` belong to the prompt and the committed tokens, in order.
    """
    if not isinstance(parts, tuple | list):
        return []
    first = [Read(parts.cache, parts.cached)] if hasattr(parts, "cached") else []  # type: ignore[union-attr]
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
    """`rows` copies of a row."""

    def take(leaf: Array) -> Array:
        return jnp.repeat(jax.lax.dynamic_slice_in_dim(leaf, row, 1), rows, axis=0)

    return jax.tree.map(take, caches)


_take = jit_at(_row, static_argnums=0)
