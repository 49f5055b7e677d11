"""A rule that changes another rule's strength from position to position.

Notation as in `specjax.rules.target`. The cost of a text is sum_t KL(pi_t || p_t) over its tokens;
a budget of eps nats per token keeps the cost of the first n tokens at eps * n or less.
"""

from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from specjax.errors import UserError
from specjax.rules.target import (
    ALLOWANCE,
    Spans,
    check_is_rule,
    check_position,
    kl_divergence,
)
from specjax.sampling.draws import TINY, normalise, total
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
        square = jnp.where(affordable, 1.0, jnp.maximum(square, TINY))
        curve = jnp.sqrt(jnp.expm1(jnp.minimum(budget, 80.0)) / square)
        left = jnp.where(affordable, 1.0, jnp.minimum(jnp.maximum(chord, curve), 1.0))
        pi = left * target + (1.0 - left) * p
        cost = jnp.where(jnp.isinf(budget), 0.0, kl_divergence(pi, p))
        return pi, earned - cost
