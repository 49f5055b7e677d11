"""Lossy and mentored decoding, as target distributions.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), section 3 and appendix E;
for Mentored: Tran-Thien, An optimal lossy variant of speculative decoding (2023). The paper's T for
lossy decoding is not a distribution at beta = 1, so `Lossy` is the output distribution of the
procedure.

Of all targets with a given acceptance, that of `LossyTuned` has the smallest KL(pi || p), KL(p ||
pi) and every other f-divergence: the optimal pi / q has one value where it is above p / q, one
where it is below, and pi = q between (the conditions of Karush, Kuhn and Tucker).
"""

from collections.abc import Callable
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from specjax.errors import UserError
from specjax.rules.target import (
    ALLOWANCE,
    PROPER_SHARE,
    Span,
    Spans,
    Strength,
    Strengths,
    TargetRule,
    kl_divergence,
)
from specjax.sampling.draws import TINY, normalise, residual_mass, total
from specjax.types import traced_dataclass

# Newton's method on a convex piecewise linear function is exact after far fewer steps.
_MAX_NEWTON = 64
_MAX_HALVINGS = 60
_BUDGET_TOLERANCE = 2e-6
_ROUNDING = 2e-5


@traced_dataclass
class Lossy(Spans, TargetRule):
    """Accepts with probability min(1, p / (keep q)), else draws from norm((p / beta - q)_+).

    keep = 1 - strength; pi = min(q, p / keep) + rho norm((p / beta - q)_+), with
    rho = sum (q - p / keep)_+.

    Attributes:
      strength: in [0, 1); 0 with beta = 1 is lossless.
      beta: in [1 - strength, 1]; above 1 the residual could have no mass.
    """

    strength: Array | float
    beta: Array | float = 1.0

    spans = MappingProxyType(
        {"strength": PROPER_SHARE, "beta": Strengths(Span(0.0, 1.0, open_low=True))}
    )

    def __post_init__(self) -> None:
        exact = self.strength, self.beta
        super().__post_init__()
        strength, beta = self.strength, self.beta
        if isinstance(strength, np.ndarray) and isinstance(beta, np.ndarray):
            if strength.ndim and beta.ndim and strength.shape != beta.shape:
                raise UserError(
                    f"strength {strength.shape} and beta {beta.shape} must have the same number of "
                    "rows"
                )
            # The given numbers are compared: 1 - float32(0.9) is above float32(0.1).
            low = 1.0 - np.asarray(exact[0], np.float64)
            if (np.asarray(exact[1], np.float64) < low - 1e-7).any():
                raise UserError(
                    f"beta must lie in [1 - strength, 1], got beta={beta} with "
                    f"strength={strength}: use beta=1"
                )
            strength, beta = np.broadcast_arrays(
                strength, np.maximum(beta, np.float32(1.0) - strength)
            )
        object.__setattr__(self, "strength", strength)
        object.__setattr__(self, "beta", beta)

    def _target(self, q, p, q_conf, p_conf):
        cap = p / (1.0 - self.strength)
        excess = residual_mass(q, cap)
        extra = normalise(jnp.maximum(p / self.beta - q, 0.0), fallback=p)
        return jnp.minimum(q, cap) + excess * extra


@traced_dataclass
class LossyTuned(Strength, TargetRule):
    """Lossy decoding with tuned beta >= 1: T = max{min{q, p / keep}, p / beta} sums to 1.

    Attributes:
      strength: 1 - keep, in [0, 1); 0 is lossless.
    """

    spans = MappingProxyType({"strength": PROPER_SHARE})

    def _target(self, q, p, q_conf, p_conf):
        keep = 1.0 - jnp.asarray(self.strength)
        return _tuned(q, p, keep, inverse_beta(q, p, keep))


@traced_dataclass
class KLBall(Spans, TargetRule):
    """The highest acceptance such that KL(pi || p) <= nats.

    Of all targets at most so far from the verifier, none accepts more: the best ones are those of
    `LossyTuned`, and at each position the largest strength within the bound is found. pi = q if
    KL(q || p) <= nats. Below infinity, pi has no token that p cannot draw, and is lossless at
    temperature 0. The mirror image of `Mentored`. pi / p has no bound: where pi = q, it is q / p.

    The divergence of a text's law is at most `nats` times its length. It is bounded at each
    position, also in float32: the end of the search that is within the bound is taken.

    Attributes:
      nats: at least 0; 0 is lossless.
    """

    nats: Array | float

    spans = MappingProxyType({"nats": ALLOWANCE})

    def _target(self, q, p, q_conf, p_conf):
        nats = jnp.asarray(self.nats, jnp.float32)
        # What float32 may add to a divergence: a share of it, and of its root for close p and pi.
        finite = jnp.where(jnp.isfinite(nats), nats, 0.0)
        budget = jnp.maximum(nats - _ROUNDING * (finite + jnp.sqrt(finite)), 0.0)
        ball = _tuned(q, p, *_within_budget(q, p, budget, _to_verifier))
        within = jnp.where(kl_divergence(q, p) <= budget, q, ball)
        return jnp.where(budget > 0.0, within, p)


@traced_dataclass
class KLPrice(Strength, TargetRule):
    """Accepts more at each position while this costs at most so many nats per accepted token.

    Acceptance is bought at one price at all positions. So among all rules, none has a smaller mean
    of KL(pi || p) at its mean acceptance, over the positions of any texts: it is the frontier of
    the averages, as `LossyTuned` is that of each position. pi is that of `LossyTuned` with log(beta
    / keep) = strength at each position, because d KL(pi || p) / d acceptance = log(beta / keep). So
    pi / p is at most exp(strength), and KL(pi || p) at most the strength, at every position.

    Attributes:
      strength: the price, at least 0, in nats per accepted token; 0 is lossless.
    """

    spans = MappingProxyType({"strength": ALLOWANCE})

    def _target(self, q, p, q_conf, p_conf):
        price = jnp.asarray(self.strength, jnp.float32)

        def slope(log_keep, inverse):
            return -log_keep - jnp.log(jnp.maximum(inverse, TINY))

        bought = _tuned(q, p, *_smallest_keep(q, p, slope, price))
        return jnp.where(price > 0.0, bought, p)


@traced_dataclass
class Mentored(Strength, TargetRule):
    """The highest acceptance such that KL(p || pi) <= strength, with tuned beta.

    pi = q if KL(p || q) <= strength.

    Attributes:
      strength: D >= 0, in nats; 0 is lossless.
    """

    spans = MappingProxyType({"strength": ALLOWANCE})

    def _target(self, q, p, q_conf, p_conf):
        budget = jnp.asarray(self.strength, jnp.float32)
        mentored = _tuned(q, p, *_within_budget(q, p, budget, _from_verifier))
        within = jnp.where(kl_divergence(p, q) <= self.strength, q, mentored)
        # Divergences of nearly equal p and q round to 0.
        return jnp.where(self.strength > 0.0, within, p)


def _to_verifier(mass: Array, ratio: Array) -> Array:
    """The part of KL(pi || p), plus p - pi, where p has the mass and pi = ratio p."""
    return mass * ratio * jnp.log(jnp.maximum(ratio, TINY)) - mass * (ratio - 1.0)


def _from_verifier(mass: Array, ratio: Array) -> Array:
    """The part of KL(p || pi), plus pi - p; see `_to_verifier`."""
    return jnp.where(mass > 0.0, mass * (ratio - 1.0) - mass * jnp.log(ratio), 0.0)


def _within_budget(
    q: Array, p: Array, budget: Array, divergence: Callable[[Array, Array], Array]
) -> tuple[Array, Array]:
    """The smallest keep = 1 - strength with a divergence within the budget, and its 1 / beta.

    `divergence` is the part where p has a given mass and pi = ratio p. No part is negative, and
    each is zero at ratio 1.
    """
    kept_cost = divergence(p, q / jnp.where(p > 0.0, p, 1.0))

    def spent(log_keep, inverse):
        # pi is p / keep where capped, p * inverse where raised, q elsewhere: no logarithms of [V].
        capped = q * jnp.exp(log_keep) > p
        raised = inverse * p > q
        cut, lifted = (total(jnp.where(part, p, 0.0)) for part in (capped, raised))
        rest = total(jnp.where(capped | raised, 0.0, kept_cost))
        return divergence(cut, jnp.exp(-log_keep)) + divergence(lifted, inverse) + rest

    return _smallest_keep(q, p, spent, budget)


def _smallest_keep(
    q: Array, p: Array, spent: Callable[[Array, Array], Array], budget: Array
) -> tuple[Array, Array]:
    """The smallest keep with `spent(log(keep), 1 / beta)` within the budget; its 1 / beta.

    `spent` falls as keep grows; it is zero at keep = 1 and constant below min p / q. The root is
    bracketed in log(keep), by false position (Illinois) and by halving; the result is the end of
    the bracket that is within the budget.
    """

    def narrow(state):
        low, high, low_excess, high_excess, inverse, count = state
        slope = high_excess - low_excess
        between = low - low_excess * (high - low) / jnp.where(slope < 0.0, slope, -1.0)
        halved = 0.5 * (low + high)
        inside = (between > low) & (between < high) & (count % 3 != 2)
        middle = jnp.where(inside & jnp.isfinite(between), between, halved)
        # The tuned 1 / beta grows with keep, so the upper end's is a valid start from above.
        trial = inverse_beta(q, p, jnp.exp(middle), start=inverse)
        excess = spent(middle, trial) - budget
        within = excess <= 0.0
        return (
            jnp.where(within, low, middle),
            jnp.where(within, middle, high),
            # Illinois: halve the value at the end that stays, so that it moves later.
            jnp.where(within, 0.5 * low_excess, excess),
            jnp.where(within, excess, 0.5 * high_excess),
            jnp.where(within, trial, inverse),
            count + 1,
        )

    def unsettled(state):
        low, high, _, high_excess, _, count = state
        return (high - low > 3e-7) & (high_excess < -slack) & (count < _MAX_HALVINGS)

    slack = jnp.minimum(_BUDGET_TOLERANCE, 1e-4 * budget)
    largest = jnp.max(jnp.where((p > 0.0) & (q > 0.0), q / jnp.where(p > 0.0, p, 1.0), 1.0))
    # Not below float32's range, for 1 / keep.
    lowest = -jnp.log(jnp.minimum(jnp.maximum(largest, 1.0), 1.0 / TINY))
    least = inverse_beta(q, p, jnp.exp(lowest))
    least_excess = spent(lowest, least) - budget
    # If the smallest keep is within the budget, the bracket is that single point.
    affordable = least_excess <= 0.0
    state = (
        lowest,
        jnp.where(affordable, lowest, 0.0),
        least_excess,
        -budget,
        jnp.where(affordable, least, inverse_beta(q, p, jnp.ones((), jnp.float32))),
        jnp.int32(0),
    )
    _, high, _, _, inverse, _ = lax.while_loop(unsettled, narrow, state)
    return jnp.exp(high), inverse


def inverse_beta(
    q: Float32[Array, " V"],
    p: Float32[Array, " V"],
    keep: Float32[Array, ""],
    *,
    start: Float32[Array, ""] | float = 1.0,
) -> Float32[Array, ""]:
    """Solves sum (q - p / keep)_+ = sum (b p - q)_+ for b = 1 / beta in [0, 1].

    The right side is convex and piecewise linear in b. So Newton's method from above is monotone
    and exact after at most one step per linear piece; it usually takes three to eight.

    `keep` in (0, 1] is 1 - strength, and `start` is at or above the solution. The result is 0 if
    there is no mass to redistribute.
    """
    excess = residual_mass(q, p / keep)

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
