"""The task of an acceptance head: to predict labels from hidden states that are computed already.

Axes: n positions, D the drafter's width.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.acceptance_head import HeadConfig, apply_head, init_head
from specjax.evaluation import ClassWeights
from specjax.training.head_data import HeadBatch
from specjax.training.losses import masked_total
from specjax.training.task import Total
from specjax.types import Array, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTask:
    """An acceptance head learns the labels of `HeadBatch`es; a `Task` without constants.

    Attributes:
      head: its sizes.
      weights: w_acc and w_rej of the loss.

    Source: SpecDec++ (arXiv 2405.19715), section 3.3.
    """

    head: HeadConfig
    weights: ClassWeights

    item_name: ClassVar[str] = "drafted tokens"

    def init(self, key: Array) -> Params:
        """See `Task`."""
        return init_head(self.head, key)

    def loss(self, params: Params, constants: Any, batch: HeadBatch, key: Array) -> Total:
        """See `Task`: -w_acc P log P^ - w_rej (1 - P) log(1 - P^), summed."""
        return masked_total(self._per_token(params, batch, self.weights), batch.real)

    def evaluate(self, params: Params, constants: Any, batch: HeadBatch) -> dict[str, Total]:
        """See `Task`: the loss, and the binary KL divergence without weights."""
        p = batch.labels
        entropy = jax.scipy.special.entr(p) + jax.scipy.special.entr(1.0 - p)
        kl = self._per_token(params, batch, ClassWeights()) - entropy
        loss = self._per_token(params, batch, self.weights)
        return {"loss": masked_total(loss, batch.real), "kl": masked_total(kl, batch.real)}

    def _per_token(self, params: Params, batch: HeadBatch, weights: ClassWeights) -> Array:
        log_odds = apply_head(self.head, params, batch.hidden, batch.features)
        accepted = weights.accepted * batch.labels * jax.nn.softplus(-log_odds)
        rejected = weights.rejected * (1.0 - batch.labels) * jax.nn.softplus(log_odds)
        return jnp.asarray(accepted + rejected)
