"""Qwen 2, 2.5, 3 and 3.5, and Qwen 3 with experts.

Qwen 2 is Llama with biases on queries, keys and values, and perhaps windows in later layers. Qwen 3
has an RMS norm of each head's queries and keys instead of the biases. In Qwen 3.5 three of four
layers are gated delta networks.

Source: Qwen Team 2024, 2025 and 2026; `transformers/models/qwen2`, `qwen3`, `qwen3_moe`, `qwen3_5`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from specjax.errors import UserError
from specjax.models.config import DecoderOnlyConfig, DeltaSizes, Style
from specjax.models.decoder_only import (
    EXPERTS_NAMES,
    FULL,
    LLAMA_NAMES,
    ROPE_PARTS,
    SILU,
    SLIDING,
    UNBIASED,
    Constants,
    ExpertsConfig,
    RotaryConfig,
    decoder_only_family,
    experts_from_hf,
    experts_to_hf,
    llama_style,
    rotary_from_hf,
    rotary_to_hf,
    types_of_layers,
    windows_from_hf,
)
from specjax.models.family import HFFields, Nested, Renaming, T
from specjax.models.rope_scaling import RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(RotaryConfig):
    """A Qwen 2 or 2.5. Published sizes have no window."""

    differences = {"biases": True}  # noqa: RUF012


def _from_hf(fields: HFFields, constants: Constants, **defaults: Any) -> dict[str, Any]:
    sizes = rotary_from_hf(fields, constants, **defaults)
    count = sizes["num_layers"]
    window, types = None, [FULL] * count
    if fields.flag("use_sliding_window", False):
        window = fields.window(4096)
        start = fields.whole("max_window_layers", 28, least=0)
        if window is not None:
            types = [SLIDING if i >= start else FULL for i in range(count)]
    return {**sizes, **windows_from_hf(fields, window, types, count)}


def _to_hf(config: RotaryConfig, constants: Constants) -> dict[str, Any]:
    types = types_of_layers(config)
    windowed = SLIDING in types
    return {
        **rotary_to_hf(config, constants, 32_768),
        "use_sliding_window": windowed,
        "sliding_window": config.sliding_window if windowed else None,
        "max_window_layers": types.index(SLIDING) if windowed else config.num_layers,
        "layer_types": types,
    }


# The small sizes share the embedding, of fewer rows for the same tokens.
_small = functools.partial(Qwen2Config.of, 151_936, rope_theta=1e6, tie_embeddings=True)
_large = functools.partial(Qwen2Config.of, 152_064, rope_theta=1e6)

QWEN2 = decoder_only_family(
    "qwen2",
    config=Qwen2Config,
    architectures=("Qwen2ForCausalLM",),
    from_hf=lambda fields: Qwen2Config(**_from_hf(fields, SILU, num_key_value_heads=32)),
    to_hf=lambda config: _to_hf(config, SILU),
    presets={
        "qwen2.5_0.5b": _small(896, 14, 2, 64, 4_864, 24),
        "qwen2.5_1.5b": _small(1_536, 12, 2, 128, 8_960, 28),
        "qwen2.5_3b": _small(2_048, 16, 2, 128, 11_008, 36),
        "qwen2.5_7b": _large(3_584, 28, 4, 128, 18_944, 28),
        "qwen2.5_14b": _large(5_120, 40, 8, 128, 13_824, 48),
        "qwen2.5_32b": _large(5_120, 40, 8, 128, 27_648, 64),
        "qwen2.5_72b": _large(8_192, 64, 8, 128, 29_568, 80),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(RotaryConfig):
    """A Qwen 3. Published sizes have no window."""

    differences = {"qk_norms": "head"}  # noqa: RUF012


_qwen3_size = functools.partial(Qwen3Config.of, 151_936, rope_theta=1e6)
_qwen3_tied = functools.partial(_qwen3_size, tie_embeddings=True)

QWEN3 = decoder_only_family(
    "qwen3",
    config=Qwen3Config,
    architectures=("Qwen3ForCausalLM",),
    from_hf=lambda fields: Qwen3Config(
        **_from_hf(fields, UNBIASED, num_key_value_heads=32, head_dim=128)
    ),
    to_hf=lambda config: _to_hf(config, UNBIASED),
    presets={
        "qwen3_0.6b": _qwen3_tied(1_024, 16, 8, 128, 3_072, 28),
        "qwen3_1.7b": _qwen3_tied(2_048, 16, 8, 128, 6_144, 28),
        "qwen3_4b": _qwen3_tied(2_560, 32, 8, 128, 9_728, 36),
        "qwen3_8b": _qwen3_size(4_096, 32, 8, 128, 12_288, 36),
        "qwen3_14b": _qwen3_size(5_120, 40, 8, 128, 17_408, 40),
        "qwen3_32b": _qwen3_size(5_120, 64, 8, 128, 25_600, 64),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(ExpertsConfig):
    """A Qwen 3 with experts. Published sizes have no window, and experts in all layers."""

    differences = {"qk_norms": "head"}  # noqa: RUF012


def _moe_from_hf(fields: HFFields) -> Qwen3MoeConfig:
    sizes = rotary_from_hf(fields, UNBIASED, num_key_value_heads=4)
    windowed = fields.flag("use_sliding_window", False)
    dense = fields.values.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise UserError(f"mlp_only_layers={dense!r} must be a list of numbers of layers")
    step = fields.whole("decoder_sparse_step", 1)
    return Qwen3MoeConfig(
        **sizes,
        **experts_from_hf(fields, 128, 8),
        sliding_window=fields.window(4096) if windowed else None,
        expert_dim=fields.whole("moe_intermediate_size", 768),
        renormalised=fields.flag("norm_topk_prob", False),
        dense_layers=tuple(
            layer for layer in range(sizes["num_layers"]) if layer in dense or (layer + 1) % step
        ),
    )


def _moe_to_hf(config: Qwen3MoeConfig) -> dict[str, Any]:
    if config.layer_types:
        raise UserError(
            "layer_types must be empty for transformers to read a Qwen 3 with experts; convert it "
            "to orbax"
        )
    return {
        **rotary_to_hf(config, UNBIASED, 32_768),
        **experts_to_hf(config, "num_experts"),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "moe_intermediate_size": config.expert_dim or config.mlp_dim,
        "norm_topk_prob": config.renormalised,
        "mlp_only_layers": list(config.dense_layers),
        "decoder_sparse_step": 1,
    }


_moe_size = functools.partial(
    Qwen3MoeConfig.of,
    151_936,
    num_experts=128,
    num_experts_per_tok=8,
    renormalised=True,
    rope_theta=1e6,
)

QWEN3_MOE = decoder_only_family(
    "qwen3_moe",
    config=Qwen3MoeConfig,
    architectures=("Qwen3MoeForCausalLM",),
    names=EXPERTS_NAMES,
    from_hf=_moe_from_hf,
    to_hf=_moe_to_hf,
    presets={
        "qwen3_30b_a3b": _moe_size(2_048, 32, 4, 128, 6_144, 48, expert_dim=768),
        "qwen3_235b_a22b": _moe_size(4_096, 64, 4, 128, 12_288, 94, expert_dim=1_536),
    },
)


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
        if not isinstance(types, list | tuple) or not set(types) <= {LINEAR, FULL}:
            raise UserError(f"layer_types={types!r} may only name {LINEAR} and {FULL}")
        types = tuple(types) or _types(self.num_layers, 4)
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
        if self._rotated % 2 or not 0 < self._rotated <= self.head_dim:
            raise UserError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} "
                "must be an even number of dimensions"
            )

    @property
    def _rotated(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def style(self) -> Style:
        delta = DeltaSizes(*(getattr(self, name) for name in _LINEAR_SIZES))
        return llama_style(
            self,
            self._rotated,
            deltas=tuple(delta if kind == LINEAR else None for kind in self.layer_types),
            qk_norms="head",
            gated=True,
            plus_one_norms=True,
        )


# The types of `count` layers of which every n-th has full attention.
def _types(count: int, n: int) -> tuple[str, ...]:
    return tuple(FULL if (i + 1) % n == 0 else LINEAR for i in range(count))


def _qwen35_from_hf(fields: HFFields) -> Qwen35Config:
    rope, factor = fields.objects("rope_parameters"), "partial_rotary_factor"
    rotated = HFFields(rope).positive(factor, fields.positive(factor, 0.25))
    whole = {**fields.values, factor: None, "rope_parameters": {**rope, factor: None}}
    sizes = rotary_from_hf(
        dataclasses.replace(fields, values=whole), UNBIASED, head_dim=256, num_key_value_heads=4
    )
    fields.refuse("attn_output_gate", (True,), True)
    types = fields.values.get("layer_types")
    if types is None:
        types = _types(sizes["num_layers"], fields.whole("full_attention_interval", 4))
    linear: Any = {name: fields.whole(name, getattr(Qwen35Config, name)) for name in _LINEAR_SIZES}
    return Qwen35Config(**sizes, **linear, layer_types=types, partial_rotary_factor=rotated)


def _qwen35_to_hf(config: Qwen35Config) -> dict[str, Any]:
    values = rotary_to_hf(config, UNBIASED, 262_144, any_heads=True)
    del values["rope_scaling"]  # it would replace the parameters
    values["rope_parameters"]["partial_rotary_factor"] = config.partial_rotary_factor
    linear = {name: getattr(config, name) for name in _LINEAR_SIZES}
    return {**values, **linear, "layer_types": list(config.layer_types)}


_HF, _OURS = "model.layers.{i}.linear_attn", "decoder/layers_{i}/delta"
_JOINED = {"query": 0, "key": 1, "value": 2}
_OTHERS = {"in_proj_z": "gate", "in_proj_b": "beta", "in_proj_a": "decay", "out_proj": "out"}
_DELTA_NAMES = (
    *(
        Renaming(f"{_HF}.in_proj_qkv.weight", f"{_OURS}/{a}/kernel", T, i)
        for a, i in _JOINED.items()
    ),
    *(
        Renaming(f"{_HF}.conv1d.weight", f"{_OURS}/{a}_conv/kernel", part=i)
        for a, i in _JOINED.items()
    ),
    *(Renaming(f"{_HF}.{a}.weight", f"{_OURS}/{b}/kernel", T) for a, b in _OTHERS.items()),
    Renaming(f"{_HF}.A_log", f"{_OURS}/log_rate"),
    Renaming(f"{_HF}.dt_bias", f"{_OURS}/rate_bias"),
    Renaming(f"{_HF}.norm.weight", f"{_OURS}/norm/scale"),
)

_qwen35_size = functools.partial(Qwen35Config.of, 248_320)
_qwen35_small = functools.partial(_qwen35_size, tie_embeddings=True, linear_num_value_heads=16)

QWEN35 = decoder_only_family(
    "qwen3_5_text",
    config=Qwen35Config,
    architectures=("Qwen3_5ForCausalLM",),
    names=(*LLAMA_NAMES, *_DELTA_NAMES),
    from_hf=_qwen35_from_hf,
    to_hf=_qwen35_to_hf,
    unused=r"mtp\..*",  # a draft head
    nested=Nested(
        model_type="qwen3_5",
        architectures=("Qwen3_5ForConditionalGeneration",),
        field="text_config",
        prefixes={"model.language_model.": "model."},
        others=r"(model\.visual|mtp)\..*",
    ),
    presets={
        "qwen3.5_0.8b": _qwen35_small(1_024, 8, 2, 256, 3_584, 24),
        "qwen3.5_2b": _qwen35_small(2_048, 8, 2, 256, 6_144, 24),
        "qwen3.5_4b": _qwen35_size(2_560, 16, 4, 256, 9_216, 32, tie_embeddings=True),
        "qwen3.5_9b": _qwen35_size(4_096, 16, 4, 256, 12_288, 32),
        "qwen3.5_27b": _qwen35_size(5_120, 24, 4, 256, 17_408, 64, linear_num_value_heads=48),
    },
)
