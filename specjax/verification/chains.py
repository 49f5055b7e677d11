"""Token and block verification of a chain.

`Token` accepts tokens one by one until the first is rejected. `Block` judges the block as a whole,
and never accepts fewer tokens in expectation.

Source: Leviathan et al. (arXiv 2211.17192), Algorithm 1; Faster Cascades, Algorithm 4; Sun et al.,
Block Verification Accelerates Speculative Decoding (ICLR 2025), Algorithm 2.

Axes: G longest block, N = G + 1 nodes, V vocabulary.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from specjax.platforms import entry
from specjax.sampling import residual_mass
from specjax.types import Acceptance, ScoredBlock, Verification


@dataclasses.dataclass(frozen=True)
class Token(Verification):
    """Accepts x_i with probability min(1, pi_i(x_i) / q_i(x_i)); see `Verification`."""

    needs_probs: ClassVar[bool] = False

    def acceptance(self, block: ScoredBlock, carry: Any = ()) -> Acceptance:
        thresholds = token_acceptance_probs(*block[:4])
        scales = jnp.ones((block.tokens.size + 1,), jnp.float32)
        return Acceptance(thresholds, scales, block.target_probs)


@dataclasses.dataclass(frozen=True)
class Block(Verification):
    """Accepts the longest prefix whose uniform is below its threshold; see `Verification`."""

    keeps_last_pass: ClassVar[bool] = True
    needs_probs: ClassVar[bool] = False

    def acceptance(self, block: ScoredBlock, carry: Any = ()) -> Acceptance:
        tokens, draft_probs, targets, num_drafted = block[:4]
        reached = block_acceptance_probs(tokens, draft_probs, targets, num_drafted)
        scales = jnp.concatenate([jnp.ones((1,), jnp.float32), reached])
        # The threshold of index i < L needs what remains after i tokens, Z_i, for i = 1 .. G - 1.
        if draft_probs is None:  # all but the certain token
            remain = scales[1:-1] * (1.0 - ratios(tokens, None, targets)[1:])
        else:
            # A slice [G - 1, V] of the arrays would be a copy, so the result is sliced.
            remain = jax.vmap(residual_mass)(targets, draft_probs, scales)[1:-1]
        below = remain + (1.0 - scales[1:-1])
        inner = jnp.where(below == 0.0, 1.0, remain / jnp.where(below == 0.0, 1.0, below))
        inner = jnp.concatenate([inner, jnp.ones((1,), jnp.float32)])
        index = jnp.arange(1, tokens.size + 1)
        thresholds = jnp.where(index == num_drafted, reached, inner)
        thresholds = jnp.where(is_drafted(tokens, num_drafted), thresholds, 0.0)
        return Acceptance(thresholds, scales, targets)


def token_acceptance_probs(
    tokens: Int32[Array, " G"],
    draft_probs: Float32[Array, "N V"] | None,
    target_probs: Float32[Array, "N V"],
    num_drafted: Int32[Array, ""],
) -> Float32[Array, " G"]:
    """min(1, pi_i(x_i) / q_i(x_i)), zero past the block's length."""
    probs = jnp.minimum(ratios(tokens, draft_probs, target_probs), 1.0)
    return jnp.where(is_drafted(tokens, num_drafted), probs, 0.0)


def block_acceptance_probs(
    tokens: Int32[Array, " G"],
    draft_probs: Float32[Array, "N V"] | None,
    target_probs: Float32[Array, "N V"],
    num_drafted: Int32[Array, ""],
) -> Float32[Array, " G"]:
    """The probabilities P_i = min(1, P_{i-1} pi_i(x_i) / q_i(x_i)) to accept at least i tokens.

    They are zero past the block's length. The mean of their sum over drafts is E[number accepted].
    """

    def step(reached, ratio):
        # Zero stays zero, also if the ratio is infinite (a token that q cannot draw).
        reached = jnp.where(reached == 0.0, 0.0, jnp.minimum(reached * ratio, 1.0))
        return reached, reached

    probs = lax.scan(step, jnp.float32(1.0), ratios(tokens, draft_probs, target_probs))[1]
    return jnp.where(is_drafted(tokens, num_drafted), probs, 0.0)


def ratios(
    tokens: Int32[Array, " G"],
    draft_probs: Float32[Array, "N V"] | None,
    target_probs: Float32[Array, "N V"],
) -> Float32[Array, " G"]:
    """pi_i(x_i) / q_i(x_i); 0 if pi is 0, infinite if only q is 0, NaN if any is.

    Without `draft_probs` the tokens are certain, and q_i(x_i) is 1.
    """
    # A slice [G, V] of the arrays would be a copy, so the result is cut instead.
    padded = jnp.pad(tokens, (0, 1))
    if draft_probs is None:
        return jax.vmap(entry)(target_probs, padded)[:-1]
    target, draft = (jax.vmap(entry)(x, padded)[:-1] for x in (target_probs, draft_probs))
    ratio = target / jnp.where(draft == 0.0, 1.0, draft)
    return jnp.where(draft == 0.0, jnp.where(target > 0.0, jnp.inf, target), ratio)


def is_drafted(tokens: Int32[Array, " G"], num_drafted: Int32[Array, ""]) -> Bool[Array, " G"]:
    """Whether an entry of a padded block was drafted."""
    return jnp.arange(tokens.size) < num_drafted
