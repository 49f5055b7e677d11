"""Divergences of a student's next-token distributions from its teacher's.

p is the teacher's distribution, q the student's, both the softmax of logits. Each function takes
logits `[..., V]` float32 and returns `[...]` float32; no gradient flows into the teacher's. Each is
0 where the distributions are equal, and above 0 elsewhere.

Zhou et al. 2024 (DistillSpec) compare them for drafters.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.types import Array


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


# By the names that an `Objective` takes; "jsd" takes its β too.
DIVERGENCES: dict[str, Callable[..., Array]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "total_variation": total_variation,
}


def _log_probabilities(logits: Array, teacher_logits: Array) -> tuple[Array, Array]:
    """The logarithms of p and q."""
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits), axis=-1)
    return teacher, jax.nn.log_softmax(logits, axis=-1)


def _kl(a: Array, b: Array) -> Array:
    """Σ a log(a / b) of log-probabilities."""
    return jnp.sum(jnp.exp(a) * (a - b), axis=-1)
