"""T5: v1.0 (relu, tied) and v1.1 / FLAN (gated gelu, untied), with T5X's parameter tree.

Axes: B rows, P encoder length, T decoder tokens, E model width, V vocabulary.

Source: Raffel et al. 2020; `t5x/examples/t5/network.py`.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from specjax.models import cache as cache_lib
from specjax.models.cache import CacheEntries, CacheLayout, Cross
from specjax.models.config import T5Config
from specjax.models.layers import (
    MASKED,
    MLP,
    Attention,
    Embed,
    LogitsDense,
    Memory,
    Past,
    RMSNorm,
    Segment,
    attended,
    block_bias,
    block_updates,
    normal_init,
)
from specjax.models.model import Model, check_tokens, prefix_or_empty, repeat_first
from specjax.models.relpos import RelativePositionBias
from specjax.types import Array, Params, Prefilled


def _norm(config: T5Config) -> RMSNorm:
    return RMSNorm(config.norm_eps, config.dtype, config.param_dtype)


def _attention(config: T5Config, layout: CacheLayout = CacheLayout()) -> Attention:  # noqa: B008
    # T5 does not divide attention logits by sqrt(D); the initial query kernel is divided instead.
    def query_init(*args: Any) -> Array:
        kernel = normal_init(*args)
        return kernel / jnp.sqrt(jnp.asarray(config.head_dim, kernel.dtype))

    return Attention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        features=config.embed_dim,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        query_init=query_init,
        dropout_rate=config.dropout_rate,
        layout=layout,
    )


def _mlp(config: T5Config) -> MLP:
    return MLP(
        config.mlp_dim,
        config.mlp_activations,
        config.dtype,
        config.param_dtype,
        config.dropout_rate,
    )


def _relpos(config: T5Config, bidirectional: bool) -> RelativePositionBias:
    return RelativePositionBias(
        config.num_heads,
        config.relpos_buckets,
        config.relpos_max_distance,
        bidirectional,
        config.param_dtype,
    )


def _dropout(config: T5Config) -> nn.Dropout:
    return nn.Dropout(config.dropout_rate, broadcast_dims=(-2,))


def _mask_bias(mask: Array) -> Array:
    """`[B, P]` bool -> `[B, 1, 1, 1, P]` float32, 0 or `MASKED`."""
    return jnp.where(mask, 0.0, MASKED).astype(jnp.float32)[:, None, None, None]


class EncoderLayer(nn.Module):
    """A layer of the encoder: self-attention and a feed-forward block."""

    config: T5Config

    def setup(self) -> None:
        """Creates the parameters and submodules."""
        self.pre_attention_layer_norm = _norm(self.config)
        self.attention = _attention(self.config)
        self.pre_mlp_layer_norm = _norm(self.config)
        self.mlp = _mlp(self.config)
        self.dropout = _dropout(self.config)
        if self.config.relpos_per_layer:
            self.relpos_bias = _relpos(self.config, bidirectional=True)

    def __call__(self, x: Array, bias: Array, deterministic: bool) -> Array:
        """`x [B, P, E]` -> `[B, P, E]`."""
        y = self.pre_attention_layer_norm(x)
        segment = Segment(*self.attention.keys_values(y), bias)
        y = self.attention(y, [segment], deterministic=deterministic)
        x = x + self.dropout(y, deterministic=deterministic)
        y = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
        return x + self.dropout(y, deterministic=deterministic)


def _relpos_of(stack: "EncoderStack | DecoderStack") -> list[RelativePositionBias]:
    """The bias that all layers share, or one bias per layer."""
    if stack.config.relpos_per_layer:
        return [layer.relpos_bias for layer in stack.layers]
    return [stack.relpos_bias]


class EncoderStack(nn.Module):
    """The layers and the last norm of the encoder."""

    config: T5Config

    def setup(self) -> None:
        """Creates the parameters and submodules."""
        if not self.config.relpos_per_layer:
            self.relpos_bias = _relpos(self.config, bidirectional=True)
        self.layers = [EncoderLayer(self.config) for _ in range(self.config.num_encoder_layers)]
        self.encoder_norm = _norm(self.config)
        self.dropout = _dropout(self.config)
        # Dropout of the output drops single elements; all other dropout drops whole features.
        self.output_dropout = nn.Dropout(self.config.dropout_rate)

    def __call__(self, x: Array, mask: Array, deterministic: bool) -> Array:
        """Embedded inputs `x [B, P, E]` and `mask [B, P]`, false at padding -> `[B, P, E]`."""
        mask_bias = _mask_bias(mask)
        biases = [relpos.block(x.shape[1]) + mask_bias for relpos in _relpos_of(self)]
        x = self.dropout(x, deterministic=deterministic)
        for i, layer in enumerate(self.layers):
            x = layer(x, biases[i % len(biases)], deterministic)
        return self.output_dropout(self.encoder_norm(x), deterministic=deterministic)


class DecoderLayer(nn.Module):
    """A layer of the decoder: self-attention, cross-attention and a feed-forward block."""

    config: T5Config
    layout: CacheLayout

    def setup(self) -> None:
        """Creates the parameters and submodules."""
        self.pre_self_attention_layer_norm = _norm(self.config)
        self.self_attention = _attention(self.config, self.layout)
        self.pre_cross_attention_layer_norm = _norm(self.config)
        self.encoder_decoder_attention = _attention(self.config, self.layout)
        self.pre_mlp_layer_norm = _norm(self.config)
        self.mlp = _mlp(self.config)
        self.dropout = _dropout(self.config)
        if self.config.relpos_per_layer:
            self.relpos_bias = _relpos(self.config, bidirectional=False)

    def cross_keys_values(self, encoded: Array) -> tuple[Array, Array]:
        """`encoded [B, P, E]` -> keys `[B, H, P, D]` and values `[B, H, D, P]`."""
        return self.encoder_decoder_attention.keys_values(encoded)

    def __call__(
        self,
        x: Array,
        bias: Array,
        past: Past | None,
        cross: Segment,
        deterministic: bool,
    ) -> tuple[Array, Array, Array]:
        """`x [B, T, E]` -> `[B, T, E]`, keys and values (see `attended`)."""
        y = self.pre_self_attention_layer_norm(x)
        keys, values = self.self_attention.keys_values(y)
        segments, keys, values = attended(past, keys, values, bias)
        y = self.self_attention(y, segments, deterministic=deterministic)
        x = x + self.dropout(y, deterministic=deterministic)
        y = self.pre_cross_attention_layer_norm(x)
        y = self.encoder_decoder_attention(y, [cross], deterministic=deterministic)
        x = x + self.dropout(y, deterministic=deterministic)
        y = self.mlp(self.pre_mlp_layer_norm(x), deterministic)
        return x + self.dropout(y, deterministic=deterministic), keys, values


class DecoderStack(nn.Module):
    """The layers, the last norm and the untied output projection of the decoder."""

    config: T5Config
    layout: CacheLayout

    def setup(self) -> None:
        """Creates the parameters and submodules."""
        if not self.config.relpos_per_layer:
            self.relpos_bias = _relpos(self.config, bidirectional=False)
        count = self.config.num_decoder_layers
        self.layers = [DecoderLayer(self.config, self.layout) for _ in range(count)]
        self.decoder_norm = _norm(self.config)
        self.dropout = _dropout(self.config)
        if not self.config.tie_embeddings:
            self.logits_dense = LogitsDense(self.config.vocab_size, self.config.param_dtype)

    def cross(self, encoded: Array, mask: Array) -> Cross:
        """The keys and values of the encoder's output `[B, P, E]` for each layer."""
        pairs = [layer.cross_keys_values(encoded) for layer in self.layers]
        keys, values = zip(*pairs, strict=True)
        return Cross(keys, values, mask)

    def __call__(
        self,
        x: Array,
        cross: Cross,
        memory: Memory | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, CacheEntries]:
        """Embedded tokens `x [B, T, E]` -> hidden `[B, T, E]` and the block's entries.

        Without a memory the block starts at position 0 of each row.
        """
        length = x.shape[1]
        # All layers share one bias, or each has its own, as in T5X's scanned checkpoints.
        relpos = _relpos_of(self)
        biases = [r.block(length) + block_bias(length) for r in relpos]
        past_biases = biases
        if memory is not None:
            size, mask = memory.max_length, memory.bias(length)
            past_biases = [mask + r.cached(memory.positions, length, size) for r in relpos]
        cross_bias = _mask_bias(cross.mask)
        x = self.dropout(x, deterministic=deterministic)
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            past = None if memory is None else memory.layer(i, past_biases[i % len(relpos)])
            encoded = Segment(cross.keys[i], cross.values[i], cross_bias)
            bias = biases[i % len(relpos)]
            x, layer_keys, layer_values = layer(x, bias, past, encoded, deterministic)
            keys.append(layer_keys)
            values.append(layer_values)
        x = self.dropout(self.decoder_norm(x), deterministic=deterministic)
        return x, block_updates(keys, values, x)


class T5Network(nn.Module):
    """The encoder and the decoder, which share one embedding."""

    config: T5Config
    layout: CacheLayout = CacheLayout()  # noqa: RUF009  immutable

    def setup(self) -> None:
        """Creates the parameters and submodules."""
        config = self.config
        self.token_embedder = Embed(
            config.vocab_size, config.embed_dim, config.dtype, config.param_dtype
        )
        self.encoder = EncoderStack(config)
        self.decoder = DecoderStack(config, self.layout)

    def encode(self, tokens: Array, mask: Array, deterministic: bool = True) -> Cross:
        """Inputs `[B, P]` and `mask [B, P]`, false at padding -> the decoder's `Cross`."""
        encoded = self.encoder(self.token_embedder(tokens), mask, deterministic)
        return self.decoder.cross(encoded, mask)

    def read(self, tokens: Array, cross: Cross) -> CacheEntries:
        """The cache entries of decoder tokens `[B, T]` that start at position 0."""
        return self.decoder(self.token_embedder(tokens), cross)[1]

    def score(self, tokens: Array, memory: Memory) -> tuple[Array, Array, CacheEntries]:
        """See `Model.score`."""
        x = self.token_embedder(tokens)
        cross: Any = memory.cache.cross
        hidden, updates = self.decoder(x, cross, memory)
        return self.logits(hidden), hidden, updates

    def logits(self, hidden: Array) -> Array:
        """Hidden `[B, T, E]` -> logits `[B, T, V]` float32."""
        if not self.config.tie_embeddings:
            return self.decoder.logits_dense(hidden)
        if self.config.scale_tied_logits:
            hidden = hidden * jnp.asarray(self.config.embed_dim**-0.5, hidden.dtype)
        return self.token_embedder.attend(hidden)

    def __call__(
        self, encoder_tokens: Array, mask: Array, decoder_tokens: Array, deterministic: bool = True
    ) -> Array:
        """Runs the whole network on known outputs: logits `[B, T, V]` float32."""
        cross = self.encode(encoder_tokens, mask, deterministic)
        x = self.token_embedder(decoder_tokens)
        hidden, _ = self.decoder(x, cross, deterministic=deterministic)
        return self.logits(hidden)


class T5(Model):
    """A T5 as a language model of its outputs.

    Attributes:
      config: a `T5Config`.
    """

    config: T5Config

    @property
    def network(self) -> T5Network:
        """The flax.linen module."""
        return T5Network(self.config, self.layout)

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """The start token and the prefix; the inputs take no positions of the decoder's cache."""
        return prefix_lengths + 1

    def _init_variables(self, key: Array) -> Any:
        tokens = jnp.zeros((1, 1), jnp.int32)
        return self.network.init(key, tokens, tokens == 0, tokens)

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
        check_tokens("encoder_tokens", encoder_tokens)
        check_tokens("decoder_tokens", decoder_tokens)
        if encoder_mask is None:
            encoder_mask = jnp.ones(encoder_tokens.shape, bool)
        if encoder_mask.shape != encoder_tokens.shape:
            raise ValueError(
                f"encoder_mask must have encoder_tokens' shape {list(encoder_tokens.shape)}, "
                f"got {list(encoder_mask.shape)}"
            )
        return self._apply(
            params,
            encoder_tokens,
            encoder_mask,
            decoder_tokens,
            deterministic=dropout_key is None,
            rngs=None if dropout_key is None else {"dropout": dropout_key},
        )

    def prefill(
        self,
        params: Params,
        inputs: Array,
        input_lengths: Array,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> Prefilled:
        """Runs the encoder, and the decoder on all tokens of a forced prefix except its last.

        Args:
          params: the parameters.
          inputs: `[B, P]` int32, padded on the right.
          input_lengths: `[B]` int32, at least 1.
          max_length: S, the number of positions of the decoder's cache (static).
          prefix: `[B, F]` int32, forced first tokens of the output, after the start token.
          prefix_lengths: `[B]` int32.

        Returns:
          A `Prefilled` whose tokens are the prefixes' last tokens, or the start token at 0.

        Raises:
          ValueError: if the shapes or dtypes do not agree.
        """
        check_tokens("inputs", inputs, input_lengths)
        config = self.config
        rows = inputs.shape[0]
        prefix, positions = prefix_or_empty(inputs, prefix, prefix_lengths)
        lengths = input_lengths.astype(jnp.int32)[:, None]
        mask = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None] < lengths
        inputs = repeat_first(inputs, input_lengths)
        cross = self._apply(params, inputs, mask, method="encode")
        start = jnp.full((rows, 1), config.decoder_start_token, jnp.int32)
        tokens = jnp.concatenate([start, prefix], axis=1)
        cache = cache_lib.allocate(
            config.num_decoder_layers,
            rows,
            config.num_heads,
            max_length,
            config.head_dim,
            config.dtype,
            self.layout,
        )._replace(cross=cross)
        if prefix.shape[1]:
            updates = self._apply(params, tokens[:, :-1], cross, method="read")
            cache = self.write(cache, updates, jnp.zeros_like(positions))
        last = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
        return Prefilled(cache, last, positions)
