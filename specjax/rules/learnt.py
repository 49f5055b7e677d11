"""A rule whose strength at each position is learnt from the drafter's distribution.

Source: DIVERSED, whose verifier's weight in a mixture depends on the context. Here the head is
linear: it reads three numbers of the distribution that the token is to be drawn from.
"""

import dataclasses
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import numpy as np

from specjax.errors import UserError
from specjax.rules.accept_functions import Mixture
from specjax.rules.lossy import Lossy, LossyTuned
from specjax.rules.target import Span, Spans, Strengths, TargetRule
from specjax.types import Array, traced_dataclass


@traced_dataclass
class Learnt(Spans, TargetRule):
    """Another rule, as strong as a head finds right at each position.

    The strength is that of `rule` times sigmoid(top f_1 + entropy f_2 + second f_3 + bias), where f
    are the `confidence_features` of the drafter's largest probability, entropy and second largest
    probability (softmax at temperature 1). Of `Mixture` it is the drafter's weight, 1 - weight. So
    the given strength is the largest. The head reads what is known before the token is drawn, so pi
    is a target like any other, and verification is exact.

    At equal mean KL(pi || p) no such rule accepts more than `KLPrice`, which knows p too. The
    benchmark `benchmarks/strengths.py` finds the four numbers for a pair.

    Attributes:
      rule: `LossyTuned`, `Lossy` or `Mixture`, with the largest strength.
      top: any number; so are the others.
      entropy: see above.
      second: see above.
      bias: a larger one is a stronger rule at all positions.

    Raises:
      TypeError: `rule` is none of these, or a number is no number.
      ValueError: a number is infinite or NaN, or `beta` of a `Lossy` is not 1.
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

    def share(self, q_conf: Array) -> Array:
        """The share of the largest strength, `[V]` -> a scalar in [0, 1]."""
        # Imported here: the other rules do not need flax.
        from specjax.acceptance_head.network import confidence_features, top_confidences

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
