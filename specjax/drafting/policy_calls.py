"""Calls of stopping policies, and the memory of those that learn.

Axes: B rows, G longest block.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.checks import check_array, check_like, check_part, check_static, unpacked
from specjax.errors import UserError
from specjax.types import Array, DraftOutcome, Params, Stopping
from specjax.types.drafting import Drawn
from specjax.types.pytrees import where_rows


def check_policy(policy: Any) -> None:
    """Raises TypeError unless `policy` is a stopping policy, and hashable."""
    needed = ("bind", "remember", "begin", "step", "learn")
    check_part("stopping", policy, needed, "drafting.FixedLength()")
    check_static("stopping", policy)


def check_own_params(policy: Stopping, params: Params, head: Any = None) -> None:
    """Raises ValueError if one of specjax's policies, which has its numbers, gets parameters."""
    own = type(policy).__module__.startswith("specjax.drafting")
    if not own or (isinstance(params, tuple) and not params):
        return
    try:
        policy.bind(head)
    except ValueError:  # bind() has moved its numbers to the parameters
        return
    raise UserError(
        f"stopping=Own({type(policy).__name__}(...), params) must have no params, because this "
        f"policy needs none: write stopping={policy!r}"
    )


# In place of the length of a last draft whose outcome was already reported.
NOTHING_TO_LEARN = -1


class PolicyPast(NamedTuple):
    """The memory of a policy that learns from earlier rounds.

    Attributes:
      memory: the policy's memory.
      state: its state at the end of the last drafts.
      drafted: `[B]` int32, their number of tokens, or `NOTHING_TO_LEARN`.
    """

    memory: Any
    state: Any
    drafted: Array  # [B]


def first_past(policy: Stopping, params: Params, rows: int, longest: int) -> PolicyPast | tuple[()]:
    """The memory of rows that have drafted nothing; () for a policy without memory."""
    if not policy.reads_past:
        return ()
    memory = policy.remember(params, rows, longest)
    none = jnp.zeros((rows,), jnp.int32)
    return PolicyPast(memory, policy.begin(params, memory, none, longest)[1], none)


def begin(
    policy: Stopping, params: Params, past: PolicyPast | tuple[()], limits: Array, longest: int
) -> tuple[Array, Any]:
    """The result of `policy.begin`, checked while the program is traced.

    Raises:
      TypeError: naming the policy, if it does not return `[B]` int32, or changes its state's form.
    """
    where = f"{type(policy).__name__}.begin"
    memory = past.memory if isinstance(past, PolicyPast) else ()
    returned = policy.begin(params, memory, limits, longest)
    wanted, state = unpacked(where, returned, ("limits", "state"))
    check_array(f"{where}: limits", wanted, "[B]", limits.shape, jnp.int32)
    if isinstance(past, PolicyPast):
        check_like(f"{where}: state", state, past.state)
    return wanted, state


def learn(
    policy: Stopping, past: PolicyPast | tuple[()], drafted: Array, tokens: Array, counts: Array
) -> PolicyPast | tuple[()]:
    """The memory after tokens are committed.

    Args:
      policy: the policy.
      past: its memory.
      drafted: `[B, G]` int32, the tokens of the last drafts.
      tokens: `[B, T]` int32, of which `counts [B]` were committed.
      counts: `[B]` int32; a row with 0 learns nothing.

    Raises:
      TypeError: naming the policy, if it changes the shapes or dtypes of its memory.
    """
    if not isinstance(past, PolicyPast):
        return past
    width = min(tokens.shape[1], drafted.shape[1])
    known = jnp.minimum(counts, past.drafted)
    agrees = tokens[:, :width] == drafted[:, :width]
    agrees &= jnp.arange(width, dtype=jnp.int32)[None] < known[:, None]
    agreed = jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    outcome = DraftOutcome(past.drafted, agreed, agreed < known)
    memory = policy.learn(past.memory, past.state, outcome)
    check_like(f"{type(policy).__name__}.learn: memory", memory, past.memory)
    learns = (counts > 0) & (past.drafted != NOTHING_TO_LEARN)
    return past._replace(memory=where_rows(learns, memory, past.memory))


def decide(policy: Stopping, params: Params, state: Any, drawn: Drawn) -> tuple[Array, Any]:
    """The result of `policy.step`, checked while the program is traced.

    Raises:
      TypeError: naming the policy: if it does not return `[B]` bool, changes the shapes or dtypes
        of its state, or fails because it reads confidences or parameters that it does not have.
    """
    where = f"{type(policy).__name__}.step"
    try:
        returned = policy.step(params, state, drawn)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        remedy = _remedy(error, params, drawn.confidences)
        if remedy is None:
            raise
        raise UserError(f"{where} failed ({' '.join(str(error).split())}): {remedy}") from error
    stops, new = unpacked(where, returned, ("stops", "state"))
    check_array(f"{where}: stops", stops, "[B]", drawn.token.shape, bool)
    check_like(f"{where}: state", new, state)
    return stops, new


def _remedy(error: Exception, params: Params, confidences: Array | None) -> str | None:
    """What a policy lacks, if it used an argument that is None or empty."""
    text = str(error)
    # For jax.lax.top_k None is an array without axes; other functions name it.
    if confidences is None and ("None" in text or "of dimension 0" in text):
        return "confidences are None unless the policy sets reads_confidence = True"
    if isinstance(params, tuple) and not params and "tuple" in text:
        return "it has no parameters: give stopping=Own(policy, params)"
    return None
