"""What decoding returns: texts, tokens, and the totals of what it took."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.types import DecodeInfo

# What is summed over rows.
COUNTS = (
    "emitted",
    "verifier_calls",
    "drafter_calls",
    "drafted",
    "accepted",
    "deferrals",
    "rollbacks",
)


class RowInfo(NamedTuple):
    """What one row took, or all rows where arrays have a leading axis of rows.

    Attributes:
      emitted: int32, tokens emitted, an end-of-sequence token included.
      rounds: int32, steps of the method.
      calls: model's name -> int32, its passes while the row was unfinished. A pass serves the whole
        batch. Where one model decodes alone, its passes count as the verifier's.
      drafted_lengths: `[G + 1]` int32, in how many rounds 0 .. G tokens were drafted.
      accepted_lengths: `[G + 1]` int32, in how many rounds 0 .. G drafted tokens were accepted.
      token_sum: float32, expected accepted tokens of token verification on these drafts.
      block_sum: float32, the same of block verification.
      log_p: float32, log-probability of the output under the verifier, in nats, after temperature,
        top-k and top-p; NaN where the verifier has not read all of it, 0.0 where a method of one's
        own writes none.
      log_target: float32, the same under the rule's target distribution.
      deferrals: int32, see `specjax.types.DecodeInfo`.
      rollbacks: int32, likewise.
    """

    emitted: np.ndarray
    rounds: np.ndarray
    calls: dict[str, np.ndarray]
    drafted_lengths: np.ndarray
    accepted_lengths: np.ndarray
    token_sum: np.ndarray
    block_sum: np.ndarray
    log_p: np.ndarray
    log_target: np.ndarray
    deferrals: np.ndarray
    rollbacks: np.ndarray
    token_log_p: np.ndarray | None = None
    token_log_target: np.ndarray | None = None

    @classmethod
    def of(cls, info: DecodeInfo, emitted: np.ndarray, rounds: np.ndarray) -> "RowInfo":
        """What a loop has counted."""
        names = set(cls._fields) - {"emitted", "rounds"}
        return cls(emitted, rounds, **{name: getattr(info, name) for name in names})

    @property
    def verifier_calls(self) -> np.ndarray:
        """Passes of the verifier."""
        return self.calls.get("verifier", np.zeros_like(self.emitted))

    @property
    def drafter_calls(self) -> np.ndarray:
        """Passes of all other models."""
        others = [calls for name, calls in self.calls.items() if name != "verifier"]
        return np.asarray(sum(others, np.zeros_like(self.emitted)))

    @property
    def drafted(self) -> np.ndarray:
        """Tokens drafted."""
        return _total(self.drafted_lengths)

    @property
    def accepted(self) -> np.ndarray:
        """Drafted tokens accepted; those past the row's end count too."""
        return _total(self.accepted_lengths)

    @property
    def discarded(self) -> np.ndarray:
        """Drafted tokens that were not emitted: rejected, or accepted past the row's end."""
        return discarded(self.drafted, self.accepted, self.rounds, self.emitted)

    @property
    def drafted_at(self) -> np.ndarray:
        """`[G]`, blocks that reached draft position i."""
        return _reached(self.drafted_lengths)

    @property
    def accepted_at(self) -> np.ndarray:
        """`[G]`, blocks accepted up to draft position i."""
        return _reached(self.accepted_lengths)

    def to_dict(self) -> dict[str, Any]:
        """The counts of one row as JSON values."""
        names = (
            "rounds",
            "drafter_calls",
            "verifier_calls",
            "drafted",
            "accepted",
            "emitted",
            "deferrals",
            "rollbacks",
            "drafted_at",
            "accepted_at",
            "token_sum",
            "block_sum",
        )
        calls = {name: value.tolist() for name, value in self.calls.items()}
        return {**{name: getattr(self, name).tolist() for name in names}, "calls": calls}


def discarded(
    drafted: np.ndarray, accepted: np.ndarray, rounds: np.ndarray, emitted: np.ndarray
) -> np.ndarray:
    """Drafted tokens that were not emitted, from counts of one shape; see `RowInfo.discarded`."""
    # Of what is past the end one token is the last pass's own, which was not drafted.
    lost = drafted - accepted + np.maximum(accepted + rounds - emitted - 1, 0)
    # Methods that draft no blocks take rounds of other kinds.
    return np.minimum(lost, drafted)


def _total(lengths: np.ndarray) -> np.ndarray:
    return lengths @ np.arange(lengths.shape[-1], dtype=lengths.dtype)


def _reached(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths[..., ::-1], axis=-1, dtype=lengths.dtype)[..., -2::-1]


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One finished row.

    Attributes:
      index: the prompt's place in the input.
      text: the output; of a decoder-only network what it adds to the text of its prompt.
      tokens: `[n]` int32, the output without its end-of-sequence token; where a stop string ended
        it, up to the token that completed the string, though `text` is cut before it.
      ended_by: "eos"; "stop": a stop string; "length": its limit; "nan": a model gave NaN, see
        `error`.
      info: what it took.
      seconds: from its entering the batch until the batch was looked at.
      log_probs: `[m]` float32, natural logarithms of the probabilities of its tokens (with the
        end-of-sequence token) under the verifier, after temperature, top-k and top-p: at
        temperature 0 all are 0.0, or -inf where a rule took another token. NaN where a method of
        one's own does not write them (see `specjax.decoding.add_log_probs`). None unless
        `log_probs=True` asked for them.
      log_probs_target: `[m]` float32, the same under the rule's target distribution, or None.
      error: which model gave NaN in which step, or None.
      eos_id: the end-of-sequence token that ended it, or None.
    """

    index: int
    text: str
    tokens: np.ndarray  # [n]
    ended_by: str
    info: RowInfo = dataclasses.field(repr=False)
    seconds: float = 0.0
    log_probs: np.ndarray | None = dataclasses.field(default=None, repr=False)
    log_probs_target: np.ndarray | None = dataclasses.field(default=None, repr=False)
    error: str | None = None
    eos_id: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the model ended it with an end-of-sequence token."""
        return self.ended_by == "eos"

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON values; a log-probability of minus infinity or NaN is None."""
        made: dict[str, Any] = {
            "index": self.index,
            "text": self.text,
            "tokens": self.tokens.tolist(),
            "log_prob": finite(self.info.log_p),
            "log_prob_target": finite(self.info.log_target),
            "ended_by": self.ended_by,
            "seconds": self.seconds,
            "info": self.info.to_dict(),
        }
        if self.log_probs is not None and self.log_probs_target is not None:
            made["log_probs"] = [finite(x) for x in self.log_probs]
            made["log_probs_target"] = [finite(x) for x in self.log_probs_target]
        return made if self.error is None else {**made, "error": self.error}


def finite(value: Any) -> float | None:
    """A number for JSON, which has no infinity and no NaN; None for these."""
    number = float(value)
    return number if math.isfinite(number) else None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RunInfo:
    """What decoding took, per row and in all.

    Attributes:
      rows: a `RowInfo` of NumPy arrays whose leading axis is the prompts, in their order.
    """

    rows: RowInfo

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
    def verification_rate(self) -> float:
        """Passes of the verifier per emitted token (SpecDec++, section 4.2)."""
        return _ratio(self.rows.verifier_calls, self.rows.emitted)

    @property
    def discard_rate(self) -> float:
        """Drafted tokens that were discarded, per emitted token (SpecDec++, section 4.2)."""
        return _ratio(self.rows.discarded, self.rows.emitted)

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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Result(Sequence[Row]):
    """Outputs in the order of the prompts: a sequence of `Row`s.

    Attributes:
      rows: one per prompt.
      seconds: of the whole call, compilation included.
    """

    rows: tuple[Row, ...]
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        return self.rows[place]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        """The first texts, and the totals."""
        shown = [repr(text) for text in self.texts[:3]]
        more = f", ... {len(self) - 3} more" if len(self) > 3 else ""
        return f"Result(texts=[{', '.join(shown)}{more}], info={self.info!r})"

    @property
    def texts(self) -> list[str]:
        """One per prompt."""
        return [row.text for row in self.rows]

    @property
    def tokens(self) -> list[np.ndarray]:
        """Int32 arrays without the end-of-sequence token."""
        return [row.tokens for row in self.rows]

    @property
    def ended_by(self) -> list[str]:
        """See `Row.ended_by`."""
        return [row.ended_by for row in self.rows]

    @property
    def ended(self) -> np.ndarray:
        """`[n]` bool, whether the model ended the row with an end-of-sequence token."""
        return np.array([row.ended for row in self.rows])

    @property
    def log_probs(self) -> list[np.ndarray | None]:
        """See `Row.log_probs`."""
        return [row.log_probs for row in self.rows]

    @functools.cached_property
    def info(self) -> RunInfo:
        """What it took."""
        return RunInfo(jax.tree.map(lambda *x: np.stack(x), *[row.info for row in self.rows]))

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict of JSON values per row."""
        return [row.to_dict() for row in self.rows]


def collect(rows: Sequence[Row], seconds: float = 0.0) -> Result:
    """Puts rows, each index once, into their order."""
    return Result(tuple(sorted(rows, key=lambda row: row.index)), seconds)


def _ratio(numerator: Any, denominator: Any) -> float:
    below = int(np.sum(denominator))
    return int(np.sum(numerator)) / below if below else float("nan")
