"""Hugging Face directories: `config.json`, and safetensors in one file or in several with an index.

A family (`specjax.models.family`) interprets its fields and names.
"""

import functools
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from specjax.checkpoints.arrays import (
    UNREAD,
    ArrayReader,
    ArraySpec,
    Piece,
    Stack,
    View,
    check_floating,
    check_same,
    copy_as,
    same_values,
)
from specjax.checkpoints.mxfp4 import shape_in_floats, stack_of
from specjax.errors import MissingFileError, UserError
from specjax.memory import mappers
from specjax.models import FAMILIES, Family, ModelConfig
from specjax.models.families import family_of
from specjax.models.family import HFFields, Nested, Renaming
from specjax.tokenizers.model_files import (
    SPECJAX_FILE,
    SpecialIds,
    read_json,
    read_json_if_there,
    special_ids_from_json,
    write_json,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
_EMBEDDING, _LOGITS = "token_embedder/embedding", "decoder/logits_dense/kernel"
_TIED = "tie_word_embeddings"
# What is read of safetensors' dtypes; others, floats of 4 to 8 bits and C64, are refused.
_DTYPES = {"BF16": "bfloat16", "BOOL": "bool"}
_DTYPES |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}
for _bits in (8, 16, 32, 64):
    _DTYPES |= {f"I{_bits}": f"int{_bits}", f"U{_bits}": f"uint{_bits}"}


class SafetensorsReader:
    """The arrays of a directory's safetensors files, without those of other parts of `nested`."""

    def __init__(self, directory: Path, nested: Nested | None = None) -> None:
        self.directory = directory
        self.specs: dict[str, ArraySpec] = {}
        self._mappers: dict[str, Callable[[Any, Sequence[int]], Any]] = {}
        placed = _weight_map(directory)
        for shard in sorted(set(placed.values())) or [SINGLE]:
            self._add(shard, placed)
        in_bytes = (name for name, spec in self.specs.items() if spec.label == "U8")
        found = [re.fullmatch("(.*)_(blocks|scales)", name) for name in in_bytes]
        for name in sorted({match[1] for match in found if match is not None}):
            self._join_mxfp4(name)
        if nested is None:
            return
        specs, maps, self.specs, self._mappers = self.specs, self._mappers, {}, {}
        for name, spec in specs.items():
            if re.fullmatch(nested.others, name):
                continue
            before = next((x for x in nested.prefixes if name.startswith(x)), None)
            inner = name if before is None else nested.prefixes[before] + name[len(before) :]
            self._put(inner, spec, maps[name])

    def _put(self, name: str, spec: ArraySpec, mapper: Callable[[Any, Sequence[int]], Any]) -> None:
        if name in self.specs:
            raise UserError(
                f"{self.directory} has the array {name} twice, and nothing says which one counts; "
                "download the checkpoint again, into an empty directory"
            )
        self.specs[name], self._mappers[name] = spec, mapper

    def _add(self, shard: str, placed: Mapping[str, str]) -> None:
        path = self.directory / shard
        path.open("rb").close()  # the library reports every failure as "No such file"
        try:
            # The library checks the whole header, and the length of the file.
            file = safetensors.safe_open(path, framework="numpy")
        except safetensors.SafetensorError as error:
            raise UserError(
                f"{path} is cut short or damaged ({error}); download or copy it again"
            ) from None
        maps = mappers(path)
        for name in file.keys():  # noqa: SIM118  no dict
            if placed.get(name, shard) != shard:
                continue
            entry = file.get_slice(name)
            label = entry.get_dtype()
            dtype = jnp.dtype(_DTYPES.get(label, UNREAD))
            self._put(name, ArraySpec(tuple(entry.get_shape()), dtype, label), maps[name])

    # Puts the array that two others stand for in their place.
    def _join_mxfp4(self, name: str) -> None:
        parts = [f"{name}_{part}" for part in ("blocks", "scales")]
        specs = [self.specs.pop(part, None) for part in parts]
        found = [() if spec is None else spec.shape for spec in specs]
        shape = shape_in_floats(*found)
        if shape is None:
            raise UserError(
                f"{self.directory}: MXFP4 needs the arrays {parts[0]} (X, m, n / 32, 16) and "
                f"{parts[1]} (X, m, n / 32), but their shapes are {found[0]} and {found[1]}; "
                "download the checkpoint again"
            )
        maps = [self._mappers.pop(part) for part in parts]
        stored = sum(spec.nbytes for spec in specs if spec is not None)
        self.specs[name] = ArraySpec(shape, jnp.dtype("bfloat16"), "MXFP4", stored)
        self._mappers[name] = lambda *_: stack_of(
            *(read(np.uint8, shape) for read, shape in zip(maps, found, strict=True))
        )

    def read(self, name: str) -> Any:
        """Maps an array: the library would copy it."""
        spec = self.specs[name]
        if spec.dtype == UNREAD:
            check_floating(self.directory, {name: spec})
        return self._mappers[name](spec.dtype, spec.shape)


# The shard of each array; {}: there is a single file.
def _weight_map(directory: Path) -> dict[str, str]:
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        return {}
    if not index.is_file():
        hint = "download the whole checkpoint"
        if torch := sorted(p.name for p in directory.glob("*.bin")):
            hint = f"save its {torch[0]} again with transformers' save_pretrained"
        raise MissingFileError(f"{directory} has neither {SINGLE} nor {INDEX}; {hint}")
    weight_map = read_json(index).get("weight_map")
    listed = isinstance(weight_map, dict) and all(isinstance(x, str) for x in weight_map.values())
    if not weight_map or not listed:
        raise UserError(f"{index} has no weight_map of file names; download the file again")
    for name in sorted(set(weight_map.values())):
        if not (directory / name).is_file():
            raise MissingFileError(
                f"{directory / name} is missing, though {INDEX} places arrays in it; download the "
                "whole checkpoint"
            )
    return weight_map


def open_hf(
    directory: Path, config: ModelConfig | None, reader: ArrayReader | None = None
) -> tuple[ArrayReader, ModelConfig, SpecialIds]:
    """A directory's reader, its configuration (`config` instead of config.json's), and its ids.

    The ids are those that transformers assumes if files have none. `reader` has the arrays of a
    directory without them.
    """
    path = directory / "config.json"
    if config is not None:
        family = family_of(config)
        reader = reader or SafetensorsReader(directory, _nested(family, family.name))
        return reader, config, default_ids(config)
    if not path.is_file():
        raise MissingFileError(
            f"{path} is missing; copy it beside the safetensors, or give `config`"
        )
    values = read_json(path)
    if reader is not None:
        path = reader.directory  # a GGUF file has no config.json
    family, nested = _family(values, path)
    if nested is not None and nested.field:
        inner = values.get(nested.field)
        if not isinstance(inner, dict):
            raise UserError(f"{path}: {nested.field}={inner!r} must be an object")
        # transformers obeys the outer field alone, of which null means false.
        outer = {_TIED: values[_TIED] is not None and values[_TIED]} if _TIED in values else {}
        values = {name: value for name, value in inner.items() if name != _TIED} | outer
    reader = reader or SafetensorsReader(directory, nested)
    embedding, output = _embedding(reader, family), family.hf_names(_LOGITS)[0].hf
    denied = values.get(_TIED) is False

    @functools.cache
    def head() -> str | None:
        if output not in reader.specs:
            return None
        if embedding is None:  # the shared array may be stored under this name only
            return "separate" if denied else "copied"
        same = same_values(reader.read(output), reader.read(embedding))
        return "copied" if same else "separate"

    found = HFFields(values, path, head).read(family.from_hf)
    if found.tie_embeddings and embedding is not None and head() == "separate":
        raise UserError(
            f"{path}: tie_word_embeddings is true, but {output} differs from the embedding; "
            "set it to false if the head is untied"
        )
    return reader, found, default_ids(found)


def default_ids(config: ModelConfig) -> SpecialIds:
    """The ids that transformers assumes if files have none, of those that the model has."""
    family = family_of(config)
    ids = {name: x for name, x in family.special_ids.items() if x < config.vocab_size}
    return special_ids_from_json(ids, Path(family.name))


def _family(values: Mapping[str, Any], path: Path) -> tuple[Family, Nested | None]:
    name = values.get("model_type")
    around = {f.nested.model_type: f for f in FAMILIES.values() if f.nested is not None}
    if not isinstance(name, str) or name not in {*FAMILIES, *around}:
        raise UserError(
            f"{path}: model_type={name!r} must be one of {', '.join({**FAMILIES, **around})}"
        )
    family = FAMILIES[name] if name in FAMILIES else around[name]
    nested = _nested(family, name)
    networks = values.get("architectures") or []
    if not isinstance(networks, list) or not all(isinstance(a, str) for a in networks):
        raise UserError(f"{path}: architectures={networks!r} must be a list of names")
    possible = family.architectures if nested is None else nested.architectures
    if networks and not set(networks) & set(possible):
        raise UserError(
            f"{path}: architectures={networks} must name {possible[0]}, the network of "
            f"model_type {name!r}"
        )
    quantised = values.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
    if quantised and (method != "mxfp4" or method is quantised):
        raise UserError(
            f"{path}: quantization_config is set to {method!r}, but only mxfp4 is supported; use "
            "the float32 or bfloat16 files, or delete the field if the arrays are not quantised"
        )
    return family, nested


def _nested(family: Family, model_type: str) -> Nested | None:
    around = family.nested
    return around if around is not None and around.model_type == model_type else None


def _embedding(reader: ArrayReader, family: Family, head: tuple[str, ...] = ()) -> str | None:
    names = (family.hf_names(_EMBEDDING)[0].hf, *family.copies, *head)
    return next((name for name in names if name in reader.specs), None)


def hf_pieces(
    reader: ArrayReader, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Piece]:
    """The source of every parameter, by path, among a checkpoint's arrays."""
    family = family_of(config)
    lines = {path: renaming_of(reader, family.hf_names(path), shapes[path]) for path in shapes}
    tied = (family.hf_names(_LOGITS)[0].hf,) if config.tie_embeddings else ()
    stored = _embedding(reader, family, tied)
    copies = dict(family.second_copies)
    if stored is not None:
        copies |= dict.fromkeys((lines[_EMBEDDING].hf, *family.copies, *tied), stored)
        lines[_EMBEDDING] = lines[_EMBEDDING]._replace(hf=stored)
    expected, pieces = sources(reader, config, lines, shapes)
    # The replacement of a missing array may be its quantised form.
    parameters = expected if set(expected) <= set(reader.specs) else reader.specs
    check_floating(reader.directory, {name: reader.specs[name] for name in parameters})
    unknown = []
    for name in set(reader.specs) - set(expected):
        if re.fullmatch(family.unused, name):
            continue
        if (original := copies.get(name)) in reader.specs:
            if same_values(reader.read(name), reader.read(original)):
                continue
            name = f"{name} (a copy that differs from {original})"
        unknown.append(name)
    remedy = "Give the checkpoint whose arrays these are, or correct config.json"
    check_same(reader.directory, reader.specs, expected, remedy, unknown)
    return pieces


def renaming_of(reader: ArrayReader, names: Sequence[Renaming], shape: tuple[int, ...]) -> Renaming:
    """Those names of a parameter that the checkpoint has, or the first."""
    return next((x for x in names if x.arrays(shape)[0].hf in reader.specs), names[0])


def sources(
    reader: ArrayReader,
    config: ModelConfig,
    lines: Mapping[str, Renaming],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, tuple[int, ...]], dict[str, Piece]]:
    """The shapes of the arrays in which parameters are, by name, and the parameters' sources."""
    names = {path: [x.hf for x in line.arrays(shapes[path])] for path, line in lines.items()}
    stored_shapes = {path: _stored_shape(line, shapes[path]) for path, line in lines.items()}
    expected = {
        name: stored_shapes[path]
        for path, line in lines.items()
        if line.part is None
        for name in names[path]
    }
    views: dict[str, Callable[[Any], View]] = {
        path: _transposed if line.transposed else lambda array: array
        for path, line in lines.items()
    }
    for path, stacked in names.items():
        if "{e}" in lines[path].hf:
            views[path] = functools.partial(_stack, reader, stacked)
    for name, paths in joint_arrays(lines).items():
        line, shape = lines[paths[0]], stored_shapes[paths[0]]
        if line.alternating:
            expected[name] = (*shape[:-1], shape[-1] * len(paths))
            for first, path in enumerate(paths):
                views[path] = functools.partial(_every, first, len(paths), views[path])
            continue
        axis = len(shape) - 2 if line.transposed else 0
        groups = 1 if line.groups is None else getattr(config, line.groups)
        ends = np.cumsum([stored_shapes[path][axis] for path in paths]).tolist()
        expected[name] = (*shape[:axis], ends[-1], *shape[axis + 1 :])
        for path, start, end in zip(paths, [0, *ends], ends, strict=False):
            at = slice(start // groups, end // groups)
            views[path] = functools.partial(_part, axis, groups, at, views[path])
    pieces = {path: Piece(names[path][0], view, len(names[path])) for path, view in views.items()}
    return expected, pieces


def joint_arrays(lines: Mapping[str, Renaming]) -> dict[str, list[str]]:
    """The arrays that join several parameters: name -> the parameters' paths, in order."""
    parts: dict[str, list[str]] = {}
    for path, line in sorted(lines.items(), key=lambda item: item[1].part or 0):
        if line.part is not None:
            parts.setdefault(line.hf, []).append(path)
    return parts


# Every `count`-th of the entries along the last axis.
def _every(first: int, count: int, view: Callable[[Any], View], array: View) -> View:
    return view(array[(*(slice(None),) * (len(array.shape) - 1), slice(first, None, count))])


# The shape of the checkpoint's array of a parameter, or of each of them.
def _stored_shape(line: Renaming, shape: tuple[int, ...]) -> tuple[int, ...]:
    if line.transposed:
        shape = (*shape[:-2], *shape[:-3:-1])
    return shape[1:] if "{e}" in line.hf else shape


def _transposed(array: np.ndarray) -> View:
    return Stack([matrix.T for matrix in array]) if array.ndim == 3 else array.T


def _part(
    axis: int, groups: int, at: slice, view: Callable[[np.ndarray], View], array: np.ndarray
) -> View:
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    grouped = array.reshape(*before, groups, -1, *after)
    part = grouped[(*(slice(None),) * (axis + 1), at)]
    return view(part.reshape(*before, -1, *after))


def _stack(reader: ArrayReader, names: Sequence[str], _: np.ndarray) -> Stack:
    return Stack([reader.read(name).T for name in names])


def array_of(
    config: ModelConfig, parts: Sequence[Renaming], params: Mapping[str, Any], dtype: np.dtype
) -> np.ndarray:
    """The checkpoint's array of these parameters."""
    arrays = [
        np.asarray(params[x.path] if x.expert is None else params[x.path][x.expert]) for x in parts
    ]
    first = parts[0]
    if first.transposed:
        arrays = [np.swapaxes(array, -1, -2) for array in arrays]
    if first.alternating:
        arrays = [np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)]
    elif len(arrays) > 1:
        axis = arrays[0].ndim - 2 if first.transposed else 0
        before, after = arrays[0].shape[:axis], arrays[0].shape[axis + 1 :]
        groups = 1 if first.groups is None else getattr(config, first.groups)
        grouped = [array.reshape(*before, groups, -1, *after) for array in arrays]
        arrays = [np.concatenate(grouped, axis=axis + 1).reshape(*before, -1, *after)]
    return copy_as(arrays[0], dtype)


def config_to_hf(config: ModelConfig, ids: SpecialIds, dtype: np.dtype) -> dict[str, Any]:
    """A `config.json`, for arrays of `dtype`, that transformers 4.x and 5.x read the same way."""
    family = family_of(config)
    return {
        "architectures": [family.architectures[0]],
        "model_type": family.name,
        "dtype": dtype.name,  # 5.x
        "torch_dtype": dtype.name,  # 4.x
        "use_cache": True,
        **dict.fromkeys(family.special_ids),  # null, as readers would assume the usual ids
        **ids.or_else(default_ids(config)).to_json(),
        **family.to_hf(config),
    }


def longest_context(directory: Path) -> int | None:
    """`max_position_embeddings` of a directory's files, None without one.

    Of nested configurations it is the text network's, of an encoder-decoder the decoder's.
    """
    settings: dict[str, Any] = {}
    for name in (SPECJAX_FILE, "config.json"):
        settings |= read_json_if_there(directory / name)
    for name in ("text_config", "decoder"):
        inner = settings.get(name)
        settings |= inner if isinstance(inner, dict) else {}
    longest = settings.get("max_position_embeddings")
    return longest if isinstance(longest, int) else None


def _set_longest(values: dict[str, Any], longest: int) -> None:
    if "max_position_embeddings" in values:
        values["max_position_embeddings"] = longest
    for inner in values.values():
        if isinstance(inner, dict):
            _set_longest(inner, longest)


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
    """Writes config.json and safetensors of `dtype` into an existing directory.

    Arrays of more than `shard_bytes` are split into several files with an index.
    """
    values = config_to_hf(config, ids, dtype)
    if max_position_embeddings is not None:
        _set_longest(values, max_position_embeddings)
    lines = {path: family_of(config).hf_names(path)[0] for path in params}
    arrays: dict[str, list[Renaming]] = {
        array.hf: [array]
        for path, line in lines.items()
        if line.part is None
        for array in line.arrays(params[path].shape)
    }
    arrays |= {name: [lines[path] for path in paths] for name, paths in joint_arrays(lines).items()}
    if config.tie_embeddings and not values["tie_word_embeddings"]:
        # Untied in the file, so an equal head is written.
        output = family_of(config).hf_names(_LOGITS)[0].hf
        arrays[output] = [Renaming(output, _EMBEDDING)]
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, parts in arrays.items():
        shapes = (params[x.path].shape[x.expert is not None :] for x in parts)
        nbytes = sum(map(math.prod, shapes)) * dtype.itemsize
        if filled and filled + nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + nbytes, total + nbytes
    write_json(directory / "config.json", values)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
        content = {}
        for array in shard:
            content[array] = array_of(config, arrays[array], params, dtype)
            weight_map[array] = name
        # transformers 4.x rejects a file without this metadata.
        safetensors.numpy.save_file(content, directory / name, metadata={"format": "pt"})
        # The library makes its files readable only by their owner.
        shutil.copymode(directory / "config.json", directory / name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / INDEX, index)
