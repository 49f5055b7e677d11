"""The collectives of a round and of a refill on a mesh, read from the compiled programs.

Nothing is allocated: the programs are compiled for shapes, on virtual devices if there are no
others (XLA_FLAGS=--xla_force_host_platform_device_count=8 before the start).
"""

import argparse
import collections
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import command
from benchmarks.shapes import Sizes, lowered, of_params
from benchmarks.traffic import Collective, collectives
from specjax import decoding, drafting, rules
from specjax.cli.report import Report
from specjax.models import (
    Gemma2Config,
    LlamaConfig,
    ModelConfig,
    T5Config,
    model_from_config,
    preset,
)
from specjax.partitioning import Partitioner, make_mesh

HELP = "the collectives of a round and of a refill on a mesh, with their sizes"

# Different sizes, to identify axes in a program.
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
    """Compiles every model with a drafter of the same shape on every mesh."""
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
    # The outermost loop is the loop of rounds.
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
    """The collectives of a round and of a refill, for a pair of two models of the same shape.

    Args:
      config: the configuration of verifier and drafter.
      data: the number of devices that split the rows.
      ways: the number of devices that split each model.
      sizes: the shapes.
      whole: whether each device has the whole drafter.

    Returns:
      "round" and "refill" -> the collectives of their programs.
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
    drafter = drafting.NeuralDrafter(small, sizes.draft)
    method = decoding.Speculative(model, drafter, partitioner=part)
    given = decoding.MethodParams(
        of_params(model, part),
        drafting.NeuralDrafterParams(of_params(small, part)),
        rules.Lossless(),
    )
    programs = lowered(method, given, sizes, ("step", "refill"))
    return {"round": programs["step"].compile(), "refill": programs["refill"].compile()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this benchmark; see `benchmarks.command.main`."""
    return command.main(__file__, HELP, add_arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main())
