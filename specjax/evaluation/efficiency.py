"""The efficiency of decoding and its divergence from the verifier: figures for `Bootstrap`.

Axes: n rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
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
      calls: model's name -> passes.
      cut: whether the length limit ended the row.
      decoded: other rows have zeros and do not count in means over rows.
      deferrals: see `specjax.types.DecodeInfo`; None if unknown.
    """

    emitted: Int[np.ndarray, " n"]
    rounds: Int[np.ndarray, " n"]
    drafted: Int[np.ndarray, " n"]
    accepted: Int[np.ndarray, " n"]
    calls: Mapping[str, Int[np.ndarray, " n"]]
    cut: Bool[np.ndarray, " n"]
    decoded: Bool[np.ndarray, " n"]
    deferrals: Int[np.ndarray, " n"] | None = None

    @classmethod
    def from_records(cls, records: Sequence[Mapping[str, Any]]) -> "RowCounts":
        """Reads the counts of `Result.to_dicts`, or of the lines of a `predictions.jsonl`.

        A record without `info` is not decoded. An `info` may lack `deferrals`.
        """
        infos = [record.get("info") for record in records]
        has_deferrals = all("deferrals" in info for info in infos if info)
        models = sorted({name for info in infos if info for name in info["calls"]})

        def column(read: Any) -> np.ndarray:
            return np.asarray([read(info) if info else 0 for info in infos], np.int64)

        return cls(
            **{name: column(lambda info, name=name: info[name]) for name in _NAMES},
            calls={
                name: column(lambda info, name=name: info["calls"].get(name, 0)) for name in models
            },
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
      UserError: a cost is negative or not finite, or a model has no cost.
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
            drafted = counts.emitted - counts.deferrals
            figures["drafter_share"] = ratio(drafted, counts.emitted)
    if costs is not None:
        prices = check_costs(costs)
        if missing := {*counts.calls} - {*prices}:
            raise UserError(f"costs has no cost for {', '.join(sorted(missing))}: give each a cost")
        spent = [prices[name] * calls for name, calls in counts.calls.items()]
        figures["cost_per_token"] = ratio(sum(spent, np.zeros(len(rows))), counts.emitted)
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


def divergence(log_target: ArrayLike, log_p: ArrayLike, tokens: ArrayLike) -> Sums:
    """Estimates KL(π ‖ p) per emitted token, in nats: the mean of log π - log p of the tokens.

    Each token is drawn from π given the tokens before it. So the sum over a row is an unbiased
    estimate of its sum of KL(π_t ‖ p_t), the divergence of the distributions of whole texts. Per
    token it is a ratio of two means, with a bias of order 1 / n. It may be negative by chance.

    Args:
      log_target: `[n]`, a row's sum (or a token's value) of log π; finite, or NaN if unknown. Such
        a row is left out with its tokens.
      log_p: `[n]`, the same of log p; -inf if the verifier could not emit the row, which makes the
        figure infinite. An unknown log p of a known log π makes it NaN, because the rows that a
        method leaves unread are not a random sample.
      tokens: `[n]`, the number of tokens in the sums.

    Source: KL(π ‖ p) = E_π[log π - log p].
    """
    target, p, is_read, unread = _read(log_target, log_p)
    impossible = is_read & np.isneginf(p)
    finite = is_read & ~impossible
    nats = np.subtract(target, p, out=np.zeros_like(p), where=finite)

    def score(sums: np.ndarray) -> np.ndarray:
        figure = np.where(sums[:, 2] > 0, np.inf, divided(sums[:, 0], sums[:, 1]))
        return np.where(sums[:, 3] > 0, np.nan, figure)

    return Sums(np.stack([nats, np.asarray(tokens) * is_read, impossible, unread], axis=1), score)


def impossible_share(log_target: ArrayLike, log_p: ArrayLike) -> Sums:
    """Returns the share of rows that the verifier could not have emitted (log p is -inf).

    It is over the rows with a known log π; NaN if there are none, or if log p is unknown (NaN) in
    any of them. See `divergence`.
    """
    _, p, is_read, unread = _read(log_target, log_p)

    def score(sums: np.ndarray) -> np.ndarray:
        return np.where(sums[:, 2] > 0, np.nan, divided(sums[:, 0], sums[:, 1]))

    return Sums(np.stack([is_read & np.isneginf(p), is_read, unread], axis=1), score)


def _read(log_target: ArrayLike, log_p: ArrayLike) -> tuple[np.ndarray, ...]:
    """Both, which rows have both, and whether any row lacks only log p; `[n]` each."""
    target, p = np.asarray(log_target, np.float64), np.asarray(log_p, np.float64)
    unread = np.isnan(p) & ~np.isnan(target)
    return target, p, ~(np.isnan(target) | np.isnan(p)), np.full(p.shape, unread.any())
