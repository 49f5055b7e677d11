"""Llama 1, 2 and 3: rotary positions, grouped queries, SwiGLU, RMS norms before each block.

Source: Touvron et al. 2023; `transformers/models/llama`, `transformers/modeling_rope_utils.py`.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.models.config import DecoderOnlyConfig, Style, check_numbers
from specjax.models.decoder_only import (
    NO_BIASES,
    decoder_only_family,
    decoder_only_from_hf,
    llama_style,
    rope_from_hf,
    rotary_to_hf,
)
from specjax.models.family import VERBATIM, HFFields, Vocabulary
from specjax.models.position_encoding import rope_frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """The `llama3` stretching of rotary frequencies (Llama 3.1 and later).

    Attributes:
      factor: low frequencies are divided by this.
      low_freq_factor: wavelengths above `original_max_position / low_freq_factor` are divided.
      high_freq_factor: wavelengths below `original_max_position / high_freq_factor` are kept.
      original_max_position: the context length before stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        check_numbers(self, "rope_scaling")
        if self.low_freq_factor >= self.high_freq_factor:
            raise UserError(
                f"rope_scaling: low_freq_factor={self.low_freq_factor} must be less than "
                f"high_freq_factor={self.high_freq_factor}"
            )

    def stretched(self, frequencies: np.ndarray) -> np.ndarray:
        """Divides low frequencies, keeps high ones, and interpolates between them."""
        wavelengths = 2 * np.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_max_position / wavelengths
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1.0 - kept) * frequencies / self.factor + kept * frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderOnlyConfig):
    """A Llama; `rope_theta` is the base of the rotary frequencies."""

    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None

    parts = {"rope_scaling": Llama3RopeScaling}  # noqa: RUF012

    @property
    def style(self) -> Style:
        frequencies = rope_frequencies(self.head_dim, self.rope_theta)
        if self.rope_scaling is not None:
            frequencies = self.rope_scaling.stretched(frequencies)
        return llama_style(self, frequencies)


def _from_hf(fields: HFFields) -> LlamaConfig:
    fields.refuse_others(NO_BIASES)
    theta, kind, rope = rope_from_hf(fields)
    return LlamaConfig(
        **decoder_only_from_hf(fields),
        rope_theta=theta,
        rope_scaling=_scaling(fields, kind, rope),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _scaling(fields: HFFields, kind: str, rope: HFFields) -> Llama3RopeScaling | None:
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"rope_type={kind!r} is not supported, only 'default' or 'llama3'")
    longest = "original_max_position_embeddings"
    outer, inner = fields.values.get(longest), rope.values.get(longest)
    if outer is not None and outer != inner:
        raise UserError(
            f"{longest}={outer!r} differs from {inner!r} in the rope parameters; "
            "keep the value that the model was trained with"
        )
    return Llama3RopeScaling(
        factor=rope.positive("factor"),
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
        original_max_position=rope.whole(longest),
    )


def _to_hf(config: LlamaConfig) -> dict[str, Any]:
    longest, scaling = 4096, None
    if (stretch := config.rope_scaling) is not None:
        longest = int(stretch.original_max_position * stretch.factor)
        scaling = {
            "rope_type": "llama3",
            "factor": stretch.factor,
            "low_freq_factor": stretch.low_freq_factor,
            "high_freq_factor": stretch.high_freq_factor,
            "original_max_position_embeddings": stretch.original_max_position,
        }
    return rotary_to_hf(config, NO_BIASES, longest, scaling)


def _llama3(*sizes: int, factor: float | None = None, **others: Any) -> LlamaConfig:
    scaling = None
    if factor is not None:
        scaling = Llama3RopeScaling(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8_192
        )
    return LlamaConfig.of(128_256, *sizes, rope_theta=500_000.0, rope_scaling=scaling, **others)


_llama2 = functools.partial(LlamaConfig.of, 32_000)
_smollm2 = functools.partial(LlamaConfig.of, 49_152, tie_embeddings=True)

LLAMA = decoder_only_family(
    "llama",
    config=LlamaConfig,
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    special_ids={"eos_token_id": 2, "bos_token_id": 1},
    from_hf=_from_hf,
    to_hf=_to_hf,
    presets={
        "llama2_7b": _llama2(4_096, 32, 32, 128, 11_008, 32),
        "llama2_13b": _llama2(5_120, 40, 40, 128, 13_824, 40),
        "llama2_70b": _llama2(8_192, 64, 8, 128, 28_672, 80),
        "llama3_8b": _llama3(4_096, 32, 8, 128, 14_336, 32),
        "llama3.1_8b": _llama3(4_096, 32, 8, 128, 14_336, 32, factor=8.0),
        "llama3.1_70b": _llama3(8_192, 64, 8, 128, 28_672, 80, factor=8.0),
        "llama3.2_1b": _llama3(2_048, 32, 8, 64, 8_192, 16, factor=32.0, tie_embeddings=True),
        "llama3.2_3b": _llama3(3_072, 24, 8, 128, 8_192, 28, factor=32.0, tie_embeddings=True),
        "smollm2_135m": _smollm2(576, 9, 3, 64, 1_536, 30, rope_theta=1e5),
        "smollm2_360m": _smollm2(960, 15, 5, 64, 2_560, 32, rope_theta=1e5),
        "smollm2_1.7b": _smollm2(2_048, 32, 32, 64, 8_192, 24, rope_theta=1.3e5),
    },
    vocabulary=Vocabulary(
        file="tokenizer.model",
        types=("bpe",),
        options={"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1, **VERBATIM},
        settings={
            "tokenizer_class": "LlamaTokenizer",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
            "add_eos_token": False,
            "legacy": False,
        },
    ),
)
