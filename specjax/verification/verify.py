"""How a block is verified: all algorithms share the draw.

All functions take one row: a block x_1 .. x_L of L <= G tokens, drawn from q_1 .. q_L, is judged
against the target distributions pi_1 .. pi_{L+1}. After i tokens of the block, `draft_probs[i]` is
q_{i+1} and `target_probs[i]` is pi_{i+1}. G: longest block. V: vocabulary.

An algorithm computes thresholds and scales (`Acceptance`). The draw, the exact law of its outcome
and the metrics all follow from these numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.checks import check_array
from specjax.errors import UserError
from specjax.platforms import entry, row
from specjax.sampling import draw, num_uniforms, residual, residual_weights
from specjax.types import Acceptance, Array, Verification, Verified


def verify(
    verification: Verification,
    key: Array,
    tokens: Array,
    draft_probs: Array,
    target_probs: Array,
    num_drafted: Array,
    carry: Any = (),
    still_drafting: Array | None = None,
) -> Verified:
    """Verifies one row's block.

    Args:
      verification: the algorithm.
      key: a key that only this row and round use; it is consumed.
      tokens: `[G]` int32, the drafted block; entries past `num_drafted` are ignored.
      draft_probs: `[G + 1, V]` float32: row i is the exact distribution that `tokens[i]` was drawn
        from. Only an algorithm with a carry reads row `num_drafted` (the bonus position).
      target_probs: `[G + 1, V]` float32, the rule's target distributions.
      num_drafted: int32 scalar, L <= G. It may be a stopping time of the draft.
      carry: the row's carry: `verification.init_carry(G)`, then the previous `Verified.carry`.
      still_drafting: bool `[C, G + 1]`, read by an algorithm with a carry of C slots; entry (c, i)
        says that the drafter of slot c's block would not have stopped after the first i tokens of
        this block, or earlier. None: drafts have a fixed length.

    Returns:
      A `Verified`. Emitting `tokens[:num_accepted]` and then `next_token` follows the target
      distributions exactly.

    Raises:
      ValueError: (at trace time) if the shapes or dtypes do not agree.
    """
    length, vocab = tokens.shape[0], draft_probs.shape[-1]
    uniforms = jax.random.uniform(key, (length + num_uniforms(vocab),), jnp.float32)
    acceptance, num_accepted = accept(
        verification,
        uniforms[:length],
        tokens,
        draft_probs,
        target_probs,
        num_drafted,
        carry,
        still_drafting,
    )
    next_token = draw_next(uniforms[length:], acceptance, draft_probs, num_drafted, num_accepted)
    carry = verification.next_carry(
        acceptance, draft_probs, num_drafted, carry, num_accepted, next_token
    )
    return Verified(num_accepted, next_token, carry)


def accept(
    verification: Verification,
    uniforms: Array,
    tokens: Array,
    draft_probs: Array | None,
    target_probs: Array,
    num_drafted: Array,
    carry: Any = (),
    still_drafting: Array | None = None,
) -> tuple[Acceptance, Array]:
    """The first half of `verify`: how many drafted tokens are accepted.

    Without a carry, nothing at the bonus position is read. So its draft and target distributions
    can be computed afterwards, and only if the whole block is accepted. The arguments are those of
    `verify`, except `uniforms`: `[G]` float32, independent (else block verification is biased).
    `draft_probs` may be None for tokens that are certain; see `Verification.needs_probs`.

    Returns:
      The `Acceptance`, and the number of accepted tokens (int32 scalar).

    Raises:
      ValueError: (at trace time) if the shapes or dtypes do not agree.
    """
    check_block(tokens, draft_probs, target_probs, num_drafted)
    if uniforms.shape != tokens.shape:
        raise UserError(f"uniforms must be [G] = {tokens.shape}, got shape {uniforms.shape}")
    acceptance = verification.acceptance(
        tokens, draft_probs, target_probs, num_drafted, carry, still_drafting
    )
    _check_acceptance(verification, acceptance, target_probs.shape)
    return acceptance, _num_accepted(verification, uniforms, acceptance)


def _check_acceptance(verification: Verification, given: Any, shape: tuple[int, ...]) -> None:
    """Raises TypeError (at trace time) unless an algorithm's numbers have the block's shapes."""
    where = f"{type(verification).__name__}.acceptance"
    if not isinstance(given, Acceptance):
        raise UserError(f"{where} must return a types.Acceptance, got {type(given).__name__}")
    longest = shape[0] - 1
    check_array(f"{where}: thresholds", given.thresholds, "[G]", (longest,), jnp.float32)
    check_array(f"{where}: scales", given.scales, "[G + 1]", (longest + 1,), jnp.float32)
    check_array(f"{where}: targets", given.targets, "[G + 1, V]", shape, jnp.float32)


def draw_next(
    uniforms: Array,
    acceptance: Acceptance,
    draft_probs: Array | None,
    num_drafted: Array,
    num_accepted: Array,
    bonus: Array | None = None,
    tokens: Array | None = None,
) -> Array:
    """The second half of `verify`: the token that follows the accepted ones.

    Args:
      uniforms: `[num_uniforms(V)]` float32, independent of each other and of those for `accept`.
      acceptance: from `accept`.
      draft_probs: `[G + 1, V]` float32, or None if the tokens are certain.
      num_drafted: int32 scalar.
      num_accepted: int32 scalar.
      bonus: `[V]` float32, the target distribution after the whole block; None if
        `acceptance.targets` has it.
      tokens: `[G]` int32, the block; read without `draft_probs`.

    Returns:
      An int32 token.
    """
    target, draft, scale = _at(acceptance, draft_probs, num_accepted, tokens)
    weights = residual_weights(target, draft, scale)
    weights = jnp.where(num_accepted < num_drafted, weights, target if bonus is None else bonus)
    return draw(weights, uniforms)


def next_token_probs(
    acceptance: Acceptance, draft_probs: Array, num_drafted: Array, num_accepted: Array
) -> Array:
    """The distribution of the token after `num_accepted` accepted tokens; `[V]` float32."""
    target, draft, scale = _at(acceptance, draft_probs, num_accepted)
    return jnp.where(num_accepted < num_drafted, residual(target, draft, scale), target)


def num_accepted_probs(verification: Verification, thresholds: Array, detail: Any = None) -> Array:
    """The distribution of the number of accepted tokens, given the block.

    Args:
      verification: the algorithm.
      thresholds: `[G]` float32, from `acceptance`.
      detail: likewise; needed by an algorithm that is not exact, whose law is summed over all 2^G
        sets of tokens that pass.

    Returns:
      `[G + 1]` float32: the probabilities of 0 .. G.

    Raises:
      ValueError: (at trace time) an algorithm that is not exact gets no detail.
    """
    if not verification.is_exact:
        if detail is None:
            raise UserError(f"{type(verification).__name__} needs `detail` from its acceptance")
        return _enumerated(verification, thresholds, detail)
    one = jnp.ones((1,), thresholds.dtype)
    if verification.keeps_last_pass:
        none_later = jnp.cumprod((1.0 - thresholds)[::-1])[::-1]
        return jnp.concatenate([one, thresholds]) * jnp.concatenate([none_later, one])
    return jnp.concatenate([one, jnp.cumprod(thresholds)]) * jnp.concatenate(
        [1.0 - thresholds, one]
    )


def _enumerated(verification: Verification, thresholds: Array, detail: Any) -> Array:
    size = thresholds.size
    passing = jnp.asarray(np.arange(2**size)[:, None] >> np.arange(size) & 1, bool)
    chances = jnp.prod(jnp.where(passing, thresholds, 1.0 - thresholds), axis=1)
    stand = jax.vmap(lambda passes: verification.stands(passes, detail))(passing)
    counts = jnp.sum(jnp.cumprod(stand.astype(jnp.int32), axis=1), axis=1)
    return jnp.zeros((size + 1,), chances.dtype).at[counts].add(chances)


def expected_accepted(verification: Verification, thresholds: Array) -> Array:
    """E[number accepted | block]; float32 scalar."""
    probs = num_accepted_probs(verification, thresholds)
    return jnp.sum(jnp.arange(probs.size, dtype=probs.dtype) * probs)


def ratios(tokens: Array, draft_probs: Array | None, target_probs: Array) -> Array:
    """pi_i(x_i) / q_i(x_i); 0 if pi is 0, infinite if only q is 0, NaN if any is; `[G]` float32.

    Without `draft_probs` the tokens are certain, and q_i(x_i) is 1.
    """
    # A slice [G, V] of the arrays would be a copy, so the result is cut instead.
    padded = jnp.pad(tokens, (0, 1))
    if draft_probs is None:
        return jax.vmap(entry)(target_probs, padded)[:-1]
    target, draft = (jax.vmap(entry)(x, padded)[:-1] for x in (target_probs, draft_probs))
    ratio = target / jnp.where(draft == 0.0, 1.0, draft)
    return jnp.where(draft == 0.0, jnp.where(target > 0.0, jnp.inf, target), ratio)


def drafted(tokens: Array, num_drafted: Array) -> Array:
    """`[G]` bool: whether an entry of a padded block was drafted."""
    return jnp.arange(tokens.size) < num_drafted


def check_block(
    tokens: Array, draft_probs: Array | None, target_probs: Array, num_drafted: Array
) -> None:
    """Raises ValueError (at trace time) for other shapes or dtypes; see `accept`."""
    draft_probs = target_probs if draft_probs is None else draft_probs
    for name, array in (("tokens", tokens), ("draft_probs", draft_probs)):
        if not hasattr(array, "dtype"):
            raise UserError(f"{name} must be an array, got {type(array).__name__}")
    if jnp.ndim(tokens) != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UserError(
            f"tokens must be one row's integer block [G], got {tokens.dtype}{jnp.shape(tokens)}: "
            "vmap over rows"
        )
    length, vocab = tokens.shape[0], draft_probs.shape[-1]
    for name, probs in (("draft_probs", draft_probs), ("target_probs", target_probs)):
        if jnp.shape(probs) != (length + 1, vocab):
            raise UserError(
                f"{name} must be [G + 1, V] = {(length + 1, vocab)} for a block of G = {length} "
                f"tokens and the same vocabulary, got {jnp.shape(probs)}"
            )
        if probs.dtype != jnp.float32:
            raise UserError(f"{name} must be float32, got {probs.dtype}")
    if jnp.ndim(num_drafted) != 0:
        raise UserError(f"num_drafted must be a scalar, got shape {jnp.shape(num_drafted)}")
    known = not isinstance(num_drafted, jax.core.Tracer)
    if known and not 0 <= int(num_drafted) <= length:
        raise UserError(f"num_drafted must lie in [0, G] = [0, {length}], got {int(num_drafted)}")


def _num_accepted(verification: Verification, uniforms: Array, acceptance: Acceptance) -> Array:
    thresholds = acceptance.thresholds
    # Nothing after a NaN is accepted.
    finite = jnp.cumprod(1 - jnp.isnan(thresholds).astype(jnp.int32)) > 0
    passes = verification.stands((uniforms < thresholds) & finite, acceptance.detail)
    if verification.keeps_last_pass:
        index = jnp.arange(1, passes.size + 1, dtype=jnp.int32)
        return jnp.max(jnp.where(passes, index, 0), initial=0)
    return jnp.sum(jnp.cumprod(passes.astype(jnp.int32)), dtype=jnp.int32)


def _at(
    acceptance: Acceptance, draft_probs: Array | None, i: Array, tokens: Array | None = None
) -> tuple[Array, Array, Array]:
    """The target, the draft distribution and the scale after i accepted tokens."""
    scale = lax.dynamic_index_in_dim(acceptance.scales, i, keepdims=False)
    target = row(acceptance.targets, i)
    if draft_probs is not None:
        return target, row(draft_probs, i), scale
    assert tokens is not None
    token = lax.dynamic_index_in_dim(tokens, i, keepdims=False)
    return target, jax.nn.one_hot(token, target.size, dtype=jnp.float32), scale
