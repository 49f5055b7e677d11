"""Measures the cost of a pass of each model by regression, and predicts throughput from it."""

import argparse
import dataclasses
import statistics
import sys
from typing import Any

from benchmarks import command
from benchmarks.loops import REMEDY, Loops
from specjax.cli.report import Report
from specjax.decoding.blocks import powers_of_two
from specjax.errors import UserError
from specjax.memory import explain_full_memory, sizes_in_words
from specjax.study.measure import take_turns
from specjax.text.passes import WIDE, Fit, Run, fit

# A lower R² gets a warning.
_ENOUGH = 0.95

HELP = "measure the cost of a pass of each model by regression; predict throughput from it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    command.add_workload(parser)
    parser.set_defaults(repeats=5)
    parser.add_argument(
        "--max-draft", type=int, default=7, help="longest draft G; all lengths up to it are run"
    )
    parser.add_argument(
        "--held-out",
        type=int,
        nargs="+",
        default=[2, 5],
        help="draft lengths to leave out of the fit and to predict",
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch from a first prompt; `wide`: all passes of the verifier read G + 1 tokens."""

    first: int
    limit: int
    temperature: float
    held_out: bool
    wide: bool = False


def run(args: argparse.Namespace) -> Report:
    """Measures every batch size.

    The loop is a single program: lossless block verification with a limit for all drafts. A pass of
    the verifier reads a draft and one more token, rounded up to a power of two (at most G + 1). A
    run is a batch of prompts with a draft length and a temperature. Its time is the least over the
    repeats of the loop without prefill. Runs take turns, so that noise affects all equally.

    The fit uses every second batch of prompts, without the held-out draft lengths (SpecDec++,
    section 4.2, with a cost for each width and for each call). It predicts the runs of the other
    batches at the held-out draft lengths. The width grows with the draft's length. So the fit also
    uses runs of a second program, which reads G + 1 tokens for drafts of 0 and of G: they separate
    the drafter's time from the verifier's.
    """
    _check(args)
    pair, tokens = command.load(args)
    loops = Loops.of(pair, tokens, args.max_new)
    for rows in args.rows:
        if len(loops.batches(rows)) < 2:
            raise UserError(
                f"{args.inputs} has {len(tokens)} prompts, but --rows {rows} needs "
                f"{2 * rows}, half of them to predict: add lines or give a smaller --rows"
            )
    loops.check_fits(max(args.rows), args.max_draft)
    fits, table, predictions = [], [], []
    for rows in args.rows:
        print(f"B={rows} ...", flush=True)
        sizes = rows, loops.inputs.shape[1], args.max_draft, loops.max_new
        with explain_full_memory(sizes_in_words(*sizes), REMEDY):
            runs = measure(loops, rows, args)
        known = [one for case, (one, _) in runs.items() if not case.held_out]
        fits.append(fit(known))
        predicted = predict(rows, fits[-1], runs)
        predictions += predicted
        table.append(figures(rows, fits[-1], known, predicted))
    shown = ["rows", "temperature", "max_draft", "tokens_per_s", "predicted", "error"]
    return Report(
        table,
        list(table[0])[:-1],  # predictions have a table of their own
        notes=[
            "verifier_N_ms: a pass of N tokens, with the rest of its round. call_ms: the rest of a "
            "run. one_width_r_squared: R² of a fit with the same cost for all widths.",
            "Predicted and measured, on prompts and draft lengths that the fit did not use:",
            *Report(predictions, shown).table().splitlines(),
            *_doubts(fits, args.rows),
        ],
    )


def _doubts(fits: list[Fit], rows: list[int]) -> list[str]:
    """Warnings about fits with a low R²."""
    return [
        f"B={batch}: R² is {found.r_squared:.3f}, below {_ENOUGH}: other work disturbed the runs, "
        "or they are too few; measure again without other work, with more --prompts or --repeats"
        for found, batch in zip(fits, rows, strict=True)
        if found.r_squared < _ENOUGH
    ]


def measure(loops: Loops, rows: int, args: argparse.Namespace) -> dict[Case, tuple[Run, int]]:
    """Decodes every case; returns its run and the number of emitted tokens."""
    longest = args.max_draft
    widths = powers_of_two(longest + 1)
    methods = {False: loops.speculative(longest, widths), True: loops.speculative(longest)}
    cases = []
    for i, part in enumerate(loops.batches(rows)):
        held_out = i % 2 == 1
        for temperature in args.temperatures:
            for limit in range(longest + 1):
                if (limit in args.held_out) == held_out:
                    cases.append(Case(part.start, limit, temperature, held_out))
            if not held_out:
                cases += [Case(part.start, n, temperature, False, wide=True) for n in (0, longest)]

    def of(case: Case) -> tuple[Any, ...]:
        return methods[case.wide], slice(case.first, case.first + rows), case.temperature

    def run(case: Case) -> tuple[float, int]:
        spent, state = loops.run(*of(case), limit=case.limit)
        return spent, int(state.lengths.sum())

    passes = {case: loops.passes(*of(case), limit=case.limit) for case in cases}
    runs: dict[Case, tuple[Run, int]] = {}
    sides = {case: lambda _, case=case: run(case) for case in cases}
    for case, _, _, (spent, emitted) in take_turns(sides, [None], args.repeats):
        if case not in runs or spent < runs[case][0].seconds:
            width = WIDE if case.wide else next(width for width in widths if width > case.limit)
            counted = passes[case]
            runs[case] = Run(counted["drafter"], counted["verifier"], width, spent), emitted
    return runs


def predict(rows: int, found: Fit, runs: dict[Case, tuple[Run, int]]) -> list[dict[str, Any]]:
    """Measured and predicted tokens per second of the held-out runs; `error` is their ratio - 1."""
    groups: dict[tuple[float, int], list[tuple[Run, int]]] = {}
    for case, measured in runs.items():
        if case.held_out:
            groups.setdefault((case.temperature, case.limit), []).append(measured)
    predictions = []
    for (temperature, limit), group in sorted(groups.items()):
        seconds = sum(one.seconds for one, _ in group)
        expected = sum(found.seconds(one) for one, _ in group)
        tokens = sum(emitted for _, emitted in group)
        predictions.append(
            {
                "rows": rows,
                "temperature": temperature,
                "max_draft": limit,
                "tokens_per_s": tokens / seconds,
                "predicted": tokens / expected,
                "error": seconds / expected - 1,
            }
        )
    return predictions


def figures(
    rows: int, found: Fit, known: list[Run], predictions: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns a line of the table of section 4.2."""
    errors = [abs(prediction["error"]) for prediction in predictions]
    one_width = fit([one._replace(width=1) for one in known if one.width != WIDE])
    of_widths = {width: cost for width, cost in found.verifier.items() if width != WIDE}
    return {
        "rows": rows,
        "draft_ms": 1e3 * found.draft,
        **{f"verifier_{width}_ms": 1e3 * cost for width, cost in of_widths.items()},
        "call_ms": 1e3 * found.call,
        "r_squared": found.r_squared,
        "one_width_r_squared": one_width.r_squared,
        "runs": len(known),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "predictions": predictions,
    }


def _check(args: argparse.Namespace) -> None:
    command.check_positive(args, "rows", "prompts", "max_new", "repeats", "max_draft")
    if sorted(set(args.rows)) != args.rows:
        raise UserError(f"--rows must increase, got {args.rows}")
    for limit in args.held_out:
        if not 0 <= limit <= args.max_draft:
            raise UserError(
                f"--held-out must lie in 0 .. --max-draft = {args.max_draft}, got {limit}"
            )
    widths = powers_of_two(args.max_draft + 1)
    fitted = set(range(args.max_draft + 1)) - set(args.held_out)
    for below, width in zip((0, *widths), widths, strict=False):
        if not fitted.intersection(range(below, width)):
            raise UserError(
                f"--held-out {' '.join(map(str, args.held_out))} leaves no draft whose verifier's "
                f"pass reads {width} tokens: hold out fewer of {below} .. {width - 1}"
            )


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
