"""Reads draft heads: EAGLE's own, speculators (eagle3, dflash, dspark, mtp), DFlash, DeepSpec.

Each format numbers the verifier's states in its own way. EAGLE fixes them (2, L // 2, L - 3);
speculators names boundaries (see `specjax.types.LanguageModel.reading`); `target_layer_ids` of
DFlash and DeepSpec, and the ids in the `eagle_config` of SpecForge and SGLang, name the layers
whose outputs they are, one less.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoints.arrays import (
    Piece,
    check_floating,
    check_same,
    flatten,
    materialise,
)
from specjax.checkpoints.hf import SINGLE, SafetensorsReader
from specjax.errors import UserError
from specjax.models import FAMILIES, DecoderOnlyConfig, HFFields, Model, family_of
from specjax.models.decoder_only import FULL, SLIDING, windows_from_hf
from specjax.models.family import HEADS, MLP
from specjax.models.heads import (
    MARKOV,
    BlockConfig,
    DraftHead,
    EagleConfig,
    HeadConfig,
    draft_head,
    places_of,
)
from specjax.tokenizers.model_files import read_json, read_json_if_there
from specjax.types import Params

# The families of which a head's layers may be.
_LAYERS = ("llama", "qwen3")
_LAYER = {
    **{f"self_attention/{ours}": f"self_attn.{theirs}_proj" for theirs, ours in HEADS.items()},
    **{f"self_attention/{ours}_norm": f"self_attn.{x}_norm" for x, ours in HEADS.items()},
    **{f"mlp/{ours}": f"mlp.{theirs}_proj" for theirs, ours in MLP.items()},
    "pre_mlp_layer_norm": "post_attention_layernorm",
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


def is_draft_head(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a draft head, by its `config.json`, or by its arrays (EAGLE-1)."""
    values = read_json_if_there(Path(path) / "config.json")
    marks = ("speculators_model_type", "draft_vocab_size", "dflash_config", "target_layer_ids")
    if any(values.get(mark) is not None for mark in marks):
        return True
    if values.get("model_type") not in _LAYERS or not (Path(path) / SINGLE).is_file():
        return False
    return "fc.weight" in SafetensorsReader(Path(path)).specs


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

    @property
    def layer(self) -> str:
        """How its arrays name a layer."""
        if self.kind == "MTP":
            return "mtp_layers.{i}"
        own = any(name.startswith("midlayer.") for name in self.reader.specs)
        return "midlayer" if own else "layers.{i}"

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
        named = "" if self.verifier is None else f" ({self.verifier})"
        family = family_of(theirs).architectures
        if self.networks and not set(self.networks) & set(family):
            differing.append(f"the network {self.networks[0]}, not {family[0]}")
        fields = HFFields(self.values, self.path / "config.json")
        if not differing:
            boundaries = fields.read(lambda x: self._boundaries(x, depth))
            if self.kind not in ("MTP", "EAGLE-1"):
                # speculators' launcher may name one more, for its training.
                boundaries = boundaries[: self._shape("fc.weight", 2)[1] // self.width]
            most = depth + (1 if self.kind in ("MTP", "EAGLE-1") else 0)
            if not all(0 <= boundary <= most for boundary in boundaries):
                differing = [f"states {list(boundaries)} of its layers, of which it has {depth}"]
        if differing:
            raise UserError(
                f"{self.path} is a head for another verifier{named}, which has "
                f"{', '.join(differing)}: give its own verifier"
            )
        count = None
        if _TO_TEXT in self.reader.specs:
            (count,) = self._shape(_TO_TEXT, 1)
            self._shape("lm_head.weight", 2)  # its rows are those tokens
        return fields.read(lambda x: self._config(x, boundaries, count))

    def _boundaries(self, fields: HFFields, depth: int) -> tuple[int, ...]:
        if self.kind in ("MTP", "EAGLE-1"):
            return (depth + 1,)
        blocks, eagle = fields.objects("dflash_config"), fields.objects("eagle_config")
        outputs = {
            "target_layer_ids": {**self.values, **blocks},
            "eagle_aux_hidden_state_layer_ids": eagle,
        }
        for name, values in outputs.items():
            if (layers := _whole_numbers(values, name)) is None:
                continue
            if depth - 1 in layers:
                raise UserError(
                    f"{name}={layers} names the last layer, whose output some projects normalise "
                    "and some do not: it is not supported"
                )
            return tuple(layer + 1 for layer in layers)
        for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
            if (ids := _whole_numbers(self.values, name)) is not None:
                return tuple(ids)
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
            "own_embedding": "embed_tokens.weight" in specs,
            "own_output": "lm_head.weight" in specs,
        }
        wanted = fields.whole("draft_vocab_size", vocab)
        if wanted != (draft_vocab or vocab):
            raise UserError(
                f"draft_vocab_size={wanted} needs the array {_TO_TEXT} of as many tokens: copy the "
                "whole checkpoint"
            )
        projects = self.kind in ("MTP", "EAGLE-1")
        alone = common["own_embedding"] and common["own_output"] and not projects
        if width != self.width and not alone:
            raise UserError(
                f"hidden_size={width} must be that of the verifier, {self.width}, whose embedding "
                "or output this head uses"
            )
        if projects:
            plain = self.kind == "EAGLE-1"
            common |= {"norms": not plain, "norm_output": not plain, "projects": True}
            return EagleConfig(**common, fc_bias="fc.bias" in specs)
        if self.kind == "EAGLE-3":
            names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            return EagleConfig(**common | {name: fields.flag(name, False) for name in names})
        inner = _of_blocks(fields)
        rank, size = inner.whole("markov_rank", 0, least=0), inner.whole("block_size", least=2)
        if rank:
            inner.refuse("markov_head_type", MARKOV, MARKOV[0])
        mask = inner.whole("mask_token_id", least=0)
        if mask >= vocab:
            raise UserError(f"mask_token_id={mask} must be below {vocab}, the number of tokens")
        moves, shortest = self.format == "DFlash", min(filter(None, self.windows), default=size)
        if moves and shortest < size:
            raise UserError(
                f"sliding_window={shortest} must be at least block_size={size}: what a block sees "
                "of itself is not defined below"
            )
        judges = inner.flag("enable_confidence_head", False)
        own_slot = self.kind == "DSpark" or rank > 0 or judges
        return BlockConfig(
            **common,
            block_size=size,
            mask_token=mask,
            from_anchor=inner.flag("sample_from_anchor", own_slot),
            causal_windows=not inner.flag("sliding_window_non_causal", False),
            windows_move=moves,
            markov=(inner.values.get("markov_head_type") or MARKOV[0]) if rank else None,
            markov_rank=rank,
            confidence=judges,
            confidence_reads_markov=inner.flag("confidence_head_with_markov", False) and rank > 0,
        )


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
    reader = SafetensorsReader(place)
    return HFFields(values, file).read(lambda fields: _opened(place, reader, fields))


def _opened(place: Path, reader: SafetensorsReader, fields: HFFields) -> OpenedHead:
    values, blocks = fields.values, _of_blocks(fields)
    theirs = values.get("speculators_model_type")
    if theirs is not None:
        kinds = {"eagle3": "EAGLE-3", "mtp": "MTP", "dflash": "DFlash", "dspark": "DSpark"}
        fields.refuse("speculators_model_type", tuple(kinds), None)
        format_, kind = "speculators", kinds[theirs]
    elif values.get("dflash_config") is not None:
        format_, kind = "DFlash", "DFlash"
        if blocks.whole("markov_rank", 0, least=0) or blocks.flag("enable_confidence_head"):
            kind = "DSpark"
    elif values.get("target_layer_ids") is not None:
        format_, kind = "DeepSpec", "DSpark"
    else:
        eagle3 = "midlayer.input_layernorm.weight" in reader.specs or "norm.weight" in reader.specs
        format_, kind = "EAGLE", "EAGLE-3" if eagle3 else "EAGLE-1"
    inner = fields if theirs is None else HFFields(fields.objects("transformer_layer_config"))
    if (family := inner.values.get("model_type")) not in _LAYERS:
        raise UserError(
            f"layers of model_type {family!r} are not supported in a head, only "
            f"{' and '.join(_LAYERS)}"
        )
    # Windows are the head's own, see `HeadConfig`.
    changes: dict[str, Any] = {"layer_types": None, "use_sliding_window": False}
    if kind == "MTP":  # the fields are the verifier's
        changes["num_hidden_layers"] = 1
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
    )


def array_name(config: HeadConfig, layer: str, path: str) -> str:
    """The name of a parameter's array in a file, whose layers are named such as `layers.{i}`."""
    module, _, leaf = path.rpartition("/")
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


def load_draft_head(
    path: str | os.PathLike[str],
    verifier: Model,
    *,
    dtype: Any = None,
    sharding: jax.sharding.Sharding | None = None,
    check_weights: bool = True,
) -> tuple[DraftHead, Params]:
    """Reads a draft head for a verifier.

    Args:
      path: a directory in one of the module's formats.
      verifier: its verifier's network.
      dtype: of parameters and activations; by default that of the verifier's activations.
      sharding: of all its arrays; by default the first device's.
      check_weights: whether to search the arrays for NaN and infinity.

    Raises:
      FileNotFoundError: a file is missing.
      UserError: an array is missing, unknown or wrong, or the head is another verifier's.
    """
    opened = open_draft_head(path)
    config = opened.config_for(verifier)
    kind = np.dtype(verifier.config.dtype if dtype is None else dtype)
    layers = dataclasses.replace(config.layers, dtype=kind, param_dtype=kind)
    head = draft_head(dataclasses.replace(config, layers=layers), verifier)
    shapes = {n: tuple(x.shape) for n, x in flatten(head.abstract_params()["network"]).items()}
    expected, pieces = {}, {}
    for place, shape in shapes.items():
        name = array_name(config, opened.layer, place)
        transposed = place.endswith("kernel")
        expected[name] = shape[::-1] if transposed else shape
        pieces[place] = Piece(name, np.transpose if transposed else np.asarray)
    maps = {}
    if config.draft_vocab is not None:
        maps = {_TO_TEXT: (config.draft_vocab,), _TO_DRAFT: (config.layers.vocab_size,)}
        maps = {name: shape for name, shape in maps.items() if name in opened.reader.specs}
    remedy = "Give the whole head, with its own config.json"
    check_same(opened.path, opened.reader.specs, {**expected, **maps}, remedy)
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
    if maps:
        places = _places(opened, maps)
        params["places"] = jax.device_put(places, where)
    return head, params


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
