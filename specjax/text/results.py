"""What decoding returns: texts, tokens, and the totals of what it took."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.decoding import DecodeInfo

# What is summed over rows.
COUNTS = ("emitted", "verifier_calls", "drafter_calls", "drafted", "accepted")


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One finished row.

    Attributes:
      index: the prompt's place in the input.
      text: the output.
      tokens: `[n]` int32, the output without its end-of-sequence token.
      ended: whether the model ended it; otherwise its length limit did.
      info: totals of the row, as NumPy scalars and `[G]` arrays.
    """

    index: int
    text: str
    tokens: np.ndarray  # [n]
    ended: bool
    info: DecodeInfo


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RunInfo:
    """What decoding took, per row and in all.

    Attributes:
      rows: `DecodeInfo` of NumPy arrays whose leading axis is the prompts, in their order. Where
        one model decodes alone, its passes count as the verifier's.
    """

    rows: DecodeInfo

    def __repr__(self) -> str:
        """Its totals: arrays of all rows would hide them."""
        return f"RunInfo({', '.join(f'{k}={v}' for k, v in self.summary().items())})"

    @property
    def tokens_per_verifier_call(self) -> float:
        """Emitted tokens (end-of-sequence tokens included) per pass of the verifier."""
        return _ratio(self.rows.emitted, self.rows.verifier_calls)

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens per drafted token; NaN without a drafter."""
        return _ratio(self.rows.accepted, self.rows.drafted)

    @property
    def acceptance_by_position(self) -> np.ndarray:
        """`[G]` float64: of the blocks that long, the share whose tokens up to i were accepted."""
        drafted = np.asarray(self.rows.drafted_at, np.float64).sum(axis=0)
        accepted = np.asarray(self.rows.accepted_at, np.float64).sum(axis=0)
        return np.divide(accepted, drafted, out=np.full_like(accepted, np.nan), where=drafted > 0)

    def summary(self) -> dict[str, float | None]:
        """Totals and rates over all rows, as JSON numbers; a rate of nothing is None."""
        rows = self.rows
        counts = {name: int(np.sum(getattr(rows, name))) for name in COUNTS}
        return {
            "rows": len(rows.emitted),
            **counts,
            "tokens_per_verifier_call": self.tokens_per_verifier_call,
            "acceptance_rate": None if math.isnan(self.acceptance_rate) else self.acceptance_rate,
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """Outputs in the order of the prompts.

    Attributes:
      texts: one per prompt.
      tokens: int32 arrays without the end-of-sequence token.
      ended: `[n]` bool, whether the model ended the row (otherwise its length limit did).
      info: what it took.
    """

    texts: list[str]
    tokens: list[np.ndarray] = dataclasses.field(repr=False)
    ended: np.ndarray = dataclasses.field(repr=False)
    info: RunInfo = dataclasses.field(repr=False)


def collect(rows: Sequence[Row]) -> Result:
    """Puts rows, each index once, into their order."""
    rows = sorted(rows, key=lambda row: row.index)
    columns = zip(*(row.info for row in rows), strict=True)
    info: Any = map(np.stack, columns)
    return Result(
        texts=[row.text for row in rows],
        tokens=[row.tokens for row in rows],
        ended=np.array([row.ended for row in rows]),
        info=RunInfo(DecodeInfo(*info)),
    )


def _ratio(numerator: Any, denominator: Any) -> float:
    below = int(np.sum(denominator))
    return int(np.sum(numerator)) / below if below else float("nan")
