"""Rules of sequential cascades: when a draft falls back, is rolled back, or is replaced.

They are not target distributions: methods in `specjax.decoding` use them to decide. Strengths are
traced. Axes: V vocabulary, N longest output.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), eq. 1 and section 5; BiLD
(arXiv 2302.07863); Gupta et al., Language Model Cascades (arXiv 2404.10136), for the aggregations.
"""

from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from specjax.checks import check_part
from specjax.errors import UserError
from specjax.rules.deferral import Deferral
from specjax.rules.target import SHARE, Span, Spans, Strength, Strengths
from specjax.types import traced_dataclass

_DEFERRAL = ("defers", "reads_verifier", "reads_draft_confidence", "reads_verifier_confidence")


def check_deferral(name: str, rule: Any, example: str) -> None:
    """Raises UserError unless `rule` is a deferral rule; `name` is the argument's name."""
    check_part(name, rule, _DEFERRAL, example)


def check_reads_drafter_alone(name: str, rule: Any, remedy: str) -> None:
    """Raises UserError unless `rule` reads only the drafter; `name` is the argument's name."""
    check_deferral(name, rule, "rules.Chow(strength=0.3)")
    if rule.reads_verifier:
        raise UserError(
            f"{name} must read only the drafter, got {type(rule).__name__}, which reads the "
            f"verifier: use rules.Chow or rules.ChowLog{remedy}"
        )


@traced_dataclass
class FallbackRollback:
    """Ends a draft and cuts it back; BiLD is Chow(1 - threshold) with BiLD(strength).

    Attributes:
      fallback: the draft ends before the position where it defers; it reads only the drafter.
      rollback: the draft is cut before the first token where this rule defers.
    """

    fallback: Deferral
    rollback: Deferral

    def __post_init__(self) -> None:
        check_reads_drafter_alone("fallback", self.fallback, "")
        check_deferral("rollback", self.rollback, "rules.BiLD(strength=1.0)")


@traced_dataclass
class Sum:
    """The log-probability of the whole response, as in eq. 1."""

    def __call__(
        self, log_probs: Float32[Array, " N"], length: Int32[Array, ""]
    ) -> Float32[Array, ""]:
        """Aggregates one row, in nats; entries past `length`, at least 1, are arbitrary."""
        return jnp.sum(jnp.where(jnp.arange(log_probs.size) < length, log_probs, 0.0))


@traced_dataclass
class Mean:
    """The mean log-probability per token."""

    def __call__(
        self, log_probs: Float32[Array, " N"], length: Int32[Array, ""]
    ) -> Float32[Array, ""]:
        return Sum()(log_probs, length) / jnp.maximum(length, 1).astype(jnp.float32)


@traced_dataclass
class Quantile(Spans):
    """A quantile of the tokens' log-probabilities, interpolated linearly.

    Attributes:
      level: in [0, 1]; 0 is the least probable token, 1 the most probable token.
    """

    level: Array | float

    spans = MappingProxyType({"level": SHARE})

    def __call__(
        self, log_probs: Float32[Array, " N"], length: Int32[Array, ""]
    ) -> Float32[Array, ""]:
        real = jnp.arange(log_probs.size) < length
        ordered = jnp.sort(jnp.where(real, log_probs, jnp.inf))
        last = jnp.maximum(length - 1, 0)
        place = self.level * last.astype(jnp.float32)
        below = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, last)
        share = place - below.astype(jnp.float32)
        low, high = ordered[below], ordered[jnp.minimum(below + 1, last)]
        # Not low + share * (high - low): both may be infinite.
        return jnp.where(share > 0.0, (1.0 - share) * low + share * high, low)


@traced_dataclass
class _OfResponses(Strength):
    """A rule for whole responses."""

    aggregation: Any = Sum()

    def __post_init__(self) -> None:
        super().__post_init__()
        example = "rules.Sum(), rules.Mean() or rules.Quantile(level=0.2)"
        check_part("aggregation", self.aggregation, ("__call__",), example)


@traced_dataclass
class SequenceChow(_OfResponses):
    """Defers iff the aggregated probability of a response is below 1 - strength (eq. 1).

    Attributes:
      strength: in [0, 1]; 1 never defers.
      aggregation: of the tokens' log-probabilities; its exponential is compared: `Sum`, `Mean`,
        `Quantile`, or your own pytree with the same call.
    """

    spans = MappingProxyType({"strength": SHARE})

    def defers_response(
        self, log_probs: Float32[Array, " N"], length: Int32[Array, ""]
    ) -> Bool[Array, ""]:
        """Whether the verifier must write a new response.

        Args:
          log_probs: of its tokens under the drafter's confidence distributions; arbitrary past
            `length`.
          length: at least 1, with the end-of-sequence token.
        """
        return self.aggregation(log_probs, length) < jnp.log1p(-jnp.asarray(self.strength))


@traced_dataclass
class SequenceChowLog(_OfResponses):
    """Defers iff the aggregated log-probability of a response is below -strength.

    `SequenceChow` on another scale, for long responses, whose useful thresholds are too close to a
    strength of 1.

    Attributes:
      strength: at least 0, in nats; infinity never defers.
      aggregation: see `SequenceChow`.
    """

    spans = MappingProxyType({"strength": Strengths(Span(0.0), Span(0.0, 1000.0))})

    def defers_response(
        self, log_probs: Float32[Array, " N"], length: Int32[Array, ""]
    ) -> Bool[Array, ""]:
        return self.aggregation(log_probs, length) < -jnp.asarray(self.strength)
