"""Writes checkpoints in all formats that `load_model` reads; completely, or not at all."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoints import hf, orbax, t5x
from specjax.checkpoints.arrays import common_dtype, flatten, float_dtype
from specjax.checkpoints.loading import VERSION
from specjax.checkpoints.t5x_network import GIN_FILES, as_t5x, check_writable, gin_text
from specjax.checksums import write_checksums
from specjax.errors import UserError
from specjax.models import (
    Model,
    ModelConfig,
    T5Config,
    config_to_dict,
    family_of,
    model_from_config,
)
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
from specjax.writing import new_directory

FORMATS = ("hf", "t5x", "orbax")
_ARRAYS = ".safetensors"


def save_model(
    path: str | os.PathLike[str],
    model: Model | ModelConfig,
    params: Params,
    *,
    format: str = "orbax",
    dtype: Any = None,
    special_ids: SpecialIds | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
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
        else the family's usual ids. The model's configuration has the decoder's start token.
      tokenizer_from: a directory whose tokenizer files are copied.
      step: the training step; used in the name of T5X's directory.
      max_position_embeddings: the longest context for transformers' config.json; no network here
        depends on it (not for "t5x").
      replace: whether to remove an existing directory, with all its contents, once the new
        directory is complete.

    Returns:
      The path.

    Raises:
      ValueError: for an unknown format, parameters that do not fit the model, or a model that the
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
    disk_dtype = _disk_dtype(flat, dtype)
    ids = _all_ids(config, special_ids, tokenizer_from)
    with new_directory(Path(path), replace=replace) as directory:
        if tokenizer_from is not None and jax.process_index() == 0:
            copy_tokenizer_files(Path(tokenizer_from), directory)
        if format == "hf":
            longest = max_position_embeddings
            hf.write_hf(
                directory, config, flat, ids=ids, dtype=disk_dtype, max_position_embeddings=longest
            )
        elif format == "t5x":
            assert isinstance(config, T5Config)
            written, arrays = as_t5x(config, flat)
            t5x.write_t5x(directory, arrays, step=step, dtype=disk_dtype)
            (directory / GIN_FILES[0]).write_text(gin_text({"": written}))
        else:
            orbax.write_orbax(directory, jax.tree.map(lambda x: _cast(x, disk_dtype), params))
            stored = config_to_dict(config.replace(param_dtype=disk_dtype))
            values = {"version": VERSION, "config": stored, "step": step, **ids.to_json()}
            if max_position_embeddings is not None:
                values["max_position_embeddings"] = max_position_embeddings
            if jax.process_index() == 0:
                write_json(directory / SPECJAX_FILE, values)
        if jax.process_index() == 0:
            if format != "orbax" and isinstance(config, T5Config):
                keep_sentinels(directory, config.vocab_size)
            _write_generation(directory, ids, always=format != "orbax")
            # Checksums of the arrays only: people edit the other files.
            place = next(directory.glob("checkpoint_*"), directory)
            write_checksums(place, lambda n: "/" in n or n == "checkpoint" or n.endswith(_ARRAYS))
    return Path(path)


def _all_ids(
    config: ModelConfig, given: SpecialIds | None, source: str | os.PathLike[str] | None
) -> SpecialIds:
    ids = given or SpecialIds()
    if source is not None:
        file = Path(source) / GENERATION_FILE
        ids = ids.or_else(special_ids_from_json(read_json_if_there(file), file))
    ids = ids.or_else(hf.default_ids(family_of(config)))
    return dataclasses.replace(ids, decoder_start=getattr(config, "decoder_start_token", None))


def _write_generation(directory: Path, ids: SpecialIds, always: bool) -> None:
    file = directory / GENERATION_FILE
    values = read_json_if_there(file)
    merged = {**values, **ids.to_json()}
    if (always or file.exists()) and merged != values:
        write_json(file, merged)


def check_format(config: ModelConfig, format: str) -> None:
    """Checks that a format supports a model.

    Args:
      config: the model's configuration.
      format: one of `FORMATS`.
    """
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


def _disk_dtype(flat: dict[str, Any], dtype: Any) -> np.dtype:
    if dtype is not None:
        return float_dtype(dtype)
    return common_dtype(value.dtype for value in flat.values())


def _cast(value: Any, dtype: np.dtype) -> Any:
    return value if value.dtype == dtype else value.astype(dtype)
