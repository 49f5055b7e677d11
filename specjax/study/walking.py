"""Rounds of drafting and verification along known texts, without decoding.

Given the emitted text y_1, y_2, ..., which follows pi, drafted tokens are accepted independently:
token verification accepts y_i with probability min(1, q / pi), block verification with
min(1, q / (P pi)), where P is P_{i-1} of the text itself. So the rounds are a Markov chain along
the text.

For block verification: a draft begins with y_1 .. y_i and is accepted so far with probability
q(y_1) .. q(y_i) P_i; the next emitted token is then drawn from pi, for min(q, P pi) + (P pi - q)_+
= P pi.

Axes: S samples, n texts, N longest text, G longest draft.

Source: Leviathan et al. (arXiv 2211.17192); Sun et al., Block Verification (ICLR 2025).
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Walked:
    """Expectations over the rounds that emit texts.

    Attributes:
      rounds: `[n]` the number of rounds of each text.
      drafted: `[G + 1]` probabilities that a round's draft has 0, 1, ... tokens.
      whole: the probability that a round's whole draft is accepted.
    """

    rounds: np.ndarray  # [n]
    drafted: np.ndarray  # [G + 1]
    whole: float


def walk(ratios: np.ndarray, ends: np.ndarray, lengths: np.ndarray, *, block: bool) -> Walked:
    """Walks along texts.

    Args:
      ratios: `[S, n, N]` pi(y) / q(y) of the emitted token at each position; infinite if q is 0.
      ends: `[n]` the lengths of the texts, at most N.
      lengths: `[n, N]` the length of a draft that begins at each position, at most G.
      block: whether to use block verification, otherwise token verification.

    Returns:
      The expectations, averaged over the samples.
    """
    law = _accepted(ratios, lengths, int(lengths.max(initial=0)), block=block)
    at_end = np.broadcast_to(lengths, ratios.shape)[..., None]
    return follow(law, ends, lengths, np.take_along_axis(law, at_end, axis=3)[..., 0])


def follow(law: np.ndarray, ends: np.ndarray, lengths: np.ndarray, whole: np.ndarray) -> Walked:
    """Walks along texts by the law of the rounds that begin at each position.

    Args:
      law: `[S, n, N, D + 1]` the probabilities of 0, 1, ... accepted tokens.
      ends: see `walk`.
      lengths: `[n, N]` the number of drafted tokens.
      whole: `[S, n, N]` the probability that the drafter must read the last accepted token.

    Returns:
      The expectations, averaged over the samples.
    """
    samples, texts, width, longest = *law.shape[:3], law.shape[3] - 1
    visits = np.zeros((samples, texts, width + longest + 1))
    visits[:, :, 0] = 1.0
    inside = np.arange(width)[None] < ends[:, None]
    for t in range(width):
        visits[:, :, t] *= inside[:, t]
        visits[:, :, t + 1 : t + 2 + longest] += visits[:, :, t, None] * law[:, :, t]
    visits = visits[:, :, :width]
    total = visits.sum()
    drafted = np.bincount(lengths.ravel(), visits.mean(axis=0).ravel())
    return Walked(
        rounds=visits.sum(axis=2).mean(axis=0),
        drafted=drafted / drafted.sum(),
        whole=float((visits * whole).sum() / total),
    )


def _accepted(ratios: np.ndarray, lengths: np.ndarray, longest: int, *, block: bool) -> np.ndarray:
    """`[S, n, N, G + 1]` P(0, 1, ... accepted tokens) of a draft from each position."""
    # Ratios past the end of a text have no effect.
    finite = np.clip(ratios.astype(np.float64), 1e-30, 1e30)
    padded = np.pad(finite, ((0, 0), (0, 0), (0, longest)), constant_values=1.0)
    width = ratios.shape[2]
    law = np.zeros((*ratios.shape, longest + 1))
    stands, joint = np.ones(ratios.shape), np.ones(ratios.shape)
    for i in range(longest):
        ratio = padded[:, :, i : i + width]
        if block:
            scaled = joint * ratio
            joint = np.minimum(scaled, 1.0)
        else:
            scaled = ratio
        longer = stands / np.maximum(scaled, 1.0) * (lengths > i)
        law[..., i] = stands - longer
        stands = longer
    law[..., longest] = stands
    return law
