"""`specjax convert SRC DST --to FORMAT`: checkpoints and draft heads to another format."""

import argparse
from pathlib import Path
from typing import Any

import jax

from specjax.errors import UserError, tell
from specjax.platforms import host_cpu

TO_HELP = (
    "its format (t5x: only T5; an embedding tied without scaling is written as an untied copy, "
    "which hf ties again; speculators: only draft heads)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("source", metavar="SRC", type=Path, help="the checkpoint to read")
    parser.add_argument("destination", metavar="DST", type=Path, help="a new or empty directory")
    formats = ("hf", "t5x", "orbax", "speculators")
    parser.add_argument("--to", required=True, choices=formats, help=TO_HELP)
    parser.add_argument(
        "--verifier",
        metavar="DIR",
        type=Path,
        help="the verifier of SRC, a draft head, whose matrices are copied where servers need them "
        "(default: SRC, if the head is inside)",
    )
    parser.add_argument(
        "--drafter",
        metavar="SRC2",
        type=Path,
        help="with --to t5x: write this drafter and SRC, the verifier, into one checkpoint for "
        "specjax.integrations.t5x",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the written arrays (default: that of the checkpoint)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="the model's configuration, if SRC has none: a JSON file (see "
        "specjax.models.families.config_to_dict) or a gin file of T5X",
    )
    parser.add_argument(
        "--no-check-weights",
        dest="check_weights",
        action="store_false",
        help="also convert weights with NaN or infinity, or with wrong checksums",
    )


def run(args: argparse.Namespace) -> int:
    """Loads SRC on the host and writes DST."""
    # Imported here so that `specjax --help` stays quick.
    from specjax.checkpoints import load_model, read_config, save_model
    from specjax.checkpoints.attachments import has_head, load_head, save_head
    from specjax.checkpoints.heads import is_draft_head
    from specjax.checkpoints.hf import longest_context
    from specjax.checkpoints.saving import check_format, save_t5x_pair
    from specjax.fingerprints import digest
    from specjax.text.directories import real_path
    from specjax.writing import check_free

    check_free(args.destination)
    args.source = Path(real_path(str(args.source)))
    if args.to == "speculators" or args.verifier is not None or is_draft_head(args.source):
        return _convert_head(args)
    if args.drafter is not None:
        if args.to != "t5x" or args.config is not None:
            given = "--config" if args.to == "t5x" else f"--to {args.to}"
            raise UserError(f"--drafter writes a T5X checkpoint of two models: leave out {given}")
        options = {"dtype": args.dtype, "check_weights": args.check_weights}
        save_t5x_pair(args.destination, verifier=args.source, drafter=args.drafter, **options)
        print(f"{args.source} and {args.drafter} -> {args.destination} (t5x, verifier and drafter)")
        return 0
    check_format(read_config(args.source, args.config), args.to)  # before the arrays are read
    # No model computes in float16, so `save_model` casts to it.
    dtype = None if args.dtype == "float16" else args.dtype
    host = _host()
    head = None
    if has_head(args.source):
        head = load_head(args.source, check_weights=args.check_weights)
    loaded = load_model(
        args.source,
        dtype=dtype,
        sharding=host,
        config=args.config,
        check_weights=args.check_weights,
    )
    save_model(
        args.destination,
        loaded.model,
        loaded.params,
        format=args.to,
        dtype=args.dtype or loaded.stored_dtype,
        special_ids=loaded.special_ids,
        # T5X keeps the tokenizer in the parent directory of the steps.
        tokenizer_from=loaded.path.parent if loaded.format == "t5x" else loaded.path,
        step=loaded.step or 0,
        max_position_embeddings=longest_context(loaded.path),
    )
    if head is not None:
        written = load_model(args.destination, sharding=host, check_weights=False)
        if digest(written.params, as_bfloat16=True) == head.drafter_fingerprint:
            save_head(args.destination, head)
        else:
            tell(
                "warning: the acceptance head is left out, because the new dtype changed the "
                f"drafter's weights: train a head for {args.destination} with `specjax train head`"
            )
    _tell(args, loaded.format, loaded.model.num_params())
    return 0


def _tell(args: argparse.Namespace, source_format: str, parameters: int) -> None:
    written = [f for f in args.destination.rglob("*") if f.is_file()]
    size = sum(f.stat().st_size for f in written) / 2**20
    print(
        f"{args.source} ({source_format}) -> {args.destination} ({args.to}): "
        f"{parameters:,} parameters, {len(written)} files, {size:.1f} MiB"
    )


def _host() -> Any:
    host = host_cpu()
    return None if host is None else jax.sharding.SingleDeviceSharding(host)


def _convert_head(args: argparse.Namespace) -> int:
    """Writes a draft head for speculators and vLLM."""
    from specjax.checkpoints import load_model, save_draft_head
    from specjax.checkpoints.heads import has_mtp, is_draft_head, load_draft_head, open_draft_head
    from specjax.checkpoints.hf import longest_context
    from specjax.text.directories import real_path

    if not is_draft_head(args.source):
        if not has_mtp(args.source):
            raise UserError(
                f"{args.source} is no draft head: leave out --to speculators, --verifier"
            )
        args.verifier = args.verifier or args.source
    if args.to != "speculators" or args.verifier is None:
        raise UserError(
            f"{args.source} is a draft head: give --to speculators and --verifier, its verifier"
        )
    if args.drafter is not None or args.config is not None:
        raise UserError("a draft head has its own configuration: leave out --drafter and --config")
    opened, host = open_draft_head(args.source), _host()
    args.verifier = Path(real_path(str(args.verifier)))
    verifier = load_model(args.verifier, sharding=host, check_weights=args.check_weights)
    options = {"dtype": opened.dtype, "sharding": host, "check_weights": args.check_weights}
    head, params = load_draft_head(
        args.source, verifier.model, verifier_params=verifier.params, **options
    )
    save_draft_head(
        args.destination,
        head,
        params,
        verifier_params=verifier.params,
        verifier_name=opened.verifier or str(args.verifier),
        dtype=args.dtype,
        max_position_embeddings=longest_context(args.verifier),
        portable=True,
    )
    _tell(args, opened.format, sum(x.size for x in jax.tree.leaves(params["network"])))
    return 0
