"""Checks, while a program is traced, of what a drafter returns.

Axes: B rows, G longest block, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import check_array, check_like, unpacked
from specjax.types import Array, Bonus, DraftBlock, Drafter, Params


def check_state(drafter: Drafter, state: Any, rows: int) -> None:
    """Raises TypeError unless the batch is the leading axis of every array of a first state."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.shape(leaf)[:1] != (rows,):
            raise TypeError(
                f"{type(drafter).__name__}.prefill: state{jax.tree_util.keystr(path)} must be "
                f"[B, ...] with B = {rows} rows, got shape {list(jnp.shape(leaf))}"
            )


def planned(drafter: Drafter, params: Params, state: Any, limits: Array) -> Array:
    """What `draft_limits` says, within 0 and `limits`; both `[B]` int32.

    Raises:
      TypeError: naming the drafter, if it gives no `[B]` int32.
    """
    asked = drafter.draft_limits(params, state, limits)
    where = f"{type(drafter).__name__}.draft_limits"
    check_array(where, asked, "[B]", limits.shape, jnp.int32)
    return jnp.clip(asked, 0, limits)


def checked_block(
    drafter: Drafter, returned: Any, limits: Array, with_confidence: bool
) -> tuple[DraftBlock, Any]:
    """The block and the state that `propose` returned, no row's block longer than its limit.

    Args:
      drafter: the drafter.
      returned: what its `propose` returned.
      limits: `[B]` int32, known before the draft: so it is exact to cut a block there.
      with_confidence: whether the rule reads confidences.

    Raises:
      TypeError: naming the drafter and the field that is of a wrong shape, dtype or type.
    """
    where = f"{type(drafter).__name__}.propose"
    block, state = unpacked(where, returned, ("block", "state"))
    if not isinstance(block, DraftBlock):
        raise TypeError(f"{where} must return a types.DraftBlock first, got {type(block).__name__}")
    rows, longest, vocab = limits.size, drafter.max_draft, drafter.vocab_size
    wide = (rows, longest + 1, vocab)
    check_array(f"{where}: tokens", block.tokens, "[B, G]", (rows, longest), jnp.int32)
    check_array(f"{where}: probs", block.probs, "[B, G + 1, V]", wide, jnp.float32)
    check_array(f"{where}: num_drafted", block.num_drafted, "[B]", (rows,), jnp.int32)
    if with_confidence:
        check_array(f"{where}: confidences", block.confidences, "[B, G + 1, V]", wide, jnp.float32)
    _check_calls(where, drafter, block.calls)
    return block._replace(num_drafted=jnp.clip(block.num_drafted, 0, limits)), state


def checked_bonus(
    drafter: Drafter, returned: Any, before: Any, rows: int, with_confidence: bool
) -> tuple[Bonus, Any]:
    """The bonus and the state that `bonus` returned; `before` is the state that it was given.

    Raises:
      TypeError: naming the drafter and the field that is of a wrong shape, dtype or type.
    """
    where = f"{type(drafter).__name__}.bonus"
    extra, state = unpacked(where, returned, ("bonus", "state"))
    if not isinstance(extra, Bonus):
        raise TypeError(f"{where} must return a types.Bonus first, got {type(extra).__name__}")
    shape = (rows, drafter.vocab_size)
    check_array(f"{where}: probs", extra.probs, "[B, V]", shape, jnp.float32)
    if with_confidence:
        check_array(f"{where}: confidences", extra.confidences, "[B, V]", shape, jnp.float32)
    _check_calls(where, drafter, extra.calls)
    check_like(f"{where}: state", state, before)
    return extra, state


def committed(drafter: Drafter, state: Any, before: Any, tokens: Array, counts: Array) -> Any:
    """What `commit` returns; raises TypeError unless it is like the state `before` the round."""
    new = drafter.commit(state, tokens, counts)
    check_like(f"{type(drafter).__name__}.commit: state", new, before)
    return new


def _check_calls(where: str, drafter: Drafter, calls: Any) -> None:
    names = drafter.model_names
    if not isinstance(calls, dict) or set(calls) != set(names):
        got = list(calls) if isinstance(calls, dict) else calls
        raise TypeError(
            f"{where}: calls must be a dict with the model_names {list(names)} as its keys, got "
            f"{got}"
        )
