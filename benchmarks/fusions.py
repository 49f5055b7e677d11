"""Compares YNNPACK's fusions on a CPU: training steps, evaluations and prefills.

`specjax.compilation` has the choice, and the reason.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import command
from benchmarks.interleaved import time_interleaved
from specjax import compilation
from specjax.cli.report import Report
from specjax.data.batching import JoinedBatch, PairBatch
from specjax.models import LlamaConfig, T5Config, model_from_config
from specjax.training import AdamW, Objective
from specjax.training.step import init_state, make_train_step
from specjax.training.tasks import TextTask
from specjax.types import Prompts

HELP = "training, evaluation and prefill with YNNPACK's fusions, its single products, and without"

# As in gin_configs/pairs: the built-in pairs' networks.
_VERIFIER = T5Config(
    vocab_size=2048,
    embed_dim=256,
    num_heads=4,
    head_dim=64,
    mlp_dim=512,
    num_encoder_layers=3,
    num_decoder_layers=6,
)
_DRAFTER: Any = _VERIFIER.replace(
    embed_dim=128, head_dim=32, mlp_dim=256, num_decoder_layers=1, dropout_rate=0.0
)
_LLAMA = LlamaConfig(
    vocab_size=2048,
    embed_dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=640,
    num_layers=4,
    tie_embeddings=True,
)
# T5 base's widths.
_WIDE = T5Config(
    vocab_size=32128,
    embed_dim=768,
    num_heads=12,
    head_dim=64,
    mlp_dim=2048,
    num_encoder_layers=2,
    num_decoder_layers=2,
)
_WAYS = {
    "all fusions": None,
    "single products": compilation.CPU_OPTIONS,
    "no YNNPACK": compilation.STEP_OPTIONS,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes to measure."""
    parser.add_argument("--tokens", type=int, default=2048, help="target tokens of a batch")
    parser.add_argument("--length", type=int, default=24, help="length of a text, in tokens")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 64], help="rows per prefill")
    parser.add_argument("--repeats", type=int, default=11)


def run(args: argparse.Namespace) -> Report:
    """Measures every program with all options, in turns."""
    if jax.default_backend() != "cpu":
        raise ValueError("YNNPACK only compiles for CPUs: set JAX_PLATFORMS=cpu")
    if min(args.tokens, args.length, args.repeats, *args.prompts) < 1:
        raise ValueError("--tokens, --length, --prompts and --repeats must be at least 1")
    rows = []
    for name, make in _programs(args).items():
        print(f"{name} ...", flush=True)
        calls = {way: make(options) for way, options in _WAYS.items()}
        seconds = time_interleaved(calls, repeats=args.repeats)
        first = seconds["all fusions"]
        rows += [
            {"program": name, "way": way, "ms": 1e3 * value, "times_all": value / first}
            for way, value in seconds.items()
        ]
    return Report(rows, ["program", "way", "ms", "times_all"])


Options = dict[str, Any] | None


def _programs(args: argparse.Namespace) -> dict[str, Callable[[Options], Callable[[], Any]]]:
    """Name -> a function of compiler options that returns a call of the compiled program."""
    rng = np.random.default_rng(0)
    shape = (max(args.tokens // args.length, 1), args.length)
    inputs, targets = (rng.integers(3, 2048, shape).astype(np.int32) for _ in range(2))
    pairs = PairBatch(inputs, targets)
    joined = JoinedBatch(targets, np.ones(shape, bool))
    distilled = TextTask(
        model=_DRAFTER, objective=Objective(distillation_weight=1.0), teacher=_VERIFIER
    )
    tasks: dict[str, tuple[Any, Any]] = {
        "train a T5": (TextTask(model=_VERIFIER), pairs),
        "distil a T5": (distilled, pairs),
        "train a Llama": (TextTask(model=_LLAMA), joined),
    }
    found: dict[str, Callable[[Options], Callable[[], Any]]] = {
        name: functools.partial(_train, *both) for name, both in tasks.items()
    }
    found["evaluate a T5"] = functools.partial(_evaluate, *tasks["train a T5"])
    for rows in args.prompts:
        for name, config in {"T5": _VERIFIER, "wide T5": _WIDE, "Llama": _LLAMA}.items():
            prompts = rng.integers(3, 2048, (rows, args.length)).astype(np.int32)
            found[f"prefill of a {name}, {rows} rows"] = functools.partial(
                _prefill, config, prompts
            )
    return found


def _train(task: Any, batch: Any, options: Options) -> Callable[[], Any]:
    params = task.init(jax.random.key(0))
    teacher = None if task.teacher is None else model_from_config(task.teacher)
    constants = teacher and teacher.init(jax.random.key(1))
    optimizer = AdamW(learning_rate=1e-3, warmup_steps=10)
    step = make_train_step(task, optimizer, seed=0, ema_decay=0.999)
    states = [init_state(params, optimizer, 0.999)]
    compiled = step.lower(states[0], constants, batch).compile(options)  # type: ignore[attr-defined]

    def call() -> Any:
        state, metrics = compiled(states.pop(), constants, batch)  # the state is donated
        states.append(state)
        return metrics

    return call


def _evaluate(task: Any, batch: Any, options: Options) -> Callable[[], Any]:
    params = task.init(jax.random.key(0))
    lowered = jax.jit(task.evaluate).lower(params, None, batch)
    return functools.partial(lowered.compile(options), params, None, batch)


def _prefill(config: Any, prompts: Any, options: Options) -> Callable[[], Any]:
    model = model_from_config(config)
    params = model.prepare(model.init(jax.random.key(0)))
    lengths: Any = np.full(len(prompts), prompts.shape[1], np.int32)
    jitted = jax.jit(model.prefill, static_argnums=2)
    compiled = jitted.lower(params, Prompts(prompts, lengths), 128).compile(options)
    return functools.partial(compiled, params, Prompts(prompts, lengths))


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m benchmarks.fusions`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
