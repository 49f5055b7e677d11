"""Gemma 2: soft caps, a sliding window in every other layer, norms before and after each block.

Source: Gemma Team 2024; `transformers/models/gemma2`.
"""

from specjax.models.config import Gemma2Config
from specjax.models.decoder_only import DecoderOnly, Style
from specjax.models.llama import rope_frequencies


class Gemma2(DecoderOnly):
    """A Gemma 2 as a language model.

    Attributes:
      config: a `Gemma2Config`.
    """

    config: Gemma2Config

    @property
    def style(self) -> Style:
        """Gemma 2's style for this configuration."""
        config = self.config
        return Style(
            activations=("gelu", "linear"),
            query_scale=config.query_pre_attn_scalar**-0.5,
            rope_frequencies=rope_frequencies(config.head_dim, config.rope_theta),
            windows=tuple(
                config.sliding_window if i % 2 == 0 else None for i in range(config.num_layers)
            ),
            embed_stddev=config.embed_dim**-0.5,
            embed_scale=config.embed_dim**0.5,
            plus_one_norms=True,
            post_norms=True,
            attn_softcap=config.attn_logit_softcap,
            final_softcap=config.final_logit_softcap,
        )


__all__ = ["Gemma2"]
