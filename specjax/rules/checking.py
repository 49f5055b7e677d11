"""Checks of rules that users write."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.compilation import jit
from specjax.errors import UserError
from specjax.rules.target import check_is_rule
from specjax.types import Rule

_TOLERANCE = 1e-4


def check_rule(rule: Rule, *, vocab_size: int = 8, positions: int = 32) -> None:
    """Checks that a rule returns distributions, on random inputs.

    Args:
      rule: the rule; if it has a strength per row, only the first is used.
      vocab_size: V of the distributions.
      positions: the number of random positions: flat or peaked, some with zeros.

    Raises:
      TypeError: it is not a rule, or reads a confidence that it does not declare.
      ValueError: the rule's target is not `[V]` float32, has a negative or NaN entry, or does not
        sum to 1. The message names the rule.
    """
    check_is_rule("rule", rule)
    name = type(rule).__name__
    single: Any = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1)[0], rule)
    rng = np.random.default_rng(0)
    scale = np.geomspace(0.1, 10.0, positions)[None, :, None]
    logits = rng.standard_normal((4, positions, vocab_size)) * scale
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[..., 0] = 0.0
    weights = np.exp(logits)
    q, p, q_conf, p_conf = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    # As in decoding: a confidence that a rule does not declare may be None.
    q_conf = q_conf if rule.reads_draft_confidence else None
    p_conf = p_conf if rule.reads_verifier_confidence else None
    try:
        target = np.asarray(_targets(single, q, p, q_conf, p_conf))
    except (AttributeError, TypeError) as error:
        if "NoneType" not in str(error) or (q_conf is not None and p_conf is not None):
            raise
        raise UserError(
            f"{name} failed ({' '.join(str(error).split())}): q_conf and p_conf may be None unless "
            "it sets reads_draft_confidence or reads_verifier_confidence = True"
        ) from error
    if target.shape != q.shape or target.dtype != np.float32:
        raise UserError(
            f"{name} must return a float32 distribution [V] per position, got {target.dtype} of "
            f"shape {list(target.shape[1:])}"
        )
    if not np.all(target >= 0.0):
        raise UserError(
            f"{name} must return no negative probability and no NaN: correct its formula"
        )
    sums = target.sum(axis=1)
    worst = float(sums[np.argmax(np.abs(sums - 1.0))])
    if abs(worst - 1.0) > _TOLERANCE:
        raise UserError(
            f"{name} must return distributions that sum to 1, got a sum of {worst:.6g}: "
            "normalise its target"
        )


@jit
def _targets(rule: Rule, *distributions: Any) -> Any:
    return jax.vmap(rule)(*distributions)
