"""The results of decoding: texts, tokens, counts, and the acceptance of drafts.

Axes: n rows, m tokens of an output (with its end-of-sequence token), k candidates, G longest draft.
"""

import collections
import dataclasses
import functools
import html
import io
import itertools
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Int32

from specjax.checks import require, whole_number
from specjax.errors import UserError
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
# More numbers over the bars of a figure would overlap.
_MOST_LABELS = 11


class RowInfo(NamedTuple):
    """The counts of a row, or of all rows with a leading axis.

    Attributes:
      emitted: emitted tokens, an end-of-sequence token included.
      rounds: steps of the method.
      calls: model's name -> its passes while the row was unfinished. A pass serves the whole batch.
        If a single model decodes, its passes count as the verifier's.
      drafted_lengths: `[G + 1]`, the numbers of rounds with 0 .. G drafted tokens.
      accepted_lengths: `[G + 1]`, the numbers of rounds with 0 .. G accepted tokens.
      token_sum: expected accepted tokens of token verification on these drafts.
      block_sum: the same of block verification.
      log_prob: log-probability of the output under the verifier itself, in nats; see
        `Row.log_probs`. NaN without `log_probs=True`, or if the verifier has not read all of it;
        0.0 if a user's own method does not write it.
      log_prob_processed: the same after temperature, top-k, top-p and processors.
      log_prob_target: log-probability under the distributions that the tokens were drawn from: the
        rule's, after temperature, top-k, top-p and processors. At temperature 0 it is 0.
      deferrals, rollbacks: see `specjax.types.DecodeInfo`.
      nodes: `[2, G]`, the numbers of rounds in which each node of a tree was drafted and accepted,
        nodes in the order of drafting; None of chains.
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
        plain, processed, target = info.log_prob
        own = {
            "emitted": emitted,
            "rounds": rounds,
            "log_prob": np.full_like(processed, np.nan) if plain is None else plain,
            "log_prob_processed": processed,
            "log_prob_target": target,
        }
        same = [name for name in cls._fields if name not in own]
        return cls(**own, **{name: getattr(info, name) for name in same})

    @property
    def verifier_calls(self) -> np.ndarray:
        return self.calls.get("verifier", np.zeros_like(self.emitted))

    @property
    def drafter_calls(self) -> np.ndarray:
        others = [calls for name, calls in self.calls.items() if name != "verifier"]
        return np.asarray(sum(others, np.zeros_like(self.emitted)))

    @property
    def drafted(self) -> np.ndarray:
        return self.drafted_lengths @ np.arange(self.drafted_lengths.shape[-1])

    @property
    def accepted(self) -> np.ndarray:
        """Accepted tokens, also those past the row's end."""
        return self.accepted_lengths @ np.arange(self.accepted_lengths.shape[-1])

    @property
    def discarded(self) -> np.ndarray:
        """Drafted tokens that were not emitted: rejected, or accepted past the row's end."""
        return discarded(self.drafted, self.accepted, self.rounds, self.emitted)

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts of a row as JSON values, under the same names."""
        names = (*COUNTS, "drafted_lengths", "accepted_lengths", "token_sum", "block_sum")
        calls = {name: value.tolist() for name, value in self.calls.items()}
        values = {**{name: getattr(self, name).tolist() for name in names}, "calls": calls}
        return values if self.nodes is None else {**values, "nodes": self.nodes.tolist()}


class TopTokens(NamedTuple):
    """The most probable tokens at each position of an output, the most probable first.

    The log-probability of an impossible token is -inf.
    """

    tokens: Int32[np.ndarray, "m k"]
    log_probs: Float32[np.ndarray, "m k"]


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A finished row.

    Attributes:
      index: the prompt's place in the input; for an `Engine` the index from `add`.
      sample: the number of the sample in 0 .. num_samples - 1.
      text: the output; for a decoder-only network the text added to its prompt.
      tokens: the output without its end-of-sequence token; after a stop string up to the token that
        completed it, although `text` is cut before the string.
      ended_by: "eos"; "stop": a stop string; "length": its limit; "nan": a model gave NaN, see
        `error`.
      info: its counts.
      seconds: from entering the batch until the host saw its end, without compilation.
      compile_seconds: the time of compiling, or reading programs from the cache, meanwhile.
      log_probs: natural logarithms of the probabilities of its tokens (with the end-of-sequence
        token) under the verifier itself: at temperature 1, without filters and processors, however
        they were drawn. NaN where the verifier has not read a token, or if a user's own method
        does not write them. None without `log_probs=True`.
      log_probs_processed: the same after temperature, top-k, top-p and processors; at temperature 0
        they are 0.0, or -inf for a token that the verifier would not take.
      log_probs_target: the same under the distributions that the tokens were drawn from (see
        `RowInfo.log_prob_target`), or None.
      error: the model that gave NaN and the step, or None.
      eos_id: the end-of-sequence token that ended it, or None.
      sources: for each of its tokens the name of where it came from: the drafter that drafted it;
        or the verifier, as "residual" (after a rejection), "bonus" (after a whole accepted draft)
        or "verifier" (without a draft). In a cascade that decodes sequentially: the model that
        wrote it. "unknown" if a user's own method does not write them. None without `sources=True`.
      text_of: the function that decodes its first tokens, for `show`; or None.
      prefilled: the number of tokens of its prompt that the models read for it. The others come
        from a prefix, or from the prompt's first sample.
      top: the most probable tokens at each of its positions, under the verifier itself at
        temperature 1. None without `top_log_probs=k`, or with an `error`.
    """

    index: int
    text: str
    tokens: np.ndarray
    ended_by: str
    info: RowInfo = dataclasses.field(repr=False)
    seconds: float = 0.0
    compile_seconds: float = 0.0
    log_probs: Float32[np.ndarray, " m"] | None = dataclasses.field(default=None, repr=False)
    log_probs_processed: Float32[np.ndarray, " m"] | None = dataclasses.field(
        default=None, repr=False
    )
    log_probs_target: Float32[np.ndarray, " m"] | None = dataclasses.field(default=None, repr=False)
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

    @property
    def tokens_with_end(self) -> np.ndarray:
        """Its tokens, with the end-of-sequence token that ended it."""
        end = [] if self.eos_id is None else [self.eos_id]
        return np.append(self.tokens, np.array(end, self.tokens.dtype))

    def show(self) -> "Shown":
        """Returns the text, coloured by the sources of its tokens; it needs `sources=True`."""
        return Shown((self._sourced(self.sample > 0),))

    def _sourced(self, with_sample: bool) -> "tuple[str, Sourced]":
        if self.sources is None:
            raise UserError("the row has no sources: decode with decoder(prompts, sources=True)")
        parts = split(self.text, self.tokens.tolist(), self.text_of)
        name = f"{self.index}.{self.sample}" if with_sample else str(self.index)
        return name, list(zip(parts, self.sources, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as JSON values; a log-probability of minus infinity or NaN is None."""
        values: dict[str, Any] = {
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
                values[name] = [finite(x) for x in getattr(self, name)]
        if self.top is not None:
            values["top_tokens"] = self.top.tokens.tolist()
            values["top_log_probs"] = [[finite(x) for x in each] for each in self.top.log_probs]
        if self.sources is not None:
            values["sources"] = list(self.sources)
        return values if self.error is None else {**values, "error": self.error}


def split_time(seconds: float, compiling: float) -> dict[str, float]:
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


class RunInfo:
    """The counts of n rows in their order (`per_row`), and their totals.

    Attributes:
      rows: n.
      emitted: emitted tokens, end-of-sequence tokens included. This and the following are totals.
      rounds: steps of the method.
      verifier_calls: passes of the verifier; a pass counts for each row that it serves.
      drafter_calls: passes of all other models, likewise.
      drafted: drafted tokens.
      accepted: accepted tokens that were emitted.
      accepted_past_end: accepted tokens past the ends of rows, which were not emitted.
      deferrals, rollbacks: see `specjax.types.DecodeInfo`.
    """

    def __init__(self, per_row: RowInfo) -> None:
        def total(counts: np.ndarray) -> int:
            return int(np.sum(counts))

        past = past_end(per_row.accepted, per_row.rounds, per_row.emitted)
        self.per_row, self.rows = per_row, len(per_row.emitted)
        self.emitted, self.rounds = total(per_row.emitted), total(per_row.rounds)
        self.verifier_calls = total(per_row.verifier_calls)
        self.drafter_calls = total(per_row.drafter_calls)
        self.drafted, self.accepted_past_end = total(per_row.drafted), total(past)
        self.accepted = total(per_row.accepted) - self.accepted_past_end
        self.deferrals, self.rollbacks = total(per_row.deferrals), total(per_row.rollbacks)

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
        """For each position i, the share of blocks with a token i that was accepted.

        vLLM's rate counts shorter blocks too: see `DraftAcceptance.per_position_acceptance_rate`.
        """

        def reached(lengths: np.ndarray) -> np.ndarray:
            """The number of blocks with a token at each position, from lengths `[n, G + 1]`."""
            counts = lengths.sum(axis=0, dtype=np.float64)
            return np.cumsum(counts[::-1])[-2::-1]

        drafted = reached(self.per_row.drafted_lengths)
        accepted = reached(self.per_row.accepted_lengths)
        return np.divide(accepted, drafted, out=np.full_like(accepted, np.nan), where=drafted > 0)

    def summary(self) -> dict[str, float | None]:
        """Returns totals and rates over all rows as JSON numbers; an undefined rate is None."""
        return {
            "rows": self.rows,
            **{name: getattr(self, name) for name in (*COUNTS, "accepted_past_end")},
            "tokens_per_verifier_call": finite(self.tokens_per_verifier_call),
            "acceptance_rate": finite(self.acceptance_rate),
        }


@dataclasses.dataclass(frozen=True, repr=False)
class DraftAcceptance:
    """The acceptance of drafts. The rates have the names and definitions of vLLM's metrics.

    A draft is a round with at least one drafted token. A rate without drafts is NaN.

    Attributes:
      drafted_lengths: the number of drafts with 1 .. G drafted tokens.
      accepted_lengths: the number of drafts with 0 .. G accepted tokens. Tokens past a row's end
        count too.
      drafted_nodes: of trees, the number of drafts with each node, in the order of drafting; else
        empty.
      accepted_nodes: of trees, the number of drafts in which each node was accepted.
    """

    drafted_lengths: tuple[int, ...]
    accepted_lengths: tuple[int, ...]
    drafted_nodes: tuple[int, ...] = ()
    accepted_nodes: tuple[int, ...] = ()

    @classmethod
    def of(cls, infos: Sequence[Mapping[str, Any]]) -> "DraftAcceptance":
        """Sums the counts of several rows, which have the names of `RowInfo`."""

        def total(counts: Iterable[Iterable[int]]) -> list[int]:
            columns = itertools.zip_longest(*counts, fillvalue=0)
            return [sum(map(int, column)) for column in columns] or [0]

        drafted, accepted = (
            total(info[f"{name}_lengths"] for info in infos) for name in ("drafted", "accepted")
        )
        # Rounds that draft nothing accept nothing.
        accepted[0] -= drafted[0]
        lengths = tuple(drafted[1:]), tuple(accepted)
        if not infos or any(info.get("nodes") is None for info in infos):
            return cls(*lengths)
        return cls(*lengths, *(tuple(total(info["nodes"][i] for info in infos)) for i in (0, 1)))

    @property
    def drafts(self) -> int:
        return sum(self.drafted_lengths)

    @property
    def draft_tokens(self) -> int:
        return sum(i * count for i, count in enumerate(self.drafted_lengths, 1))

    @property
    def accepted_tokens(self) -> int:
        """The number of accepted tokens: `accepted` plus `accepted_past_end` of `RunInfo`."""
        return sum(i * count for i, count in enumerate(self.accepted_lengths))

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens per draft: each draft also yields a token of the verifier."""
        return 1 + ratio(self.accepted_tokens, self.drafts)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted tokens per drafted token."""
        return ratio(self.accepted_tokens, self.draft_tokens)

    @property
    def per_position_acceptance_rate(self) -> tuple[float, ...]:
        """For each position i, the share of all drafts whose first i tokens were accepted.

        `RunInfo.acceptance_by_position` counts only the drafts with a token i.
        """
        reached = np.cumsum(self.accepted_lengths[::-1])[-2::-1]
        return tuple(ratio(int(count), self.drafts) for count in reached)

    @property
    def per_node_acceptance_rate(self) -> tuple[float, ...]:
        """For each node of a tree, the share of the drafts with it that accepted it."""
        return tuple(map(ratio, self.accepted_nodes, self.drafted_nodes))

    def to_dict(self) -> dict[str, Any]:
        """Returns counts and rates as JSON values; an undefined rate is None."""
        by_position = list(self.per_position_acceptance_rate)
        return {
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "mean_acceptance_length": finite(self.mean_acceptance_length),
            "draft_acceptance_rate": finite(self.draft_acceptance_rate),
            "per_position_acceptance_rate": by_position if self.drafts else None,
            "accepted_lengths": list(self.accepted_lengths),
        }

    def __str__(self) -> str:
        if not self.drafts:
            return "no drafts"
        rates = ", ".join(f"{rate:.3f}" for rate in self.per_position_acceptance_rate)
        return (
            f"mean acceptance length {self.mean_acceptance_length:.2f}, draft acceptance rate "
            f"{self.draft_acceptance_rate:.3f} ({self.drafts} drafts)\n"
            f"acceptance rate by position {rates}"
        )

    def __repr__(self) -> str:
        return f"DraftAcceptance({str(self).replace(chr(10), ', ')})"

    def plot(self) -> Any:
        """Draws the acceptance by position, and how often how many tokens were accepted.

        Of trees, the acceptance of each node that was ever drafted. The result is a matplotlib
        `Figure`, which a notebook shows.
        """
        if not self.drafts:
            raise UserError("there are no drafts to plot: decode with a drafter")
        figure = _figure_class()(figsize=(8, 3), layout="constrained")
        rates, lengths = figure.subplots(1, 2)
        of_nodes = [rate for rate in self.per_node_acceptance_rate if rate == rate]
        shares = [count / self.drafts for count in self.accepted_lengths]
        style = {"color": "0.75", "edgecolor": "black"}
        for axis, heights, first in (
            (rates, of_nodes or self.per_position_acceptance_rate, 1),
            (lengths, shares, 0),
        ):
            places = range(first, first + len(heights))
            bars = axis.bar(places, heights, **style)
            if len(heights) <= _MOST_LABELS:
                size = "small" if len(heights) < 8 else "x-small"
                axis.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=size)
                axis.set_xticks(places)
            else:  # at 0 or 1, then at multiples of 5
                axis.set_xticks([first, *range(5, places[-1] + 1, -(-len(heights) // 50) * 5)])
        place = "node of the tree, as drafted" if of_nodes else "position in the draft"
        rates.set(xlabel=place, ylabel="acceptance rate", ylim=(0, 1.1))
        lengths.set(xlabel="accepted tokens of a draft", ylabel="share of drafts")
        rates.set_title(f"draft acceptance rate {self.draft_acceptance_rate:.2f}", size="medium")
        mean = f"mean acceptance length {self.mean_acceptance_length:.2f}"
        lengths.set_title(mean, size="medium")
        lengths.margins(y=0.12)
        return figure


@functools.cache
def _figure_class() -> Any:
    """Matplotlib's `Figure`, which a notebook also shows if nothing has imported pyplot."""
    figures: Any = require("matplotlib.figure", "eval")

    class Figure(figures.Figure):
        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png")
            return written.getvalue()

    return Figure


def ratio(numerator: int, denominator: int) -> float:
    """Returns the quotient; NaN if the denominator is 0."""
    return numerator / denominator if denominator else float("nan")


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
        if isinstance(place, slice):
            return dataclasses.replace(self, rows=self.rows[place])
        return self.rows[place]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __repr__(self) -> str:
        shown = [repr(row.text) for row in self.rows[:3]]
        more = f", ... {len(self) - 3} more" if len(self) > 3 else ""
        info = f", info={self.info!r}" if self.rows else ""
        return f"Result(texts=[{', '.join(shown)}{more}]{info})"

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self.rows]

    @property
    def tokens(self) -> list[np.ndarray]:
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
        """Whether the model ended each row with an end-of-sequence token."""
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
        first. A prompt with fewer rows keeps all of them.
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
        return DraftAcceptance.of([row.info._asdict() for row in self.rows])

    def show(self, count: int = 3) -> "Shown":
        """Returns the first `count` texts, coloured by the sources of their tokens.

        It needs `sources=True`.
        """
        several = any(row.sample for row in self.rows)
        shown = self.rows[: whole_number("count", count, low=0)]
        return Shown(tuple(row._sourced(several) for row in shown))

    def plot(self) -> Any:
        """Draws the acceptance of drafts; see `DraftAcceptance.plot`."""
        return self.acceptance.plot()

    def to_dicts(self) -> list[dict[str, Any]]:
        return [row.to_dict() for row in self.rows]


class _Style(NamedTuple):
    """How a source looks: the marks around its text, its ANSI codes, and its CSS."""

    marks: str
    ansi: str
    css: str


# Each style differs from the others without colours too.
_OWN = {
    "residual": _Style("[]", "1;31", "background:#f6c6ad;border:1px solid"),
    "bonus": _Style("<>", "33", "background:#fbe7a1;border:1px dashed"),
    "verifier": _Style("{}", "35", "background:#e3d0ea;border:1px dotted"),
}
_DRAFTERS = (
    _Style("", "4;32", "background:#cfeadb;border-bottom:2px solid"),
    _Style("()", "4;36", "background:#c9e3f5;border-bottom:3px double"),
    _Style("||", "4;34", "background:#d5d8f3;border-bottom:2px dashed"),
    _Style("//", "4;37", "background:#e4e4e4;border-bottom:2px dotted"),
)
_PLAIN = _Style("", "", "")
# Each of these tokens has marks of its own.
_SINGLE = ("residual", "bonus")
# Characters that move the cursor, change colours or reverse the text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Sourced = list[tuple[str, str]]  # (text, source) of each token


def split(
    text: str, tokens: Sequence[int], text_of: Callable[[Sequence[int]], str] | None
) -> list[str]:
    """Splits a text into the parts that its tokens add, which together are the text.

    A character belongs to the token that completes it. The text may be cut before its last tokens.
    `text_of` returns the text of the first tokens; None: each token's text is its id.
    """
    if text_of is None:
        return [f"{token} " for token in tokens]
    whole, ends = text_of(tokens), [0]
    for count in range(1, len(tokens)):
        so_far = text_of(tokens[:count])
        # Otherwise it ends inside a character.
        fits = whole.startswith(so_far)
        ends.append(max(ends[-1], len(so_far)) if fits else ends[-1])
    ends += [max(len(whole), len(text))] * bool(len(tokens))
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@dataclasses.dataclass(frozen=True, repr=False)
class Shown:
    """Texts with the source of each token: HTML in a notebook, else text with marks.

    The text has colours if it is written to a terminal and `NO_COLOR` is not set.

    Attributes:
      rows: for each text a name, and the text and the source of each token.
    """

    rows: tuple[tuple[str, Sourced], ...]

    def __repr__(self) -> str:
        return self.text(has_colours(sys.stdout))

    def text(self, colours: bool) -> str:
        """Returns the texts and a legend, with ANSI codes if `colours`."""

        def marked(text: str, style: _Style) -> str:
            word = text.strip() or text
            before, _, after = text.partition(word)
            if style.marks and word.isspace() and "\n" in word:
                # Marks around the end of a line would be on two lines.
                word, after = word.replace("\n", "\\n"), "\n"
            word = f"{style.marks[:1]}{word}{style.marks[1:]}"
            if colours and style.ansi:
                word = _in_colour(word, style)
            return before + word + after

        return "\n".join([f"{name}: {line}" for name, line in self._lines(marked)])

    def _repr_html_(self) -> str:

        def marked(text: str, style: _Style) -> str:
            look = f"color:#000;{style.css}" if style.css else ""
            return f'<span style="{look}">{html.escape(text)}</span>'

        lines = [f"{html.escape(name)}: {line}" for name, line in self._lines(marked)]
        style = "white-space:pre-wrap;line-height:1.6"
        return f'<div style="{style}">' + "\n".join(lines) + "</div>"

    def _lines(self, marked: Callable[[str, _Style], str]) -> Iterator[tuple[str, str]]:
        """The name and the marked text of each row, then the legend."""
        counts = collections.Counter(source for _, row in self.rows for _, source in row)
        drafters = [name for name in counts if name not in _OWN]
        styles = _OWN | {name: _DRAFTERS[i % len(_DRAFTERS)] for i, name in enumerate(drafters)}
        if len(counts) == 1:
            styles = dict.fromkeys(counts, _PLAIN)
        for name, row in self.rows:
            yield name, "".join(marked(_visible(text), styles[of]) for text, of in _runs(row))
        total = sum(counts.values())
        shares = [f"{marked(of, styles[of])} {count}" for of, count in counts.items()]
        yield f"source of {total} tokens", ", ".join(shares) or "none"


def coloured(text: str, source: str) -> str:
    """A token's text with the colour of its source in `Shown`, where there is one drafter."""
    return _in_colour(_visible(text), _OWN.get(source, _DRAFTERS[0]))


def _in_colour(text: str, style: _Style) -> str:
    return f"\x1b[{style.ansi}m{text}\x1b[0m"


def _runs(row: Sourced) -> Sourced:
    """The row with the successive tokens of a drafter joined, and without empty texts."""
    runs: Sourced = []
    for text, source in row:
        if runs and runs[-1][1] == source and source not in _SINGLE:
            runs[-1] = (runs[-1][0] + text, source)
        elif text:
            runs.append((text, source))
    return runs


def _visible(text: str) -> str:
    """The text with its control characters as escapes; tabs and new lines stay."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def has_colours(stream: Any) -> bool:
    """Returns whether a stream is a terminal that shows colours."""
    refused = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not refused and bool(getattr(stream, "isatty", bool)())
