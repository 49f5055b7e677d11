"""The greedy oracle: drafts that end just before their first wrong token.

Axes: B rows, N longest output, G longest block.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.types import Array, DraftOutcome, Params, Stopping
from specjax.types.drafting import Drawn


@dataclasses.dataclass(frozen=True)
class GreedyOracle(Stopping):
    """Ends each draft just before the verifier would reject it; only for temperature 0.

    It discards no drafted token, and no policy needs fewer passes of the verifier: so it bounds the
    gain of policies. It needs the verifier's greedy output in advance: its parameters are the
    `agreeing_runs`, `[B, N + 1]` int32, of the decoded rows, in their order; slots must not be
    refilled. Above temperature 0 it is not a bound: other tokens are drawn.

    Source: SpecDec++ (arXiv 2405.19715), Lemma 2.1.
    """

    reads_past = True

    def remember(self, params: Params, rows: int, longest: int) -> Array:
        """The number of tokens that a row has emitted: 0."""
        return jnp.zeros((rows,), jnp.int32)

    def begin(
        self, params: Params, memory: Array, limits: Array, longest: int
    ) -> tuple[Array, Any]:
        """The number of tokens that agree from here."""
        place = jnp.minimum(memory, params.shape[1] - 1)
        runs = jnp.take_along_axis(params, place[:, None], axis=1)[:, 0]
        return jnp.minimum(limits, runs), ()

    def step(self, params: Params, state: Any, drawn: Drawn) -> tuple[Array, Any]:
        """Never stops within the limits."""
        return jnp.zeros(drawn.token.shape, bool), state

    def learn(self, memory: Array, state: Any, outcome: DraftOutcome) -> Array:
        """Counts the emitted tokens: the agreeing tokens, and a token of the verifier."""
        return memory + outcome.agreed + 1


def agreeing_runs(agrees: np.ndarray) -> np.ndarray:
    """The number of tokens from each place on that agree without a break.

    Args:
      agrees: `[B, N]` bool: whether the drafter's greedy token at each place of the verifier's
        greedy output, given that output before it, is the verifier's own.

    Returns:
      `[B, N + 1]` int32; the last column is 0.
    """
    agrees = np.asarray(agrees, bool)
    runs = np.zeros((agrees.shape[0], agrees.shape[1] + 1), np.int32)
    for i in range(agrees.shape[1] - 1, -1, -1):
        runs[:, i] = np.where(agrees[:, i], runs[:, i + 1] + 1, 0)
    return runs
