"""Decoder-only networks: the code that Llama and Gemma 2 share.

Axes: B rows, T tokens, E model width, D head width, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from specjax.models import cache as cache_lib
from specjax.models.cache import CacheEntries, CacheLayout
from specjax.models.config import Gemma2Config, LlamaConfig
from specjax.models.layers import (
    MLP,
    Attention,
    Embed,
    LogitsDense,
    Memory,
    Past,
    RMSNorm,
    attended,
    block_bias,
    block_updates,
)
from specjax.models.model import Model, check_tokens, prefix_or_empty, repeat_first
from specjax.models.rope import Rope, rope_angles
from specjax.types import Array, Params, Prefilled


@dataclasses.dataclass(frozen=True)
class Style:
    """The differences between the families.

    Attributes:
      activations: the activations of the feed-forward block.
      query_scale: the factor of the attention logits.
      rope_frequencies: D // 2 radians per position.
      windows: for each layer, the number of positions that a query sees; None for all.
      embed_stddev: the standard deviation of the initial embedding.
      embed_scale: the factor of the embedded tokens.
      plus_one_norms: `plus_one` of `RMSNorm`.
      post_norms: whether a norm follows each block, before the residual addition.
      attn_softcap: `softcap` of `Attention`.
      final_softcap: the same for the output logits.
    """

    activations: tuple[str, str]
    query_scale: float
    rope_frequencies: tuple[float, ...]
    windows: tuple[int | None, ...]
    embed_stddev: float
    embed_scale: float = 1.0
    plus_one_norms: bool = False
    post_norms: bool = False
    attn_softcap: float | None = None
    final_softcap: float | None = None


class DecoderLayer(nn.Module):
    """A layer: self-attention and a feed-forward block."""

    config: LlamaConfig | Gemma2Config
    style: Style
    layout: CacheLayout

    def setup(self) -> None:
        """Creates the submodules."""
        config, style = self.config, self.style
        self.pre_self_attention_layer_norm = _norm(config, style)
        self.self_attention = Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            features=config.embed_dim,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            scale=style.query_scale,
            softcap=style.attn_softcap,
            layout=self.layout,
        )
        self.pre_mlp_layer_norm = _norm(config, style)
        self.mlp = MLP(config.mlp_dim, style.activations, config.dtype, config.param_dtype)
        if style.post_norms:
            self.post_self_attention_layer_norm = _norm(config, style)
            self.post_mlp_layer_norm = _norm(config, style)

    def __call__(
        self, x: Array, bias: Array, past: Past | None, rope: Rope
    ) -> tuple[Array, Array, Array]:
        """`x [B, T, E]` -> `[B, T, E]`, keys and values (see `attended`)."""
        y = self.pre_self_attention_layer_norm(x)
        keys, values = self.self_attention.keys_values(y, rope)
        segments, keys, values = attended(past, keys, values, bias)
        y = self.self_attention(y, segments, rope)
        if self.style.post_norms:
            y = self.post_self_attention_layer_norm(y)
        x = x + y
        y = self.mlp(self.pre_mlp_layer_norm(x))
        if self.style.post_norms:
            y = self.post_mlp_layer_norm(y)
        return x + y, keys, values


class DecoderStack(nn.Module):
    """The layers, the last norm and the untied output projection."""

    config: LlamaConfig | Gemma2Config
    style: Style
    layout: CacheLayout

    def setup(self) -> None:
        """Creates the submodules."""
        config = self.config
        layer = functools.partial(DecoderLayer, config, self.style, self.layout)
        self.layers = [layer() for _ in range(config.num_layers)]
        self.decoder_norm = _norm(config, self.style)
        if not config.tie_embeddings:
            self.logits_dense = LogitsDense(config.vocab_size, config.param_dtype)

    def __call__(self, x: Array, memory: Memory | None = None) -> tuple[Array, CacheEntries]:
        """Embedded tokens `x [B, T, E]` -> hidden `[B, T, E]` and the block's entries.

        Without a memory the block starts at position 0 of each row.
        """
        length = x.shape[1]
        start = jnp.zeros(x.shape[0], jnp.int32) if memory is None else memory.positions
        positions = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        rope = rope_angles(positions, np.asarray(self.style.rope_frequencies, np.float32))
        windows = self.style.windows
        biases = {w: block_bias(length, w) for w in set(windows)}
        past_biases = {}
        if memory is not None:
            past_biases = {w: memory.bias(length, w) for w in set(windows)}
        keys, values = [], []
        for i, (layer, window) in enumerate(zip(self.layers, windows, strict=True)):
            past = None if memory is None else memory.layer(i, past_biases[window])
            x, layer_keys, layer_values = layer(x, biases[window], past, rope)
            keys.append(layer_keys)
            values.append(layer_values)
        x = self.decoder_norm(x)
        return x, block_updates(keys, values, x)


class DecoderOnlyNetwork(nn.Module):
    """The embedding, the decoder and the output projection."""

    config: LlamaConfig | Gemma2Config
    style: Style
    layout: CacheLayout = CacheLayout()  # noqa: RUF009  immutable

    def setup(self) -> None:
        """Creates the submodules."""
        config = self.config
        self.token_embedder = Embed(
            config.vocab_size,
            config.embed_dim,
            config.dtype,
            config.param_dtype,
            self.style.embed_stddev,
        )
        self.decoder = DecoderStack(config, self.style, self.layout)

    def embed(self, tokens: Array) -> Array:
        """Tokens `[B, T]` -> `[B, T, E]`."""
        x = self.token_embedder(tokens)
        if self.style.embed_scale != 1.0:
            # Gemma was trained with the factor rounded to the dtype of the activations.
            x = x * jnp.asarray(self.style.embed_scale, x.dtype)
        return x

    def logits(self, hidden: Array) -> Array:
        """Hidden `[B, T, E]` -> logits `[B, T, V]` float32."""
        if self.config.tie_embeddings:
            logits = self.token_embedder.attend(hidden)
        else:
            logits = self.decoder.logits_dense(hidden)
        cap = self.style.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def read(self, tokens: Array) -> CacheEntries:
        """The cache entries of tokens `[B, T]` that start at position 0."""
        return self.decoder(self.embed(tokens))[1]

    def score(self, tokens: Array, memory: Memory) -> tuple[Array, Array, CacheEntries]:
        """See `Model.score`."""
        hidden, updates = self.decoder(self.embed(tokens), memory)
        return self.logits(hidden), hidden, updates

    def __call__(self, tokens: Array) -> Array:
        """Runs the whole network on known tokens: logits `[B, T, V]` float32."""
        return self.logits(self.decoder(self.embed(tokens))[0])


def _norm(config: LlamaConfig | Gemma2Config, style: Style) -> RMSNorm:
    return RMSNorm(config.norm_eps, config.dtype, config.param_dtype, style.plus_one_norms)


class DecoderOnly(Model):
    """A decoder-only network as a language model.

    Attributes:
      config: the configuration of its family.
    """

    config: LlamaConfig | Gemma2Config

    @property
    def style(self) -> Style:
        """The family's style for this configuration."""
        raise NotImplementedError

    @property
    def network(self) -> DecoderOnlyNetwork:
        """The flax.linen module."""
        return DecoderOnlyNetwork(self.config, self.style, self.layout)

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """The tokens of the prompt and the prefix."""
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
        check_tokens("tokens", tokens)
        return self._apply(params, tokens)

    def prefill(
        self,
        params: Params,
        inputs: Array,
        input_lengths: Array,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> Prefilled:
        """Reads all tokens of each prompt except its last.

        Args:
          params: the parameters.
          inputs: `[B, P]` int32, padded on the right.
          input_lengths: `[B]` int32, at least 1.
          max_length: S, the number of positions of the cache (static).
          prefix: `[B, F]` int32, forced first tokens of the output, which follow the prompt.
          prefix_lengths: `[B]` int32.

        Returns:
          A `Prefilled` whose tokens are the last tokens of the prompts.

        Raises:
          ValueError: if the shapes or dtypes do not agree.
        """
        check_tokens("inputs", inputs, input_lengths)
        config = self.config
        rows = inputs.shape[0]
        lengths = input_lengths.astype(jnp.int32)
        prefix, prefix_lengths = prefix_or_empty(inputs, prefix, prefix_lengths)
        # The prefix of each row follows its last input token and overwrites the padding.
        tokens = jnp.pad(repeat_first(inputs, lengths), ((0, 0), (0, prefix.shape[1])))
        slots = lengths[:, None] + jnp.arange(prefix.shape[1], dtype=jnp.int32)[None]
        tokens = tokens.at[jnp.arange(rows, dtype=jnp.int32)[:, None], slots].set(prefix)
        positions = lengths + prefix_lengths - 1
        cache = cache_lib.allocate(
            config.num_layers,
            rows,
            config.num_kv_heads,
            max_length,
            config.head_dim,
            config.dtype,
            self.layout,
        )
        if tokens.shape[1] > 1:
            updates = self._apply(params, tokens[:, :-1], method="read")
            cache = self.write(cache, updates, jnp.zeros_like(positions))
        last = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
        return Prefilled(cache, last, positions)
