"""Stopping policies: when a row's draft ends."""

import dataclasses
from typing import Any

import jax.numpy as jnp

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
