"""Qwen3-Next and Qwen 3.5, dense and with experts.

Three of four layers are gated delta networks; the others have attention with a gate, which rotates
a part of each head. Beside the experts of a layer, one that all tokens share has a gate, too.

Sources: Qwen Team 2025 and 2026; `transformers/models/qwen3_next`, `qwen3_5`, `qwen3_5_moe`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from specjax.errors import UserError
from specjax.models.config import DecoderOnlyConfig, DeltaSizes, LayerSpec, Routing, Style
from specjax.models.decoder_only import (
    EXPERTS_NAMES,
    FULL,
    LLAMA_NAMES,
    ROPE_PARTS,
    UNBIASED,
    WithExperts,
    decoder_only_family,
    experts,
    llama_rope,
    llama_style,
    rope,
    rotary_fields,
    types_by_number,
)
from specjax.models.family import (
    MLP,
    Field,
    HFFields,
    Nested,
    Renaming,
    T,
    constants,
    field,
    only,
    renamings,
)
from specjax.models.qwen import sparse_fields
from specjax.models.rope_scaling import RopeScaling

LINEAR = "linear_attention"
# The sizes of a gated delta network, named as in Hugging Face's files.
_LINEAR_SIZES = (
    "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35Config(DecoderOnlyConfig):
    """The text network of a dense Qwen 3.5.

    Attributes:
      layer_types: for each layer, "linear_attention", a gated delta network, or "full_attention",
        of which there is at least one; empty: every fourth layer has full attention.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how they are changed for longer texts.
      partial_rotary_factor: the part of each head that is rotated.
      linear_num_key_heads: of a gated delta network; its queries have as many.
      linear_conv_kernel_dim: the tokens that its convolutions see.
    """

    layer_types: tuple[str, ...] = ()
    rope_theta: float = 1e7
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 0.25
    linear_num_key_heads: int = 16
    linear_key_head_dim: int = 128
    linear_num_value_heads: int = 32
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4

    parts: ClassVar[Mapping[str, Any]] = ROPE_PARTS

    def __post_init__(self) -> None:
        super().__post_init__()
        types = self.layer_types
        known = isinstance(types, list | tuple) and all(kind in (LINEAR, FULL) for kind in types)
        if not known:
            raise UserError(f"layer_types={types!r} may only name {LINEAR} and {FULL}")
        types = tuple(types) or types_by_number(self.num_layers, 4, LINEAR)
        if len(types) != self.num_layers or FULL not in types:
            raise UserError(
                f"layer_types={types} must have {self.num_layers} names, of the "
                f"num_layers={self.num_layers} layers, with a {FULL}"
            )
        object.__setattr__(self, "layer_types", types)
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise UserError(
                f"linear_num_value_heads={self.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise UserError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} "
                "must be an even number of dimensions"
            )

    @property
    def rotary_dim(self) -> int:
        """The dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def style(self) -> Style:
        delta = DeltaSizes(*(getattr(self, name) for name in _LINEAR_SIZES))
        rope = llama_rope(self, self.rotary_dim)
        kinds = {LINEAR: LayerSpec(rope=rope, delta=delta), FULL: LayerSpec(rope=rope)}
        return llama_style(
            self,
            map(kinds.__getitem__, self.layer_types),
            qk_norms="head",
            gated=True,
            plus_one_norms=True,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(WithExperts, Qwen35Config):
    """The text network of a Qwen 3.5 with experts.

    Attributes:
      shared_expert_dim: the width of the expert that all tokens use.
    """

    shared_expert_dim: int
    renormalised: bool = True

    @property
    def routing(self) -> Routing:
        return super().routing._replace(shared_dim=self.shared_expert_dim)


class Qwen3NextConfig(Qwen35MoeConfig):
    """A Qwen3-Next. Published sizes have experts in all layers."""


_ROPE, _FACTOR = rope(262_144), "partial_rotary_factor"


def _read_rope(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    parameters = fields.objects("rope_parameters")
    rotated = HFFields(parameters).positive(_FACTOR, fields.positive(_FACTOR, 0.25))
    whole = {**fields.values, _FACTOR: None, "rope_parameters": {**parameters, _FACTOR: None}}
    return {**_ROPE.read(HFFields(whole), ours), _FACTOR: rotated}


def _write_rope(config: Qwen35Config) -> dict[str, Any]:
    values = dict(_ROPE.write(config))
    del values["rope_scaling"]  # it would replace the parameters
    values["rope_parameters"][_FACTOR] = config.partial_rotary_factor
    return values


def _read_types(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    types = fields.values.get("layer_types")
    if types is None:
        interval = fields.whole("full_attention_interval", 4)
        types = types_by_number(ours["num_layers"], interval, LINEAR)
    return {"layer_types": types}


def _fields(**absent: Any) -> tuple[Field, ...]:
    return (
        *rotary_fields(
            UNBIASED, Field(_read_rope, _write_rope), any_heads=True, head_dim=256, **absent
        ),
        constants({"attn_output_gate": (True,)}, written=False),
        Field(_read_types, lambda config: {"layer_types": list(config.layer_types)}),
        *(field(x, x, HFFields.whole, getattr(Qwen35Config, x)) for x in _LINEAR_SIZES),
    )


_SHARED = field("shared_expert_intermediate_size", "shared_expert_dim", HFFields.whole, 512)


_HF, _OURS = "model.layers.{i}.linear_attn", "decoder/layers_{i}/delta"
_JOINED = ("query", "key", "value")
_SHARED_NAMES = (
    *(
        Renaming(f"{_HF}.conv1d.weight", f"{_OURS}/{name}_conv/kernel", part=i)
        for i, name in enumerate(_JOINED)
    ),
    Renaming(f"{_HF}.A_log", f"{_OURS}/log_rate"),
    Renaming(f"{_HF}.dt_bias", f"{_OURS}/rate_bias"),
    *renamings(_HF, _OURS, {"out_proj": "out"}, {"norm": "norm"}),
)
_QWEN35_NAMES = (
    *(
        Renaming(f"{_HF}.in_proj_qkv.weight", f"{_OURS}/{name}/kernel", T, part=i)
        for i, name in enumerate(_JOINED)
    ),
    *renamings(_HF, _OURS, {"in_proj_z": "gate", "in_proj_b": "beta", "in_proj_a": "decay"}, {}),
    *_SHARED_NAMES,
)
# In order for each head of the keys.
_NEXT_NAMES = (
    *(
        Renaming(f"{_HF}.in_proj_{hf}.weight", f"{_OURS}/{name}/kernel", T, i, _LINEAR_SIZES[0])
        for hf, names in (("qkvz", (*_JOINED, "gate")), ("ba", ("beta", "decay")))
        for i, name in enumerate(names)
    ),
    *_SHARED_NAMES,
)
_HF, _OURS = "model.layers.{i}.mlp", "decoder/layers_{i}/mlp"
_MOE_NAMES = (
    *EXPERTS_NAMES,
    # Published files of Qwen 3.5 have the experts of a layer in two arrays.
    Renaming(f"{_HF}.experts.gate_up_proj", f"{_OURS}/wi_0", T, part=0),
    Renaming(f"{_HF}.experts.gate_up_proj", f"{_OURS}/wi_1", T, part=1),
    Renaming(f"{_HF}.experts.down_proj", f"{_OURS}/wo", T),
    *renamings(
        f"{_HF}.shared_expert", f"{_OURS}/shared", {f"{a}_proj": b for a, b in MLP.items()}, {}
    ),
    Renaming(f"{_HF}.shared_expert_gate.weight", f"{_OURS}/shared_gate", T),
)
_MTP = r"mtp\..*"  # a draft head

_size = functools.partial(Qwen35Config.of, 248_320)
_small = functools.partial(_size, tie_embeddings=True, linear_num_value_heads=16)

QWEN35 = decoder_only_family(
    "qwen3_5_text",
    config=Qwen35Config,
    architectures=("Qwen3_5ForCausalLM",),
    names=(*LLAMA_NAMES, *_QWEN35_NAMES),
    fields=_fields(num_key_value_heads=4),
    unused=_MTP,
    nested=Nested(
        model_type="qwen3_5",
        architectures=("Qwen3_5ForConditionalGeneration",),
        field="text_config",
        prefixes={"model.language_model.": "model."},
        others=r"(model\.visual|mtp)\..*",
    ),
    presets={
        "qwen3.5_0.8b": _small(1_024, 8, 2, 256, 3_584, 24),
        "qwen3.5_2b": _small(2_048, 8, 2, 256, 6_144, 24),
        "qwen3.5_4b": _size(2_560, 16, 4, 256, 9_216, 32, tie_embeddings=True),
        "qwen3.5_9b": _size(4_096, 16, 4, 256, 12_288, 32),
        "qwen3.5_27b": _size(5_120, 24, 4, 256, 17_408, 64, linear_num_value_heads=48),
    },
)

_moe_size = functools.partial(
    Qwen35MoeConfig.of, 248_320, num_experts=256, num_experts_per_tok=8, shared_expert_dim=1_024
)

assert QWEN35.nested is not None
QWEN35_MOE = decoder_only_family(
    "qwen3_5_moe_text",
    config=Qwen35MoeConfig,
    architectures=("Qwen3_5MoeForCausalLM",),
    names=(*_MOE_NAMES, *_QWEN35_NAMES),
    fields=(
        *_fields(num_key_value_heads=2, mlp="moe_intermediate_size", moe_intermediate_size=512),
        *experts(256, 8),
        _SHARED,
        only(dense_layers=(), expert_dim=None, renormalised=True),
    ),
    unused=_MTP,
    nested=dataclasses.replace(
        QWEN35.nested,
        model_type="qwen3_5_moe",
        architectures=("Qwen3_5MoeForConditionalGeneration",),
    ),
    presets={
        "qwen3.5_35b_a3b": _moe_size(2_048, 16, 2, 256, 512, 40, shared_expert_dim=512),
        "qwen3.5_122b_a10b": _moe_size(*(3_072, 32, 2, 256, 1_024, 48), linear_num_value_heads=64),
        "qwen3.5_397b_a17b": _moe_size(
            *(4_096, 32, 2, 256, 1_024, 60),
            linear_num_value_heads=64,
            num_experts=512,
            num_experts_per_tok=10,
        ),
    },
)

QWEN3_NEXT = decoder_only_family(
    "qwen3_next",
    config=Qwen3NextConfig,
    architectures=("Qwen3NextForCausalLM",),
    names=(*_MOE_NAMES, *_NEXT_NAMES),
    fields=(
        *_fields(num_key_value_heads=2, intermediate_size=5_632),
        *experts(512, 10),
        _SHARED,
        *sparse_fields(512, renormalised=True),
    ),
    unused=_MTP,
    presets={
        "qwen3_next_80b_a3b": Qwen3NextConfig.of(
            *(151_936, 2_048, 16, 2, 256, 5_120, 48),
            num_experts=512,
            num_experts_per_tok=10,
            expert_dim=512,
            shared_expert_dim=512,
        ),
    },
)
