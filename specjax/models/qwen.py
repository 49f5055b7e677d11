"""Qwen 2, 2.5 and 3, and Qwen 3 with experts; `qwen_hybrid` has Qwen3-Next and 3.5.

Qwen 2 is Llama with biases on queries, keys and values, and perhaps windows in later layers. Qwen 3
has an RMS norm of each head's queries and keys instead of the biases.

Source: Qwen Team 2024 and 2025; `transformers/models/qwen2`, `qwen3`, `qwen3_moe`.
"""

import functools
from collections.abc import Mapping
from typing import Any

from specjax.errors import UserError
from specjax.models.decoder_only import (
    EXPERTS_NAMES,
    FULL,
    SILU,
    SLIDING,
    UNBIASED,
    ExpertsConfig,
    RotaryConfig,
    WithExperts,
    decoder_only_family,
    experts,
    rope,
    rotary_fields,
    types_of_layers,
    windows,
)
from specjax.models.family import Field, HFFields, field, only


class Qwen2Config(RotaryConfig):
    """A Qwen 2 or 2.5. Published sizes have no window."""

    differences = {"biases": True}  # noqa: RUF012


def _later_windows(fields: HFFields, ours: Mapping[str, Any]) -> list[str]:
    start = fields.whole("max_window_layers", 28, least=0)
    return [SLIDING if i >= start else FULL for i in range(ours["num_layers"])]


def _max_window_layers(config: RotaryConfig) -> dict[str, int]:
    return {"max_window_layers": [*types_of_layers(config), SLIDING].index(SLIDING)}


_WINDOWS = windows(_later_windows, 4096, flagged=True), Field(write=_max_window_layers)


# The small sizes share the embedding, of fewer rows for the same tokens.
_small = functools.partial(Qwen2Config.of, 151_936, rope_theta=1e6, tie_embeddings=True)
_large = functools.partial(Qwen2Config.of, 152_064, rope_theta=1e6)

QWEN2 = decoder_only_family(
    "qwen2",
    config=Qwen2Config,
    architectures=("Qwen2ForCausalLM",),
    fields=(*rotary_fields(SILU, rope(32_768), num_key_value_heads=32), *_WINDOWS),
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


class Qwen3Config(RotaryConfig):
    """A Qwen 3. Published sizes have no window."""

    differences = {"qk_norms": "head"}  # noqa: RUF012


_qwen3_size = functools.partial(Qwen3Config.of, 151_936, rope_theta=1e6)
_qwen3_tied = functools.partial(_qwen3_size, tie_embeddings=True)

QWEN3 = decoder_only_family(
    "qwen3",
    config=Qwen3Config,
    architectures=("Qwen3ForCausalLM",),
    fields=(
        *rotary_fields(UNBIASED, rope(32_768), num_key_value_heads=32, head_dim=128),
        *_WINDOWS,
    ),
    presets={
        "qwen3_0.6b": _qwen3_tied(1_024, 16, 8, 128, 3_072, 28),
        "qwen3_1.7b": _qwen3_tied(2_048, 16, 8, 128, 6_144, 28),
        "qwen3_4b": _qwen3_tied(2_560, 32, 8, 128, 9_728, 36),
        "qwen3_8b": _qwen3_size(4_096, 32, 8, 128, 12_288, 36),
        "qwen3_14b": _qwen3_size(5_120, 40, 8, 128, 17_408, 40),
        "qwen3_32b": _qwen3_size(5_120, 64, 8, 128, 25_600, 64),
    },
)


class Qwen3MoeConfig(ExpertsConfig):
    """A Qwen 3 with experts. Published sizes have no window, and experts in all layers."""

    differences = {"qk_norms": "head"}  # noqa: RUF012


def _window(fields: HFFields, _: str) -> int | None:
    return fields.window(4096) if fields.flag("use_sliding_window", False) else None


def _read_dense(fields: HFFields, ours: Mapping[str, Any]) -> dict[str, Any]:
    dense = fields.values.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(layer) is int for layer in dense):
        raise UserError(f"mlp_only_layers={dense!r} must be a list of numbers of layers")
    step = fields.whole("decoder_sparse_step", 1)
    layers = range(ours["num_layers"])
    return {"dense_layers": tuple(x for x in layers if x in dense or (x + 1) % step)}


def _write_dense(config: WithExperts) -> dict[str, Any]:
    return {"mlp_only_layers": list(config.dense_layers), "decoder_sparse_step": 1}


def sparse_fields(width: int, renormalised: bool) -> tuple[Field, ...]:
    """Those of the experts of a Qwen 3 or Qwen3-Next besides their number, with defaults."""
    return (
        field(
            "moe_intermediate_size",
            "expert_dim",
            HFFields.whole,
            width,
            write=lambda config: config.expert_dim or config.mlp_dim,
        ),
        field("norm_topk_prob", "renormalised", HFFields.flag, renormalised),
        Field(_read_dense, _write_dense),
    )


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
    fields=(
        *rotary_fields(UNBIASED, rope(32_768), num_key_value_heads=4),
        *experts(128, 8),
        field("sliding_window", "sliding_window", _window),
        Field(write=lambda config: {"use_sliding_window": config.sliding_window is not None}),
        only(layer_types=()),
        *sparse_fields(768, renormalised=False),
    ),
    presets={
        "qwen3_30b_a3b": _moe_size(2_048, 32, 4, 128, 6_144, 48, expert_dim=768),
        "qwen3_235b_a22b": _moe_size(4_096, 64, 4, 128, 12_288, 94, expert_dim=1_536),
    },
)
