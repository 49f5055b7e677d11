"""Mistral: Llama with a window in all layers, or none.

Source: Jiang et al. 2023; `transformers/models/mistral`.
"""

import dataclasses
import functools
from typing import Any

from specjax.errors import UserError
from specjax.models.decoder_only import (
    SILU,
    RotaryConfig,
    decoder_only_family,
    rotary_from_hf,
    rotary_to_hf,
)
from specjax.models.family import HFFields


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(RotaryConfig):
    """A Mistral. Version 0.1 has a window of 4,096 positions, later versions have none."""

    norm_eps: float = 1e-5


def mistral_from_hf(fields: HFFields, window: int | None, **defaults: Any) -> dict[str, Any]:
    """The fields that Mistral and Phi 3 share; `window` is the usual one."""
    # transformers reads layers of several types in other classes.
    fields.refuse("layer_types", (None,), None)
    return {**rotary_from_hf(fields, SILU, **defaults), "sliding_window": fields.window(window)}


def mistral_to_hf(config: RotaryConfig, name: str, longest: int) -> dict[str, Any]:
    """The inverse of `mistral_from_hf`."""
    if config.layer_types:
        raise UserError(
            f"layer_types must be empty for transformers to read a {name}; convert it to orbax"
        )
    return {**rotary_to_hf(config, SILU, longest), "sliding_window": config.sliding_window}


def _from_hf(fields: HFFields) -> MistralConfig:
    return MistralConfig(**mistral_from_hf(fields, 4_096, num_key_value_heads=8))


def _to_hf(config: MistralConfig) -> dict[str, Any]:
    return mistral_to_hf(config, "Mistral", 32_768)


_size = functools.partial(MistralConfig.of, rope_theta=1e6)

MISTRAL = decoder_only_family(
    "mistral",
    config=MistralConfig,
    architectures=("MistralForCausalLM",),
    special_ids={"eos_token_id": 2, "bos_token_id": 1},
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
