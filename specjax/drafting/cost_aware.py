"""A stopping policy that compares the cost of a draft token with the time that it saves.

Axes: B rows, G longest block.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import check_part
from specjax.drafting.costs import Costs
from specjax.drafting.estimates import KEPT, Estimate, OnlineEstimate
from specjax.drafting.policies import EstimateParams, RoundsPast, Weighing, WeighsTokens
from specjax.errors import UserError
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


class Spent(NamedTuple):
    """Time and tokens of earlier rounds; older rounds count less.

    Attributes:
      seconds: `[B]` float32, by the cost model.
      tokens: `[B]` float32, the row's own; 0 for a row that has had no round.
    """

    seconds: Array  # [B]
    tokens: Array  # [B]


class Prices(NamedTuple):
    """The times to which tokens are compared, the same for all rows.

    Attributes:
      per_token: `[B]` float32, seconds per token at the present rate.
      draft: `[B]` float32, seconds of a pass of the drafter.
      verifier: `[B, G + 1]` float32, seconds of a pass of the verifier over 1 .. G + 1 tokens.
    """

    per_token: Array  # [B]
    draft: Array  # [B]
    verifier: Array  # [B, G + 1]


@dataclasses.dataclass(frozen=True)
class CostAware(WeighsTokens):
    """Ends all drafts when the next tokens are expected to cost more time than they save.

    m more tokens cost m passes of the drafter and a wider pass of the verifier. They save the time
    that the accepted ones would take at the present rate: the time of recent rounds over their
    tokens. Drafts continue while any m is worth its cost. The chance that a token not drawn yet is
    accepted is the row's recent rate. Since passes are padded to their widest row, all rows
    continue or end together.

    Attributes:
      costs: measured times (see `specjax bench --costs`); None: a `Decoder` measures them.
      estimate: of the chance that a drawn token is accepted.

    Source: SpecDec++ (arXiv 2405.19715), sections 3.1 and 4.2; the rate of a renewal process.
    """

    costs: Costs | None = None
    estimate: Estimate = OnlineEstimate()  # noqa: RUF009  immutable

    def __post_init__(self) -> None:
        if self.costs is not None:
            needed = ("rows", "widths", "draft", "verifier")
            check_part("CostAware: costs", self.costs, needed, "drafting.read_costs(FILE)")
        self._check_estimate()

    def bind(self, head: Any = None) -> tuple[Stopping, Params]:
        """Traces the times and the estimate's numbers."""
        if self.costs is None:
            raise UserError(
                "CostAware has no costs: give drafting.read_costs(FILE) (see `specjax bench "
                "--costs`), or let a Decoder measure them"
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
        return bound, EstimateParams(table, numbers)

    def remember(self, params: Params, rows: int, longest: int) -> RoundsPast:
        zeros = jnp.zeros((rows,), jnp.float32)
        return super().remember(params, rows, longest)._replace(own=Spent(zeros, zeros))

    def learn(self, memory: RoundsPast, state: Weighing, outcome: DraftOutcome) -> RoundsPast:
        """Adds the round's time and tokens."""
        longest = jnp.max(outcome.drafted)
        whole = (outcome.drafted > 0) & (outcome.agreed == outcome.drafted)
        # After a block that is accepted whole, the drafter still reads its last token.
        passes = longest + jnp.any(whole).astype(jnp.int32)
        prices, spent = state.own, memory.own
        seconds = passes.astype(jnp.float32) * prices.draft + prices.verifier[:, longest]
        tokens = 1.0 + outcome.agreed.astype(jnp.float32)
        own = Spent(KEPT * spent.seconds + seconds, KEPT * spent.tokens + tokens)
        return super().learn(memory, state, outcome)._replace(own=own)

    def _against(self, own: CostTable, memory: RoundsPast, limits: Array, longest: int) -> Prices:
        rows, spent = limits.size, memory.own
        draft = jnp.interp(jnp.float32(rows), own.rows, own.draft)
        verifier = verifier_seconds(own, rows, longest + 1)
        going = limits > 0
        # A row without earlier rounds counts as if it had decoded one token without a draft.
        fresh = spent.tokens == 0.0
        seconds = jnp.where(going, jnp.where(fresh, verifier[0], spent.seconds), 0.0)
        tokens = jnp.where(going, jnp.where(fresh, 1.0, spent.tokens), 0.0)
        # A round serves all rows that continue: its tokens are those of a row times their number.
        count = jnp.maximum(jnp.sum(going, dtype=jnp.float32), 1.0)
        per_token = jnp.sum(seconds) / jnp.maximum(jnp.sum(tokens), 1.0) / count
        return Prices(
            per_token=jnp.broadcast_to(per_token, (rows,)),
            draft=jnp.broadcast_to(draft, (rows,)),
            verifier=jnp.broadcast_to(verifier[None], (rows, longest + 1)),
        )

    def _continues(self, state: Weighing, open_: Array, chances: Array) -> Array:
        """Whether any number of further tokens saves more time than it costs; all rows together."""
        prices, longest = state.own, chances.shape[1]
        more = jnp.arange(1, longest + 1, dtype=jnp.int32)
        each = jnp.where(open_, chances, 0.0)
        saved = prices.per_token[0] * jnp.cumsum(jnp.sum(each, axis=0))
        # Rows that continue have the longest drafts.
        drafted, verifier = jnp.max(state.lengths), prices.verifier[0]
        wider = verifier[jnp.minimum(drafted + more, longest)] - verifier[drafted]
        worth = saved > more.astype(jnp.float32) * prices.draft[0] + wider
        return state.going & jnp.any(worth & jnp.any(open_, axis=0))


def verifier_seconds(costs: CostTable, rows: int, longest: int) -> Array:
    """Seconds of a pass over 1 .. `longest` tokens of each row: `[longest]` float32.

    A pass takes the smallest width of the table that holds it; `Costs.at_widths` makes the table
    for the widths that a loop compiles. Times between batch sizes are interpolated.
    """
    by_width = jax.vmap(lambda y: jnp.interp(jnp.float32(rows), costs.rows, y), in_axes=1)(
        costs.verifier
    )
    place = jnp.searchsorted(costs.widths, jnp.arange(1, longest + 1, dtype=jnp.float32))
    return by_width[jnp.minimum(place, costs.widths.size - 1)]
