"""Networks that differ from Llama in few places.

Mistral has a window in all layers, or none; Mixtral has experts, too. Phi 3 and 4 have fused
projections on disk, and perhaps a window and two lists of factors of rotary frequencies. OLMo 2 has
norms after the blocks only, and a norm over all heads' queries and all heads' keys; OLMoE has the
latter, and experts. SmolLM3 does not rotate in every fourth layer. gpt-oss has experts, a window in
every second layer, sinks of attention, and a bias in every product but the last.

Source: Jiang et al. 2023 (Mistral) and 2024 (Mixtral), Abdin et al. 2024 (Phi), OLMo Team 2025,
Muennighoff et al. 2024 (OLMoE), Bakouch et al. 2025 (SmolLM3), OpenAI 2025 (gpt-oss);
`transformers/models/mistral`, `mixtral`, `phi3`, `olmo2`, `olmoe`, `smollm3`, `gpt_oss`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from specjax.errors import UserError
from specjax.models.config import Routing, Style, with_layers
from specjax.models.decoder_only import (
    EXPERTS_NAMES,
    FULL,
    LLAMA_NAMES,
    NO_BIASES,
    SILU,
    SLIDING,
    UNBIASED,
    ExpertsConfig,
    RotaryConfig,
    decoder_only_family,
    decoder_only_names,
    experts,
    names_of_experts,
    rope,
    rotary_fields,
    types_by_number,
    windows,
)
from specjax.models.family import Constants, Field, HFFields, Renaming, T, constants, field, only
from specjax.models.rope_scaling import LongRopeScaling, YarnRopeScaling, longrope_from_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(RotaryConfig):
    """A Mistral. Version 0.1 has a window of 4,096 positions, later versions have none."""

    norm_eps: float = 1e-5


# The fields that Mistral and Phi 3 share.
def _windowed(window: int | None, rotation: Field, **absent: Any) -> tuple[Field, ...]:
    return (
        # transformers reads layers of several types in other classes.
        constants({"layer_types": (None,)}, written=False),
        only(layer_types=()),
        *rotary_fields(SILU, rotation, **absent),
        field("sliding_window", "sliding_window", lambda fields, _: fields.window(window)),
    )


_mistral_size = functools.partial(MistralConfig.of, rope_theta=1e6)

MISTRAL = decoder_only_family(
    "mistral",
    config=MistralConfig,
    architectures=("MistralForCausalLM",),
    special_ids={"eos_token_id": 2, "bos_token_id": 1},
    fields=_windowed(4_096, rope(32_768), num_key_value_heads=8),
    presets={
        "mistral_7b_v0.1": _mistral_size(
            32_000, 4_096, 32, 8, 128, 14_336, 32, rope_theta=1e4, sliding_window=4_096
        ),
        "mistral_7b_v0.3": _mistral_size(32_768, 4_096, 32, 8, 128, 14_336, 32),
        "mistral_nemo_12b": _mistral_size(131_072, 5_120, 32, 8, 128, 14_336, 40),
        "mistral_small_24b": _mistral_size(131_072, 5_120, 32, 8, 128, 32_768, 40, rope_theta=1e8),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(ExpertsConfig):
    """A Mixtral."""

    norm_eps: float = 1e-5
    renormalised: bool = True


# transformers reads these networks only with experts in all layers.
_EXPERTS_ALONE = only(dense_layers=(), expert_dim=None)

_mixtral_size = functools.partial(
    MixtralConfig.of, rope_theta=1e6, num_experts=8, num_experts_per_tok=2
)

MIXTRAL = decoder_only_family(
    "mixtral",
    config=MixtralConfig,
    architectures=("MixtralForCausalLM",),
    special_ids={"eos_token_id": 2, "bos_token_id": 1},
    names=(
        *names_of_experts("block_sparse_moe", {"w1": "wi_0", "w3": "wi_1", "w2": "wo"}),
        *LLAMA_NAMES,
    ),
    fields=(
        *_windowed(None, rope(32_768, 1e6), num_key_value_heads=8, rms_norm_eps=1e-5),
        *experts(8, 2, "num_local_experts"),
        _EXPERTS_ALONE,
        only(renormalised=True),
    ),
    presets={
        "mixtral_8x7b": _mixtral_size(32_000, 4_096, 32, 8, 128, 14_336, 32),
        "mixtral_8x22b": _mixtral_size(32_768, 6_144, 48, 8, 128, 16_384, 56),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(RotaryConfig):
    """A Phi 3 or 4."""

    norm_eps: float = 1e-5


def _original_positions(config: Phi3Config) -> dict[str, int]:
    scaling = config.rope_scaling
    if not isinstance(scaling, LongRopeScaling | None):
        raise UserError("rope_scaling must be a LongRopeScaling for transformers to read Phi 3")
    original = 4_096 if scaling is None else scaling.original_max_position
    return {"original_max_position_embeddings": original}


_HF, _OURS = "model.layers.{i}", "decoder/layers_{i}"

PHI3 = decoder_only_family(
    "phi3",
    config=Phi3Config,
    architectures=("Phi3ForCausalLM",),
    special_ids={"eos_token_id": 32_000, "pad_token_id": 32_000, "bos_token_id": 1},
    names=(
        Renaming(f"{_HF}.self_attn.qkv_proj.weight", f"{_OURS}/self_attention/query/kernel", T, 0),
        Renaming(f"{_HF}.self_attn.qkv_proj.weight", f"{_OURS}/self_attention/key/kernel", T, 1),
        Renaming(f"{_HF}.self_attn.qkv_proj.weight", f"{_OURS}/self_attention/value/kernel", T, 2),
        Renaming(f"{_HF}.mlp.gate_up_proj.weight", f"{_OURS}/mlp/wi_0/kernel", T, 0),
        Renaming(f"{_HF}.mlp.gate_up_proj.weight", f"{_OURS}/mlp/wi_1/kernel", T, 1),
        *LLAMA_NAMES,
    ),
    fields=(
        *_windowed(None, rope(4_096, scaling=longrope_from_hf), rms_norm_eps=1e-5),
        Field(write=_original_positions),
    ),
    presets={
        "phi3_mini": Phi3Config.of(32_064, 3_072, 32, 32, 96, 8_192, 32, sliding_window=2_047),
        "phi3_medium": Phi3Config.of(32_064, 5_120, 40, 10, 128, 17_920, 40, sliding_window=2_047),
        "phi4": Phi3Config.of(100_352, 5_120, 40, 10, 128, 17_920, 40, rope_theta=250_000.0),
    },
)


class Olmo2Config(RotaryConfig):
    """An OLMo 2."""

    differences = {"qk_norms": "all", "pre_norms": False, "post_norms": True}  # noqa: RUF012


_olmo2_size = functools.partial(Olmo2Config.of, 100_352, rope_theta=500_000.0)

OLMO2 = decoder_only_family(
    "olmo2",
    config=Olmo2Config,
    architectures=("Olmo2ForCausalLM",),
    special_ids={"eos_token_id": 50_279, "pad_token_id": 1},
    names=decoder_only_names(
        {
            "post_attention_layernorm": "post_self_attention_layer_norm",
            "post_feedforward_layernorm": "post_mlp_layer_norm",
        }
    ),
    fields=(*rotary_fields(UNBIASED, rope(4_096), rms_norm_eps=1e-5), only(sliding_window=None)),
    presets={
        "olmo2_1b": _olmo2_size(2_048, 16, 16, 128, 8_192, 16),
        "olmo2_7b": _olmo2_size(4_096, 32, 32, 128, 11_008, 32),
        "olmo2_13b": _olmo2_size(5_120, 40, 40, 128, 13_824, 40),
        "olmo2_32b": _olmo2_size(5_120, 40, 8, 128, 27_648, 64),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoeConfig(ExpertsConfig):
    """An OLMoE."""

    norm_eps: float = 1e-5

    differences = {"qk_norms": "all"}  # noqa: RUF012


OLMOE = decoder_only_family(
    "olmoe",
    config=OlmoeConfig,
    architectures=("OlmoeForCausalLM",),
    special_ids={"eos_token_id": 50_279, "pad_token_id": 1},
    names=EXPERTS_NAMES,
    fields=(
        *rotary_fields({**UNBIASED, "clip_qkv": (None,)}, rope(4_096), rms_norm_eps=1e-5),
        *experts(64, 8),
        field("norm_topk_prob", "renormalised", HFFields.flag, False),
        _EXPERTS_ALONE,
        only(sliding_window=None),
    ),
    presets={
        "olmoe_1b_7b": OlmoeConfig.of(
            50_304, 2_048, 16, 16, 128, 1_024, 16, num_experts=64, num_experts_per_tok=8
        ),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(RotaryConfig):
    """A SmolLM3.

    Attributes:
      rotated: for each layer, whether it rotates queries and keys; empty: all but every fourth.
    """

    rope_theta: float = 2e6
    rotated: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = isinstance(self.rotated, tuple | list)
        if not listed or not all(isinstance(flag, bool) for flag in self.rotated):
            raise UserError(f"rotated={self.rotated!r} must be a tuple of True and False")
        object.__setattr__(self, "rotated", tuple(self.rotated))
        if self.rotated and len(self.rotated) != self.num_layers:
            raise UserError(
                f"rotated has {len(self.rotated)} values, but num_layers={self.num_layers}"
            )

    @property
    def style(self) -> Style:
        rotated = self.rotated or _every_fourth(self.num_layers)
        return with_layers(super().style, ({} if on else {"rope": None} for on in rotated))


def _every_fourth(count: int, interval: int = 4) -> tuple[bool, ...]:
    return tuple((i + 1) % interval != 0 for i in range(count))


def _read_rotated(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    count = ours["num_layers"]
    rotated = fields.values.get("no_rope_layers")  # 1 where a layer rotates
    if rotated is None:
        rotated = _every_fourth(count, fields.whole("no_rope_layer_interval", 4))
    if (
        not isinstance(rotated, list | tuple)
        or len(rotated) != count
        or not all(flag in (0, 1) for flag in rotated)
    ):
        raise UserError(
            f"no_rope_layers={rotated!r} must be a list of 0 and 1, one for each of "
            f"num_hidden_layers={count}"
        )
    rotated = tuple(map(bool, rotated))
    return {"rotated": () if rotated == _every_fourth(count) else rotated}


def _write_rotated(config: SmolLM3Config) -> dict[str, Any]:
    rotated = config.rotated or _every_fourth(config.num_layers)
    return {"no_rope_layers": [int(on) for on in rotated], "no_rope_layer_interval": 4}


def _usual_types(_: HFFields, ours: Mapping[str, Any]) -> list[str]:
    rotated = ours["rotated"] or _every_fourth(ours["num_layers"])
    return [FULL if on else SLIDING for on in rotated]


SMOLLM3 = decoder_only_family(
    "smollm3",
    config=SmolLM3Config,
    architectures=("SmolLM3ForCausalLM",),
    special_ids={"eos_token_id": 128_001, "pad_token_id": 128_004, "bos_token_id": 128_000},
    fields=(
        *rotary_fields(
            NO_BIASES, rope(65_536, 2e6), tie_word_embeddings=True, num_key_value_heads=4
        ),
        Field(_read_rotated, _write_rotated),
        windows(_usual_types, None, flagged=True),
    ),
    presets={
        "smollm3_3b": SmolLM3Config.of(
            128_256, 2_048, 16, 4, 128, 11_008, 36, rope_theta=5e6, tie_embeddings=True
        ),
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(ExpertsConfig):
    """A gpt-oss."""

    rope_theta: float = 150_000.0
    norm_eps: float = 1e-5
    renormalised: bool = True

    differences = {  # noqa: RUF012
        "activations": ("clamped_swish", "clamped_linear"),
        "biases": True,
        "out_bias": True,
        "sinks": True,
    }

    @property
    def routing(self) -> Routing:
        return super().routing._replace(biases=True)


_GPT_OSS: Constants = {
    **SILU,
    "attention_bias": (True,),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
}


def _check_rope(fields: HFFields, _: Any) -> dict[str, Any]:
    if not (fields.objects("rope_parameters") or fields.objects("rope_scaling")):
        raise UserError("rope_parameters must be given for a gpt-oss; a published one has YaRN's")
    return {}


def _gpt_oss_size(layers: int, experts: int) -> GptOssConfig:
    return GptOssConfig.of(
        *(201_088, 2_880, 64, 8, 64, 2_880, layers),
        sliding_window=128,
        layer_types=types_by_number(layers, 2),
        num_experts=experts,
        num_experts_per_tok=4,
        rope_scaling=YarnRopeScaling(
            factor=32.0,
            original_max_position=4_096,
            attention_factor=0.1 * math.log(32.0) + 1.0,
            truncate=False,
        ),
    )


_joined = functools.partial(Renaming, alternating=True)

GPT_OSS = decoder_only_family(
    "gpt_oss",
    config=GptOssConfig,
    architectures=("GptOssForCausalLM",),
    names=(
        Renaming(f"{_HF}.self_attn.sinks", f"{_OURS}/self_attention/sinks"),
        Renaming(f"{_HF}.mlp.router.weight", f"{_OURS}/mlp/router", T),
        Renaming(f"{_HF}.mlp.router.bias", f"{_OURS}/mlp/router_bias"),
        _joined(f"{_HF}.mlp.experts.gate_up_proj", f"{_OURS}/mlp/wi_0", part=0),
        _joined(f"{_HF}.mlp.experts.gate_up_proj", f"{_OURS}/mlp/wi_1", part=1),
        _joined(f"{_HF}.mlp.experts.gate_up_proj_bias", f"{_OURS}/mlp/wi_0_bias", part=0),
        _joined(f"{_HF}.mlp.experts.gate_up_proj_bias", f"{_OURS}/mlp/wi_1_bias", part=1),
        Renaming(f"{_HF}.mlp.experts.down_proj", f"{_OURS}/mlp/wo"),
        Renaming(f"{_HF}.mlp.experts.down_proj_bias", f"{_OURS}/mlp/wo_bias"),
        *LLAMA_NAMES,
    ),
    fields=(
        Field(_check_rope),
        *rotary_fields(_GPT_OSS, rope(131_072, 150_000.0), any_heads=True, rms_norm_eps=1e-5),
        *experts(128, 4, "num_local_experts"),
        windows(lambda _, ours: types_by_number(ours["num_layers"], 2), 128),
        _EXPERTS_ALONE,
        only(renormalised=True),
    ),
    presets={"gpt_oss_20b": _gpt_oss_size(24, 32), "gpt_oss_120b": _gpt_oss_size(36, 128)},
)
