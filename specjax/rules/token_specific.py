"""Token-specific rules: pi(v) = q(v) (1 - r(v)) + p(v) eta, eta = sum_v r(v) q(v) (eq. 11).

r(v) in {0, 1} says which of the drafter's tokens the verifier replaces. Comparisons are strict, so
a tie keeps the drafter's token.

Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), section 4.3.
"""

from typing import ClassVar

import jax.numpy as jnp

from specjax.checks import checked
from specjax.rules.quantities import check_position
from specjax.sampling import total
from specjax.types import Array, traced_dataclass


class _TokenRule:
    """The mixture of eq. 11, with `_replaced` as r."""

    reads_draft: ClassVar[bool] = True
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = True

    alpha: Array | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", checked("alpha", self.alpha))

    def __call__(
        self, q: Array, p: Array, q_conf: Array | None = None, p_conf: Array | None = None
    ) -> Array:
        """See `Rule`."""
        check_position(self, q, p, q_conf, p_conf)
        replaced = self._replaced(q_conf, p_conf)
        eta = total(jnp.where(replaced, q, 0.0))
        return jnp.where(replaced, 0.0, q) + p * eta

    def _replaced(self, q_conf, p_conf) -> Array:
        raise NotImplementedError


@traced_dataclass
class TokenV1(_TokenRule):
    """r(v) = 1 iff q_conf(v) < max p_conf - alpha (eq. 13); any alpha."""

    reads_draft_confidence: ClassVar[bool] = True

    alpha: Array | float

    def _replaced(self, q_conf, p_conf):
        return q_conf < jnp.max(p_conf) - self.alpha


@traced_dataclass
class TokenV2(_TokenRule):
    """r(v) = 1 iff p_conf(v) < max p_conf - alpha (eq. 14); any alpha."""

    alpha: Array | float

    def _replaced(self, q_conf, p_conf):
        return p_conf < jnp.max(p_conf) - self.alpha


@traced_dataclass
class TokenV3(_TokenRule):
    """r(v) = 1 iff p_conf(v) < (1 - alpha) max p_conf (eq. 15); any alpha, useful in [0, 1)."""

    alpha: Array | float

    def _replaced(self, q_conf, p_conf):
        return p_conf < (1.0 - self.alpha) * jnp.max(p_conf)
