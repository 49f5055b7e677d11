"""Rules that change another rule's strength from position to position.

Notation as in `specjax.rules.target`. The cost of a text is sum_t KL(pi_t || p_t) over its tokens;
a budget of eps nats per token keeps the cost of the first n tokens at eps * n or less.
"""

import dataclasses
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from specjax.errors import UserError
from specjax.rules.accept_functions import Mixture
from specjax.rules.lossy import Lossy, LossyTuned
from specjax.rules.target import (
    ALLOWANCE,
    Span,
    Spans,
    Strengths,
    TargetRule,
    check_is_rule,
    check_position,
    kl_divergence,
)
from specjax.sampling import normalise, total
from specjax.types import traced_dataclass


@traced_dataclass
class Budgeted(Spans):
    """Another rule's target T, as close as a divergence budget allows: pi = s T + (1 - s) p.

    s in [0, 1] is the remaining strength, 1 if T is affordable. A position earns `nats_per_token`
    and pays KL(pi || p), which is known before its token is drawn; the rest is the credit of the
    next position. So at every token of every row the cost is within the budget, up to float32's
    rounding. The credit, and so pi, depends only on earlier tokens, and verification is exact as
    with any rule.

    Tokens that the verifier cannot draw have infinite cost: under a finite budget T is first
    restricted to the others. If none is left (as at temperature 0, if the two models disagree) pi =
    p.

    Attributes:
      rule: the rule that gives T, such as `OPT(strength=0.5)`.
      nats_per_token: eps >= 0; 0 is lossless, infinity the rule itself.
    """

    reads_draft: ClassVar[bool] = True

    rule: Any
    nats_per_token: Array | float

    spans = MappingProxyType({"nats_per_token": ALLOWANCE})

    def __post_init__(self) -> None:
        check_is_rule("rule", self.rule)
        if isinstance(self.rule, Budgeted) or not self.rule.reads_draft:
            raise UserError(
                f"rule must have a strength to lower, got {self.rule!r}: give a rule such as "
                "rules.OPT(strength=0.5)"
            )
        super().__post_init__()

    @property
    def reads_draft_confidence(self) -> bool:
        return bool(self.rule.reads_draft_confidence)

    @property
    def reads_verifier_confidence(self) -> bool:
        return bool(self.rule.reads_verifier_confidence)

    def __call__(
        self,
        q: Float32[Array, " V"],
        p: Float32[Array, " V"],
        q_conf: Float32[Array, " V"] | None = None,
        p_conf: Float32[Array, " V"] | None = None,
    ) -> Float32[Array, " V"]:
        check_position(self, q, p)
        return self.spend(self.rule(q, p, q_conf, p_conf), p, self.init_carry())[0]

    def init_carry(self) -> Float32[Array, ""]:
        """The credit at the start of a row, in nats."""
        return jnp.float32(0.0)

    def targets(
        self,
        carry: Float32[Array, ""],
        q: Float32[Array, "N V"],
        p: Float32[Array, "N V"],
        q_conf: Float32[Array, "N V"] | None = None,
        p_conf: Float32[Array, "N V"] | None = None,
    ) -> tuple[Float32[Array, "N V"], Float32[Array, " N+1"]]:
        """Pi at successive positions, and the credit after 0 .. N of them."""

        def spend(credit: Array, one: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            target, left = self.spend(*one, credit)
            return left, (target, left)

        unlimited = jax.vmap(self.rule)(q, p, q_conf, p_conf)
        _, (targets, left) = lax.scan(spend, carry, (unlimited, p))
        return targets, jnp.concatenate([carry[None], left])

    def spend(
        self,
        target: Float32[Array, " V"],
        p: Float32[Array, " V"],
        credit: Float32[Array, ""],
    ) -> tuple[Float32[Array, " V"], Float32[Array, ""]]:
        """The target that a position can afford, pi, and the credit after it.

        Args:
          target: T.
          p: the verifier's distribution.
          credit: the nats left by earlier positions.
        """
        earned = credit + self.nats_per_token
        budget = jnp.maximum(earned, 0.0)  # rounding
        cut = jnp.any((target > 0.0) & (p <= 0.0)) & jnp.isfinite(budget)
        possible = normalise(jnp.where(p > 0.0, target, 0.0), fallback=p)
        target = jnp.where(cut, possible, target)
        whole = kl_divergence(target, p)
        # KL(pi || p) is convex in s, and at most log(1 + s^2 chi^2): so two shares are affordable.
        difference = jnp.where(p > 0.0, target - p, 0.0)
        # Not the square over p: of a small difference it would be 0.
        square = total(difference * (difference / jnp.where(p > 0.0, p, 1.0)))
        affordable = whole <= budget
        chord = budget / jnp.where(affordable, 1.0, whole)
        # A smaller budget is affordable too; infinity over infinity would be NaN.
        least = jnp.finfo(square.dtype).tiny
        square = jnp.where(affordable, 1.0, jnp.maximum(square, least))
        curve = jnp.sqrt(jnp.expm1(jnp.minimum(budget, 80.0)) / square)
        left = jnp.where(affordable, 1.0, jnp.minimum(jnp.maximum(chord, curve), 1.0))
        pi = left * target + (1.0 - left) * p
        cost = jnp.where(jnp.isinf(budget), 0.0, kl_divergence(pi, p))
        return pi, earned - cost


@traced_dataclass
class Learnt(Spans, TargetRule):
    """Another rule, as strong as a head finds right at each position.

    The strength is that of `rule` times sigmoid(top f_1 + entropy f_2 + second f_3 + bias), where f
    are the `confidence_features` of the drafter's largest probability, entropy and second largest
    probability (softmax at temperature 1). Of `Mixture` it is the drafter's weight, 1 - weight. So
    the given strength is the largest. The head reads what is known before the token is drawn, so pi
    is a target like any other, and verification is exact.

    At equal mean KL(pi || p) no such rule accepts more than `KLPrice`, which knows p too.

    Source: DIVERSED, whose verifier's weight in a mixture depends on the context. Here the head is
    linear.

    Attributes:
      rule: `LossyTuned`, `Lossy` (with beta=1) or `Mixture`, with the largest strength.
      bias: a larger one is a stronger rule at all positions.
    """

    reads_draft_confidence: ClassVar[bool] = True

    rule: Any
    top: Array | float
    entropy: Array | float
    second: Array | float
    bias: Array | float

    spans = MappingProxyType(
        dict.fromkeys(
            ("top", "entropy", "second", "bias"),
            Strengths(Span(open_low=True, open_high=True), Span(-100.0, 100.0)),
        )
    )

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Lossy | LossyTuned | Mixture):
            raise UserError(
                "rule must be a rule whose strength goes from 0 to 1, rules.LossyTuned, "
                f"rules.Lossy or rules.Mixture, got {self.rule!r}"
            )
        if isinstance(self.rule, Lossy) and not np.all(np.asarray(self.rule.beta) == 1.0):
            raise UserError(
                f"rule must have beta=1, got {self.rule!r}: a smaller strength may not have this "
                "beta; use rules.LossyTuned"
            )
        super().__post_init__()

    def share(self, q_conf: Float32[Array, " V"]) -> Float32[Array, ""]:
        """The share of the largest strength, in [0, 1]."""
        # Imported here: the other rules do not need flax.
        from specjax.acceptance_head import confidence_features, top_confidences

        features = confidence_features(*top_confidences(q_conf))
        weights = (self.top, self.entropy, self.second)
        return jax.nn.sigmoid(
            sum(w * f for w, f in zip(weights, features, strict=True)) + self.bias
        )

    def _target(self, q, p, q_conf, p_conf):
        return scaled(self.rule, self.share(q_conf))(q, p)


def scaled(rule: Any, share: Array | float) -> Any:
    """`LossyTuned`, `Lossy` or `Mixture` with a share, in [0, 1], of its strength."""
    if isinstance(rule, Mixture):
        return Mixture(1.0 - share * (1.0 - rule.weight))
    return dataclasses.replace(rule, strength=share * rule.strength)
