"""What decoder-only families with rotary positions share: windows by layer, and Llama's style."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.models.config import DecoderOnlyConfig, Style
from specjax.models.hf_fields import (
    HFFields,
    decoder_only_from_hf,
    decoder_only_to_hf,
    default_rope,
    rope_to_hf,
)
from specjax.models.position_encoding import rope_frequencies

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig(DecoderOnlyConfig):
    """A decoder-only network with rotary positions, perhaps with windows.

    Attributes:
      rope_theta: base of the rotary frequencies.
      sliding_window: in a layer with a window, a query at position t sees keys at t - window + 1
        .. t; None: no layer has a window.
      layer_types: for each layer, "sliding_attention" or "full_attention", as in Hugging Face's
        files; empty: all layers have the window, or none if `sliding_window` is None.
    """

    rope_theta: float = 10_000.0
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if set(self.layer_types) - {SLIDING, FULL}:
            raise UserError(f"layer_types={self.layer_types} may only name {SLIDING} and {FULL}")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise UserError(
                f"layer_types has {len(self.layer_types)} names, but num_layers={self.num_layers}"
            )
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise UserError(f"layer_types names {SLIDING}, so sliding_window must be given")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, None for all positions."""
        types = self.layer_types or (SLIDING,) * self.num_layers
        return tuple(self.sliding_window if kind == SLIDING else None for kind in types)

    @property
    def style(self) -> Style:
        """How the decoder computes."""
        frequencies = rope_frequencies(self.head_dim, self.rope_theta)
        return llama_style(self, frequencies, windows=self.windows)


def llama_style(config: DecoderOnlyConfig, frequencies: np.ndarray, **changes: Any) -> Style:
    """Llama's style, with changes.

    Args:
      config: the configuration.
      frequencies: `[D // 2]`, the rotary frequencies of all layers.
      **changes: other fields of `Style`.

    Returns:
      The style.
    """
    rope = tuple(frequencies.astype(np.float32).tolist())
    fields: dict[str, Any] = {
        "activations": ("silu", "linear"),
        "windows": (None,) * config.num_layers,
        "ropes": (rope,) * config.num_layers,
        "query_scale": config.head_dim**-0.5,
        "embed_stddev": config.embed_dim**-0.5 if config.tie_embeddings else 1.0,
    }
    return Style(**(fields | changes))


# Fields of a family that may have only these values; the first is the default, and is written.
Constants = Mapping[str, tuple[Any, ...]]
SILU: Constants = {"hidden_act": ("silu", "swish")}
UNBIASED: Constants = {**SILU, "attention_bias": (False,)}
NO_BIASES: Constants = {**UNBIASED, "mlp_bias": (False,)}


def rotary_from_hf(
    fields: HFFields,
    constants: Constants,
    *,
    theta: float = 10_000.0,
    tied: bool = False,
    **defaults: Any,
) -> dict[str, Any]:
    """Sizes, rotary base and tied embeddings of a family whose frequencies are not scaled.

    Args:
      fields: of the `config.json`.
      constants: the fields that may have only certain values.
      theta: the rotary base of a file that has none.
      tied: whether the embeddings of a file that does not say are tied.
      **defaults: see `decoder_only_from_hf`.

    Raises:
      ValueError: for a value that is not possible or not supported.
    """
    fields.refuse_others(constants)
    return {
        **decoder_only_from_hf(fields, **defaults),
        "rope_theta": default_rope(fields, theta),
        "tie_embeddings": fields.flag("tie_word_embeddings", tied),
    }


def rotary_to_hf(
    config: Any, constants: Constants, longest: int, scaling: Any = None
) -> dict[str, Any]:
    """The inverse of `rotary_from_hf`; `longest` is the usual `max_position_embeddings`."""
    return {
        **decoder_only_to_hf(config),
        **{name: allowed[0] for name, allowed in constants.items()},
        "max_position_embeddings": longest,
        **rope_to_hf(config.rope_theta, scaling),
    }


def windows_from_hf(
    fields: HFFields, window: int | None, types: Sequence[str], count: int
) -> dict[str, Any]:
    """The fields of the windows: the file's `layer_types`, or a family's usual types.

    Args:
      fields: of the `config.json`.
      window: the window, None for none.
      types: the types of the layers if the file does not list them.
      count: the number of layers.

    Returns:
      `sliding_window` and `layer_types` of a `RotaryConfig`.

    Raises:
      ValueError: for a list that does not fit the layers.
    """
    found = fields.values.get("layer_types")
    found = types if found is None else found
    if not isinstance(found, list | tuple) or not all(x in (SLIDING, FULL) for x in found):
        raise UserError(
            f"{fields.path}: layer_types={found!r} must be a list of {SLIDING!r} and {FULL!r}"
        )
    if len(found) != count:
        raise UserError(
            f"{fields.path}: layer_types has {len(found)} names, but num_hidden_layers={count}"
        )
    if SLIDING not in found:
        return {"sliding_window": None, "layer_types": ()}
    if window is None:
        raise UserError(f"{fields.path}: layer_types names {SLIDING!r}, but no sliding_window")
    every = FULL not in found
    return {"sliding_window": window, "layer_types": () if every else tuple(found)}


def layer_types(config: RotaryConfig) -> list[str]:
    """The types of all layers, for Hugging Face's files."""
    return [FULL if window is None else SLIDING for window in config.windows]
