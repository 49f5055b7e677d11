"""The rows and the tables of `benchmarks.tpu`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.predicted import CHIPS
from benchmarks.tpu import estimates
from benchmarks.tpu.cases import Case
from benchmarks.tpu.measures import MB, expert_bytes, rooflines
from benchmarks.tpu.topologies import TPUS
from specjax.cli.report import Report

COLUMNS = (
    "pair",
    "chip",
    "mesh",
    "rows",
    "cache",
    "draft",
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
    "half_full_us",
    "roofline_us",
    "ratio",
    "speedup",
    "speedup_copies_waited_for",
    "limit",
)
_BYTES = ("arguments", "temporaries")
_PASSES = ("verifier_pass", "drafter_pass", "bonus")


def row_of(
    case: Case, name: str, numbers: Mapping[str, float], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The row of a program: `numbers` with all layers, and other facts."""
    data, ways = (case.mesh.shape[axis] for axis in ("data", "model"))
    filled = numbers["arguments"] + numbers["temporaries"]
    return {
        **case.names,
        "mesh": f"{data}x{ways}",
        "program": name,
        "arguments_MB": numbers["arguments"] / MB,
        "temporaries_MB": numbers["temporaries"] / MB,
        "filled": filled / CHIPS[case.chip].memory,
        "widest_collective_MB": facts["widest_collective_MB"],
        "padding": facts["padding"],
        "padded": facts["padded"],
        "no_estimate": facts["no_estimate"],
        **{name: round(n) for name, n in numbers.items() if "/" not in name and name not in _BYTES},
        **_times(case, numbers, {}),
    }


def step_of(
    case: Case,
    numbers: Mapping[str, float],
    least: Mapping[str, float],
    alone: tuple[Mapping[str, float], Mapping[str, float]] | None,
    tokens: Sequence[float],
) -> dict[str, Any]:
    """What the row of a step has besides.

    Args:
      case: its case.
      numbers: its numbers, with all layers.
      least: its rooflines, in seconds.
      alone: both of a step of the verifier alone, or None.
      tokens: tokens emitted in a round; a speed-up for each.
    """
    bandwidth = CHIPS[case.chip].bandwidth
    row: dict[str, Any] = _times(case, numbers, least)
    row["parts"] = _parts(case, numbers, least)
    sizes = case.sizes._replace(cache=case.sizes.cache // 2)
    half_least = rooflines(dataclasses.replace(case, sizes=sizes))
    row["half_full_us"] = _times(case, numbers, half_least, filled=0.5)["us"]
    row["roofline_us"] = 1e6 * least["step"]
    row["ratio"] = row["us"] / row["roofline_us"]
    row["copied_us"] = _copied(numbers, bandwidth)
    row["expert_MB"] = expert_bytes(case) / MB
    if alone is not None:
        theirs, bound = alone
        reference = _times(case, theirs, bound)["us"]
        slow = reference + _copied(theirs, bandwidth)
        row["alone_us"] = reference
        row["alone_collectives"] = round(theirs["collectives"])
        row["speedup"] = [count * reference / row["us"] for count in tokens]
        row["limit"] = [count * bound["step"] / least["step"] for count in tokens]
        row["speedup_copies_waited_for"] = [
            count * slow / (row["us"] + row["copied_us"]) for count in tokens
        ]
    return row


def _times(
    case: Case, numbers: Mapping[str, float], least: Mapping[str, float], filled: float = 1.0
) -> dict[str, float]:
    """Times by the estimates, of rows that fill a part of the cache.

    A pass takes no less than its roofline.
    """
    hertz = TPUS[case.chip].hertz
    cycles = {
        part: numbers[f"part/{part}"] - (1.0 - filled) * numbers[f"reading/{part}"]
        for part in _all_parts()
    }
    for part in ("verifier_pass", "drafter_pass"):
        cycles[part] = max(cycles[part], hertz * least.get(part, 0.0))
    whole = sum(cycles.values())
    other = sum(value for part, value in cycles.items() if part not in _PASSES)
    return {
        "cycles": whole,
        "us": _rounded(1e6 * whole / hertz),
        "us_without_bonus": _rounded(1e6 * (whole - cycles["bonus"]) / hertz),
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
    case: Case, numbers: Mapping[str, float], least: Mapping[str, float]
) -> list[dict[str, Any]]:
    """A line for each part, for each region, and for the whole step."""
    scale, bandwidth = 1e6 / TPUS[case.chip].hertz, CHIPS[case.chip].bandwidth
    # A head has caught up when its first step begins.
    steps = case.sizes.draft if case.has_head else max(case.sizes.draft - 1, 1)
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
        lines.append(line("= a draft step", cycles / steps, moved / steps, least["draft step"]))
        lines.append(line("= the bonus branch", *inside[estimates.BONUS], None))
    moved = sum(moved for _, moved in inside.values())
    return [*lines, line("= the step", whole, moved, least["step"])]


_SHOWN = (estimates.OUTSIDE, estimates.DRAFTING, estimates.BONUS)


def notes_of(row: Mapping[str, Any], facts: Mapping[str, Any], top: int) -> list[str]:
    """The notes below the table of all programs: a table for each step."""
    title = " ".join(str(row[key]) for key in COLUMNS[:8])
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
    if row.get("expert_MB"):
        notes.append(f"A verifier's pass reads {row['expert_MB']:.4g} MB of experts on a chip.")
    if "speedup" in row:
        notes.append(
            f"The verifier alone: {row['alone_us']:.4g} us a token. Collectives "
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
