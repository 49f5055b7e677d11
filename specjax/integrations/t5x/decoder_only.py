"""T5X's decoder-only network with a ragged cache: T5's decoder without cross-attention.

Axes: B rows, P prompt length, T tokens, E model width, V vocabulary.

Source: `t5x/examples/decoder_only/network.py`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from specjax.checkpoints.t5x_config import BUCKETS, MAX_DISTANCE
from specjax.models import CacheEntries, Model, ModelConfig
from specjax.models.attention import (
    MASKED,
    Attention,
    Memory,
    Past,
    attended,
    block_bias,
    block_updates,
)
from specjax.models.cache import allocate, write
from specjax.models.layers import MLP, Embed, LogitsDense, RMSNorm
from specjax.models.model import check_tokens, repeat_first
from specjax.models.relpos import RelativePositionBias
from specjax.types import Array, Params, Prefilled


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOnlyT5Config(ModelConfig):
    """T5X's `TransformerConfig`.

    Attributes:
      num_layers: how many.
      mlp_activations: see `specjax.models.T5Config`.
      bidirectional_inputs: whether the tokens of a prompt see each other in both directions (T5X's
        `inputs_bidirectional_attention`, a prefix language model).
    """

    num_layers: int
    mlp_activations: tuple[str, ...] = ("relu",)
    bidirectional_inputs: bool = False


class _Layer(nn.Module):
    """Self-attention and a feed-forward block."""

    config: DecoderOnlyT5Config

    def setup(self) -> None:
        """Creates the submodules."""
        config = self.config
        self.pre_self_attention_layer_norm = _norm(config)
        self.self_attention = Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            features=config.embed_dim,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
        )
        self.pre_mlp_layer_norm = _norm(config)
        self.mlp = MLP(config.mlp_dim, config.mlp_activations, config.dtype, config.param_dtype)

    def __call__(self, x: Array, bias: Array, past: Past | None) -> tuple[Array, Array, Array]:
        """`x [B, T, E]` -> `[B, T, E]`; keys `[B, H, T, D]` and values `[B, H, D, T]`."""
        y = self.pre_self_attention_layer_norm(x)
        keys, values = self.self_attention.keys_values(y)
        segments, keys, values = attended(past, keys, values, bias)
        x = x + self.self_attention(y, segments)
        return x + self.mlp(self.pre_mlp_layer_norm(x)), keys, values


class _Decoder(nn.Module):
    """The layers, the shared bias, the last norm and the untied output projection."""

    config: DecoderOnlyT5Config

    def setup(self) -> None:
        """Creates the submodules."""
        config = self.config
        self.relpos_bias = RelativePositionBias(
            config.num_heads, BUCKETS, MAX_DISTANCE, False, config.param_dtype
        )
        self.layers = [_Layer(config) for _ in range(config.num_layers)]
        self.decoder_norm = _norm(config)
        if not config.tie_embeddings:
            self.logits_dense = LogitsDense(config.vocab_size, config.param_dtype)

    def __call__(
        self, x: Array, memory: Memory | None = None, seen: Array | None = None
    ) -> tuple[Array, CacheEntries]:
        """Embedded tokens `x [B, T, E]` -> hidden `[B, T, E]` and the block's entries.

        `seen [B, T]` bool: tokens that all others see, also those before them.
        """
        length = x.shape[1]
        mask = block_bias(length)
        if seen is not None:
            mask = jnp.maximum(mask, jnp.where(seen, 0.0, MASKED)[:, None, None, None])
        bias, past_bias = self.relpos_bias.block(length) + mask, mask
        if memory is not None:
            size = memory.max_length
            cached = self.relpos_bias.cached(memory.positions, length, size)
            past_bias = memory.bias(length) + cached
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            past = None if memory is None else memory.layer(i, past_bias)
            x, layer_keys, layer_values = layer(x, bias, past)
            keys.append(layer_keys)
            values.append(layer_values)
        x = self.decoder_norm(x)
        return x, block_updates(keys, values, x)


class _Network(nn.Module):
    """The embedding and the decoder."""

    config: DecoderOnlyT5Config

    def setup(self) -> None:
        """Creates the submodules."""
        config = self.config
        self.token_embedder = Embed(
            config.vocab_size, config.embed_dim, config.dtype, config.param_dtype
        )
        self.decoder = _Decoder(config)

    def read(self, tokens: Array, seen: Array | None) -> CacheEntries:
        """The cache entries of tokens `[B, T]` that start at position 0."""
        return self.decoder(self.token_embedder(tokens), seen=seen)[1]

    def score(self, tokens: Array, memory: Memory) -> tuple[Array, Array, CacheEntries]:
        """See `Model.score`."""
        hidden, updates = self.decoder(self.token_embedder(tokens), memory)
        return self.logits(hidden), hidden, updates

    def logits(self, hidden: Array) -> Array:
        """Hidden `[B, T, E]` -> logits `[B, T, V]` float32."""
        if not self.config.tie_embeddings:
            return self.decoder.logits_dense(hidden)
        logits = self.token_embedder.attend(hidden)
        return logits * jnp.float32(self.config.embed_dim**-0.5)

    def __call__(self, tokens: Array) -> Array:
        """Runs the whole network on known tokens: logits `[B, T, V]` float32."""
        return self.logits(self.decoder(self.token_embedder(tokens))[0])


def _norm(config: DecoderOnlyT5Config) -> RMSNorm:
    return RMSNorm(config.norm_eps, config.dtype, config.param_dtype)


@dataclasses.dataclass(frozen=True)
class DecoderOnlyT5(Model):
    """T5X's decoder-only network as a language model.

    A prompt is what T5X feeds it: token 0, then the inputs.

    Attributes:
      config: its sizes.
    """

    config: DecoderOnlyT5Config

    def for_devices(self, platform: str, ways: int = 1) -> "DecoderOnlyT5":
        """Itself: its cache has one layout."""
        return self

    @property
    def network(self) -> _Network:
        """The flax.linen module."""
        return _Network(self.config)

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """All tokens of the prompt; it takes no prefix."""
        return input_lengths + prefix_lengths

    def _init_variables(self, key: Array) -> Any:
        return self.network.init(key, jnp.zeros((1, 1), jnp.int32))

    def prefill(
        self,
        params: Params,
        inputs: Array,
        input_lengths: Array,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> Prefilled:
        """Reads each prompt; the entries of its last token are written anew by the first extend.

        Args:
          params: the parameters.
          inputs: `[B, P]` int32, padded on the right.
          input_lengths: `[B]` int32, at least 1.
          max_length: S, the number of positions of the cache (static).
          prefix: must be None.
          prefix_lengths: must be None.

        Returns:
          A `Prefilled` whose tokens are the last tokens of the prompts.

        Raises:
          ValueError: if the shapes or dtypes do not agree, or a prefix is given.
        """
        check_tokens("inputs", inputs, input_lengths)
        if prefix is not None or prefix_lengths is not None:
            raise ValueError("prefix must be None: T5X's decoder-only models put it in the inputs")
        config = self.config
        tokens = repeat_first(inputs, input_lengths)
        positions = input_lengths.astype(jnp.int32) - 1
        cache = allocate(
            config.num_layers,
            inputs.shape[0],
            config.num_heads,
            max_length,
            config.head_dim,
            config.dtype,
        )
        seen = None
        if config.bidirectional_inputs:
            seen = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None] <= positions[:, None]
        updates = self._apply(params, tokens, seen, method="read")
        cache = write(cache, updates, jnp.zeros_like(positions))
        last = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
        return Prefilled(cache, last, positions)
