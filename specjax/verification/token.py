"""Token verification accepts tokens one by one until the first is rejected.

Source: Leviathan et al. (arXiv 2211.17192), Algorithm 1; Faster Cascades, Algorithm 4.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from specjax.types import Acceptance, Array, Verification
from specjax.verification.verify import drafted, ratios


@dataclasses.dataclass(frozen=True)
class Token(Verification):
    """Accepts x_i with probability min(1, pi_i(x_i) / q_i(x_i)); see `Verification`."""

    needs_probs: ClassVar[bool] = False

    def acceptance(
        self,
        tokens: Array,
        draft_probs: Any,
        target_probs: Array,
        num_drafted: Array,
        carry: Any = (),
        still_drafting: Array | None = None,
    ) -> Acceptance:
        thresholds = token_acceptance_probs(tokens, draft_probs, target_probs, num_drafted)
        scales = jnp.ones((tokens.size + 1,), jnp.float32)
        return Acceptance(thresholds, scales, target_probs)


def token_acceptance_probs(
    tokens: Array, draft_probs: Array | None, target_probs: Array, num_drafted: Array
) -> Array:
    """min(1, pi_i(x_i) / q_i(x_i)), zero past the block's length; `[G]` float32."""
    probs = jnp.minimum(ratios(tokens, draft_probs, target_probs), 1.0)
    return jnp.where(drafted(tokens, num_drafted), probs, 0.0)
