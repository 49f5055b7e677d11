"""A stopping policy that compares the cost of a draft token with the time that it saves.

Source: SpecDec++ (arXiv 2405.19715), equation 2.1: T = t_draft N_draft + t_target N_target; here
t_target depends on the number of tokens in the verifier's pass.

Axes: B rows, G longest block, N = G + 1 widths, R measured batch sizes, W measured widths.
"""

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from specjax.checks import check_part, check_path
from specjax.drafting.estimates import KEPT, Estimate, OnlineEstimate
from specjax.drafting.stopping import EstimateParams, RoundsPast, Weighing, WeighsTokens
from specjax.errors import UserError
from specjax.types import DraftOutcome, Params, Stopping

# The format of the files that `Costs.to_dict` makes.
FORMAT = 1
_HOW = (
    "measure it with specjax bench --costs FILE, --rows up to your batch size and --drafts up to "
    "your longest draft"
)


@dataclasses.dataclass(frozen=True, repr=False)
class Costs:
    """The seconds of a pass of a pair's models, by batch size and width; hashable.

    Attributes:
      rows: the measured batch sizes, increasing.
      widths: the tokens per row of a verifier's pass, increasing.
      draft: for each of `rows`, the seconds of a pass of the drafter, with the loop's work for a
        drafted token.
      verifier: for each of `rows` and each of `widths`, the seconds of a pass of the verifier, with
        the loop's work of a round.
      machine: the machine of the measurement.
      pair: `Pair.fingerprint`; "" for none.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    draft: tuple[float, ...]
    verifier: tuple[tuple[float, ...], ...]
    machine: str = ""
    pair: str = ""

    def __post_init__(self) -> None:
        for name in ("rows", "widths"):
            sizes = getattr(self, name)
            whole = isinstance(sizes, tuple) and all(type(size) is int for size in sizes)
            if not whole or not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise UserError(
                    f"{name} must be a tuple of whole numbers that increases from at least 1, got "
                    f"{sizes!r}"
                )
        count, width = len(self.rows), len(self.widths)
        if not _are_times(self.draft, count):
            raise UserError(
                f"draft must be a tuple of {count} seconds, one for each of rows, got {self.draft}"
            )
        is_tuple = isinstance(self.verifier, tuple) and len(self.verifier) == count
        if not is_tuple or not all(
            _are_times(times, width, least=1e-30) for times in self.verifier
        ):
            raise UserError(
                f"verifier must be a tuple of {count} tuples of {width} seconds above 0, got "
                f"{self.verifier}"
            )
        for name in ("machine", "pair"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"{name} must be a string, got {getattr(self, name)!r}")

    def __repr__(self) -> str:
        times = f"{zlib.crc32(repr((self.draft, self.verifier)).encode()):08x}"
        return (
            f"Costs(rows={self.rows}, widths={self.widths}, pair={self.pair!r}, "
            f"machine={self.machine!r}, times of CRC {times})"
        )

    def at_widths(self, widths: Sequence[int]) -> "Costs":
        """The same costs for other widths of the verifier's passes: those that a loop compiles.

        Times between measured widths are interpolated; beyond the last width they grow as between
        the last two.
        """
        measured = np.asarray(self.widths, np.float64)

        def seconds(times: tuple[float, ...]) -> tuple[float, ...]:
            slope = times[-1] / measured[-1]
            if len(times) > 1:
                slope = max(0.0, (times[-1] - times[-2]) / (measured[-1] - measured[-2]))
            beyond = np.maximum(np.asarray(widths) - measured[-1], 0.0)
            return tuple((np.interp(widths, measured, times) + slope * beyond).tolist())

        verifier = tuple(map(seconds, self.verifier))
        return dataclasses.replace(self, widths=tuple(widths), verifier=verifier)

    def to_dict(self) -> dict[str, Any]:
        """The costs as JSON values, as `read_costs` reads them from a file."""
        values = dataclasses.asdict(self)
        verifier = [list(times) for times in self.verifier]
        lists = {name: list(values[name]) for name in ("rows", "widths", "draft")}
        return {"format": FORMAT, **values, **lists, "verifier": verifier}


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """Reads a file that `specjax bench --costs` wrote.

    A `Decoder` checks that the costs belong to its pair and this machine.

    Raises:
      OSError: the file cannot be read.
      UserError: it is not a valid file of costs.
    """
    check_path(path)
    place = Path(path)
    try:
        values = json.loads(place.read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(f"{place} cannot be read ({reason}): {_HOW}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{place} is not a JSON file: {_HOW}") from None
    if not isinstance(values, dict) or "format" not in values:
        raise UserError(f"{place} is not a file of costs: {_HOW}")
    if values["format"] != FORMAT:
        raise UserError(
            f"{place} has the format {values['format']!r}, but this version reads {FORMAT}: {_HOW}"
        )
    names = [field.name for field in dataclasses.fields(Costs)]
    missing = [name for name in names if name not in values]
    if missing:
        raise UserError(f"{place} lacks {missing[0]!r}: {_HOW}")
    try:
        return Costs(**{name: _frozen(values[name]) for name in names})
    except UserError as error:
        raise UserError(f"{place}: {error}: {_HOW}") from None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _are_times(times: Any, count: int, least: float = 0.0) -> bool:
    numbers = isinstance(times, tuple) and all(type(time) in (int, float) for time in times)
    return numbers and len(times) == count and all(least <= time < math.inf for time in times)


class CostTable(NamedTuple):
    """Measured times, in seconds.

    Attributes:
      rows: increasing batch sizes.
      widths: increasing numbers of tokens.
      draft: one pass of the drafter.
      verifier: one pass of the verifier.
    """

    rows: Float32[Array, " R"]
    widths: Float32[Array, " W"]
    draft: Float32[Array, " R"]
    verifier: Float32[Array, "R W"]


class Spent(NamedTuple):
    """Time and tokens of earlier rounds; older rounds count less.

    Attributes:
      seconds: by the cost model.
      tokens: the row's own; 0 for a row that has had no round.
    """

    seconds: Float32[Array, " B"]
    tokens: Float32[Array, " B"]


class Prices(NamedTuple):
    """The times to which tokens are compared, the same for all rows.

    Attributes:
      per_token: seconds per token at the present rate.
      draft: seconds of a pass of the drafter.
      verifier: seconds of a pass of the verifier over 1 .. G + 1 tokens.
    """

    per_token: Float32[Array, " B"]
    draft: Float32[Array, " B"]
    verifier: Float32[Array, "B N"]


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
        if self.costs is None:
            raise UserError(
                "CostAware has no costs: give drafting.read_costs(FILE) (see `specjax bench "
                "--costs`), or let a Decoder measure them"
            )
        estimate, numbers = self.estimate.as_chance().bind(head)
        fields = (getattr(self.costs, name) for name in CostTable._fields)
        table = CostTable(*(jnp.asarray(field, jnp.float32) for field in fields))
        bound = dataclasses.replace(self, costs=None, estimate=estimate)
        return bound, EstimateParams(table, numbers)

    def remember(self, params: Params, rows: int, longest: int) -> RoundsPast:
        zeros = jnp.zeros((rows,), jnp.float32)
        return super().remember(params, rows, longest)._replace(policy=Spent(zeros, zeros))

    def learn(self, memory: RoundsPast, state: Weighing, outcome: DraftOutcome) -> RoundsPast:
        longest = jnp.max(outcome.drafted)
        whole = (outcome.drafted > 0) & (outcome.agreed == outcome.drafted)
        # After a block that is accepted whole, the drafter still reads its last token.
        passes = longest + jnp.any(whole).astype(jnp.int32)
        prices, spent = state.policy, memory.policy
        seconds = passes.astype(jnp.float32) * prices.draft + prices.verifier[:, longest]
        tokens = 1.0 + outcome.agreed.astype(jnp.float32)
        spent = Spent(KEPT * spent.seconds + seconds, KEPT * spent.tokens + tokens)
        return super().learn(memory, state, outcome)._replace(policy=spent)

    def _against(
        self, numbers: CostTable, memory: RoundsPast, limits: Array, longest: int
    ) -> Prices:
        rows, spent = limits.size, memory.policy
        draft = jnp.interp(jnp.float32(rows), numbers.rows, numbers.draft)
        verifier = verifier_seconds(numbers, rows, longest + 1)
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
        prices, longest = state.policy, chances.shape[1]
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
