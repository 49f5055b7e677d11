"""The network of every family: an embedding, perhaps an encoder, and a decoder.

Axes: B rows, P encoder length, T decoder tokens, S keys, E model width, V vocabulary.

Sources: Raffel et al. 2020 and `t5x/examples/t5/network.py` (T5's parameter tree); Touvron et al.
2023; Gemma Team 2024; `transformers/models`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.spmd import get_logical_axis_rules
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer

from specjax.compilation import jit
from specjax.models.attention import (
    Attention,
    LayerMemory,
    Memory,
    Segment,
    around_bias,
    attended,
    block_bias,
    block_updates,
    seen_bias,
)
from specjax.models.cache import CacheEntries, CacheLayout, Cross, places_from
from specjax.models.config import DeltaSizes, ModelConfig, Routing, Style
from specjax.models.experts import Experts
from specjax.models.layers import MLP, Dense, Embed, LayerInputs, LogitsDense, RMSNorm, activate
from specjax.models.position_encoding import (
    RelativePositionBias,
    Rope,
    check_length,
    rope_angles,
)
from specjax.models.recurrent import (
    DeltaPast,
    GatedDeltaNet,
    RecurrentMemory,
    continue_memory,
    empty_memory,
)
from specjax.platforms import traced_program


def norm_of(config: ModelConfig, style: Style, name: str) -> RMSNorm:
    """A norm of a network's width."""
    sizes = (config.norm_eps, config.dtype, config.param_dtype, style.plus_one_norms)
    return RMSNorm(*sizes, name=name)


def _embedder(config: ModelConfig, style: Style) -> Embed:
    sizes = (config.vocab_size, config.embed_dim, config.dtype, config.param_dtype)
    return Embed(*sizes, style.embed_stddev, style.eoi_token is not None)


def _relative(config: ModelConfig, style: Style, in_encoder: bool) -> RelativePositionBias:
    assert style.relative is not None
    return RelativePositionBias(
        config.num_heads,
        style.relative.buckets,
        style.relative.max_distance,
        in_encoder,
        config.param_dtype,
    )


class Layer(nn.Module):
    """Self-attention, cross-attention if there is an encoder, and a feed-forward block.

    In place of attention there may be a gated delta network. `config` has the sizes of this layer.
    """

    config: ModelConfig
    style: Style
    layout: CacheLayout = CacheLayout()
    in_encoder: bool = False
    cross: bool = False  # whether it attends to an encoder's output
    delta: DeltaSizes | None = None
    routing: Routing | None = None  # of its experts
    keyed_values: bool = False

    def setup(self) -> None:
        config, style = self.config, self.style
        name = "attention" if self.in_encoder else "self_attention"
        if self.delta is not None:
            self.network = GatedDeltaNet(config, self.delta, name="delta")
        else:
            self.attention = Attention(config, style, self.layout, self.keyed_values, name=name)
        parts = [name, "mlp"]
        if self.cross and not style.merged_cross:
            parts.insert(1, "cross_attention")
            self.encoder_decoder_attention = Attention(config, style, self.layout)
        dtypes = (config.dtype, config.param_dtype)
        norm = functools.partial(norm_of, config, style)
        beside = self.routing is not None and self.routing.beside_mlp
        if self.routing is None or beside:
            self.mlp = MLP(config.mlp_dim, style.activations, *dtypes, style.dropout_rate)
        if self.routing is not None:
            name = "experts" if beside else "mlp"
            self.experts = Experts(self.routing, style.activations, *dtypes, name=name)
        if beside:
            self.router_norm = norm("router_norm")
            self.before_experts = norm("pre_experts_layer_norm")
            self.after_mlp = norm("post_mlp_norm")
            self.after_experts = norm("post_experts_norm")
        self.before = [norm(f"pre_{p}_layer_norm") for p in parts if style.pre_norms]
        self.after = [norm(f"post_{p}_layer_norm") for p in parts if style.post_norms]
        if (width := style.layer_input_dim) is not None:
            self.input_gate = Dense(width, ("embed", "embed"), *dtypes)
            self.input_out = Dense(config.embed_dim, ("embed", "embed"), *dtypes)
            self.after_input = norm("post_input_layer_norm")
        if style.residual_scales:
            self.residual_scale = param_with_axes(
                "residual_scale", nn.initializers.ones, (1,), config.param_dtype, axes=("embed",)
            )
        self.dropout = nn.Dropout(style.dropout_rate, broadcast_dims=(-2,))
        if style.relative is not None and style.relative.per_layer:
            self.relpos_bias = _relative(config, style, self.in_encoder)

    def cross_keys_values(self, encoded: Float[Array, "B P E"]) -> tuple[Array, Array]:
        merged = self.style.merged_cross
        attention = self.attention if merged else self.encoder_decoder_attention
        return attention.keys_values(encoded)

    # `shared` are the keys and values of the layer whose it attends to, `own` is its input of each
    # token; see `LayerSpec.source` and `Style.layer_input_dim`.
    def __call__(
        self,
        x: Float[Array, "B T E"],
        bias: Array,
        past: LayerMemory | DeltaPast | None = None,
        rope: Rope | None = None,
        encoded: Segment | None = None,
        shared: tuple[Array, Array] | None = None,
        own: Float[Array, "B T P"] | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, Any]:

        def normed(norms: list[RMSNorm], block: int, y: Array) -> Array:
            return norms[block](y) if norms else y

        def added(block: int, y: Array) -> Array:
            y = normed(self.after, block, y)
            return x + self.dropout(y, deterministic=deterministic)

        y = normed(self.before, 0, x)
        entries: Any
        if isinstance(past, DeltaPast):
            y, entries = self.network(y, past)
        else:
            keys, values = shared or self.attention.keys_values(y, rope)
            segments, *entries = attended(past, self.layout, keys, values, bias)
            if encoded is not None and self.style.merged_cross:
                segments, encoded = [*segments, encoded], None
            y = self.attention(y, segments, rope, deterministic)
        x = added(0, y)
        if encoded is not None:
            y = normed(self.before, 1, x)
            y = self.encoder_decoder_attention(y, [encoded], deterministic=deterministic)
            x = added(1, y)
        y = normed(self.before, -1, x)
        if self.routing is None:
            y = self.mlp(y, deterministic)
        elif not self.routing.beside_mlp:
            y = self.experts(y)
        else:
            routed = self.router_norm(x) * x.shape[-1] ** -0.5
            mixed = self.experts(self.before_experts(x), routed)
            y = self.after_mlp(self.mlp(y, deterministic)) + self.after_experts(mixed)
        x = added(-1, y)
        if own is not None:
            y = activate(self.style.activations[0], self.input_gate(x)) * own
            x = x + self.after_input(self.input_out(y))
        if self.style.residual_scales:
            x = x * self.residual_scale.astype(x.dtype)[None, None]
        return x, entries


# The layers of a stack differ only in arrays, so they share a trace, which is inlined: a deep
# network is traced in a fifth of the time.
@functools.partial(jit, static_argnums=(0, 1), inline=True)
def _read_layer(layer: Layer, program: Any, variables: Any, *inputs: Any) -> Any:
    return layer.apply(variables, *inputs)


class Stack(nn.Module):
    """The layers and the last norm, of the decoder or of the encoder."""

    config: ModelConfig
    style: Style
    layout: CacheLayout = CacheLayout()
    in_encoder: bool = False
    cross: bool = False

    def setup(self) -> None:
        config, style = self.config, self.style
        if style.relative is not None and not style.relative.per_layer:
            self.relpos_bias = _relative(config, style, self.in_encoder)
        rest = style, self.layout, self.in_encoder, self.cross
        self.layers = [
            Layer(config.of_layer(i), *rest, spec.delta, spec.routing, spec.keyed_values)
            for i, spec in enumerate(style.layers)
        ]
        self.norm = norm_of(config, style, "encoder_norm" if self.in_encoder else "decoder_norm")
        self.dropout = nn.Dropout(style.dropout_rate, broadcast_dims=(-2,))
        if style.own_embedding:
            self.token_embedder = _embedder(config, style)
        if self.in_encoder:
            self.output_dropout = nn.Dropout(style.dropout_rate)  # of single elements
        elif not config.tie_embeddings:
            self.logits_dense = LogitsDense(config.vocab_size, config.param_dtype)

    def cross_keys_values(self, encoded: Float[Array, "B P E"], mask: Bool[Array, "B P"]) -> Cross:
        """The keys and values of the encoder's output for each layer."""
        pairs = [layer.cross_keys_values(encoded) for layer in self.layers]
        keys, values = zip(*pairs, strict=True)
        return Cross(keys, values, mask)

    # Reads a block that continues the memory, or starts at position 0 of each row, perhaps with the
    # empty memory `fresh` of recurrent layers; these remember `counts [B]` tokens of it. The mask
    # is, in an encoder, false at padding; in a decoder, true at tokens that all other tokens see,
    # even earlier ones. The last of what it returns is the residual stream: see
    # `LanguageModel.reading`.
    def __call__(
        self,
        x: Float[Array, "B T E"],
        memory: Memory | None = None,
        cross: Cross | None = None,
        *,
        mask: Bool[Array, "B T"] | None = None,
        fresh: RecurrentMemory | None = None,
        counts: Array | None = None,
        own: Float[Array, "B T layers P"] | None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T E"], CacheEntries, list[Array]]:
        length, specs, cached = x.shape[1], self.style.layers, self.style.cached
        ropes = self._ropes(x, memory)
        biases = self._block_biases(length, memory, mask)
        pasts: list[LayerMemory | DeltaPast | None] = [None] * len(biases)
        if memory is not None:
            for i, bias in enumerate(self._past_biases(length, memory)):
                source = specs[i].source
                if specs[i].delta is None:
                    pasts[i] = memory.layer(cached.index(i if source is None else source), bias)
        recurrent, others = fresh, [i for i, spec in enumerate(specs) if spec.delta is not None]
        if others:
            start = jnp.zeros(x.shape[0], jnp.int32)
            if memory is not None:
                recurrent, start = memory.cache.recurrent, memory.positions
            if recurrent is None:  # nothing follows
                recurrent = empty_memory(self.style.deltas, x.shape[0], 0, x.dtype)
            counted = length if counts is None else counts
            remembered, recurrent = continue_memory(recurrent, start, counted)
            for i, of_layer in zip(others, remembered, strict=True):
                pasts[i] = of_layer
        encoded: list[Segment | None] = [None] * len(biases)
        if cross is not None:
            cross_bias = seen_bias(cross.mask[:, None])
            pairs = zip(cross.keys, cross.values, strict=True)
            encoded = [Segment(*pair, cross_bias) for pair in pairs]
        x = self.dropout(x, deterministic=deterministic)
        entries: list[Any] = []
        states = [x]
        rest = self.style, self.layout, self.in_encoder, self.cross
        # A caller's own partitioner, such as T5X's, sets rules by which flax places parameters.
        program = traced_program(), tuple(get_logical_axis_rules())
        parts = zip(self.layers, biases, pasts, ropes, encoded, strict=True)
        # A trace of its own for each layer that draws, or writes variables such as intermediates.
        assert self.scope is not None
        apart = not deterministic or self.scope.mutable is not False
        for i, (layer, bias, past, rope, seen) in enumerate(parts):
            shared = None
            if (source := specs[i].source) is not None:
                shared = entries[source]
                if isinstance(past, LayerMemory) and past.written:  # the whole cache
                    bias, past = past.bias, None
            more = shared, None if own is None else own[:, :, i]
            if apart:
                x, added = layer(x, bias, past, rope, seen, *more, deterministic)
            else:
                with jax.named_scope(f"layers_{i}"):
                    kind = layer.delta, layer.routing, layer.keyed_values
                    x, added = _read_layer(
                        Layer(layer.config, *rest, *kind, parent=None),
                        *(program, layer.variables, x, bias, past, rope, seen, *more),
                    )
            entries.append(added)
            states.append(x)
        last = self.output_dropout if self.in_encoder else self.dropout
        hidden = last(self.norm(x), deterministic=deterministic)
        keys, values = zip(*(entries[i] for i in cached), strict=True)
        known = hidden
        if memory is None and any(spec.source is not None for spec in specs):
            known = states[cached[-1] + 1]  # a prompt needs no later layers
        updates = block_updates(keys, values, known)
        if recurrent is not None:
            layers = tuple(entries[i] for i in others)
            updates = updates._replace(recurrent=recurrent._replace(layers=layers))
        return hidden, updates, [*states, hidden]

    def _ropes(self, x: Array, memory: Memory | None) -> list[Rope | None]:
        if memory is None:
            check_length(self.style.most_positions, x.shape[1])

        @functools.cache
        def angles(frequencies: tuple[float, ...] | None) -> Rope | None:
            if frequencies is None:
                return None
            if memory is None:
                positions = places_from(jnp.zeros(x.shape[0], jnp.int32), x.shape[1])
            else:
                positions = memory.places(x.shape[1])
            return rope_angles(positions, frequencies, self.style.rope_scale)

        return [angles(spec.rope) for spec in self.style.layers]

    def _biases(
        self,
        relative: Callable[[RelativePositionBias], Array],
        mask: Callable[[Any], Array],
    ) -> list[Array]:
        mask = functools.cache(mask)

        if (positions := self.style.relative) is None:
            return [mask(spec.window) for spec in self.style.layers]
        if positions.per_layer:
            parts = zip(self.layers, self.style.layers, strict=True)
            return [relative(layer.relpos_bias) + mask(spec.window) for layer, spec in parts]
        shared = relative(self.relpos_bias)
        both = functools.cache(lambda window: shared + mask(window))
        return [both(spec.window) for spec in self.style.layers]

    def _block_biases(self, length: int, memory: Memory | None, mask: Array | None) -> list[Array]:
        if memory is None or memory.tree is None:
            return self._biases(lambda r: r.block(length), lambda w: self._mask(length, w, mask))
        places = memory.places(length)
        return self._biases(
            lambda r: r.between(places, places), lambda w: memory.tree_bias(length, w)
        )

    def _past_biases(self, length: int, memory: Memory) -> list[Array]:
        return self._biases(
            lambda r: r.between(memory.places(length), memory.slots()),
            lambda w: memory.bias(length, w),
        )

    def _mask(self, length: int, window: Any, mask: Array | None) -> Array:
        seen = None if mask is None else seen_bias(mask[:, None])
        if self.in_encoder:
            assert seen is not None
            return seen if window is None else jnp.minimum(seen, around_bias(length, *window))
        causal = block_bias(length, window)
        return causal if seen is None else jnp.maximum(causal, seen)


class Network(nn.Module):
    """The embedding, the decoder, its output projection, and perhaps the encoder."""

    config: ModelConfig
    layout: CacheLayout = CacheLayout()
    tokens: int | None = None  # that get logits; None: all rows of the embedding
    boundaries: tuple[int, ...] = ()  # see `LanguageModel.reading`

    def setup(self) -> None:
        config, style = self.config, self.config.style
        self.token_embedder = _embedder(config, style)
        encoder_style = config.encoder_style
        if encoder_style is not None:
            self.encoder = Stack(config.encoder_config, encoder_style, in_encoder=True)
        self.decoder = Stack(config, style, self.layout, cross=encoder_style is not None)
        if (width := style.layer_input_dim) is not None:
            sizes = config.vocab_size, len(style.layers), width, config.norm_eps
            self.layer_inputs = LayerInputs(*sizes, config.dtype, config.param_dtype)

    def embed(
        self, tokens: Integer[Array, "B T"], in_encoder: bool = False
    ) -> Float[Array, "B T E"]:
        style, embedder = self.config.style, self.token_embedder
        if in_encoder:
            assert self.config.encoder_style is not None
            style = self.config.encoder_style
            if style.own_embedding:
                embedder = self.encoder.token_embedder
        x = embedder(tokens)
        # Gemma was trained with the factor rounded to the dtype of the activations.
        if style.embed_scale != 1.0:
            x = x * jnp.asarray(style.embed_scale, x.dtype)
        if style.eoi_token is not None:
            special = (tokens == style.eoi_token)[:, :, None]
            x = jnp.where(special, embedder.eoi_embedding.astype(x.dtype)[None, None], x)
        return x

    def logits(self, hidden: Float[Array, "B T E"]) -> Float32[Array, "B T V"]:
        style = self.config.style
        if style.hidden_scale != 1.0:
            hidden = hidden * jnp.asarray(style.hidden_scale, hidden.dtype)
        if self.config.tie_embeddings:
            logits = self.token_embedder.attend(hidden)
        else:
            logits = self.decoder.logits_dense(hidden)
        logits = logits[..., : self.tokens]
        cap = style.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def encode(
        self,
        tokens: Integer[Array, "B P"],
        mask: Bool[Array, "B P"],
        deterministic: bool = True,
    ) -> Cross:
        """The encoder's keys and values for the decoder; the mask is false at padding."""
        x = self.embed(tokens, in_encoder=True)
        encoded, *_ = self.encoder(x, mask=mask, deterministic=deterministic)
        return self.decoder.cross_keys_values(encoded, mask)

    def read(
        self,
        tokens: Integer[Array, "B T"],
        cross: Cross | None = None,
        seen: Bool[Array, "B T"] | None = None,
        fresh: RecurrentMemory | None = None,
        counts: Int32[Array, " B"] | None = None,
    ) -> tuple[CacheEntries, Float[Array, "B T D"]]:
        """The cache entries of decoder tokens that start at position 0, and their hidden states.

        All other tokens, even earlier ones, see those in `seen`. Recurrent layers, whose empty
        memory is `fresh`, remember the first `counts`.
        """
        _, updates, states = self._decoded(
            tokens, cross=cross, mask=seen, fresh=fresh, counts=counts
        )
        return updates, self._returned(states)

    def score(
        self, tokens: Integer[Array, "B T"], memory: Memory
    ) -> tuple[Float32[Array, "B T V"], Float[Array, "B T D"], CacheEntries]:
        hidden, updates, states = self._decoded(tokens, memory, memory.cache.cross)
        return self.logits(hidden), self._returned(states), updates

    def _decoded(self, tokens: Integer[Array, "B T"], *args: Any, **kwargs: Any) -> Any:
        x = self.embed(tokens)
        if self.config.style.layer_input_dim is not None:
            kwargs["own"] = self.layer_inputs(tokens, x)
        return self.decoder(x, *args, **kwargs)

    def _returned(self, states: list[Array]) -> Float[Array, "B T D"]:
        if not self.boundaries:
            return states[-1]
        return jnp.concatenate([states[boundary] for boundary in self.boundaries], axis=-1)

    def __call__(
        self,
        tokens: Integer[Array, "B T"],
        encoder_tokens: Integer[Array, "B P"] | None = None,
        mask: Bool[Array, "B P"] | None = None,
        deterministic: bool = True,
    ) -> Float32[Array, "B T V"]:
        cross = None
        if encoder_tokens is not None:
            assert mask is not None
            cross = self.encode(encoder_tokens, mask, deterministic)
        hidden, *_ = self._decoded(tokens, cross=cross, deterministic=deterministic)
        return self.logits(hidden)
