"""Qwen 2 and 2.5: Llama with biases on queries, keys and values; perhaps windows in later layers.

Source: Qwen Team 2024; `transformers/models/qwen2`.
"""

import dataclasses
import functools
from typing import Any

from specjax.models.config import Style
from specjax.models.decoder_only import (
    FULL,
    SILU,
    SLIDING,
    Constants,
    RotaryConfig,
    decoder_only_family,
    rotary_from_hf,
    rotary_to_hf,
    types_of_layers,
    windows_from_hf,
)
from specjax.models.family import HFFields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(RotaryConfig):
    """A Qwen 2 or 2.5. Published sizes have no window."""

    @property
    def style(self) -> Style:
        return dataclasses.replace(super().style, biases=True)


def qwen_from_hf(fields: HFFields, constants: Constants, **defaults: Any) -> dict[str, Any]:
    """The fields that Qwen 2 and Qwen 3 share; see `rotary_from_hf`."""
    sizes = rotary_from_hf(fields, constants, **defaults)
    count = sizes["num_layers"]
    window, types = None, [FULL] * count
    if fields.flag("use_sliding_window", False):
        window = fields.window(4096)
        start = fields.whole("max_window_layers", 28, least=0)
        if window is not None:
            types = [SLIDING if i >= start else FULL for i in range(count)]
    return {**sizes, **windows_from_hf(fields, window, types, count)}


def qwen_to_hf(config: RotaryConfig, constants: Constants = SILU) -> dict[str, Any]:
    """The inverse of `qwen_from_hf`."""
    types = types_of_layers(config)
    windowed = SLIDING in types
    return {
        **rotary_to_hf(config, constants, 32_768),
        "use_sliding_window": windowed,
        "sliding_window": config.sliding_window if windowed else None,
        "max_window_layers": types.index(SLIDING) if windowed else config.num_layers,
        "layer_types": types,
    }


def _from_hf(fields: HFFields) -> Qwen2Config:
    return Qwen2Config(**qwen_from_hf(fields, SILU, num_key_value_heads=32))


# The small sizes share the embedding, of fewer rows for the same tokens.
_small = functools.partial(Qwen2Config.of, 151_936, rope_theta=1e6, tie_embeddings=True)
_large = functools.partial(Qwen2Config.of, 152_064, rope_theta=1e6)

QWEN2 = decoder_only_family(
    "qwen2",
    config=Qwen2Config,
    architectures=("Qwen2ForCausalLM",),
    from_hf=_from_hf,
    to_hf=qwen_to_hf,
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
