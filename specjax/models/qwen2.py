"""Qwen 2 and 2.5: Llama with biases on queries, keys and values; perhaps windows in later layers.

Source: Qwen Team 2024; `transformers/models/qwen2`.
"""

import dataclasses
import functools
from typing import Any

from specjax.models.causal_lm import CausalLM
from specjax.models.config import Style
from specjax.models.family import LLAMA_NORMS, Family, decoder_only_names
from specjax.models.hf_fields import HFFields
from specjax.models.rotary import (
    FULL,
    SILU,
    SLIDING,
    Constants,
    RotaryConfig,
    layer_types,
    rotary_from_hf,
    rotary_to_hf,
    windows_from_hf,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(RotaryConfig):
    """A Qwen 2 or 2.5. Published sizes have no window."""

    @property
    def style(self) -> Style:
        """How the decoder computes."""
        return dataclasses.replace(super().style, biases=True)


def qwen_from_hf(fields: HFFields, constants: Constants, **defaults: Any) -> dict[str, Any]:
    """The fields that Qwen 2 and Qwen 3 share.

    Args:
      fields: of the `config.json`.
      constants: the fields that may have only certain values.
      **defaults: see `decoder_only_from_hf`.

    Returns:
      The fields of a configuration.
    """
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
    types = layer_types(config)
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

QWEN2 = Family(
    name="qwen2",
    config=Qwen2Config,
    model=CausalLM,
    architectures=("Qwen2ForCausalLM",),
    special_ids={},
    names=decoder_only_names(LLAMA_NORMS),
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
