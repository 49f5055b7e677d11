"""The cost of a looked-up draft, by the length of the text, beside a verifier's pass."""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from benchmarks.interleaved import time_interleaved
from specjax.cli.bench import check_positive
from specjax.cli.report import Report
from specjax.compilation import jit, step_options
from specjax.drafting import LookupDrafter
from specjax.models import model_from_config, preset
from specjax.sampling import Sampling
from specjax.types import DraftInputs, Prompts

HELP = "microseconds of a draft copied from the text so far, by the text's length"

_PRESET = "t5_v1_1_base"
_COLUMNS = ("context", "rows", "match", "us_per_row", "round_us", "pass_ms", "share_of_pass")
# Rounds per call.
_ROUNDS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[512, 4096, 32768],
        help="tokens of the text so far",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="batch sizes B")
    parser.add_argument(
        "--matches",
        type=int,
        nargs="+",
        default=[0, 32],
        help="number of last tokens that occur before",
    )
    parser.add_argument("--max-draft", type=int, default=10, help="draft length G")
    parser.add_argument("--vocab", type=int, default=32128, help="vocabulary V")
    parser.add_argument(
        "--pass-context",
        type=int,
        default=4096,
        help="the context for the verifier's pass of one row",
    )
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each setting")


def run(args: argparse.Namespace) -> Report:
    """Measures whole rounds of only the drafter: a block with its probabilities, and a commit.

    The text consists of random tokens; its ending is a copy of `match` earlier tokens. Each round
    proposes G tokens, writes their one-hot `[B, G + 1, V]`, and commits G tokens. The state is as
    wide as for a decoder-only model, twice the context. The pass is T5 v1.1 base's (weights of
    zeros) over G + 1 tokens of one row, with an encoder's input of `--pass-context` tokens.
    """
    check_positive(args, "contexts", "rows", "max_draft", "vocab", "pass_context", "repeats")
    for name in ("contexts", "pass_context"):
        least = np.min(getattr(args, name))
        if least < 2 * max(args.matches) + 2:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least {2 * max(args.matches) + 2}, so that "
                f"{max(args.matches)} tokens can match, got {least}"
            )
    if min(args.matches) < 0:
        raise ValueError(f"--matches must be at least 0, got {args.matches}")
    drafter = LookupDrafter(args.vocab, args.max_draft)
    cases = list(itertools.product(args.contexts, args.rows, args.matches))
    calls: dict[Any, Callable[[], Any]] = {c: _rounds(drafter, *c) for c in cases}
    if args.pass_context in args.contexts:
        calls["pass"] = _pass(args)
    seconds = time_interleaved(calls, repeats=args.repeats)
    table = []
    for case in cases:
        context, rows, match = case
        spent = seconds[case] / _ROUNDS
        row = {"context": context, "rows": rows, "match": match, "us_per_row": 1e6 * spent / rows}
        row["round_us"] = 1e6 * spent
        if context == args.pass_context and rows == 1:
            row |= {"pass_ms": 1e3 * seconds["pass"], "share_of_pass": spent / seconds["pass"]}
        table.append(row)
    return Report(table, _COLUMNS)


def _rounds(drafter: LookupDrafter, context: int, rows: int, match: int) -> Callable[[], Any]:
    """A function that drafts and commits `_ROUNDS` times."""
    rng = np.random.default_rng(0)
    # The last id separates the copied tokens from the tokens before.
    text = rng.integers(drafter.vocab_size - 1, size=(rows, context)).astype(np.int32)
    if match:
        text[:, -match:] = text[:, context // 4 : context // 4 + match]
        text[:, -match - 1] = drafter.vocab_size - 1
    lengths = jnp.full((rows,), context, jnp.int32)
    prefill = jit(drafter.prefill, static_argnums=2)
    state = prefill((), Prompts(jnp.asarray(text), lengths), context + drafter.max_draft + 1)
    sampling = Sampling(jnp.zeros((rows,), jnp.float32))
    limits, active = jnp.full((rows,), drafter.max_draft, jnp.int32), jnp.ones((rows,), bool)

    @functools.partial(jit, options=step_options)
    def rounds(state: Any, last: Any) -> Any:
        def one(_: Any, carry: Any) -> Any:
            state, last = carry
            inputs = DraftInputs(last, limits, jnp.zeros((rows, 0)), sampling, active)
            block, state = drafter.propose((), state, inputs)
            # Overwrites the ending, so that the text keeps its length and its match.
            before = state._replace(lengths=state.lengths - block.tokens.shape[1])
            ending = jnp.asarray(text[:, -drafter.max_draft :])
            # The ending depends on the block, so that no round can be left out.
            ending = jnp.where(block.tokens < 0, block.tokens, ending)
            state = drafter.commit(before, ending, limits)
            return state, block.tokens[:, -1]

        return jax.lax.fori_loop(0, _ROUNDS, one, (state, last))

    return lambda: rounds(state, jnp.asarray(text[:, -1]))


def _pass(args: argparse.Namespace) -> Callable[[], Any]:
    """A pass of the verifier, in the middle of an output."""
    model = model_from_config(preset(_PRESET, vocab_size=args.vocab))
    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
    params = model.prepare(zeros(model.abstract_params()))
    inputs: Any = jax.ShapeDtypeStruct((1, args.pass_context), np.int32)
    lengths: Any = jax.ShapeDtypeStruct((1,), np.int32)
    prefill = functools.partial(model.prefill, max_length=128)
    shapes = jax.eval_shape(prefill, params, Prompts(inputs, lengths))
    cache = zeros(shapes.cache)
    tokens = jnp.ones((1, args.max_draft + 1), jnp.int32)

    # `score`: a cache that is not donated would be copied.
    read = jit(lambda *x: model.score(*x)[0], options=step_options)
    return lambda: read(params, cache, tokens, jnp.full((1,), 64, jnp.int32))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this benchmark; see `benchmarks.command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
