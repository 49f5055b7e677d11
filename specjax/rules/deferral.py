"""Deferral rules: pi = p if the rule defers to the verifier (delta = 1), else pi = q.

Comparisons are strict, so a tie keeps the drafter. Confidences come from q_conf and p_conf, the
mixture and D_TV from q and p. This makes OPT equal to Diff at temperature 0 (Lemma 8).

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261). Each rule names its equation.
"""

import abc
from typing import ClassVar

import jax.numpy as jnp

from specjax.checks import checked
from specjax.rules.quantities import check_position, cross_entropy, entropy, total_variation
from specjax.types import Array, traced_dataclass


@traced_dataclass
class Lossless:
    """Always follows the verifier: pi = p (Leviathan et al., arXiv 2211.17192)."""

    reads_draft: ClassVar[bool] = False
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = False

    def __call__(
        self, q: Array, p: Array, q_conf: Array | None = None, p_conf: Array | None = None
    ) -> Array:
        """See `Rule`."""
        check_position(self, q, p, q_conf, p_conf)
        return p


class Deferral(abc.ABC):
    """A rule that defers to the verifier or does not: pi = p where `defers`, else q.

    A rule of your own derives from it with `specjax.types.traced_dataclass` and defines `defers`.

    Attributes:
      reads_verifier: whether the decision reads p or p_conf. One that does not can be made before
        the verifier has run, as a token cascade makes it.
    """

    reads_draft: ClassVar[bool] = True
    reads_draft_confidence: ClassVar[bool] = True
    reads_verifier_confidence: ClassVar[bool] = True
    reads_verifier: ClassVar[bool] = True

    def __call__(
        self, q: Array, p: Array, q_conf: Array | None = None, p_conf: Array | None = None
    ) -> Array:
        """See `Rule`."""
        check_position(self, q, p, q_conf, p_conf)
        return jnp.where(self.defers(q, p, q_conf, p_conf), p, q)

    @abc.abstractmethod
    def defers(
        self, q: Array, p: Array | None, q_conf: Array | None, p_conf: Array | None
    ) -> Array:
        """Decides at one position: delta.

        Args:
          q: `[V]` float32, the drafter's distribution.
          p: `[V]` float32, the verifier's; None where the decision does not read it.
          q_conf: `[V]` float32, the drafter's confidence, or None likewise.
          p_conf: `[V]` float32, the verifier's confidence, or None likewise.

        Returns:
          bool scalar, True for the verifier.
        """


@traced_dataclass
class Chow(Deferral):
    """Defers iff max q_conf < 1 - alpha (eq. 2); alpha in [0, 1]."""

    reads_verifier_confidence: ClassVar[bool] = False
    reads_verifier: ClassVar[bool] = False

    alpha: Array | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", checked("alpha", self.alpha, low=0.0, high=1.0))

    def defers(self, q, p, q_conf, p_conf):
        """See `Deferral`."""
        return jnp.max(q_conf) < 1.0 - self.alpha


@traced_dataclass
class ChowLog(Deferral):
    """Defers iff H(q_conf) > alpha (eq. 24); alpha >= 0, in nats."""

    reads_verifier_confidence: ClassVar[bool] = False
    reads_verifier: ClassVar[bool] = False

    alpha: Array | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", checked("alpha", self.alpha, low=0.0))

    def defers(self, q, p, q_conf, p_conf):
        """See `Deferral`."""
        return entropy(q_conf) > self.alpha


class _AnyStrength(Deferral):
    """A deferral rule whose strength may be any number."""

    alpha: Array | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", checked("alpha", self.alpha))


@traced_dataclass
class Diff(_AnyStrength):
    """Defers iff max q_conf < max p_conf - alpha (eq. 5); any alpha."""

    alpha: Array | float

    def defers(self, q, p, q_conf, p_conf):
        """See `Deferral`."""
        return jnp.max(q_conf) < jnp.max(p_conf) - self.alpha


@traced_dataclass
class DiffLog(_AnyStrength):
    """Defers iff H(p_conf) < H(q_conf) - alpha (eq. 25); any alpha, in nats."""

    alpha: Array | float

    def defers(self, q, p, q_conf, p_conf):
        """See `Deferral`."""
        return entropy(p_conf) < entropy(q_conf) - self.alpha


@traced_dataclass
class OPT(_AnyStrength):
    """Defers iff max q_conf < max p_conf - alpha * D_TV(p, q) (eq. 10); any alpha."""

    alpha: Array | float

    def defers(self, q, p, q_conf, p_conf):
        """See `Deferral`."""
        return jnp.max(q_conf) < jnp.max(p_conf) - _penalty(self.alpha, p, q)


@traced_dataclass
class OPTLog(_AnyStrength):
    """Defers iff H(p_conf) < H(q_conf) - alpha * D_TV(p, q) (eq. 26); any alpha."""

    alpha: Array | float

    def defers(self, q, p, q_conf, p_conf):
        """See `Deferral`."""
        return entropy(p_conf) < entropy(q_conf) - _penalty(self.alpha, p, q)


@traced_dataclass
class BiLD(Deferral):
    """BiLD* as a target: defers iff -sum_v q(v) log p_conf(v) > alpha (section 5, E.1); alpha >= 0.

    At temperature 0 the sum is -log p_conf(argmax q_conf). At temperature 1 without top-k and top-p
    it is the cross entropy of E.1. It reads p_conf, not p: this is finite under top-k and top-p.
    """

    reads_draft_confidence: ClassVar[bool] = False

    alpha: Array | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", checked("alpha", self.alpha, low=0.0))

    def defers(self, q, p, q_conf, p_conf):
        """See `Deferral`."""
        return cross_entropy(q, p_conf) > self.alpha


def _penalty(alpha: Array | float, p: Array, q: Array) -> Array:
    """Alpha * D_TV(p, q), and zero where D_TV is zero (no inf * 0 at infinite alpha)."""
    distance = total_variation(p, q)
    return jnp.where(distance > 0.0, alpha * distance, 0.0)
