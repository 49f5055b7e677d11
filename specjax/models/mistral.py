"""Mistral: Llama with a window in all layers, or none.

Source: Jiang et al. 2023; `transformers/models/mistral`.
"""

import dataclasses
import functools
from typing import Any

from specjax.models.causal_lm import CausalLM
from specjax.models.family import LLAMA_NORMS, Family, decoder_only_names
from specjax.models.hf_fields import (
    HFFields,
    decoder_only_from_hf,
    decoder_only_to_hf,
    default_rope,
    rope_to_hf,
)
from specjax.models.rotary import RotaryConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(RotaryConfig):
    """A Mistral. Version 0.1 has a window of 4,096 positions, later versions have none."""

    norm_eps: float = 1e-5


def _from_hf(fields: HFFields) -> MistralConfig:
    fields.refuse("hidden_act", ("silu", "swish"), "silu")
    # transformers reads them in other classes.
    fields.refuse("layer_types", (None,), None)
    return MistralConfig(
        **decoder_only_from_hf(fields, num_key_value_heads=8),
        rope_theta=default_rope(fields),
        sliding_window=fields.window(4096),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _to_hf(config: MistralConfig) -> dict[str, Any]:
    if config.layer_types:
        raise ValueError(
            "layer_types must be empty for transformers to read a Mistral; convert it to orbax"
        )
    return {
        **decoder_only_to_hf(config),
        "hidden_act": "silu",
        "sliding_window": config.sliding_window,
        "max_position_embeddings": 32_768,
        **rope_to_hf(config.rope_theta),
    }


_size = functools.partial(MistralConfig.of, rope_theta=1e6)

MISTRAL = Family(
    name="mistral",
    config=MistralConfig,
    model=CausalLM,
    architectures=("MistralForCausalLM",),
    special_ids={"eos_token_id": 2, "bos_token_id": 1},
    names=decoder_only_names(LLAMA_NORMS),
    from_hf=_from_hf,
    to_hf=_to_hf,
    presets={
        "mistral_7b_v0.1": _size(
            32_000, 4_096, 32, 8, 128, 14_336, 32, rope_theta=1e4, sliding_window=4_096
        ),
        "mistral_7b_v0.3": _size(32_768, 4_096, 32, 8, 128, 14_336, 32),
        "mistral_nemo_12b": _size(131_072, 5_120, 32, 8, 128, 14_336, 40),
        "mistral_small_24b": _size(131_072, 5_120, 32, 8, 128, 32_768, 40, rope_theta=1e8),
    },
)
