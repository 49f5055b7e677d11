"""Batches of rows that differ: compiled widths, budgets and costs, beside the cost model."""

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import command, workload
from benchmarks.loops import Loops
from specjax import drafting
from specjax.cli.report import Report
from specjax.decoding import Method, Speculative
from specjax.decoding.blocks import powers_of_two
from specjax.drafting import Costs
from specjax.study.measure import in_turns
from specjax.text.passes import measure_costs
from specjax.types import Params

HELP = "batches of rows that differ: one width or several, budgets across rows, measured costs"

_ALONE = "verifier alone"
_COLUMNS = (
    *("temperature", "rows", "policy", "setting", "widths", "tokens_per_call"),
    *("drafted_per_call", "ms_per_token", "predicted_ms", "speedup"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, its prompts, the batch sizes and the policies."""
    workload.add_workload(parser)
    parser.set_defaults(rows=[1, 4, 16, 64])
    parser.add_argument("--max-draft", type=int, default=8, help="longest draft of a policy")
    parser.add_argument("--fixed", type=int, nargs="*", default=[3, 5], help="draft lengths")
    parser.add_argument("--confidence", type=float, default=0.4, help="threshold of Confidence")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[16, 32, 64], help="tokens of Budget per round"
    )


class Candidate(NamedTuple):
    """A policy with a setting.

    Attributes:
      policy: its name.
      setting: the draft length, the threshold or the tokens; None if it has none.
      method: the loop.
      own: the policy's parameters.
    """

    policy: str
    setting: float | int | None
    method: Method
    own: Params = ()


def run(args: argparse.Namespace) -> Report:
    """Decodes losslessly with every candidate; they take turns at every batch.

    `widths` is the number of tokens per pass of the verifier: "2^n" for the smallest power of two
    (or G + 1) that holds the longest draft of the round, else the single width. `predicted_ms` is
    the cost of a run's passes by a measurement at the start (the same as of
    `Decoder(stopping=CostAware())`), without other costs of a call. `speedup` is over the verifier
    alone, with the same batch size. Give prompts that differ: short and long, usual and unusual.
    """
    workload.check_positive(args, "max_draft", "fixed", "tokens")
    drafting.Confidence(args.confidence)  # checks the threshold
    if args.grown:
        raise ValueError("--grown is not supported here: costs are measured with the original pair")
    pair, tokens = workload.load(args)
    loops = Loops.of(pair, tokens, args.max_new)
    loops.check_fits(max(args.rows), max([args.max_draft, *args.fixed]))
    print("measuring the cost of passes ...", flush=True)
    sizes, several = sorted(set(args.rows)), powers_of_two(args.max_draft + 1)
    costs = measure_costs(pair, sizes, several)
    # Rounds of a program with one width have other costs.
    by_widths = {several: costs}
    for longest in {args.max_draft, *args.fixed}:
        by_widths[(longest + 1,)] = measure_costs(pair, sizes, (longest + 1,))
    table = []
    for rows, temperature in itertools.product(args.rows, args.temperatures):
        print(f"B={rows} T={temperature:g} ...", flush=True)
        table += _measure(
            args, loops, _candidates(args, loops, costs), by_widths, rows, temperature
        )
    notes = ["speedup: over the verifier alone. predicted_ms: by the costs of passes."]
    return Report(table, _COLUMNS, notes, {"costs": costs.to_dict()})


def _candidates(args: argparse.Namespace, loops: Loops, costs: Costs) -> list[Candidate]:
    longest = args.max_draft
    made = [Candidate(_ALONE, None, loops.autoregressive())]
    made += [Candidate("fixed", n, loops.speculative(n)) for n in args.fixed]
    sure, own = drafting.Confidence(args.confidence).bind()
    for widths in (None, (longest + 1,)):
        method = loops.speculative(longest, widths, sure)
        made.append(Candidate("confidence", args.confidence, method, own))
    for tokens in args.tokens:
        budget, own = drafting.Budget(tokens).bind()
        made.append(Candidate("budget", tokens, loops.speculative(longest, None, budget), own))
    weighs, own = drafting.CostAware(costs).bind()
    made.append(Candidate("cost", None, loops.speculative(longest, None, weighs), own))
    return made


def _measure(
    args: argparse.Namespace,
    loops: Loops,
    candidates: list[Candidate],
    by_widths: dict[tuple[int, ...], Costs],
    rows: int,
    temperature: float,
) -> list[dict[str, Any]]:
    batches = loops.batches(rows)
    for one in candidates:
        loops.run(one.method, batches[0], temperature, stopping=one.own)  # compiles
    sides = {
        j: lambda part, one=one: loops.run(one.method, part, temperature, stopping=one.own)[0]
        for j, one in enumerate(candidates)
    }
    spent = dict.fromkeys(sides, 0.0)
    for j, _, _, seconds in in_turns(sides, batches, args.repeats):
        spent[j] += seconds / args.repeats
    table = []
    for one, taken in zip(candidates, spent.values(), strict=True):
        passes = [_passes(loops, one, part, temperature, by_widths, rows) for part in batches]
        emitted, rounds, drafted, predicted = (sum(column) for column in zip(*passes, strict=True))
        table.append(
            {
                "temperature": temperature,
                "rows": rows,
                "policy": one.policy,
                "setting": one.setting,
                "widths": _widths(one.method),
                "tokens_per_call": emitted / rounds,
                "drafted_per_call": drafted / rounds,
                "ms_per_token": 1e3 * taken / emitted,
                "predicted_ms": 1e3 * predicted / emitted if predicted else None,
            }
        )
    for row in table:
        row["speedup"] = table[0]["ms_per_token"] / row["ms_per_token"]
    return table


def _widths(method: Method) -> str:
    if not isinstance(method, Speculative):
        return "1"
    widths = method.verifier_widths
    return "2^n" if len(widths) > 1 else str(widths[0])


def _passes(
    loops: Loops,
    one: Candidate,
    part: slice,
    temperature: float,
    by_widths: dict[tuple[int, ...], Costs],
    rows: int,
) -> tuple[int, int, int, float]:
    """Emitted tokens, rounds and drafted tokens of a batch, and the seconds of its passes."""
    method, params = one.method, loops.params_of(one.method, one.own)
    state = loops.start(method, part, temperature, stopping=one.own)
    if not isinstance(method, Speculative):
        state = method.run(params, state, loops.max_new)  # its passes are not measured
        return int(state.lengths.sum()), int(state.steps.sum()), 0, 0.0
    widths = method.verifier_widths
    costs = by_widths[widths]
    place = costs.rows.index(rows)
    times = dict(zip(widths, costs.verifier[place], strict=True))
    before, seconds = jax.device_get(state.info), 0.0
    while not np.all(state.finished):
        state = method.run(params, state, 1)
        after = jax.device_get(state.info)
        lengths = np.sum(after.drafted_lengths - before.drafted_lengths, axis=0)
        longest = int(np.max(np.nonzero(lengths)[0], initial=0))
        calls = {name: np.max(n - before.calls[name]) for name, n in after.calls.items()}
        width = next(width for width in widths if width > longest)
        seconds += calls.get("drafter", 0) * costs.draft[place] + calls["verifier"] * times[width]
        before = after
    lengths = np.sum(before.drafted_lengths, axis=0)
    drafted = int(lengths @ np.arange(lengths.size))
    return int(state.lengths.sum()), int(state.steps.sum()), drafted, float(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this benchmark; see `benchmarks.command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
