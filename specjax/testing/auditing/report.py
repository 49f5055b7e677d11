"""What an audit found: a row per case, and a verdict."""

import dataclasses
import enum
from typing import Any


class Verdict(enum.Enum):
    """What an audit says, with the exit status of `specjax audit`."""

    EXACT = "EXACT", 0
    EDGE = "EXACT, EDGE", 10
    LOSSY = "LOSSY as declared", 0
    NO_BIAS_FOUND = "NO BIAS FOUND", 0
    BIASED = "BIASED", 11
    INVALID = "INVALID", 12
    COUPLED = "ROWS COUPLED", 13
    NOT_FINISHED = "NOT FINISHED", 14

    def __init__(self, text: str, status: int):
        self.text, self.status = text, status


@dataclasses.dataclass(frozen=True)
class SheetRow:
    """The scores of one case; None: not measured.

    Attributes:
      length: L, the number of drafted tokens.
      variation: the total variation of the law of L + 1 tokens from the target's; an estimate if
        there is an interval.
      interval: of the total variation, at 99 %; None if it was computed.
      impossible: the mass of texts that the target cannot emit.
      lost: the mass of outcomes that are NaN or out of range.
      edge: the number of probed points with a uniform of 0 or of 1 - 2^-24 that emit an impossible
        or an invalid token.
      coupled: whether a row's outcome depends on the other rows.
      accepted: E[number accepted].
      first_wrong: the first token (from 1) with a wrong law; 0 if none.
      problem: why the case has no scores, or what is wrong with the outcome.
    """

    case: str
    length: int
    vocab: int
    variation: float | None = None
    interval: tuple[float, float] | None = None
    impossible: float | None = None
    lost: float | None = None
    edge: int | None = None
    coupled: bool | None = None
    accepted: float | None = None
    first_wrong: int = 0
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The result of `specjax.testing.audit`.

    Attributes:
      rows: the score sheet.
      how: the mode and the arrays.
      skipped: the cases that the function's interface leaves out, and why.
      evaluations: how many rows it judged.
      unresolved: the largest part of the uniforms that the grid may have missed, with a confidence
        of 99 %; 0 if no law was computed.
    """

    verdict: Verdict
    reason: str
    rows: tuple[SheetRow, ...]
    name: str
    how: str
    skipped: tuple[tuple[str, str], ...] = ()
    evaluations: int = 0
    seconds: float = 0.0
    unresolved: float = 0.0

    @property
    def worst(self) -> SheetRow | None:
        """The row with the largest total variation."""
        measured = [row for row in self.rows if row.variation is not None]
        return max(measured, key=lambda row: row.variation or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = dataclasses.asdict(self)
        return values | {"verdict": self.verdict.text, "status": self.verdict.status}

    def __str__(self) -> str:
        head = ["case", "L", "TV", "p=0", "lost", "edge", "rows", "E[acc]"]
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
        lines = [f"{self.name}: {self.how}"]
        for line in cells:
            shown = [line[0].ljust(widths[0])]
            shown += [x.rjust(w) for x, w in zip(line[1:], widths[1:], strict=True)]
            lines.append("  ".join(shown).rstrip())
        lines.insert(2, "  ".join("-" * w for w in widths))
        lines += [f"{row.case}: {row.problem}" for row in self.rows if row.problem]
        if self.skipped:
            names = ", ".join(f"{case} ({why})" for case, why in self.skipped)
            lines.append(f"left out: {names}")
        lines.append(f"{self.evaluations:,} rows judged in {self.seconds:.1f} s")
        if self.unresolved:
            what = "of the uniforms of a case may be unresolved (99 % confidence)"
            lines.append(f"at most {self.unresolved:.1%} {what}")
        lines.append(f"{self.verdict.text}: {self.reason}")
        if self.verdict is Verdict.BIASED:
            lines.append("if it is lossy on purpose, declare its rule (--rule)")
        return "\n".join(lines)

    def show(self) -> None:
        print(self)


def _cells(row: SheetRow) -> list[str]:
    rows = {None: "-", True: "coupled", False: "alone"}[row.coupled]
    variation = _number(row.variation)
    if row.interval is not None:
        variation += f" [{row.interval[0]:.2g}, {row.interval[1]:.2g}]"
    return [
        row.case,
        str(row.length),
        variation,
        _number(row.impossible),
        _number(row.lost),
        "-" if row.edge is None else str(row.edge),
        rows,
        "-" if row.accepted is None else f"{row.accepted:.3f}",
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0.0 else f"{value:.2g}"
