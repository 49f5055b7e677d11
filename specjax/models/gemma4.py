"""Gemma 4 (text).

Layers with a window and without differ in the width of their heads, in the number of heads of keys
and values, and in their rotations, and those without may take their keys as values. The last layers
may attend to the keys and values of earlier ones. Each layer may have an input of its own from each
token (E2B, E4B), or experts beside its single block (26B-A4B). Checkpoints also have networks for
images and sounds, which are left out.

Source: Gemma Team 2026; `transformers/models/gemma4`, `gemma4_unified`. Published sizes:
`gemma/gm/nn/gemma4/_gemma4.py` of google-deepmind/gemma, the 12B `gemma4-12b.yml` of maxtext.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.models.config import LayerSpec, Routing, Style
from specjax.models.decoder_only import (
    FULL,
    SLIDING,
    RotaryConfig,
    decoder_only_family,
    decoder_only_names,
    llama_style,
    sizes,
    types_by_number,
    windows,
)
from specjax.models.family import Field, HFFields, Nested, Renaming, T, constants, field
from specjax.models.gemma import (
    CONSTANTS,
    SIZES,
    SPECIAL_IDS,
    VOCABULARY,
    refuse_scaling,
    shared_style,
)
from specjax.models.position_encoding import rope_frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(RotaryConfig):
    """The text network of a Gemma 4; `head_dim` and `num_kv_heads` are of layers with a window.

    Attributes:
      layer_types: the last layer is without a window.
      global_head_dim: the width of a head in layers without a window.
      num_global_kv_heads: the heads of keys and values there; None: `num_kv_heads`.
      keys_are_values: whether there the values are the keys before their norm and rotation.
      rope_theta: base of the rotary frequencies in layers without a window.
      local_rope_theta: base in layers with a window.
      rope_factor: the frequencies of layers without a window are divided by this.
      partial_rotary_factor: the part of the pairs of dimensions that these layers rotate: the first
        ones, with the frequencies that they have if all are rotated.
      num_shared_layers: so many last layers attend to the keys and values of the last layer before
        them that has the same type; None: none does.
      wide_shared_mlps: whether these layers have blocks of twice `mlp_dim`.
      layer_input_dim: P, see `Style.layer_input_dim`.
      num_experts: beside the block of each layer; None for none.
      num_experts_per_tok: how many of them a token uses.
      expert_dim: the width of each.
      final_logit_softcap: c in c·tanh(x / c) on the output logits; None for no cap.
    """

    tie_embeddings: bool = True
    rope_theta: float = 1e6
    local_rope_theta: float = 10_000.0
    rope_factor: float = 1.0
    partial_rotary_factor: float = 0.25
    global_head_dim: int = 512
    num_global_kv_heads: int | None = None
    keys_are_values: bool = False
    num_shared_layers: int | None = None
    wide_shared_mlps: bool = False
    layer_input_dim: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    expert_dim: int | None = None
    final_logit_softcap: float | None = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_scaling(self)
        if self.windows[-1] is not None:
            raise UserError(f"layer_types must end with {FULL}, as do all of Gemma 4")
        if self.num_heads % (self.num_global_kv_heads or 1):
            raise UserError(
                f"num_heads={self.num_heads} must be a multiple of "
                f"num_global_kv_heads={self.num_global_kv_heads}"
            )
        if self.global_head_dim % 2 or self.num_heads * self.global_head_dim > 2**20:
            raise UserError(
                f"global_head_dim={self.global_head_dim} must be even, and with "
                f"num_heads={self.num_heads} at most {2**20} wide"
            )
        first = max(self._first_shared, 0)
        if not set(self.windows[first:]) <= set(self.windows[:first]):
            raise UserError(
                f"num_shared_layers={self.num_shared_layers} of {self.num_layers} must leave a "
                "layer of each of their types in layer_types"
            )
        experts = self.num_experts, self.num_experts_per_tok, self.expert_dim
        if None in experts and any(experts):
            raise UserError(
                "num_experts, num_experts_per_tok and expert_dim must all be given, or none"
            )
        if (self.num_experts_per_tok or 0) > (self.num_experts or 0):
            raise UserError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be at most "
                f"num_experts={self.num_experts}"
            )

    @property
    def _first_shared(self) -> int:
        return self.num_layers - (self.num_shared_layers or 0)

    def of_layer(self, number: int) -> "Gemma4Config":
        sizes: dict[str, Any] = {}
        if self.windows[number] is None:
            heads = self.num_global_kv_heads or self.num_kv_heads
            sizes = {"head_dim": self.global_head_dim, "num_kv_heads": heads}
        if self.wide_shared_mlps and number >= self._first_shared:
            sizes["mlp_dim"] = 2 * self.mlp_dim
        return dataclasses.replace(self, **sizes)

    @property
    def style(self) -> Style:
        width, windows, first = self.global_head_dim, self.windows, self._first_shared
        every = rope_frequencies(width, self.rope_theta) / np.float32(self.rope_factor)
        every[int(self.partial_rotary_factor * width // 2) :] = 0.0
        local = rope_frequencies(self.head_dim, self.local_rope_theta)
        routing = None
        if self.num_experts and self.num_experts_per_tok and self.expert_dim:
            sizes = self.num_experts, self.num_experts_per_tok, self.expert_dim
            routing = Routing(*sizes, renormalised=True, beside_mlp=True)
        full = LayerSpec(
            rope=tuple(every.tolist()), routing=routing, keyed_values=self.keys_are_values
        )
        sliding = LayerSpec(rope=tuple(local.tolist()), routing=routing, window=self.sliding_window)
        layers = [full if window is None else sliding for window in windows]
        own = {layer: i for i, layer in enumerate(layers[:first])}
        layers[first:] = [dataclasses.replace(x, source=own[x]) for x in layers[first:]]
        return llama_style(
            self,
            layers,
            **{**shared_style(self.embed_dim), "plus_one_norms": False},
            query_scale=1.0,
            qk_norms="head",
            value_norms=True,
            post_norms=True,
            residual_scales=True,
            layer_input_dim=self.layer_input_dim,
            final_softcap=self.final_logit_softcap,
        )


_PER_LAYER = {"head_dim", "num_key_value_heads"}
# Hugging Face's names of fields, and ours.
_EXPERTS = {
    "num_experts": "num_experts",
    "top_k_experts": "num_experts_per_tok",
    "moe_intermediate_size": "expert_dim",
}


def _read_layer_input(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    width = fields.whole("hidden_size_per_layer_input", 256, least=0)
    rows = fields.whole("vocab_size_per_layer_input", 262_144)
    if width and rows != ours["vocab_size"]:
        raise UserError(
            f"vocab_size_per_layer_input={rows} must be vocab_size={ours['vocab_size']}, as "
            f"hidden_size_per_layer_input={width}"
        )
    return {"layer_input_dim": width or None}


def _write_layer_input(config: Gemma4Config) -> dict[str, Any]:
    return {
        "hidden_size_per_layer_input": config.layer_input_dim or 0,
        "vocab_size_per_layer_input": config.vocab_size,
    }


def _read_experts(fields: HFFields, _: Any) -> dict[str, Any]:
    if not fields.flag("enable_moe_block", False):
        return {}
    if missing := [name for name in _EXPERTS if fields.values.get(name) is None]:
        raise UserError(f"enable_moe_block is true, so {missing[0]} must be given")
    return {ours: fields.whole(name) for name, ours in _EXPERTS.items()}


def _write_experts(config: Gemma4Config) -> dict[str, Any]:
    sizes = {name: getattr(config, ours) for name, ours in _EXPERTS.items()}
    return {"enable_moe_block": config.num_experts is not None, **sizes}


# The sizes of layers without a window: in fields of their own, as published, or by layer, as
# transformers saves them.
def _read_global_sizes(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    name, types = "per_layer_config", ours["layer_types"] or (FULL,) * ours["num_layers"]
    if name not in fields.values:
        keyed = ours["keys_are_values"]
        heads = fields.values.get("num_global_key_value_heads") if keyed else None
        return {
            "global_head_dim": fields.whole("global_head_dim", 512),
            "num_global_kv_heads": heads and fields.whole("num_global_key_value_heads"),
        }
    layers = fields.objects(name)
    for key in layers:
        if not key.isdecimal() or int(key) >= len(types):
            raise UserError(f"{name} names {key!r}, but there are {len(types)} layers")
    given = {int(key): HFFields(layers).objects(key) for key in layers}
    changes = [given.get(number, {}) for number in range(len(types))]
    for number, (kind, change) in enumerate(zip(types, changes, strict=True)):
        if set(change) - _PER_LAYER:
            raise UserError(f"{name}: layer {number} has {change}, but may have {_PER_LAYER} only")
        if kind == SLIDING and change:
            raise UserError(
                f"{name}: layer {number}, of layer_types {kind!r}, has {change}, but must have {{}}"
            )
        if kind == FULL and change != changes[-1]:
            raise UserError(
                f"{name}: layers {number} and {len(types) - 1} have {change} and {changes[-1]}, "
                f"which must be the same: both have layer_types {kind!r}"
            )
    inner = HFFields({**{key: fields.values.get(key) for key in _PER_LAYER}, **changes[-1]})
    return {
        "global_head_dim": inner.whole("head_dim", 256),
        "num_global_kv_heads": inner.whole("num_key_value_heads", 4),
    }


def _write_global_sizes(config: Gemma4Config) -> dict[str, Any]:
    heads = config.num_global_kv_heads
    if heads not in (None, config.num_kv_heads) and not config.keys_are_values:
        raise UserError(
            f"num_global_kv_heads={heads} must be num_kv_heads={config.num_kv_heads} without "
            "keys_are_values for transformers to read the model; convert it to orbax"
        )
    return {"global_head_dim": config.global_head_dim, "num_global_key_value_heads": heads}


def _read_ropes(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    name, types = "rope_parameters", ours["layer_types"] or (FULL,)
    both = fields.objects(name)
    if fields.values.get(name) is None:
        return {}
    kinds = {kind for kind in both if both[kind]}
    if wrong := sorted(kinds - {FULL, SLIDING}) or sorted(set(types) - kinds):
        raise UserError(f"{name} must have an object for each of layer_types: see {wrong[0]!r}")
    every, local = (HFFields(HFFields(both).objects(kind)) for kind in (FULL, SLIDING))
    every.refuse("rope_type", ("proportional", "default"), None)
    changes: dict[str, Any] = {"partial_rotary_factor": 1.0}
    if every.values.get("rope_type") == "proportional":
        changes = {
            "partial_rotary_factor": every.positive("partial_rotary_factor", 1.0),
            "rope_factor": every.positive("factor", 1.0),
        }
    if SLIDING in types:
        local.refuse("rope_type", ("default",), None)
        changes["local_rope_theta"] = local.positive("rope_theta")
    return {**changes, "rope_theta": every.positive("rope_theta")}


def _write_ropes(config: Gemma4Config) -> dict[str, Any]:
    return {
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": config.partial_rotary_factor,
                "factor": config.rope_factor,
                "rope_theta": config.rope_theta,
            },
            SLIDING: {"rope_type": "default", "rope_theta": config.local_rope_theta},
        },
    }


_HF, _OURS = "model.layers.{i}", "decoder/layers_{i}"
_NAMES = (
    *decoder_only_names(
        {
            "input_layernorm": "pre_self_attention_layer_norm",
            "post_attention_layernorm": "post_self_attention_layer_norm",
            "pre_feedforward_layernorm": "pre_mlp_layer_norm",
            "post_feedforward_layernorm": "post_mlp_layer_norm",
            "post_feedforward_layernorm_1": "post_mlp_norm",
            "post_feedforward_layernorm_2": "post_experts_norm",
            "pre_feedforward_layernorm_2": "pre_experts_layer_norm",
            "post_per_layer_input_norm": "post_input_layer_norm",
        }
    ),
    Renaming(f"{_HF}.per_layer_input_gate.weight", f"{_OURS}/input_gate/kernel", T),
    Renaming(f"{_HF}.per_layer_projection.weight", f"{_OURS}/input_out/kernel", T),
    Renaming(f"{_HF}.layer_scalar", f"{_OURS}/residual_scale"),
    Renaming(f"{_HF}.router.scale", f"{_OURS}/router_norm/scale"),
    Renaming(f"{_HF}.router.proj.weight", f"{_OURS}/experts/router", T),
    Renaming(f"{_HF}.router.per_expert_scale", f"{_OURS}/experts/share_scales"),
    Renaming(f"{_HF}.experts.gate_up_proj", f"{_OURS}/experts/wi_0", T, 0),
    Renaming(f"{_HF}.experts.gate_up_proj", f"{_OURS}/experts/wi_1", T, 1),
    Renaming(f"{_HF}.experts.down_proj", f"{_OURS}/experts/wo", T),
    Renaming("model.embed_tokens_per_layer.weight", "layer_inputs/embedding"),
    Renaming("model.per_layer_model_projection.weight", "layer_inputs/projection/kernel", T),
    Renaming("model.per_layer_projection_norm.weight", "layer_inputs/norm/scale"),
)


def _nested(model_type: str, architecture: str) -> Nested:
    return Nested(
        model_type=model_type,
        architectures=(architecture,),
        field="text_config",
        prefixes={"model.language_model.": "model."},
        others=r"model\.(vision_tower|audio_tower|vision_embedder|embed_vision|embed_audio)\..*",
    )


def _fields(size: int, layer_input: Field, experts: Field) -> tuple[Field, ...]:
    return (
        constants(CONSTANTS),
        # Of texts alone, "vision" changes nothing.
        constants({"use_bidirectional_attention": (None, "vision")}, written=False),
        *sizes(any_heads=True, **SIZES, vocab_size=262_144, num_hidden_layers=30),
        windows(
            lambda _, ours: (*types_by_number(ours["num_layers"], 6)[:-1], FULL), size, unused=512
        ),
        layer_input,
        experts,
        field("attention_k_eq_v", "keys_are_values", HFFields.flag, False),
        Field(_read_global_sizes, _write_global_sizes),
        Field(_read_ropes, _write_ropes),
        field(
            "num_kv_shared_layers",
            "num_shared_layers",
            lambda fields, name: fields.whole(name, 0, least=0) or None,
            write=lambda config: config.num_shared_layers or 0,
        ),
        field("use_double_wide_mlp", "wide_shared_mlps", HFFields.flag, False),
        field("final_logit_softcapping", "final_logit_softcap", HFFields.positive, None),
    )


_family = functools.partial(
    decoder_only_family,
    special_ids=SPECIAL_IDS,
    names=_NAMES,
    # Released files also have these of layers that attend to another's.
    unused=r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight",
    vocabulary=VOCABULARY,
)


# A network in which each `every`-th layer is without a window.
def _size(kind: Any, window: int, *sizes: int, every: int = 6, **others: Any) -> Gemma4Config:
    types = types_by_number(sizes[-1], every)
    return kind.of(262_144, *sizes, sliding_window=window, layer_types=types, **others)


_dense = functools.partial(_size, Gemma4Config)
_keyed = functools.partial(_dense, 1_024, keys_are_values=True)

GEMMA4 = _family(
    "gemma4_text",
    config=Gemma4Config,
    architectures=("Gemma4ForCausalLM",),
    fields=_fields(
        512, Field(_read_layer_input, _write_layer_input), Field(_read_experts, _write_experts)
    ),
    nested=_nested("gemma4", "Gemma4ForConditionalGeneration"),
    presets={
        "gemma4_e2b": _dense(
            512, 1_536, 8, 1, 256, 6_144, 35,
            every=5, layer_input_dim=256, num_shared_layers=20, wide_shared_mlps=True,
        ),
        "gemma4_e4b": _dense(
            512, 2_560, 8, 2, 256, 10_240, 42, layer_input_dim=256, num_shared_layers=18
        ),
        "gemma4_31b": _keyed(5_376, 32, 16, 256, 21_504, 60, num_global_kv_heads=4),
        "gemma4_26b_a4b": _keyed(
            2_816, 16, 8, 256, 2_112, 30,
            num_global_kv_heads=2, num_experts=128, num_experts_per_tok=8, expert_dim=704,
        ),
    },
)  # fmt: skip


class Gemma4UnifiedConfig(Gemma4Config):
    """The text network of a Gemma 4 without encoders of images and sounds."""


GEMMA4_UNIFIED = _family(
    "gemma4_unified_text",
    config=Gemma4UnifiedConfig,
    architectures=("Gemma4UnifiedForCausalLM",),
    # Its files are not read for an input of layers and experts.
    fields=_fields(1_024, Field(write=_write_layer_input), Field(write=_write_experts)),
    nested=_nested("gemma4_unified", "Gemma4UnifiedForConditionalGeneration"),
    presets={
        "gemma4_12b": _size(
            Gemma4UnifiedConfig, 1_024, 3_840, 16, 8, 256, 15_360, 48,
            num_global_kv_heads=1, keys_are_values=True,
        ),
    },
)  # fmt: skip
