"""The rows and the tables of `benchmarks.tpu`."""

from collections.abc import Mapping
from typing import Any

from benchmarks.predicted import CHIPS
from benchmarks.tpu import estimates
from benchmarks.tpu.cases import Case
from benchmarks.tpu.measures import MB
from benchmarks.tpu.topologies import TPUS
from specjax.cli.report import Report

COLUMNS = (
    "pair",
    "chip",
    "mesh",
    "rows",
    "weights",
    "method",
    "program",
    "arguments_MB",
    "temporaries_MB",
    "filled",
    "cache_copies",
    "cache_stores",
    "cache_fused",
    "vocabulary_copies",
    "padding",
    "host_transfers",
    "float64",
    "collectives",
    "instructions",
    "us",
    "roofline_us",
    "ratio",
    "speedup",
)
_BYTES = ("arguments", "temporaries")
_PASSES = ("verifier_pass", "drafter_pass", "bonus")


def row_of(
    case: Case,
    name: str,
    numbers: Mapping[str, float],
    facts: Mapping[str, Any],
    least: Mapping[str, float],
    alone: Mapping[str, float] | None,
    tokens: float,
) -> dict[str, Any]:
    """The row of a program.

    Args:
      case: its case.
      name: the program.
      numbers: its numbers, with all layers.
      facts: other facts.
      least: the rooflines of a step, in seconds; empty for other programs.
      alone: the numbers of a step of the verifier alone, or None.
      tokens: tokens emitted in a round.
    """
    scale = 1e6 / TPUS[case.chip].hertz
    data, ways = (case.mesh.shape[axis] for axis in ("data", "model"))
    filled = numbers["arguments"] + numbers["temporaries"]
    row: dict[str, Any] = {
        "pair": case.pair,
        "chip": case.chip,
        "mesh": f"{data}x{ways}",
        "rows": case.sizes.rows,
        "weights": case.weights,
        "method": case.method,
        "program": name,
        "arguments_MB": numbers["arguments"] / MB,
        "temporaries_MB": numbers["temporaries"] / MB,
        "filled": filled / CHIPS[case.chip].memory,
        "widest_collective_MB": facts["widest_collective_MB"],
        "padding": facts["padding"],
        "padded": facts["padded"],
        "no_estimate": facts["no_estimate"],
        **{name: round(n) for name, n in numbers.items() if "/" not in name and name not in _BYTES},
        **_times(numbers, scale),
    }
    if name == "step":
        bandwidth = CHIPS[case.chip].bandwidth
        row["parts"] = _parts(numbers, least, scale, case.sizes.draft, bandwidth)
        row["roofline_us"] = 1e6 * (least["step"] + least["bonus"])
        row["ratio"] = row["us"] / row["roofline_us"]
        row["copied_us"] = _copied(numbers, bandwidth)
    if alone is not None:
        reference = _times(alone, scale)
        row["alone_us"] = reference["us"]
        row["speedup"] = tokens * reference["us"] / row["us"]
        slow = tokens * (reference["us"] + _copied(alone, bandwidth))
        row["alone_collectives"] = round(alone["collectives"])
        row["speedup_copies_waited_for"] = slow / (row["us"] + _copied(numbers, bandwidth))
    return row


def _times(numbers: Mapping[str, float], scale: float) -> dict[str, float]:
    cycles = {part: numbers[f"part/{part}"] for part in _all_parts()}
    whole = sum(cycles.values())
    other = sum(value for part, value in cycles.items() if part not in _PASSES)
    return {
        "cycles": whole,
        "us": _rounded(whole * scale),
        "us_without_bonus": _rounded((whole - cycles["bonus"]) * scale),
        "share_of_no_pass": other / whole if whole else 0.0,
    }


def _rounded(value: float) -> float:
    """Rounded, so that a table does not write it as a power of ten."""
    return round(value) if value >= 1000.0 else value


def _all_parts() -> tuple[str, ...]:
    return (*estimates.PARTS, estimates.BOOKKEEPING, estimates.UNNAMED)


def _copied(numbers: Mapping[str, float], bandwidth: float) -> float:
    """Microseconds of the parallel copies."""
    return 1e6 * sum(numbers[f"moved/{region}"] for region in estimates.REGIONS) / bandwidth


def _parts(
    numbers: Mapping[str, float],
    least: Mapping[str, float],
    scale: float,
    draft: int,
    bandwidth: float,
) -> list[dict[str, Any]]:
    """A line for each part, for each region, and for the whole step."""
    whole = sum(numbers[f"part/{part}"] for part in _all_parts())

    def line(name: str, cycles: float, moved: float | None, seconds: float | None) -> Any:
        found: dict[str, Any] = {
            "part": name,
            "cycles": round(cycles),
            "share": cycles / whole,
            "us": _rounded(cycles * scale),
            "copied_us": None if moved is None else 1e6 * moved / bandwidth,
            "roofline_us": None if seconds is None else 1e6 * seconds,
        }
        both = found["us"] + (found["copied_us"] or 0.0)
        found["ratio"] = found["us"] / found["roofline_us"] if seconds else None
        found["ratio_with_copies"] = both / found["roofline_us"] if seconds and moved else None
        return found

    present = [name for name in _all_parts() if numbers[f"part/{name}"]]
    lines = [line(name, numbers[f"part/{name}"], None, least.get(name)) for name in present]
    inside = {name: (numbers[f"region/{name}"], numbers[f"moved/{name}"]) for name in _SHOWN}
    lines.append(line("= outside the loops", *inside[estimates.OUTSIDE], None))
    if least["draft step"]:
        cycles, moved = inside[estimates.DRAFTING]
        lines.append(line("= a draft step", cycles / draft, moved / draft, least["draft step"]))
        lines.append(line("= the bonus branch", *inside[estimates.BONUS], least["bonus"]))
    moved = sum(moved for _, moved in inside.values())
    return [*lines, line("= the step", whole, moved, least["step"] + least["bonus"])]


_SHOWN = (estimates.OUTSIDE, estimates.DRAFTING, estimates.BONUS)


def notes_of(row: Mapping[str, Any], facts: Mapping[str, Any], top: int) -> list[str]:
    """The notes below the table of all programs: a table for each step."""
    title = " ".join(str(row[key]) for key in COLUMNS[:6])
    notes = [f"\n{title}: most padded {row['padded'] or '-'}"]
    if row["no_estimate"]:
        listed = ", ".join(f"{name} x{n}" for name, n in row["no_estimate"].items())
        notes.append(f"no estimate for {listed}")
    if "parts" in row:
        notes += ["", Report(row["parts"], list(row["parts"][0])).table()]
        notes.append(
            f"no pass: {row['share_of_no_pass']:.1%}. Without the bonus pass "
            f"{row['us_without_bonus']:.6g} us."
        )
    if "speedup" in row:
        notes.append(
            f"The verifier alone: {row['alone_us']:.4g} us a token. Speed-up {row['speedup']:.3g}; "
            f"{row['speedup_copies_waited_for']:.3g} if copies are not parallel. Collectives "
            f"({row['collectives']}; {row['alone_collectives']} for the verifier alone) count as 0."
        )
    if top:
        notes.append("The most expensive instructions, with the fewest layers:")
    for one in facts["dearest"][:top]:
        array = one.instruction.arrays[0] if one.instruction.arrays else ""
        notes.append(
            f"{one.cycles:>10,} {one.times:>3}x {one.part:14} {array} {one.instruction.opcode} "
            f"{one.instruction.op_name[-80:]}"
        )
    return notes
