"""How many of a row's drafted tokens were accepted lately.

Axes: B rows, G longest block.
"""

from typing import NamedTuple

import jax.numpy as jnp

from specjax.types import Array, DraftOutcome

# What a round before counts beside the present one: some ten tokens.
KEPT = 0.9
# Where a row starts: high, for a draft that is not tried teaches nothing.
_START, _WEIGHT = 0.85, 2.0


class Rates(NamedTuple):
    """Sums over earlier rounds, older ones counting less.

    Attributes:
      accepted: `[B]` float32, drafted tokens that stood.
      judged: `[B]` float32, drafted tokens whose fate is known.
    """

    accepted: Array  # [B]
    judged: Array  # [B]


def no_rates(rows: int) -> Rates:
    """Those of rows that have drafted nothing."""
    zeros = jnp.zeros((rows,), jnp.float32)
    return Rates(zeros, zeros)


def acceptance(rates: Rates) -> Array:
    """The chance that a drafted token is accepted, `[B]` float32 in (0, 1).

    It returns to its start where nothing is drafted, so that a row tries again.
    """
    return (rates.accepted + _WEIGHT * _START) / (rates.judged + _WEIGHT)


def add_round(rates: Rates, outcome: DraftOutcome) -> Rates:
    """The sums after one more round."""
    stood = outcome.agreed.astype(jnp.float32)
    judged = stood + outcome.rejected.astype(jnp.float32)
    return Rates(KEPT * rates.accepted + stood, KEPT * rates.judged + judged)


def chances(rate: Array, longest: int) -> Array:
    """The chance that the next 1, 2, .. G tokens are all accepted: `[B, G]` float32."""
    place = jnp.arange(1, longest + 1, dtype=jnp.float32)
    return rate[:, None] ** place[None]
