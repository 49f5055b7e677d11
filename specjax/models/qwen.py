"""Qwen 2, 2.5 and 3, and Qwen 3 with experts; `qwen_hybrid` has Qwen3-Next and 3.5.

Qwen 2 is Llama with biases on queries, keys and values, and perhaps windows in later layers. Qwen 3
has an RMS norm of each head's queries and keys instead of the biases.

Source: Qwen Team 2024 and 2025; `transformers/models/qwen2`, `qwen3`, `qwen3_moe`.
"""

import dataclasses
import functools
from typing import Any

from specjax.errors import UserError
from specjax.models.decoder_only import (
    EXPERTS_NAMES,
    FULL,
    SILU,
    SLIDING,
    UNBIASED,
    Constants,
    ExpertsConfig,
    RotaryConfig,
    decoder_only_family,
    experts_from_hf,
    experts_to_hf,
    rotary_from_hf,
    rotary_to_hf,
    types_of_layers,
    windows_from_hf,
)
from specjax.models.family import HFFields


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
    return Qwen3MoeConfig(
        **sizes,
        **experts_from_hf(fields, 128, 8),
        sliding_window=fields.window(4096) if windowed else None,
        expert_dim=fields.whole("moe_intermediate_size", 768),
        renormalised=fields.flag("norm_topk_prob", False),
        dense_layers=dense_from_hf(fields, sizes["num_layers"]),
    )


def dense_from_hf(fields: HFFields, count: int) -> tuple[int, ...]:
    """The layers without experts, of a Qwen 3 or Qwen3-Next of `count` layers."""
    dense = fields.values.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise UserError(f"mlp_only_layers={dense!r} must be a list of numbers of layers")
    step = fields.whole("decoder_sparse_step", 1)
    return tuple(layer for layer in range(count) if layer in dense or (layer + 1) % step)


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
