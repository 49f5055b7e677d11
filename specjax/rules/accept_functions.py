"""Rules by token: which drafted tokens stand, and what replaces the others.

Token-specific rules: pi(v) = q(v) (1 - r(v)) + p(v) eta, eta = sum_v r(v) q(v) (eq. 11), where
r(v) in {0, 1} says whether the verifier replaces the drafter's token v. Comparisons are strict, so
a tie keeps the drafter's token.

Accept functions of other systems: a drafted token x stands with probability a(x), and otherwise one
is drawn from R_x. If both depend on q and p alone, its token follows pi = q a + sum_x q(x) (1 -
a(x)) R_x. Verifying this pi accepts at least as often, sum min(pi, q) >= sum q a, and also draws
the token after a whole block from it. None bounds its distance from the verifier, and at equal
acceptance `LossyTuned` and `KLBall` have a smaller one.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), section 4.3; for `Typical`:
Medusa (arXiv 2401.10774), section 3.1.
"""

import dataclasses
from types import MappingProxyType
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from specjax.checks import check_count
from specjax.errors import UserError
from specjax.rules.target import (
    ALLOWANCE,
    MARGIN,
    SHARE,
    Span,
    Spans,
    Strengths,
    TargetRule,
    entropy,
)
from specjax.sampling.draws import normalise, residual_mass, residual_weights, total
from specjax.types import traced_dataclass

_REPLACEMENTS = ("verifier", "residual", "argmax")


def _replacement() -> Any:
    return dataclasses.field(default="verifier", kw_only=True, metadata={"static": True})


class Replacing(Spans, TargetRule):
    """A rule that keeps q where not `replaced`.

    Attributes:
      replacement: what happens to drafted tokens that the verifier replaces; static. "verifier": a
        draw from p instead (eq. 11). "residual": such a token still stands with probability min(1,
        p / q), otherwise a draw from norm((p - q)_+), as in the cascade verifier of MTPLX; then pi
        lies between q and p at each token, and at least as much is accepted. "argmax": the most
        probable token of p instead, as in Medusa.
    """

    replacement: str

    spans = MappingProxyType({"strength": Strengths(useful=Span(0.0, 1.0))})

    def __post_init__(self) -> None:
        if self.replacement not in _REPLACEMENTS:
            raise UserError(
                f"replacement must be one of {', '.join(_REPLACEMENTS)}, got {self.replacement!r}"
            )
        super().__post_init__()

    def _target(self, q, p, q_conf, p_conf):
        replaced = self._replaced(p, q_conf, p_conf)
        if self.replacement == "residual":
            kept = jnp.where(replaced, jnp.minimum(q, p), q)
            return kept + residual_mass(q, kept) * normalise(residual_weights(p, q), fallback=p)
        eta = total(jnp.where(replaced, q, 0.0))
        if self.replacement == "argmax":
            p = (jnp.arange(p.size) == jnp.argmax(p)).astype(jnp.float32)
        return jnp.where(replaced, 0.0, q) + p * eta

    def _replaced(self, p, q_conf, p_conf) -> Array:
        raise NotImplementedError


@traced_dataclass
class TokenV1(Replacing):
    """r(v) = 1 iff q_conf(v) < max p_conf - strength (eq. 13); strength in (-1, 1]."""

    spans = MappingProxyType({"strength": MARGIN})
    reads_draft_confidence: ClassVar[bool] = True
    reads_verifier_confidence: ClassVar[bool] = True

    strength: Array | float
    replacement: str = _replacement()

    def _replaced(self, p, q_conf, p_conf):
        return q_conf < jnp.max(p_conf) - self.strength


@traced_dataclass
class TokenV2(Replacing):
    """r(v) = 1 iff p_conf(v) < max p_conf - strength (eq. 14); useful strengths: [0, 1].

    Attributes:
      top_k: also r(v) = 1 unless v is among so many most probable tokens, as in TensorRT-LLM's
        relaxed acceptance; None: no such limit. Static.
    """

    reads_verifier_confidence: ClassVar[bool] = True

    strength: Array | float
    replacement: str = _replacement()
    top_k: int | None = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k is not None:
            check_count("top_k", self.top_k, "give the number of tokens that may stand, or None")

    def _replaced(self, p, q_conf, p_conf):
        below = p_conf < jnp.max(p_conf) - self.strength
        if self.top_k is None or self.top_k >= p.size:
            return below
        _, highest = lax.top_k(p_conf, self.top_k)  # of equal ones the first
        return below | jnp.ones((p.size,), bool).at[highest].set(False)


@traced_dataclass
class TokenV3(Replacing):
    """r(v) = 1 iff p_conf(v) < (1 - strength) max p_conf (eq. 15); useful strengths: [0, 1]."""

    reads_verifier_confidence: ClassVar[bool] = True

    strength: Array | float
    replacement: str = _replacement()

    def _replaced(self, p, q_conf, p_conf):
        return p_conf < (1.0 - self.strength) * jnp.max(p_conf)


@traced_dataclass
class Typical(Replacing):
    """Typical acceptance: r(v) = 1 iff p(v) <= min(epsilon, alpha exp(-H(p))).

    H(p) is the entropy of the distribution that the verifier draws from, in nats. The defaults are
    Medusa's; as exp(-H) <= 1, epsilon matters only if it is below alpha. A
    larger number keeps less of the drafter. Even at (1, 1) it is not lossless: a token that p gives
    more than exp(-H) stands always. At temperature 0 it is lossless.

    Attributes:
      epsilon: in [0, 1]; at 0 all tokens that p can draw are kept.
      alpha: in [0, 1], likewise.
    """

    epsilon: Array | float = 0.3
    alpha: Array | float = 0.09
    replacement: str = _replacement()

    spans = MappingProxyType({"epsilon": SHARE, "alpha": SHARE})

    def _replaced(self, p, q_conf, p_conf):
        return p <= jnp.minimum(self.epsilon, self.alpha * jnp.exp(-entropy(p)))


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
        # sum_x refused(x) norm((scale(x) p - q)_+), in O(V log V): sorted by q / p, a residual is
        # positive on a first part of the tokens, so sums are differences of cumulative sums.
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
        drawn = jnp.zeros_like(p).at[order].set(jnp.maximum(drawn, 0.0))
        return normalise(jnp.minimum(q, raised) + drawn, fallback=p)
