"""Which tree, and is it faster than a chain: tokens per call and predicted and measured times."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import specjax
from benchmarks import command
from benchmarks.predicted import CHIPS, Network, pass_seconds
from benchmarks.spare_maps import spare_maps
from benchmarks.tree_walks import TreeEstimate, expect_trees, tree_of, tree_rates
from specjax.checks import check_count, one_number
from specjax.cli import bench
from specjax.cli.demo import samples
from specjax.cli.report import Report
from specjax.data.examples import read_examples
from specjax.decoding.blocks import powers_of_two
from specjax.drafting import Costs
from specjax.models import preset
from specjax.sampling.draws import TINY
from specjax.study.expect import VERIFIER, expect, is_chain, sampling_key
from specjax.text import Decoder, Pair, TextModel
from specjax.text.directories import built_in_pairs
from specjax.text.passes import measure_costs
from specjax.text.setting import VERIFIER_ALONE, Setting
from specjax.text.teacher_forcing import KnownTexts, decode_texts
from specjax.theory import BestTree, best_tree

HELP = (
    "trees against chains: tokens per call at equal drafted tokens, and times of the best of each"
)

LAWS = ("top", "top+1", "without", "independent")
CHAIN = "chain"
_HERE = "here"
_DRAFTER = "drafter"
_COLUMNS = (
    *("pair", "temperature", "machine", "drafted", "children", "levels", "table_tokens"),
    *("tokens_per_call", "error", "ms_per_token", "speedup", "measured_tokens", "measured_speedup"),
)
_NOTES = (
    "machine: -: the best tree of that many tokens, whatever its time; else the best at most that",
    "large by the times of passes. table_tokens: by the table of rates; tokens_per_call: along the",
    "texts, with its standard error. speedup: over the verifier alone, without prompts; measured",
    "with prompts. Greedy children are the same tokens for every kind. The JSON has the parents of",
    "each tree, for specjax.drafting.Tree(parents=...).",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pairs, the sizes of trees and the machines."""
    parser.add_argument(
        "--pairs", nargs="+", default=built_in_pairs(), choices=built_in_pairs(),
        help="built-in pairs, with their samples as prompts; unused with --inputs",
    )  # fmt: skip
    command.add_pair(parser, required=False)
    parser.add_argument("--prompts", type=int, default=32, help="number of prompts")
    parser.add_argument(
        "--apart", type=int, default=0,
        help="number of further prompts by which trees and chains are chosen; 0: the same prompts",
    )  # fmt: skip
    parser.add_argument("--max-new", type=int, default=128, help="longest output, in tokens")
    parser.add_argument("--drafted", type=int, nargs="+", default=[8, 16, 32], help="tokens")
    parser.add_argument("--depth", type=int, default=8, help="the most levels of a tree")
    parser.add_argument("--widest", type=int, default=6, help="the most children of a node")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--children", nargs="+", default=list(LAWS), choices=LAWS)
    parser.add_argument(
        "--like",
        nargs="*",
        default=["llama3_8b+llama3.2_1b", "t5_v1_1_xxl+t5_v1_1_small"],
        help="VERIFIER+DRAFTER: networks whose sizes give the times of passes on --chips",
    )
    parser.add_argument("--chips", nargs="+", default=["v5e", "h100"], choices=list(CHIPS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="B, on --chips")
    parser.add_argument("--cached", type=int, default=1024, help="S, on --chips")
    parser.add_argument("--draws", type=int, default=4, help="see `study.expect`")
    parser.add_argument(
        "--decode", action="store_true", help="decode with the best chain and tree on this machine"
    )
    parser.add_argument("--grown", action="store_true", help=command.GROWN_HELP)
    parser.add_argument("--repeats", type=int, default=3, help="measurements with --decode")


@dataclasses.dataclass(frozen=True, eq=False)
class _Texts:
    """A pair, the verifier's texts at a temperature, and those of prompts that choose (`apart`)."""

    name: str
    models: Mapping[str, TextModel]
    temperature: float
    texts: KnownTexts
    apart: KnownTexts
    prompts: Sequence[str]
    options: Mapping[str, Any]
    args: argparse.Namespace

    def chain(self, length: int) -> Setting:
        """A chain of this length with `Block` verification."""
        return Setting(max_draft=length, temperature=self.temperature)

    def tree(self, children: str, parents: tuple[int, ...]) -> Setting:
        """A tree with `Traversal` verification."""
        text = f"Tree(parents={parents}, children={children!r})"
        return Setting(drafting=text, temperature=self.temperature)

    def rates(self, children: str) -> np.ndarray:
        setting, most = self.tree(children, (0,)), self.args.widest
        return tree_rates(self.models, self.apart, setting, most, draws=self.args.draws)

    def expect(self, settings: Sequence[Setting], *, apart: bool = False) -> list[TreeEstimate]:
        """Estimates of chains and trees."""
        texts, draws = self.apart if apart else self.texts, self.args.draws
        chains = [setting for setting in settings if is_chain(setting)]
        trees = [setting for setting in settings if setting not in chains]
        known = {sampling_key(settings[0]): texts}
        found = {
            estimate.setting: TreeEstimate(estimate, 0.0)
            for estimate in expect(self.models, known, chains, draws=draws)
        }
        if trees:
            walked = expect_trees(self.models, texts, trees, draws=draws)
            found |= {estimate.expected.setting: estimate for estimate in walked}
        return [found[setting] for setting in settings]


class _Times(NamedTuple):
    """The costs of a pair, and those of wider passes of its drafter."""

    pair: Costs
    drafter: Costs


class _Clock:
    """The times of rounds by those of passes, which the rows of a batch share."""

    def __init__(self, times: _Times):
        self._times = times
        self.rows, self.step = times.pair.rows[0], times.pair.alone[0]
        self.draft = times.pair.draft[0]

    def review(self, tokens: int) -> float:
        """A verifier's pass over a block and one more token."""
        return self._times.pair.at_widths((tokens,)).verifier[0][0]

    def level(self, nodes: int) -> float:
        """A drafter's pass over some nodes."""
        one, several = (
            self._times.drafter.at_widths((count,)).verifier[0][0] for count in (1, nodes)
        )
        return self.draft + max(several - one, 0.0)

    def round(self, estimate: TreeEstimate) -> float:
        """A round; of chains without the pass that reads a wholly accepted draft's last token."""
        setting = estimate.expected.setting
        if is_chain(setting):
            length = int(setting.longest or 0)
            return length * self.draft + self.review(length + 1)
        # The first pass reads the committed tokens, as does a pass after a leaf; each other the
        # nodes of a level that have children.
        shape = tree_of(setting).shape
        leaf = 1.0 - (1.0 - min(max(estimate.whole, 0.0), 1.0)) ** self.rows
        first = self.level(len(shape.levels) + 1) * (1.0 + leaf)
        others = sum(self.level(len(level.counts)) for level in shape.levels[1:])
        return first + others + self.review(shape.size + 1)

    def per_token(self, estimate: TreeEstimate) -> float:
        """The seconds of a token of a row."""
        return self.round(estimate) / estimate.expected.tokens_per_call


def run(args: argparse.Namespace) -> Report:
    """Compares trees with chains along the verifier's texts of the samples of the pairs.

    For each kind of children the table of rates gives the best trees (`theory.best_tree`): of a
    number of nodes, and by the times of passes of a machine. Walks along the texts then give their
    tokens per call and their speed-up. The chains are all lengths up to the
    largest number of nodes.
    """
    _check(args)
    rows = []
    for name in args.pairs if args.inputs is None else ["given"]:
        for given in _texts(name, args):
            # Greedy children are the most probable tokens, whatever their kind.
            kinds = args.children if given.temperature >= TINY else args.children[:1]
            rates = {kind: given.rates(kind) for kind in kinds}
            found = _equal(given, rates)
            for machine, times in _machines(given):
                found += _fastest(given, rates, machine, times)
            for row in found:  # these take long: an interruption must not lose them
                print(json.dumps(row), flush=True)
            rows += found
            spare_maps()
    columns = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
    return Report(rows, columns, _NOTES)


def _check(args: argparse.Namespace) -> None:
    if args.inputs is None and (args.drafter or args.verifier):
        raise ValueError("--drafter and --verifier need --inputs, a file of prompts")
    sizes = (
        "prompts",
        "max_new",
        "drafted",
        "depth",
        "widest",
        "rows",
        "cached",
        "draws",
        "repeats",
    )
    command.check_positive(args, *sizes)
    check_count("--apart", args.apart, "give a number of prompts", low=0)
    for temperature in args.temperatures:
        one_number("--temperatures", temperature, low=0.0, open_high=True)
    for text in args.like:
        if len(text.split("+")) != 2:
            raise ValueError(f"--like must be VERIFIER+DRAFTER, got {text!r}")
        for name in text.split("+"):
            preset(name)


def _texts(name: str, args: argparse.Namespace) -> list[_Texts]:
    """The verifier's texts of a pair at each temperature."""
    if args.inputs is not None:
        asked = [example.inputs for example in read_examples(args.inputs)]
        pair = specjax.load_pair(drafter=args.drafter, verifier=args.verifier)
    else:
        asked = [example.inputs for example in samples(name).examples]
        pair = specjax.load_pair(name)
    if args.apart and len(asked) < args.prompts + args.apart:
        raise ValueError(
            f"--prompts {args.prompts} and --apart {args.apart} need "
            f"{args.prompts + args.apart} prompts, but {args.inputs or name} has {len(asked)}: "
            "give fewer"
        )
    prompts = asked[: args.prompts]
    others = asked[args.prompts :][: args.apart]
    options: dict[str, Any] = {"max_new_tokens": args.max_new}
    found = []
    for temperature in args.temperatures:
        print(f"{name}: the verifier's texts at temperature {temperature:g} ...", flush=True)
        alone = Setting(method=VERIFIER_ALONE, temperature=temperature)
        decoder = Decoder(pair.named, alone, batch_size=min(16, len(prompts)), **options)
        texts, *more = (
            decode_texts(decoder, [decoder.encode(text) for text in some], seed=0)
            for some in (prompts, others)
            if some
        )
        given = name, pair.named, temperature, texts, (more or [texts])[0], prompts, options, args
        found.append(_Texts(*given))
    return found


def _equal(given: _Texts, rates: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Chains and trees of equal numbers of drafted tokens, whatever their time."""
    args = given.args
    settings: list[tuple[str, Setting, BestTree | None]] = []
    for size in args.drafted:
        settings.append((CHAIN, given.chain(size), None))
        for kind, table in rates.items():
            best = best_tree(table, lambda _: 1.0, lambda _: 0.0, sizes=(size,), depth=args.depth)
            settings.append((kind, given.tree(kind, best.parents), best))
    return _lines(given, settings, given.expect([setting for _, setting, _ in settings]), None)


def _fastest(
    given: _Texts, rates: Mapping[str, np.ndarray], machine: str, times: _Times
) -> list[dict[str, Any]]:
    clock, most = _Clock(times), max(given.args.drafted)
    chains = [given.chain(length) for length in range(1, most + 1)]
    best = min(given.expect(chains, apart=True), key=clock.per_token).expected.setting
    settings: list[tuple[str, Setting, BestTree | None]] = [(CHAIN, best, None)]
    for kind, table in rates.items():
        sizes, depth = range(1, most + 1), given.args.depth
        found = best_tree(table, clock.review, clock.level, sizes=sizes, depth=depth)
        settings.append((kind, given.tree(kind, found.parents), found))
    only = [setting for _, setting, _ in settings]
    rows = _lines(given, settings, given.expect(only), clock)
    for row in rows:
        row["machine"] = machine
    if machine == _HERE:
        for row, decoded in zip(rows, _decode(given, only), strict=True):
            row |= decoded
    return rows


def _lines(
    given: _Texts,
    settings: Sequence[tuple[str, Setting, BestTree | None]],
    estimates: Sequence[TreeEstimate],
    clock: _Clock | None,
) -> list[dict[str, Any]]:
    rows = []
    for (kind, setting, tree), one in zip(settings, estimates, strict=True):
        seconds = None if clock is None else clock.per_token(one)
        shape = None if tree is None else specjax.drafting.trees.Topology(tree.parents)
        rows.append(
            {
                "pair": given.name,
                "temperature": given.temperature,
                "machine": "-",
                "drafted": setting.longest if shape is None else shape.size,
                "children": kind,
                "levels": setting.longest if shape is None else len(shape.levels),
                "table_tokens": None if tree is None else tree.tokens,
                "tokens_per_call": one.expected.tokens_per_call,
                "error": one.expected.error,
                "ms_per_token": None if seconds is None else 1e3 * seconds,
                "speedup": None if clock is None or seconds is None else clock.step / seconds,
                "parents": None if tree is None else tree.parents,
            }
        )
    return rows


def _machines(given: _Texts) -> list[tuple[str, _Times]]:
    """The times of passes, by the machine's name: estimated, and with --decode measured here."""
    args = given.args
    found = [
        (f"{like} on {chip}, B={rows}", roofline(like, chip, rows, args))
        for like in args.like
        for chip in args.chips
        for rows in args.rows
    ]
    if args.decode:
        found.append((_HERE, _measure(given)))
    return found


def roofline(like: str, chip: str, rows: int, args: argparse.Namespace) -> _Times:
    """The least times of passes of VERIFIER+DRAFTER, on as few chips as hold the verifier."""
    networks = [Network.of(preset(name)) for name in like.split("+")]
    widths = tuple(range(1, max(args.drafted) + 2))
    sizes = {"rows": rows, "cached": args.cached, "prompt": args.cached, "latency": 5e-6}

    def seconds(network: Network, tokens: int) -> float:
        ways = 1
        while network.stored * 2 / ways > 0.9 * CHIPS[chip].memory:
            ways *= 2
        return pass_seconds(network, CHIPS[chip], tokens=tokens, ways=ways, **sizes).total

    large, small = (tuple(seconds(x, width) for width in widths) for x in networks)
    return _Times(
        Costs((rows,), widths, (small[0],), (large,), alone=large[:1]),
        Costs((rows,), widths, (0.0,), (small,)),
    )


def _timed_models(given: _Texts) -> dict[str, TextModel]:
    models = dict(given.models)
    if given.args.grown:
        models[VERIFIER] = command.grown(models[VERIFIER])
    return models


def _measure(given: _Texts) -> _Times:
    """The times of passes here, without prompts."""
    widths = powers_of_two(max(given.args.drafted) + 1)
    length = max(map(len, given.texts.prompts))
    models = _timed_models(given)
    sizes: Any = {"rows": (1,), "widths": widths, "prompt_length": length}
    # Of the drafter, which reviews its own drafts, only the times of wider passes count.
    return _Times(
        measure_costs(Pair(**models), with_alone=True, **sizes),
        measure_costs(Pair(models[_DRAFTER], models[_DRAFTER]), **sizes),
    )


def _decode(given: _Texts, settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Decodes each prompt with each setting, in turns with the verifier alone."""
    alone = Setting(method=VERIFIER_ALONE, temperature=given.temperature)
    models, decoders = _timed_models(given), {}
    chunks = [[tokens] for tokens in given.texts.prompts]
    for setting in (alone, *settings):
        print(f"decoding: {setting.described()} ...", flush=True)
        decoders[setting] = Decoder(models, setting, batch_size=1, **given.options)
        for chunk in chunks:
            decoders[setting](chunk, progress=False)  # compiles
    times = {
        setting: side.times
        for setting, side in bench.measure(decoders, chunks, given.args.repeats).items()
    }
    speeds = {
        setting: one.tokens.sum() / one.seconds[0].min(axis=0).sum()
        for setting, one in times.items()
    }
    return [
        {
            "measured_tokens": times[setting].per_pass,
            "measured_speedup": speeds[setting] / speeds[alone],
        }
        for setting in settings
    ]


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
