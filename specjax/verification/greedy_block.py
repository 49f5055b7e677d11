"""Greedy block verification accepts the most tokens in one round, and corrects later rounds.

Each round leaves a carry-over, which changes the target of the next positions to
norm((R pi - q)_+), where R is the joint ratio pi / q along the path since the block's start. It
ends when this path is G tokens long, or reaches a prefix where that round's drafter would have
stopped. Carry-overs nest, oldest first. Without them the output would be biased.

Source: Sun et al., Optimal Block-Level Draft Verification (arXiv 2403.10444v1), Algorithm 3.

Axes: G longest block, N = G + 1 nodes, C = G - 1 slots of carry-overs, V vocabulary.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from specjax.errors import UserError
from specjax.sampling import residual, residual_mass
from specjax.types import Acceptance, DraftTraits, ScoredBlock, Verification
from specjax.verification.chains import is_drafted, ratios

# At this ratio R pi - q equals R pi in float32. Sums of larger ones could overflow.
_MAX_RATIO = 1e30


class GreedyBlockCarry(NamedTuple):
    """The carry-overs of one row, oldest first.

    Attributes:
      ratio: R along the emitted path since the slot's block began.
      remaining: how many more positions the slot changes; 0: it has ended.
    """

    ratio: Float32[Array, " C"]
    remaining: Int32[Array, " C"]


@dataclasses.dataclass(frozen=True)
class GreedyBlock(Verification):
    """Accepts the whole block with probability min(1, R_L), else tries shorter prefixes in turn.

    `check` raises an error for drafters with which it is not exact; see `Verification`.
    """

    keeps_last_pass: ClassVar[bool] = True
    has_carry: ClassVar[bool] = True

    def check(self, max_draft: int, traits: DraftTraits) -> None:
        wrong = {
            "a drafter whose distributions depend on more than the prefix": not traits.prefix_only,
            "randomised stops": traits.random_stops,
        }
        for what, refused in wrong.items():
            if refused:
                raise UserError(f"GreedyBlock is not exact with {what}: use Block or Token instead")

    def init_carry(self, max_draft: int) -> GreedyBlockCarry:
        slots = max(max_draft - 1, 0)
        return GreedyBlockCarry(jnp.ones((slots,), jnp.float32), jnp.zeros((slots,), jnp.int32))

    def acceptance(self, block: ScoredBlock, carry: Any = ()) -> Acceptance:
        tokens, draft_probs, _, num_drafted = block[:4]
        assert draft_probs is not None
        assert isinstance(carry, GreedyBlockCarry), "start with init_carry(G)"
        assert carry.ratio.size == max(tokens.size - 1, 0), "the carry is of another block length"
        targets, levels = _nested(block, carry)
        scales = jnp.minimum(_joint_ratios(tokens, draft_probs, targets, num_drafted), _MAX_RATIO)
        index = jnp.arange(1, tokens.size + 1)
        remain = jax.vmap(residual_mass)(targets, draft_probs, scales)[1:]
        # sum (q - R pi)_+ = sum (R pi - q)_+ + 1 - R; summed directly, it has no cancellation.
        reject = jax.vmap(residual_mass)(draft_probs, scales[:, None] * targets)[1:]
        inner = jnp.where(remain >= reject, 1.0, remain / jnp.where(reject > 0.0, reject, 1.0))
        thresholds = jnp.where(index == num_drafted, jnp.minimum(scales[1:], 1.0), inner)
        thresholds = jnp.where(is_drafted(tokens, num_drafted), thresholds, 0.0)
        return Acceptance(thresholds, scales, targets, levels)

    def next_carry(
        self,
        acceptance: Acceptance,
        block: ScoredBlock,
        carry: Any,
        num_accepted: Int32[Array, ""],
        next_token: Int32[Array, ""],
    ) -> GreedyBlockCarry:
        if not carry.ratio.size:
            return carry
        draft_probs, levels = block.draft_probs, acceptance.detail
        assert draft_probs is not None
        emitted = num_accepted + 1
        # Each slot's own target, at the last emitted token.
        last_q = draft_probs[num_accepted, next_token]
        inputs = levels.inputs[:, num_accepted, next_token]
        ratio = _times(levels.ratios[:, num_accepted], inputs, last_q)
        alive = levels.alive[:, num_accepted] & jnp.isfinite(ratio)
        left = jnp.where(alive, jnp.maximum(carry.remaining - emitted, 0), 0)

        new_ratio = _times(
            acceptance.scales[num_accepted], acceptance.targets[num_accepted, next_token], last_q
        )
        # If the whole block is accepted, the path is at a prefix where its drafter stopped.
        goes_on = (num_accepted < block.num_drafted) & jnp.isfinite(new_ratio)
        new_left = jnp.where(goes_on, jnp.maximum(draft_probs.shape[0] - 1 - emitted, 0), 0)
        return GreedyBlockCarry(
            jnp.append(jnp.where(alive, ratio, 1.0)[1:], jnp.where(goes_on, new_ratio, 1.0)),
            jnp.append(left[1:], new_left),
        )


class _Levels(NamedTuple):
    """What each slot changes.

    Attributes:
      inputs: the targets that each slot changes.
      ratios: R before each position.
      alive: whether the slot changes the target there.
    """

    inputs: Float32[Array, "C N V"]
    ratios: Float32[Array, "C N"]
    alive: Bool[Array, "C N"]


def _nested(block: ScoredBlock, carry: GreedyBlockCarry) -> tuple[Array, _Levels]:
    """Applies the carry-overs of the slots one after the other, oldest first."""
    tokens, draft_probs, target_probs, num_drafted = block[:4]
    assert draft_probs is not None
    position = jnp.arange(tokens.size + 1)
    goes_on = jnp.ones((carry.ratio.size, position.size), bool)
    if block.still_drafting is not None:
        assert block.still_drafting.shape == goes_on.shape, "still_drafting must be [C, N]"
        goes_on = jnp.cumprod(block.still_drafting.astype(jnp.int32), axis=1) > 0

    def alter(targets, slot):
        ratio, remaining, open_ = slot
        along = _joint_ratios(tokens, draft_probs, targets, num_drafted, start=ratio)
        alive = (position < remaining) & open_
        # An infinite ratio (an emitted token that q cannot draw) does not change the target.
        finite = jnp.isfinite(along)
        altered = jax.vmap(residual)(targets, draft_probs, jnp.where(finite, along, 1.0))
        new = jnp.where((alive & finite)[:, None], altered, targets)
        return new, _Levels(targets, along, alive)

    return lax.scan(alter, target_probs, (carry.ratio, carry.remaining, goes_on))


def _joint_ratios(
    tokens: Array,
    draft_probs: Array | None,
    target_probs: Array,
    num_drafted: Array,
    start: Array | float = 1.0,
) -> Array:
    """R_0 .. R_G, R_i = start * prod_{j <= i} pi_j(x_j) / q_j(x_j), uncapped."""

    def step(joint, ratio):
        joint = _product(joint, ratio)
        return joint, joint

    first = jnp.asarray(start, jnp.float32)
    along = ratios(tokens, draft_probs, target_probs)
    along = jnp.where(is_drafted(tokens, num_drafted), along, 1.0)
    return jnp.concatenate([first[None], lax.scan(step, first, along)[1]])


def _times(joint: Array, target: Array, draft: Array) -> Array:
    """Joint * target / draft, elementwise; infinite where draft is zero."""
    ratio = target / jnp.where(draft > 0.0, draft, 1.0)
    return _product(joint, jnp.where(draft > 0.0, ratio, jnp.inf))


def _product(joint: Array, ratio: Array) -> Array:
    """Joint * ratio, clipped to a finite value; infinite if either is infinite (also 0 * inf)."""
    infinite = jnp.isinf(joint) | jnp.isinf(ratio)
    finite = jnp.where(infinite, 1.0, joint) * jnp.where(infinite, 1.0, ratio)
    return jnp.where(infinite, jnp.inf, jnp.minimum(finite, _MAX_RATIO))
