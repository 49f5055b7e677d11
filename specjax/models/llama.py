"""Llama 1, 2 and 3: RoPE, grouped queries, SwiGLU, RMS norms.

Source: Touvron et al. 2023; `transformers/models/llama`, `transformers/modeling_rope_utils.py`.
"""

import numpy as np

from specjax.models.config import Llama3RopeScaling, LlamaConfig
from specjax.models.decoder_only import DecoderOnly, Style


def rope_frequencies(
    head_dim: int, theta: float, scaling: Llama3RopeScaling | None = None
) -> tuple[float, ...]:
    """The angle per position of each pair of dimensions.

    Args:
      head_dim: D.
      theta: the base of the frequencies.
      scaling: scales long wavelengths, keeps short ones and interpolates between them; or None.

    Returns:
      D // 2 radians per position, in float32.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.float32(theta) ** exponents
    if scaling is not None:
        wavelengths = 2 * np.pi / frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_max_position / wavelengths
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
    return tuple(frequencies.astype(np.float32).tolist())


class Llama(DecoderOnly):
    """A Llama as a language model.

    Attributes:
      config: a `LlamaConfig`.
    """

    config: LlamaConfig

    @property
    def style(self) -> Style:
        """Llama's style for this configuration."""
        config = self.config
        return Style(
            activations=("silu", "linear"),
            query_scale=config.head_dim**-0.5,
            rope_frequencies=rope_frequencies(
                config.head_dim, config.rope_theta, config.rope_scaling
            ),
            windows=(None,) * config.num_layers,
            embed_stddev=config.embed_dim**-0.5 if config.tie_embeddings else 1.0,
        )


__all__ = ["Llama", "rope_frequencies"]
