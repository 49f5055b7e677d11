"""Lossy and mentored decoding, as target distributions.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), section 3 and appendix E;
Mentored: Tran-Thien, Mentored decoding (2023). The paper's T of eq. 4 is not a distribution at
beta = 1; `Lossy` is what the procedure emits.
"""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.base import Array, checked, traced_dataclass
from specjax.rules._base import check_position
from specjax.sampling import normalise, total

# Newton's method on a convex piecewise linear function ends exactly, in far fewer steps than this.
_MAX_NEWTON = 64
_MENTORED_STEPS = 26


@traced_dataclass
class Lossy:
    """Accept with min(1, p / ((1 - alpha) q)), else draw from norm((p / beta - q)_+).

    pi = min(q, p / (1 - alpha)) + rho norm((p / beta - q)_+), rho = sum (q - p / (1 - alpha))_+.

    Attributes:
      alpha: in [0, 1); 0 with beta = 1 is lossless.
      beta: in [1 - alpha, 1]; above 1 the residual may have no mass.
    """

    reads_draft: ClassVar[bool] = True
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = False

    alpha: Array | float
    beta: Array | float = 1.0

    def __post_init__(self) -> None:
        alpha = checked("alpha", self.alpha, low=0.0, high=1.0, open_high=True)
        beta = checked("beta", self.beta, low=0.0, high=1.0, open_low=True)
        put = object.__setattr__
        put(self, "alpha", alpha)
        put(self, "beta", beta)
        concrete = isinstance(alpha, np.ndarray) and isinstance(beta, np.ndarray)
        if concrete and (beta < 1.0 - alpha).any():
            raise ValueError(
                f"beta must lie in [1 - alpha, 1], got beta={beta} with alpha={alpha}: use beta=1"
            )

    def __call__(
        self, q: Array, p: Array, q_conf: Array | None = None, p_conf: Array | None = None
    ) -> Array:
        """See `Rule`."""
        check_position(self, q, p, q_conf, p_conf)
        cap = p / (1.0 - self.alpha)
        excess = total(jnp.maximum(q - cap, 0.0))
        extra = normalise(jnp.maximum(p / self.beta - q, 0.0), fallback=p)
        return jnp.minimum(q, cap) + excess * extra


@traced_dataclass
class LossyTuned:
    """Lossy decoding whose beta >= 1 makes T = max{min{q, p / (1 - alpha)}, p / beta} sum to one.

    Attributes:
      alpha: in [0, 1); 0 is lossless.
    """

    reads_draft: ClassVar[bool] = True
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = False

    alpha: Array | float

    def __post_init__(self) -> None:
        alpha = checked("alpha", self.alpha, low=0.0, high=1.0, open_high=True)
        object.__setattr__(self, "alpha", alpha)

    def __call__(
        self, q: Array, p: Array, q_conf: Array | None = None, p_conf: Array | None = None
    ) -> Array:
        """See `Rule`."""
        check_position(self, q, p, q_conf, p_conf)
        keep = 1.0 - self.alpha
        return _tuned(q, p, keep, inverse_beta(q, p, keep))


@traced_dataclass
class Mentored:
    """The most acceptance within a divergence budget: KL(p || pi) <= budget, with tuned beta.

    pi = q where KL(p || q) is within the budget already.

    Attributes:
      budget: D >= 0, in nats; 0 is lossless.
    """

    reads_draft: ClassVar[bool] = True
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = False

    budget: Array | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", checked("budget", self.budget, low=0.0))

    def __call__(
        self, q: Array, p: Array, q_conf: Array | None = None, p_conf: Array | None = None
    ) -> Array:
        """See `Rule`."""
        check_position(self, q, p, q_conf, p_conf)
        # KL(p || pi) falls as keep = 1 - alpha grows to 1. In log(keep) its slope is at most 1, so
        # halving there meets the budget evenly; below min p / q nothing changes any more.
        both = (p > 0.0) & (q > 0.0)
        lowest = jnp.log(jnp.min(jnp.where(both, p, 1.0) / jnp.where(both, q, 1.0)))

        def halve(_, state):
            low, high, inverse = state
            middle = 0.5 * (low + high)
            keep = jnp.exp(middle)
            # The tuned 1 / beta grows with keep: the upper end's is a start from above.
            trial = inverse_beta(q, p, keep, start=inverse)
            within = _divergence(p, _tuned(q, p, keep, trial)) <= self.budget
            return (
                jnp.where(within, low, middle),
                jnp.where(within, middle, high),
                jnp.where(within, trial, inverse),
            )

        one = jnp.ones((), jnp.float32)
        start = (jnp.minimum(lowest, 0.0), 0.0 * one, inverse_beta(q, p, one))
        _, high, inverse = lax.fori_loop(0, _MENTORED_STEPS, halve, start)
        mentored = _tuned(q, p, jnp.exp(high), inverse)
        return jnp.where(_divergence(p, q) <= self.budget, q, mentored)


def inverse_beta(q: Array, p: Array, keep: Array, *, start: Array | float = 1.0) -> Array:
    """Solves sum (q - p / keep)_+ = sum (b p - q)_+ for b = 1 / beta in [0, 1].

    The right side is convex and piecewise linear in b, so Newton's method from above is monotone
    and ends exactly after as many steps as pieces lie between; mostly three to eight.

    Args:
      q: `[V]` float32.
      p: `[V]` float32.
      keep: scalar in (0, 1], 1 - alpha.
      start: a scalar at or above the solution.

    Returns:
      b, a float32 scalar; 0 where nothing has to be redistributed.
    """
    excess = total(jnp.maximum(q - p / keep, 0.0))

    def step(state):
        b, _, count = state
        active = b * p > q
        slope = total(jnp.where(active, p, 0.0))
        new = (excess + total(jnp.where(active, q, 0.0))) / jnp.where(slope > 0.0, slope, 1.0)
        new = jnp.where(slope > 0.0, new, b)
        return jnp.minimum(new, b), new < b, count + 1

    def unsettled(state):
        return state[1] & (state[2] < _MAX_NEWTON)

    first = (jnp.asarray(start, jnp.float32), jnp.bool_(True), jnp.int32(0))
    return jnp.where(excess > 0.0, lax.while_loop(unsettled, step, first)[0], 0.0)


def _tuned(q: Array, p: Array, keep: Array, inverse: Array) -> Array:
    target = jnp.maximum(jnp.minimum(q, p / keep), p * inverse)
    return normalise(target, fallback=p)


def _divergence(p: Array, target: Array) -> Array:
    """KL(p || target), in nats."""
    safe = jnp.where(p > 0.0, p, 1.0)
    ratio = jnp.log(safe) - jnp.log(jnp.where(p > 0.0, target, 1.0))
    return total(p * ratio)
