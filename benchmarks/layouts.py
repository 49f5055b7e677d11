"""Compares layouts of the weights: the matrix products of a step, nothing else.

The networks use the layout that was fastest on a CPU: an `[in, out]` kernel per product, separate
layers, and for a tied output projection a transposed copy (`Model.prepare`).

Of experts one product of a layer is compared: each of `--per-token` experts of a token, in forms
that read only the experts in use and in forms that read all.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from benchmarks.interleaved import time_interleaved
from specjax.cli.report import Report
from specjax.models import experts

HELP = "layouts of the weights: separate, transposed, fused, stacked; tied logits; experts"

Layer = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes to measure; the defaults are T5 v1.1 base's."""
    parser.add_argument("--embed-dim", type=int, default=768)
    parser.add_argument("--joined-kv", type=int, default=768, help="heads times head width")
    parser.add_argument("--mlp-dim", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32128)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 6, 9, 16], help="T")
    parser.add_argument("--experts", type=int, default=64, help="X")
    parser.add_argument("--per-token", type=int, default=8, help="experts of a token")
    parser.add_argument("--repeats", type=int, default=7)


def run(args: argparse.Namespace) -> Report:
    """Measures every layout at every T, in turns."""
    for name in ("embed_dim", "joined_kv", "mlp_dim", "layers", "vocab", "experts", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.tokens) < 1:
        raise ValueError(f"--tokens must be at least 1, got {min(args.tokens)}")
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[0] ** -0.5)

    width, joined, mlp = args.embed_dim, args.joined_kv, args.mlp_dim
    shapes = dict.fromkeys(("query", "key", "value"), (width, joined))
    shapes |= {"out": (joined, width), "wi_0": (width, mlp), "wi_1": (width, mlp)}
    shapes["wo"] = (mlp, width)
    layers = [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(args.layers)]
    table = draw(args.vocab, width)
    forms: dict[str, tuple[Callable[..., Any], Any]] = {
        "separate [in, out]": (_separate, layers),
        "separate [out, in]": (_transposed, jax.tree.map(jnp.transpose, layers)),
        "fused q+k+v, gate+up": (_fused, [_fuse(layer) for layer in layers]),
        "stacked, in a loop": (_stacked, jax.tree.map(lambda *xs: jnp.stack(xs), *layers)),
        "logits [V, E]": (lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))), table),
        "logits [E, V]": (jnp.dot, table.T.copy()),
    }
    calls: dict[Any, Callable[[], Any]] = {}
    sizes = {
        form: sum(leaf.nbytes for leaf in jax.tree.leaves(w)) for form, (_, w) in forms.items()
    }
    for form, (function, weights) in forms.items():
        for tokens in args.tokens:
            x = draw(tokens, width)
            calls[form, tokens] = functools.partial(jax.jit(function), x, weights)
    if not 1 <= args.per_token <= args.experts:
        raise ValueError(f"--per-token must be 1 to --experts={args.experts}, got {args.per_token}")
    stack = draw(args.experts, width, mlp)
    for tokens in args.tokens:
        chosen = np.stack([rng.permutation(args.experts)[: args.per_token] for _ in range(tokens)])
        numbers = np.sort(chosen.reshape(-1)).astype(np.int32)
        counts = np.bincount(numbers, minlength=args.experts).astype(np.int32)
        given = draw(len(numbers), width), stack, counts, numbers
        for form, function in _of_experts(tokens).items():
            sizes[form] = stack.nbytes
            calls[form, tokens] = functools.partial(jax.jit(function), *given)
    seconds = time_interleaved(calls, repeats=args.repeats)
    rows = [
        {
            "layout": form,
            "tokens": tokens,
            "ms": 1e3 * value,
            "GB_per_s": sizes[form] / value / 1e9,
        }
        for (form, tokens), value in seconds.items()
    ]
    return Report(rows, ["layout", "tokens", "ms", "GB_per_s"])


def _of_experts(tokens: int) -> dict[str, Callable[..., jax.Array]]:
    """Products of rows, sorted by expert, with the matrices of their experts."""

    def with_all(rows: jax.Array, stack: jax.Array, _: Any, numbers: jax.Array) -> jax.Array:
        every = jnp.einsum("rn,xnm->xrm", rows, stack)
        return jnp.take_along_axis(every, numbers[None, :, None], axis=0)[0]

    return {
        "experts, in a loop": lambda rows, stack, counts, _: experts._in_loop(
            min(tokens, experts._TILE), rows, stack, counts
        ),
        "experts, ragged_dot": lambda rows, stack, counts, _: experts._in_kernel(
            rows, stack, counts
        ),
        "experts, gathered": lambda rows, stack, _, numbers: jnp.einsum(
            "rn,rnm->rm", rows, stack[numbers]
        ),
        "experts, all": with_all,
    }


def _layer(x: jax.Array, qkv: Any, mlp: Any, out: Any, wo: Any) -> jax.Array:
    """The products of a layer, with a cheap replacement of attention."""
    query, key, value = qkv(x)
    x = x + out(jnp.tanh(query) * key + value)
    gate, up = mlp(x)
    return (x + wo(jax.nn.gelu(gate) * up)) * 0.5


def _separate_layer(x: jax.Array, layer: Layer, dot: Callable[..., Any] = jnp.dot) -> jax.Array:
    return _layer(
        x,
        lambda y: [dot(y, layer[name]) for name in ("query", "key", "value")],
        lambda y: [dot(y, layer[name]) for name in ("wi_0", "wi_1")],
        lambda y: dot(y, layer["out"]),
        lambda y: dot(y, layer["wo"]),
    )


def _separate(x: jax.Array, layers: list[Layer]) -> jax.Array:
    for layer in layers:
        x = _separate_layer(x, layer)
    return x


def _transposed(x: jax.Array, layers: list[Layer]) -> jax.Array:
    def dot(y: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.dot_general(y, kernel, (((1,), (1,)), ((), ())))

    for layer in layers:
        x = _separate_layer(x, layer, dot)
    return x


def _fuse(layer: Layer) -> Layer:
    qkv = jnp.concatenate([layer[name] for name in ("query", "key", "value")], 1)
    mlp = jnp.concatenate([layer[name] for name in ("wi_0", "wi_1")], 1)
    return {"qkv": qkv, "mlp": mlp, "out": layer["out"], "wo": layer["wo"]}


def _fused(x: jax.Array, layers: list[Layer]) -> jax.Array:
    for layer in layers:
        x = _layer(
            x,
            lambda y, layer=layer: jnp.split(y @ layer["qkv"], 3, -1),
            lambda y, layer=layer: jnp.split(y @ layer["mlp"], 2, -1),
            lambda y, layer=layer: y @ layer["out"],
            lambda y, layer=layer: y @ layer["wo"],
        )
    return x


def _stacked(x: jax.Array, layers: Layer) -> jax.Array:
    def body(y: jax.Array, layer: Layer) -> tuple[jax.Array, None]:
        return _separate_layer(y, layer), None

    return jax.lax.scan(body, x, layers)[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this benchmark; see `benchmarks.command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
