"""How many drafted tokens were accepted, by position and by draft; as numbers and as a figure."""

import dataclasses
import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.checks import require
from specjax.errors import UserError

# More numbers over bars would stand over each other.
_MOST_LABELS = 11


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
        """Sums the `drafted_lengths` and `accepted_lengths`, each `[G + 1]`, of several rows."""
        each = [info["drafted_lengths"] for info in infos], [x["accepted_lengths"] for x in infos]
        drafted, accepted = (np.array(x or [[0]], np.int64).sum(axis=0) for x in each)
        # Rounds that draft nothing accept nothing.
        accepted[0] -= drafted[0]
        lengths = tuple(drafted[1:].tolist()), tuple(accepted.tolist())
        if not infos or any(info.get("nodes") is None for info in infos):
            return cls(*lengths)
        nodes = np.array([info["nodes"] for info in infos], np.int64).sum(axis=0)
        return cls(*lengths, *map(tuple, nodes.tolist()))

    @property
    def drafts(self) -> int:
        """The number of drafts."""
        return sum(self.drafted_lengths)

    @property
    def draft_tokens(self) -> int:
        """The number of drafted tokens."""
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

        A draft that is too short counts as not accepted there. `RunInfo.acceptance_by_position`
        leaves it out: it is the share of the drafts with a token i. Both are equal if all drafts
        have the same length.
        """
        reached = np.cumsum(self.accepted_lengths[::-1])[-2::-1]
        return tuple(ratio(int(count), self.drafts) for count in reached)

    @property
    def per_node_acceptance_rate(self) -> tuple[float, ...]:
        """For each node of a tree, the share of the drafts with it that accepted it."""
        return tuple(map(ratio, self.accepted_nodes, self.drafted_nodes))

    def to_dict(self) -> dict[str, Any]:
        """Returns counts and rates as JSON values; an undefined rate is None."""
        counts = {name: getattr(self, name) for name in ("drafts", "draft_tokens")}
        undefined = not self.drafts
        return {
            **counts,
            "accepted_tokens": self.accepted_tokens,
            "mean_acceptance_length": None if undefined else self.mean_acceptance_length,
            "draft_acceptance_rate": None if undefined else self.draft_acceptance_rate,
            "per_position_acceptance_rate": (
                None if undefined else list(self.per_position_acceptance_rate)
            ),
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

        Of trees, the acceptance of each node that was ever drafted.

        Returns:
          A matplotlib `Figure`, which a notebook shows.

        Raises:
          ImportError: matplotlib is not installed.
          ValueError: there are no drafts.
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
