"""Decoding in a loop: a method adds how its models take prompts in, and one step.

Axes: B rows, N longest output, G longest block.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.compilation import jit
from specjax.decoding.checks import check_eos_ids, check_prompts, check_stops, check_table
from specjax.decoding.compilation import jit_at, jit_steps, placement
from specjax.decoding.state import initial_state
from specjax.memory import nbytes
from specjax.partitioning import Partitioner
from specjax.platforms import compiled_for
from specjax.types import Array, Axes, DecodeState, Params, PromptBatch, row_axes

# More steps than any loop takes.
_FOREVER = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopMethod(abc.ABC):
    """A `specjax.types.Method` but for `prefill` and `step`; static and hashable.

    Attributes:
      eos_ids: tokens that end a row.
      partitioner: where arrays lie on a mesh; None for one device.

    Raises:
      TypeError: if `eos_ids` is no tuple.
      ValueError: if an end-of-sequence token is outside the vocabulary.
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
        """See `Method`."""

    @abc.abstractmethod
    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """The cache positions that the prompts take in the model where they take most."""

    @abc.abstractmethod
    def prefill(self, params: Params, prompts: PromptBatch, max_length: int) -> Any:
        """What the step carries after the prompt; traced."""

    @abc.abstractmethod
    def step(self, params: Params, state: DecodeState) -> DecodeState:
        """One step of all rows; traced. It leaves finished rows as they are.

        `specjax.decoding.append` appends its tokens, `step_uniforms` draws its random numbers; the
        step counts itself in `state.steps`. `add_log_probs` writes the tokens' log-probabilities;
        where a step leaves it out, those by token (`log_probs=True`) are NaN.
        """

    @property
    def max_draft(self) -> int:
        """G, 0 without a drafter."""
        return 0

    @property
    def min_draft(self) -> int:
        """See `Method`."""
        return 0

    @property
    def independent_rows(self) -> bool:
        """See `Method`; a method must know that it is so."""
        return False

    @property
    def nan_sources(self) -> tuple[str, ...]:
        """See `Method`."""
        return self.model_names

    def inner_axes(self, inner: Any) -> Axes:
        """The logical axis names of what the step carries; by default only rows are spread."""
        return row_axes(inner)

    def check_rule(self, rule: Any) -> None:
        """Raises ValueError: a method has no rule unless it says so."""
        raise ValueError(f"rule must be left out: {type(self).__name__} has none, got {rule!r}")

    def check_params(self, params: Params, state: DecodeState) -> None:
        """Raises TypeError or ValueError if the parameters do not fit the method or the batch."""
        return None

    def cache_length(self, prompt_length: int, prefix_length: int, max_new: int) -> int:
        """See `Method`."""
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
    ) -> DecodeState:
        """See `Method`."""
        sizes = {"vocab_size": self.vocab_size, "max_draft": self.max_draft, "max_new": max_new}
        check_prompts(prompts, **sizes)
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
            raise ValueError(
                f"max_length must be at least {needed}, got {max_length}: the longest prompt takes "
                f"{longest} positions, the output {max_new} and a block {self.max_draft + 1}"
            )
        prompts = prompts._replace(
            seeds=np.asarray(prompts.seeds).astype(np.uint32),
            ids=np.asarray(prompts.ids).astype(np.uint32),
        )
        static = (max_new, int(max_length), bool(token_log_probs))
        if self.partitioner is not None:
            prompts = self.partitioner.place_rows(prompts)
        return self._jitted_init(static, params, prompts)[0](self, *static, params, prompts)

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
        """Decodes to the end as a part of the caller's own jitted function.

        Nothing is checked, for values may be traced: limits must be at most `max_new`, and
        `max_length` what the longest prompt, its output and a block take (see `init`).

        Args:
          params: the method's parameters; strengths of a rule scalar or `[B * copies]`.
          prompts: B prompts; a field by row may have B or B * copies rows.
          max_new: N (static).
          max_length: S, cache positions (static).
          copies: how many outputs each prompt gets (static); it is read once. Those of one prompt
            lie beside each other, and differ in their ids alone.
          place: (first state, the logical names of its axes) -> the same state, laid out.

        Returns:
          The state of B * copies finished rows.
        """
        inner = self.prefill(params, prompts, max_length)
        rows = prompts.inputs.shape[0]

        def spread(leaf: Any) -> Any:
            by_row = jnp.ndim(leaf) > 0 and leaf.shape[0] == rows
            return jnp.repeat(leaf, copies, axis=0) if copies > 1 and by_row else leaf

        inner, prompts = jax.tree.map(spread, (inner, prompts))
        if copies > 1:
            nth = jnp.arange(prompts.ids.size, dtype=prompts.ids.dtype) % copies
            prompts = prompts._replace(ids=prompts.ids * copies + nth)
        state = initial_state(
            inner,
            prompts,
            max_new=max_new,
            max_draft=self.max_draft,
            model_names=self.model_names,
            token_log_probs=False,
        )
        if place is not None:
            state = place(state, _state_axes(self, state))
        # What its devices are, the caller knows.
        return _loop(self, params, state, jnp.int32(_FOREVER), jnp.int32(state.limits.size))

    def least_memory(
        self,
        params: Params,
        prompts: PromptBatch,
        *,
        max_new: int,
        max_length: int,
        token_log_probs: bool = False,
    ) -> int:
        """The bytes that `init` needs on each device, at least; it allocates nothing.

        Args:
          params: the method's parameters.
          prompts: see `init`; shapes will do.
          max_new: see `init`.
          max_length: see `init`.
          token_log_probs: see `init`.

        Returns:
          The bytes of the state and of the parameters; or, if it is more, a part of the largest
          product, which the compiler need not hold whole. What else a program needs, only it knows.
        """
        seeds, ids = (
            jax.ShapeDtypeStruct(np.shape(x), np.uint32) for x in (prompts.seeds, prompts.ids)
        )
        prompts = prompts._replace(seeds=seeds, ids=ids)
        static = (max_new, int(max_length), bool(token_log_probs))
        leaves, structure = jax.tree.flatten((params, prompts))
        state, product = _traced_bytes(self, static, structure, tuple(map(_kind, leaves)))
        devices = 1 if self.partitioner is None else self.partitioner.mesh.size
        return max(state + nbytes(params) // devices, product // (64 * devices))

    def _jitted_init(
        self, static: tuple[int, int, bool], params: Params, prompts: PromptBatch
    ) -> tuple[Any, Any]:
        """The jitted function, and where its results lie (None on one device)."""
        if self.partitioner is None:
            return _init, None
        leaves, structure = jax.tree.flatten((params, prompts))
        where = _places(self, static, structure, tuple((x.shape, x.dtype) for x in leaves))
        return _init_at(where), list(where[1])

    def run(
        self,
        params: Params,
        state: DecodeState,
        stop_after: int | Array,
        until_finished: int | Array | None = None,
        stop_table: Array | None = None,
    ) -> DecodeState:
        """See `Method`."""
        stops = check_stops(state, stop_after, until_finished)
        check_table(state, stop_table)
        self.check_params(params, state)
        return jitted_run(placement(state))(self, params, state, *stops, stop_table)

    def describe(self) -> dict[str, Any]:
        """See `Method`."""
        return {"method": type(self).__name__, "max_draft": self.max_draft}


def _start(
    method: LoopMethod,
    max_new: int,
    max_length: int,
    token_log_probs: bool,
    params: Params,
    prompts: PromptBatch,
) -> DecodeState:
    return initial_state(
        method.prefill(params, prompts, max_length),
        prompts,
        max_new=max_new,
        max_draft=method.max_draft,
        model_names=method.model_names,
        token_log_probs=token_log_probs,
    )


_init = jit(_start, static_argnums=(0, 1, 2, 3))


def _products(jaxpr: Any) -> Iterator[int]:
    """The bytes of the results of all products of matrices."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (result,) = (variable.aval for variable in equation.outvars)
            yield math.prod(result.shape) * result.dtype.itemsize
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _products(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def _kind(leaf: Any) -> tuple[Any, ...]:
    """What the tracing of a function depends on of an argument."""
    return leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)


# Kept, because every call of a Decoder asks, and tracing takes as long as decoding some tokens.
@functools.lru_cache(maxsize=256)
def _traced_bytes(
    method: LoopMethod, static: tuple[int, int, bool], structure: Any, kinds: tuple[Any, ...]
) -> tuple[int, int]:
    """The bytes of a first state on each device, and of its largest product on all."""
    shapes = [jax.ShapeDtypeStruct(*kind[:2], sharding=kind[2]) for kind in kinds]
    params, prompts = jax.tree.unflatten(structure, shapes)
    jitted, shardings = method._jitted_init(static, params, prompts)
    # What is traced here is not traced again by `init`.
    traced = jitted.trace(method, *static, params, prompts)
    return nbytes(traced.out_info, shardings), max(_products(traced.jaxpr.jaxpr), default=0)


@functools.lru_cache(maxsize=256)
def _places(
    method: LoopMethod, static: tuple[int, int, bool], structure: Any, kinds: tuple[Any, ...]
) -> Any:
    """Where every array of a first state is to lie, as `jit_at` takes it."""
    assert method.partitioner is not None
    params, prompts = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*k) for k in kinds])
    shapes = jax.eval_shape(functools.partial(_start, method, *static), params, prompts)
    axes = _state_axes(method, shapes)
    leaves, where = jax.tree.flatten(method.partitioner.shardings(shapes, axes))
    return where, tuple(leaves)


def _state_axes(method: LoopMethod, state: DecodeState) -> Axes:
    return row_axes(state._replace(inner=()))._replace(inner=method.inner_axes(state.inner))


@functools.cache
def _init_at(where: Any) -> Any:
    return jit_at(_start, where, static_argnums=(0, 1, 2, 3))


def _run(
    method: LoopMethod,
    params: Params,
    state: DecodeState,
    stop_after: Array,
    until_finished: Array,
    stop_table: Array | None = None,
) -> DecodeState:
    """Steps until `until_finished` rows are, or `stop_after` steps are done (int32 scalars)."""
    with compiled_for(method.partitioner):
        return _loop(method, params, state, stop_after, until_finished, stop_table)


def _loop(
    method: LoopMethod,
    params: Params,
    state: DecodeState,
    stop_after: Array,
    until_finished: Array,
    stop_table: Array | None = None,
) -> DecodeState:
    """`_run` as a part of any program."""

    def unfinished(carry):
        state, steps = carry
        finished = jnp.sum(state.finished, dtype=jnp.int32)
        return (steps < stop_after) & (finished < until_finished)

    def body(carry):
        state, steps = carry
        return _with_table(method.step(params, _with_table(state, stop_table)), None), steps + 1

    return lax.while_loop(unfinished, body, (state, jnp.int32(0)))[0]


def _with_table(state: DecodeState, table: Array | None) -> DecodeState:
    return state if state.stop is None else state._replace(stop=state.stop._replace(table=table))


jitted_run = jit_steps(_run, static_argnums=0, donate_argnums=2)
