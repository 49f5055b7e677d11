"""Accept functions of other systems, as target distributions.

An accept function lets a drafted token x stand with probability a(x), and otherwise draws from R_x.
If both depend on q and p alone, its token follows pi = q a + sum_x q(x) (1 - a(x)) R_x. Verifying
this pi accepts at least as often, sum min(pi, q) >= sum q a, and also draws the token after a whole
block from it. `Typical`, and TensorRT-LLM's relaxed acceptance, are token rules.

None of these bounds its distance from the verifier, and at equal acceptance `LossyTuned` and
`KLBall` have a smaller one.
"""

from types import MappingProxyType

import jax.numpy as jnp
from jaxtyping import Array

from specjax.rules.target import ALLOWANCE, SHARE, Span, Spans, Strengths, TargetRule
from specjax.sampling import normalise, total
from specjax.types import traced_dataclass


@traced_dataclass
class Mixture(Spans, TargetRule):
    """Mixes the two models: pi = weight p + (1 - weight) q.

    Accepts with probability min(1, 1 - weight + weight p / q). Total variation from the verifier:
    exactly (1 - weight) D_TV(p, q). The `assistant_ensemble_weight` of transformers, and the static
    form of DIVERSED. It emits tokens that are impossible for the verifier (p = 0: excluded by top-k
    or top-p, or all but one at temperature 0), with probability (1 - weight) q; so its KL(pi || p)
    may be infinite.

    Attributes:
      weight: the verifier's, in [0, 1]; 1 is lossless.
    """

    weight: Array | float

    spans = MappingProxyType({"weight": SHARE})

    def _target(self, q, p, q_conf, p_conf):
        return self.weight * p + (1.0 - self.weight) * q


@traced_dataclass
class AcceptThreshold(Spans, TargetRule):
    """Accepts if p >= single, else with probability min(1, p / acc); else p without the token.

    SGLang's `speculative_accept_threshold_single` and `speculative_accept_threshold_acc`; (1, 1) is
    lossless. At temperature 0 it is lossless if `single` is above 0.

    Attributes:
      single: in [0, 1]; a smaller one keeps more of the drafter, 0 keeps all.
      acc: in (0, 1], likewise.
    """

    single: Array | float = 1.0
    acc: Array | float = 1.0

    spans = MappingProxyType({"single": SHARE, "acc": Strengths(Span(0.0, 1.0, open_low=True))})

    def _target(self, q, p, q_conf, p_conf):
        refused = jnp.where(p >= self.single, 0.0, jnp.maximum(1.0 - p / self.acc, 0.0))
        # The chance of x, over the mass of p without x: at most q(x).
        others = jnp.maximum(1.0 - p, refused)
        share = q * refused / jnp.where(others > 0.0, others, 1.0)
        rest = jnp.maximum(total(share) - share, 0.0)
        return normalise(q * (1.0 - refused) + p * rest, fallback=p)


@traced_dataclass
class Cactus(Spans, TargetRule):
    """Accepts x with probability min(1, h / q), h = min(1, p + sqrt(2 delta p (1 - p))) at x.

    Else a draw from norm((h^x - q)_+), where h^x is h at x, and p (1 - h) / (1 - p(x)) elsewhere.
    A baseline. It intends KL(h^x || p) <= delta, by a second-order term: it reaches 2 delta. And
    h^x differs for each x, so that no multiple of delta bounds KL(pi || p): if p is uniform on V
    tokens and q on ceil(1 / h) of them, then pi = q, at log(V h) nats. `KLBall` is the exact
    solution. At temperature 0 it is lossless.

    Attributes:
      delta: at least 0; 0 is lossless.
    """

    delta: Array | float

    spans = MappingProxyType({"delta": ALLOWANCE})

    def _target(self, q, p, q_conf, p_conf):
        spread = 2.0 * jnp.asarray(self.delta, jnp.float32) * p * (1.0 - p)
        raised = jnp.minimum(p + jnp.sqrt(jnp.maximum(spread, 0.0)), 1.0)
        refused = jnp.maximum(q - raised, 0.0)
        scale = (1.0 - raised) / jnp.where(p < 1.0, 1.0 - p, 1.0)
        return normalise(jnp.minimum(q, raised) + _redrawn(q, p, refused, scale), fallback=p)


def _redrawn(q: Array, p: Array, refused: Array, scale: Array) -> Array:
    """sum_x refused(x) norm((scale(x) p - q)_+), in O(V log V)."""
    # Sorted by q / p, each residual is positive on a first part of the tokens, so sums over them
    # are differences of cumulative sums.
    ratio = jnp.where(p > 0.0, q / jnp.where(p > 0.0, p, 1.0), jnp.inf)
    order = jnp.argsort(ratio)
    zero = jnp.zeros((1,), jnp.float32)
    p_below, q_below = (jnp.concatenate([zero, jnp.cumsum(x[order])]) for x in (p, q))
    below = jnp.searchsorted(ratio[order], scale)  # tokens with ratio < scale(x)
    mass = scale * p_below[below] - q_below[below]
    weight = jnp.where(mass > 0.0, refused / jnp.where(mass > 0.0, mass, 1.0), 0.0)

    def from_above(values: Array) -> Array:
        # For each place the sum over those x whose residual is positive there.
        ends = jnp.zeros((p.size + 1,), jnp.float32).at[below].add(values)
        return jnp.cumsum(ends[::-1])[::-1][1:]

    drawn = from_above(weight * scale) * p[order] - from_above(weight) * q[order]
    return jnp.zeros_like(p).at[order].set(jnp.maximum(drawn, 0.0))
