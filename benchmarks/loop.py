"""Measures the time that the decoding loop adds to the passes of its models."""

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from benchmarks.loops import REMEDY, Loops
from benchmarks.models import random_params
from benchmarks.predicted import CHIPS, Network, pass_seconds
from benchmarks.tpu.cases import at_trial_sizes, configs_of
from specjax import Pair, TextModel, drafting
from specjax.cli.report import Report
from specjax.compilation import jit, step_options
from specjax.errors import UserError
from specjax.memory import explain_full_memory, sizes_in_words
from specjax.models import model_from_config
from specjax.study.measure import take_turns
from specjax.types import Acceptance, Array, Params, Prompts, ScoredBlock, Stopping
from specjax.verification import Block

HELP = "the time of the speculative loop against the time of its models' passes"
# No logit is this large, but XLA cannot know that.
_NEVER = 1e30
# The seconds of the passes of a turn.
_PASSES_SECONDS = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    command.add_workload(parser, required=False)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5], help="draft lengths G")
    parser.add_argument(
        "--pair",
        help="networks of these sizes with random weights in bfloat16, in place of models and "
        "--inputs: VERIFIER+DRAFTER",
    )
    parser.add_argument("--prompt", type=int, default=64, help="its tokens of a prompt")
    parser.add_argument("--accepted", type=int, help="accept so many drafts of each round")
    parser.add_argument("--chip", choices=list(CHIPS), help="compare --pair with its roofline")
    parser.add_argument("--trial", action="store_true", help="--pair of tiny networks")


def run(args: argparse.Namespace) -> Report:
    """Measures every batch size, draft length and temperature.

    The overhead is the loop's wall time over N_draft t_draft(1) + N_verifier t_verifier(G + 1); all
    times are from this run. Milliseconds are per pass, but loop_ms is the whole loop.
    policy_overhead is the overhead of the same loop with a stopping policy that computes but never
    stops: the acceptance head's, or the drafter's confidence if there is no head; of a --pair only
    the loop is measured. roofline is the loop's time over the least time in which --chip could run
    its passes.
    """
    command.check_positive(args, "drafts", "prompt")
    if (args.inputs is None) == (args.pair is None):
        raise UserError("give --inputs, or --pair for networks with random weights")
    pair, tokens = command.load(args) if args.pair is None else random_pair(args)
    forced = None if args.accepted is None else Forced(args.accepted)
    loops = Loops.of(pair, tokens, args.max_new, forced or Block())
    loops.check_fits(max(args.rows), max(args.drafts))
    rows = []
    for batch, max_draft, temperature in itertools.product(
        args.rows, args.drafts, args.temperatures
    ):
        print(f"B={batch} G={max_draft} T={temperature:g} ...", flush=True)
        sizes = batch, loops.inputs.shape[1], max_draft, loops.max_new
        with explain_full_memory(sizes_in_words(*sizes), REMEDY):
            found = measure(
                loops, batch, max_draft, temperature, args.repeats, whole=args.pair is None
            )
        if args.pair is not None and args.chip is not None:
            least = args.repeats * roofline_ms(pair, args, batch, max_draft, found)
            found["roofline"] = found["loop_ms"] / least
        rows.append({"rows": batch, "max_draft": max_draft, "temperature": temperature, **found})
    return Report(rows, list(rows[0]))


@dataclasses.dataclass(frozen=True)
class Forced(Block):
    """Accepts a fixed number of drafts, with the work of block verification; it has no law."""

    accepted: int

    def acceptance(self, block: ScoredBlock, carry: Any = ()) -> Acceptance:
        found = super().acceptance(block, carry)
        last = jnp.minimum(self.accepted, block.num_drafted)
        chosen = jnp.arange(1, block.tokens.size + 1) == last
        # Not folded, because x may be NaN: the thresholds are computed as ever.
        return found._replace(thresholds=chosen.astype(jnp.float32) + 0.0 * found.thresholds)


def random_pair(args: argparse.Namespace) -> tuple[Pair, list[np.ndarray]]:
    """Networks of a pair's sizes with random weights, and prompts that fill the largest batch."""
    configs = configs_of(args.pair)
    if args.trial:
        configs = at_trial_sizes(*configs)
    words: Any = types.SimpleNamespace(
        vocab_size=configs[0].vocab_size, eos_ids=(), fingerprint="random"
    )
    models = []
    for config in configs:
        model = model_from_config(config)
        models.append(TextModel(model, random_params(model), words, name=args.pair))
    size = max(args.rows), args.prompt
    tokens = np.random.default_rng(0).integers(3, words.vocab_size, size, np.int32)
    return Pair(verifier=models[0], drafter=models[1]), list(tokens)


def roofline_ms(
    pair: Pair, args: argparse.Namespace, rows: int, max_draft: int, found: dict[str, float]
) -> float:
    """The least milliseconds of the passes of a loop, with caches as long as at half its output."""
    seconds = 0.0
    for name, model, width in (
        ("verifier", pair.verifier, max_draft + 1),
        ("drafter", pair.drafter, 1),
    ):
        network: Any = model.model
        cached = int(network.prompt_positions(args.prompt, 0)) + args.max_new // 2
        one = pass_seconds(
            Network.of(network.config), CHIPS[args.chip], rows=rows, tokens=width, cached=cached,
            prompt=args.prompt, ways=1, latency=0.0,
        )  # fmt: skip
        seconds += found[f"{name}_calls"] * one.total
    return 1e3 * seconds


def measure(
    loops: Loops,
    rows: int,
    max_draft: int,
    temperature: float,
    repeats: int,
    *,
    whole: bool = True,
) -> dict[str, float]:
    """Decodes all prompts with both loops, and measures single passes in between.

    Loops and passes take turns at every batch, and the times of each are summed: so noise that is
    longer than a batch affects all of them equally.
    """
    methods: dict[str, Any] = {"loop": (loops.speculative(max_draft), ())}
    if whole:
        policy, own = never_stops(loops.pair)
        # A single width, as without a policy.
        methods["policy"] = loops.speculative(max_draft, (max_draft + 1,), policy), own
    small, large = loops.pair.drafter, loops.pair.verifier
    widths = {"draft": (small, 1), "verifier": (large, max_draft + 1)}
    batches = loops.batches(rows)

    def loop(name: str) -> Callable[[slice], float]:
        method, params = methods[name]
        return lambda part: loops.run(method, part, temperature, stopping=params)[0]

    def single(name: str) -> Callable[[slice], float]:
        call = _passes(widths[name][0], loops, rows, widths[name][1])
        return lambda _: call()

    sides = {name: loop(name) for name in methods} | {name: single(name) for name in widths}
    for name in methods:
        sides[name](batches[0])  # compiles
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for name, _, _, seconds in take_turns(sides, batches, repeats):
        spent[name].append(seconds)
    passes = {}
    for name, (method, params) in methods.items():
        each = [loops.passes(method, part, temperature, stopping=params) for part in batches]
        passes[name] = tuple(repeats * sum(x[of] for x in each) for of in ("drafter", "verifier"))
    one = {name: statistics.mean(spent[name]) for name in widths}
    return figures({name: sum(spent[name]) for name in methods}, passes, one)


def figures(
    seconds: dict[str, float], passes: dict[str, tuple[int, ...]], one: dict[str, float]
) -> dict[str, float]:
    """A line of the table.

    Args:
      seconds: of the loops "loop" and, if it was measured, "policy".
      passes: of each loop, of drafter and verifier.
      one: the seconds per pass: "draft" and "verifier".
    """
    of_passes = {
        name: drafter * one["draft"] + verifier * one["verifier"]
        for name, (drafter, verifier) in passes.items()
    }
    return {
        "drafter_calls": passes["loop"][0],
        "verifier_calls": passes["loop"][1],
        **{f"{name}_ms": 1e3 * spent for name, spent in one.items()},
        "loop_ms": 1e3 * seconds["loop"],
        "round_ms": 1e3 * seconds["loop"] / passes["loop"][1],
        "overhead": seconds["loop"] / of_passes["loop"],
        **{
            f"{name}_overhead": seconds[name] / of_passes[name]
            for name in seconds
            if name != "loop"
        },
    }


def never_stops(pair: Pair) -> tuple[Stopping, Params]:
    """A policy that computes but never stops: the head's, or the drafter's confidence."""
    policy: Stopping = drafting.Confidence(0.0)
    if pair.drafter.head is not None:
        policy = drafting.Survival(threshold=1.0)
    return policy.bind(pair.drafter.head)


def _passes(model: TextModel, loops: Loops, rows: int, width: int) -> Callable[[], float]:
    """A function that runs passes of `width` tokens in mid-output and returns seconds per pass."""
    network, params = model.model, model.prepared
    prompt = int(network.prompt_positions(loops.inputs.shape[1], 0))
    length = prompt + loops.max_new + width
    inputs, lengths = jnp.asarray(loops.inputs[:rows]), jnp.asarray(loops.lengths[:rows])
    filled = jit(network.prefill, static_argnums=2)(params, Prompts(inputs, lengths), length)
    positions = filled.positions + loops.max_new // 2

    @functools.partial(jit, options=step_options, donate_argnums=(1, 2))
    def passes(params: Params, cache: Any, tokens: Array, positions: Array, steps: Array) -> Any:
        def step(_: Any, carry: Any) -> Any:
            cache, tokens = carry
            logits, _, cache = network.extend(params, cache, tokens, positions)
            # The next tokens depend on this pass, so that no pass can be left out or overlap.
            return cache, tokens + (jnp.max(logits, axis=-1) > _NEVER).astype(jnp.int32)

        return jax.lax.fori_loop(0, steps, step, (cache, tokens))

    state = (filled.cache, jnp.ones((rows, width), jnp.int32))

    def call(steps: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        state = jax.block_until_ready(passes(params, *state, positions, jnp.int32(steps)))
        return (time.perf_counter() - begin) / steps

    call(1)  # compiles
    # So many steps that the cost of the call and of its first, cold pass does not matter.
    steps = max(8, int(_PASSES_SECONDS / min(call(8) for _ in range(3))))
    return functools.partial(call, steps)


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
