"""Token-specific rules: pi(v) = q(v) (1 - r(v)) + p(v) eta, eta = sum_v r(v) q(v) (eq. 11).

r(v) in {0, 1}: whether the verifier replaces the drafter's token v. Comparisons are strict, so a
tie keeps the drafter's token.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), section 4.3.
"""

from typing import ClassVar

import jax.numpy as jnp

from specjax.rules.target import Strength, TargetRule
from specjax.sampling import total
from specjax.types import Array, traced_dataclass


class _TokenRule(TargetRule):
    """The mixture of eq. 11, with `_replaced` as r."""

    reads_verifier_confidence: ClassVar[bool] = True

    def _target(self, q, p, q_conf, p_conf):
        replaced = self._replaced(q_conf, p_conf)
        eta = total(jnp.where(replaced, q, 0.0))
        return jnp.where(replaced, 0.0, q) + p * eta

    def _replaced(self, q_conf, p_conf) -> Array:
        raise NotImplementedError


@traced_dataclass
class TokenV1(Strength, _TokenRule):
    """r(v) = 1 iff q_conf(v) < max p_conf - strength (eq. 13); any strength."""

    reads_draft_confidence: ClassVar[bool] = True

    def _replaced(self, q_conf, p_conf):
        return q_conf < jnp.max(p_conf) - self.strength


@traced_dataclass
class TokenV2(Strength, _TokenRule):
    """r(v) = 1 iff p_conf(v) < max p_conf - strength (eq. 14); any strength."""

    def _replaced(self, q_conf, p_conf):
        return p_conf < jnp.max(p_conf) - self.strength


@traced_dataclass
class TokenV3(Strength, _TokenRule):
    """r(v) = 1 iff p_conf(v) < (1 - strength) max p_conf (eq. 15); useful strengths: [0, 1)."""

    def _replaced(self, q_conf, p_conf):
        return p_conf < (1.0 - self.strength) * jnp.max(p_conf)
