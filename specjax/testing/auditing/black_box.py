"""The law of a verifier that draws its own random numbers, from samples.

An e-process E_n = sum_j w_j prod_t A_j(x_t) / P(x_t) has an expected value of at most 1 if P is the
law, whenever one looks: so P(sup E >= 1 / alpha) <= alpha. A_j are the laws of the known bugs, and
Krichevsky-Trofimov estimates that learn the law as they go, shrunk to P.

Axes: n samples, K outcomes.
"""

import importlib
import math
from typing import Any

import numpy as np

from specjax.testing.auditing.calling import Calling
from specjax.testing.auditing.case_laws import AuditClock, CaseLaw
from specjax.testing.auditing.criterion import Outcomes, joint_law
from specjax.testing.auditing.hard_cases import HardCase
from specjax.testing.auditing.injected import outcomes_of
from specjax.testing.auditing.known_bugs import bug_laws

_SHRUNK = (1.0, 0.3, 0.05)
_BATCH = 1000


def generator_of(arrays: str, seed: int) -> Any:
    """The random generator of a library: NumPy's, PyTorch's, or a key of JAX."""
    if arrays == "torch":
        return importlib.import_module("torch").Generator().manual_seed(seed)
    if arrays == "jax":
        return importlib.import_module("jax").random.key(seed)
    return np.random.default_rng(seed)


def sampled_law(
    calling: Calling,
    case: HardCase,
    drafts: str,
    rng: np.random.Generator,
    clock: AuditClock,
    *,
    samples: int,
) -> CaseLaw:
    """Draws drafts and calls the verifier; rows after the case's other rows.

    Raises:
      BadOutcomeError: the function raises, or its result cannot be read.
      OutOfTimeError: the time is spent.
    """
    blocks, weights = case.blocks(drafts)
    if not case.law:
        samples = min(samples, 1024)
    draft = rng.choice(len(blocks), size=samples, p=weights / weights.sum())
    batch = min(_BATCH, max(1, 4_000_000 // (case.vocab * (case.max_draft + 1))))
    size = batch if calling.is_batched else 1
    codes = []
    generator = generator_of(calling.arrays, int(rng.integers(2**31)))
    for start in range(0, samples, size):
        now = draft[start : start + size]
        rows = case.rows(blocks[now], rng.random((len(now), case.length + 1)))
        if calling.is_batched:
            rows = case.with_others(rows, float(rng.random()))
        if calling.arrays == "jax" and "generator" in calling.takes:
            generator = generator_of("jax", int(rng.integers(2**31)))
        codes.append(calling.outcomes(rows, generator)[-len(now) :])
        clock.count(len(now))
    found = np.concatenate(codes)
    outcomes = outcomes_of(case, blocks, draft, found, np.full(samples, 1.0 / samples))
    return CaseLaw(outcomes, None, None, samples)


def half_width(target: tuple[np.ndarray, ...], samples: int, level: float) -> float:
    """How far an estimated total variation may be from the true one, with chance 1 - level."""
    cells = target[0].shape[-1] ** len(target)
    return 0.5 * math.sqrt((cells - 1) / samples) + math.sqrt(math.log(2 / level) / (2 * samples))


def log10_evidence(
    case: HardCase, target: tuple[np.ndarray, ...], outcomes: Outcomes, drafts: str
) -> float:
    """The logarithm to base 10 of the largest E; infinite for an impossible text.

    A sample is the emitted text, completed by the target's own tokens to L + 1.
    """
    null = joint_law(target)
    at = _texts(case, target, outcomes)
    chance = null.reshape(-1)[at]
    if (chance == 0.0).any() or (outcomes.following < 0).any():
        return math.inf
    logs = []
    for law in bug_laws(case, target, drafts).values():
        with np.errstate(divide="ignore"):
            logs.append(np.cumsum(np.log(law.reshape(-1)[at]) - np.log(chance)))
    cells = int((null > 0.0).sum())
    learnt = (_earlier(at) + 0.5) / (np.arange(len(at)) + 0.5 * cells)
    for share in _SHRUNK:
        logs.append(np.cumsum(np.log(share * learnt + (1.0 - share) * chance) - np.log(chance)))
    total = np.logaddexp.reduce(np.stack(logs), axis=0) - math.log(len(logs))
    return float(total.max() / math.log(10.0))


def _earlier(values: np.ndarray) -> np.ndarray:
    """How often each value occurred before; `[n]`."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    found = np.empty(len(values), np.int64)
    found[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return found


def _texts(case: HardCase, target: tuple[np.ndarray, ...], outcomes: Outcomes) -> np.ndarray:
    """The number of each sample's text of L + 1 tokens, `[n]`."""
    rng = np.random.default_rng(0)
    count, length = len(outcomes.accepted), case.length + 1
    texts = np.zeros((count, length), np.int64)
    for i in range(length):
        p = target[i][tuple(texts[:, :i].T)].reshape(-1, case.vocab)
        p = np.broadcast_to(p, (count, case.vocab))
        drawn = (np.cumsum(p, axis=1) <= rng.random((count, 1)) * p.sum(1, keepdims=True)).sum(1)
        drafted = outcomes.draft[:, i] if i < length - 1 else drawn
        own = np.where(outcomes.accepted == i, np.maximum(outcomes.following, 0), drafted)
        texts[:, i] = np.where(outcomes.accepted >= i, own, drawn)
    return texts @ (case.vocab ** np.arange(length)[::-1])
