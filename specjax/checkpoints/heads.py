"""Draft heads on disk: what all kinds of `specjax.models.heads` have in common.

A head may also be inside its verifier's checkpoint, as the MTP of Qwen3-Next and 3.5 is. Heads are
written in speculators' format. What it has no field for is in an object `specjax` of the
`config.json`: the fingerprint of the verifier, and the layer whose encoder's output is read.
"""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from specjax.checkpoints.arrays import (
    check_floating,
    check_same,
    copy_as,
    flatten,
    materialise,
)
from specjax.checkpoints.hf import (
    SINGLE,
    SafetensorsReader,
    array_of,
    config_to_hf,
    renaming_of,
    sources,
)
from specjax.checkpoints.loading import check_checksums
from specjax.checks import PathLike
from specjax.errors import UserError
from specjax.fingerprints import digest
from specjax.models import Model
from specjax.models.config import disk_dtype
from specjax.models.decoder_only import FULL, SLIDING
from specjax.models.families import family_of
from specjax.models.family import HFFields, Renaming
from specjax.models.heads import KINDS, DraftHead, HeadFiles, draft_head, kind_in, kind_of
from specjax.models.heads.head import (
    AS_MODEL,
    EMBEDDING,
    OUTPUT,
    TO_DRAFT,
    TO_TEXT,
)
from specjax.tokenizers.model_files import SpecialIds, read_json, read_json_if_there, write_json
from specjax.types import Params
from specjax.writing import new_directory, write_checksums


def is_draft_head(path: PathLike) -> bool:
    """Whether a directory holds a draft head, by its `config.json`, or by its arrays (EAGLE-1)."""
    place = Path(path)
    values = read_json_if_there(place / "config.json")
    if values.get("speculators_model_type") is not None:
        return True  # perhaps of a kind that is not supported
    single = (place / SINGLE).is_file()
    found = kind_in(
        HFFields(values), lambda: SafetensorsReader(place, AS_MODEL).specs if single else ()
    )
    return found is not None


def has_mtp(path: PathLike) -> bool:
    """Whether the directory of a model holds an MTP head, too, which `open_draft_head` opens."""
    return _kind_inside(Path(path), read_json_if_there(Path(path) / "config.json")) is not None


def _kind_inside(place: Path, values: Mapping[str, Any]) -> type[HeadFiles] | None:
    kinds = (x for x in KINDS if str(values.get("model_type")).startswith(x.verifiers))
    return next((x for x in kinds if x.array_inside in SafetensorsReader(place).specs), None)


def open_draft_head(path: PathLike) -> HeadFiles:
    """Opens a draft head without reading its arrays.

    Raises:
      FileNotFoundError: a file is missing.
      UserError: the files are damaged, or of an unknown kind.
    """
    place = Path(path)
    file = place / "config.json"
    fields = HFFields(read_json(file), file)
    if (kind := _kind_inside(place, fields.values)) is not None:
        reader = SafetensorsReader(place, kind.inside)
    else:
        kind = fields.read(lambda x: kind_in(x, lambda: SafetensorsReader(place, AS_MODEL).specs))
        if kind is None:
            raise UserError(f"{place} has no draft head of a known kind: give the directory of one")
        reader = SafetensorsReader(place, kind.nested)
    return fields.read(lambda x: kind.opened(x, reader))


def load_draft_head(
    path: PathLike,
    verifier: Model,
    *,
    verifier_params: Params | None = None,
    dtype: Any = None,
    sharding: jax.sharding.Sharding | None = None,
    check_weights: bool = True,
) -> tuple[DraftHead, Params]:
    """Reads a draft head for a verifier.

    Args:
      path: its directory, in the format of one of `models.heads.KINDS`.
      verifier: its verifier's network.
      verifier_params: the verifier's parameters, if they are to be compared with the fingerprint.
      dtype: of parameters and activations; by default that of the verifier's activations.
      sharding: of all its arrays; by default the first device's.
      check_weights: whether to compare the file with its checksum, and to search the arrays for NaN
        and infinity.

    Raises:
      FileNotFoundError: a file is missing.
      UserError: an array is missing, unknown or wrong, or the head is another verifier's.
    """
    opened = open_draft_head(path)
    config = opened.config_for(verifier)
    named = verifier_params is not None and opened.fingerprint is not None
    if named and fingerprint_of(verifier_params) != opened.fingerprint:
        raise UserError(
            f"{opened.path} is a head for another verifier{opened.named}, whose parameters differ "
            "from these: give its own verifier"
        )
    if check_weights:
        check_checksums(opened.path)
    kept = np.dtype(verifier.config.dtype if dtype is None else dtype)
    layers = dataclasses.replace(config.layers, dtype=kept, param_dtype=kept)
    head = draft_head(dataclasses.replace(config, layers=layers), verifier)
    shapes = {n: tuple(x.shape) for n, x in flatten(head.abstract_params()["network"]).items()}
    lines = {
        place: renaming_of(opened.reader, opened.stored(config, opened.layer, place), shape)
        for place, shape in shapes.items()
    }
    expected, pieces = sources(opened.reader, config.layers, lines, shapes)
    remedy = "Give the whole head, with its own config.json"
    check_same(opened.path, opened.reader.specs, {**expected, **opened.maps(config)}, remedy)
    check_floating(opened.path, {name: opened.reader.specs[name] for name in expected})
    where = jax.numpy.zeros(()).sharding if sharding is None else sharding
    network = materialise(
        opened.reader,
        pieces,
        dtype=kept,
        shardings=dict.fromkeys(shapes, where),
        check=check_weights,
    )
    maps = jax.device_put(opened.read_maps(config), where)
    return head, {"network": network, **maps}


def fingerprint_of(verifier_params: Params) -> str:
    """Identifies a verifier by its norms and biases, which are small and never quantised."""
    vectors = {name: x for name, x in flatten(verifier_params).items() if len(x.shape) == 1}
    return digest(vectors, as_bfloat16=True)


def save_draft_head(
    path: PathLike,
    head: DraftHead,
    params: Params,
    *,
    verifier_params: Params | None = None,
    verifier_name: str | None = None,
    dtype: Any = None,
    max_position_embeddings: int | None = None,
    max_draft: int = 3,
    portable: bool = False,
    replace: bool = False,
) -> Path:
    """Writes a draft head in speculators' format; `load_draft_head` reads it.

    Args:
      path: a directory that does not exist, or is empty (but see `replace`).
      head: the head.
      params: its parameters, with or without what it uses of the verifier's.
      verifier_params: the verifier's, whose fingerprint is written: verifiers with other norms or
        biases are refused later.
      verifier_name: the verifier's name or directory.
      dtype: of the arrays on disk; by default their own.
      max_position_embeddings: the longest context, for other readers.
      max_draft: the drafts that other servers ask a recurrent head for, by default as many as of
        speculators'.
      portable: whether speculators and vLLM are to read it; they need copies of matrices that the
        head shares with its verifier, and `verifier_params`.
      replace: see `specjax.checkpoints.save_model`.

    Raises:
      UserError: speculators has no such head.
      FileExistsError: `path` is a file, or a directory that is not empty.
    """
    kind, flat = kind_of(head.config), flatten(params["network"])
    published = next((x for x in kind.speculators if x.kind == head.config.kind), None)
    if published is None:
        raise UserError(
            f"an {head.config.kind} head cannot be written: speculators has no such format"
        )
    config, theirs = head.config, head.verifier.config
    disk = disk_dtype(flat, dtype)
    sizes = set(filter(None, config.windows))
    inner = config_to_hf(config.layers, SpecialIds(), disk) | {
        "sliding_window": max(sizes, default=None),
        "use_sliding_window": bool(sizes),
        "layer_types": [FULL if x is None else SLIDING for x in config.windows],
    }
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.most_drafts or max_draft,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    values = {
        "architectures": [published.network],
        "speculators_model_type": published.name,
        "speculators_config": {
            "algorithm": published.name,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {
                "name_or_path": verifier_name,
                "architectures": [family_of(theirs).architectures[0]],
            },
        },
        "num_target_layers": len(theirs.style.layers),
        "dtype": disk.name,
        "tie_word_embeddings": False,
        **kind.to_hf(head, inner),
        "specjax": {} if config.cross_layer is None else {"cross_layer": config.cross_layer},
    }
    if max_position_embeddings is not None:
        values["transformer_layer_config"]["max_position_embeddings"] = max_position_embeddings
    if verifier_params is not None:
        values["specjax"]["verifier_fingerprint"] = fingerprint_of(verifier_params)
    parts: dict[str, list[Renaming]] = {}
    for place in flat:
        line = kind.stored(config, published.layer, place)[0]
        parts.setdefault(line.hf, []).append(line)
    arrays = {
        name: array_of(config.layers, sorted(lines, key=lambda x: x.part or 0), flat, disk)
        for name, lines in parts.items()
    }
    if "places" in params:
        places = np.asarray(params["places"])
        arrays[TO_DRAFT] = places < config.rows
        tokens = np.argsort(places, kind="stable")[: config.rows]
        arrays[TO_TEXT] = (tokens - np.arange(tokens.size)).astype(np.int64)
    if portable:
        assert verifier_params is not None
        style, wrong = theirs.style, None
        if config.is_ours:
            wrong = (
                "reads an encoder's output, has a mask that is learnt, is a Domino, or is a "
                "DFlash 2 with a draft vocabulary or a confidence"
            )
        elif family_of(config.layers).name not in published.families:
            wrong = "has other layers than Qwen 3's"
        elif (style.embed_scale, style.hidden_scale, style.final_softcap) != (1.0, 1.0, None):
            wrong = "is for a verifier that scales its embedding or its logits"
        if wrong is not None:
            raise UserError(f"this {published.kind} head {wrong}: speculators cannot read it")
        rows = tokens if "places" in params else slice(None)
        embedding = np.asarray(verifier_params["token_embedder"]["embedding"])
        matrices = {EMBEDDING: embedding, OUTPUT: embedding[rows]}
        if not theirs.tie_embeddings:
            kernel = verifier_params["decoder"]["logits_dense"]["kernel"]
            matrices[OUTPUT] = np.asarray(kernel).T[rows]
        missing = set(published.copies) - set(arrays)
        arrays |= {name: copy_as(matrices[name], disk) for name in sorted(missing)}
    with new_directory(Path(path), replace=replace) as directory:
        write_json(directory / "config.json", values)
        file = directory / SINGLE
        safetensors.numpy.save_file(arrays, file, metadata={"format": "pt"})
        # The library makes its files readable only by their owner.
        shutil.copymode(directory / "config.json", file)
        write_checksums(directory, lambda name: name == SINGLE)
        # Refuses a head of which the format does not keep all. Layers are written as those of a
        # model; a portable head has the verifier's matrices, too.
        again = open_draft_head(directory).config_for(head.verifier)
        names = {x.name for x in dataclasses.fields(config)}
        names -= {"layers", "own_embedding", "own_output"}
        values = {x: getattr(config, x) for x in sorted(names)}
        lost = [f"{x}={y}" for x, y in values.items() if getattr(again, x, None) != y]
        if lost:
            raise UserError(
                f"{config.kind} head with {', '.join(lost)} cannot be written: speculators has no "
                "such format"
            )
    return Path(path)
