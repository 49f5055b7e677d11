"""What decoding took, and how far it went from the verifier: figures that can be resampled.

Axes: n rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specjax.checks import one_number
from specjax.evaluation.bootstrap import Sums, divided, ratio
from specjax.types.method import discarded

_NAMES = ("emitted", "rounds", "drafted", "accepted")
VERIFIER = "verifier"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowCounts:
    """The counts of n rows; see `specjax.text.results.RowInfo`.

    Attributes:
      emitted: `[n]` tokens, end-of-sequence tokens included.
      rounds: `[n]` steps of the method.
      drafted: `[n]` tokens.
      accepted: `[n]` drafted tokens.
      calls: model's name -> `[n]` its passes.
      cut: `[n]` bool, whether the length limit ended the row.
      decoded: `[n]` bool; the other rows have zeros, and no part in means over rows.
      deferrals: `[n]`, see `specjax.types.DecodeInfo`; None where they are not known.
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
        """Those of a call of `Decoder`, or of the lines of a `predictions.jsonl`.

        Args:
          records: n objects with `info` and `ended_by`, as `Result.to_dicts` gives them; those
            without are not decoded. An `info` may lack `deferrals`.

        Raises:
          KeyError: an `info` lacks a count.
        """
        infos = [record.get("info") for record in records]
        told = all("deferrals" in info for info in infos if info)
        models = sorted({name for info in infos if info for name in info["calls"]})

        def column(read: Any) -> np.ndarray:
            return np.asarray([read(info) if info else 0 for info in infos], np.int64)

        return cls(
            **{name: column(lambda info, name=name: info[name]) for name in _NAMES},
            calls={name: column(lambda info, name=name: info["calls"][name]) for name in models},
            cut=np.asarray([record.get("ended_by") == "length" for record in records]),
            decoded=np.asarray([info is not None for info in infos]),
            deferrals=column(lambda info: info["deferrals"]) if told else None,
        )


def efficiency(counts: RowCounts, costs: Mapping[str, float] | None = None) -> dict[str, Sums]:
    """Figures of what decoding took.

    Args:
      counts: of n rows.
      costs: model's name -> what one of its passes costs, in any unit, such as seconds.

    Returns:
      Figures by name, NaN where nothing was drafted or no model of that name ran:
        `tokens_per_verifier_call`: emitted tokens per pass of the verifier.
        `deferrals_per_token`, where deferrals are known: of them per emitted token (Faster
          Cascades, figure 1). A pass that checks a block is one deferral; see `DecodeInfo`.
        `drafter_share`: of the emitted tokens, those that the drafter wrote.
        `rejection_rate`: of the drafted tokens, those that were not accepted: the first that was
          rejected and those behind it. With drafts of one token, the rate of figure 3 there.
        `discard_rate`: drafted tokens that were not emitted, per emitted token (SpecDec++, 4.2).
        `output_length`: emitted tokens per row, an end-of-sequence token included.
        `cut_share`: of the rows, those that the length limit ended.
        `cost_per_token`, with costs: of all passes, per emitted token. The verifier alone takes one
          pass per token.

    Raises:
      TypeError: a cost is no number.
      ValueError: a cost is negative or not finite, or not given for each of the models.
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
            # A sequential cascade: what is not the verifier's is the drafter's.
            own = counts.emitted - counts.deferrals
            figures["drafter_share"] = ratio(own, counts.emitted)
    if costs is not None:
        figures["cost_per_token"] = ratio(_cost(counts, check_costs(costs)), counts.emitted)
    return figures


def check_costs(costs: Mapping[str, float]) -> dict[str, float]:
    """Costs as floats; raises as `efficiency` does."""
    if not isinstance(costs, Mapping):
        raise TypeError(
            "costs must be a dict such as {'verifier': 1.0, 'drafter': 0.05}, got "
            f"{type(costs).__name__}"
        )
    span: dict[str, Any] = {"low": 0.0, "open_high": True, "dtype": np.float64}
    return {name: one_number(f"costs: {name}", cost, **span) for name, cost in costs.items()}


def _cost(counts: RowCounts, costs: Mapping[str, float]) -> np.ndarray:
    missing = sorted({*counts.calls} - {*costs})
    if missing:
        raise ValueError(f"costs has no cost of a pass of {', '.join(missing)}: give one for each")
    total = np.zeros(len(counts.emitted))
    for name, calls in counts.calls.items():
        total += costs[name] * calls
    return total


def divergence(log_target: ArrayLike, log_p: ArrayLike, tokens: ArrayLike) -> Sums:
    """The estimate of KL(π ‖ p) per emitted token, in nats: mean of log π - log p of the tokens.

    Each token is drawn from π given those before it. So the sum over a row is an unbiased estimate
    of its sum of KL(π_t ‖ p_t), which is the divergence of the laws of whole texts; per token it is
    a ratio of two means, whose bias is of order 1 / n. It may be negative by chance, its mean is
    not.

    Args:
      log_target: `[n]`, a row's sum (or one token's) of log π; finite, or NaN where it is unknown.
      log_p: `[n]`, the same of log p; -inf where the verifier could not emit the row.
      tokens: `[n]`, how many tokens the sums are over.

    Returns:
      The figure: infinite where a row has log p = -inf, NaN where nothing is known. A row with a
      NaN of log π is left out with its tokens. A NaN of log p alone makes the figure NaN: a method
      that leaves rows unread chooses them, and the others do not stand for them.

    Raises:
      ValueError: the arrays have not one length n >= 1, or log π is infinite.

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
    """Of the rows, those that the verifier could not have emitted: log p is -inf.

    Args:
      log_target: `[n]`, as of `divergence`.
      log_p: `[n]`, likewise.

    Returns:
      The figure, over the rows whose log π is known; NaN where there is none, and where the
      verifier has left one of them unread (log p is NaN), as of `divergence`.

    Raises:
      ValueError: see `divergence`.
    """
    target, p = _vectors(log_target=log_target, log_p=log_p)
    known, unread = _read(target, p)

    def score(sums: np.ndarray) -> np.ndarray:
        return np.where(sums[:, 2] > 0, np.nan, divided(sums[:, 0], sums[:, 1]))

    return Sums(np.stack([known & np.isneginf(p), known, unread], axis=1), score)


def _vectors(**arrays: ArrayLike) -> list[np.ndarray]:
    """Float64 vectors of one length; raises ValueError as `divergence` does."""
    found = [np.asarray(x, np.float64) for x in arrays.values()]
    first, p = found[:2]
    if first.ndim != 1 or not first.size or any(x.shape != first.shape for x in found):
        raise ValueError(
            f"{', '.join(arrays)} must be vectors [n] of one length n >= 1, got "
            f"{', '.join(str(x.shape) for x in found)}"
        )
    if np.isinf(first).any() or (p == np.inf).any():
        raise ValueError("log_target must be finite: what was emitted had a probability above 0")
    return found


def _read(target: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`[n]` bool each: which rows have both numbers, and whether any lacks log p alone.

    The second is in every row, so that no resample of the rows, and no other seed, tells a figure
    without those that the verifier has left unread.
    """
    unread = np.isnan(p) & ~np.isnan(target)
    return ~(np.isnan(target) | np.isnan(p)), np.full(p.shape, unread.any())
