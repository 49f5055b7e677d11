"""Encoder-decoders as language models.

Axes: B rows, P encoder length, T decoder tokens, F prefix length, V vocabulary.
"""

from typing import Any

import jax.numpy as jnp

from specjax.errors import UserError
from specjax.models.model import Model, check_integers, prefix_or_empty, repeat_first
from specjax.types import Array, Params, Prefilled, Prompts


class Seq2SeqLM(Model):
    """An encoder-decoder as a language model of its outputs.

    Attributes:
      config: the configuration of its family, with `decoder_start_token`.
    """

    config: Any

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """The start token and the prefix; the inputs take no positions of the decoder's cache."""
        return prefix_lengths + 1

    def _init_variables(self, key: Array) -> Any:
        tokens = jnp.zeros((1, 1), jnp.int32)
        return self.network.init(key, tokens, tokens, tokens == 0)

    def apply(
        self,
        params: Params,
        encoder_tokens: Array,
        decoder_tokens: Array,
        *,
        encoder_mask: Array | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """The logits of known outputs, all positions at once (teacher forcing).

        Args:
          params: the parameters.
          encoder_tokens: `[B, P]` int32.
          decoder_tokens: `[B, T]` int32, the inputs of the decoder: the start token, then the
            outputs without their last token.
          encoder_mask: `[B, P]` bool, false at padding (not in a whole row); None: no padding.
          dropout_key: a PRNG key; it is consumed. Without it there is no dropout.

        Returns:
          `[B, T, V]` float32; entry t predicts the output after `decoder_tokens[:, t]`.

        Raises:
          ValueError: if the shapes or dtypes do not agree.
        """
        check_integers("encoder_tokens", encoder_tokens, (None, None))
        check_integers("decoder_tokens", decoder_tokens, (None, None))
        if encoder_mask is None:
            encoder_mask = jnp.ones(encoder_tokens.shape, bool)
        if encoder_mask.shape != encoder_tokens.shape:
            raise UserError(
                f"encoder_mask must have encoder_tokens' shape {list(encoder_tokens.shape)}, "
                f"got {list(encoder_mask.shape)}"
            )
        return self._apply(
            params,
            decoder_tokens,
            encoder_tokens,
            encoder_mask,
            deterministic=dropout_key is None,
            rngs=None if dropout_key is None else {"dropout": dropout_key},
        )

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Prefilled:
        """Runs the encoder, and the decoder on all tokens of a forced prefix except its last.

        Returns:
          A `Prefilled` whose tokens are the prefixes' last tokens, or the start token at 0.

        Raises:
          ValueError: if the shapes or dtypes do not agree.
        """
        inputs, input_lengths = prompts.inputs, prompts.input_lengths
        check_integers("inputs", inputs, (None, None))
        rows = inputs.shape[0]
        check_integers("input_lengths", input_lengths, (rows,))
        prefix, positions = prefix_or_empty(prompts)
        lengths = input_lengths.astype(jnp.int32)[:, None]
        mask = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None] < lengths
        inputs = repeat_first(inputs, input_lengths)
        cross = self._apply(params, inputs, mask, method="encode")
        start = jnp.full((rows, 1), self.config.decoder_start_token, jnp.int32)
        tokens = jnp.concatenate([start, prefix], axis=1)
        cache = self._empty_cache(rows, max_length)._replace(cross=cross)
        if prefix.shape[1]:
            updates = self._apply(params, tokens[:, :-1], cross, method="read")
            cache = self.write(cache, updates, jnp.zeros_like(positions))
        last = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
        return Prefilled(cache, last, positions)
