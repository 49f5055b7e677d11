"""What one round of verification emits, and how far that is from what it must emit.

One round is followed by the target itself. If the law of L + 1 tokens is then the target's own,
all rounds are exact, and only then (for a verifier without a carry).

Axes: K outcomes, L drafted tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int

from specjax.testing.auditing.hard_cases import HardCase
from specjax.testing.auditing.score_sheet import SheetRow
from specjax.testing.enumeration import total_variation
from specjax.types import Rule


class Outcomes(NamedTuple):
    """What a verifier did with each draft.

    Attributes:
      draft: the drafted tokens.
      accepted: how many of them were accepted.
      following: the next token; -1 if the outcome is invalid.
      weight: the probability of the draft and of this outcome.
    """

    draft: Int[np.ndarray, "K L"]
    accepted: Int[np.ndarray, " K"]
    following: Int[np.ndarray, " K"]
    weight: Float64[np.ndarray, " K"]


def outcomes_of(
    case: HardCase, blocks: np.ndarray, draft: np.ndarray, codes: np.ndarray, weight: np.ndarray
) -> Outcomes:
    """Codes (accepted * V + next token, negative if invalid) as outcomes."""
    valid = codes >= 0
    accepted = np.where(valid, codes // case.vocab, 0)
    following = np.where(valid, codes % case.vocab, -1)
    return Outcomes(blocks[draft], accepted, following, weight)


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
    case: HardCase, target: Sequence[np.ndarray], outcomes: Outcomes, tolerance: float
) -> SheetRow:
    """The scores of the emitted law against the target's."""
    law, wanted = emitted(outcomes, target), joint_law(target)
    lost = float(outcomes.weight[outcomes.following < 0].sum())
    first = 0
    for k in range(1, law.ndim + 1):
        axes = tuple(range(k, law.ndim))
        if total_variation(law.sum(axis=axes), wanted.sum(axis=axes)) > tolerance:
            first = k
            break
    return SheetRow(
        case.name,
        case.length,
        case.vocab,
        variation=total_variation(law, wanted) + 0.5 * lost,
        impossible=float(law[wanted == 0.0].sum()),
        lost=lost,
        accepted=float((outcomes.accepted * outcomes.weight)[outcomes.following >= 0].sum()),
        first_wrong=first,
    )


def impossible_mass(
    case: HardCase, target: tuple[np.ndarray, ...], outcomes: Outcomes
) -> tuple[float, int]:
    """The weight, and the number, of outcomes with a token that the target cannot emit, or none."""
    wrong = outcomes.following < 0
    for n in range(case.length + 1):
        now = (outcomes.accepted == n) & (outcomes.following >= 0)
        draft, token = outcomes.draft[now], outcomes.following[now]
        bad = target[n][(*draft[:, :n].T, token)] == 0.0
        for i in range(n):
            bad |= target[i][tuple(draft[:, : i + 1].T)] == 0.0
        wrong[now] = bad
    return float(outcomes.weight[wrong].sum()), int(wrong.sum())


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
