"""Draft heads on disk, in the formats of their projects.

EAGLE's own, speculators (eagle3, dflash, dspark, mtp), DFlash, DeepSpec, Gemma 4's assistants.
An MTP head may also be inside its verifier's checkpoint, as those of Qwen3-Next and 3.5 are.

Each format numbers the verifier's states in its own way. EAGLE fixes them (2, L // 2, L - 3);
speculators names boundaries (see `specjax.types.LanguageModel.reading`); `target_layer_ids` of
DFlash and DeepSpec, and the ids in the `eagle_config` of SpecForge and SGLang, name the layers
whose outputs they are, one less.

Heads are written in speculators' format. What it has no field for is in an object `specjax` of the
`config.json`: the fingerprint of the verifier, and the layer whose encoder's output is read.
"""

import dataclasses
import os
import re
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
    common_dtype,
    copy_as,
    flatten,
    materialise,
)
from specjax.checkpoints.hf import (
    SINGLE,
    SafetensorsReader,
    array_of,
    config_to_hf,
    sources,
    stored_as,
)
from specjax.checkpoints.loading import check_checksums
from specjax.errors import UserError
from specjax.fingerprints import digest
from specjax.models import FAMILIES, DecoderOnlyConfig, HFFields, Model, Seq2SeqLM, family_of
from specjax.models.assistant import AssistantConfig, layers_read
from specjax.models.config import ModelConfig, float_dtype
from specjax.models.decoder_only import FULL, SLIDING, windows_from_hf
from specjax.models.family import HEADS, MLP, Nested, Renaming, T
from specjax.models.gemma4 import Gemma4Config
from specjax.models.heads import (
    MARKOV,
    BlockConfig,
    DraftHead,
    EagleConfig,
    HeadConfig,
    draft_head,
    places_of,
)
from specjax.tokenizers.model_files import SpecialIds, read_json, read_json_if_there, write_json
from specjax.types import Params
from specjax.writing import new_directory, write_checksums

# The families of which a head's layers may be; and of an MTP's; and of each kind of assistant.
_LAYERS = ("llama", "qwen3")
_MTP_LAYERS = (*_LAYERS, "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_ASSISTANTS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
_LAYER = {
    **{
        f"{kind}_attention/{ours}{end}": f"{kind}_attn.{theirs}{other}"
        for kind in ("self", "cross")
        for theirs, ours in HEADS.items()
        for end, other in (("", "_proj"), ("_norm", "_norm"))
    },
    **{
        f"mlp/{place}{ours}": f"mlp.{block}{theirs}_proj"
        for place, block in (("", ""), ("shared/", "shared_expert."))
        for theirs, ours in MLP.items()
    },
    "mlp/router": "mlp.gate",
    "mlp/shared_gate": "mlp.shared_expert_gate",
    "pre_mlp_layer_norm": "post_attention_layernorm",
    "pre_cross_layer_norm": "pre_cross_attn_layernorm",
}
# From our modules to the names in files; `{layer}` is the name of a layer.
_SHARED = {
    "fc": "fc",
    "norm": "norm",
    "logits_dense": "lm_head",
    "token_embedder": "embed_tokens",
    "state_norm": "hidden_norm",
}
_NAMES = {
    "EAGLE-1": _SHARED,
    "EAGLE-3": {
        **_SHARED,
        "states_norm": "input_norm",
        "state_norm": "{layer}.hidden_norm",
        "token_norm": "{layer}.input_layernorm",
    },
    "MTP": {
        **_SHARED,
        "fc": "{layer}.input_proj",
        "token_norm": "{layer}.token_layernorm",
        "state_norm": "{layer}.hidden_layernorm",
        "input_norm": "{layer}.input_layernorm",
        "norm": "{layer}.final_layernorm",
    },
    "DFlash": _SHARED,
    "DSpark": {
        **_SHARED,
        "markov_in": "markov_head.markov_w1",
        "markov_out": "markov_head.markov_w2",
        "confidence": "confidence_head.proj",
    },
}
_TO_DRAFT, _TO_TEXT = "t2d", "d2t"
_ORDER = "masked_embedding.token_ordering"  # of an assistant's clusters
_EMBEDDING, _OUTPUT, _MASK = "embed_tokens.weight", "lm_head.weight", "mask_embedding"
_OF_ONE_LAYER = ("MTP", "EAGLE-1", "EAGLE-3")
# Which read what the last norm makes of the last layer's output.
_READ_OUTPUTS = ("MTP", "EAGLE-1", "assistant")
_OF_ASSISTANT = {
    "pre_projection/kernel": ("pre_projection.weight", T),
    "post_projection/kernel": ("post_projection.weight", T),
    "norm/scale": ("model.norm.weight", False),
    "logits_dense/kernel": ("model.embed_tokens.weight", T),
    "output/embedding": ("model.embed_tokens.weight", False),
    "centroids/kernel": ("masked_embedding.centroids.weight", T),
}
# `speculators_model_type`: the kind, and the class that reads it there.
_SPECULATORS = {
    "eagle3": ("EAGLE-3", "Eagle3DraftModel"),
    "mtp": ("MTP", "MTPDraftModel"),
    "dflash": ("DFlash", "DFlashDraftModel"),
    "dspark": ("DSpark", "DSparkDraftModel"),
}
# The names of an MTP head inside a checkpoint, and those of speculators.
_INSIDE = Nested(
    model_type="",
    architectures=(),
    field="text_config",
    prefixes={
        "mtp.layers.": "mtp_layers.",
        "mtp.fc.": "mtp_layers.0.input_proj.",
        "mtp.norm.": "mtp_layers.0.final_layernorm.",
        "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
        "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    },
    others=r"(?!mtp\.).*",
)
# Some heads name their arrays as those of a whole model.
_AS_MODEL = dataclasses.replace(_INSIDE, field="", prefixes={"model.": ""}, others=r"(?!)")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of EAGLE-3


def is_draft_head(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a draft head, by its `config.json`, or by its arrays (EAGLE-1)."""
    values = read_json_if_there(Path(path) / "config.json")
    marks = ("speculators_model_type", "draft_vocab_size", "dflash_config", "target_layer_ids")
    known = values.get("model_type") in tuple(_ASSISTANTS)
    if known or any(values.get(mark) is not None for mark in marks):
        return True
    if values.get("model_type") not in _LAYERS or not (Path(path) / SINGLE).is_file():
        return False
    return "fc.weight" in SafetensorsReader(Path(path), _AS_MODEL).specs


def has_mtp(path: str | os.PathLike[str]) -> bool:
    """Whether the directory of a model holds an MTP head, too, which `open_draft_head` opens."""
    values = read_json_if_there(Path(path) / "config.json")
    known = str(values.get("model_type")).startswith(("qwen3_next", "qwen3_5"))
    return known and "mtp.fc.weight" in SafetensorsReader(Path(path)).specs


@dataclasses.dataclass(frozen=True)
class OpenedHead:
    """A draft head whose arrays have not been read.

    Attributes:
      format: the project whose format it is.
      kind: such as "EAGLE-3".
      width: of the verifier for which it was made, as far as the files tell.
      num_layers: of this verifier; None if the files do not tell.
      verifier: this verifier's name; None if the files have none.
      networks: the names of its network in Hugging Face's files, as far as the files tell.
      windows: see `HeadConfig`.
      cross_layer: see `HeadConfig`.
      fingerprint: of the verifier, see `fingerprint_of`; None if the files have none.
    """

    path: Path
    reader: SafetensorsReader
    values: Mapping[str, Any]
    format: str
    kind: str
    layers: DecoderOnlyConfig
    width: int
    num_layers: int | None
    verifier: str | None
    networks: tuple[str, ...]
    windows: tuple[int | None, ...]
    cross_layer: int | None
    fingerprint: str | None

    @property
    def layer(self) -> str:
        """How its arrays name a layer."""
        if self.kind == "MTP":
            return "mtp_layers.{i}"
        own = any(name.startswith("midlayer.") for name in self.reader.specs)
        return "midlayer" if own else "layers.{i}"

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its parameters in the files."""
        maps = (_TO_TEXT, _TO_DRAFT, _ORDER)
        return common_dtype(x.dtype for n, x in self.reader.specs.items() if n not in maps)

    @property
    def reads_memory(self) -> bool:
        """Whether it reads the verifier's keys and values, and has none of its own."""
        return self.kind == "assistant"

    def share_read(self, name: str) -> float:
        """The share of an array that a pass reads, besides tokens' rows of an embedding."""
        routing = next(iter(self.layers.style.routings), None)
        if ".experts." in name and routing is not None:
            return routing.per_token / routing.experts
        if name == _OF_ASSISTANT["output/embedding"][0] and _ORDER in self.reader.specs:
            scored, clusters = _clusters_of(HFFields(self.values))
            return scored / clusters
        return 0.0 if name in (_EMBEDDING, "markov_head.markov_w1.weight") else 1.0

    @property
    def named(self) -> str:
        """The verifier's name in messages."""
        return "" if self.verifier is None else f" ({self.verifier})"

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """See `HeadConfig`; None if they follow from the verifier's layers, which are not told."""
        fields = HFFields(self.values, self.path / "config.json")
        return fields.read(lambda x: self._boundaries(x, self.num_layers))

    def config_for(self, verifier: Model) -> HeadConfig:
        """The head's configuration.

        Raises:
          UserError: it was made for another verifier.
        """
        theirs, depth = verifier.config, len(verifier.config.style.windows)
        wanted = {
            "width": (self.width, theirs.embed_dim),
            "tokens in the embedding": (self.layers.vocab_size, theirs.vocab_size),
            "layers": (self.num_layers or depth, depth),
        }
        differing = [
            f"{name} {needed}, not {given}"
            for name, (needed, given) in wanted.items()
            if needed != given
        ]
        family = family_of(theirs).architectures
        if self.networks and not set(self.networks) & set(family):
            differing.append(f"the network {self.networks[0]}, not {family[0]}")
        if self.cross_layer is not None and not isinstance(verifier, Seq2SeqLM):
            differing.append("an encoder, not a decoder alone")
        if (self.cross_layer or 0) >= depth:
            differing.append(f"a layer {self.cross_layer}, not {depth} layers")
        if self.kind == "assistant":
            differing += _other_memory(self.layers, theirs)
        fields = HFFields(self.values, self.path / "config.json")
        if not differing:
            # Of a known depth they are never None.
            boundaries = fields.read(lambda x: self._boundaries(x, depth)) or ()
            most = depth + (1 if self.kind in _READ_OUTPUTS else 0)
            if not all(0 <= boundary <= most for boundary in boundaries):
                differing = [f"states {list(boundaries)} of its layers, of which it has {depth}"]
        if differing:
            raise UserError(
                f"{self.path} is a head for another verifier{self.named}, which has "
                f"{', '.join(differing)}: give its own verifier"
            )
        count = None
        if _TO_TEXT in self.reader.specs:
            (count,) = self._shape(_TO_TEXT, 1)
            self._shape(_OUTPUT, 2)  # its rows are those tokens
        return fields.read(lambda x: self._config(x, boundaries, count))

    def _boundaries(self, fields: HFFields, depth: int | None) -> tuple[int, ...] | None:
        if self.kind in _READ_OUTPUTS:
            return None if depth is None else (depth + 1,)
        blocks, eagle = fields.objects("dflash_config"), fields.objects("eagle_config")
        outputs = {
            "target_layer_ids": {**self.values, **blocks},
            "eagle_aux_hidden_state_layer_ids": eagle,
        }
        for name, values in outputs.items():
            if (layers := _whole_numbers(values, name)) is None:
                continue
            if depth is not None and depth - 1 in layers:
                raise UserError(
                    f"{name}={layers} names the last layer, whose output some projects normalise "
                    "and some do not: it is not supported"
                )
            return tuple(layer + 1 for layer in layers)
        for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
            if (ids := _whole_numbers(self.values, name)) is not None:
                # speculators' launcher may name one more, for its training.
                return tuple(ids[: self._shape("fc.weight", 2)[1] // self.width])
        if depth is None:
            return None
        if self.kind == "EAGLE-3":
            return tuple(sorted({2, depth // 2, depth - 3}))
        count = self.layers.num_layers
        if count == 1:
            return (depth // 2 + 1,)
        return tuple(round(1 + i * (depth - 4) / (count - 1)) + 1 for i in range(count))

    def _shape(self, name: str, axes: int) -> tuple[int, ...]:
        if name not in self.reader.specs:
            raise UserError(f"{self.path}: 1 array missing: {name}. Copy the whole checkpoint")
        shape = self.reader.specs[name].shape
        if len(shape) != axes:
            raise UserError(f"{self.path}: {name} must have {axes} axes, but its shape is {shape}")
        return shape

    def _config(
        self, fields: HFFields, boundaries: tuple[int, ...], draft_vocab: int | None
    ) -> HeadConfig:
        specs, vocab, width = self.reader.specs, self.layers.vocab_size, self.layers.embed_dim
        common: dict[str, Any] = {
            "layers": self.layers,
            "boundaries": boundaries,
            "windows": self.windows,
            "draft_vocab": draft_vocab,
            "own_embedding": _EMBEDDING in specs,
            "own_output": _OUTPUT in specs,
            "cross_layer": self.cross_layer,
        }
        if self.kind == "assistant":
            common["own_output"] = True
            if not fields.flag("use_ordered_embeddings", False):
                return AssistantConfig(**common)
            scored, clusters = _clusters_of(fields)
            if vocab % clusters or scored > clusters:
                raise UserError(
                    f"num_centroids={clusters} must divide the {vocab} tokens, and be at least "
                    f"centroid_intermediate_top_k={scored}"
                )
            return AssistantConfig(**common, clusters=clusters, scored_clusters=scored)
        wanted = fields.whole("draft_vocab_size", draft_vocab or vocab)
        if wanted != (draft_vocab or vocab):
            raise UserError(
                f"draft_vocab_size={wanted} needs the array {_TO_TEXT} of as many tokens: copy the "
                "whole checkpoint"
            )
        projects = self.kind in ("MTP", "EAGLE-1")
        shares = not (common["own_embedding"] and common["own_output"])
        alone = not (shares or projects or self.cross_layer is not None)
        if width != self.width and not alone:
            raise UserError(
                f"hidden_size={width} must be that of the verifier, {self.width}, whose embedding "
                "or output this head uses"
            )
        if projects:
            plain = self.kind == "EAGLE-1"
            common |= {"norms": not plain, "norm_output": not plain, "projects": True}
        elif self.kind == "EAGLE-3":
            common |= {name: fields.flag(name, False) for name in _FLAGS}
        if self.kind in _OF_ONE_LAYER:
            return EagleConfig(**common, fc_bias="fc.bias" in specs)
        inner = _of_blocks(fields)
        rank = inner.whole("markov_rank", 0, least=0)
        judges = inner.flag("enable_confidence_head", False)
        own_slot = self.kind == "DSpark" or rank > 0 or judges
        from_anchor = inner.flag("sample_from_anchor", own_slot)
        size = inner.whole("block_size", least=1 if from_anchor else 2)
        if rank:
            inner.refuse("markov_head_type", MARKOV, MARKOV[0])
        mask = None if _MASK in specs else inner.whole("mask_token_id", least=0)
        if mask is not None and mask >= vocab:
            raise UserError(f"mask_token_id={mask} must be below {vocab}, the number of tokens")
        moves = self.format == "DFlash" and any(self.windows)
        shortest = min(filter(None, self.windows), default=size)
        if moves and shortest < size:
            raise UserError(
                f"sliding_window={shortest} must be at least block_size={size}: what a block sees "
                "of itself is not defined below"
            )
        return BlockConfig(
            **common,
            block_size=size,
            mask_token=mask,
            from_anchor=from_anchor,
            causal_windows=not inner.flag("sliding_window_non_causal", False),
            windows_move=moves,
            markov=(inner.values.get("markov_head_type") or MARKOV[0]) if rank else None,
            markov_rank=rank,
            confidence=judges,
            confidence_reads_markov=inner.flag("confidence_head_with_markov", False) and rank > 0,
        )


# The entries that an assistant reads, and that the verifier does not have.
def _other_memory(layers: DecoderOnlyConfig, verifier: ModelConfig) -> list[str]:
    read, wrong = layers_read(verifier.style), []
    for number, window in enumerate(layers.style.windows):
        found = read.get(window is None)
        sizes = layers.of_layer(number), None if found is None else verifier.of_layer(found)
        named, theirs = (
            "none" if x is None else f"{x.kv_heads} heads of {x.head_dim}" for x in sizes
        )
        if named != theirs:
            kind = "without a window" if window is None else "with a window"
            wrong.append(f"keys in layers {kind} of {named}, not {theirs}")
    return sorted(set(wrong))


# The clusters of an assistant's output that are scored, and all of them.
def _clusters_of(fields: HFFields) -> tuple[int, int]:
    names = {"centroid_intermediate_top_k": 32, "num_centroids": 2048}
    scored, count = (fields.whole(name, default) for name, default in names.items())
    return scored, count


def _of_blocks(fields: HFFields) -> HFFields:
    """The fields of a block head, which SpecForge and z-lab keep in an inner object."""
    return dataclasses.replace(fields, values={**fields.values, **fields.objects("dflash_config")})


def _whole_numbers(values: Mapping[str, Any], name: str) -> list[int] | None:
    """A list of whole numbers, or None if the field is absent or null."""
    found = values.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not found or any(type(x) is not int for x in found):
        raise UserError(f"{name}={found!r} must be a list of whole numbers")
    return found


def open_draft_head(path: str | os.PathLike[str]) -> OpenedHead:
    """Opens a draft head without reading its arrays.

    Raises:
      FileNotFoundError: a file is missing.
      UserError: the files are damaged, or of an unknown kind.
    """
    place = Path(path)
    file = place / "config.json"
    values = read_json(file)
    names = _INSIDE if has_mtp(place) else _AS_MODEL
    assistant = values.get("model_type") in tuple(_ASSISTANTS)
    reader = SafetensorsReader(place, None if assistant else names)
    read = _opened_assistant if assistant else _opened
    return HFFields(values, file).read(lambda fields: read(place, reader, fields))


def _opened(place: Path, reader: SafetensorsReader, fields: HFFields) -> OpenedHead:
    values, blocks = fields.values, _of_blocks(fields)
    theirs = values.get("speculators_model_type")
    if theirs is not None:
        fields.refuse("speculators_model_type", tuple(_SPECULATORS), None)
        format_, kind = "speculators", _SPECULATORS[theirs][0]
    elif "mtp_layers.0.input_proj.weight" in reader.specs:
        format_, kind = "Qwen", "MTP"
    elif values.get("dflash_config") is not None:
        format_, kind = "DFlash", "DFlash"
        if blocks.whole("markov_rank", 0, least=0) or blocks.flag("enable_confidence_head"):
            kind = "DSpark"
    elif values.get("target_layer_ids") is not None:
        format_, kind = "DeepSpec", "DSpark"
    else:
        eagle3 = "midlayer.input_layernorm.weight" in reader.specs or "norm.weight" in reader.specs
        format_, kind = "EAGLE", "EAGLE-3" if eagle3 else "EAGLE-1"
    place_of_layers = "transformer_layer_config" if theirs is not None else _INSIDE.field
    inner = HFFields(fields.objects(place_of_layers)) if place_of_layers in values else fields
    known = _MTP_LAYERS if kind == "MTP" else _LAYERS
    family: Any = inner.values.get("model_type")
    if family not in known:
        raise UserError(
            f"layers of model_type {family!r} are not supported in a head of kind {kind}, only "
            f"{', '.join(known)}"
        )
    # Windows are the head's own, see `HeadConfig`.
    changes: dict[str, Any] = {"layer_types": None, "use_sliding_window": False}
    if kind == "MTP":
        changes["layer_types"] = [FULL]
    if kind in _OF_ONE_LAYER:  # the fields may be the verifier's
        listed, stem = inner.values.get("layer_types"), r"(?:mtp_)?layers\.(\d+)\."
        first = listed[:1] if isinstance(listed, list) else listed
        inner = HFFields({**inner.values, "num_hidden_layers": 1, "layer_types": first})
        numbers = {match[1] for name in reader.specs if (match := re.match(stem, name))}
        if len(numbers) > 1:
            raise UserError(
                f"a head of kind {kind} has one layer, but these arrays are of {len(numbers)}: "
                "give the directory of such a head"
            )
    config = FAMILIES[family].from_hf(HFFields({**inner.values, **changes}))
    assert isinstance(config, DecoderOnlyConfig)
    windows: tuple[int | None, ...] = (None,) * config.num_layers
    if kind != "MTP":
        count = len(windows)
        windowed = inner.flag("use_sliding_window", False)
        start = inner.whole("max_window_layers", 28, least=0) if windowed else count
        types = [SLIDING if i >= start else FULL for i in range(count)]
        found = windows_from_hf(inner, inner.window(None), types, count)
        size, types = found["sliding_window"], found["layer_types"] or [SLIDING] * count
        windows = tuple(size if x == SLIDING else None for x in types)
    verifier = HFFields(fields.objects("speculators_config")).objects("verifier")
    networks = verifier.get("architectures") or ()
    if not isinstance(networks, list | tuple) or not all(isinstance(x, str) for x in networks):
        raise UserError(f"architectures={networks!r} must be a list of names")
    deep = values.get("num_target_layers") is not None
    ours = HFFields(fields.objects("specjax"))
    crossing = ours.values.get("cross_layer") is not None
    return OpenedHead(
        path=place,
        reader=reader,
        values=values,
        format=format_,
        kind=kind,
        layers=config,
        width=fields.whole("target_hidden_size", config.embed_dim),
        num_layers=fields.whole("num_target_layers") if deep else None,
        verifier=verifier.get("name_or_path"),
        networks=tuple(networks),
        windows=windows,
        cross_layer=ours.whole("cross_layer", least=0) if crossing else None,
        fingerprint=ours.values.get("verifier_fingerprint"),
    )


def _opened_assistant(place: Path, reader: SafetensorsReader, fields: HFFields) -> OpenedHead:
    family = _ASSISTANTS[fields.values["model_type"]]
    fields.refuse("tie_word_embeddings", (True,), True)
    inner = fields.part("text_config", family)
    # All layers read the verifier's entries.
    changes = {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": None}
    config = FAMILIES[family].from_hf(HFFields({**inner.values, **changes}))
    assert isinstance(config, Gemma4Config)
    for name in ("layer_input_dim", "num_experts", "final_logit_softcap"):
        if getattr(config, name) is not None:
            raise UserError(f"text_config: an assistant has no {name}, got {getattr(config, name)}")
    return OpenedHead(
        path=place,
        reader=reader,
        values=fields.values,
        format="Gemma",
        kind="assistant",
        layers=config,
        width=fields.whole("backbone_hidden_size", 1536),
        num_layers=None,
        verifier=None,
        networks=(),
        # The window reaches back from the last committed token, whose entry is not there yet.
        windows=tuple(None if size is None else size + 1 for size in config.windows),
        cross_layer=None,
        fingerprint=None,
    )


def array_name(config: HeadConfig, layer: str, path: str) -> str:
    """The name of a parameter's array in a file, whose layers are named such as `layers.{i}`."""
    module, _, leaf = path.rpartition("/")
    if leaf == "mask":
        return _MASK
    if module.endswith("/mlp"):  # of experts
        module = path
    parts = re.match(r"(layers|input_norm|fc_norm)_(\d+)/?(.*)", module)
    if parts is None:
        table = _NAMES[config.kind]
        if module == "markov_gate":
            gate = "joint" if getattr(config, "markov", None) == "rnn" else "gate"
            stem = f"markov_head.{gate}_proj"
        else:
            stem = table[module].format(layer=layer.format(i=0))
    elif parts[1] == "fc_norm":
        stem = f"fc_norm.{parts[2]}"
    else:
        inner = _LAYER[parts[3]] if parts[1] == "layers" else "input_layernorm"
        stem = f"{layer.format(i=parts[2])}.{inner}"
    return f"{stem}.{'bias' if leaf == 'bias' else 'weight'}"


# How the arrays of a head's parameter may be stored; the first way is written.
def _stored(config: HeadConfig, layer: str, path: str) -> list[Renaming]:
    if config.kind == "assistant":
        family = family_of(config.layers)
        if path.startswith("layers_"):
            return family.hf_names(f"decoder/{path}")
        hf, transposed = _OF_ASSISTANT[path]
        return [Renaming(hf, path, transposed)]
    name = array_name(config, layer, path)
    *_, module, leaf = f"/{path}".split("/")
    if module == "mlp" and leaf in MLP.values():  # of experts: speculators joins them
        start, _, kernel = name.partition("mlp.")
        joined = Renaming(f"{start}mlp.experts.down_proj", path, T)
        if leaf != "wo":
            part = ("wi_0", "wi_1").index(leaf)
            joined = Renaming(f"{start}mlp.experts.gate_up_proj", path, T, part)
        return [joined, Renaming(f"{start}mlp.experts.{{e}}.{kernel}", path, T)]
    return [Renaming(name, path, module == "mlp" or leaf == "kernel")]


def load_draft_head(
    path: str | os.PathLike[str],
    verifier: Model,
    *,
    verifier_params: Params | None = None,
    dtype: Any = None,
    sharding: jax.sharding.Sharding | None = None,
    check_weights: bool = True,
) -> tuple[DraftHead, Params]:
    """Reads a draft head for a verifier.

    Args:
      path: a directory in one of the module's formats.
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
    kind = np.dtype(verifier.config.dtype if dtype is None else dtype)
    layers = dataclasses.replace(config.layers, dtype=kind, param_dtype=kind)
    head = draft_head(dataclasses.replace(config, layers=layers), verifier)
    shapes = {n: tuple(x.shape) for n, x in flatten(head.abstract_params()["network"]).items()}
    lines = {
        place: stored_as(opened.reader, _stored(config, opened.layer, place), shape)
        for place, shape in shapes.items()
    }
    expected, pieces = sources(opened.reader, config.layers, lines, shapes)
    maps = {}
    if config.draft_vocab is not None:
        maps = {_TO_TEXT: (config.draft_vocab,), _TO_DRAFT: (config.layers.vocab_size,)}
        maps = {name: shape for name, shape in maps.items() if name in opened.reader.specs}
    if isinstance(config, AssistantConfig) and config.clusters is not None:
        maps = {_ORDER: (config.layers.vocab_size,)}
    remedy = "Give the whole head, with its own config.json"
    check_same(opened.path, opened.reader.specs, {**expected, **maps}, remedy)
    for name in maps:
        spec = opened.reader.specs[name]
        if spec.dtype.kind not in ("iub" if name == _TO_DRAFT else "iu"):
            raise UserError(
                f"{opened.path}: {name} has dtype {spec.label}, but must have whole numbers: copy "
                "the checkpoint again"
            )
    check_floating(opened.path, {name: opened.reader.specs[name] for name in expected})
    where = jax.numpy.zeros(()).sharding if sharding is None else sharding
    network = materialise(
        opened.reader,
        pieces,
        dtype=kind,
        shardings=dict.fromkeys(shapes, where),
        check=check_weights,
    )
    params = {"network": network}
    if _ORDER in maps:
        clusters = _clusters(opened, config)
        params["clusters"] = jax.device_put(clusters, where)
    elif maps:
        places = _places(opened, maps)
        params["places"] = jax.device_put(places, where)
    return head, params


def _clusters(opened: OpenedHead, config: Any) -> np.ndarray:
    order = opened.reader.read(_ORDER)
    if not np.array_equal(np.sort(order), np.arange(order.size)):
        raise UserError(
            f"{opened.path}: {_ORDER} must have each of {order.size} tokens once: copy the "
            "checkpoint again"
        )
    return order.astype(np.int32).reshape(config.clusters, -1)


def _places(opened: OpenedHead, maps: Mapping[str, Any]) -> np.ndarray:
    size, offsets = opened.layers.vocab_size, opened.reader.read(_TO_TEXT)
    tokens = np.arange(offsets.size) + offsets.astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= size:
        raise UserError(
            f"{opened.path}: {_TO_TEXT} names token {tokens[(tokens < 0) | (tokens >= size)][0]}, "
            f"but the verifier has {size}: copy the checkpoint again"
        )
    mask = np.zeros(size, bool)
    mask[tokens] = True
    same = _TO_DRAFT not in maps or np.array_equal(mask, opened.reader.read(_TO_DRAFT))
    if mask.sum() != tokens.size or not same:
        raise UserError(
            f"{opened.path}: {_TO_TEXT} names a token twice, or others than {_TO_DRAFT}: copy the "
            "checkpoint again"
        )
    return places_of(tokens, size)


def fingerprint_of(verifier_params: Params) -> str:
    """Identifies a verifier by its norms and biases, which are small and never quantised."""
    vectors = {name: x for name, x in flatten(verifier_params).items() if len(x.shape) == 1}
    return digest(vectors, as_bfloat16=True)


def save_draft_head(
    path: str | os.PathLike[str],
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
    flat = flatten(params["network"])
    disk = common_dtype(x.dtype for x in flat.values()) if dtype is None else float_dtype(dtype)
    values = _speculators_config(head, verifier_name, disk, max_draft)
    if max_position_embeddings is not None:
        values["transformer_layer_config"]["max_position_embeddings"] = max_position_embeddings
    if verifier_params is not None:
        values["specjax"]["verifier_fingerprint"] = fingerprint_of(verifier_params)
    layer = "mtp_layers.{i}" if head.config.kind == "MTP" else "layers.{i}"
    parts: dict[str, list[Renaming]] = {}
    for place in flat:
        line = _stored(head.config, layer, place)[0]
        parts.setdefault(line.hf, []).append(line)
    arrays = {
        name: array_of(head.config.layers, sorted(lines, key=lambda x: x.part or 0), flat, disk)
        for name, lines in parts.items()
    }
    if "places" in params:
        places = np.asarray(params["places"])
        arrays[_TO_DRAFT] = places < head.config.rows
        tokens = np.argsort(places, kind="stable")[: head.config.rows]
        arrays[_TO_TEXT] = (tokens - np.arange(tokens.size)).astype(np.int64)
    if portable:
        assert verifier_params is not None
        _check_portable(head)
        rows = tokens if "places" in params else slice(None)
        shared = _shared_matrices(head, verifier_params, rows)
        arrays |= {name: copy_as(x, disk) for name, x in shared.items() if name not in arrays}
    with new_directory(Path(path), replace=replace) as directory:
        write_json(directory / "config.json", values)
        file = directory / SINGLE
        safetensors.numpy.save_file(arrays, file, metadata={"format": "pt"})
        # The library makes its files readable only by their owner.
        shutil.copymode(directory / "config.json", file)
        write_checksums(directory, lambda name: name == SINGLE)
        _check_readable(directory, head)
    return Path(path)


# Refuses a head of which the format does not keep all.
def _check_readable(directory: Path, head: DraftHead) -> None:
    read, ours = open_draft_head(directory).config_for(head.verifier), head.config
    # Layers are written as those of a model; a portable head has the verifier's matrices, too.
    names = {x.name for x in dataclasses.fields(ours)} - {"layers", "own_embedding", "own_output"}
    differing = [x for x in sorted(names) if getattr(read, x, None) != getattr(ours, x)]
    if differing:
        raise UserError(
            f"{ours.kind} head with {', '.join(f'{x}={getattr(ours, x)}' for x in differing)} "
            "cannot be written: speculators has no such format"
        )


def _check_portable(head: DraftHead) -> None:
    config, style, kind = head.config, head.verifier.config.style, head.config.kind
    wrong = None
    if config.cross_layer is not None or getattr(config, "mask_token", 0) is None:
        wrong = "reads an encoder's output, or has a mask that is learnt"
    elif kind != "EAGLE-3" and family_of(config.layers).name not in _MTP_LAYERS[1:]:
        wrong = "has other layers than Qwen 3's"
    elif (style.embed_scale, style.hidden_scale, style.final_softcap) != (1.0, 1.0, None):
        wrong = "is for a verifier that scales its embedding or its logits"
    if wrong is not None:
        raise UserError(f"this {kind} head {wrong}: speculators cannot read it")


def _shared_matrices(head: DraftHead, verifier_params: Params, rows: Any) -> dict[str, np.ndarray]:
    """What other servers do not take from the verifier, by its name in the file."""
    if head.config.kind == "MTP":
        return {}
    embedding = np.asarray(verifier_params["token_embedder"]["embedding"])
    tied = head.verifier.config.tie_embeddings
    kernel = None if tied else verifier_params["decoder"]["logits_dense"]["kernel"]
    output = {_OUTPUT: embedding[rows] if tied else np.asarray(kernel).T[rows]}
    return output if head.config.kind != "EAGLE-3" else {_EMBEDDING: embedding, **output}


def _speculators_config(
    head: DraftHead, verifier_name: str | None, dtype: np.dtype, drafts: int
) -> dict[str, Any]:
    config, theirs = head.config, head.verifier.config
    depth, kind = len(theirs.style.windows), config.kind
    names = {known: (name, network) for name, (known, network) in _SPECULATORS.items()}
    if kind not in names:
        raise UserError(f"an {kind} head cannot be written: speculators has no such format")
    name, network = names[kind]
    sizes = set(filter(None, config.windows))
    if len(sizes) > 1 or (sizes and getattr(config, "windows_move", False)):
        raise UserError(
            f"a {kind} head with windows that move with the slot, or of several sizes, cannot be "
            "written: speculators has no such format"
        )
    inner = config_to_hf(config.layers, SpecialIds(), dtype) | {
        "sliding_window": max(sizes, default=None),
        "use_sliding_window": bool(sizes),
        "layer_types": [FULL if x is None else SLIDING for x in config.windows],
    }
    values: dict[str, Any] = {}
    if kind == "MTP":
        # These fields are the verifier's.
        inner |= {"num_hidden_layers": depth, "layer_types": [FULL] * depth}
        values = {"num_nextn_predict_layers": 1}
    elif kind == "EAGLE-3":
        values = {flag: getattr(config, flag) for flag in _FLAGS}
        values |= {"eagle_aux_hidden_state_layer_ids": list(config.boundaries)}
    else:
        drafts = config.most_drafts
        values = {
            "aux_hidden_state_layer_ids": list(config.boundaries),
            "block_size": config.block_size,
            "mask_token_id": config.mask_token,
            "sample_from_anchor": config.from_anchor,
            "sliding_window_non_causal": not config.causal_windows,
        }
    if kind == "DSpark":
        values |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov or MARKOV[0],
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_reads_markov,
        }
    if kind != "MTP":
        narrow = config.layers.embed_dim != theirs.embed_dim
        values["draft_vocab_size"] = config.rows
        values["target_hidden_size"] = theirs.embed_dim if narrow else None
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": verifier_name,
        "architectures": [family_of(theirs).architectures[0]],
    }
    ours = {} if config.cross_layer is None else {"cross_layer": config.cross_layer}
    return {
        "architectures": [network],
        "speculators_model_type": name,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        "transformer_layer_config": inner,
        "num_target_layers": depth,
        "dtype": dtype.name,
        "tie_word_embeddings": False,
        **values,
        "specjax": ours,
    }
