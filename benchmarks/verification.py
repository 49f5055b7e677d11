"""Times rules and verification, relative to a copy of the arrays that they read."""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import command, workload
from benchmarks.interleaved import time_interleaved
from specjax import rules, verification
from specjax.cli.report import Report
from specjax.types import Array, ScoredBlock

HELP = "rules and verification, as a ratio to copying the draft and target arrays once"

_STRENGTHS: dict[str, dict[str, float]] = {
    "Lossless": {},
    "Chow": {"strength": 0.5},
    "ChowLog": {"strength": 5.0},
    "BiLD": {"strength": 8.0},
    "Mentored": {"strength": 0.1},
    "KLBall": {"nats": 0.1},
    "Mixture": {"weight": 0.7},
    "Typical": {"epsilon": 0.3, "alpha": 0.09},
    "AcceptThreshold": {"acc": 0.7},
    "Cactus": {"delta": 0.01},
}
_TUNED = (rules.LossyTuned, rules.Mentored, rules.KLBall, rules.KLPrice)
_MAX_TUNED_BYTES = 1e8
# The limit for the arrays of a case and their copies.
_MAX_BYTES = 8e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes to measure; the defaults are those of the documentation."""
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="B")
    parser.add_argument("--drafts", type=int, nargs="+", default=[5, 20], help="G")
    parser.add_argument("--vocabs", type=int, nargs="+", default=[2048, 32128, 256000], help="V")
    parser.add_argument("--rules", nargs="+", default=[r.__name__ for r in rules.ALL_RULES])
    parser.add_argument(
        "--verifications", nargs="+", default=["Token", "Block"], help="also: GreedyBlock"
    )
    parser.add_argument("--repeats", type=int, default=3)


def run(args: argparse.Namespace) -> Report:
    """Measures every combination that fits."""
    chosen_rules = [
        _named("--rules", rules.ALL_RULES, name)(**_STRENGTHS.get(name, {"strength": 0.1}))
        for name in args.rules
    ]
    algorithms = [
        _named("--verifications", verification.ALL_VERIFICATIONS, name)()
        for name in args.verifications
    ]
    sizes = {name: min(getattr(args, name)) for name in ("rows", "drafts", "vocabs")}
    workload.check_positive(argparse.Namespace(**sizes, repeats=args.repeats), *sizes, "repeats")
    table, skipped = [], []
    for vocab in args.vocabs:
        for max_draft in args.drafts:
            for rows in args.rows:
                size = f"B={rows} G={max_draft} V={vocab}"
                # Two arrays, their two copies, and the target distributions.
                if 5 * 4 * rows * (max_draft + 1) * vocab > _MAX_BYTES:
                    skipped.append(f"{size}: skipped, its arrays take more than 8 GB")
                    continue
                print(f"{size} ...", flush=True)
                fitting = chosen_rules
                if 4 * rows * (max_draft + 1) * vocab > _MAX_TUNED_BYTES:
                    # They solve for a strength at every position: minutes a call, without new
                    # information.
                    fitting = [r for r in chosen_rules if not isinstance(r, _TUNED)]
                    if len(fitting) < len(chosen_rules):
                        skipped.append(f"{size}: skipped the tuned rules (arrays > 100 MB)")
                table += _measure(rows, max_draft, vocab, fitting, algorithms, args.repeats)
    deferral = [r["ratio"] for r in table if r["rule"] in _DEFERRAL]
    summary = {"worst_deferral_ratio": max(deferral)} if deferral else {}
    return Report(
        table,
        ["rows", "max_draft", "vocab", "rule", "verification", "ms", "copy_ms", "ratio"],
        notes=skipped,
        summary=summary,
    )


_DEFERRAL = ("Lossless", "Chow", "ChowLog", "Diff", "DiffLog", "OPT", "OPTLog", "BiLD")


def _measure(rows, max_draft, vocab, chosen_rules, algorithms, repeats) -> list[dict[str, Any]]:
    draft, target, tokens = _blocks(rows, max_draft, vocab)
    keys = jax.random.split(jax.random.key(1), rows)
    counts = jnp.full((rows,), max_draft, jnp.int32)
    # Enough steps that the start of the program, and its first use of memory, do not matter.
    steps = max(3, min(200, int(2e8 / (draft.nbytes + target.nbytes))))
    calls = {("copy", ""): _copier(steps, draft, target)}
    for rule in chosen_rules:
        for algorithm in algorithms:
            step = _step(algorithm, steps)
            args = (rule, keys, tokens, draft, target, counts)
            names = type(rule).__name__, type(algorithm).__name__
            calls[names] = functools.partial(step, *args)
    seconds = time_interleaved(calls, repeats=repeats)
    seconds = {names: taken / steps for names, taken in seconds.items()}
    copied = seconds.pop(("copy", ""))
    return [
        {
            "rows": rows,
            "max_draft": max_draft,
            "vocab": vocab,
            "rule": rule_name,
            "verification": algorithm_name,
            "ms": 1e3 * taken,
            "copy_ms": 1e3 * copied,
            "ratio": taken / copied,
        }
        for (rule_name, algorithm_name), taken in seconds.items()
    ]


def _copier(steps: int, *arrays: Array) -> Callable[[], Any]:
    """Copies the arrays `steps` times into existing memory."""

    def copy(old, new):
        def body(_, carry):
            # The barrier keeps each copy separate.
            old, new = lax.optimization_barrier(carry)
            pairs = zip(old, new, strict=True)
            return tuple(lax.dynamic_update_slice(o, n, (0,) * o.ndim) for o, n in pairs), new

        return lax.fori_loop(0, steps, body, (old, new))

    jitted = jax.jit(copy, donate_argnums=(0, 1))
    held = [(jax.tree.map(jnp.zeros_like, arrays), jax.tree.map(jnp.copy, arrays))]

    def call():
        held[0] = jitted(*held[0])
        return held[0]

    return call


def _step(algorithm: verification.Verification, steps: int) -> Callable:
    """Rule and verification, `steps` times inside a program, as in the decoding loop."""

    def row(rule, key, tokens, draft, target, count):
        # At temperature 1, unfiltered, the confidences are the distributions themselves.
        pi = jax.vmap(rule)(draft, target, draft, target)
        carry = algorithm.init_carry(tokens.size)
        block = ScoredBlock(tokens, draft, pi, count)
        out = verification.verify(algorithm, key, block, carry)
        return out.num_accepted + out.next_token

    def run(rule, keys, tokens, draft, target, counts):
        def body(i, carry):
            # The barrier keeps XLA from moving anything out of the loop.
            draft, target, seen = lax.optimization_barrier(carry)
            now = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, i)
            out = jax.vmap(row, in_axes=(None, 0, 0, 0, 0, 0))(
                rule, now, tokens, draft, target, counts
            )
            return draft, target, seen + out

        carry = (draft, target, jnp.zeros_like(counts))
        return lax.fori_loop(0, steps, body, carry)[2]

    return jax.jit(run)


def _blocks(rows: int, max_draft: int, vocab: int) -> tuple[Array, Array, Array]:
    """Similar peaked distributions, and tokens drawn from the first."""

    @jax.jit
    def make(key):
        keys = jax.random.split(key, 3)
        shape = (rows, max_draft + 1, vocab)
        shared = 2.0 * jax.random.normal(keys[0], shape)
        draft = jax.nn.softmax(shared + 0.5 * jax.random.normal(keys[1], shape))
        target = jax.nn.softmax(shared)
        tokens = jax.random.categorical(keys[2], jnp.log(draft[:, :max_draft]))
        return draft, target, tokens.astype(jnp.int32)

    return jax.block_until_ready(make(jax.random.key(0)))


def _named(option: str, known, name: str):
    for item in known:
        if item.__name__ == name:
            return item
    choices = ", ".join(item.__name__ for item in known)
    raise ValueError(f"{option} {name} is unknown: choose from {choices}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this benchmark; see `benchmarks.command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
