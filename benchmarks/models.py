"""Times the networks per block, against a plain read."""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from benchmarks import command
from specjax.cli.report import Report
from specjax.compilation import step_options
from specjax.models import Model, model_from_config, preset
from specjax.models.cache import RaggedCache
from specjax.types import Params, Prompts

HELP = "extend by T tokens in a jitted loop, against reading the same bytes"

# Four layers of Llama 3 8B, and of Qwen 3.5 0.8B: three of them gated delta networks, or all with
# attention.
_QWEN = preset("qwen3.5_0.8b", num_layers=4, layer_types=(), vocab_size=8_192)
_LLAMA = preset("llama3_8b", num_layers=4, vocab_size=8_192)
# T5 v1.1's shapes with its embedding tied: 60.5 M and 222.9 M parameters. "tiny" is for trials.
_MODELS: dict[str, Any] = {
    "llama": _LLAMA,
    "hybrid": _QWEN,
    "attention": _QWEN.replace(layer_types=("full_attention",) * 4),
    "60m": preset("t5_v1_1_small", tie_embeddings=True),
    "220m": preset("t5_v1_1_base", tie_embeddings=True),
    "tiny": preset(
        "t5_v1_1_small",
        vocab_size=64,
        embed_dim=32,
        mlp_dim=64,
        num_encoder_layers=1,
        num_decoder_layers=2,
        tie_embeddings=True,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes to measure; the defaults are those of the documentation."""
    parser.add_argument("--models", nargs="+", choices=list(_MODELS), default=["60m", "220m"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 6, 9, 16], help="T")
    parser.add_argument("--rows", type=int, default=1, help="B")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--prompt", type=int, default=32, help="of the encoder, or the positions read before"
    )
    parser.add_argument("--max-length", type=int, default=160, help="S, positions of the cache")
    parser.add_argument("--steps", type=int, default=16, help="extends per measured loop")
    parser.add_argument("--repeats", type=int, default=7)


def run(args: argparse.Namespace) -> Report:
    """Measures every size; all calls of a size take turns."""
    command.check_positive(args, "tokens", "rows", "prompt", "steps", "repeats")
    if args.steps + max(args.tokens) > args.max_length:
        raise ValueError(
            f"--steps {args.steps} plus --tokens {max(args.tokens)} exceed --max-length "
            f"{args.max_length}: raise it"
        )
    table: list[dict[str, Any]] = []
    for name in args.models:
        print(f"{name} ...", flush=True)
        table += _measure(name, _MODELS[name], args)
    return Report(
        table,
        ["model", "parameters", "what", "tokens", "ms", "times_one", "read_fraction"],
        notes=[
            "times_one: against our own T = 1. read_fraction: the time of a plain read of the same "
            "bytes, over the time."
        ],
    )


def _measure(name: str, config: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    config = config.replace(dtype=args.dtype, param_dtype=args.dtype)
    model = model_from_config(config).for_devices(jax.default_backend())
    params = random_params(model)
    inputs = np.random.default_rng(0).integers(3, config.vocab_size, (args.rows, args.prompt))
    lengths = jnp.full(args.rows, args.prompt, jnp.int32)
    prompts = Prompts(jnp.asarray(inputs, jnp.int32), lengths)
    prefill = jax.jit(model.prefill, static_argnums=2)
    prepared = model.prepare(params)
    prefilled = prefill(prepared, prompts, args.max_length)
    bytes_read = _bytes_read(config, params, prefilled.cache)
    calls: dict[Any, Callable[[], Any]] = {
        tokens: _our_loop(model, prepared, prefilled, tokens, args.steps) for tokens in args.tokens
    }
    calls["read"] = _plain_read(bytes_read, args.steps)
    seconds = command.time_interleaved(calls, repeats=args.repeats)
    milliseconds = {what: 1e3 * value / args.steps for what, value in seconds.items()}

    def row(what: str, tokens: int | None, ms: float) -> dict[str, Any]:
        return {
            "model": name,
            "parameters": model.num_params(),
            "bytes_read": bytes_read,
            "what": what,
            "tokens": tokens,
            "ms": ms,
            "times_one": ms / milliseconds[1] if tokens and 1 in milliseconds else None,
            "read_fraction": milliseconds["read"] / ms,
        }

    rows = [row("extend", tokens, milliseconds[tokens]) for tokens in args.tokens]
    return [*rows, row("plain read", None, milliseconds["read"])]


def random_params(model: Model) -> Params:
    """Random parameters of the initialisers' scale, but faster, and made where they stay."""
    head_dim = model.config.head_dim
    numbers = itertools.count()

    # A program for each shape and dtype; a scale compiles nothing.
    @functools.partial(jax.jit, static_argnums=(0, 1))
    def normal(shape: tuple[int, ...], dtype: Any, number: Any, scale: Any) -> jax.Array:
        key = jax.random.key(number, impl="rbg")
        return (jax.random.normal(key, shape, dtype) * scale).astype(dtype)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, leaf.dtype)
        names = {key.key for key in path}
        scale = 1.0 if "embedding" in names else leaf.shape[0] ** -0.5
        if "query" in names:
            scale *= head_dim**-0.5
        return normal(leaf.shape, leaf.dtype, next(numbers), np.asarray(scale, leaf.dtype))

    return jax.tree_util.tree_map_with_path(draw, model.abstract_params())


def _bytes_read(config: Any, params: Params, cache: RaggedCache) -> int:
    """The bytes that a decoding step reads: decoder, output projection and cache."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    for path, leaf in flatten_dict(params["decoder"]).items():
        if not {"encoder_decoder_attention"} & set(path) or not {"key", "value"} & set(path):
            total += leaf.nbytes  # the cross-attention's keys and values are in the cache
    if config.tie_embeddings:
        total += params["token_embedder"]["embedding"].nbytes
    return total


def _our_loop(
    model: Model, params: Params, prefilled: Any, tokens: int, steps: int
) -> Callable[[], Any]:
    """`steps` greedy extends by `tokens` tokens, each one position on; the state is donated."""
    options = step_options(jax.default_backend())

    @functools.partial(jax.jit, donate_argnums=1, compiler_options=options)
    def loop(params: Params, cache: RaggedCache, block: jax.Array, start: jax.Array) -> Any:
        def body(_: Any, state: Any) -> Any:
            cache, block, positions = state
            out = model.extend(params, cache, block, positions)
            return out.cache, jnp.argmax(out.logits, -1).astype(jnp.int32), positions + 1

        return jax.lax.fori_loop(0, steps, body, (cache, block, start))

    block = jnp.tile(prefilled.tokens[:, None], (1, tokens))
    state = [jax.tree.map(jnp.copy, prefilled.cache)]

    def call() -> Any:
        state[0], block_out, _ = loop(params, state[0], block, prefilled.positions)
        return block_out

    return call


def _plain_read(num_bytes: int, repeats: int) -> Callable[[], Any]:
    """Sums an array of that many bytes, as often as the others take steps, in a jitted loop."""

    @jax.jit
    def loop(values: jax.Array) -> jax.Array:
        def body(_: Any, total: jax.Array) -> jax.Array:
            again, total = jax.lax.optimization_barrier((values, total))
            return total + jnp.sum(again)

        return jax.lax.fori_loop(0, repeats, body, jnp.float32(0))

    return functools.partial(loop, jnp.ones(num_bytes // 4, jnp.float32))


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
