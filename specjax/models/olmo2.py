"""OLMo 2: norms after the blocks only, and a norm over all heads' queries and all heads' keys.

Source: OLMo Team 2025; `transformers/models/olmo2`.
"""

import dataclasses
import functools
from typing import Any

from specjax.errors import UserError
from specjax.models.config import Style
from specjax.models.decoder_only import (
    UNBIASED,
    RotaryConfig,
    decoder_only_family,
    decoder_only_names,
    rotary_from_hf,
    rotary_to_hf,
)
from specjax.models.family import HFFields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(RotaryConfig):
    """An OLMo 2."""

    norm_eps: float = 1e-6

    @property
    def style(self) -> Style:
        return dataclasses.replace(super().style, qk_norms="all", pre_norms=False, post_norms=True)


def _from_hf(fields: HFFields) -> Olmo2Config:
    return Olmo2Config(**rotary_from_hf(fields, UNBIASED, rms_norm_eps=1e-5))


def _to_hf(config: Olmo2Config) -> dict[str, Any]:
    if config.sliding_window is not None:
        raise UserError("sliding_window must be None for transformers to read an OLMo 2")
    return rotary_to_hf(config, UNBIASED, 4_096)


_size = functools.partial(Olmo2Config.of, 100_352, rope_theta=500_000.0)

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
    from_hf=_from_hf,
    to_hf=_to_hf,
    presets={
        "olmo2_1b": _size(2_048, 16, 16, 128, 8_192, 16),
        "olmo2_7b": _size(4_096, 32, 32, 128, 11_008, 32),
        "olmo2_13b": _size(5_120, 40, 40, 128, 13_824, 40),
        "olmo2_32b": _size(5_120, 40, 8, 128, 27_648, 64),
    },
)
