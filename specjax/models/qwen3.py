"""Qwen 3: Llama with an RMS norm of each head's queries and keys.

Source: Qwen Team 2025; `transformers/models/qwen3`.
"""

import dataclasses
import functools
from typing import Any

from specjax.models.config import Style
from specjax.models.decoder_only import UNBIASED, RotaryConfig, decoder_only_family
from specjax.models.family import HFFields
from specjax.models.qwen2 import qwen_from_hf, qwen_to_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(RotaryConfig):
    """A Qwen 3. Published sizes have no window."""

    @property
    def style(self) -> Style:
        return dataclasses.replace(super().style, qk_norms="head")


def _from_hf(fields: HFFields) -> Qwen3Config:
    return Qwen3Config(**qwen_from_hf(fields, UNBIASED, num_key_value_heads=32, head_dim=128))


def _to_hf(config: Qwen3Config) -> dict[str, Any]:
    return qwen_to_hf(config, UNBIASED)


_size = functools.partial(Qwen3Config.of, 151_936, rope_theta=1e6)
_tied = functools.partial(_size, tie_embeddings=True)

QWEN3 = decoder_only_family(
    "qwen3",
    config=Qwen3Config,
    architectures=("Qwen3ForCausalLM",),
    from_hf=_from_hf,
    to_hf=_to_hf,
    presets={
        "qwen3_0.6b": _tied(1_024, 16, 8, 128, 3_072, 28),
        "qwen3_1.7b": _tied(2_048, 16, 8, 128, 6_144, 28),
        "qwen3_4b": _tied(2_560, 32, 8, 128, 9_728, 36),
        "qwen3_8b": _size(4_096, 32, 8, 128, 12_288, 36),
        "qwen3_14b": _size(5_120, 40, 8, 128, 17_408, 40),
        "qwen3_32b": _size(5_120, 64, 8, 128, 25_600, 64),
    },
)
