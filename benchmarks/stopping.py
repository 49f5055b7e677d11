"""Compares stopping policies with fixed draft lengths: passes, discarded tokens, wall time."""

import argparse
import copy
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from benchmarks import command
from benchmarks.loops import Loops
from specjax import Pair, decoding, drafting
from specjax.checks import check_path, require
from specjax.cli.report import Report
from specjax.decoding.blocks import powers_of_two
from specjax.evaluation import Bootstrap
from specjax.evaluation.bootstrap import Sums, ratio
from specjax.study.measure import take_turns
from specjax.text.passes import check_costs
from specjax.text.results import RowInfo
from specjax.text.teacher_forcing import KnownRows, read
from specjax.types import DecodeState, DraftOutcome, Drawn, Params, Stopping

HELP = "stopping policies against fixed draft lengths: verifications, discarded tokens, wall time"

_CONFIDENCES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
_ENTROPIES = [0.5, 0.7, 0.9, 1.1, 1.3, 1.5]
_RISKS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
_FIXED = "fixed"
_COLUMNS = (
    *("temperature", "policy", "setting", "tokens_per_call", "drafted_per_call"),
    *("verification_rate", "discard_rate", "ms_per_token", "gain", "gain_low", "gain_high"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, its prompts, the policies and their settings."""
    command.add_pair(parser)
    parser.add_argument("--choose", help="a text file of prompts, to choose settings")
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts of each file")
    parser.add_argument("--rows", type=int, default=1, help="batch size B")
    command.add_temperatures(parser)
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--max-draft", type=int, default=14, help="longest draft of a policy")
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        help="widths of the verifier's passes, up to --max-draft + 1 (default: powers of two); "
        "the passes of fixed lengths always fit",
    )
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each setting")
    parser.add_argument(
        "--costs", help="a file of `specjax bench --costs`, to measure CostAware too"
    )
    parser.add_argument("--plot", help="a PNG file: verification rate against discard rate")
    parser.add_argument("--grown", action="store_true", help=command.GROWN_HELP)
    lists: dict[str, tuple[type, list[Any], str]] = {
        _FIXED: (int, list(range(1, 15)), "draft lengths"),
        "confidence": (float, _CONFIDENCES, "thresholds of Confidence"),
        "entropy": (float, _ENTROPIES, "thresholds of Entropy"),
        "online": (float, _RISKS, "thresholds of Survival with OnlineEstimate"),
        "head": (float, _RISKS, "thresholds of Survival with the drafter's acceptance head"),
    }
    for name, (kind, default, told) in lists.items():
        parser.add_argument(f"--{name}", type=kind, nargs="*", default=default, help=told)


class Candidate(NamedTuple):
    """A policy with a draft length, a threshold or None, its loop and its parameters."""

    policy: str
    setting: float | int | None
    method: decoding.Speculative
    stopping: Params


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """The results of a candidate with every batch, `[batches]`.

    Rounds are summed over rows; the seconds are those of the loop.
    """

    emitted: np.ndarray
    calls: np.ndarray
    drafted: np.ndarray
    discarded: np.ndarray
    seconds: np.ndarray

    @property
    def per_token(self) -> Sums:
        return ratio(self.seconds, self.emitted)


def run(args: argparse.Namespace) -> Report:
    """Decodes losslessly with every candidate; they take turns at every batch.

    With `--choose` all candidates are measured on its prompts; then on `--inputs` only the fastest
    setting of each policy is compared with the fastest fixed length. `gain` is the time per token
    of that fixed length over the candidate's, minus 1, with a 95 % interval of a paired bootstrap
    over batches. Verification rate: passes of the verifier per emitted token; discard rate:
    discarded tokens per emitted token (SpecDec++, section 4.2). The oracle knows where drafts fail,
    at temperature 0.
    """
    command.check_positive(args, "prompts", "rows", "max_new", "max_draft", "repeats")
    if args.plot:
        require("matplotlib", "eval")
        check_path(args.plot, "--plot")
        if not Path(args.plot).parent.is_dir():
            where = Path(args.plot).parent
            raise FileNotFoundError(f"--plot {args.plot}: {where} is not a directory: make it")
    args.rows = [args.rows]
    args.widths = tuple(args.widths) if args.widths else None
    pair, tokens = command.load(args)
    loops, other = Loops.of(pair, tokens, args.max_new), None
    if args.choose:
        asked = copy.copy(args)
        asked.inputs = args.choose
        texts = command.encode_texts(asked, command.enough_texts(asked), pair.verifier.tokenizer)
        other = Loops.of(pair, texts, args.max_new)
    candidates = _candidates(args, loops)
    loops.check_fits(args.rows[0], max(c.method.max_draft for c in candidates))
    rows: list[dict[str, Any]] = []
    for temperature in args.temperatures:
        chosen = candidates
        if other is not None:
            print(f"T={temperature:g}: choosing among {len(candidates)} settings ...", flush=True)
            first = _measure(other, candidates, temperature, args)
            chosen = _fastest(candidates, first)
        print(f"T={temperature:g}: measuring {len(chosen)} settings ...", flush=True)
        found = _measure(loops, chosen, temperature, args)
        rows += _figures(chosen, found, temperature)
        if temperature == 0.0:
            oracle = _oracle(args, loops)
            rows += _figures([oracle[0]], [oracle[1]], temperature)
    if args.plot:
        _draw(rows, Path(args.plot))
    notes = [
        "Times are those of the loop, without reading prompts.",
        "gain: time per token of the fastest fixed length over this setting's, minus 1; the "
        "interval is a bootstrap over batches.",
        "Settings were chosen on other prompts."
        if args.choose
        else "The fastest fixed length was chosen on the same prompts (see --choose).",
    ]
    return Report(rows, _COLUMNS, notes, {"rows": args.rows[0], "grown": args.grown})


def _candidates(args: argparse.Namespace, loops: Loops) -> list[Candidate]:
    pair: Pair = loops.pair
    policies: list[tuple[str, float | None, Stopping]] = []
    policies += [("confidence", x, drafting.Confidence(x)) for x in args.confidence]
    policies += [("entropy", x, drafting.Entropy(x)) for x in args.entropy]
    online = drafting.OnlineEstimate()
    policies += [("online", x, drafting.Survival(online, x)) for x in args.online]
    if pair.drafter.head is None:
        print("The drafter has no acceptance head: skipped --head.", flush=True)
    else:
        policies += [("head", x, drafting.Survival(threshold=x)) for x in args.head]
    if args.costs:
        costs = drafting.read_costs(args.costs)
        check_costs(costs, pair, args.rows[0], args.max_draft)
        costs = costs.at_widths(args.widths or powers_of_two(args.max_draft + 1))
        policies.append(("cost", None, drafting.CostAware(costs)))
    made = []
    for length in args.fixed:
        if length < 1:
            raise ValueError(f"--fixed must be at least 1, got {length}")
        made.append(Candidate(_FIXED, length, loops.speculative(length), ()))
    if not made:
        raise ValueError("--fixed must have at least one draft length, for comparison")
    for name, setting, policy in policies:
        bound, own = policy.bind(pair.drafter.head)
        method = loops.speculative(args.max_draft, args.widths, bound)
        made.append(Candidate(name, setting, method, own))
    return made


def _counts(state: DecodeState) -> tuple[int, ...]:
    emitted, rounds, info = jax.device_get((state.lengths, state.steps, state.info))
    rows = RowInfo.of(info, emitted, rounds)
    return tuple(int(x.sum()) for x in (rows.emitted, rows.rounds, rows.drafted, rows.discarded))


def _measure(
    loops: Loops, candidates: list[Candidate], temperature: float, args: argparse.Namespace
) -> list[Runs]:
    batches = loops.batches(args.rows[0])
    runs = (1 + args.repeats * len(batches)) * len(candidates)
    with tqdm.tqdm(total=runs, desc="compiling", unit="run", disable=None) as bar:

        def side(one: Candidate) -> Callable[[slice], tuple[float, DecodeState]]:
            def decode(part: slice) -> tuple[float, DecodeState]:
                bar.update()
                return loops.run(one.method, part, temperature, stopping=one.stopping)

            return decode

        sides = {j: side(one) for j, one in enumerate(candidates)}
        for decode in sides.values():
            decode(batches[0])
        bar.set_description("measuring")
        seconds = np.zeros((len(candidates), len(batches)))
        counts = np.zeros((len(candidates), len(batches), 4), np.int64)
        for j, _, i, (spent, state) in take_turns(sides, batches, args.repeats):
            seconds[j, i] += spent
            counts[j, i] = _counts(state)
    return [_runs(counts[j], seconds[j] / args.repeats) for j in range(len(candidates))]


def _runs(counts: np.ndarray, seconds: np.ndarray) -> Runs:
    emitted, calls, drafted, discarded = counts.T
    return Runs(emitted, calls, drafted, discarded, seconds)


def _fastest(candidates: list[Candidate], runs: list[Runs]) -> list[Candidate]:
    """The setting of each policy with the least time per token."""
    order = sorted(range(len(candidates)), key=lambda i: runs[i].per_token.value)
    best: dict[str, int] = {}
    for i in order:
        best.setdefault(candidates[i].policy, i)
    return [candidates[i] for i in sorted(best.values())]


@dataclasses.dataclass(frozen=True)
class GreedyOracle(Stopping):
    """Ends each draft just before the verifier would reject it; only for temperature 0.

    It discards no drafted token, and no policy needs fewer passes of the verifier: so it bounds the
    gain of policies. It needs the verifier's greedy output, N tokens, in advance: its parameters
    are the `agreeing_runs`, `[B, N + 1]` int32, of the decoded rows, in their order; slots must not
    be refilled. Above temperature 0 it is not a bound: other tokens are drawn.

    Source: SpecDec++ (arXiv 2405.19715), Lemma 2.1.
    """

    reads_past = True

    def remember(self, params: Params, rows: int, longest: int) -> jax.Array:
        return jnp.zeros((rows,), jnp.int32)

    def begin(
        self, params: Params, memory: jax.Array, limits: jax.Array, longest: int
    ) -> tuple[jax.Array, Any]:
        place = jnp.minimum(memory, params.shape[1] - 1)
        runs = jnp.take_along_axis(params, place[:, None], axis=1)[:, 0]
        return jnp.minimum(limits, runs), ()

    def step(self, params: Params, state: Any, drawn: Drawn) -> tuple[jax.Array, Any]:
        return jnp.zeros(drawn.token.shape, bool), state

    def learn(self, memory: jax.Array, state: Any, outcome: DraftOutcome) -> jax.Array:
        return memory + outcome.agreed + 1


def agreeing_runs(agrees: np.ndarray) -> np.ndarray:
    """The number of tokens from each place on that agree without a break: `[B, N + 1]` int32.

    `agrees [B, N]` tells whether the drafter's greedy token at each place of the verifier's greedy
    output, given that output before it, is the verifier's own.
    """
    agrees = np.asarray(agrees, bool)
    runs = np.zeros((agrees.shape[0], agrees.shape[1] + 1), np.int32)
    for i in range(agrees.shape[1] - 1, -1, -1):
        runs[:, i] = np.where(agrees[:, i], runs[:, i + 1] + 1, 0)
    return runs


def _oracle(args: argparse.Namespace, loops: Loops) -> tuple[Candidate, Runs]:
    """The greedy oracle's passes, without its time: it knows what others must compute."""
    method = loops.speculative(args.max_draft, args.widths, GreedyOracle())
    counts = []
    for part in loops.batches(args.rows[0]):
        state = loops.run(loops.autoregressive(), part, 0.0)[1]
        agrees = _agrees(loops, part, np.asarray(state.tokens))
        # After the end of the output nothing agrees.
        agrees &= np.arange(agrees.shape[1]) < np.asarray(state.lengths)[:, None]
        runs = agreeing_runs(agrees)
        counts.append(_counts(loops.run(method, part, 0.0, stopping=jnp.asarray(runs))[1]))
    found = _runs(np.array(counts), np.full(len(counts), np.nan))
    return Candidate("oracle", None, method, ()), found


def _agrees(loops: Loops, part: slice, tokens: np.ndarray) -> np.ndarray:
    """Where the drafter's greedy token is the verifier's, given the verifier's before it."""
    ends = np.full(len(tokens), tokens.shape[1], np.int32)
    rows = KnownRows(loops.inputs[part], loops.lengths[part], tokens, ends)
    drafter = loops.pair.drafter
    said = read(drafter.model, drafter.prepared, jax.tree.map(jnp.asarray, rows))
    return np.asarray(jnp.argmax(said.logits, axis=-1)) == tokens


def _figures(
    candidates: list[Candidate], runs: list[Runs], temperature: float
) -> list[dict[str, Any]]:
    fixed = [r for c, r in zip(candidates, runs, strict=True) if c.policy == _FIXED]
    base = min(fixed, key=lambda r: r.per_token.value, default=None)
    rows = []
    for candidate, found in zip(candidates, runs, strict=True):
        emitted = found.emitted.sum()
        gains = (None, None, None) if base is None else _gain(base, found)
        rows.append(
            {
                "temperature": temperature,
                "policy": candidate.policy,
                "setting": candidate.setting,
                "tokens_per_call": float(emitted / found.calls.sum()),
                "drafted_per_call": float(found.drafted.sum() / found.calls.sum()),
                "verification_rate": float(found.calls.sum() / emitted),
                "discard_rate": float(found.discarded.sum() / emitted),
                "ms_per_token": None if base is None else 1e3 * found.per_token.value,
                **dict(zip(("gain", "gain_low", "gain_high"), gains, strict=True)),
            }
        )
    return rows


def _gain(base: Runs, other: Runs) -> tuple[float, float | None, float | None]:
    """The additional time of the base per token, and its interval."""
    found = Bootstrap().difference(base.per_token, other.per_token, np.divide)
    if other is base or len(base.seconds) < 2:
        return found.value - 1.0, None, None
    return found.value - 1.0, found.low - 1.0, found.high - 1.0


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Verification rate against discard rate; a line per policy, a panel per temperature."""
    figures: Any = require("matplotlib.figure", "eval")
    temperatures = sorted({row["temperature"] for row in rows})
    figure = figures.Figure(figsize=(5.0 * len(temperatures), 4.0), layout="constrained")
    axes = figure.subplots(1, len(temperatures), squeeze=False)[0]
    for panel, temperature in zip(axes, temperatures, strict=True):
        here = [row for row in rows if row["temperature"] == temperature]
        names = list(dict.fromkeys(row["policy"] for row in here))
        for name, mark in zip(names, "os^vDP*X", strict=False):
            points = [row for row in here if row["policy"] == name]
            panel.plot(
                [row["discard_rate"] for row in points],
                [row["verification_rate"] for row in points],
                marker=mark,
                label=name,
            )
        panel.set(
            xlabel="discarded tokens per emitted token",
            ylabel="verifier passes per emitted token",
            title=f"temperature {temperature:g}",
        )
        panel.legend()
    figure.savefig(path)


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
