"""Reads draft heads: EAGLE's own, speculators (eagle3, dflash, dspark, mtp), DFlash, DeepSpec.

Each format numbers the verifier's states in its own way. EAGLE fixes them (2, L // 2, L - 3);
speculators names boundaries (see `specjax.types.LanguageModel.reading`); DFlash and DeepSpec name
the layers whose outputs they are, one less.
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
from specjax.models.decoder_only import SLIDING
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
        inner = (self.values.get("speculators_config") or {}).get("verifier") or {}
        if (stated := inner.get("architectures")) and not set(stated) & set(family):
            differing.append(f"the network {stated[0]}, not {family[0]}")
        if not differing:
            boundaries = self._boundaries(depth)
            most = depth + (1 if self.kind in ("MTP", "EAGLE-1") else 0)
            if not all(0 <= boundary <= most for boundary in boundaries):
                differing = [f"states {list(boundaries)} of its layers, of which it has {depth}"]
        if differing:
            raise UserError(
                f"{self.path} is a head for another verifier{named}, which has "
                f"{', '.join(differing)}: give its own verifier"
            )
        return self._config(boundaries)

    def _boundaries(self, depth: int) -> tuple[int, ...]:
        if self.kind in ("MTP", "EAGLE-1"):
            return (depth + 1,)
        inner = self.values.get("dflash_config") or self.values.get("eagle_config") or {}
        layers = inner.get("target_layer_ids", self.values.get("target_layer_ids"))
        ids = None
        for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
            ids = ids or self.values.get(name) or inner.get(name)
        if layers is not None:
            ids = [layer + 1 for layer in layers]
            if depth in ids:
                raise UserError(
                    f"{self.path}: target_layer_ids={layers} names the last layer, whose output "
                    "some projects normalise and some do not: it is not supported"
                )
        if ids is None and self.kind == "EAGLE-3":
            ids = sorted({2, depth // 2, depth - 3})
        elif ids is None:
            count = self.layers.num_layers
            steps = [i * (depth - 4) / max(count - 1, 1) for i in range(count)]
            ids = [round(1 + step) + 1 for step in steps] if count > 1 else [depth // 2 + 1]
        # speculators' launcher may name one more, for its training.
        count = self._shape("fc.weight")[1] // self.width
        return tuple(ids[:count])

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.reader.specs:
            raise UserError(f"{self.path}: 1 array missing: {name}. Copy the whole checkpoint")
        return self.reader.specs[name].shape

    def _config(self, boundaries: tuple[int, ...]) -> HeadConfig:
        fields, specs = HFFields(self.values, self.path / "config.json"), self.reader.specs
        mapped = _TO_TEXT in specs
        common: dict[str, Any] = {
            "layers": self.layers,
            "boundaries": boundaries,
            "windows": self._windows(),
            "draft_vocab": self._shape(_TO_TEXT)[0] if mapped else None,
            "own_embedding": "embed_tokens.weight" in specs,
            "own_output": "lm_head.weight" in specs,
        }
        wanted = fields.whole("draft_vocab_size", self.layers.vocab_size)
        if wanted != (common["draft_vocab"] or self.layers.vocab_size):
            raise UserError(
                f"{self.path}: draft_vocab_size={wanted} needs the array {_TO_TEXT} of as many "
                "tokens: copy the whole checkpoint"
            )
        if self.kind in ("MTP", "EAGLE-1"):
            plain = self.kind == "EAGLE-1"
            common |= {"norms": not plain, "norm_output": not plain, "projects": True}
            return EagleConfig(**common, fc_bias="fc.bias" in specs)
        if self.kind == "EAGLE-3":
            names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            return EagleConfig(**common | {name: fields.flag(name, False) for name in names})
        inner = HFFields({**self.values, **(self.values.get("dflash_config") or {})}, fields.name)
        markov = None
        if (rank := inner.whole("markov_rank", 0, least=0)) > 0:
            markov = self.values.get("markov_head_type", MARKOV[0])
            inner.refuse("markov_head_type", MARKOV, MARKOV[0])
        deep = self.format == "DeepSpec"
        return BlockConfig(
            **common,
            block_size=inner.whole("block_size", least=2),
            mask_token=inner.whole("mask_token_id", least=0),
            from_anchor=fields.flag("sample_from_anchor", deep or self.kind == "DSpark"),
            causal_windows=not fields.flag("sliding_window_non_causal", False),
            markov=markov,
            markov_rank=rank,
            confidence=fields.flag("enable_confidence_head", False),
            confidence_reads_markov=fields.flag("confidence_head_with_markov", False) and rank > 0,
        )

    def _windows(self) -> tuple[int | None, ...]:
        values = self.values.get("transformer_layer_config") or self.values
        kinds = values.get("layer_types") or []
        count = self.layers.num_layers
        windows = [values.get("sliding_window") if x == SLIDING else None for x in kinds[:count]]
        return tuple(windows) or (None,) * count


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
    theirs = values.get("speculators_model_type")
    if theirs is not None:
        kinds = {"eagle3": "EAGLE-3", "mtp": "MTP", "dflash": "DFlash", "dspark": "DSpark"}
        if theirs not in kinds:
            raise UserError(
                f"{file}: speculators_model_type={theirs!r} must be one of {', '.join(kinds)}"
            )
        format_, kind = "speculators", kinds[theirs]
    elif values.get("dflash_config") is not None:
        format_, kind = "DFlash", "DFlash"
    elif values.get("target_layer_ids") is not None:
        format_, kind = "DeepSpec", "DSpark"
    else:
        eagle3 = "midlayer.input_layernorm.weight" in reader.specs or "norm.weight" in reader.specs
        format_, kind = "EAGLE", "EAGLE-3" if eagle3 else "EAGLE-1"
    inner = values.get("transformer_layer_config") if theirs is not None else values
    if not isinstance(inner, dict) or inner.get("model_type") not in _LAYERS:
        found = inner.get("model_type") if isinstance(inner, dict) else inner
        raise UserError(
            f"{file}: layers of model_type {found!r} are not supported in a head, only "
            f"{' and '.join(_LAYERS)}"
        )
    if kind == "MTP":  # the fields are the verifier's
        inner = {**inner, "num_hidden_layers": 1, "layer_types": None}
    else:
        # Windows are read in `OpenedHead`.
        inner = {**inner, "layer_types": None, "use_sliding_window": False}
    config = HFFields(inner, file).read(FAMILIES[inner["model_type"]].from_hf)
    assert isinstance(config, DecoderOnlyConfig)
    verifier = ((values.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return OpenedHead(
        path=place,
        reader=reader,
        values=values,
        format=format_,
        kind=kind,
        layers=config,
        width=HFFields(values, file).whole("target_hidden_size", config.embed_dim),
        num_layers=values.get("num_target_layers"),
        verifier=verifier,
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
