"""Writes checkpoints in all formats that `load_model` reads; completely, or not at all."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoints import hf, orbax, t5x
from specjax.checkpoints.arrays import (
    Piece,
    check_floating,
    flatten,
    materialise,
)
from specjax.checkpoints.loading import VERSION, load_model, read_config
from specjax.checkpoints.t5x_network import GIN_FILES, as_t5x, check_writable, gin_text
from specjax.checks import PathLike
from specjax.errors import UserError
from specjax.models import Model, ModelConfig, T5Config, model_from_config
from specjax.models.config import common_dtype, disk_dtype
from specjax.models.families import config_to_dict
from specjax.models.weights import is_stored
from specjax.tokenizers.load import keep_sentinels
from specjax.tokenizers.model_files import (
    GENERATION_FILE,
    SPECJAX_FILE,
    SpecialIds,
    copy_tokenizer_files,
    read_json_if_there,
    special_ids_from_json,
    write_json,
)
from specjax.types import Params
from specjax.writing import new_directory, write_checksums

FORMATS = ("hf", "t5x", "orbax")
_ARRAYS = ".safetensors"


def save_model(
    path: PathLike,
    model: Model | ModelConfig,
    params: Params,
    *,
    format: str = "orbax",
    dtype: Any = None,
    special_ids: SpecialIds | None = None,
    tokenizer_from: PathLike | None = None,
    step: int = 0,
    max_position_embeddings: int | None = None,
    replace: bool = False,
) -> Path:
    """Writes a checkpoint that `load_model` reads back.

    It is written beside `path` and renamed at the end, so an interrupted program leaves `path`
    unchanged. In a program of several processes, each must call it, and only "orbax" is possible.

    Args:
      path: a directory that does not exist, or is empty (but see `replace`).
      model: the model, or its configuration.
      params: its parameters.
      format: "orbax" (ours: keeps shardings, any dtype, any family), "hf" (safetensors and a
        config.json for transformers 4.x and 5.x), or "t5x" (only T5, for T5X itself).
      dtype: of the arrays on disk; the parameters' own by default.
      special_ids: eos, pad, bos; by default those of `tokenizer_from`'s generation_config.json,
        else the family's usual ids, if below `vocab_size`. The model's configuration has the
        decoder's start token.
      tokenizer_from: a directory whose tokenizer files are copied.
      step: the training step; used in the name of T5X's directory.
      max_position_embeddings: the longest context for transformers' config.json; no network here
        depends on it (not for "t5x").
      replace: whether `path` may have other files: that directory is then renamed, such as to
        `path.earlier-1`, once the new one is complete, unless it has the same files.

    Raises:
      UserError: for an unknown format, parameters that do not fit the model, or a model that the
        format does not support.
      FileExistsError: if `path` is a file, or a directory that is not empty.
    """
    config = model if isinstance(model, ModelConfig) else model.config
    if format not in FORMATS:
        raise UserError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}")
    if format != "orbax" and jax.process_count() > 1:
        raise UserError(
            f"`format` must be 'orbax' in a program of several processes, got {format!r}"
        )
    flat = _checked(config, params)
    check_format(config, format)
    disk = disk_dtype(flat, dtype)
    ids = _all_ids(config, special_ids, tokenizer_from)
    longest = max_position_embeddings
    with new_directory(Path(path), replace=replace) as directory:
        if tokenizer_from is not None and jax.process_index() == 0:
            copy_tokenizer_files(Path(tokenizer_from), directory)
        if format == "hf":
            hf.write_hf(
                directory, config, flat, ids=ids, dtype=disk, max_position_embeddings=longest
            )
        elif format == "t5x":
            assert isinstance(config, T5Config)
            written, arrays = as_t5x(config, flat)
            t5x.write_t5x(directory, arrays, step=step, dtype=disk)
            (directory / GIN_FILES[0]).write_text(gin_text({"": written}))
        else:
            orbax.write_orbax(
                directory,
                jax.tree.map(lambda x: x if x.dtype == disk else x.astype(disk), params),
            )
            stored = config_to_dict(config.replace(param_dtype=disk))
            values = {"version": VERSION, "config": stored, "step": step, **ids.to_json()}
            if longest is not None:
                values["max_position_embeddings"] = longest
            if jax.process_index() == 0:
                write_json(directory / SPECJAX_FILE, values)
        if jax.process_index() == 0:
            if format != "orbax" and isinstance(config, T5Config):
                keep_sentinels(directory, config.vocab_size)
            # Adds the ids to generation_config.json, which readers prefer to config.json.
            file = directory / GENERATION_FILE
            copied = read_json_if_there(file)
            merged = {**copied, **ids.to_json()}
            if (format != "orbax" or file.exists()) and merged != copied:
                write_json(file, merged)
            # Checksums of the arrays only: people edit the other files.
            place = next(directory.glob("checkpoint_*"), directory)
            write_checksums(place, lambda n: "/" in n or n == "checkpoint" or n.endswith(_ARRAYS))
    return Path(path)


# The ids that are given, then those of the copied files, then the family's.
def _all_ids(config: ModelConfig, ids: SpecialIds | None, source: PathLike | None) -> SpecialIds:
    ids = ids or SpecialIds()
    if source is not None:
        file = Path(source) / GENERATION_FILE
        ids = ids.or_else(special_ids_from_json(read_json_if_there(file), file))
    ids = ids.or_else(hf.default_ids(config))
    if any(eos >= config.vocab_size for eos in ids.eos):
        raise UserError(
            f"eos_token_id={list(ids.eos)} must be below vocab_size={config.vocab_size}; give "
            "other `special_ids`"
        )
    return dataclasses.replace(ids, decoder_start=getattr(config, "decoder_start_token", None))


def check_format(config: ModelConfig, format: str) -> None:
    """Checks that one of `FORMATS` supports a model."""
    if format == "t5x":
        check_writable(config)
    if format == "hf":
        hf.config_to_hf(config, SpecialIds(), np.dtype(np.float32))


def _checked(config: ModelConfig, params: Params) -> dict[str, Any]:
    shapes = {
        name: tuple(leaf.shape)
        for name, leaf in flatten(model_from_config(config).abstract_params()).items()
    }
    flat = flatten(params)
    if stored := [name for name, value in flat.items() if is_stored(value)]:
        raise UserError(
            f"`params` must be arrays, got type {type(flat[stored[0]]).__name__} for {stored[0]}: "
            "save the model as it was before, and quantise it when it is loaded "
            "(load_model(weights='int8'))"
        )
    wrong = sorted(set(flat) ^ set(shapes)) or [
        name for name, shape in shapes.items() if tuple(flat[name].shape) != shape
    ]
    if wrong:
        raise UserError(
            f"`params` must be the parameters of this {type(config).__name__}; missing, unknown or "
            f"of another shape: {', '.join(wrong[:3])}"
        )
    return {name: flat[name] for name in shapes}


def save_t5x_pair(
    path: PathLike,
    *,
    verifier: PathLike,
    drafter: PathLike,
    dtype: Any = None,
    check_weights: bool = True,
) -> Path:
    """Writes the parameters of two checkpoints into a single T5X checkpoint.

    The arrays of a T5X checkpoint are copied under their own names, whatever their network (scanned
    layers stay scanned); a T5 of another format gets the names of T5X's minimal T5. If both are
    T5X's minimal T5, `pair.gin` has their sizes for T5X. T5X's "target" is then
    {"drafter": ..., "verifier": ...}; see `specjax.integrations.t5x`.

    Args:
      path: a directory that does not exist, or is empty.
      verifier: the large network's checkpoint.
      drafter: the small network's.
      dtype: of the arrays on disk; by default their own, float32 if they differ.
      check_weights: see `load_model`.
    """
    arrays: dict[str, Any] = {}
    configs, steps = {}, {}
    for role, source in (("verifier", verifier), ("drafter", drafter)):
        own, steps[role], configs[role] = _t5x_arrays(Path(source), check_weights)
        arrays |= {f"{role}/{name}": value for name, value in own.items()}
    disk = disk_dtype(arrays, dtype)
    with new_directory(Path(path)) as directory:
        copy_tokenizer_files(Path(verifier), directory)
        t5x.write_t5x(directory, arrays, step=steps["verifier"], dtype=disk)
        if all(configs.values()):
            # For use after gin_configs/t5x/models/encoder_decoder.gin.
            included = "t5x/models/encoder_decoder.gin"
            (directory / "pair.gin").write_text(gin_text(configs, included))
        checkpoint = next(directory.glob("checkpoint_*"))
        write_checksums(checkpoint, lambda name: "/" in name or name == "checkpoint")
    return Path(path)


# A checkpoint's arrays under T5X's names, its step, and a minimal T5's configuration.
def _t5x_arrays(source: Path, check: bool) -> tuple[dict[str, Any], int, Any]:
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    checkpoint = None
    if source.is_dir() and not any((source / n).exists() for n in (SPECJAX_FILE, "config.json")):
        checkpoint = t5x.t5x_directory(source)
    if checkpoint is None:
        check_writable(read_config(source))
        loaded: Any = load_model(source, sharding=host, check_weights=check)
        written, arrays = as_t5x(loaded.config, flatten(loaded.params))
        return arrays, loaded.step or 0, written
    reader = t5x.t5x_reader(checkpoint)
    check_floating(checkpoint, reader.specs)
    params = materialise(
        reader,
        {name: Piece(name) for name in reader.specs},
        dtype=common_dtype(spec.dtype for spec in reader.specs.values()),
        shardings=dict.fromkeys(reader.specs, host),
        check=check,
    )
    minimal = "encoder/relpos_bias/rel_embedding" in reader.specs and not any(
        len(spec.shape) > 2 for spec in reader.specs.values()
    )
    config = read_config(source) if minimal else None
    step = t5x.step_of(checkpoint) or 0
    return flatten(params), step, config if isinstance(config, T5Config) else None
