"""Rotary frequencies for texts that are longer than those of the first training.

Each kind has `frequencies(head_dim, theta)`, as `position_encoding.rope_frequencies`, and an
`attention_factor`, by which the cosines and sines are multiplied.

Sources: `transformers/modeling_rope_utils.py`; Peng et al. 2023 (YaRN), Ding et al. 2024
(LongRoPE).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.models.config import check_numbers
from specjax.models.family import HFFields
from specjax.models.position_encoding import rope_frequencies

_ORIGINAL, _LONGEST = "original_max_position_embeddings", "max_position_embeddings"


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

    attention_factor = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "rope_scaling")
        if self.low_freq_factor >= self.high_freq_factor:
            raise UserError(
                f"rope_scaling: low_freq_factor={self.low_freq_factor} must be less than "
                f"high_freq_factor={self.high_freq_factor}"
            )

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Divides low frequencies, keeps high ones, and interpolates between them."""
        frequencies = rope_frequencies(head_dim, theta)
        wavelengths = 2 * np.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_max_position / wavelengths
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1.0 - kept) * frequencies / self.factor + kept * frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRopeScaling:
    """YaRN: low frequencies are divided, high ones kept, with a ramp between two of them.

    Attributes:
      factor: low frequencies are divided by this.
      original_max_position: the context length before stretching.
      beta_fast: frequencies that turn more often than this within it are kept.
      beta_slow: those that turn less often are divided.
      attention_factor: of the cosines and sines.
      truncate: whether the ramp begins and ends at whole dimensions.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "rope_scaling")

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        plain = rope_frequencies(head_dim, theta)

        def dimension(turns: float) -> float:
            wavelength = self.original_max_position / (turns * 2 * math.pi)
            return head_dim * math.log(wavelength) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        ramp = (np.arange(len(plain), dtype=np.float32) - np.float32(low)) / np.float32(width)
        divided = np.clip(ramp, 0.0, 1.0)
        return plain / np.float32(self.factor) * divided + plain * (1 - divided)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE: each frequency is divided by a factor of its own; there are two lists of factors.

    transformers takes the list by the longest text so far, of all rows, and reads a text anew that
    passes the original length. Here a cache keeps what it has, and a row must not depend on others:
    one list serves all texts. That for short texts reads none that are longer.

    Attributes:
      short_factors: for texts within the original length; D // 2 of them.
      long_factors: for longer texts.
      original_max_position: the context length before stretching.
      max_position: the length after it.
      long: whether `long_factors` are in use.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    max_position: int
    long: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "rope_scaling")
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if not isinstance(factors, Sequence) or not all(
                type(x) in (int, float) and 0 < x < math.inf for x in factors
            ):
                raise UserError(f"rope_scaling: {name}={factors!r} must be positive numbers")
            object.__setattr__(self, name, tuple(map(float, factors)))

    @property
    def attention_factor(self) -> float:
        stretch = self.max_position / self.original_max_position
        if stretch <= 1.0:
            return 1.0
        return math.sqrt(1 + math.log(stretch) / math.log(self.original_max_position))

    @property
    def most_positions(self) -> int | None:
        """The longest text that the factors in use are for; None for any."""
        return None if self.long else self.original_max_position

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        factors = self.long_factors if self.long else self.short_factors
        return rope_frequencies(head_dim, theta) / np.asarray(factors, np.float32)


RopeScaling = Llama3RopeScaling | YarnRopeScaling | LongRopeScaling


def scaling_from_hf(fields: HFFields, kind: str, rope: HFFields) -> RopeScaling | None:
    """The scaling of a `config.json`, and its `rope_type` and fields; see `rope_from_hf`."""
    if kind == "default":
        return None
    if kind not in ("llama3", "yarn"):
        raise UserError(f"rope_type={kind!r} is not supported, only 'default', 'llama3' or 'yarn'")
    outer, inner = fields.values.get(_ORIGINAL), rope.values.get(_ORIGINAL)
    if None not in (outer, inner) and outer != inner:
        raise UserError(
            f"{_ORIGINAL}={outer!r} differs from {inner!r} in the rope parameters; "
            "keep the value that the model was trained with"
        )
    # As in transformers, whose default is the length itself.
    name = _LONGEST if outer is inner is None else _ORIGINAL
    original = (fields if inner is None else rope).whole(name)
    common: dict[str, Any] = {
        "factor": rope.positive("factor"),
        "original_max_position": original,
    }
    if kind == "llama3":
        return Llama3RopeScaling(
            **common,
            low_freq_factor=rope.positive("low_freq_factor"),
            high_freq_factor=rope.positive("high_freq_factor"),
        )
    own, all_dims = rope.positive("mscale", None), rope.positive("mscale_all_dim", None)

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(max(common["factor"], 1.0)) + 1.0

    usual = growth(own) / growth(all_dims) if own and all_dims else growth(1.0)
    return YarnRopeScaling(
        **common,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        attention_factor=rope.positive("attention_factor", usual),
        truncate=rope.flag("truncate", "truncate" not in rope.values),
    )


def longrope_from_hf(fields: HFFields, kind: str, rope: HFFields) -> LongRopeScaling | None:
    """The scaling of a Phi 3."""
    if kind == "default":
        return None
    if kind not in ("longrope", "su", "yarn"):  # its earlier names
        raise UserError(f"rope_type={kind!r} is not supported, only 'default' or 'longrope'")
    for name in ("factor", "attention_factor"):
        rope.refuse(name, (None,), None)
    return LongRopeScaling(
        short_factors=rope.values.get("short_factor", ()),
        long_factors=rope.values.get("long_factor", ()),
        original_max_position=fields.whole(_ORIGINAL, 4_096),
        max_position=fields.whole(_LONGEST, 4_096),
    )


def scaling_to_hf(scaling: RopeScaling | None, longest: int) -> tuple[dict[str, Any] | None, int]:
    """The inverse of both functions, and `max_position_embeddings`, without a scaling `longest`."""
    if scaling is None:
        return None, longest
    if isinstance(scaling, LongRopeScaling):
        # transformers 4.x reads these three names only.
        lists: dict[str, Any] = {
            "type": "longrope",
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
        }
        return lists, scaling.max_position
    values = dataclasses.asdict(scaling)
    kind = "yarn" if isinstance(scaling, YarnRopeScaling) else "llama3"
    original = values.pop("original_max_position")
    return {"rope_type": kind, **values, _ORIGINAL: original}, int(original * scaling.factor)
