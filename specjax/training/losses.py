"""Losses per target token: cross entropy, and divergences from a teacher.

p is the teacher's next-token distribution, q the student's, both the softmax of logits. No gradient
flows into the teacher. A divergence is 0 if the distributions are equal, else above 0; Zhou et al.
2024 (DistillSpec) compare them for drafters.

Axes: B rows, T target tokens, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from specjax.checks import check_number
from specjax.errors import UserError

Logits = Float32[Array, "*B V"]
Losses = Float32[Array, "*B"]
# The names of `token_totals`.
FIGURES = ("loss", "accuracy")


class Total(NamedTuple):
    """A sum over the items of a batch, such as target tokens, and their number."""

    sum: Float32[Array, ""]
    items: Int32[Array, ""]


def forward_kl(logits: Logits, teacher_logits: Logits) -> Losses:
    """KL(p || q) = Σ p log(p / q), in nats: q must be large wherever p is.

    Source: Kim and Rush 2016, word-level knowledge distillation.
    """
    p, q = _log_probabilities(logits, teacher_logits)
    return _kl(p, q)


def reverse_kl(logits: Logits, teacher_logits: Logits) -> Losses:
    """KL(q || p) = Σ q log(q / p), in nats: q must be small wherever p is.

    Source: Zhou et al. 2024; Gu et al. 2024 (MiniLLM).
    """
    p, q = _log_probabilities(logits, teacher_logits)
    return _kl(q, p)


def jensen_shannon(logits: Logits, teacher_logits: Logits, beta: float = 0.5) -> Losses:
    """β KL(p || m) + (1 - β) KL(q || m) with m = β p + (1 - β) q, in nats.

    Divided by β it tends to KL(p || q) as β goes to 0; divided by 1 - β, to KL(q || p) as β goes
    to 1. It is at most log 2 at β = 0.5.

    Source: Agarwal et al. 2024 (GKD), equation 1; Zhou et al. 2024.
    """
    p, q = _log_probabilities(logits, teacher_logits)
    mixture = jnp.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return beta * _kl(p, mixture) + (1.0 - beta) * _kl(q, mixture)


def total_variation(logits: Logits, teacher_logits: Logits) -> Losses:
    """Σ |p - q| / 2, in [0, 1]: the probability that a drafted token is rejected.

    Source: Leviathan et al. 2023, theorem 3.5 (the acceptance is 1 minus it); Zhou et al. 2024.
    """
    p, q = _log_probabilities(logits, teacher_logits)
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(p) - jnp.exp(q)), axis=-1)


def negative_log_acceptance(logits: Logits, teacher_logits: Logits) -> Losses:
    """-log Σ min(p, q), in nats: minus the logarithm of the chance that a token is accepted.

    Its gradient is that of `total_variation` divided by the acceptance, so that it does not vanish
    where almost every token is rejected. It is taken from logarithms, and no entry exceeds 1.

    Source: Samarin et al. 2026 (LK losses, arXiv 2602.23881), the likelihood-based loss.
    """
    p, q = _log_probabilities(logits, teacher_logits)
    return -jax.nn.logsumexp(jnp.minimum(p, q), axis=-1)


def lk_hybrid(logits: Logits, teacher_logits: Logits, eta: float = 3.0) -> Losses:
    """λ KL(p || q) + (1 - λ) Σ |p - q| / 2 with λ = exp(-η a), a the token's acceptance.

    It is KL where almost every token is rejected, and tends to the total variation as the student
    learns. No gradient flows through λ.

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
    # A KL of a token that the other one lacks is then 1e30 times its probability, not infinite.
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
    """

    label_smoothing: float = 0.1
    distillation_weight: float = 0.0
    divergence: str = "forward_kl"
    jsd_beta: float = 0.5
    lk_eta: float = 3.0

    def __post_init__(self) -> None:
        spans: dict[str, dict[str, Any]] = {
            "label_smoothing": {"high": 1.0, "open_high": True},
            "distillation_weight": {"high": 1.0},
            "jsd_beta": {"high": 1.0, "open_low": True, "open_high": True},
            "lk_eta": {"open_high": True},
        }
        for name, span in spans.items():
            check_number(f"Objective: {name}", getattr(self, name), low=0.0, **span)
        if self.divergence not in DIVERGENCES:
            raise UserError(
                f"Objective: divergence must be one of {', '.join(DIVERGENCES)}, got "
                f"{self.divergence!r}"
            )

    def per_token(
        self,
        logits: Float32[Array, "B T V"],
        targets: Int32[Array, "B T"],
        teacher_logits: Float32[Array, "B T V"] | None,
    ) -> Float32[Array, "B T"]:
        """The mix of both losses; `teacher_logits` may be None if their weight is 0."""
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


def cross_entropy(
    logits: Float32[Array, "B T V"], targets: Int32[Array, "B T"], label_smoothing: float = 0.0
) -> Float32[Array, "B T"]:
    """-log q of the targets in nats, of which a share is its mean over the vocabulary.

    Source: Szegedy et al. 2016.
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    loss = normaliser - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if label_smoothing:
        uniform = normaliser - jnp.mean(logits, axis=-1)
        loss = (1.0 - label_smoothing) * loss + label_smoothing * uniform
    return loss


def masked_total(values: Float32[Array, "*B"], mask: Bool[Array, "*B"]) -> Total:
    """The sum of values where the mask is true, and the number of these places."""
    return Total(jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask.astype(jnp.int32)))


def token_totals(
    logits: Float32[Array, "B T V"], targets: Int32[Array, "B T"], mask: Bool[Array, "B T"]
) -> dict[str, Total]:
    """Validation figures of known targets: plain cross entropy and greedy accuracy."""
    correct = (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)
    return {
        "loss": masked_total(cross_entropy(logits, targets), mask),
        "accuracy": masked_total(correct, mask),
    }
