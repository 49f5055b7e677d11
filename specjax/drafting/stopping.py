"""Stopping policies: when a row's draft ends."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.checks import check_array, check_like, unpacked
from specjax.types import Array, Params, Stopping


@dataclasses.dataclass(frozen=True)
class FixedLength(Stopping):
    """Never stops a draft before its longest length."""

    @property
    def is_fixed(self) -> bool:
        """Yes."""
        return True

    def step(
        self,
        params: Params,
        state: Any,
        token: Array,
        probs: Array,
        confidences: Array | None,
        hidden: Array,
        index: Array,
    ) -> tuple[Array, Any]:
        """Never."""
        return jnp.zeros(token.shape, bool), state


def decide(
    policy: Stopping,
    params: Params,
    state: Any,
    token: Array,
    probs: Array,
    confidences: Array | None,
    hidden: Array,
    index: Array,
) -> tuple[Array, Any]:
    """What `policy.step` says, checked while the program is traced.

    Raises:
      TypeError: naming the policy: if it gives no `[B]` bool or changes the kind of its state, or
        fails since it reads confidences or parameters that it was not given.
    """
    where = f"{type(policy).__name__}.step"
    try:
        returned = policy.step(params, state, token, probs, confidences, hidden, index)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        remedy = _remedy(str(error), params, confidences)
        if remedy is None:
            raise
        raise TypeError(f"{where} failed ({' '.join(str(error).split())}): {remedy}") from error
    stops, new = unpacked(where, returned, ("stops", "state"))
    check_array(f"{where}: stops", stops, "[B]", token.shape, bool)
    check_like(f"{where}: state", new, state)
    return stops, new


def _remedy(error: str, params: Params, confidences: Array | None) -> str | None:
    if confidences is None and "NoneType" in error:
        return "confidences are None unless the policy sets reads_confidence = True"
    if isinstance(params, tuple) and not params and "tuple" in error:
        return "it has no parameters: give stopping_params="
    return None
