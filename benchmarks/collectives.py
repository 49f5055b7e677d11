"""What crosses the mesh in a round and in a refill, read from the compiled programs.

Nothing is allocated: the programs are compiled for shapes, on virtual devices where there are no
others (XLA_FLAGS=--xla_force_host_platform_device_count=8 before the start).
"""

import argparse
import collections
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command
from specjax import decoding, drafting, rules
from specjax.cli.bench.report import Report
from specjax.decoding.compilation import placement
from specjax.decoding.loop import jitted_run
from specjax.decoding.state import _jitted_insert
from specjax.models import (
    Gemma2Config,
    LlamaConfig,
    T5Config,
    model_from_config,
    preset,
)
from specjax.models.config import ModelConfig
from specjax.partitioning import Partitioner, make_mesh
from specjax.partitioning.collectives import Collective, collectives
from specjax.types import PromptBatch, Sampling

HELP = "the collectives of a round and of a refill on a mesh, with their sizes"

# Sizes that are told apart in a program.
_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "embed_dim": 24,
    "num_heads": 8,
    "head_dim": 4,
    "mlp_dim": 40,
}
TINY: dict[str, ModelConfig] = {
    "t5": T5Config(**_SIZES, num_encoder_layers=1, num_decoder_layers=1),
    "llama": LlamaConfig(**_SIZES, num_layers=1, num_kv_heads=4),
    "gemma2": Gemma2Config(
        **_SIZES, num_layers=1, num_kv_heads=4, sliding_window=4, query_pre_attn_scalar=4.0
    ),
}


class Sizes(NamedTuple):
    """B slots, n refilled, L prompt, N output, S cache, G draft."""

    rows: int = 16
    refill: int = 8
    prompt: int = 7
    output: int = 12
    cache: int = 37
    draft: int = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the networks, the meshes and the draft length."""
    parser.add_argument(
        "--models", nargs="+", default=list(TINY), help=f"{', '.join(TINY)} (tiny), or presets"
    )
    parser.add_argument("--meshes", nargs="+", default=["8x1", "4x2", "2x4"], help="DATAxMODEL")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--draft", type=int, default=4, help="G")
    parser.add_argument("--replicate-drafter", action="store_true")


def run(args: argparse.Namespace) -> Report:
    """Compiles every model with a drafter of its own shape on every mesh."""
    rows = []
    for name in args.models:
        config = TINY[name] if name in TINY else preset(name)
        for mesh in args.meshes:
            data, _, ways = mesh.partition("x")
            sizes = Sizes(rows=args.rows, draft=args.draft)
            found = of_pair(config, int(data), int(ways), sizes, whole=args.replicate_drafter)
            for program, listed in found.items():
                for one, count in collections.Counter(listed).items():
                    rows.append(_row(name, mesh, program, one, count))
    return Report(rows, list(rows[0]) if rows else [])


def _row(name: str, mesh: str, program: str, one: Collective, count: int) -> dict[str, Any]:
    # The outermost loop is that of the rounds.
    inner = one.loops[1:] if program == "round" else one.loops
    return {
        "model": name,
        "mesh": mesh,
        "program": program,
        "kind": one.kind,
        "arrays": " ".join("x".join(map(str, shape)) or "1" for shape in one.shapes),
        "bytes": one.nbytes,
        "count": count,
        "loops": " ".join("?" if trips is None else str(trips) for trips in inner),
    }


def of_pair(
    config: ModelConfig, data: int, ways: int, sizes: Sizes, *, whole: bool = False
) -> dict[str, list[Collective]]:
    """The collectives of a round and of a refill, for a pair of two models of one shape.

    Args:
      config: of verifier and drafter.
      data: devices that rows are spread over.
      ways: devices that each model is split over.
      sizes: the shapes.
      whole: whether each device has the whole drafter.

    Returns:
      "round" and "refill" -> what their programs have.
    """
    programs = compiled_pair(config, data, ways, sizes, whole=whole)
    return {name: collectives(program.as_text()) for name, program in programs.items()}


def compiled_pair(
    config: ModelConfig, data: int, ways: int, sizes: Sizes, *, whole: bool = False
) -> dict[str, Any]:
    """The compiled programs of `of_pair`, "round" and "refill"."""
    mesh = make_mesh(data, ways)
    part = Partitioner(mesh)
    model = model_from_config(config)
    small = type(model)(config, split=not whole)
    params = _placed(model.abstract_params(), part.param_shardings(model, model.abstract_params()))
    draft = _placed(small.abstract_params(), part.param_shardings(small, small.abstract_params()))
    method = decoding.Speculative(
        model, drafting.NeuralDrafter(small, sizes.draft), partitioner=part
    )
    given = decoding.RoundParams(params, drafting.NeuralDrafterParams(draft), rules.Lossless())
    state = _state(method, given, sizes.rows, sizes, part)
    new = _state(method, given, sizes.refill, sizes, part)
    stops = jnp.int32(1), jnp.int32(sizes.rows)
    round_ = jitted_run(placement(state)).lower(method, given, state, *stops)
    places = jax.ShapeDtypeStruct((sizes.refill,), jnp.int32)
    refill = _jitted_insert(placement(state)).lower(state, places, new)
    programs = {"round": round_, "refill": refill}
    return {name: lowered.compile() for name, lowered in programs.items()}


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


def _state(method: Any, given: Any, rows: int, sizes: Sizes, part: Partitioner) -> Any:
    """The shapes of a first state, placed."""
    # Each row has its own, as in an engine.
    sampling: Any = Sampling(temperature=np.ones(rows, np.float32))  # type: ignore[arg-type]
    batch = PromptBatch(
        np.ones((rows, sizes.prompt), np.int32),
        np.full(rows, sizes.prompt, np.int32),
        ids=np.zeros(rows, np.uint32),
        seeds=np.zeros(rows, np.uint32),
        limits=np.full(rows, sizes.output, np.int32),
        sampling=sampling,
    )
    batch = part.place_rows(batch)
    static = (sizes.output, sizes.cache, False)
    jitted, where = method._jitted_init(static, given, batch)
    shapes, structure = jax.tree.flatten(jitted.trace(method, *static, given, batch).out_info)
    return jax.tree.unflatten(structure, _placed(shapes, where))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this benchmark; see `benchmarks.command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
