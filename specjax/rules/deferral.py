"""Deferral rules: pi = p if the rule defers to the verifier (delta = 1), else pi = q.

Comparisons are strict, so a tie keeps the drafter. Confidences come from q_conf and p_conf, the
mixture and D_TV from q and p. This makes OPT equal to Diff at temperature 0 (Lemma 8).

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261). Each rule names its equation.
"""

import abc
from types import MappingProxyType
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from specjax.rules.target import (
    ALLOWANCE,
    MARGIN,
    NATS_APART,
    SHARE,
    Strength,
    TargetRule,
    cross_entropy,
    entropy,
    total_variation,
)
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
    distance = total_variation(p, q)
    return jnp.where(distance > 0.0, strength * distance, 0.0)
