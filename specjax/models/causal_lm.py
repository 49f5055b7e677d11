"""Decoder-only networks as language models.

Axes: B rows, P prompt length, T tokens, V vocabulary.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from specjax.models.beginnings import begun, next_given, note
from specjax.models.cache import RaggedCache
from specjax.models.config import DecoderOnlyConfig
from specjax.models.model import Model, check_integers, prefix_or_empty, repeat_first
from specjax.types import Array, Params, Prefilled, Prompts

# The tokens that a pass after a common beginning reads: one program serves prompts of any length.
_PASS = 64


class CausalLM(Model):
    """A decoder-only network as a language model.

    Attributes:
      config: the configuration of its family.
    """

    config: DecoderOnlyConfig

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """The number of tokens in the prompt and the prefix."""
        return input_lengths + prefix_lengths

    def _init_variables(self, key: Array) -> Any:
        return self.network.init(key, jnp.zeros((1, 1), jnp.int32))

    def apply(self, params: Params, tokens: Array) -> Array:
        """The logits of known tokens, all positions at once (teacher forcing).

        Args:
          params: the parameters.
          tokens: `[B, T]` int32, padded on the right.

        Returns:
          `[B, T, V]` float32; entry t predicts `tokens[:, t + 1]`.

        Raises:
          ValueError: if `tokens` is not an integer array of rank 2.
        """
        check_integers("tokens", tokens, (None, None))
        return self._apply(params, tokens)

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Prefilled:
        """Reads all tokens of each prompt except its last.

        If all tokens of a prompt see each other (`Style.bidirectional_inputs`), the last is read
        too; the first extend overwrites its entries.

        Returns:
          A `Prefilled` whose tokens are the last tokens of the prompts.

        Raises:
          ValueError: if the shapes or dtypes do not agree.
        """
        inputs, input_lengths = prompts.inputs, prompts.input_lengths
        check_integers("inputs", inputs, (None, None))
        rows = inputs.shape[0]
        check_integers("input_lengths", input_lengths, (rows,))
        lengths = input_lengths.astype(jnp.int32)
        prefix, prefix_lengths = prefix_or_empty(prompts)
        # The prefix of each row follows its last input token and overwrites the padding.
        tokens = jnp.pad(repeat_first(inputs, lengths), ((0, 0), (0, prefix.shape[1])))
        slots = lengths[:, None] + jnp.arange(prefix.shape[1], dtype=jnp.int32)[None]
        tokens = tokens.at[jnp.arange(rows, dtype=jnp.int32)[:, None], slots].set(prefix)
        positions = lengths + prefix_lengths - 1
        last = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
        cache = self._empty_cache(rows, max_length)
        whole = self.config.style.bidirectional_inputs
        if not whole and (given := next_given()) is not None:
            starts, beginning = given
            cache = self._continued(params, tokens, positions, starts, begun(cache, beginning))
            return Prefilled(cache, last, positions)
        read, seen = tokens[:, :-1], None
        if whole:
            seen = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] <= positions[:, None]
            read = tokens
        if read.shape[1]:
            updates = self._apply(params, read, seen=seen, method="read")
            cache = self.write(cache, updates, jnp.zeros_like(positions))
        return Prefilled(cache if whole else note(cache), last, positions)

    def _continued(
        self, params: Params, tokens: Array, ends: Array, starts: Array, cache: RaggedCache
    ) -> RaggedCache:
        """The cache with `tokens [B, P]` from `starts` (scalar or `[B]`) up to `ends [B]`."""
        width = min(_PASS, tokens.shape[1])

        def step(carry: tuple[Array, RaggedCache]) -> tuple[Array, RaggedCache]:
            at, cache = carry
            place = at[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
            # Later entries than the end of a row are stale.
            block = jnp.take_along_axis(tokens, place, axis=1, mode="clip")
            return at + width, self.extend(params, cache, block, at)[2]

        at = jnp.broadcast_to(starts, ends.shape).astype(jnp.int32)
        return lax.while_loop(lambda carry: jnp.any(carry[0] < ends), step, (at, cache))[1]
