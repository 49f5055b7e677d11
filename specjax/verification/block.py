"""Block verification judges the block as a whole.

It never accepts fewer tokens in expectation than token verification.

Source: Sun et al., Block Verification Accelerates Speculative Decoding (ICLR 2025), Algorithm 2.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from specjax.sampling import residual_mass
from specjax.types import Acceptance, Array, Verification
from specjax.verification.verify import drafted, ratios


@dataclasses.dataclass(frozen=True)
class Block(Verification):
    """Accepts the longest prefix whose uniform is below its threshold; see `Verification`."""

    keeps_last_pass: ClassVar[bool] = True
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
        reached = block_acceptance_probs(tokens, draft_probs, target_probs, num_drafted)
        scales = jnp.concatenate([jnp.ones((1,), jnp.float32), reached])
        # The threshold of index i < L needs what remains after i tokens, Z_i, for i = 1 .. G - 1.
        if draft_probs is None:  # all but the certain token
            remain = scales[1:-1] * (1.0 - ratios(tokens, None, target_probs)[1:])
        else:
            # A slice [G - 1, V] of the arrays would be a copy, so the result is sliced.
            remain = jax.vmap(residual_mass)(target_probs, draft_probs, scales)[1:-1]
        below = remain + (1.0 - scales[1:-1])
        inner = jnp.where(below == 0.0, 1.0, remain / jnp.where(below == 0.0, 1.0, below))
        inner = jnp.concatenate([inner, jnp.ones((1,), jnp.float32)])
        index = jnp.arange(1, tokens.size + 1)
        thresholds = jnp.where(index == num_drafted, reached, inner)
        thresholds = jnp.where(drafted(tokens, num_drafted), thresholds, 0.0)
        return Acceptance(thresholds, scales, target_probs)


def block_acceptance_probs(
    tokens: Array, draft_probs: Array | None, target_probs: Array, num_drafted: Array
) -> Array:
    """The probabilities P_i = min(1, P_{i-1} pi_i(x_i) / q_i(x_i)) to accept at least i tokens.

    `[G]` float32, zero past the block's length. The mean of its sum over drafts is
    E[number accepted].
    """

    def step(reached, ratio):
        # Zero stays zero, also if the ratio is infinite (a token that q cannot draw).
        reached = jnp.where(reached == 0.0, 0.0, jnp.minimum(reached * ratio, 1.0))
        return reached, reached

    probs = lax.scan(step, jnp.float32(1.0), ratios(tokens, draft_probs, target_probs))[1]
    return jnp.where(drafted(tokens, num_drafted), probs, 0.0)
