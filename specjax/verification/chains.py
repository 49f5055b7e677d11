"""Verification of a chain: which tokens are accepted, and which token follows them.

All functions take one row: a block x_1 .. x_L of L <= G tokens, drawn from q_1 .. q_L, is judged
against the target distributions pi_1 .. pi_{L+1}. After i tokens of the block, `draft_probs[i]` is
q_{i+1} and `target_probs[i]` is pi_{i+1}.

An algorithm computes thresholds and scales (`Acceptance`). The draw, the exact law of its outcome
and the metrics all follow from these numbers. `Token` accepts tokens one by one until the first is
rejected. `Block` judges the block as a whole, and never accepts fewer tokens in expectation.
`GreedyBlock` accepts the most in one round, and corrects later rounds.

Source: Leviathan et al. (arXiv 2211.17192), Algorithm 1; Faster Cascades, Algorithm 4; Sun et al.,
Block Verification Accelerates Speculative Decoding (ICLR 2025), Algorithm 2.

Axes: G longest block, N = G + 1 nodes, C = G - 1 slots of carry-overs, V vocabulary, U uniforms of
a draw.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key

from specjax.errors import UserError
from specjax.platforms import entry, row
from specjax.sampling.draws import draw, num_uniforms, residual, residual_mass, residual_weights
from specjax.types import Acceptance, DraftTraits, ScoredBlock, Verification, Verified

# At this ratio R pi - q equals R pi in float32. Sums of larger ones could overflow.
_MAX_RATIO = 1e30
# A loop over the few numbers of a usual block costs more than they do.
_UNROLLED = 16


def verify(
    verification: Verification, key: Key[Array, ""], block: ScoredBlock, carry: Any = ()
) -> Verified:
    """Verifies one row's block.

    Emitting `tokens[:num_accepted]` and then `next_token` follows the target distributions exactly.

    Args:
      verification: the algorithm.
      key: a key that only this row and round use; it is consumed.
      block: a chain.
      carry: the row's carry: `verification.init_carry(G)`, then the previous `Verified.carry`.
    """
    longest, vocab = block.tokens.size, block.target_probs.shape[-1]
    uniforms = jax.random.uniform(key, (longest + num_uniforms(vocab),), jnp.float32)
    acceptance, num_accepted = accept(verification, uniforms[:longest], block, carry)
    next_token = draw_next(uniforms[longest:], acceptance, block, num_accepted)
    carry = verification.next_carry(acceptance, block, carry, num_accepted, next_token)
    return Verified(num_accepted, next_token, carry)


def accept(
    verification: Verification,
    uniforms: Float32[Array, " G"],
    block: ScoredBlock,
    carry: Any = (),
) -> tuple[Acceptance, Int32[Array, ""]]:
    """The first half of `verify`: how many drafted tokens are accepted.

    Without a carry, nothing at the bonus position is read. So its draft and target distributions
    can be computed afterwards, and only if the whole block is accepted. The uniforms must be
    independent (else block verification is biased).
    """
    longest, targets = block.tokens.size, block.target_probs
    assert block.tokens.ndim == 1, "verification takes one row: vmap over rows"
    assert uniforms.size == longest, "verification needs a uniform for each token"
    assert targets.shape[0] == longest + 1, "target_probs must have a row after each token"
    is_traced = isinstance(block.num_drafted, jax.core.Tracer)
    # A longer block would have another law than the target's, in silence.
    assert is_traced or 0 <= int(block.num_drafted) <= longest, "num_drafted must lie in 0 .. G"
    for probs in (targets, targets if block.draft_probs is None else block.draft_probs):
        assert probs.shape == targets.shape, "draft_probs and target_probs must have one shape"
        assert probs.dtype == jnp.float32, "distributions must be float32"
    acceptance = verification.acceptance(block, carry)
    shapes = acceptance.thresholds.shape, acceptance.scales.shape, acceptance.targets.shape
    name = type(verification).__name__
    assert shapes == ((longest,), (longest + 1,), targets.shape), f"{name}.acceptance: {shapes}"
    return acceptance, _num_accepted(verification, uniforms, acceptance)


def draw_next(
    uniforms: Float32[Array, "*U"],
    acceptance: Acceptance,
    block: ScoredBlock,
    num_accepted: Int32[Array, ""],
    bonus: Float32[Array, " V"] | None = None,
) -> Int32[Array, ""]:
    """The second half of `verify`: the token that follows the accepted ones.

    Args:
      uniforms: independent of each other and of those for `accept`.
      block: as given to `accept`; its targets are not read.
      bonus: the target distribution after the whole block; None if `acceptance.targets` has it.
    """
    target, draft, scale = _after(acceptance, block, num_accepted)
    weights = residual_weights(target, draft, scale)
    whole = target if bonus is None else bonus
    return draw(jnp.where(num_accepted < block.num_drafted, weights, whole), uniforms)


def next_token_probs(
    acceptance: Acceptance, block: ScoredBlock, num_accepted: Int32[Array, ""]
) -> Float32[Array, " V"]:
    """The distribution of the token after `num_accepted` accepted tokens."""
    target, draft, scale = _after(acceptance, block, num_accepted)
    return jnp.where(num_accepted < block.num_drafted, residual(target, draft, scale), target)


def num_accepted_probs(
    verification: Verification, thresholds: Float32[Array, " G"]
) -> Float32[Array, " N"]:
    """The distribution of the number of accepted tokens, 0 .. G, given the block."""
    one = jnp.ones((1,), thresholds.dtype)
    if verification.keeps_last_pass:
        none_later = jnp.cumprod((1.0 - thresholds)[::-1])[::-1]
        return jnp.concatenate([one, thresholds]) * jnp.concatenate([none_later, one])
    return jnp.concatenate([one, jnp.cumprod(thresholds)]) * jnp.concatenate(
        [1.0 - thresholds, one]
    )


def expected_accepted(
    verification: Verification, thresholds: Float32[Array, " G"]
) -> Float32[Array, ""]:
    """E[number accepted | block]."""
    probs = num_accepted_probs(verification, thresholds)
    return jnp.sum(jnp.arange(probs.size, dtype=probs.dtype) * probs)


def _num_accepted(verification: Verification, uniforms: Array, acceptance: Acceptance) -> Array:
    thresholds = acceptance.thresholds
    # Nothing after a NaN is accepted.
    finite = jnp.cumprod(1 - jnp.isnan(thresholds).astype(jnp.int32)) > 0
    passes = (uniforms < thresholds) & finite
    if verification.keeps_last_pass:
        index = jnp.arange(1, passes.size + 1, dtype=jnp.int32)
        return jnp.max(jnp.where(passes, index, 0), initial=0)
    return jnp.sum(jnp.cumprod(passes.astype(jnp.int32)), dtype=jnp.int32)


def _after(acceptance: Acceptance, block: ScoredBlock, i: Array) -> tuple[Array, Array, Array]:
    """The target, the draft distribution and the scale after i accepted tokens."""
    scale = lax.dynamic_index_in_dim(acceptance.scales, i, keepdims=False)
    target = row(acceptance.targets, i)
    if block.draft_probs is not None:
        return target, row(block.draft_probs, i), scale
    token = lax.dynamic_index_in_dim(block.tokens, i, keepdims=False)
    return target, jax.nn.one_hot(token, target.size, dtype=jnp.float32), scale


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

    steps = ratios(tokens, draft_probs, target_probs)
    probs = lax.scan(step, jnp.float32(1.0), steps, unroll=_UNROLLED)[1]
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

    Each round leaves a carry-over, which changes the target of the next positions to
    norm((R pi - q)_+), where R is the joint ratio pi / q along the path since the block's start. It
    ends when this path is G tokens long. Carry-overs nest, oldest first. Without them the output
    would be biased.

    Source: Sun et al., Optimal Block-Level Draft Verification (arXiv 2403.10444v1), Algorithm 3.

    `check` raises an error for drafters with which it is not exact; see `Verification`.
    """

    keeps_last_pass: ClassVar[bool] = True
    has_carry: ClassVar[bool] = True

    def check(self, max_draft: int, traits: DraftTraits) -> None:
        if not traits.prefix_only:
            raise UserError(
                "GreedyBlock is not exact with a drafter whose distributions depend on more than "
                "the prefix: use Block or Token instead"
            )

    def init_carry(self, max_draft: int) -> GreedyBlockCarry:
        slots = max(max_draft - 1, 0)
        return GreedyBlockCarry(jnp.ones((slots,), jnp.float32), jnp.zeros((slots,), jnp.int32))

    def acceptance(self, block: ScoredBlock, carry: Any = ()) -> Acceptance:
        tokens, draft_probs, targets, num_drafted = block[:4]
        assert draft_probs is not None
        assert isinstance(carry, GreedyBlockCarry), "start with init_carry(G)"
        assert carry.ratio.size == max(tokens.size - 1, 0), "the carry is of another block length"

        def alter(targets, slot):
            ratio, remaining = slot
            along = _joint_ratios(tokens, draft_probs, targets, num_drafted, start=ratio)
            alive = jnp.arange(tokens.size + 1) < remaining
            # An infinite ratio (an emitted token that q cannot draw) does not change the target.
            finite = jnp.isfinite(along)
            altered = jax.vmap(residual)(targets, draft_probs, jnp.where(finite, along, 1.0))
            new = jnp.where((alive & finite)[:, None], altered, targets)
            return new, _Levels(targets, along, alive)

        # The carry-overs of the slots one after the other, oldest first.
        targets, levels = lax.scan(alter, targets, (carry.ratio, carry.remaining))
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
        # If the whole block is accepted, the path is G tokens long.
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
    later = lax.scan(step, first, along, unroll=_UNROLLED)[1]
    return jnp.concatenate([first[None], later])


def _times(joint: Array, target: Array, draft: Array) -> Array:
    """Joint * target / draft, elementwise; infinite where draft is zero."""
    ratio = target / jnp.where(draft > 0.0, draft, 1.0)
    return _product(joint, jnp.where(draft > 0.0, ratio, jnp.inf))


def _product(joint: Array, ratio: Array) -> Array:
    """Joint * ratio, clipped to a finite value; infinite if either is infinite (also 0 * inf)."""
    infinite = jnp.isinf(joint) | jnp.isinf(ratio)
    finite = jnp.where(infinite, 1.0, joint) * jnp.where(infinite, 1.0, ratio)
    return jnp.where(infinite, jnp.inf, jnp.minimum(finite, _MAX_RATIO))
