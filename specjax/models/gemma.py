"""Gemma 1: one norm before each block, embeddings scaled by the square root of their width.

Source: Gemma Team 2024 (arXiv 2403.08295); `transformers/models/gemma`.
"""

import dataclasses
from typing import Any

from specjax.errors import UserError
from specjax.models.config import Style
from specjax.models.decoder_only import (
    Constants,
    RotaryConfig,
    decoder_only_family,
    rotary_from_hf,
    rotary_to_hf,
)
from specjax.models.family import HFFields
from specjax.models.gemma2 import SPECIAL_IDS, VOCABULARY, gemma_style


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(RotaryConfig):
    """A Gemma 1. The stored norm scales are Hugging Face's: the network adds 1 to them."""

    tie_embeddings: bool = True

    @property
    def style(self) -> Style:
        return dataclasses.replace(super().style, **gemma_style(self.embed_dim))


_CONSTANTS: Constants = {
    # "gelu" has always meant the tanh approximation here.
    "hidden_act": ("gelu_pytorch_tanh", "gelu"),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attention_bias": (False,),
}


def _from_hf(fields: HFFields) -> GemmaConfig:
    fields.refuse("use_bidirectional_attention", (False,), False)
    sizes = rotary_from_hf(fields, _CONSTANTS, tied=True, num_key_value_heads=16, head_dim=256)
    return GemmaConfig(**sizes)


def _to_hf(config: GemmaConfig) -> dict[str, Any]:
    if config.sliding_window is not None:
        raise UserError("sliding_window must be None for transformers to read a Gemma 1")
    return rotary_to_hf(config, _CONSTANTS, 8_192)


GEMMA = decoder_only_family(
    "gemma",
    config=GemmaConfig,
    architectures=("GemmaForCausalLM",),
    special_ids=SPECIAL_IDS,
    from_hf=_from_hf,
    to_hf=_to_hf,
    presets={
        "gemma_2b": GemmaConfig.of(256_000, 2_048, 8, 1, 256, 16_384, 18),
        "gemma_7b": GemmaConfig.of(256_000, 3_072, 16, 16, 256, 24_576, 28),
    },
    vocabulary=VOCABULARY,
)
