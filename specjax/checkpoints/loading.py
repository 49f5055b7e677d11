"""Loads checkpoints: Hugging Face, T5X, MaxText, GGUF or our own."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import partitioning
from specjax.checkpoints.arrays import (
    ArrayReader,
    ArraySpec,
    Piece,
    check_floating,
    check_same,
    flatten,
    materialise,
)
from specjax.checkpoints.gguf import open_gguf
from specjax.checkpoints.hf import default_ids, hf_pieces, open_hf
from specjax.checkpoints.ignored import check_adapter, warn_of_adapter
from specjax.checkpoints.maxtext import maxtext_file, maxtext_pieces
from specjax.checkpoints.maxtext_config import read_maxtext_config
from specjax.checkpoints.orbax import PARAMS, OrbaxReader, last_tree
from specjax.checkpoints.quantising import quantised_placers
from specjax.checkpoints.t5x import step_of, t5x_directory, t5x_reader
from specjax.checkpoints.t5x_network import ParamTree, find_gin, infer_config
from specjax.checkpoints.tunix import tunix_pieces
from specjax.checks import PathLike
from specjax.errors import MissingFileError, UserError, download
from specjax.memory import check_fits, nbytes
from specjax.models import Model, ModelConfig, T5Config, preset
from specjax.models.config import common_dtype, float_dtype
from specjax.models.families import config_from_dict, family_of
from specjax.models.quantised import check_form, quantised_form
from specjax.tokenizers.gguf_files import is_gguf, read_header
from specjax.tokenizers.model_files import (
    GENERATION_FILE,
    SPECJAX_FILE,
    SpecialIds,
    read_json,
    special_ids,
    special_ids_from_json,
)
from specjax.types import Params
from specjax.writing import CHECKSUMS_NAME, find_damage

VERSION = 1  # of specjax.json


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its parameters, and its special tokens.

    Attributes:
      params: a nested dict of arrays, `model.abstract_params()` in shape.
      config: the model's configuration; its `param_dtype` is the parameters' dtype.
      path: the directory that holds the arrays (of a T5X checkpoint `checkpoint_<step>`); of a GGUF
        file a temporary directory with its configuration and tokenizer.
      format: "hf", "t5x", "maxtext", "tunix", "orbax" or "gguf".
      special_ids: the ids that files name, else those that transformers assumes.
      step: the training step, of T5X checkpoints.
      stored_dtype: the dtype of the arrays on disk, float32 if they differ; `load_model` converts
        float16, in which no model computes, to float32.
    """

    model: Model
    params: Params = dataclasses.field(repr=False)
    config: ModelConfig
    path: Path
    format: str
    special_ids: SpecialIds
    step: int | None = None
    stored_dtype: Any = None


Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Opened:
    """A recognised checkpoint, before its arrays are read; see `LoadedModel`.

    `pieces` finds the source of each parameter; it raises if an array is missing or unknown.
    """

    reader: ArrayReader
    config: ModelConfig
    path: Path
    format: str
    ids: SpecialIds
    pieces: Callable[[Shapes], Mapping[str, Piece]]
    step: int | None = None


def load_model(
    path: PathLike,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    rules: partitioning.AxisRules = partitioning.STANDARD_RULES,
    sharding: jax.sharding.Sharding | None = None,
    config: ModelConfig | PathLike | None = None,
    check_weights: bool = True,
    weights: str | None = None,
) -> LoadedModel:
    """Loads a checkpoint, array by array, straight into its dtype and sharding.

    Supported are: a Hugging Face directory (`config.json` and safetensors, in one file or in
    several with an index); a T5X checkpoint, `checkpoint_<step>` or the directory around it (then
    the latest), unscanned, scanned or Orbax; a directory with MaxText's parameters and its YAML, or
    with tunix's and a `config.json`; a directory that `save_model` wrote; and a `.gguf` file of
    llama.cpp, whose weights in 2 to 8 bits become float32.

    A T5X checkpoint has no configuration. Its arrays determine everything except the MLP's
    activations and the largest relative distance. T5X's `config.gin` in the model directory names
    the activations; without it they are T5 v1.1's gated gelu (relu if the MLP has a single input
    projection). T5X's T5 has 32 buckets of relative positions up to a distance of 128; for a
    checkpoint with other buckets, the gin file or `config` must name the distance.

    The host's peak memory is the parameters in their dtype, plus about one array.

    Args:
      path: the directory or file.
      dtype: of parameters, activations and cache; by default the checkpoint's own, bfloat16 or
        float32 (float16 becomes float32, which represents it exactly).
      mesh: spreads the parameters over a mesh, which `specjax.partitioning.make_mesh` makes.
      rules: logical axis rules for `mesh`.
      sharding: instead of `mesh`: that of all parameters.
      config: instead of the directory's: a configuration, the path of a JSON file (see
        `specjax.models.families.config_to_dict`), or of a T5X gin file.
      check_weights: whether to search the arrays for NaN and infinity and, if specjax wrote the
        checkpoint, to compare the array files with their checksums.
      weights: "int8" stores every kernel (no embedding) as 8-bit integers with a scale per
        output channel, "int8+embedding" the embedding too, with a scale per token. Qwix makes them
        (`pip install '.[int8]'`). "int4" stores kernels as 4-bit numbers with a scale per 32 of an
        output channel, and the embedding in 8 bits, "int4+embedding" that too in 4. Such a model
        can decode, but not be trained or saved. None: all parameters have `dtype`.

    Raises:
      FileNotFoundError: for a missing directory or file.
      MissingLibraryError: for `weights` without Qwix, or a GGUF file without the package gguf.
      UserError: for files that are unreadable, unknown or inconsistent; the message names the
        path, the arrays and the remedy in one line.
    """
    if mesh is not None and sharding is not None:
        raise UserError("`mesh` and `sharding` exclude each other; give only one of them")
    if not isinstance(sharding, jax.sharding.Sharding | None):
        raise UserError(
            f"`sharding` must be a jax.sharding.Sharding, got {sharding!r}: to spread the arrays "
            "over devices, give `mesh`"
        )
    check_form(weights)
    requested = None if dtype is None else float_dtype(dtype, "`dtype`")
    opened = _open(path, config, check_weights)
    warn_of_adapter(opened.path)
    ids, rows = opened.ids, opened.config.vocab_size
    if any(eos >= rows for eos in ids.eos):
        raise UserError(
            f"{opened.path}: eos_token_id={list(ids.eos)} must be below vocab_size={rows}; correct "
            f"{GENERATION_FILE}"
        )
    make = family_of(opened.config).model
    shapes = {n: tuple(x.shape) for n, x in flatten(make(opened.config).abstract_params()).items()}
    pieces = opened.pieces(shapes)
    disk = common_dtype(opened.reader.specs[piece.source].dtype for piece in pieces.values())
    kept = np.dtype(np.float32) if disk == np.float16 else disk
    stored = kept if requested is None else requested
    model = make(opened.config.replace(dtype=stored, param_dtype=stored))
    if mesh is None:
        placed = dict.fromkeys(shapes, sharding or jnp.zeros(()).sharding)  # the default device's
    else:
        partitioner = partitioning.Partitioner(mesh, rules)
        placed = flatten(partitioner.param_shardings(model, model.abstract_params()))
    needed = 0
    for name, shape in shapes.items():
        kind = quantised_form(name, shape, weights)
        arrays = [jax.ShapeDtypeStruct(shape, stored)]
        if kind is not None:
            arrays = jax.tree.leaves(kind.abstract(shape))
        sizes = [x.size * x.dtype.itemsize for x in arrays]
        needed += nbytes(arrays[0], placed[name]) * sum(sizes) // sizes[0]
    devices: set[jax.Device] = set().union(*(x.device_set for x in placed.values()))
    remedy = "over more devices (`mesh`)"
    if not weights:
        remedy = f"with weights='int8', with dtype='bfloat16', or {remedy}"
    what = f"{opened.path}: the parameters in {weights or stored}"
    check_fits(what, needed, f"load them {remedy}", devices)
    options: Any = {"dtype": stored, "shardings": placed, "check": check_weights}
    others = quantised_placers(shapes, placed, weights, opened.path if check_weights else None)
    spread = any(len(one.device_set) > 1 for one in placed.values())
    reader = opened.reader
    if spread and not others and opened.format == "orbax" and isinstance(reader, OrbaxReader):
        params = reader.shards(**options)
    else:
        params = materialise(reader, pieces, others=others, **options)
    starts = getattr(model.config, "decoder_start_token", None)
    return LoadedModel(
        model=model,
        params=params,
        config=model.config,
        path=opened.path,
        format=opened.format,
        special_ids=dataclasses.replace(ids, decoder_start=starts),
        step=opened.step,
        stored_dtype=disk,
    )


def read_config(path: PathLike, config: ModelConfig | PathLike | None = None) -> ModelConfig:
    """A checkpoint's configuration, with dtypes float32 unless the directory is our own.

    It reads no array. The arguments are those of `load_model`.
    """
    return _open(path, config, False).config


def open_checkpoint(path: PathLike) -> Opened:
    """Opens a checkpoint as `load_model` does, without reading its arrays."""
    return _open(path, None, False)


def _open(path: PathLike, config: ModelConfig | PathLike | None, check_files: bool) -> Opened:
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"`path` must be a directory's path, got {path!r}")
    if not os.path.exists(path):
        raise MissingFileError(
            f"{path}: no such directory; check the path, or download the model{download(path)}"
        )
    if not isinstance(config, ModelConfig | str | os.PathLike | None):
        raise UserError(
            f"`config` must be a configuration, or the path of a JSON or gin file, got {config!r}"
        )
    if not isinstance(config, ModelConfig | None) and Path(config).suffix == ".json":
        config = _config_of_file(read_json(Path(config)), Path(config))
    if check_files:  # first: its messages are clearer
        check_checksums(Path(path))
    opened = _recognise(Path(path), config)
    if check_files and opened.path != Path(path):
        check_checksums(opened.path)
    ids = special_ids(opened.path)
    if opened.format == "t5x":
        ids = ids.or_else(special_ids(opened.path.parent))
    actual = opened.config
    starts = getattr(actual, "decoder_start_token", None)
    stated = ids.decoder_start
    if None not in (starts, stated) and stated != starts and not isinstance(config, ModelConfig):
        # As in transformers, generation_config.json has priority over config.json.
        try:
            actual = actual.replace(decoder_start_token=stated)
        except UserError as error:
            raise UserError(f"{opened.path}: {error}; correct {GENERATION_FILE}") from None
    return dataclasses.replace(opened, config=actual, ids=ids.or_else(opened.ids))


def check_checksums(path: Path) -> None:
    """Compares a checkpoint's files with its checksums, if it has any."""
    if (path / CHECKSUMS_NAME).is_file() and (why := find_damage(path)):
        raise UserError(
            f"{path}: {why}: copy the checkpoint again; if you changed it on purpose, "
            f"delete {CHECKSUMS_NAME}"
        )


def _recognise(path: Path, config: ModelConfig | PathLike | None) -> Opened:
    if is_gguf(path):
        if not isinstance(config, ModelConfig | None):
            raise UserError(
                f"`config` is the gin file {config}, which is only for T5X checkpoints, but {path} "
                "is a GGUF file; leave it out"
            )
        reader, network, ids = open_gguf(path, config)
        pieces = functools.partial(hf_pieces, reader, network)
        return Opened(reader, network, read_header(path).directory, "gguf", ids, pieces)
    if not path.is_dir():
        parent = path.absolute().parent
        raise UserError(
            f"{path} is a file; give a checkpoint's directory, such as {parent}, or a .gguf file"
        )
    check_adapter(path)
    explicit = config if isinstance(config, ModelConfig) else None
    ours, arrays = (path / SPECJAX_FILE).is_file(), any(path.glob("*.safetensors"))
    maxtext = last_tree(path, "items", "[0-9]*/items", "checkpoints/[0-9]*/items")
    if ours or arrays or maxtext is not None or (path / "config.json").is_file():
        if config is not explicit:
            raise UserError(
                f"`config` is the gin file {config}, which is only for T5X checkpoints, but "
                f"{path} is not a T5X checkpoint; leave it out, or give a JSON file"
            )
        if ours:
            return _open_ours(path, explicit)
        if maxtext is not None:
            orbax = OrbaxReader(maxtext)
            network = explicit or read_maxtext_config(maxtext_file(path))
            found = maxtext_pieces(orbax.specs, network)
            pieces = functools.partial(_checked_pieces, path, *found)
            return Opened(orbax, network, path, "maxtext", default_ids(network), pieces)
        tunix = None if arrays else last_tree(path, "[0-9]*/model_params")
        if tunix is not None:
            reader, network, ids = open_hf(path, explicit, OrbaxReader(tunix))
            pieces = functools.partial(_checked_pieces, path, *tunix_pieces(reader.specs))
            return Opened(reader, network, path, "tunix", ids, pieces)
        reader, network, ids = open_hf(path, explicit)
        pieces = functools.partial(hf_pieces, reader, network)
        return Opened(reader, network, path, "hf", ids, pieces)
    checkpoint = t5x_directory(path)
    if checkpoint is None:
        raise UserError(
            f"{path} has no checkpoint: no config.json with safetensors (Hugging Face), no "
            "checkpoint_<step> or file 'checkpoint' (T5X), no items or <step>/items (MaxText), and "
            f"no {SPECJAX_FILE} (specjax); check the path"
        )
    return _open_t5x(checkpoint, config)


def _open_t5x(directory: Path, config: ModelConfig | PathLike | None) -> Opened:
    reader = t5x_reader(directory)
    tree = ParamTree(reader)
    if isinstance(config, ModelConfig):
        if not isinstance(config, T5Config):
            raise UserError(
                f"`config` must be a T5Config for the T5X checkpoint {directory}, got a "
                f"{type(config).__name__}"
            )
        network = config
        if not network.relpos_per_layer:
            tree.share_biases()
    else:
        tree.share_biases()
        gin = find_gin(directory) if config is None else Path(config)
        network = infer_config(tree.specs, directory, gin)
    pieces = functools.partial(_checked_pieces, directory, tree.specs, tree.pieces)
    ids = default_ids(network)
    return Opened(reader, network, directory, "t5x", ids, pieces, step_of(directory))


def _open_ours(path: Path, config: ModelConfig | None) -> Opened:
    file = path / SPECJAX_FILE
    values = read_json(file)
    if values.get("version", VERSION) != VERSION:
        raise UserError(
            f"{file}: version={values['version']!r} must be {VERSION} for this specjax to read it; "
            "use the specjax that wrote it"
        )
    network = config or _config_of_file(values.get("config") or {}, file)
    reader = OrbaxReader(path / PARAMS)
    sources = {name: Piece(name) for name in reader.specs}
    pieces = functools.partial(_checked_pieces, path, reader.specs, sources)
    ids = special_ids_from_json(values, file)
    return Opened(reader, network, path, "orbax", ids, pieces, values.get("step"))


def _config_of_file(values: Any, file: Path) -> ModelConfig:
    if not isinstance(values, dict):
        raise UserError(f"{file}: config={values!r} must be an object")
    try:
        return config_from_dict(values)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _checked_pieces(
    path: Path, specs: Mapping[str, ArraySpec], pieces: Mapping[str, Piece], shapes: Shapes
) -> dict[str, Piece]:
    remedy = "Give a checkpoint and a configuration that match"
    check_same(path, specs, shapes, remedy)
    check_floating(path, specs)
    return {name: pieces[name] for name in shapes}


# The fields of a size; a fine-tuned model may have another vocabulary or dropout.
_SIZES = (
    "embed_dim",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "mlp_dim",
    "num_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "num_experts",
    "num_experts_per_tok",
    "expert_dim",
)


def sized(directory: PathLike, size: str) -> PathLike:
    """A checkpoint's directory, after a check that its network has this size.

    It reads no array. It prevents a run with other models than the run's name claims.

    Args:
      directory: see `read_config`.
      size: one of `specjax.models.PRESETS`, such as "gemma2_9b".
    """
    wanted, actual = preset(size), read_config(directory)
    pairs = {"": (actual, wanted)}
    if actual.encoder_config is not actual:
        pairs["encoder's "] = (actual.encoder_config, wanted.encoder_config)
    differences = [
        f"{whose}{name} {here} (not {there})"
        for whose, (ours, theirs) in pairs.items()
        for name in _SIZES
        if (here := getattr(ours, name, None)) != (there := getattr(theirs, name, None))
    ]
    if type(actual) is not type(wanted):
        differences = [f"a {type(actual).__name__}"]
    if differences:
        raise UserError(
            f"{os.fspath(directory)} is not {size}: it has {', '.join(differences)}: give another "
            "directory, or another size"
        )
    return directory
