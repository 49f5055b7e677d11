"""Token-specific rules: pi(v) = q(v) (1 - r(v)) + p(v) eta, eta = sum_v r(v) q(v) (eq. 11).

r(v) in {0, 1}: whether the verifier replaces the drafter's token v. Comparisons are strict, so a
tie keeps the drafter's token. Other systems replace it differently; see `Replacing`.

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
from specjax.rules.target import MARGIN, SHARE, Span, Spans, Strengths, TargetRule, entropy
from specjax.sampling import normalise, residual_mass, residual_weights, total
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
