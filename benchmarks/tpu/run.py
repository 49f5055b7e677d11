"""Estimates of a TPU's compiler for decoding: bytes, copies, padding and cycles of programs.

Nothing is allocated and nothing runs: an estimate is not a measurement. `benchmarks.tpu.estimates`
defines the counts, docs/scaling.md the roofline.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.predicted import CHIPS
from benchmarks.shapes import PROGRAMS, Sizes
from benchmarks.tpu import estimates
from benchmarks.tpu.cases import ALONE, METHODS, PAIRS, Case, at_depth, configs_of
from benchmarks.tpu.measures import MB, expert_bytes, numbers_of, rooflines
from benchmarks.tpu.topologies import TPUS, mesh_of
from specjax.cli.bench import check_positive
from specjax.cli.report import Report
from specjax.models.quantised import FORMS

HELP = "bytes, copies, padding and estimated cycles of the programs that a TPU would run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the cases, the chips and what is printed of them."""
    add_cases(parser)
    parser.add_argument("--chips", nargs="+", default=["v5e"], choices=list(TPUS))
    parser.add_argument("--meshes", nargs="+", default=["1x1"], help="DATAxMODEL")
    parser.add_argument(
        "--tokens-per-round", type=float, nargs="+", default=[3.3], help="for the speed-ups"
    )
    parser.add_argument("--top", type=int, default=0, help="list the costliest instructions")


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Adds the pairs, methods and sizes."""
    parser.add_argument(
        "--pairs", nargs="+", default=["t5"], help=f"{', '.join(PAIRS)}, or VERIFIER+DRAFTER"
    )
    parser.add_argument("--methods", nargs="+", default=["block"], choices=list(METHODS))
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--rows", type=int, nargs="+", default=[8], help="B")
    parser.add_argument("--draft", type=int, nargs="+", default=[5], help="G")
    parser.add_argument("--cache", type=int, nargs="+", default=[256], help="S, cache positions")
    parser.add_argument("--prompt", type=int, default=64, help="P")
    parser.add_argument(
        "--layers",
        nargs="+",
        default=["8", "16"],
        help="two depths, for extrapolation; one depth, unchanged; or all",
    )
    parser.add_argument(
        "--weights", nargs="+", default=["None"], choices=["None", *FORMS], help="of both networks"
    )


def run(args: argparse.Namespace) -> Report:
    """Compiles all requested programs; a row for each."""
    rows, notes = [], []
    for case, name, few in programs(args):
        row, facts = _measure(case, name, few, args)
        rows.append(row)
        notes += notes_of(row, facts, args.top)
    return Report(rows, COLUMNS, notes)


def programs(args: argparse.Namespace) -> Iterator[tuple[Case, str, tuple[int, int] | None]]:
    """The programs to compile: case, name, and two depths if all layers are extrapolated."""
    check_positive(args, "rows", "draft", "cache", "prompt")
    depths = _depths(args.layers)
    few = (depths[0], depths[1]) if len(depths) == 2 else None
    for case in _cases(args, depths[0] if len(depths) == 1 else None):
        for name in args.programs:
            # Methods differ only in steps: only the first compiles the others.
            if name == "step" or case.method == args.methods[0]:
                yield case, name, few


def _depths(words: Sequence[str]) -> tuple[int, ...]:
    if list(words) == ["all"]:
        return ()
    if not all(word.isdigit() and int(word) for word in words) or not 1 <= len(words) <= 2:
        raise ValueError(f"--layers must be all, one depth or two depths, got {' '.join(words)}")
    if len(set(words)) < len(words):
        raise ValueError(f"--layers must be two different depths, got {' '.join(words)}")
    return tuple(sorted(map(int, words)))


def _cases(args: argparse.Namespace, depth: int | None) -> Iterator[Case]:
    for pair in args.pairs:
        configs_of(pair)
        for chip in args.chips:
            for mesh in args.meshes:
                data, ways = _sizes_of(mesh)
                where = mesh_of(chip, data, ways)
                for sizes in _sizes(args, data):
                    for form, method in itertools.product(args.weights, args.methods):
                        weights = None if form == "None" else form
                        yield Case(pair, chip, where, method, sizes, depth, weights)


def _sizes(args: argparse.Namespace, data: int) -> Iterator[Sizes]:
    for batch, cache, draft in itertools.product(args.rows, args.cache, args.draft):
        if batch % data:
            raise ValueError(f"--rows must be a multiple of {data}, got {batch}")
        output = max(1, cache - args.prompt - max(args.draft) - 1)
        yield Sizes(batch, refill=data, prompt=args.prompt, output=output, cache=cache, draft=draft)


def _sizes_of(mesh: str) -> tuple[int, int]:
    data, _, ways = mesh.partition("x")
    if not (data.isdigit() and ways.isdigit() and int(data) and int(ways)):
        raise ValueError(f"--meshes must be DATAxMODEL, such as 2x2, got {mesh!r}")
    return int(data), int(ways)


def _measure(
    case: Case, name: str, few: tuple[int, int] | None, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    numbers, facts = numbers_at(case, name, few)
    if name != "step":
        return row_of(case, name, numbers, facts), facts
    least, alone = rooflines(case), None
    if case.method != ALONE:
        sizes = case.sizes._replace(draft=1)  # one program for all lengths of drafts
        reference = dataclasses.replace(case, method=ALONE, sizes=sizes)
        alone = numbers_at(reference, name, few)[0], rooflines(reference)
    row = row_of(case, name, numbers, facts)
    return row | step_of(case, numbers, least, alone, args.tokens_per_round), facts


@functools.cache
def numbers_at(
    case: Case, name: str, few: tuple[int, int] | None, numbers_of: Any = numbers_of
) -> tuple[Mapping[str, float], dict[str, Any]]:
    """The numbers of a program with all layers, and facts of the compiled programs."""
    facts: dict[str, Any] = {"padding": 0.0}

    def measure(layers: tuple[int, int]) -> dict[str, float]:
        nonlocal facts
        begin = time.perf_counter()
        program = case.compile(layers, (name,))[name]
        what = f"{case.pair} {case.chip} {case.method} {name}, {layers[0]} + {layers[1]} layers"
        seconds = time.perf_counter() - begin
        print(f"benchmarks: {what}: {seconds:.0f} s", file=sys.stderr, flush=True)
        numbers, found = numbers_of(program, name, case)
        facts = max(facts, found, key=lambda one: one["padding"])
        return numbers

    both = case.method != ALONE and not case.has_head
    return at_depth(measure, few, case.layers, both), facts


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
    """What the row of a step has besides, with a speed-up for each number of `tokens` in a round.

    `least` are its rooflines, in seconds, `alone` both of a step of the verifier alone, or None.
    """
    bandwidth = CHIPS[case.chip].bandwidth
    row: dict[str, Any] = _times(case, numbers, least)
    row["parts"] = _parts(case, numbers, least)
    sizes = case.sizes._replace(cache=case.sizes.cache // 2)
    half_least = rooflines(dataclasses.replace(case, sizes=sizes))
    row["half_full_us"] = _times(case, numbers, half_least, filled=0.5)["us"]
    row["roofline_us"] = 1e6 * least["step"]
    row["ratio"] = row["us"] / row["roofline_us"]
    row["copied_us"] = _copy_us(numbers, bandwidth)
    row["expert_MB"] = expert_bytes(case) / MB
    if alone is not None:
        theirs, bound = alone
        reference = _times(case, theirs, bound)["us"]
        slow = reference + _copy_us(theirs, bandwidth)
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
        for part in estimates.ALL_PARTS
    }
    for part in ("verifier_pass", "drafter_pass"):
        cycles[part] = max(cycles[part], hertz * least.get(part, 0.0))
    whole = sum(cycles.values())
    other = sum(value for part, value in cycles.items() if part not in _PASSES)
    return {
        "cycles": whole,
        "us": _round(1e6 * whole / hertz),
        "us_without_bonus": _round(1e6 * (whole - cycles["bonus"]) / hertz),
        "share_of_no_pass": other / whole if whole else 0.0,
    }


def _round(value: float) -> float:
    """Rounded, so that a table does not write it as a power of ten."""
    return round(value) if value >= 1000.0 else value


def _copy_us(numbers: Mapping[str, float], bandwidth: float) -> float:
    """Microseconds of the parallel copies."""
    return 1e6 * sum(numbers[f"moved/{region}"] for region in estimates.REGIONS) / bandwidth


def _parts(
    case: Case, numbers: Mapping[str, float], least: Mapping[str, float]
) -> list[dict[str, Any]]:
    """A line for each part, for each region, and for the whole step."""
    scale, bandwidth = 1e6 / TPUS[case.chip].hertz, CHIPS[case.chip].bandwidth
    # A head has caught up when its first step begins.
    steps = case.sizes.draft if case.has_head else max(case.sizes.draft - 1, 1)
    whole = sum(numbers[f"part/{part}"] for part in estimates.ALL_PARTS)

    def line(name: str, cycles: float, moved: float | None, seconds: float | None) -> Any:
        found: dict[str, Any] = {
            "part": name,
            "cycles": round(cycles),
            "share": cycles / whole,
            "us": _round(cycles * scale),
            "copied_us": None if moved is None else 1e6 * moved / bandwidth,
            "roofline_us": None if seconds is None else 1e6 * seconds,
        }
        both = found["us"] + (found["copied_us"] or 0.0)
        found["ratio"] = found["us"] / found["roofline_us"] if seconds else None
        found["ratio_with_copies"] = both / found["roofline_us"] if seconds and moved else None
        return found

    present = [name for name in estimates.ALL_PARTS if numbers[f"part/{name}"]]
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


main = command.program(str(Path(__file__).parent), HELP, add_arguments, run)
