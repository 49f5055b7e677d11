"""A stopping policy that weighs what a draft token costs against what it saves.

Axes: B rows, G longest block.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import check_part
from specjax.drafting.costs import Costs
from specjax.drafting.estimates import Estimate, OnlineEstimate
from specjax.drafting.rates import KEPT, Rates, acceptance, add_round, chances, no_rates
from specjax.drafting.thresholds import (
    OnEstimate,
    SurvivalState,
    ahead,
    begin_survival,
    judge,
)
from specjax.types import Array, DraftOutcome, Params, Stopping


class CostTable(NamedTuple):
    """Measured times, in seconds.

    Attributes:
      rows: `[R]` float32, increasing batch sizes.
      widths: `[W]` float32, increasing numbers of tokens.
      draft: `[R]`, one pass of the drafter.
      verifier: `[R, W]`, one pass of the verifier.
    """

    rows: Array  # [R]
    widths: Array  # [W]
    draft: Array  # [R]
    verifier: Array  # [R, W]


class CostAwareParams(NamedTuple):
    """Attributes: the times, and the estimate's parameters."""

    costs: CostTable
    estimate: Params


class Spent(NamedTuple):
    """What earlier rounds took and gave, older ones counting less.

    Attributes:
      seconds: `[B]` float32, by the cost model.
      tokens: `[B]` float32, the row's own; 0 for a row that has had no round.
      rates: of acceptance.
      estimate: the estimate's memory.
    """

    seconds: Array  # [B]
    tokens: Array  # [B]
    rates: Rates
    estimate: Any


class Weighing(NamedTuple):
    """A draft whose next tokens are weighed.

    Attributes:
      judged: under the estimate.
      going: `[B]` bool.
      limits: `[B]` int32.
      per_token: `[B]` float32, the seconds that a token takes at the present rate.
      chances: `[B, G]` float32, of the next tokens.
      draft: `[B]` float32, seconds of a pass of the drafter (one number for all rows).
      verifier: `[B, G + 1]` float32, seconds of a pass of the verifier over 1 .. G + 1 tokens.
    """

    judged: SurvivalState
    going: Array  # [B]
    limits: Array  # [B]
    per_token: Array  # [B]
    chances: Array  # [B, G]
    draft: Array  # [B]
    verifier: Array  # [B, G + 1]


@dataclasses.dataclass(frozen=True)
class CostAware(OnEstimate):
    """Ends all drafts where the next tokens are expected to cost more time than they save.

    m more tokens cost m passes of the drafter and a wider pass of the verifier. They save the time
    that their accepted ones would take at the present rate: what recent rounds took, by the same
    times, over the tokens that they gave. Drafts go on while any m is worth its cost. The chance
    that a token not drawn yet is accepted is the row's recent rate. As passes are padded to their
    widest row, all rows go on or end together.

    Attributes:
      costs: measured times (see `specjax bench cost`); None: a `Decoder` measures them.
      estimate: of the chance that a drawn token is accepted.

    Source: SpecDec++ (arXiv 2405.19715), sections 3.1 and 4.2; the rate of a renewal process.
    """

    costs: Costs | None = None
    estimate: Estimate = OnlineEstimate()  # noqa: RUF009  immutable

    reads_past = True

    def __post_init__(self) -> None:
        if self.costs is not None:
            needed = ("rows", "widths", "draft", "verifier")
            check_part("CostAware: costs", self.costs, needed, "drafting.read_costs(FILE)")
        self._check_estimate()

    def bind(self, head: Any = None) -> tuple[Stopping, Params]:
        """The times and the estimate's numbers are traced."""
        if self.costs is None:
            raise ValueError(
                "CostAware has no costs: give drafting.read_costs(FILE) (see `specjax bench "
                "cost`), or let a Decoder measure them"
            )
        estimate, numbers = self.estimate.as_chance().bind(head)
        table = CostTable(
            *(
                jnp.asarray(x, jnp.float32)
                for x in (
                    self.costs.rows,
                    self.costs.widths,
                    self.costs.draft,
                    self.costs.verifier,
                )
            )
        )
        bound = dataclasses.replace(self, costs=None, estimate=estimate)
        return bound, CostAwareParams(table, numbers)

    def remember(self, params: Params, rows: int, longest: int) -> Spent:
        """Nothing; `rows` may be those of a part of the batch."""
        zeros = jnp.zeros((rows,), jnp.float32)
        memory = self.estimate.remember(self._numbers(params).estimate, rows)
        return Spent(zeros, zeros, no_rates(rows), memory)

    def begin(
        self, params: Params, memory: Spent, limits: Array, longest: int
    ) -> tuple[Array, Weighing]:
        """0 for all where no draft is worth its first pass."""
        numbers, rows = self._numbers(params), limits.size
        draft = jnp.interp(jnp.float32(rows), numbers.costs.rows, numbers.costs.draft)
        verifier = verifier_seconds(numbers.costs, rows, longest + 1)
        going = limits > 0
        # A row without a past: as if it had just decoded one token without a draft.
        fresh = memory.tokens == 0.0
        seconds = jnp.where(going, jnp.where(fresh, verifier[0], memory.seconds), 0.0)
        tokens = jnp.where(going, jnp.where(fresh, 1.0, memory.tokens), 0.0)
        # A round serves all rows that go on: it gives so many times the tokens of one of them.
        count = jnp.maximum(jnp.sum(going, dtype=jnp.float32), 1.0)
        per_token = jnp.sum(seconds) / jnp.maximum(jnp.sum(tokens), 1.0) / count
        state = Weighing(
            judged=begin_survival(self.estimate, numbers.estimate, memory.estimate, rows, longest),
            going=going,
            limits=limits,
            per_token=jnp.broadcast_to(per_token, (rows,)),
            chances=chances(acceptance(memory.rates), longest),
            draft=jnp.broadcast_to(draft, (rows,)),
            verifier=jnp.broadcast_to(verifier[None], (rows, longest + 1)),
        )
        some = goes_on(state, jnp.int32(0), state.judged.survival)
        return jnp.where(some, limits, 0), state

    def step(
        self,
        params: Params,
        state: Weighing,
        token: Array,
        probs: Array,
        confidences: Array | None,
        hidden: Array,
        index: Array,
    ) -> tuple[Array, Weighing]:
        """See `Stopping`."""
        numbers = self._numbers(params)
        judged = judge(
            self.estimate, numbers.estimate, state.judged, token, confidences, hidden, index
        )
        going = state.going & (index + 1 < state.limits)
        state = state._replace(judged=judged, going=going)
        survival = ahead(self.estimate, judged, state.chances)
        stops = jnp.broadcast_to(~goes_on(state, index + 1, survival), going.shape)
        return stops, state._replace(going=going & ~stops)

    def learn(self, memory: Spent, state: Weighing, outcome: DraftOutcome) -> Spent:
        """Adds the round's time and tokens."""
        longest = jnp.max(outcome.drafted)
        whole = (outcome.drafted > 0) & (outcome.agreed == outcome.drafted)
        # After a block that stands the drafter has its last token still to read.
        passes = longest + jnp.any(whole).astype(jnp.int32)
        seconds = passes.astype(jnp.float32) * state.draft + state.verifier[:, longest]
        tokens = 1.0 + outcome.agreed.astype(jnp.float32)
        judged = state.judged
        return Spent(
            KEPT * memory.seconds + seconds,
            KEPT * memory.tokens + tokens,
            add_round(memory.rates, outcome),
            self.estimate.learn(memory.estimate, judged.recalled, judged.features, outcome),
        )


def goes_on(state: Weighing, drafted: Array, survival: Array) -> Array:
    """Whether any number of further tokens saves more time than it costs: scalar bool.

    Args:
      state: the draft.
      drafted: int32 scalar, how many tokens the rows have that go on.
      survival: `[B]` float32, the chance that all of these are accepted.
    """
    longest = state.chances.shape[1]
    more = jnp.arange(1, longest + 1, dtype=jnp.int32)
    fits = state.going[:, None] & (drafted + more[None] <= state.limits[:, None])
    each = jnp.where(fits, survival[:, None] * state.chances, 0.0)
    saved = state.per_token[0] * jnp.cumsum(jnp.sum(each, axis=0))
    verifier = state.verifier[0]
    wider = verifier[jnp.minimum(drafted + more, longest)] - verifier[drafted]
    worth = saved > more.astype(jnp.float32) * state.draft[0] + wider
    return jnp.any(worth & jnp.any(fits, axis=0))


def verifier_seconds(costs: CostTable, rows: int, longest: int) -> Array:
    """Seconds of a pass over 1 .. `longest` tokens of each row: `[longest]` float32.

    A pass is as wide as the least measured width that holds it; beyond the last one the time grows
    as between the last two. Between batch sizes it is interpolated.
    """
    by_width = jax.vmap(lambda y: jnp.interp(jnp.float32(rows), costs.rows, y), in_axes=1)(
        costs.verifier
    )
    asked = jnp.arange(1, longest + 1, dtype=jnp.float32)
    count = costs.widths.size
    place = jnp.searchsorted(costs.widths, asked)
    known = by_width[jnp.minimum(place, count - 1)]
    last = costs.widths[-1]
    slope = (
        by_width[-1] / last
        if count == 1
        else (by_width[-1] - by_width[-2]) / (last - costs.widths[-2])
    )
    return known + jnp.maximum(asked - last, 0.0) * jnp.maximum(slope, 0.0)
