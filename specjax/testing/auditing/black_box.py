"""The law of a verifier that draws its own random numbers, from samples."""

import importlib
import math
from typing import Any

import numpy as np

from specjax.testing.auditing.calling import Calling
from specjax.testing.auditing.criterion import outcomes_of
from specjax.testing.auditing.hard_cases import HardCase
from specjax.testing.auditing.injected import AuditClock, CaseLaw

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
    size = min(_BATCH, max(1, 4_000_000 // (case.vocab * (case.max_draft + 1))))
    codes = []
    generator = generator_of(calling.arrays, int(rng.integers(2**31)))
    for start in range(0, samples, size):
        now = draft[start : start + size]
        rows = case.rows(blocks[now], rng.random((len(now), case.length + 1)))
        rows = case.with_others(rows, float(rng.random()))
        if calling.arrays == "jax" and "generator" in calling.takes:
            generator = generator_of("jax", int(rng.integers(2**31)))
        codes.append(calling.outcomes(rows, generator)[-len(now) :])
        clock.count(len(now))
    shares = np.full(samples, 1.0 / samples)
    outcomes = outcomes_of(case, blocks, draft, np.concatenate(codes), shares)
    return CaseLaw(outcomes, samples=samples)


def half_width(target: tuple[np.ndarray, ...], samples: int, level: float) -> float:
    """How far an estimated total variation may be from the true one, with chance 1 - level.

    The mean of the empirical law's error over K texts is at most sqrt((K - 1) / n) / 2, and by
    McDiarmid's inequality it is not exceeded by much.
    """
    cells = target[0].shape[-1] ** len(target)
    return 0.5 * math.sqrt((cells - 1) / samples) + math.sqrt(math.log(2 / level) / (2 * samples))
