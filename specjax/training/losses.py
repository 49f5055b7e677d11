"""Teacher-forced losses per target token.

Axes: B rows, T target tokens, V vocabulary.
"""

import jax
import jax.numpy as jnp

from specjax.types import Array


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


def distillation_loss(logits: Array, teacher_logits: Array) -> Array:
    """KL(teacher || student) of each next-token distribution.

    Args:
      logits: `[B, T, V]` float32, the student's.
      teacher_logits: `[B, T, V]` float32; no gradient flows into them.

    Returns:
      `[B, T]` float32, in nats.

    Source: Kim and Rush 2016, word-level knowledge distillation.
    """
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits), axis=-1)
    student = jax.nn.log_softmax(logits, axis=-1)
    return jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)


def masked_mean(values: Array, mask: Array) -> Array:
    """The mean of `values [B, T]` where `mask [B, T]` is true; 0 where it never is."""
    total = jnp.sum(jnp.where(mask, values, 0.0))
    return total / jnp.maximum(jnp.sum(mask.astype(jnp.float32)), 1.0)
