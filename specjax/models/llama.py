"""Llama 1, 2 and 3: rotary positions, grouped queries, SwiGLU, RMS norms before each block.

Source: Touvron et al. 2023; `transformers/models/llama`, `transformers/modeling_rope_utils.py`.
"""

import dataclasses
import functools
from typing import Any

from specjax.models.config import DecoderOnlyConfig, LayerSpec, Style
from specjax.models.decoder_only import (
    NO_BIASES,
    ROPE_PARTS,
    decoder_only_family,
    llama_rope,
    llama_style,
    rope,
    rotary_fields,
)
from specjax.models.family import VERBATIM, Vocabulary
from specjax.models.rope_scaling import Llama3RopeScaling, RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderOnlyConfig):
    """A Llama; `rope_theta` is the base of the rotary frequencies."""

    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None

    parts = ROPE_PARTS

    @property
    def style(self) -> Style:
        return llama_style(self, (LayerSpec(rope=llama_rope(self)),) * self.num_layers)


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
    fields=rotary_fields(NO_BIASES, rope(4096)),
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
