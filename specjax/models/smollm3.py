"""SmolLM3: Llama without rotation in every fourth layer.

Source: Bakouch et al. 2025; `transformers/models/smollm3`.
"""

import dataclasses
from typing import Any

from specjax.errors import UserError
from specjax.models.config import Style
from specjax.models.decoder_only import (
    FULL,
    NO_BIASES,
    SLIDING,
    RotaryConfig,
    decoder_only_family,
    rotary_from_hf,
    rotary_to_hf,
    types_of_layers,
    windows_from_hf,
)
from specjax.models.family import HFFields


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(RotaryConfig):
    """A SmolLM3.

    Attributes:
      rotated: for each layer, whether it rotates queries and keys; empty: all but every fourth.
    """

    rope_theta: float = 2e6
    rotated: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = isinstance(self.rotated, tuple | list)
        if not listed or not all(isinstance(flag, bool) for flag in self.rotated):
            raise UserError(f"rotated={self.rotated!r} must be a tuple of True and False")
        object.__setattr__(self, "rotated", tuple(self.rotated))
        if self.rotated and len(self.rotated) != self.num_layers:
            raise UserError(
                f"rotated has {len(self.rotated)} values, but num_layers={self.num_layers}"
            )

    @property
    def style(self) -> Style:
        style = super().style
        rotated = self.rotated or _every_fourth(self.num_layers)
        ropes = (rope if on else None for rope, on in zip(style.ropes, rotated, strict=True))
        return dataclasses.replace(style, ropes=tuple(ropes))


def _every_fourth(count: int, interval: int = 4) -> tuple[bool, ...]:
    return tuple((i + 1) % interval != 0 for i in range(count))


def _from_hf(fields: HFFields) -> SmolLM3Config:
    sizes = rotary_from_hf(fields, NO_BIASES, theta=2e6, tied=True, num_key_value_heads=4)
    count = sizes["num_layers"]
    rotated = fields.values.get("no_rope_layers")  # 1 where a layer rotates
    if rotated is None:
        rotated = _every_fourth(count, fields.whole("no_rope_layer_interval", 4))
    if (
        not isinstance(rotated, list | tuple)
        or len(rotated) != count
        or not all(flag in (0, 1) for flag in rotated)
    ):
        raise UserError(
            f"no_rope_layers={rotated!r} must be a list of 0 and 1, one for each of "
            f"num_hidden_layers={count}"
        )
    rotated = tuple(map(bool, rotated))
    window, types = None, [FULL] * count
    if fields.flag("use_sliding_window", False) and (window := fields.window(None)) is not None:
        types = [FULL if on else SLIDING for on in rotated]
    return SmolLM3Config(
        **sizes,
        **windows_from_hf(fields, window, types, count),
        rotated=() if rotated == _every_fourth(count) else rotated,
    )


def _to_hf(config: SmolLM3Config) -> dict[str, Any]:
    types = types_of_layers(config)
    return {
        **rotary_to_hf(config, NO_BIASES, 65_536),
        "use_sliding_window": SLIDING in types,
        "sliding_window": config.sliding_window if SLIDING in types else None,
        "layer_types": types,
        "no_rope_layers": [int(rope is not None) for rope in config.style.ropes],
        "no_rope_layer_interval": 4,
    }


SMOLLM3 = decoder_only_family(
    "smollm3",
    config=SmolLM3Config,
    architectures=("SmolLM3ForCausalLM",),
    special_ids={"eos_token_id": 128_001, "pad_token_id": 128_004, "bos_token_id": 128_000},
    from_hf=_from_hf,
    to_hf=_to_hf,
    presets={
        "smollm3_3b": SmolLM3Config.of(
            128_256, 2_048, 16, 4, 128, 11_008, 36, rope_theta=5e6, tie_embeddings=True
        ),
    },
)
