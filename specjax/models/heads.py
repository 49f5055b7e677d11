"""Draft heads: small networks that draft from the states of the verifier that they belong to.

A recurrent head (EAGLE-1, EAGLE-3, MTP) reads a token together with the verifier's state of the
token before it; where it has drafted that token itself, with its own state. A block head (DFlash,
DSpark) reads the states as context, and drafts a block of tokens in one pass.

The entry of a token at position t in a recurrent head's cache is made of this token and of the
state at t - 1; position 0 has none. The entry of a block head is made of the state at t alone. As
both need no attention, entries of committed tokens are written without a pass (`catch_up`).

Axes: B rows, T tokens, S cache length, R slots of the ring, F width of the verifier's states, E
model width, V vocabulary, W draft vocabulary, N tokens of a block, M of them that predict, r rank,
A places in a text.

Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840), DeepSeek-V3 (2412.19437) for MTP, DFlash
(2602.06036); the code of `vllm-project/speculators` for the options of norms, and for DSpark.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import unfreeze
from flax.linen.partitioning import param_with_axes
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from specjax.errors import UserError
from specjax.models import cache as cache_lib
from specjax.models.attention import (
    Attention,
    LayerMemory,
    Memory,
    Segment,
    attended,
    block_bias,
    block_updates,
)
from specjax.models.beginnings import filled, next_beginning, note
from specjax.models.cache import CacheEntries, CacheLayout, RaggedCache, layout_for
from specjax.models.config import DecoderOnlyConfig
from specjax.models.experts import Experts
from specjax.models.layers import MLP, Dense, Embed, LogitsDense, RMSNorm
from specjax.models.model import Model
from specjax.models.position_encoding import MASKED, Rope, rope_angles
from specjax.types import (
    LanguageModel,
    Params,
    Prefilled,
    PrefilledStates,
    Prompts,
    TreeShape,
)

MARKOV = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(abc.ABC):
    """What draft heads have in common; frozen, hashable and without arrays.

    Attributes:
      layers: the sizes and the style of the layers; its vocabulary is the verifier's.
      boundaries: of the verifier's states; see `types.LanguageModel.reading`.
      windows: for each layer, the number of positions that a query sees, counted from the newest
        state of the verifier at the latest; None for all.
      draft_vocab: W, the number of tokens that may be drafted, if the head has its own output
        projection; None: all.
      own_embedding: whether it has an embedding of its own, not the verifier's.
      own_output: whether it has an output projection of its own.
      cross_layer: the layer of an encoder-decoder verifier whose keys and values of the encoder's
        output each layer of the head reads, with queries of its own; None for none.
    """

    layers: DecoderOnlyConfig
    boundaries: tuple[int, ...]
    windows: tuple[int | None, ...]
    draft_vocab: int | None = None
    own_embedding: bool = False
    own_output: bool = False
    cross_layer: int | None = None

    def __post_init__(self) -> None:
        if self.draft_vocab is not None and not self.own_output:
            raise UserError(
                f"draft_vocab={self.draft_vocab} must be None without own_output: the output "
                "projection of the verifier is that of all tokens"
            )

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """The head's name in messages."""

    @property
    def rows(self) -> int:
        """W."""
        return self.draft_vocab or self.layers.vocab_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """A recurrent head of one layer.

    Attributes:
      projects: whether the token and the state are projected to E together (EAGLE-1, MTP); else the
        states of all boundaries are projected to E, and attention reads token and state side by
        side (EAGLE-3).
      norms: whether token, state and output are normalised; False: EAGLE-1.
      norm_before_residual: whether the residual stream starts with the normalised state.
      norm_before_fc: whether all states are normalised together before their projection.
      fc_norm: whether each of them is.
      norm_output: whether the next step reads the normalised output.
      fc_bias: whether the projection has a bias.
    """

    projects: bool = False
    norms: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False

    @property
    def kind(self) -> str:
        if self.projects:
            return "MTP" if self.norms else "EAGLE-1"
        return "EAGLE-3"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """A block head.

    Attributes:
      block_size: N, the last committed token and N - 1 masks.
      mask_token: the token that stands for those that are not drafted yet; None: a vector that is
        learnt.
      from_anchor: whether the first slot predicts, too: M = N, else M = N - 1.
      causal_windows: whether the tokens of a block see only earlier ones in layers with a window.
      windows_move: whether a window is counted from the slot itself, as in SpecForge: slot k sees
        W - 1 - k states of the verifier.
      markov: one of `MARKOV`: a correction of the logits by the token before; None for none.
      markov_rank: r.
      confidence: whether it predicts that its tokens are accepted.
      confidence_reads_markov: whether that reads the embedding of the token before.
    """

    block_size: int
    mask_token: int | None
    from_anchor: bool = False
    causal_windows: bool = True
    windows_move: bool = False
    markov: str | None = None
    markov_rank: int = 0
    confidence: bool = False
    confidence_reads_markov: bool = False

    @property
    def kind(self) -> str:
        return "DSpark" if self.markov or self.confidence else "DFlash"

    @property
    def most_drafts(self) -> int:
        """M, the longest draft."""
        return self.block_size - (0 if self.from_anchor else 1)


class Fresh(NamedTuple):
    """Tokens that were committed since the head's last draft, and the states before each of them.

    Attributes:
      counts: the number of real ones.
    """

    tokens: Int32[Array, "B T"]
    states: Float[Array, "B T F"]
    counts: Int32[Array, " B"]


class Known(NamedTuple):
    """States of the verifier at `places`, the tokens after them, and which of them count."""

    tokens: Int32[Array, "B T"]
    states: Float[Array, "B T F"]
    places: Int32[Array, "B T"]
    kept: Bool[Array, "B T"]


class BlockOutputs(NamedTuple):
    """What a block head says of a block, before its tokens are drawn.

    Attributes:
      starts: the position of the last committed token.
      states: of the slots that predict.
      logits: before the Markov correction.
      memory: of the recurrent correction, before each slot and after the last.
    """

    starts: Int32[Array, " B"]
    states: Float[Array, "B M E"]
    logits: Float32[Array, "B M W"]
    memory: Float[Array, "B M+1 r"]


class Encoded(NamedTuple):
    """Keys and values of an encoder's output, of one layer, as they lie in the verifier's cache."""

    keys: Array
    values: Array
    mask: Bool[Array, "B P"]  # false at padding


class ReadText(NamedTuple):
    """What a verifier has read, for a head that is trained.

    Attributes:
      states: of its `boundaries`, at each token.
      encoded: as in `HeadCache`.
    """

    tokens: Int32[Array, "B T"]
    states: Float[Array, "B T F"]
    encoded: Encoded | None = None


class Drafted(NamedTuple):
    """What a head says of one draft after each of A places in a text.

    Attributes:
      logits: of the tokens that are drafted.
      odds: the log-odds that the draft is accepted; None without a confidence head.
    """

    logits: Float32[Array, "B A W"]
    odds: Float32[Array, "B A"] | None


class HeadCache(NamedTuple):
    """The memory of a draft head; the leading axis of every array is the batch.

    Attributes:
      entries: keys and values of committed tokens, and of the present draft.
      fresh: what `entries` lacks.
      ring: of a recurrent head, the state at position t in slot t modulo R; None of a block head.
      known: the position of the last token before which the state is the verifier's.
      outputs: of a block head, between its draft and the next commit; else None.
      encoded: what it reads of the encoder, or None; see `HeadConfig.cross_layer`.
    """

    entries: RaggedCache
    fresh: Fresh
    ring: Float[Array, "B R E"] | None
    known: Int32[Array, " B"]
    outputs: BlockOutputs | None = None
    encoded: Encoded | None = None


def _norm(config: DecoderOnlyConfig, name: str) -> RMSNorm:
    plus_one = config.style.plus_one_norms
    return RMSNorm(config.norm_eps, config.dtype, config.param_dtype, plus_one, name=name)


class HeadLayer(nn.Module):
    """Self-attention, perhaps cross-attention, and a feed-forward block.

    Self-attention may read more than the residual stream.

    Attributes:
      verifier: whose encoder is read; None for none.
    """

    config: DecoderOnlyConfig
    layout: CacheLayout
    verifier: Model | None = None

    def setup(self) -> None:
        config, style = self.config, self.config.style
        self.self_attention = Attention(config, style, self.layout)
        self.pre_mlp_layer_norm = _norm(config, "pre_mlp_layer_norm")
        routing, dtypes = next(iter(style.routings), None), (config.dtype, config.param_dtype)
        self.mlp: nn.Module = (
            MLP(config.mlp_dim, style.activations, *dtypes)
            if routing is None
            else Experts(routing, style.activations, *dtypes)
        )
        if self.verifier is not None:
            theirs = self.verifier.config
            self.cross_attention = Attention(theirs, theirs.style, self.verifier.layout)
            self.pre_cross_layer_norm = _norm(config, "pre_cross_layer_norm")

    def keys_values(self, y: Float[Array, "B T read"], rope: Rope) -> tuple[Array, Array]:
        return self.self_attention.keys_values(y, rope)

    def __call__(
        self,
        y: Float[Array, "B T read"],
        residual: Float[Array, "B T E"],
        bias: Array,
        past: LayerMemory | None,
        rope: Rope,
        encoded: Segment | None = None,
        more: Sequence[Segment] = (),
    ) -> tuple[Array, Array, Array]:
        keys, values = self.keys_values(y, rope)
        segments, keys, values = attended(past, self.layout, keys, values, bias)
        x = residual + self.self_attention(y, [*more, *segments], rope)
        if encoded is not None:
            x = x + self.cross_attention(self.pre_cross_layer_norm(x), [encoded])
        return x + self.mlp(self.pre_mlp_layer_norm(x)), keys, values


class _HeadNetwork(nn.Module):
    """The parts that heads share."""

    config: Any
    layout: CacheLayout = CacheLayout()
    verifier: Model | None = None  # of a head that reads the encoder's output

    def _dense(self, features: int, name: str, axes: Any = ("embed", "embed"), bias: bool = False):
        config = self.config.layers
        sizes = (features, axes, config.dtype, config.param_dtype)
        return Dense(*sizes, has_bias=bias, name=name)

    def _set_up_output(self) -> None:
        config = self.config
        if config.own_output:
            self.logits_dense = LogitsDense(config.rows, config.layers.param_dtype)
        if config.own_embedding:
            layers = config.layers
            sizes = (layers.vocab_size, layers.embed_dim, layers.dtype, layers.param_dtype)
            self.token_embedder = Embed(*sizes)

    def embed(self, tokens: Int32[Array, "B T"]) -> Float[Array, "B T E"]:
        return self.token_embedder(tokens)

    def logits(self, hidden: Float[Array, "B T E"]) -> Float32[Array, "B T W"]:
        return self.logits_dense(hidden)

    def rope(self, places: Int32[Array, "B T"], layer: int = 0) -> Rope:
        style = self.config.layers.style
        return rope_angles(places, np.asarray(style.ropes[layer], np.float32), style.rope_scale)


class EagleNetwork(_HeadNetwork):
    """A recurrent head. Embeddings are given; `places` are those of the rotation."""

    def setup(self) -> None:
        config, layers = self.config, self.config.layers
        norm = functools.partial(_norm, layers)
        width = layers.embed_dim
        self.fc = self._dense(width, "fc", bias=config.fc_bias)
        if config.norms:
            self.token_norm, self.state_norm = norm("token_norm"), norm("state_norm")
            self.norm = norm("norm")
        if config.projects and config.norms:
            self.input_norm = norm("input_norm")
        if config.norm_before_fc:
            self.states_norm = norm("states_norm")
        if config.fc_norm:
            self.fc_norms = [norm(f"fc_norm_{i}") for i in range(len(config.boundaries))]
        self.layers_0 = HeadLayer(layers, self.layout, self.verifier)
        self._set_up_output()

    def project(self, states: Float[Array, "B T F"]) -> Float[Array, "B T E"]:
        """The verifier's states as `step` reads them."""
        config = self.config
        if config.projects:
            return states.astype(config.layers.dtype)
        if config.fc_norm:
            parts = jnp.split(states, len(config.boundaries), axis=-1)
            pairs = zip(self.fc_norms, parts, strict=True)
            states = jnp.concatenate([norm(part) for norm, part in pairs], axis=-1)
        if config.norm_before_fc:
            states = self.states_norm(states)
        return self.fc(states)

    def _read(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        """What attention reads, and the start of the residual stream."""
        config, states = self.config, states.astype(self.config.layers.dtype)
        embedded = embedded.astype(states.dtype)
        normed = self.state_norm(states) if config.norms else states
        if config.norms:
            embedded = self.token_norm(embedded)
        both = jnp.concatenate([embedded, normed], axis=-1)
        if not config.projects:
            return both, normed if config.norm_before_residual else states
        x = self.fc(both)
        return self.input_norm(x) if config.norms else x, x

    def entries(
        self,
        embedded: Float[Array, "B T E"],
        states: Float[Array, "B T E"],
        places: Int32[Array, "B T"],
    ) -> tuple[Array, Array]:
        """The keys and values of tokens and the states before them."""
        return self.layers_0.keys_values(self._read(embedded, states)[0], self.rope(places))

    def step(
        self,
        embedded: Float[Array, "B T E"],
        states: Float[Array, "B T E"],
        places: Int32[Array, "B T"],
        bias: Array,
        past: LayerMemory | None = None,
        encoded: Segment | None = None,
        more: Sequence[Segment] = (),
    ) -> tuple[Array, Array, Array, Array]:
        """The output, the states that the next step reads, and the keys and values."""
        y, residual = self._read(embedded, states)
        rope = self.rope(places)
        x, keys, values = self.layers_0(y, residual, bias, past, rope, encoded, more)
        normed = self.norm(x) if self.config.norms else x
        return normed, normed if self.config.norm_output else x, keys, values

    def __call__(
        self,
        states: Array,
        embedded: Array,
        places: Array,
        bias: Array,
        encoded: Segment | None = None,
    ) -> Array:
        """Reads known tokens, each with the verifier's state of the token before it."""
        if self.config.own_embedding:
            self.embed(jnp.zeros((1, 1), jnp.int32))
        states = self.project(states)
        normed, *_ = self.step(embedded, states, places, bias, encoded=encoded)
        return self.logits(normed) if self.config.own_output else normed


class BlockNetwork(_HeadNetwork):
    """A block head. Embeddings are given; `places` are those of the rotation."""

    def setup(self) -> None:
        config, layers = self.config, self.config.layers
        norm = functools.partial(_norm, layers)
        self.fc = self._dense(layers.embed_dim, "fc")
        self.state_norm, self.norm = norm("state_norm"), norm("norm")
        count = range(layers.num_layers)
        self.input_norms = [norm(f"input_norm_{i}") for i in count]
        self.layers = [HeadLayer(layers, self.layout, self.verifier) for _ in count]
        self._set_up_output()
        if config.mask_token is None:
            init, size = nn.initializers.normal(1.0), (layers.embed_dim,)
            self.mask = param_with_axes("mask", init, size, layers.param_dtype, axes=("embed",))
        if config.markov is not None:
            rank = config.markov_rank
            sizes = (layers.vocab_size, rank, layers.dtype, layers.param_dtype)
            self.markov_in = Embed(*sizes, 0.02)
            self.markov_out = LogitsDense(config.rows, layers.param_dtype)
        if config.markov in ("gated", "rnn"):
            width = config.markov_rank * (3 if config.markov == "rnn" else 1)
            self.markov_gate = self._dense(width, "markov_gate", bias=True)
        if config.confidence:
            self.confidence = self._dense(1, "confidence", ("embed", None), bias=True)

    def entries(
        self, states: Float[Array, "B T F"], places: Int32[Array, "B T"]
    ) -> list[tuple[Array, Array]]:
        """The keys and values of the verifier's states, for each layer."""
        context = self.state_norm(self.fc(states))
        return [
            layer.keys_values(context, self.rope(places, i)) for i, layer in enumerate(self.layers)
        ]

    def block(
        self,
        embedded: Float[Array, "B T E"],
        places: Int32[Array, "B T"],
        biases: list[Array],
        pasts: list[LayerMemory | None],
        encoded: Segment | None = None,
    ) -> Float[Array, "B T E"]:
        """The outputs of blocks, each the last committed token and masks.

        Of a mask that is learnt the embedding is not read.
        """
        x = embedded.astype(self.config.layers.dtype)
        if self.config.mask_token is None:
            place = jnp.arange(x.shape[1])[None, :, None] % self.config.block_size
            x = jnp.where(place > 0, self.mask.astype(x.dtype)[None, None], x)
        parts = zip(self.layers, self.input_norms, biases, pasts, strict=True)
        for i, (layer, norm, bias, past) in enumerate(parts):
            x, *_ = layer(norm(x), x, bias, past, self.rope(places, i), encoded)
        return self.norm(x)

    def corrected(
        self,
        states: Float[Array, "B T E"],
        tokens: Int32[Array, "B T"],
        memory: Float[Array, "B r"],
    ) -> tuple[Float32[Array, "B T W"], Float32[Array, "B T"] | None, Array]:
        """What the tokens before add to the logits, the log-odds of acceptance, and the memory.

        With several tokens, the recurrent correction runs from the first to the last.
        """
        config = self.config
        before = self.markov_in(tokens)
        read = before
        if config.markov == "gated":
            gate = self.markov_gate(jnp.concatenate([states, before], axis=-1))
            read = jax.nn.sigmoid(gate) * before
        if config.markov == "rnn":
            outs = []
            for i in range(tokens.shape[1]):
                joint = [memory, before[:, i], states[:, i]]
                parts = self.markov_gate(jnp.concatenate(joint, axis=-1)[:, None])[:, 0]
                gate, candidate, out = jnp.split(parts, 3, axis=-1)
                gate = jax.nn.sigmoid(gate)
                memory = gate * memory + (1.0 - gate) * jnp.tanh(candidate)
                outs.append(jnp.tanh(out))
            read = jnp.stack(outs, axis=1)
        return self.markov_out(read), self.log_odds(states, before), memory

    def log_odds(self, states: Array, before: Array | None) -> Float32[Array, "B T"] | None:
        """The log-odds that the slots' tokens are accepted; None without a confidence head."""
        if not self.config.confidence:
            return None
        if self.config.confidence_reads_markov and before is not None:
            states = jnp.concatenate([states, before], axis=-1)
        return self.confidence(states)[..., 0].astype(jnp.float32)

    def __call__(
        self,
        states: Array,
        embedded: Array,
        places: Array,
        bias: Array,
        encoded: Segment | None = None,
    ) -> Array:
        """Reads states at `places` and a block without a past; it names all parameters."""
        if self.config.own_embedding:
            self.embed(jnp.zeros((1, 1), jnp.int32))
        self.entries(states, places)
        count = len(self.layers)
        y = self.block(embedded, places, [bias] * count, [None] * count, encoded)
        if self.config.markov is not None:
            none = jnp.zeros((y.shape[0], self.config.markov_rank), y.dtype)
            self.corrected(y, jnp.zeros(y.shape[:2], jnp.int32), none)
        elif self.config.confidence:
            self.log_odds(y, None)
        return self.logits(y) if self.config.own_output else y


@dataclasses.dataclass(frozen=True)
class DraftHead(LanguageModel):
    """A draft head of a verifier; static, all arrays are in `params` and the cache.

    Its own parameters are `{"network": ...}` and, if it drafts not all tokens, `{"places": ...}`:
    for each token of the verifier its place among those drafted, W for the others. `joined` adds
    what it uses of the verifier's.

    Attributes:
      config: its sizes and options.
      verifier: the verifier's network.
      layout: of the keys and values in its cache.
    """

    config: Any
    verifier: Model
    layout: CacheLayout = CacheLayout()  # noqa: RUF009  immutable

    @property
    def vocab_size(self) -> int:
        return self.verifier.vocab_size

    @property
    def predicts_all(self) -> bool:  # type: ignore[override]  # it may have a map
        return self.config.draft_vocab is None

    @property
    @abc.abstractmethod
    def network(self) -> Any: ...

    def describe(self) -> str:
        return f"{self.config} of {self.verifier.describe()}"

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        return self.verifier.prompt_positions(input_lengths, prefix_lengths)

    def for_devices(self, platform: str, ways: int | None = None) -> Self:
        """See `Model.for_devices`, of its verifier too; a mesh does not split a head."""
        verifier = self.verifier.for_devices(platform, ways)
        ways = None if ways is None else 1
        layers = self.config.layers
        sizes = (layers.num_heads, layers.kv_heads, layers.head_dim)
        layout = layout_for(platform, *sizes, ways)
        return dataclasses.replace(self, layout=layout, verifier=verifier)

    def init(self, key: Array) -> Params:
        """Random parameters of its own."""
        return {"network": unfreeze(self._init_variables(key)["params"])}

    def abstract_params(self) -> Params:
        """The shapes of `init`."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def _init_variables(self, key: Array) -> Any:
        config = self.config
        states = len(config.boundaries) * self.verifier.config.embed_dim
        shape = (1, 1, states), (1, 1, config.layers.embed_dim)
        given = (jnp.zeros(x, config.layers.dtype) for x in shape)
        encoded = None
        if config.cross_layer is not None:
            theirs = self.verifier.config
            one = jnp.zeros((1, 1, theirs.kv_heads, theirs.head_dim), theirs.dtype)
            encoded = Segment(*self.verifier.layout.arrange(one, one), block_bias(1))
        places = jnp.zeros((1, 1), jnp.int32)
        return self.network.init(key, *given, places, block_bias(1), encoded)

    @property
    def _encoding_verifier(self) -> Model | None:
        return None if self.config.cross_layer is None else self.verifier

    def joined(self, params: Params, verifier: Params) -> Params:
        """Its own parameters with what it uses of the verifier's; arrays are shared."""
        used: dict[str, Any] = {}
        if not self.config.own_embedding or not self.config.own_output:
            used["token_embedder"] = verifier["token_embedder"]
        if not self.config.own_output and not self.verifier.config.tie_embeddings:
            used["decoder"] = {"logits_dense": verifier["decoder"]["logits_dense"]}
        return {**params, "verifier": used}

    def with_memory(self, params: Params, memory: RaggedCache) -> Params:
        """The joined parameters with what its passes read of the verifier's memory: nothing."""
        return params

    def read_text(
        self,
        verifier: Params,
        tokens: Int32[Array, "B T"],
        inputs: Int32[Array, "B P"] | None = None,
        mask: Bool[Array, "B _"] | None = None,
    ) -> tuple[ReadText, Float32[Array, "B T V"]]:
        """What the verifier's pass over a known text gives a head, and the verifier's logits.

        Args:
          verifier: the verifier's parameters.
          tokens: the text; of an encoder-decoder the outputs, after the start token.
          inputs: of an encoder-decoder.
          mask: false at the padding of `inputs`; of a decoder-only verifier that reads prompts in
            both directions, true at the tokens of the prompt.
        """
        theirs = self.verifier
        last = len(theirs.config.style.windows) + 1
        reader = theirs.reading((*self.config.boundaries, last))
        cross = seen = encoded = None
        if inputs is not None:
            cross = _applied(theirs, verifier, inputs, mask, method="encode")
            if (layer := self.config.cross_layer) is not None:
                encoded = Encoded(cross.keys[layer], cross.values[layer], cross.mask)
        elif theirs.config.style.bidirectional_inputs:
            seen = mask
        _, states = _applied(reader, verifier, tokens, cross, seen, method="read")
        width = theirs.config.embed_dim
        logits = _applied(theirs, verifier, states[..., -width:], method="logits")
        return ReadText(tokens, states[..., :-width], encoded), logits

    def drafts_along(
        self,
        params: Params,
        text: ReadText,
        anchors: Int32[Array, "B A"],
        count: int,
        judge: Callable[[Array, Drafted], Any],
    ) -> Any:
        """What `judge(i, drafted)` returns of draft i after the tokens at `anchors`, stacked.

        The drafts before are those that the verifier accepts: the text's own tokens. All `count` of
        them follow from one pass of the verifier, and the gradient reaches every step: the
        training-time test of EAGLE-3, and DFlash's blocks at random places.
        """

        # The logits of one draft are in memory at a time, also for the gradient.
        @jax.checkpoint
        def step(memory: Array, given: tuple[Array, Array]) -> tuple[Array, Any]:
            i, states = given
            tokens = jnp.take_along_axis(text.tokens, anchors + i, axis=1, mode="clip")
            said, memory = self._said(params, states, tokens, memory)
            return memory, judge(i, said)

        states, memory = self._states_along(params, text, anchors, count)
        return lax.scan(step, memory, (jnp.arange(count, dtype=jnp.int32), states))[1]

    @abc.abstractmethod
    def _states_along(
        self, params: Params, text: ReadText, anchors: Int32[Array, "B A"], count: int
    ) -> tuple[Float[Array, "_ B A E"], Array]:
        """The last states of each draft, and the memory of a correction before the first."""

    def _said(
        self,
        params: Params,
        states: Float[Array, "B A E"],
        tokens: Int32[Array, "B A"],
        memory: Array,
    ) -> tuple[Drafted, Array]:
        """What it says after the tokens before the draft, and the memory after that."""
        return Drafted(self._logits(params, states), None), memory

    def _apply(self, params: Params, *args: Any, method: str) -> Any:
        return self.network.apply({"params": params["network"]}, *args, method=method)

    def _embed(self, params: Params, tokens: Array) -> Array:
        if self.config.own_embedding:
            return self._apply(params, tokens, method="embed")
        return self._of_verifier(params, tokens, method="embed")

    def _logits(self, params: Params, hidden: Array) -> Float32[Array, "B T W"]:
        if self.config.own_output:
            return self._apply(params, hidden, method="logits")
        return self._of_verifier(params, hidden, method="logits")

    def _of_verifier(self, params: Params, *args: Any, method: str) -> Any:
        return _applied(self.verifier, params["verifier"], *args, method=method)

    def _spread(self, params: Params, logits: Float32[Array, "B T W"]) -> Float32[Array, "B T V"]:
        """Logits of all tokens; -inf for those that are never drafted."""
        if "places" not in params:
            return logits[..., : self.vocab_size]
        padded = jnp.pad(logits, [(0, 0), (0, 0), (0, 1)], constant_values=-jnp.inf)
        return jnp.take(padded, params["places"][: self.vocab_size], axis=-1, mode="clip")

    def empty(self, rows: int, max_length: int, path: int, nodes: int) -> HeadCache:
        """The cache before a prompt.

        Args:
          rows: B.
          max_length: S.
          path: the longest path of a draft.
          nodes: the most tokens of a draft.
        """
        layers = self.config.layers
        width = len(self.config.boundaries) * self.verifier.config.embed_dim
        fresh = Fresh(
            jnp.zeros((rows, path + 1), jnp.int32),
            jnp.zeros((rows, path + 1, width), self.verifier.config.dtype),
            jnp.zeros((rows,), jnp.int32),
        )
        each = [layers] * layers.num_layers
        entries = cache_lib.allocate(each, rows, max_length, self.layout)
        return HeadCache(entries, fresh, None, jnp.zeros((rows,), jnp.int32))

    def refused(self) -> UserError:
        """The error where it would read texts without its verifier."""
        return UserError(
            f"this {self.config.kind} head drafts only for its verifier, and cannot decode alone "
            "or in a cascade: give a Decoder the pair, without `method` and Cascade"
        )

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Prefilled:
        raise self.refused()

    def begin(
        self, params: Params, verifier: PrefilledStates, max_length: int, path: int, nodes: int
    ) -> HeadCache:
        """The cache after prompts that the verifier has read; sizes as in `empty`."""
        cache = self.empty(verifier.tokens.size, max_length, path, nodes)
        starts: Any = jnp.zeros_like(verifier.positions)
        if self.verifier.continues_beginnings and (common := next_beginning()) is not None:
            starts = jnp.broadcast_to(common[0], starts.shape).astype(jnp.int32)
            cache = cache._replace(entries=filled(cache.entries, common[1].entries))
        if (layer := self.config.cross_layer) is not None:
            cross = verifier.cache.cross
            encoded = Encoded(cross.keys[layer], cross.values[layer], cross.mask)
            cache = cache._replace(encoded=encoded)
        if length := verifier.text.shape[1]:
            places = _places(jnp.zeros_like(starts), length)
            kept = (places + 1 >= starts[:, None]) & (places < verifier.positions[:, None])
            after = jnp.pad(verifier.text[:, 1:], ((0, 0), (0, 1)))
            newest = places == verifier.positions[:, None] - 1
            after = jnp.where(newest, verifier.tokens[:, None], after)
            cache = self._with(params, cache, Known(after, verifier.states, places, kept))
        return note(cache) if self.verifier.continues_beginnings else cache

    def catch_up(
        self, params: Params, cache: HeadCache, positions: Int32[Array, " B"]
    ) -> HeadCache:
        """Writes the entries of what was committed; `positions`: of the last committed tokens."""
        fresh = cache.fresh
        places = _places(positions - fresh.counts, fresh.tokens.shape[1])
        kept = places < positions[:, None]
        cache = self._with(params, cache, Known(fresh.tokens, fresh.states, places, kept))
        read = fresh._replace(counts=jnp.zeros_like(fresh.counts))
        return cache._replace(fresh=read, known=positions)

    @abc.abstractmethod
    def _with(self, params: Params, cache: HeadCache, known: Known) -> HeadCache:
        """The cache with the entries of known states."""

    def _written(
        self,
        cache: HeadCache,
        pairs: list[tuple[Array, Array]],
        starts: Array,
        kept: Bool[Array, "B T"],
    ) -> RaggedCache:
        keys, values = zip(*pairs, strict=True)
        updates = CacheEntries(keys, values, kept)
        return cache_lib.write(cache.entries, updates, starts, self.layout)


def _segment(encoded: Encoded | None) -> Segment | None:
    """What a layer attends to of an encoder's output."""
    if encoded is None:
        return None
    return Segment(encoded.keys, encoded.values, seen_bias(encoded.mask[:, None]))


def _applied(model: Model, params: Params, *args: Any, method: str) -> Any:
    return model.network.apply({"params": params}, *args, method=method)


def _picked(x: Array, places: Int32[Array, " B"]) -> Array:
    """The entry of each row at its place, `[B, 1, ...]`."""
    return jax.vmap(lambda row, at: row[at][None])(x, places)


def _places(starts: Int32[Array, " B"], length: int) -> Int32[Array, "B T"]:
    return starts[:, None] + jnp.arange(length, dtype=jnp.int32)[None]


def seen_bias(seen: Bool[Array, "_ _ S"]) -> Float32[Array, "_ 1 1 _ S"]:
    """The mask of attention by what each query sees."""
    return jnp.where(seen, 0.0, MASKED).astype(jnp.float32)[:, None, None]


@dataclasses.dataclass(frozen=True)
class EagleHead(DraftHead):
    """A recurrent head as a language model, whose tokens must follow the committed ones."""

    reads_trees = True

    @property
    def network(self) -> Any:
        return EagleNetwork(self.config, self.layout, self._encoding_verifier)

    def empty(self, rows: int, max_length: int, path: int, nodes: int) -> HeadCache:
        cache = super().empty(rows, max_length, path, nodes)
        # Those before the last committed token, of a draft, and of the padding of a pass.
        slots, layers = 2 * (path + 2) + nodes, self.config.layers
        return cache._replace(ring=jnp.zeros((rows, slots, layers.embed_dim), layers.dtype))

    def _states_along(
        self, params: Params, text: ReadText, anchors: Int32[Array, "B A"], count: int
    ) -> tuple[Float[Array, "_ B A E"], Array]:
        tokens, window, layers = text.tokens, self.config.windows[0], self.config.layers
        embedded = self._embed(params, tokens)
        states = self._apply(params, text.states, method="project")
        # The state before each token, of which the first has none.
        before = jnp.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0)))
        places = _places(jnp.zeros(tokens.shape[0], jnp.int32), tokens.shape[1])
        keys, values = self._apply(params, embedded, before, places - 1, method="entries")
        none = jnp.zeros((tokens.shape[0], count, layers.kv_heads, layers.head_dim), layers.dtype)
        encoded, steps = _segment(text.encoded), jnp.arange(count, dtype=jnp.int32)

        def chain(anchors: Int32[Array, " B"]) -> Float[Array, "_ B E"]:
            ends = anchors[:, None]
            known = (places > 0) & (places < ends)
            if window is not None:
                known &= places > ends - window
            past = Segment(keys, values, seen_bias(known[:, None]))

            def step(carry: Any, i: Array) -> Any:
                state, own_keys, own_values = carry
                # An entry without a state is seen by its own token only.
                seen = (steps[None] < i) & ((steps[None] > 0) | (ends > 0))
                more = past, Segment(own_keys, own_values, seen_bias(seen[:, None]))
                given = _picked(embedded, anchors + i), state, ends + (i - 1), block_bias(1)
                output, state, key, value = self._apply(
                    params, *given, None, encoded, more, method="step"
                )
                put = lax.dynamic_update_slice_in_dim
                own_keys = put(own_keys, key, i, 1 + self.layout.key_axis)
                own_values = put(own_values, value, i, 1 + self.layout.value_axis)
                return (state, own_keys, own_values), output[:, 0]

            start = _picked(before, anchors), *self.layout.arrange(none, none)
            return lax.scan(step, start, steps)[1]

        return jax.vmap(chain, in_axes=1, out_axes=2)(anchors), jnp.zeros(())

    def _with(self, params: Params, cache: HeadCache, known: Known) -> HeadCache:
        states, places = self._apply(params, known.states, method="project"), known.places
        # The entry of a token at place t + 1 is turned by t, as in the published heads.
        given = self._embed(params, known.tokens), states, places
        pair = self._apply(params, *given, method="entries")
        # Earlier states are in the entries.
        newest = known.kept & ~jnp.pad(known.kept[:, 1:], ((0, 0), (0, 1)))
        return cache._replace(
            entries=self._written(cache, [pair], places[:, 0] + 1, known.kept),
            ring=self._put(cache, states, places, newest),
        )

    def score(
        self, params: Params, cache: HeadCache, tokens: Array, positions: Array
    ) -> tuple[Array, Array, Any]:
        """Reads a token of each row; several, if the states before all of them are known."""
        return self._score(params, cache, tokens, Memory(cache.entries, positions, self.layout))

    def score_tree(
        self, params: Params, cache: HeadCache, tokens: Array, positions: Array, tree: TreeShape
    ) -> tuple[Array, Array, Any]:
        memory = Memory(cache.entries, positions, self.layout, False, tree)
        return self._score(params, cache, tokens, memory)

    def _score(
        self, params: Params, cache: HeadCache, tokens: Array, memory: Memory
    ) -> tuple[Array, Array, Any]:
        assert cache.ring is not None
        length, tree, window = tokens.shape[1], memory.tree, self.config.windows[0]
        places, known = memory.places(length), cache.known[:, None, None]
        slots = jnp.arange(memory.max_length, dtype=jnp.int32)[None]
        before, inside = places - 1, block_bias(length)
        if tree is not None:
            slots, inside = memory.slots(), memory.tree_bias(length)
            parent = tree.seen & (tree.depths[:, None] == tree.depths[:, -length:, None] - 1)
            before = memory.positions[:, None] + jnp.argmax(parent, axis=2).astype(jnp.int32)

        def bias(keys: Int32[Array, "_ S"]) -> Array:
            queries, keys = places[:, :, None], keys[:, None]
            seen = (keys > 0) | (keys == queries)  # no state precedes position 0
            if window is not None:
                seen &= keys > jnp.minimum(queries, known) - window
            return seen_bias(seen)

        past = memory.layer(0, memory.bias(length) + bias(slots))
        states = self._at(cache.ring, before)
        given = (
            self._embed(params, tokens),
            states,
            places - 1,
            inside + bias(places),
            past,
            _segment(cache.encoded),
        )
        normed, states, keys, values = self._apply(params, *given, method="step")
        logits = self._spread(params, self._logits(params, normed))
        return logits, states, (block_updates([keys], [values], normed), states)

    def write(self, cache: HeadCache, updates: Any, positions: Int32[Array, " B"]) -> HeadCache:
        entries, states = updates
        places = _places(positions, states.shape[1])
        return cache._replace(
            entries=cache_lib.write(cache.entries, entries, positions, self.layout),
            ring=self._put(cache, states, places, places >= 0),
        )

    def _at(self, ring: Float[Array, "B R E"], places: Int32[Array, "B T"]) -> Array:
        found = jax.vmap(lambda row, at: row[at])(ring, places % ring.shape[1])
        return jnp.where(places[..., None] >= 0, found, jnp.zeros((), ring.dtype))

    def _put(self, cache: HeadCache, states: Array, places: Array, kept: Array) -> Array:
        assert cache.ring is not None
        slots = jnp.where(kept, places % cache.ring.shape[1], cache.ring.shape[1])
        put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
        return put(cache.ring, slots, states.astype(cache.ring.dtype))


@dataclasses.dataclass(frozen=True)
class BlockHead(DraftHead):
    """A block head as a language model: `block` reads a block, `extend` its drafted tokens."""

    config: BlockConfig

    @property
    def gives_odds(self) -> bool:  # type: ignore[override]  # it may have a confidence head
        return self.config.confidence

    @property
    def most_drafts(self) -> int:
        return self.config.most_drafts

    @property
    def network(self) -> BlockNetwork:
        return BlockNetwork(self.config, self.layout, self._encoding_verifier)

    def _with(self, params: Params, cache: HeadCache, known: Known) -> HeadCache:
        pairs = self._apply(params, known.states, known.places, method="entries")
        starts = known.places[:, 0]
        return cache._replace(entries=self._written(cache, pairs, starts, known.kept))

    def block(
        self,
        params: Params,
        cache: HeadCache,
        tokens: Int32[Array, " B"],
        positions: Int32[Array, " B"],
        count: int,
    ) -> BlockOutputs:
        """Reads the block after the last committed tokens, for up to `count` drafts."""
        rows = tokens.size
        memory = Memory(cache.entries, positions, self.layout)
        given = tokens, positions, count, memory.max_length, memory.layer, cache.encoded
        states = self._block(params, *given)
        logits = self._logits(params, states)
        none = jnp.zeros((rows, count + 1, self.config.markov_rank), states.dtype)
        return BlockOutputs(positions, states, logits, none)

    def _states_along(
        self, params: Params, text: ReadText, anchors: Int32[Array, "B A"], count: int
    ) -> tuple[Float[Array, "_ B A E"], Array]:
        rows, length = text.tokens.shape
        places = _places(jnp.zeros(rows, jnp.int32), length)
        pairs = self._apply(params, text.states, places, method="entries")

        def block(anchors: Int32[Array, " B"]) -> Float[Array, "B _ E"]:
            def layer(i: int, bias: Array) -> LayerMemory:
                keys, values = pairs[i]
                return LayerMemory(keys, values, bias)

            tokens = _picked(text.tokens, anchors)[:, 0]
            return self._block(params, tokens, anchors, count, length, layer, text.encoded)

        states = jax.vmap(block, in_axes=1, out_axes=1)(anchors)
        memory = jnp.zeros((anchors.size, self.config.markov_rank), states.dtype)
        return jnp.moveaxis(states, 2, 0), memory

    def _said(
        self,
        params: Params,
        states: Float[Array, "B A E"],
        tokens: Int32[Array, "B A"],
        memory: Array,
    ) -> tuple[Drafted, Array]:
        # All places in one axis, each with its memory.
        each = states.reshape(tokens.size, 1, -1)
        given = each, self._logits(params, each), tokens.reshape(-1, 1), memory
        logits, odds, memory = self._corrected(params, *given)
        odds = None if odds is None else odds.reshape(tokens.shape)
        return Drafted(logits.reshape(*tokens.shape, -1), odds), memory

    def _block(
        self,
        params: Params,
        tokens: Int32[Array, " B"],
        starts: Int32[Array, " B"],
        count: int,
        length: int,
        layer: Callable[[int, Array], LayerMemory],
        encoded: Encoded | None,
    ) -> Float[Array, "B _ E"]:
        """The states of the first `count` slots that predict, of blocks that begin at `starts`.

        `layer` gives a layer's entries of `length` states of the verifier, with the mask.
        """
        config = self.config
        size, first = config.block_size, config.block_size - config.most_drafts
        masks = jnp.full((tokens.size, size - 1), config.mask_token or 0, jnp.int32)
        embedded = self._embed(params, jnp.concatenate([tokens[:, None], masks], axis=1))
        slots = jnp.arange(length, dtype=jnp.int32)[None, None]
        last = starts[:, None, None] - 1
        biases, pasts = [], []
        for i, window in enumerate(config.windows):
            seen = slots <= last
            if window is not None and config.windows_move:
                seen = seen & (slots > _places(starts, size)[:, :, None] - window)
            elif window is not None:
                seen &= slots > last - window
            pasts.append(layer(i, seen_bias(seen)))
            causal = window is not None and config.causal_windows
            whole = jnp.zeros((1, 1, 1, size, size), jnp.float32)
            biases.append(block_bias(size) if causal else whole)
        given = embedded, _places(starts, size), biases, pasts, _segment(encoded)
        return self._apply(params, *given, method="block")[:, first : first + count]

    def _corrected(
        self, params: Params, states: Array, logits: Array, tokens: Array, memory: Array
    ) -> tuple[Array, Array | None, Array]:
        """Logits after the Markov correction by the tokens before, log-odds, and the memory."""
        if self.config.markov is not None:
            more, odds, memory = self._apply(params, states, tokens, memory, method="corrected")
            return logits + more[..., : logits.shape[-1]], odds, memory
        if not self.config.confidence:
            return logits, None, memory
        return logits, self._apply(params, states, None, method="log_odds"), memory

    def score(
        self, params: Params, cache: HeadCache, tokens: Array, positions: Array
    ) -> tuple[Array, Array, Any]:
        """Reads a token of each row, the last committed one or a drafted one after it.

        With a confidence head, the last of the hidden states is the log-odds that the next token is
        accepted.
        """
        assert tokens.shape[1] == 1 and cache.outputs is not None
        outputs = cache.outputs
        slots = positions - outputs.starts
        states, logits, memory = (
            _picked(outputs.states, slots),
            _picked(outputs.logits, slots),
            _picked(outputs.memory, slots)[:, 0],
        )
        logits, odds, memory = self._corrected(params, states, logits, tokens, memory)
        hidden = states
        if odds is not None:
            hidden = jnp.concatenate([states, odds[..., None].astype(states.dtype)], axis=-1)
        return self._spread(params, logits), hidden, memory

    def write(self, cache: HeadCache, updates: Any, positions: Int32[Array, " B"]) -> HeadCache:
        assert cache.outputs is not None
        outputs = cache.outputs
        # A row whose draft has ended keeps the memory at its end, while others draft on.
        put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
        memory = put(outputs.memory, positions - outputs.starts + 1, updates)
        return cache._replace(outputs=outputs._replace(memory=memory))


@functools.singledispatch
def draft_head(config: HeadConfig, verifier: Model) -> DraftHead:
    """The head of a configuration."""
    raise NotImplementedError(type(config))


@draft_head.register
def _(config: EagleConfig, verifier: Model) -> DraftHead:
    return EagleHead(config, verifier)


@draft_head.register
def _(config: BlockConfig, verifier: Model) -> DraftHead:
    return BlockHead(config, verifier)


def places_of(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """For each token its place among those drafted, `tokens [W]`, or W; int32 `[V]`."""
    places = np.full(vocab_size, tokens.size, np.int32)
    places[tokens] = np.arange(tokens.size)
    return places
