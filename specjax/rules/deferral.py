"""Deferral rules: pi = p if the rule defers to the verifier (delta = 1), else pi = q.

Comparisons are strict, so a tie keeps the drafter. Confidences come from q_conf and p_conf, the
mixture and D_TV from q and p. This makes OPT equal to Diff at temperature 0 (Lemma 8).

The rules after `BiLD` belong to sequential cascades: when a draft falls back, is rolled back, or is
replaced. They are no target distributions: methods in `specjax.decoding` use them to decide.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261). Each rule names its equation.
For sequential cascades also BiLD (arXiv 2302.07863); Gupta et al., Language Model Cascades (arXiv
2404.10136), for the aggregations.

Axes: V vocabulary, N longest output.
"""

import abc
from types import MappingProxyType
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from specjax.checks import check_part
from specjax.errors import UserError
from specjax.rules.target import (
    ALLOWANCE,
    MARGIN,
    NATS_APART,
    SHARE,
    Span,
    Spans,
    Strength,
    Strengths,
    TargetRule,
    cross_entropy,
    entropy,
)
from specjax.sampling.draws import residual_mass
from specjax.types import traced_dataclass


@traced_dataclass
class Lossless(TargetRule):
    """Always follows the verifier: pi = p (Leviathan et al., arXiv 2211.17192)."""

    reads_draft: ClassVar[bool] = False

    def _target(self, q, p, q_conf, p_conf):
        return p


class Deferral(TargetRule):
    """A rule that defers to the verifier or does not: pi = p where `defers`, else q.

    Derive your own rule from it with `specjax.types.traced_dataclass` and define `defers`.

    Attributes:
      reads_verifier: whether the decision reads p or p_conf. If not, it can be made before the
        verifier has run, as in a token cascade.
    """

    reads_draft_confidence: ClassVar[bool] = True
    reads_verifier_confidence: ClassVar[bool] = True
    reads_verifier: ClassVar[bool] = True

    def _target(self, q, p, q_conf, p_conf):
        return jnp.where(self.defers(q, p, q_conf, p_conf), p, q)

    @abc.abstractmethod
    def defers(
        self,
        q: Float32[Array, " V"],
        p: Float32[Array, " V"] | None,
        q_conf: Float32[Array, " V"] | None,
        p_conf: Float32[Array, " V"] | None,
    ) -> Bool[Array, ""]:
        """Whether the verifier is to draw the token: delta.

        What the decision does not read may be None.
        """


@traced_dataclass
class Chow(Strength, Deferral):
    """Defers iff max q_conf < 1 - strength (eq. 2); strength in [0, 1]."""

    reads_verifier_confidence: ClassVar[bool] = False
    reads_verifier: ClassVar[bool] = False
    spans = MappingProxyType({"strength": SHARE})

    def defers(self, q, p, q_conf, p_conf):
        return jnp.max(q_conf) < 1.0 - self.strength


@traced_dataclass
class ChowLog(Strength, Deferral):
    """Defers iff H(q_conf) > strength (eq. 24); strength >= 0, in nats."""

    reads_verifier_confidence: ClassVar[bool] = False
    reads_verifier: ClassVar[bool] = False
    spans = MappingProxyType({"strength": ALLOWANCE})

    def defers(self, q, p, q_conf, p_conf):
        return entropy(q_conf) > self.strength


@traced_dataclass
class Diff(Strength, Deferral):
    """Defers iff max q_conf < max p_conf - strength (eq. 5); strength in (-1, 1]."""

    spans = MappingProxyType({"strength": MARGIN})

    def defers(self, q, p, q_conf, p_conf):
        return jnp.max(q_conf) < jnp.max(p_conf) - self.strength


@traced_dataclass
class DiffLog(Strength, Deferral):
    """Defers iff H(p_conf) < H(q_conf) - strength (eq. 25); any strength, in nats."""

    spans = MappingProxyType({"strength": NATS_APART})

    def defers(self, q, p, q_conf, p_conf):
        return entropy(p_conf) < entropy(q_conf) - self.strength


@traced_dataclass
class OPT(Strength, Deferral):
    """Defers iff max q_conf < max p_conf - strength * D_TV(p, q) (eq. 10); strength in (-1, 1]."""

    spans = MappingProxyType({"strength": MARGIN})

    def defers(self, q, p, q_conf, p_conf):
        return jnp.max(q_conf) < jnp.max(p_conf) - _penalty(self.strength, p, q)


@traced_dataclass
class OPTLog(Strength, Deferral):
    """Defers iff H(p_conf) < H(q_conf) - strength * D_TV(p, q) (eq. 26); any strength, in nats."""

    spans = MappingProxyType({"strength": NATS_APART})

    def defers(self, q, p, q_conf, p_conf):
        return entropy(p_conf) < entropy(q_conf) - _penalty(self.strength, p, q)


@traced_dataclass
class BiLD(Strength, Deferral):
    """BiLD* as a target: defers iff -sum_v q(v) log p_conf(v) > strength (section 5, E.1).

    The strength is at least 0. At temperature 0 the sum is -log p_conf(argmax q_conf). At
    temperature 1 without top-k and top-p it is the cross entropy of E.1. It reads p_conf, not p:
    this is finite under top-k and top-p.
    """

    reads_draft_confidence: ClassVar[bool] = False
    spans = MappingProxyType({"strength": ALLOWANCE})

    def defers(self, q, p, q_conf, p_conf):
        return cross_entropy(q, p_conf) > self.strength


def _penalty(strength: Array | float, p: Array, q: Array) -> Array:
    """Strength * D_TV(p, q), and zero where D_TV is zero (no inf * 0 at infinite strength)."""
    distance = residual_mass(p, q)
    return jnp.where(distance > 0.0, strength * distance, 0.0)


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
