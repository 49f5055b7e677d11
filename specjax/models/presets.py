"""The published sizes: T5 v1.1 (and FLAN-T5, which is the same), Gemma 2, Llama 2 and 3."""

from typing import Any

from specjax.models.config import (
    Gemma2Config,
    Llama3RopeScaling,
    LlamaConfig,
    ModelConfig,
    T5Config,
)


def _t5(width: int, heads: int, mlp: int, layers: int) -> T5Config:
    return T5Config(
        vocab_size=32_128,
        embed_dim=width,
        num_heads=heads,
        head_dim=64,
        mlp_dim=mlp,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
    )


def _gemma2(
    width: int, heads: int, head_dim: int, mlp: int, layers: int, query_scalar: float
) -> Gemma2Config:
    return Gemma2Config(
        vocab_size=256_000,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=head_dim,
        mlp_dim=mlp,
        num_layers=layers,
        sliding_window=4_096,
        query_pre_attn_scalar=query_scalar,
    )


def _llama2(width: int, heads: int, kv_heads: int, mlp: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32_000,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        mlp_dim=mlp,
        num_layers=layers,
    )


def _llama3(width: int, head_dim: int, mlp: int, layers: int, **changes: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        embed_dim=width,
        num_heads=32,
        num_kv_heads=8,
        head_dim=head_dim,
        mlp_dim=mlp,
        num_layers=layers,
        rope_theta=500_000.0,
        **changes,
    )


PRESETS: dict[str, ModelConfig] = {
    "t5_v1_1_small": _t5(512, 6, 1_024, 8),
    "t5_v1_1_base": _t5(768, 12, 2_048, 12),
    "t5_v1_1_large": _t5(1_024, 16, 2_816, 24),
    "t5_v1_1_xl": _t5(2_048, 32, 5_120, 24),
    "t5_v1_1_xxl": _t5(4_096, 64, 10_240, 24),
    "gemma2_2b": _gemma2(2_304, 8, 256, 9_216, 26, 256.0),
    "gemma2_9b": _gemma2(3_584, 16, 256, 14_336, 42, 256.0),
    # Its queries are scaled by E / H, not by the width of a head.
    "gemma2_27b": _gemma2(4_608, 32, 128, 36_864, 46, 144.0),
    "llama2_7b": _llama2(4_096, 32, 32, 11_008, 32),
    "llama2_13b": _llama2(5_120, 40, 40, 13_824, 40),
    "llama2_70b": _llama2(8_192, 64, 8, 28_672, 80),
    "llama3_8b": _llama3(4_096, 128, 14_336, 32),
    "llama3.2_1b": _llama3(
        2_048,
        64,
        8_192,
        16,
        tie_embeddings=True,
        rope_scaling=Llama3RopeScaling(
            factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8_192
        ),
    ),
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The configuration of a published size.

    Args:
      name: one of `PRESETS`, such as `"t5_v1_1_base"`.
      **changes: fields to set otherwise, such as `dtype="bfloat16"`.

    Returns:
      A `T5Config`, `LlamaConfig` or `Gemma2Config`.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for an unknown name or field, or a value out of its range.
    """
    if name not in PRESETS:
        raise ValueError(f"`name` must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name].replace(**changes)
