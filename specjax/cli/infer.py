"""`specjax infer --gin.NAME=value`: decodes a file of prompts."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from specjax.cli import gin_config, hosts
from specjax.errors import UserError

if TYPE_CHECKING:
    import jax

    from specjax import drafting, text

DEFAULT_FILE = "runs/infer.gin"
GROUPS = {
    "methods": f"methods, each chosen by --gin_file={DEFAULT_FILE} --gin_file=methods/METHOD.gin; "
    "most take STRENGTH",
    "prompts": "prompts made from records, to add to a method: --gin_file=prompts/KIND.gin",
    "papers/*/task_*.gin": "tasks of a paper's runs, to add to a pair: "
    "--gin_file=papers/PAPER/task_NAME.gin",
    "papers/*/pair_*.gin": "pairs of a paper's runs: --gin_file=papers/PAPER/pair_NAME.gin",
}

# Parameters of `Decoder` that gin files set to parts, with examples.
_PARTS = {
    "rule": "@OPT()",
    "verification": "@Block()",
    "stopping": "@Confidence()",
    "drafting": "@Lookup()",
    "method": "@TokenCascade()",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE, GROUPS)
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="print the first N outputs, coloured by the source of each token (sets SOURCES=True)",
    )
    hosts.add_arguments(parser)


def register() -> None:
    """Imports the parts of a decoder and makes them configurable."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import checkpoints, partitioning, text, types
    from specjax.data.few_shot import FewShot
    from specjax.runs import inference
    from specjax.text.parts import PARTS

    gin_config.register(
        text.Decoder,
        types.Sampling,
        text.load_pair,
        text.load_text_model,
        partitioning.make_mesh,
        mesh_of,
        inference.infer,
        FewShot,
        checkpoints.sized,
        load_alone,
        *PARTS.values(),
        costs_from,
    )


def run(args: argparse.Namespace) -> int:
    """Decodes as the gin files configure; prints the metrics as one line of JSON."""
    from specjax.runs import inference

    register()
    args.gin_binding += ["infer.sources=True"] if args.show else []
    gin_config.configure_from(args)
    options = {"on_start": gin_config.recorder(args), "process": args.process, "show": args.show}
    print(json.dumps(gin_config.call(inference.infer, before=check_values, **options)))
    return 0


def check_values() -> None:
    """Checks the decoder's values before the models are read, which may take minutes."""
    from specjax.text.requests import CHECKED, DRAWN, check_decoding
    from specjax.types import Sampling

    absent = object()
    if gin_config.binding_of("Decoder.models") == "@load_pair()":
        check_pair("give both, or add --gin_file=methods/{}_alone.gin")
    for name, example in _PARTS.items():
        if isinstance(value := gin_config.value_of(f"Decoder.{name}"), str):
            raise UserError(f"{name} must be like {example}, got {value!r}")
    values = {name: gin_config.value_of(f"Decoder.{name}", absent) for name in CHECKED}
    check_decoding({name: value for name, value in values.items() if value is not absent})
    drawn = {name: gin_config.value_of(f"Sampling.{name}", absent) for name in DRAWN}
    Sampling(**{name: value for name, value in drawn.items() if value is not absent})


def check_pair(remedy: str) -> None:
    """Raises UserError if only one model of the pair is given; {} in `remedy` is that model."""
    pair = {name: gin_config.value_of(f"load_pair.{name}") for name in ("verifier", "drafter")}
    names = [name for name, path in pair.items() if path is not None]
    if len(names) == 1:
        other = "drafter" if names == ["verifier"] else "verifier"
        raise UserError(
            f"{names[0].upper()} is given without {other.upper()}: {remedy.format(names[0])}"
        )


def costs_from(file: "str | None" = None) -> "drafting.Costs | None":
    """Returns the costs in a file; None: they will be measured."""
    from specjax import drafting

    return None if file is None else drafting.read_costs(file)


def mesh_of(data: "int | None" = None, model: "int | None" = None) -> "jax.sharding.Mesh | None":
    """Returns the mesh of a run. Without sizes one process uses one device, several use all."""
    import jax

    from specjax import partitioning

    if data is None and model is None and jax.process_count() == 1:
        if jax.default_backend() != "cpu" and jax.device_count() > 1:
            print(
                f"specjax: using 1 of {jax.device_count()} devices; to use all, set "
                f"MESH_DATA={jax.device_count()}",
                file=sys.stderr,
            )
        return None
    return partitioning.make_mesh(data, 1 if model is None else model)


def load_alone(
    name: str,
    *,
    verifier: "str | None" = None,
    drafter: "str | None" = None,
    dtype: Any = None,
    mesh: "jax.sharding.Mesh | None" = None,
    tokenizer: "str | None" = None,
    check_weights: bool = True,
    weights: Any = None,
) -> "text.TextModel":
    """Loads one model of a pair ("verifier" or "drafter"), to decode without the other model.

    Without its directory it is that of the built-in pair; see `load_text_model` and `load_pair`.
    """
    from specjax import text
    from specjax.models.int8 import form_of
    from specjax.text.directories import DEFAULT_PAIR, PREFIX

    path = {"verifier": verifier, "drafter": drafter}[name]
    place = f"{PREFIX}{DEFAULT_PAIR}/{name}" if path is None else path
    return text.load_text_model(
        place,
        dtype=dtype,
        mesh=mesh,
        tokenizer=tokenizer,
        check_weights=check_weights,
        weights=form_of(weights, name),
    )
