"""The time of an update of a rollout's weights, beside copies of them."""

import argparse
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from specjax.checks import require
from specjax.cli.report import Report
from specjax.errors import UserError

HELP = "time updates of tunix's weights in a rollout, in turns with copies (pip install '.[tunix]')"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the policy, a Llama 3 of tunix, and the repeats."""
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="of the model; four times in MLPs")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=40)


def run(args: argparse.Namespace) -> Report:
    """Times an update, a copy into the buffers of an older copy, and a copy into new memory."""
    require("tunix", "tunix")
    command.check_positive(args, "layers", "width", "vocabulary", "repeats")
    if args.width % 64:
        raise UserError(f"--width must be a multiple of 64, the width of a head, got {args.width}")

    from flax import nnx
    from tunix.models.llama3 import model as llama3

    from specjax.integrations.tunix.networks import network_of
    from specjax.integrations.tunix.weights import Weights

    config = llama3.ModelConfig(
        num_layers=args.layers,
        vocab_size=args.vocabulary,
        embed_dim=args.width,
        hidden_dim=4 * args.width,
        num_heads=args.width // 64,
        head_dim=64,
        num_kv_heads=args.width // 64,
        rope_theta=500_000,
        norm_eps=1e-5,
    )
    actor = llama3.Llama3(config, rngs=nnx.Rngs(0))
    device = jax.devices()[0]
    mesh = jax.sharding.Mesh(np.array([[device]]), ("fsdp", "tp"))
    weights, state = Weights(actor, network_of(actor), mesh, None), nnx.state(actor, nnx.Param)
    into = jax.jit(lambda new, old: jax.tree.map(jnp.copy, new), donate_argnums=1, keep_unused=True)
    anew = jax.jit(functools.partial(jax.tree.map, jnp.copy))
    older = jax.tree.map(jnp.zeros_like, state)

    def update() -> Any:
        weights.update(state)
        return jax.block_until_ready(weights.params)

    def copy_into() -> None:
        nonlocal older
        older = jax.block_until_ready(into(state, older))

    def copy_anew() -> None:
        jax.block_until_ready(anew(state))

    calls = {"update": update, "copy": copy_into, "copy into new memory": copy_anew}
    usual = command.time_interleaved(calls, repeats=args.repeats)
    millions = sum(x.size for x in jax.tree.leaves(state)) / 1e6
    rows = [
        {"what": name, "millions": millions, "ms": 1e3 * one, "over_copy": one / usual["copy"]}
        for name, one in usual.items()
    ]
    return Report(rows, list(rows[0]))


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
