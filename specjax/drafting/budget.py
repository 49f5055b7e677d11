"""A stopping policy that spends a number of tokens per round over the rows of a batch.

Axes: B rows, G longest block.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.checks import whole_number
from specjax.drafting.estimates import Estimate, OnlineEstimate, given
from specjax.drafting.rates import Rates, acceptance, add_round, chances, no_rates
from specjax.drafting.thresholds import (
    OnEstimate,
    SurvivalState,
    ahead,
    begin_survival,
    judge,
)
from specjax.types import Array, DraftOutcome, Params, Stopping


class BudgetParams(NamedTuple):
    """Attributes: the tokens of a round (int32), and the estimate's parameters."""

    tokens: Any
    estimate: Params


class BudgetMemory(NamedTuple):
    """Attributes: the rows' rates of acceptance, and the estimate's memory."""

    rates: Rates
    estimate: Any


class Spending(NamedTuple):
    """Drafts that share a budget.

    Attributes:
      judged: under the estimate.
      limits: `[B]` int32.
      lengths: `[B]` int32, the tokens drafted so far.
      going: `[B]` bool.
      chances: `[B, G]` float32, of the next tokens.
      budget: `[B]` int32, the tokens that may be drafted in all rows together (one number).
    """

    judged: SurvivalState
    limits: Array  # [B]
    lengths: Array  # [B]
    going: Array  # [B]
    chances: Array  # [B, G]
    budget: Array  # [B]


@dataclasses.dataclass(frozen=True)
class Budget(OnEstimate):
    """Drafts the tokens of all rows that are most probably accepted, so many in a round.

    Before each token the chances of all that may still be drafted, `[B, G]`, are compared: those
    drawn are judged by the estimate, the others by their row's recent rate of acceptance. A row
    goes on while its next token is among the best that the budget still pays. So drafts shorten by
    themselves as the batch grows, and end at 0 where B reaches the budget. A row's decision reads
    other rows' drafts, which are independent of its own, so verification stays exact.

    Attributes:
      tokens: what the verifier is to read in a round, in all rows that may draft, the last
        committed token of each included; at least 1. Rows whose draft limit is 0, and what
        `min_draft` forces, come on top.
      estimate: of the chance that a drawn token is accepted.
    """

    tokens: int | None
    estimate: Estimate = OnlineEstimate()  # noqa: RUF009  immutable

    reads_past = True

    def __post_init__(self) -> None:
        if self.tokens is not None:
            tokens = whole_number("Budget: tokens", self.tokens, low=1)
            object.__setattr__(self, "tokens", tokens)
        self._check_estimate()

    def bind(self, head: Any = None) -> tuple[Stopping, Params]:
        """The budget and the estimate's numbers are traced."""
        estimate, numbers = self.estimate.as_chance().bind(head)
        given(self, "tokens")  # its check
        tokens = jnp.int32(self.tokens)
        return dataclasses.replace(self, tokens=None, estimate=estimate), BudgetParams(
            tokens, numbers
        )

    def remember(self, params: Params, rows: int, longest: int) -> BudgetMemory:
        """Nothing is known."""
        estimate = self.estimate.remember(self._numbers(params).estimate, rows)
        return BudgetMemory(no_rates(rows), estimate)

    def begin(
        self, params: Params, memory: BudgetMemory, limits: Array, longest: int
    ) -> tuple[Array, Spending]:
        """0 in rows whose first token is not paid for."""
        numbers, rows = self._numbers(params), limits.size
        going = limits > 0
        budget = numbers.tokens - jnp.sum(going, dtype=jnp.int32)
        state = Spending(
            judged=begin_survival(self.estimate, numbers.estimate, memory.estimate, rows, longest),
            limits=limits,
            lengths=jnp.zeros((rows,), jnp.int32),
            going=going,
            chances=chances(acceptance(memory.rates), longest),
            budget=jnp.broadcast_to(budget, (rows,)),
        )
        paid = next_is_paid(state, state.judged.survival)
        return jnp.where(paid, limits, 0), state._replace(going=paid)

    def step(
        self,
        params: Params,
        state: Spending,
        token: Array,
        probs: Array,
        confidences: Array | None,
        hidden: Array,
        index: Array,
    ) -> tuple[Array, Spending]:
        """See `Stopping`."""
        numbers = self._numbers(params)
        judged = judge(
            self.estimate, numbers.estimate, state.judged, token, confidences, hidden, index
        )
        lengths = state.lengths + state.going.astype(jnp.int32)
        going = state.going & (lengths < state.limits)
        state = state._replace(judged=judged, lengths=lengths, going=going)
        survival = ahead(self.estimate, judged, state.chances)
        paid = next_is_paid(state, survival)
        return ~paid, state._replace(going=going & paid)

    def learn(self, memory: BudgetMemory, state: Spending, outcome: DraftOutcome) -> BudgetMemory:
        """Rates and estimate learn."""
        judged = state.judged
        estimate = self.estimate.learn(memory.estimate, judged.recalled, judged.features, outcome)
        return BudgetMemory(add_round(memory.rates, outcome), estimate)


def next_is_paid(state: Spending, survival: Array) -> Array:
    """Whether each row's next token is among the best that the budget still pays: `[B]` bool.

    Args:
      state: the drafts.
      survival: `[B]` float32, the chance that all tokens drawn so far are accepted.
    """
    more = jnp.arange(1, state.chances.shape[1] + 1, dtype=jnp.int32)[None]
    open_ = state.going[:, None] & (state.lengths[:, None] + more <= state.limits[:, None])
    worth = jnp.where(open_, survival[:, None] * state.chances, -1.0)
    # Each row's worth falls from left to right, and equal ones are taken in that order: so what is
    # paid of a row are its next tokens.
    order = jnp.argsort(-worth.reshape(-1), stable=True)
    left = state.budget[0] - jnp.sum(state.lengths)
    rank = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    return (rank.reshape(worth.shape)[:, 0] < left) & open_[:, 0]
