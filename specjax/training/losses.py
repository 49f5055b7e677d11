"""Teacher-forced losses per target token.

Axes: B rows, T target tokens, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.checks import checked
from specjax.training.divergences import DIVERGENCES
from specjax.training.task import Total
from specjax.types import Array

# The names of `token_totals`.
FIGURES = ("loss", "accuracy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised per target token.

    Attributes:
      label_smoothing: the uniform share of the target distribution, in [0, 1).
      distillation_weight: the weight of the divergence from the teacher, in [0, 1]; the cross
        entropy of the targets has the rest. Above 0 a teacher is needed.
      divergence: from the teacher's next-token distribution to the student's: "forward_kl",
        "reverse_kl", "jsd" or "total_variation" (see `specjax.training.divergences`).
      jsd_beta: β of "jsd", in (0, 1).

    Raises:
      TypeError: for a value that is not a number.
      ValueError: for a value outside its range.
    """

    label_smoothing: float = 0.1
    distillation_weight: float = 0.0
    divergence: str = "forward_kl"
    jsd_beta: float = 0.5

    def __post_init__(self) -> None:
        for name in ("label_smoothing", "distillation_weight"):
            closed = name == "distillation_weight"
            value = getattr(self, name)
            checked(f"Objective: {name}", value, low=0.0, high=1.0, open_high=not closed)
        ends = {"open_low": True, "open_high": True}
        checked("Objective: jsd_beta", self.jsd_beta, low=0.0, high=1.0, **ends)
        if self.divergence not in DIVERGENCES:
            raise ValueError(
                f"Objective: divergence must be one of {', '.join(DIVERGENCES)}, got "
                f"{self.divergence!r}"
            )

    def per_token(self, logits: Array, targets: Array, teacher_logits: Array | None) -> Array:
        """The mix of both losses.

        Args:
          logits: `[B, T, V]` float32.
          targets: `[B, T]` int32.
          teacher_logits: `[B, T, V]` float32; None where the weight is 0.

        Returns:
          `[B, T]` float32, in nats (a total variation has no unit).
        """
        weight = self.distillation_weight
        loss = jnp.zeros(targets.shape, jnp.float32)
        if weight < 1.0:
            loss = (1.0 - weight) * cross_entropy(logits, targets, self.label_smoothing)
        if weight > 0.0:
            assert teacher_logits is not None
            options = {"beta": self.jsd_beta} if self.divergence == "jsd" else {}
            divergence = DIVERGENCES[self.divergence](logits, teacher_logits, **options)
            loss = loss + weight * divergence
        return loss


def cross_entropy(logits: Array, targets: Array, label_smoothing: float = 0.0) -> Array:
    """-log q of the targets, mixed with its mean over the vocabulary.

    Args:
      logits: `[B, T, V]` float32.
      targets: `[B, T]` int32.
      label_smoothing: the share of the uniform distribution in the target, in [0, 1).

    Returns:
      `[B, T]` float32, in nats.

    Source: Szegedy et al. 2016.
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    loss = normaliser - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if label_smoothing:
        uniform = normaliser - jnp.mean(logits, axis=-1)
        loss = (1.0 - label_smoothing) * loss + label_smoothing * uniform
    return loss


def masked_total(values: Array, mask: Array) -> Total:
    """The sum of `values [B, T]` where `mask [B, T]` is true, and in how many places it is."""
    return Total(jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask.astype(jnp.int32)))


def token_totals(logits: Array, targets: Array, mask: Array) -> dict[str, Total]:
    """Validation figures of known targets: plain cross entropy and greedy accuracy.

    Args:
      logits: `[B, T, V]` float32.
      targets: `[B, T]` int32.
      mask: `[B, T]` bool, which targets count.

    Returns:
      "loss", in nats, and "accuracy", the tokens whose logit is the largest.
    """
    correct = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    return {
        "loss": masked_total(cross_entropy(logits, targets), mask),
        "accuracy": masked_total(correct, mask),
    }
