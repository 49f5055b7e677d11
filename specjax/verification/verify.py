"""How a block is verified: all algorithms share the draw.

All functions take one row: a block x_1 .. x_L of L <= G tokens, drawn from q_1 .. q_L, is judged
against the target distributions pi_1 .. pi_{L+1}. After i tokens of the block, `draft_probs[i]` is
q_{i+1} and `target_probs[i]` is pi_{i+1}.

An algorithm computes thresholds and scales (`Acceptance`). The draw, the exact law of its outcome
and the metrics all follow from these numbers.

Axes: G longest block, N = G + 1 nodes, V vocabulary, U uniforms of a draw.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, Key

from specjax.platforms import row
from specjax.sampling import draw, num_uniforms, residual, residual_weights
from specjax.types import Acceptance, ScoredBlock, Verification, Verified


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
      acceptance: from `accept`.
      block: as given to `accept`; its targets are not read.
      num_accepted: from `accept`.
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
