"""Losses per target token: cross entropy, and divergences from a teacher.

p is the teacher's next-token distribution, q the student's, both the softmax of logits. No gradient
flows into the teacher. A divergence is 0 if the distributions are equal, else above 0; Zhou et al.
2024 (DistillSpec) compare them for drafters.

Axes: B rows, T target tokens, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import checked
from specjax.errors import UserError
from specjax.types import Array

# The names of `token_totals`.
FIGURES = ("loss", "accuracy")


class Total(NamedTuple):
    """A sum over the items of a batch, such as target tokens.

    Attributes:
      sum: scalar float32.
      items: scalar int32, the number of items.
    """

    sum: Array
    items: Array


def forward_kl(logits: Array, teacher_logits: Array) -> Array:
    """KL(p || q) = Σ p log(p / q), in nats: q must be large wherever p is.

    Args:
      logits: `[..., V]` float32, the student's.
      teacher_logits: `[..., V]` float32.

    Returns:
      `[...]` float32.

    Source: Kim and Rush 2016, word-level knowledge distillation.
    """
    p, q = _log_probabilities(logits, teacher_logits)
    return _kl(p, q)


def reverse_kl(logits: Array, teacher_logits: Array) -> Array:
    """KL(q || p) = Σ q log(q / p), in nats: q must be small wherever p is.

    Args:
      logits: `[..., V]` float32, the student's.
      teacher_logits: `[..., V]` float32.

    Returns:
      `[...]` float32.

    Source: Zhou et al. 2024; Gu et al. 2024 (MiniLLM).
    """
    p, q = _log_probabilities(logits, teacher_logits)
    return _kl(q, p)


def jensen_shannon(logits: Array, teacher_logits: Array, beta: float = 0.5) -> Array:
    """β KL(p || m) + (1 - β) KL(q || m) with m = β p + (1 - β) q, in nats.

    Divided by β it tends to KL(p || q) as β goes to 0; divided by 1 - β, to KL(q || p) as β goes
    to 1. It is at most log 2 at β = 0.5.

    Args:
      logits: `[..., V]` float32, the student's.
      teacher_logits: `[..., V]` float32.
      beta: β, in (0, 1).

    Returns:
      `[...]` float32.

    Source: Agarwal et al. 2024 (GKD), equation 1; Zhou et al. 2024.
    """
    p, q = _log_probabilities(logits, teacher_logits)
    mixture = jnp.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * _kl(p, mixture) + (1.0 - beta) * _kl(q, mixture)


def total_variation(logits: Array, teacher_logits: Array) -> Array:
    """Σ |p - q| / 2, in [0, 1]: the probability that a drafted token is rejected.

    Args:
      logits: `[..., V]` float32, the student's.
      teacher_logits: `[..., V]` float32.

    Returns:
      `[...]` float32.

    Source: Leviathan et al. 2023, theorem 3.5 (the acceptance is 1 minus it); Zhou et al. 2024.
    """
    p, q = _log_probabilities(logits, teacher_logits)
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=-1)


def negative_log_acceptance(logits: Array, teacher_logits: Array) -> Array:
    """-log Σ min(p, q), in nats: minus the logarithm of the chance that a token is accepted.

    Its gradient is that of `total_variation` divided by the acceptance, so that it does not vanish
    where almost every token is rejected. It is taken from logarithms, and no entry exceeds 1.

    Args:
      logits: `[..., V]` float32, the student's.
      teacher_logits: `[..., V]` float32.

    Returns:
      `[...]` float32.

    Source: Samarin et al. 2026 (LK losses, arXiv 2602.23881), the likelihood-based loss.
    """
    p, q = _log_probabilities(logits, teacher_logits)
    return -jax.nn.logsumexp(jnp.minimum(p, q), axis=-1)


def lk_hybrid(logits: Array, teacher_logits: Array, eta: float = 3.0) -> Array:
    """λ KL(p || q) + (1 - λ) Σ |p - q| / 2 with λ = exp(-η a), a the token's acceptance.

    It is KL where almost every token is rejected, and tends to the total variation as the student
    learns. No gradient flows through λ.

    Args:
      logits: `[..., V]` float32, the student's.
      teacher_logits: `[..., V]` float32.
      eta: η, at least 0; at 0 it is KL(p || q).

    Returns:
      `[...]` float32.

    Source: Samarin et al. 2026 (LK losses, arXiv 2602.23881), the hybrid loss, with its η.
    """
    distance = total_variation(logits, teacher_logits)
    weight = jnp.exp(-eta * jax.lax.stop_gradient(1.0 - distance))
    return weight * forward_kl(logits, teacher_logits) + (1.0 - weight) * distance


# By the names that an `Objective` takes; "jsd" takes its β too, "lk_hybrid" its η.
DIVERGENCES: dict[str, Callable[..., Array]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "total_variation": total_variation,
    "lk": negative_log_acceptance,
    "lk_hybrid": lk_hybrid,
}


def _log_probabilities(logits: Array, teacher_logits: Array) -> tuple[Array, Array]:
    """The logarithms of p and q; -1e30 for impossible tokens, which both may have."""
    both = jax.lax.stop_gradient(teacher_logits), logits
    p, q = (jnp.maximum(jax.nn.log_softmax(x, axis=-1), -1e30) for x in both)
    return p, q


def _kl(a: Array, b: Array) -> Array:
    """Σ a log(a / b) of log-probabilities."""
    return jnp.sum(jnp.exp(a) * (a - b), axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss per target token.

    Attributes:
      label_smoothing: the uniform share of the target distribution, in [0, 1).
      distillation_weight: the weight of the divergence from the teacher, in [0, 1]; the cross
        entropy of the targets has the rest. A weight above 0 needs a teacher.
      divergence: from the teacher's next-token distribution to the student's: a name
        of `DIVERGENCES` (see its functions).
      jsd_beta: β of "jsd", in (0, 1).
      lk_eta: η of "lk_hybrid", at least 0.

    Raises:
      TypeError: for a value that is not a number.
      ValueError: for a value outside its range.
    """

    label_smoothing: float = 0.1
    distillation_weight: float = 0.0
    divergence: str = "forward_kl"
    jsd_beta: float = 0.5
    lk_eta: float = 3.0

    def __post_init__(self) -> None:
        for name in ("label_smoothing", "distillation_weight"):
            closed = name == "distillation_weight"
            value = getattr(self, name)
            checked(f"Objective: {name}", value, low=0.0, high=1.0, open_high=not closed)
        ends = {"open_low": True, "open_high": True}
        checked("Objective: jsd_beta", self.jsd_beta, low=0.0, high=1.0, **ends)
        checked("Objective: lk_eta", self.lk_eta, low=0.0, open_high=True)
        if self.divergence not in DIVERGENCES:
            raise UserError(
                f"Objective: divergence must be one of {', '.join(DIVERGENCES)}, got "
                f"{self.divergence!r}"
            )

    def per_token(self, logits: Array, targets: Array, teacher_logits: Array | None) -> Array:
        """The mix of both losses.

        Args:
          logits: `[B, T, V]` float32.
          targets: `[B, T]` int32.
          teacher_logits: `[B, T, V]` float32; None if the weight is 0.

        Returns:
          `[B, T]` float32, in nats (a total variation has no unit).
        """
        weight = self.distillation_weight
        loss = jnp.zeros(targets.shape, jnp.float32)
        if weight < 1.0:
            loss = (1.0 - weight) * cross_entropy(logits, targets, self.label_smoothing)
        if weight > 0.0:
            assert teacher_logits is not None
            options = {"jsd": {"beta": self.jsd_beta}, "lk_hybrid": {"eta": self.lk_eta}}
            own = options.get(self.divergence, {})
            divergence = DIVERGENCES[self.divergence](logits, teacher_logits, **own)
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
    """The sum of `values [B, T]` where `mask [B, T]` is true, and the number of these places."""
    return Total(jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask.astype(jnp.int32)))


def token_totals(logits: Array, targets: Array, mask: Array) -> dict[str, Total]:
    """Validation figures of known targets: plain cross entropy and greedy accuracy.

    Args:
      logits: `[B, T, V]` float32.
      targets: `[B, T]` int32.
      mask: `[B, T]` bool, true for targets that count.

    Returns:
      "loss", in nats, and "accuracy", the tokens whose logit is the largest.
    """
    correct = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    return {
        "loss": masked_total(cross_entropy(logits, targets), mask),
        "accuracy": masked_total(correct, mask),
    }
