"""The efficiency of decoding and its divergence from the verifier: figures for `Bootstrap`.

Axes: n rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specjax.checks import one_number
from specjax.errors import UserError
from specjax.evaluation.bootstrap import Sums, divided, ratio
from specjax.types.method import discarded

_NAMES = ("emitted", "rounds", "drafted", "accepted")
VERIFIER = "verifier"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowCounts:
    """The counts of n rows; see `specjax.text.results.RowInfo`.

    Attributes:
      emitted: `[n]` emitted tokens, end-of-sequence tokens included.
      rounds: `[n]` steps of the method.
      drafted: `[n]` drafted tokens.
      accepted: `[n]` accepted tokens.
      calls: model's name -> `[n]` passes.
      cut: `[n]` bool, whether the length limit ended the row.
      decoded: `[n]` bool; other rows have zeros and do not count in means over rows.
      deferrals: `[n]`, see `specjax.types.DecodeInfo`; None if unknown.
    """

    emitted: np.ndarray  # [n]
    rounds: np.ndarray  # [n]
    drafted: np.ndarray  # [n]
    accepted: np.ndarray  # [n]
    calls: Mapping[str, np.ndarray]  # [n]
    cut: np.ndarray  # [n]
    decoded: np.ndarray  # [n]
    deferrals: np.ndarray | None = None  # [n]

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]]) -> "RowCounts":
        """Reads the counts of a call of `Decoder`, or of the lines of a `predictions.jsonl`.

        Args:
          records: n objects with `info` and `ended_by`, as from `Result.to_dicts`; a record without
            `info` is not decoded. An `info` may lack `deferrals`.

        Raises:
          KeyError: an `info` lacks a count.
        """
        infos = [record.get("info") for record in records]
        has_deferrals = all("deferrals" in info for info in infos if info)
        models = sorted({name for info in infos if info for name in info["calls"]})

        def column(read: Any) -> np.ndarray:
            return np.asarray([read(info) if info else 0 for info in infos], np.int64)

        return cls(
            **{name: column(lambda info, name=name: info[name]) for name in _NAMES},
            calls={name: column(lambda info, name=name: info["calls"][name]) for name in models},
            cut=np.asarray([record.get("ended_by") == "length" for record in records]),
            decoded=np.asarray([info is not None for info in infos]),
            deferrals=column(lambda info: info["deferrals"]) if has_deferrals else None,
        )


def efficiency(counts: RowCounts, costs: Mapping[str, float] | None = None) -> dict[str, Sums]:
    """Returns the figures of decoding.

    Args:
      counts: of n rows.
      costs: model's name -> the cost of a pass, in any unit, such as seconds.

    Returns:
      Figures by name, NaN if nothing was drafted or the model did not run:
        `tokens_per_verifier_call`: emitted tokens per pass of the verifier.
        `deferrals_per_token`, if known: deferrals per emitted token (Faster Cascades, figure 1). A
          pass that checks a block is one deferral; see `DecodeInfo`.
        `drafter_share`: the share of emitted tokens that the drafter wrote.
        `rejection_rate`: the share of drafted tokens that were not accepted: the first rejected
          token and those after it. With drafts of one token, the rate of figure 3 there.
        `discard_rate`: drafted tokens that were not emitted, per emitted token (SpecDec++, 4.2).
        `output_length`: emitted tokens per row, an end-of-sequence token included.
        `cut_share`: the share of rows that the length limit ended.
        `cost_per_token`, with costs: the cost of all passes per emitted token. The verifier alone
          needs one pass per token.

    Raises:
      ValueError: a cost is negative or not finite, or a model has no cost.
    """
    verifier = counts.calls.get(VERIFIER, np.zeros_like(counts.emitted))
    lost = discarded(counts.drafted, counts.accepted, counts.rounds, counts.emitted)
    rows = counts.decoded.astype(np.float64)
    drafts = counts.emitted * counts.drafted.any()
    figures = {
        "tokens_per_verifier_call": ratio(counts.emitted, verifier),
        "drafter_share": ratio(counts.drafted - lost, drafts),
        "rejection_rate": ratio(counts.drafted - counts.accepted, counts.drafted),
        "discard_rate": ratio(lost, drafts),
        "output_length": ratio(counts.emitted, rows),
        "cut_share": ratio(counts.cut & counts.decoded, rows),
    }
    if counts.deferrals is not None:
        figures["deferrals_per_token"] = ratio(counts.deferrals, counts.emitted)
        if len(counts.calls) > 1 and not counts.drafted.any():
            # A sequential cascade: the drafter wrote all tokens that the verifier did not.
            own = counts.emitted - counts.deferrals
            figures["drafter_share"] = ratio(own, counts.emitted)
    if costs is not None:
        figures["cost_per_token"] = ratio(_cost(counts, check_costs(costs)), counts.emitted)
    return figures


def check_costs(costs: Mapping[str, float]) -> dict[str, float]:
    """Returns costs as floats; raises the errors of `efficiency`."""
    if not isinstance(costs, Mapping):
        raise UserError(
            "costs must be a dict such as {'verifier': 1.0, 'drafter': 0.05}, got "
            f"{type(costs).__name__}"
        )
    span: dict[str, Any] = {"low": 0.0, "open_high": True, "dtype": np.float64}
    return {name: one_number(f"costs: {name}", cost, **span) for name, cost in costs.items()}


def _cost(counts: RowCounts, costs: Mapping[str, float]) -> np.ndarray:
    missing = sorted({*counts.calls} - {*costs})
    if missing:
        raise UserError(f"costs has no cost for {', '.join(missing)}: give a cost for each model")
    total = np.zeros(len(counts.emitted))
    for name, calls in counts.calls.items():
        total += costs[name] * calls
    return total


def divergence(log_target: ArrayLike, log_p: ArrayLike, tokens: ArrayLike) -> Sums:
    """Estimates KL(π ‖ p) per emitted token, in nats: the mean of log π - log p of the tokens.

    Each token is drawn from π given the tokens before it. So the sum over a row is an unbiased
    estimate of its sum of KL(π_t ‖ p_t), the divergence of the distributions of whole texts. Per
    token it is a ratio of two means, with a bias of order 1 / n. It may be negative by chance.

    Args:
      log_target: `[n]`, a row's sum (or a token's value) of log π; finite, or NaN if unknown.
      log_p: `[n]`, the same of log p; -inf if the verifier could not emit the row.
      tokens: `[n]`, the number of tokens in the sums.

    Returns:
      The figure: infinite if a row has log p = -inf, NaN if nothing is known. A row with an unknown
      log π is left out with its tokens. An unknown log p of a known log π makes the figure NaN,
      because the rows that a method leaves unread are not a random sample.

    Raises:
      ValueError: the arrays are empty or differ in length, or log π is infinite.

    Source: KL(π ‖ p) = E_π[log π - log p].
    """
    target, p, count = _vectors(log_target=log_target, log_p=log_p, tokens=tokens)
    known, unread = _read(target, p)
    impossible = known & np.isneginf(p)
    finite = known & ~impossible
    nats = np.subtract(target, p, out=np.zeros_like(p), where=finite)

    def score(sums: np.ndarray) -> np.ndarray:
        figure = np.where(sums[:, 2] > 0, np.inf, divided(sums[:, 0], sums[:, 1]))
        return np.where(sums[:, 3] > 0, np.nan, figure)

    return Sums(np.stack([nats, count * known, impossible, unread], axis=1), score)


def impossible_share(log_target: ArrayLike, log_p: ArrayLike) -> Sums:
    """Returns the share of rows that the verifier could not have emitted (log p is -inf).

    Args:
      log_target: `[n]`, see `divergence`.
      log_p: `[n]`, likewise.

    Returns:
      The figure, over the rows with a known log π; NaN if there are none, or if log p is unknown
      (NaN) in any of them.

    Raises:
      ValueError: see `divergence`.
    """
    target, p = _vectors(log_target=log_target, log_p=log_p)
    known, unread = _read(target, p)

    def score(sums: np.ndarray) -> np.ndarray:
        return np.where(sums[:, 2] > 0, np.nan, divided(sums[:, 0], sums[:, 1]))

    return Sums(np.stack([known & np.isneginf(p), known, unread], axis=1), score)


def _vectors(**arrays: ArrayLike) -> list[np.ndarray]:
    """Float64 vectors of one length; raises the ValueErrors of `divergence`."""
    found = [np.asarray(x, np.float64) for x in arrays.values()]
    first, p = found[:2]
    if first.ndim != 1 or not first.size or any(x.shape != first.shape for x in found):
        raise UserError(
            f"{', '.join(arrays)} must be vectors [n] of equal length n >= 1, got "
            f"{', '.join(str(x.shape) for x in found)}"
        )
    if np.isinf(first).any() or (p == np.inf).any():
        raise UserError("log_target must be finite or NaN, and log_p below infinity")
    return found


def _read(target: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`[n]` bool each: which rows have both numbers, and whether any row lacks only log p."""
    unread = np.isnan(p) & ~np.isnan(target)
    return ~(np.isnan(target) | np.isnan(p)), np.full(p.shape, unread.any())
