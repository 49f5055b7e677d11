"""`specjax infer --gin.NAME=value`: decodes a file of prompts."""

import argparse
import functools
import json
import sys
from typing import TYPE_CHECKING

from specjax.cli import gin_config, hosts

if TYPE_CHECKING:
    import jax

    from specjax import drafting, text
    from specjax.runs.run_directory import RunDirectory

DEFAULT_FILE = "runs/infer.gin"
GROUPS = {
    "methods": f"methods, each chosen by --gin_file={DEFAULT_FILE} --gin_file=methods/METHOD.gin",
    "prompts": "prompts made of records, beside a method: --gin_file=prompts/KIND.gin",
    "papers/*/task_*.gin": "tasks of a paper's runs, beside a pair: "
    "--gin_file=papers/PAPER/task_NAME.gin",
    "papers/*/pair_*.gin": "pairs of a paper's runs: --gin_file=papers/PAPER/pair_NAME.gin",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    gin_config.add_arguments(parser, DEFAULT_FILE, GROUPS)
    hosts.add_arguments(parser)


def register() -> None:
    """Makes configurable what a decoder is made of; imports it."""
    # Imported here so that `specjax --help` stays quick.
    from specjax import checkpoints, drafting, partitioning, rules, text, verification
    from specjax.data import FewShot
    from specjax.runs import inference

    gin_config.register(
        text.Decoder,
        text.Cascade,
        text.Lookup,
        text.load_pair,
        text.load_text_model,
        partitioning.make_mesh,
        mesh_of,
        inference.infer,
        FewShot,
        checkpoints.sized,
        verifier_alone,
        drafter_alone,
        *rules.ALL_RULES,
        rules.Budgeted,
        *rules.SEQUENTIAL_RULES,
        *rules.ALL_AGGREGATIONS,
        *text.ALL_CASCADES,
        *verification.ALL_VERIFICATIONS,
        *drafting.ALL_POLICIES,
        *drafting.ALL_ESTIMATES,
        costs_from,
    )


def run(args: argparse.Namespace) -> int:
    """Decodes as the gin files say, and prints the metrics as one line of JSON."""
    from specjax.runs import inference

    register()
    gin_config.configure_from(args)
    check_values()
    on_start = functools.partial(_record, command=args.command_line)
    print(json.dumps(gin_config.call(inference.infer, on_start=on_start, part=args.part)))
    return 0


def check_values() -> None:
    """Refuses values of a decoder before its models are read, which may take minutes."""
    from specjax.text.options import CHECKED, check_decoding

    absent = object()
    given = {name: gin_config.value_of(f"Decoder.{name}", absent) for name in CHECKED}
    check_decoding({name: value for name, value in given.items() if value is not absent})


def _record(run: "RunDirectory", *, command: list[str], paths: dict[str, str]) -> None:
    run.record(command=command, config=gin_config.operative_config(), paths=paths)


def costs_from(file: "str | None" = None) -> "drafting.Costs | None":
    """The costs that a file holds; None leaves them to be measured."""
    from specjax import drafting

    return None if file is None else drafting.read_costs(file)


def mesh_of(data: "int | None" = None, model: "int | None" = None) -> "jax.sharding.Mesh | None":
    """The mesh of a run; without sizes one device, or all devices of several processes."""
    import jax

    from specjax import partitioning

    if data is None and model is None and jax.process_count() == 1:
        if jax.default_backend() != "cpu" and jax.device_count() > 1:
            print(
                f"specjax: one of {jax.device_count()} devices is used; MESH_DATA="
                f"{jax.device_count()} spreads the rows over all",
                file=sys.stderr,
            )
        return None
    return partitioning.make_mesh(data, 1 if model is None else model)


def verifier_alone(pair: "text.Pair") -> "text.TextModel":
    """The verifier of a pair, to decode with it alone."""
    return pair.verifier


def drafter_alone(pair: "text.Pair") -> "text.TextModel":
    """The drafter of a pair, to decode with it alone."""
    return pair.drafter
