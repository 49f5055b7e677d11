"""The results of decoding: texts, tokens and counts."""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checks import whole_number
from specjax.errors import UserError
from specjax.text.draft_acceptance import DraftAcceptance, ratio
from specjax.text.showing import Shown, Sourced, split
from specjax.types.method import discarded, past_end

# The counts of each row, also summed over rows.
COUNTS = (
    "emitted",
    "rounds",
    "verifier_calls",
    "drafter_calls",
    "drafted",
    "accepted",
    "deferrals",
    "rollbacks",
)


class RowInfo(NamedTuple):
    """The counts of a row, or of all rows with a leading axis.

    Attributes:
      emitted: int32, emitted tokens, an end-of-sequence token included.
      rounds: int32, steps of the method.
      calls: model's name -> int32, its passes while the row was unfinished. A pass serves the whole
        batch. If a single model decodes, its passes count as the verifier's.
      drafted_lengths: `[G + 1]` int32, the numbers of rounds with 0 .. G drafted tokens.
      accepted_lengths: `[G + 1]` int32, the numbers of rounds with 0 .. G accepted tokens.
      token_sum: float32, expected accepted tokens of token verification on these drafts.
      block_sum: float32, the same of block verification.
      log_prob: float32, log-probability of the output under the verifier itself, in nats; see
        `Row.log_probs`. NaN without `log_probs=True`, or if the verifier has not read all of it;
        0.0 if a user's own method does not write it.
      log_prob_processed: float32, the same after temperature, top-k, top-p and processors.
      log_prob_target: float32, log-probability under the distributions that the tokens were drawn
        from: the rule's, after temperature, top-k, top-p and processors. At temperature 0 it is 0.
      deferrals: int32, see `specjax.types.DecodeInfo`.
      rollbacks: int32, likewise.
      nodes: `[2, G]` int32, the numbers of rounds in which each node of a tree was drafted and
        accepted, nodes in the order of drafting; None of chains.
    """

    emitted: np.ndarray
    rounds: np.ndarray
    calls: dict[str, np.ndarray]
    drafted_lengths: np.ndarray
    accepted_lengths: np.ndarray
    token_sum: np.ndarray
    block_sum: np.ndarray
    log_prob: np.ndarray
    log_prob_processed: np.ndarray
    log_prob_target: np.ndarray
    deferrals: np.ndarray
    rollbacks: np.ndarray
    nodes: np.ndarray | None = None

    @classmethod
    def of(cls, info: Any, emitted: np.ndarray, rounds: np.ndarray) -> "RowInfo":
        """Makes the counts from a loop's `specjax.types.DecodeInfo`."""
        return cls(
            emitted,
            rounds,
            info.calls,
            info.drafted_lengths,
            info.accepted_lengths,
            info.token_sum,
            info.block_sum,
            np.full_like(info.log_p, np.nan) if info.log_conf is None else info.log_conf,
            info.log_p,
            info.log_target,
            info.deferrals,
            info.rollbacks,
            info.nodes,
        )

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
        """Drafted tokens."""
        return _total(self.drafted_lengths)

    @property
    def accepted(self) -> np.ndarray:
        """Accepted tokens, also those past the row's end."""
        return _total(self.accepted_lengths)

    @property
    def discarded(self) -> np.ndarray:
        """Drafted tokens that were not emitted: rejected, or accepted past the row's end."""
        return discarded(self.drafted, self.accepted, self.rounds, self.emitted)

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts of a row as JSON values, under the same names."""
        names = (*COUNTS, "drafted_lengths", "accepted_lengths", "token_sum", "block_sum")
        calls = {name: value.tolist() for name, value in self.calls.items()}
        made = {**{name: getattr(self, name).tolist() for name in names}, "calls": calls}
        return made if self.nodes is None else {**made, "nodes": self.nodes.tolist()}


def _total(lengths: np.ndarray) -> np.ndarray:
    return lengths @ np.arange(lengths.shape[-1], dtype=lengths.dtype)


class TopTokens(NamedTuple):
    """The most probable tokens at each position of an output, the most probable first.

    Attributes:
      tokens: `[m, k]` int32.
      log_probs: `[m, k]` float32, -inf for impossible tokens.
    """

    tokens: np.ndarray  # [m, k]
    log_probs: np.ndarray  # [m, k]


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A finished row.

    Attributes:
      index: the prompt's place in the input; for an `Engine` the index from `add`.
      sample: the number of the sample in 0 .. num_samples - 1.
      text: the output; for a decoder-only network the text added to its prompt. Empty for an
        `Engine` without a tokenizer.
      tokens: `[n]` int32, the output without its end-of-sequence token; after a stop string up to
        the token that completed it, although `text` is cut before the string.
      ended_by: "eos"; "stop": a stop string; "length": its limit; "nan": a model gave NaN, see
        `error`.
      info: its counts.
      seconds: from entering the batch until the host saw its end, without compilation.
      compile_seconds: the time of compiling, or reading programs from the cache, meanwhile.
      log_probs: `[m]` float32, natural logarithms of the probabilities of its tokens (with the
        end-of-sequence token) under the verifier itself: at temperature 1, without filters and
        processors, however they were drawn. NaN where the verifier has not read a token, or if a
        user's own method does not write them. None without `log_probs=True`.
      log_probs_processed: `[m]` float32, the same after temperature, top-k, top-p and processors;
        at temperature 0 they are 0.0, or -inf for a token that the verifier would not take.
      log_probs_target: `[m]` float32, the same under the distributions that the tokens were drawn
        from (see `RowInfo.log_prob_target`), or None.
      error: the model that gave NaN and the step, or None.
      eos_id: the end-of-sequence token that ended it, or None.
      sources: for each of its tokens the name of where it came from: the drafter that drafted it;
        or the verifier, as "residual" (after a rejection), "bonus" (after a whole accepted draft)
        or "verifier" (without a draft). In a cascade that decodes sequentially: the model that
        wrote it. "unknown" if a user's own method does not write them. None without `sources=True`.
      text_of: the function that decodes its first tokens, for `show`; or None.
      prefilled: the number of tokens of its prompt that the models read for it. The others come
        from a prefix, or from the prompt's first sample.
      top: the most probable tokens at each of its `[m]` positions, under the verifier itself at
        temperature 1. None without `top_log_probs=k`, or with an `error`.
    """

    index: int
    text: str
    tokens: np.ndarray  # [n]
    ended_by: str
    info: RowInfo = dataclasses.field(repr=False)
    seconds: float = 0.0
    compile_seconds: float = 0.0
    log_probs: np.ndarray | None = dataclasses.field(default=None, repr=False)
    log_probs_processed: np.ndarray | None = dataclasses.field(default=None, repr=False)
    log_probs_target: np.ndarray | None = dataclasses.field(default=None, repr=False)
    error: str | None = None
    eos_id: int | None = None
    sample: int = 0
    sources: tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    text_of: Callable[[Sequence[int]], str] | None = dataclasses.field(default=None, repr=False)
    prefilled: int = 0
    top: TopTokens | None = dataclasses.field(default=None, repr=False)

    @property
    def ended(self) -> bool:
        """Whether the model ended it with an end-of-sequence token."""
        return self.ended_by == "eos"

    def show(self) -> Shown:
        """Returns the text, coloured by the sources of its tokens.

        Raises:
          ValueError: the row was decoded without `sources=True`.
        """
        return Shown((self._sourced(self.sample > 0),))

    def _sourced(self, with_sample: bool) -> tuple[str, Sourced]:
        if self.sources is None:
            raise UserError("the row has no sources: decode with decoder(prompts, sources=True)")
        parts = split(self.text, self.tokens.tolist(), self.text_of)
        name = f"{self.index}.{self.sample}" if with_sample else str(self.index)
        return name, list(zip(parts, self.sources, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as JSON values; a log-probability of minus infinity or NaN is None."""
        made: dict[str, Any] = {
            "index": self.index,
            "sample": self.sample,
            "text": self.text,
            "tokens": self.tokens.tolist(),
            "log_prob": finite(self.info.log_prob),
            "log_prob_processed": finite(self.info.log_prob_processed),
            "log_prob_target": finite(self.info.log_prob_target),
            "ended_by": self.ended_by,
            "prefilled": self.prefilled,
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "info": self.info.to_dict(),
        }
        for name in ("log_probs", "log_probs_processed", "log_probs_target"):
            if getattr(self, name) is not None:
                made[name] = [finite(x) for x in getattr(self, name)]
        if self.top is not None:
            made["top_tokens"] = self.top.tokens.tolist()
            made["top_log_probs"] = [[finite(x) for x in each] for each in self.top.log_probs]
        if self.sources is not None:
            made["sources"] = list(self.sources)
        return made if self.error is None else {**made, "error": self.error}


def apart(seconds: float, compiling: float) -> dict[str, float]:
    """Returns the time without compilation and the time of compilation, for `Row` and `Result`."""
    return {"seconds": max(0.0, seconds - compiling), "compile_seconds": compiling}


class NanWarning(UserWarning):
    """A row's output is truncated, because a model gave NaN."""


def warn_of_nan(row: Row) -> None:
    """Warns if a model gave NaN."""
    if row.error is not None:
        what = f"row {row.index}: output truncated ({row.error}); check the checkpoint"
        warnings.warn(what, NanWarning, stacklevel=3)


def finite(value: Any) -> float | None:
    """Returns a number for JSON; None for infinity and NaN."""
    number = float(value)
    return number if math.isfinite(number) else None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RunInfo:
    """The counts of decoding, in total and per row.

    Attributes:
      per_row: a `RowInfo` of NumPy arrays whose leading axis is the prompts, in their order.
      rows: the number of rows.
      emitted: emitted tokens, end-of-sequence tokens included. This and the following are totals.
      rounds: steps of the method.
      verifier_calls: passes of the verifier; a pass counts for each row that it serves.
      drafter_calls: passes of all other models, likewise.
      drafted: drafted tokens.
      accepted: accepted tokens that were emitted.
      accepted_past_end: accepted tokens past the ends of rows, which were not emitted.
      deferrals: see `specjax.types.DecodeInfo`.
      rollbacks: likewise.
    """

    per_row: RowInfo
    rows: int = dataclasses.field(init=False)
    emitted: int = dataclasses.field(init=False)
    rounds: int = dataclasses.field(init=False)
    verifier_calls: int = dataclasses.field(init=False)
    drafter_calls: int = dataclasses.field(init=False)
    drafted: int = dataclasses.field(init=False)
    accepted: int = dataclasses.field(init=False)
    accepted_past_end: int = dataclasses.field(init=False)
    deferrals: int = dataclasses.field(init=False)
    rollbacks: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", len(self.per_row.emitted))
        for name in COUNTS:
            object.__setattr__(self, name, int(np.sum(getattr(self.per_row, name))))
        rows = self.per_row
        past = int(np.sum(past_end(rows.accepted, rows.rounds, rows.emitted)))
        object.__setattr__(self, "accepted_past_end", past)
        object.__setattr__(self, "accepted", self.accepted - past)

    def __repr__(self) -> str:
        return f"RunInfo({', '.join(f'{k}={v}' for k, v in self.summary().items())})"

    @property
    def tokens_per_verifier_call(self) -> float:
        """Emitted tokens (end-of-sequence tokens included) per pass of the verifier."""
        return ratio(self.emitted, self.verifier_calls)

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens (those past a row's end too) per drafted token; NaN without drafts."""
        return ratio(self.accepted + self.accepted_past_end, self.drafted)

    @property
    def verification_rate(self) -> float:
        """Passes of the verifier per emitted token (SpecDec++, section 4.2)."""
        return ratio(self.verifier_calls, self.emitted)

    @property
    def discard_rate(self) -> float:
        """Discarded tokens per emitted token (SpecDec++, section 4.2)."""
        return ratio(int(np.sum(self.per_row.discarded)), self.emitted)

    @property
    def acceptance_by_position(self) -> np.ndarray:
        """`[G]` float64: the share of blocks with a token i whose tokens up to i were accepted.

        vLLM's rate counts shorter blocks too: see `DraftAcceptance.per_position_acceptance_rate`.
        """
        drafted = _reached(self.per_row.drafted_lengths)
        accepted = _reached(self.per_row.accepted_lengths)
        return np.divide(accepted, drafted, out=np.full_like(accepted, np.nan), where=drafted > 0)

    def summary(self) -> dict[str, float | None]:
        """Returns totals and rates over all rows as JSON numbers; an undefined rate is None."""
        return {
            "rows": self.rows,
            **{name: getattr(self, name) for name in (*COUNTS, "accepted_past_end")},
            "tokens_per_verifier_call": finite(self.tokens_per_verifier_call),
            "acceptance_rate": finite(self.acceptance_rate),
        }


def _reached(lengths: np.ndarray) -> np.ndarray:
    """`[G]` float64, the number of blocks with a token at position i; `lengths` is `[n, G + 1]`."""
    counts = lengths.sum(axis=0, dtype=np.float64)
    return np.cumsum(counts[::-1])[-2::-1]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Result(Sequence[Row]):
    """Outputs in the order of the prompts: a sequence of `Row`s, whose slices are results too.

    Attributes:
      rows: a row per prompt; with `num_samples=n` n adjacent rows per prompt, sample after sample,
        or with `best_of=k` k rows, the best first. Lists such as `texts` have the same order.
      seconds: the time of the call, without compilation.
      compile_seconds: the time of compilation, and of reading programs from the cache.
    """

    rows: tuple[Row, ...]
    seconds: float = 0.0
    compile_seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        found = self.rows[place]
        return dataclasses.replace(self, rows=found) if isinstance(place, slice) else found

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        shown = [repr(row.text) for row in self.rows[:3]]
        more = f", ... {len(self) - 3} more" if len(self) > 3 else ""
        info = f", info={self.info!r}" if self.rows else ""
        return f"Result(texts=[{', '.join(shown)}{more}]{info})"

    @property
    def texts(self) -> list[str]:
        """The text of each row."""
        return [row.text for row in self.rows]

    @property
    def tokens(self) -> list[np.ndarray]:
        """Int32 arrays without the end-of-sequence token."""
        return [row.tokens for row in self.rows]

    @property
    def prefilled(self) -> int:
        """The number of tokens of the prompts that were read, without those of a prefix."""
        return sum(row.prefilled for row in self.rows)

    @property
    def ended_by(self) -> list[str]:
        return [row.ended_by for row in self.rows]

    @property
    def ended(self) -> np.ndarray:
        """`[n]` bool, whether the model ended the row with an end-of-sequence token."""
        return np.array([row.ended for row in self.rows])

    @property
    def log_probs(self) -> list[np.ndarray | None]:
        return [row.log_probs for row in self.rows]

    def by_prompt(self) -> list["Result"]:
        """Returns the rows of each prompt, as results of their own."""
        groups = itertools.groupby(self.rows, key=lambda row: row.index)
        return [dataclasses.replace(self, rows=tuple(rows)) for _, rows in groups]

    def best(self, count: int) -> "Result":
        """Returns the most probable `count` rows of each prompt, the best first.

        The measure is `row.info.log_prob_target`: the sum of the log-probabilities of the row's
        tokens under the rule's target distribution. NaN is last; of equal rows the first sample is
        first.

        Args:
          count: at least 1; a prompt with fewer rows keeps all of them.

        Raises:
          TypeError: `count` is not a number.
          ValueError: it is not a whole number of at least 1.
        """
        count = whole_number("count", count, low=1)

        def cost(row: Row) -> tuple[bool, float]:
            value = float(row.info.log_prob_target)
            return math.isnan(value), -value

        best = [sorted(samples, key=cost)[:count] for samples in self.by_prompt()]
        return dataclasses.replace(self, rows=tuple(itertools.chain(*best)))

    @functools.cached_property
    def info(self) -> RunInfo:
        """The counts; there must be a row."""
        return RunInfo(jax.tree.map(lambda *x: np.stack(x), *[row.info for row in self.rows]))

    @functools.cached_property
    def acceptance(self) -> DraftAcceptance:
        """The acceptance of drafts, by position and by draft."""
        return DraftAcceptance.of([row.info._asdict() for row in self.rows])

    def show(self, count: int = 3) -> Shown:
        """Returns the first `count` texts, coloured by the sources of their tokens.

        Raises:
          TypeError: `count` is not a number.
          ValueError: it is not a whole number of at least 0, or the rows were decoded without
            `sources=True`.
        """
        several = any(row.sample for row in self.rows)
        shown = self.rows[: whole_number("count", count, low=0)]
        return Shown(tuple(row._sourced(several) for row in shown))

    def plot(self) -> Any:
        """Draws the acceptance of drafts; see `DraftAcceptance.plot`."""
        return self.acceptance.plot()

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns a dict of JSON values per row."""
        return [row.to_dict() for row in self.rows]
