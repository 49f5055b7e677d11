"""Hugging Face directories: config.json, and safetensors in one file or several with an index."""

import json
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from specjax.checkpoints import hf_config, hf_names
from specjax.checkpoints.arrays import (
    ArraySpec,
    Piece,
    check_floating,
    compare,
    copy_as,
    same_values,
)
from specjax.models import T5Config
from specjax.models.config import ModelConfig
from specjax.tokenizers.model_files import SpecialIds, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LM_HEAD = "lm_head.weight"
SHARD_BYTES = 5 * 10**9

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype("bfloat16"),
}


class SafetensorsReader:
    """The arrays of a directory's safetensors files, memory-mapped.

    Args:
      directory: a Hugging Face directory.

    Raises:
      FileNotFoundError: for a missing file, or a shard that the index names.
      ValueError: for a file that is cut short or damaged, or an index at odds with the files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.specs: dict[str, ArraySpec] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for path in _files(directory):
            self._add(path)
        _check_index(directory, {name: path.name for name, (path, _) in self._places.items()})

    def _add(self, path: Path) -> None:
        try:
            path.open("rb").close()  # the library calls each failure "No such file"
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path}: no such file; download the whole checkpoint"
            ) from None
        except OSError as error:
            raise OSError(f"{path} cannot be read ({error.strerror}); correct that") from None
        try:
            # The library checks the whole header, and that the file is as long as it says.
            with safetensors.safe_open(path, framework="numpy"):
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path} is cut short or damaged ({error}); download or copy it again"
            ) from None
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in self._places:
                raise ValueError(
                    f"{path} holds {name}, and so does {self._places[name][0].name}; download the "
                    "whole checkpoint again"
                )
            dtype = _DTYPES.get(entry["dtype"], np.dtype(np.uint8))
            self.specs[name] = ArraySpec(tuple(entry["shape"]), dtype, entry["dtype"])
            self._places[name] = (path, 8 + length + entry["data_offsets"][0])

    def read(self, name: str) -> np.ndarray:
        """One array, as a read-only memory map."""
        path, offset = self._places[name]
        shape, dtype, _ = self.specs[name]
        if 0 in shape or not shape:
            return np.fromfile(path, dtype, int(np.prod(shape)), offset=offset).reshape(shape)
        return np.memmap(path, dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)

    def arrays(self, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """See `Reader`."""
        for name in names:
            yield name, self.read(name)


def _files(directory: Path) -> list[Path]:
    """The safetensors files of a directory."""
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not index.is_file():
        torch = sorted(p.name for p in directory.glob("*.bin"))
        hint = (
            f"save its {torch[0]} again with transformers' save_pretrained"
            if torch
            else "download the whole checkpoint"
        )
        raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}; {hint}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map; download the file again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ValueError(
                f"{index}: {name!r} must be the name of a file beside it; download the file again"
            )
        if not (directory / name).is_file():
            arrays = sum(value == name for value in weight_map.values())
            raise FileNotFoundError(
                f"{directory / name} is missing, though {INDEX} places {arrays} arrays in it; "
                "download the whole checkpoint"
            )
    return [directory / name for name in names]


def _check_index(directory: Path, places: Mapping[str, str]) -> None:
    """Asserts that every array is in the shard where the index places it, if there is an index."""
    if (directory / SINGLE).is_file():
        return
    index = directory / INDEX
    for name, shard in read_json(index)["weight_map"].items():
        if places.get(name) != shard:
            where = f"is in {places[name]}" if name in places else "is in none of the shards"
            raise ValueError(
                f"{index} places {name} in {shard}, but it {where}; download the whole checkpoint"
            )


def open_hf(
    directory: Path, config: ModelConfig | None
) -> tuple[SafetensorsReader, ModelConfig, SpecialIds]:
    """Opens a directory and settles its configuration.

    A T5's head is tied unless `lm_head.weight` is there and differs from the embedding; whether a
    tied head scales is `scale_decoder_outputs`, else `tie_word_embeddings`.

    Args:
      directory: holds config.json (unless `config` is given) and safetensors.
      config: instead of config.json's.

    Returns:
      The reader, the configuration, the ids of config.json.

    Raises:
      FileNotFoundError: for a missing file.
      ValueError: for an unreadable file, another architecture, or flags and arrays at odds.
    """
    path = directory / "config.json"
    if config is not None:
        return SafetensorsReader(directory), config, hf_config.DEFAULT_IDS[type(config)]
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; copy it beside the safetensors, or give `config`"
        )
    values = read_json(path)
    config = hf_config.config_from_hf(values, path)
    reader = SafetensorsReader(directory)
    head, embedding = LM_HEAD in reader.specs, _embedding(reader, type(config))
    copied = (
        head and embedding is not None and same_values(reader.read(LM_HEAD), reader.read(embedding))
    )
    if isinstance(config, T5Config):
        untied = _t5_is_untied(values, path, head, copied)
        config = config.replace(
            tie_embeddings=not untied, scale_tied_logits=untied or config.scale_tied_logits
        )
    elif config.tie_embeddings and head and embedding is not None and not copied:
        raise ValueError(
            f"{path}: tie_word_embeddings is true, but {LM_HEAD} differs from the embedding; "
            "set it to false if the head is untied"
        )
    return reader, config, hf_config.DEFAULT_IDS[type(config)]


def _t5_is_untied(values: Mapping[str, Any], path: Path, head: bool, copied: bool) -> bool:
    """Whether a T5 has a head of its own.

    Args:
      values: of config.json.
      path: of config.json, for messages.
      head: whether the checkpoint has a head.
      copied: whether it equals the embedding.

    Raises:
      ValueError: where transformers would scale the logits of an untied head.
    """
    said_untied = values.get("tie_word_embeddings") is False
    scales = values.get("scale_decoder_outputs")
    if copied or not (head or said_untied):
        return False
    if scales and not head:
        raise ValueError(
            f"{path}: tie_word_embeddings is false and {LM_HEAD} is absent, but "
            "scale_decoder_outputs is true, which belongs to a tied head; set tie_word_embeddings "
            "to true if the head is tied"
        )
    if scales:
        raise ValueError(
            f"{path}: scale_decoder_outputs is true, which belongs to a tied head, but {LM_HEAD} "
            "differs from shared.weight; set it to false if the head is untied"
        )
    if scales is None and not said_untied:
        raise ValueError(
            f"{path}: {LM_HEAD} differs from shared.weight, but tie_word_embeddings is not false, "
            "so transformers 4 ties the head and transformers 5 scales its logits; set "
            "tie_word_embeddings to false if the head is untied, as in T5 v1.1 and FLAN-T5"
        )
    return True


def _embedding(reader: SafetensorsReader, family: type[ModelConfig]) -> str | None:
    """The name under which the embedding is stored; a checkpoint may keep only a copy."""
    names = (hf_names.embedding_name(family), *hf_names.EMBEDDING_COPIES[family])
    return next((name for name in names if name in reader.specs), None)


def hf_pieces(
    reader: SafetensorsReader, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Piece]:
    """Finds every parameter among a checkpoint's arrays.

    Args:
      reader: the open checkpoint.
      config: the model's configuration.
      shapes: of the parameters, by path.

    Returns:
      Where each parameter comes from.

    Raises:
      ValueError: if arrays are missing, unknown, of a wrong shape, or copies that differ.
    """
    family = type(config)
    rules = {path: hf_names.to_hf(family, path) for path in shapes}
    stored = _embedding(reader, family)
    if stored is not None:
        path = "token_embedder/embedding"
        rules[path] = rules[path]._replace(hf=stored)
    asked = {
        rule.hf: shapes[path][::-1] if rule.transposed else shapes[path]
        for path, rule in rules.items()
    }
    mismatch = compare(reader.specs, asked)
    # What stands in the place of a missing array may be its quantised form.
    taken = reader.specs if mismatch.missing else {n: reader.specs[n] for n in asked}
    check_floating(reader.directory, taken)
    mismatch.extra = _unknown(reader, config, mismatch.extra, stored)
    mismatch.raise_if_any(
        reader.directory, "Give the checkpoint whose arrays these are, or correct config.json"
    )
    return {
        path: Piece(rule.hf, np.transpose if rule.transposed else np.asarray)
        for path, rule in rules.items()
    }


def _unknown(
    reader: SafetensorsReader, config: ModelConfig, extra: list[str], embedding: str | None
) -> list[str]:
    """Leaves out of `extra` what may be dropped: unused constants, true copies of the embedding."""
    family = type(config)
    copies = {hf_names.embedding_name(family), *hf_names.EMBEDDING_COPIES[family]}
    if config.tie_embeddings:
        copies.add(LM_HEAD)
    left = []
    for name in extra:
        if re.fullmatch(hf_names.UNUSED[family], name):
            continue
        if name in copies and embedding is not None:
            if same_values(reader.read(name), reader.read(embedding)):
                continue
            name = f"{name} (a copy that differs from {embedding})"
        left.append(name)
    return left


def write_hf(
    directory: Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    *,
    ids: SpecialIds,
    dtype: np.dtype,
    shard_bytes: int = SHARD_BYTES,
    max_position_embeddings: int | None = None,
) -> None:
    """Writes config.json and safetensors into an existing directory.

    Args:
      directory: where to.
      config: the model's configuration.
      params: its parameters by path.
      ids: its special ids.
      dtype: of the arrays on disk.
      shard_bytes: the size above which the arrays go to several files with an index.
      max_position_embeddings: what config.json of a decoder-only model names; its family's usual
        one by default.

    Raises:
      ValueError: for a configuration that transformers cannot hold.
    """
    values = hf_config.config_to_hf(config, ids, dtype)
    if max_position_embeddings is not None and not isinstance(config, T5Config):
        values["max_position_embeddings"] = max_position_embeddings
    rules = [hf_names.to_hf(type(config), path) for path in params]
    if isinstance(config, T5Config) and config.tie_embeddings and not config.scale_tied_logits:
        # 4.x scales every tied head: an equal head, called untied, is right there and in 5.x.
        rules.append(hf_names.Renaming(LM_HEAD, "token_embedder/embedding"))
    shards: list[list[hf_names.Renaming]] = [[]]
    filled = 0
    for rule in rules:
        nbytes = params[rule.path].size * dtype.itemsize
        if filled and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(rule)
        filled += nbytes
    write_json(directory / "config.json", values)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = {}
        for rule in shard:
            value = np.asarray(params[rule.path])
            arrays[rule.hf] = copy_as(value.T if rule.transposed else value, dtype)
            weight_map[rule.hf] = name
        # transformers 4.x refuses a file without this mark.
        safetensors.numpy.save_file(arrays, directory / name, metadata={"format": "pt"})
        # The library makes its files readable by their owner alone.
        shutil.copymode(directory / "config.json", directory / name)
    if len(shards) > 1:
        total = sum(params[rule.path].size for rule in rules) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / INDEX, index)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object, indented, with a final newline."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
