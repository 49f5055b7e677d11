"""Calls of a drafter; asserts hold its author to the shapes that `specjax.types.Drafter` promises.

Axes: B rows, G longest block, N = G + 1 nodes, T committed tokens, D width.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from specjax.types import (
    Bonus,
    DraftBlock,
    Drafter,
    DraftInputs,
    Params,
    Prefilled,
    PrefilledStates,
    Prompts,
)


def prefill(
    drafter: Drafter,
    params: Params,
    prompts: Prompts,
    max_length: int,
    verifier: PrefilledStates | Prefilled,
) -> Any:
    """The drafter's state after the prompts; only those that read the verifier get its states."""
    reads = {"verifier": verifier} if drafter.traits.boundaries else {}
    return drafter.prefill(params, prompts, max_length, **reads)


def draft_limits(
    drafter: Drafter, params: Params, state: Any, limits: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    """The limits that the drafter decides on before it drafts, at most `limits`."""
    wanted = drafter.draft_limits(params, state, limits)
    _assert_kind(f"{type(drafter).__name__}.draft_limits", wanted, jnp.int32, *limits.shape)
    return jnp.clip(wanted, 0, limits)


def propose(
    drafter: Drafter,
    params: Params,
    state: Any,
    inputs: DraftInputs,
    *,
    with_confidence: bool,
    with_sources: bool = False,
) -> tuple[DraftBlock, Any]:
    """The drafter's block and state.

    Blocks are cut at the limits, which is exact, because these were known before the draft.
    """
    sources = sources_option(drafter, with_sources)
    block, state = drafter.propose(
        params, state, inputs, with_confidence=with_confidence, **sources
    )
    where = f"{type(drafter).__name__}.propose"
    assert isinstance(block, DraftBlock), f"{where} must return a types.DraftBlock first"
    rows, longest, vocab = inputs.limits.size, drafter.max_draft, drafter.vocab_size
    _assert_kind(f"{where}: tokens", block.tokens, jnp.int32, rows, longest)
    _assert_kind(f"{where}: num_drafted", block.num_drafted, jnp.int32, rows)
    assert block.probs is not None or not drafter.num_uniforms, f"{where}: tokens need probs"
    if block.probs is not None and block.drawn_from is None:
        _assert_kind(f"{where}: probs", block.probs, jnp.float32, rows, longest + 1, vocab)
    if with_confidence:
        of_nodes = (rows, longest + 1, vocab)
        _assert_kind(f"{where}: confidences", block.confidences, jnp.float32, *of_nodes)
    if drafter.traits.drafts_trees:
        _assert_kind(f"{where}: parents", block.parents, jnp.int32, rows, longest)
    else:
        assert block.parents is None, f"{where}: parents need the trait drafts_trees"
    _assert_calls(where, drafter, block.calls)
    return block._replace(num_drafted=jnp.clip(block.num_drafted, 0, inputs.limits)), state


def sources_option(drafter: Drafter, with_sources: bool) -> dict[str, Any]:
    """The option of `propose` for sources, which only drafters of several parts have."""
    return {"with_sources": True} if with_sources and len(drafter.source_names) > 1 else {}


def bonus(
    drafter: Drafter,
    params: Params,
    state: Any,
    inputs: DraftInputs,
    block: DraftBlock,
    *,
    with_confidence: bool,
) -> tuple[Bonus, Any]:
    """The drafter's distribution after the block, and its state."""
    extra, state = drafter.bonus(params, state, inputs, block, with_confidence=with_confidence)
    where = f"{type(drafter).__name__}.bonus"
    assert isinstance(extra, Bonus), f"{where} must return a types.Bonus first"
    of_rows = (inputs.limits.size, drafter.vocab_size)
    _assert_kind(f"{where}: probs", extra.probs, jnp.float32, *of_rows)
    if with_confidence:
        _assert_kind(f"{where}: confidences", extra.confidences, jnp.float32, *of_rows)
    _assert_calls(where, drafter, extra.calls)
    return extra, state


def commit(
    drafter: Drafter,
    state: Any,
    tokens: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
    hidden: Float[Array, "B T D"] | None = None,
) -> Any:
    """The drafter's state after a commit; only those that read hidden states take them."""
    if drafter.traits.reads_verifier_hidden:
        return drafter.commit(state, tokens, counts, hidden=hidden)
    return drafter.commit(state, tokens, counts)


def _assert_kind(what: str, value: Any, dtype: Any, *shape: int) -> None:
    kind = getattr(value, "shape", None), getattr(value, "dtype", None)
    assert kind == (shape, jnp.dtype(dtype)), f"{what} must be {dtype.__name__}{list(shape)}"


def _assert_calls(where: str, drafter: Drafter, calls: Any) -> None:
    assert set(calls) == set(drafter.model_names), f"{where}: calls must name the model_names"
