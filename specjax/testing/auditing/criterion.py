"""What one round of verification emits, and how far that is from what it must emit.

One round is followed by the target itself. If the law of L + 1 tokens is then the target's own,
all rounds are exact, and only then (for a verifier without a carry).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.testing.auditing.hard_cases import HardCase
from specjax.testing.auditing.score_sheet import SheetRow
from specjax.testing.enumeration import total_variation
from specjax.types import Rule


class Outcomes(NamedTuple):
    """What a verifier did with each draft; K entries.

    Attributes:
      draft: `[K, L]`, the drafted tokens.
      accepted: `[K]`, how many of them were accepted.
      following: `[K]`, the next token; -1 if the outcome is invalid.
      weight: `[K]`, the probability of the draft and of this outcome.
    """

    draft: np.ndarray  # [K, L]
    accepted: np.ndarray  # [K]
    following: np.ndarray  # [K]
    weight: np.ndarray  # [K]


def emitted(outcomes: Outcomes, target: Sequence[np.ndarray]) -> np.ndarray:
    """The law of L + 1 tokens: a round's, then the target's; its sum is below 1 by invalid ones."""
    length, vocab = len(target) - 1, target[0].shape[-1]
    partial = [np.zeros((vocab,) * (depth + 1)) for depth in range(length + 1)]
    valid = outcomes.following >= 0
    for n in range(length + 1):
        now = valid & (outcomes.accepted == n)
        index = (*outcomes.draft[now, :n].T, outcomes.following[now])
        np.add.at(partial[n], index, outcomes.weight[now])
    law = partial[0]
    for depth in range(1, length + 1):
        law = partial[depth] + law[..., None] * target[depth]
    return law


def joint_law(target: Sequence[np.ndarray]) -> np.ndarray:
    """The target's own law of L + 1 tokens."""
    law = target[0]
    for table in target[1:]:
        law = law[..., None] * table
    return law


def score(
    case: HardCase,
    target: Sequence[np.ndarray],
    outcomes: Outcomes,
    tolerance: float,
    drafts: str = "drawn",
) -> tuple[np.ndarray, SheetRow]:
    """Compares what a verifier emitted with the target.

    Returns:
      The law of the emitted tokens, `[V] * (L + 1)` float64, and its scores.
    """
    law, wanted = emitted(outcomes, target), joint_law(target)
    lost = float(outcomes.weight[outcomes.following < 0].sum())
    first = 0
    for k in range(1, law.ndim + 1):
        axes = tuple(range(k, law.ndim))
        if total_variation(law.sum(axis=axes), wanted.sum(axis=axes)) > tolerance:
            first = k
            break
    token, block = best_accepted(case, law, drafts)
    row = SheetRow(
        case.name,
        case.length,
        case.vocab,
        variation=total_variation(law, wanted) + 0.5 * lost,
        divergence=divergence(law, wanted) / law.ndim,
        impossible=float(law[wanted == 0.0].sum()),
        lost=lost,
        accepted=float((outcomes.accepted * outcomes.weight)[outcomes.following >= 0].sum()),
        token=token,
        block=block,
        first_wrong=first,
    )
    return law, row


def divergence(law: np.ndarray, wanted: np.ndarray) -> float:
    """KL(law || wanted) in nats; infinite if `wanted` lacks a part of more than 1e-12."""
    possible = law > 0.0
    if law[possible & (wanted == 0.0)].sum() > 1e-12:
        return float("inf")
    both = possible & (wanted > 0.0)
    return max(0.0, float((law[both] * np.log(law[both] / wanted[both])).sum()))


def best_accepted(case: HardCase, law: np.ndarray, drafts: str) -> tuple[float, float]:
    """E[number accepted] of `Token` and of `Block` for a law's own conditionals."""
    tokens, weights = case.blocks(drafts)
    token, block = weights.copy(), np.ones(len(weights))
    means = np.zeros(2)
    for i in range(case.length):
        before = law.sum(axis=tuple(range(i + 1, law.ndim)))
        index, full = tuple(tokens[:, :i].T), tuple(tokens[:, : i + 1].T)
        mass = np.broadcast_to(before.sum(axis=-1)[index], len(tokens))
        known = mass > 1e-300
        own = np.where(known, before[full] / np.where(known, mass, 1.0), case.target[i][full])
        ratio = own / case.draft[i][full]
        token = token * np.minimum(ratio, 1.0)
        block = np.minimum(block * ratio, 1.0)
        means += token.sum(), (weights * block).sum()
    return float(means[0]), float(means[1])


def declared_target(case: HardCase, rule: Rule | None) -> tuple[np.ndarray, ...]:
    """The distributions that must be emitted: p, or a rule's at the drafted positions.

    The bonus token's is p, for a verifier that follows a rule too: it does not get q there.
    """
    if rule is None:
        return case.target
    tables = []
    for q, p in zip(case.draft, case.target[:-1], strict=True):
        flat = [jnp.asarray(x.reshape(-1, x.shape[-1]), jnp.float32) for x in (q, p)]
        pi = np.asarray(jax.vmap(lambda a, b: rule(a, b, a, b))(*flat), np.float64)
        tables.append((pi / pi.sum(axis=-1, keepdims=True)).reshape(q.shape))
    return (*tables, case.target[-1])
