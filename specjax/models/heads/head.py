"""What draft heads share: small networks that draft from the states of their verifier.

A recurrent head (`eagle.py`) reads a token together with the verifier's state of the token before
it; where it has drafted that token itself, with its own state. A block head (`block.py`) reads the
states as context, and drafts a block of tokens in one pass. As entries of committed tokens need no
attention, they are written without a pass (`catch_up`).

In files, each format numbers the verifier's states in its own way. EAGLE fixes them (2, L // 2, L -
3); speculators names boundaries (see `specjax.types.LanguageModel.reading`); `target_layer_ids` of
DFlash and DeepSpec, and the ids in the `eagle_config` of SpecForge and SGLang, name the layers
whose outputs they are, one less.

Axes: B rows, T tokens, S cache length, R slots of the ring, F width of the verifier's states, E
model width, V vocabulary, W draft vocabulary, P inputs of an encoder, A places in a text.
"""

import abc
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import unfreeze
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from specjax.errors import UserError
from specjax.models import cache as cache_lib
from specjax.models.attention import (
    Attention,
    LayerMemory,
    Segment,
    attended,
    block_bias,
    seen_bias,
)
from specjax.models.beginnings import fill, next_beginning, note
from specjax.models.cache import CacheEntries, CacheLayout, RaggedCache, layout_for, places_from
from specjax.models.config import DecoderOnlyConfig, ModelConfig, common_dtype
from specjax.models.decoder_only import FULL, SLIDING, windows_from_hf
from specjax.models.experts import Experts
from specjax.models.families import FAMILIES, family_of
from specjax.models.family import HEADS, HFFields, Nested, Renaming
from specjax.models.layers import MLP, Dense, Embed, LogitsDense
from specjax.models.model import Model, Seq2SeqLM
from specjax.models.position_encoding import Rope, rope_angles
from specjax.models.transformer import norm_of
from specjax.types import LanguageModel, Params, Prefilled, PrefilledStates, Prompts

# The families of which layers may be; those of MTP's and of heads that vLLM reads.
LAYERS = ("llama", "qwen3")
QWEN_LAYERS = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
TO_DRAFT, TO_TEXT = "t2d", "d2t"
# From our modules to the names in files, where they differ from a model's; `{layer}` is the name
# of a layer.
NAMES = {
    "fc": "fc",
    "norm": "norm",
    "logits_dense": "lm_head",
    "token_embedder": "embed_tokens",
    "state_norm": "hidden_norm",
    **{
        f"layers_{{i}}/cross_attention/{ours}{end}": f"{{layer}}.cross_attn.{theirs}{other}"
        for theirs, ours in HEADS.items()
        for end, other in (("", "_proj"), ("_norm", "_norm"))
    },
    "layers_{i}/pre_cross_layer_norm": "{layer}.pre_cross_attn_layernorm",
}
# Some heads name their arrays as those of a whole model.
AS_MODEL = Nested(
    model_type="", architectures=(), field="", prefixes={"model.": ""}, others=r"(?!)"
)


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

    # The longest draft of one pass; None: a pass drafts one token.
    most_drafts: ClassVar[int | None] = None

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
    def is_ours(self) -> bool:
        """Whether no other project has such a head."""
        return self.cross_layer is not None

    @property
    def rows(self) -> int:
        """W."""
        return self.draft_vocab or self.layers.vocab_size


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


class Reranked(NamedTuple):
    """Logits of all tokens: those whose largest are the candidates, and those that choose."""

    base: Float32[Array, "B A W"]
    logits: Float32[Array, "B A W"]


class Drafted(NamedTuple):
    """What a head says of one draft after each of A places in a text.

    Attributes:
      logits: of the tokens that are drafted.
      odds: the log-odds that the draft is accepted; None without a confidence head.
      reranked: where `logits` are those of candidates, the others -inf; else None.
    """

    logits: Float32[Array, "B A W"]
    odds: Float32[Array, "B A"] | None
    reranked: Reranked | None = None


class HeadCache(NamedTuple):
    """The memory of a draft head; the leading axis of every array is the batch.

    Attributes:
      entries: keys and values of committed tokens, and of the present draft.
      fresh: what `entries` lacks.
      ring: of a recurrent head, the state at position t in slot t modulo R; None of a block head.
      known: the position of the last token before which the state is the verifier's.
      outputs: of a block head, between its draft and the next commit; else None.
      memory: of a head that `reads_memory`, while it drafts; else None.
      encoded: what it reads of the encoder, or None; see `HeadConfig.cross_layer`.
    """

    entries: RaggedCache
    fresh: Fresh
    ring: Float[Array, "B R E"] | None
    known: Int32[Array, " B"]
    outputs: Any = None
    memory: Any = None
    encoded: Encoded | None = None


class HeadLayer(nn.Module):
    """Self-attention, perhaps cross-attention, and a feed-forward block.

    Self-attention may read more than the residual stream. A subclass may convolve what the first
    and the last part read and add.

    Attributes:
      verifier: whose encoder is read; None for none.
    """

    config: DecoderOnlyConfig
    layout: CacheLayout
    verifier: Model | None = None

    def setup(self) -> None:
        config, style = self.config, self.config.style
        self.self_attention = Attention(config, style, self.layout)
        self.pre_mlp_layer_norm = norm_of(config, style, "pre_mlp_layer_norm")
        routing, dtypes = style.layers[0].routing, (config.dtype, config.param_dtype)
        self.mlp: nn.Module = (
            MLP(config.mlp_dim, style.activations, *dtypes)
            if routing is None
            else Experts(routing, style.activations, *dtypes)
        )
        if self.verifier is not None:
            theirs = self.verifier.config
            self.cross_attention = Attention(theirs, theirs.style, self.verifier.layout)
            self.pre_cross_layer_norm = norm_of(config, style, "pre_cross_layer_norm")
        self.attention_conv: Any = lambda y: (y, lambda x: x)
        self.mlp_conv = self.attention_conv

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
        y, convolved = self.attention_conv(y)
        keys, values = self.keys_values(y, rope)
        segments, keys, values = attended(past, self.layout, keys, values, bias)
        x = residual + convolved(self.self_attention(y, [*more, *segments], rope))
        if encoded is not None:
            x = x + self.cross_attention(self.pre_cross_layer_norm(x), [encoded])
        y, convolved = self.mlp_conv(self.pre_mlp_layer_norm(x))
        return x + convolved(self.mlp(y)), keys, values


class HeadNetwork(nn.Module):
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

    def __call__(self, *given: Any) -> Array:
        """Reads states and tokens without a past; it names all parameters."""
        if self.config.own_embedding:
            self.embed(jnp.zeros((1, 1), jnp.int32))
        hidden = self.run(*given)
        return self.logits(hidden) if self.config.own_output else hidden

    def rope(self, places: Int32[Array, "B T"], layer: int = 0) -> Rope:
        style = self.config.layers.style
        return rope_angles(places, style.layers[layer].rope, style.rope_scale)


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

    reads_verifier = True
    # Whether its layers read the verifier's own keys and values; see `with_memory`.
    reads_memory: ClassVar[bool] = False

    @property
    def vocab_size(self) -> int:
        return self.verifier.vocab_size

    @property
    def predicts_all(self) -> bool:  # type: ignore[override]  # it may have a map
        return self.config.draft_vocab is None

    @property
    def most_drafts(self) -> int | None:  # type: ignore[override]  # see `HeadConfig`
        return self.config.most_drafts

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

    def with_memory(self, cache: HeadCache, memory: RaggedCache | None) -> HeadCache:
        """The cache with what its passes read of the verifier's cache; None takes it out."""
        return cache

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
        last = len(theirs.config.style.layers) + 1
        reader = theirs.reading((*self.config.boundaries, last))
        cross = seen = encoded = None
        if inputs is not None:
            cross = theirs._apply(verifier, inputs, mask, method="encode")
            if (layer := self.config.cross_layer) is not None:
                encoded = Encoded(cross.keys[layer], cross.values[layer], cross.mask)
        elif theirs.config.style.bidirectional_inputs:
            seen = mask
        _, states = reader._apply(verifier, tokens, cross, seen, method="read")
        width = theirs.config.embed_dim
        logits = theirs._apply(verifier, states[..., -width:], method="logits")
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
            said, memory = self._said(params, i, states, tokens, memory)
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
        draft: Int32[Array, ""],
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
        return self.verifier._apply(params["verifier"], *args, method=method)

    def _spread(self, params: Params, logits: Float32[Array, "B T W"]) -> Float32[Array, "B T V"]:
        """Logits of all tokens; -inf for those that are never drafted."""
        if "places" not in params:
            return logits[..., : self.vocab_size]
        padded = jnp.pad(logits, [(0, 0), (0, 0), (0, 1)], constant_values=-jnp.inf)
        return jnp.take(padded, params["places"][: self.vocab_size], axis=-1, mode="clip")

    def empty(self, rows: int, max_length: int, path: int, nodes: int) -> HeadCache:
        """The cache before a prompt; a draft has at most `nodes` tokens, on paths of `path`."""
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
            cache = cache._replace(entries=fill(cache.entries, common[1].entries))
        if (layer := self.config.cross_layer) is not None:
            cross = verifier.cache.cross
            encoded = Encoded(cross.keys[layer], cross.values[layer], cross.mask)
            cache = cache._replace(encoded=encoded)
        if length := verifier.text.shape[1]:
            places = places_from(jnp.zeros_like(starts), length)
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
        places = places_from(positions - fresh.counts, fresh.tokens.shape[1])
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


def encoder_segment(encoded: Encoded | None) -> Segment | None:
    """What a layer attends to of an encoder's output."""
    if encoded is None:
        return None
    return Segment(encoded.keys, encoded.values, seen_bias(encoded.mask[:, None]))


def pick(x: Array, places: Int32[Array, " B"]) -> Array:
    """The entry of each row at its place, `[B, 1, ...]`."""
    return jax.vmap(lambda row, at: row[at][None])(x, places)


def places_of(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """For each token its place among those drafted, `tokens [W]`, or W; int32 `[V]`."""
    places = np.full(vocab_size, tokens.size, np.int32)
    places[tokens] = np.arange(tokens.size)
    return places


class Published(NamedTuple):
    """A kind of head as speculators has it.

    Attributes:
      name: its `speculators_model_type`.
      network: the class that reads it there.
      layer: how arrays name a layer.
      copies: matrices that other servers do not take from the verifier.
      families: of layers that they read.
    """

    kind: str
    name: str
    network: str
    layer: str = "layers.{i}"
    copies: tuple[str, ...] = (OUTPUT,)
    families: tuple[str, ...] = QWEN_LAYERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadFiles(abc.ABC):
    """A draft head whose arrays have not been read; a subclass is a kind of head.

    Attributes:
      fields: of its `config.json`.
      reader: of a directory's arrays, with `specs` by name, and `read`.
      format: the project whose format it is.
      kind: such as "EAGLE-3".
      width: of the verifier for which it was made, as far as the files tell.
      num_layers: of this verifier; None if the files do not tell.
      verifier: this verifier's name; None if the files have none.
      networks: the names of its network in Hugging Face's files, as far as the files tell.
      windows: see `HeadConfig`.
      cross_layer: see `HeadConfig`.
      fingerprint: of the verifier's parameters; None if the files have none.
    """

    fields: HFFields
    reader: Any
    format: str
    kind: str
    layers: DecoderOnlyConfig
    width: int
    windows: tuple[int | None, ...]
    num_layers: int | None = None
    verifier: str | None = None
    networks: tuple[str, ...] = ()
    cross_layer: int | None = None
    fingerprint: str | None = None

    config: ClassVar[type[HeadConfig]]
    head: ClassVar[type[DraftHead]]
    speculators: ClassVar[tuple[Published, ...]] = ()
    # The files are known by any of these fields, or by a `model_type` and perhaps an array.
    marks: ClassVar[tuple[str, ...]] = ()
    model_types: ClassVar[tuple[str, ...]] = ()
    array: ClassVar[str | None] = None
    # The families of which a kind's layers may be, if not `LAYERS`.
    families: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    nested: ClassVar[Nested | None] = AS_MODEL
    # The files of such verifiers may have one inside, with this array, named so.
    verifiers: ClassVar[tuple[str, ...]] = ()
    array_inside: ClassVar[str] = ""
    inside: ClassVar[Nested | None] = None
    # Arrays of which a pass reads a row of each token.
    tables: ClassVar[tuple[str, ...]] = (EMBEDDING,)

    @classmethod
    def is_in(cls, values: Mapping[str, Any], arrays: Callable[[], Collection[str]]) -> bool:
        """Whether a directory has such a head, by its `config.json` and the names of its arrays."""
        if any(values.get(mark) is not None for mark in cls.marks):
            return True
        known = values.get("model_type") in cls.model_types
        return known and (cls.array is None or cls.array in arrays())

    @classmethod
    def format_in(cls, fields: HFFields, arrays: Collection[str]) -> tuple[str, str]:
        """The project and the kind, of files that are not speculators'."""
        raise NotImplementedError(cls)

    @classmethod
    def layer_fields(cls, kind: str, fields: HFFields, arrays: Collection[str]) -> HFFields:
        """The fields of its layers among those in the file."""
        return fields

    @classmethod
    def opened(cls, fields: HFFields, reader: Any) -> Self:
        """The head of a directory that it `is_in`."""
        values = fields.values
        theirs = values.get("speculators_model_type")
        if theirs is not None:
            format_ = "speculators"
            kind = next(each.kind for each in cls.speculators if each.name == theirs)
        else:
            format_, kind = cls.format_in(fields, reader.specs)
        place = "text_config" if theirs is None else "transformer_layer_config"
        inner = HFFields(fields.objects(place)) if place in values else fields
        known, family = cls.families.get(kind, LAYERS), inner.values.get("model_type")
        if family not in known:
            raise UserError(
                f"layers of model_type {family!r} are not supported in a head of kind {kind}, only "
                f"{', '.join(known)}"
            )
        inner = cls.layer_fields(kind, inner, reader.specs)
        # Windows are the head's own, see `HeadConfig`.
        listed = inner.values.get("layer_types")
        full = [FULL] * len(listed) if isinstance(listed, list) else None
        changes = {"layer_types": full, "use_sliding_window": False}
        config = FAMILIES[family].from_hf(HFFields({**inner.values, **changes}))
        assert isinstance(config, DecoderOnlyConfig)
        start = count = config.num_layers
        if inner.flag("use_sliding_window", False):
            start = inner.whole("max_window_layers", 28, least=0)
        types = [SLIDING if i >= start else FULL for i in range(count)]
        found = windows_from_hf(inner, inner.window(None), types, count)
        size, types = found["sliding_window"], found["layer_types"] or [SLIDING] * count
        verifier = HFFields(fields.objects("speculators_config")).objects("verifier")
        networks = verifier.get("architectures") or ()
        if not isinstance(networks, list | tuple) or not all(isinstance(x, str) for x in networks):
            raise UserError(f"architectures={networks!r} must be a list of names")
        deep = values.get("num_target_layers") is not None
        ours = HFFields(fields.objects("specjax"))
        crossing = ours.values.get("cross_layer") is not None
        return cls(
            fields=fields,
            reader=reader,
            format=format_,
            kind=kind,
            layers=config,
            width=fields.whole("target_hidden_size", config.embed_dim),
            num_layers=fields.whole("num_target_layers") if deep else None,
            verifier=verifier.get("name_or_path"),
            networks=tuple(networks),
            windows=tuple(size if x == SLIDING else None for x in types),
            cross_layer=ours.whole("cross_layer", least=0) if crossing else None,
            fingerprint=ours.values.get("verifier_fingerprint"),
        )

    @property
    def path(self) -> Any:
        """Its directory."""
        return self.reader.directory

    @property
    def layer(self) -> str:
        """How its arrays name a layer."""
        return "layers.{i}"

    @property
    def reads_output(self) -> bool:
        """Whether it reads what the last norm makes of the last layer's output, and that alone."""
        return False

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its parameters in the files."""
        specs = self.reader.specs.values()
        return common_dtype(x.dtype for x in specs if x.dtype.kind not in "iub")

    def share_read(self, name: str) -> float:
        """The share of an array that a pass reads, besides the rows of tokens."""
        routing = self.layers.style.layers[0].routing
        if ".experts." in name and routing is not None:
            return routing.per_token / routing.experts
        return 0.0 if name in self.tables else 1.0

    @property
    def named(self) -> str:
        """The verifier's name in messages."""
        return "" if self.verifier is None else f" ({self.verifier})"

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """See `HeadConfig`; None if they follow from the verifier's layers, which are not told."""
        return self.fields.read(lambda _: self._boundaries(self.num_layers))

    def config_for(self, verifier: Model) -> HeadConfig:
        """The head's configuration.

        Raises:
          UserError: it was made for another verifier.
        """
        theirs, depth = verifier.config, len(verifier.config.style.layers)
        wanted = {
            "width": (self.width, theirs.embed_dim),
            "tokens in the embedding": (self.layers.vocab_size, theirs.vocab_size),
            "layers": (self.num_layers or depth, depth),
        }
        differing = [
            f"{name} {needed}, not {given}"
            for name, (needed, given) in wanted.items()
            if needed != given
        ]
        family = family_of(theirs).architectures
        if self.networks and not set(self.networks) & set(family):
            differing.append(f"the network {self.networks[0]}, not {family[0]}")
        if self.cross_layer is not None and not isinstance(verifier, Seq2SeqLM):
            differing.append("an encoder, not a decoder alone")
        if (self.cross_layer or 0) >= depth:
            differing.append(f"a layer {self.cross_layer}, not {depth} layers")
        differing += self.differing(theirs)
        if not differing:
            # Of a known depth they are never None.
            boundaries = self.fields.read(lambda _: self._boundaries(depth)) or ()
            most = depth + (1 if self.reads_output else 0)
            if not all(0 <= boundary <= most for boundary in boundaries):
                differing = [f"states {list(boundaries)} of its layers, of which it has {depth}"]
        if differing:
            raise UserError(
                f"{self.path} is a head for another verifier{self.named}, which has "
                f"{', '.join(differing)}: give its own verifier"
            )
        count = None
        if TO_TEXT in self.reader.specs:
            (count,) = self.shape(TO_TEXT, 1)
            self.shape(OUTPUT, 2)  # its rows are those tokens
        return self.fields.read(lambda _: self.read_config(boundaries, count))

    def differing(self, verifier: ModelConfig) -> list[str]:
        """What it needs, and this verifier does not have, besides sizes."""
        return []

    def _boundaries(self, depth: int | None) -> tuple[int, ...] | None:
        if self.reads_output:
            return None if depth is None else (depth + 1,)
        fields, values = self.fields, self.fields.values
        blocks, eagle = fields.objects("dflash_config"), fields.objects("eagle_config")
        outputs = {
            "target_layer_ids": {**values, **blocks},
            "eagle_aux_hidden_state_layer_ids": eagle,
        }
        for name, given in outputs.items():
            if (layers := _whole_numbers(given, name)) is None:
                continue
            if depth is not None and depth - 1 in layers:
                raise UserError(
                    f"{name}={layers} names the last layer, whose output some projects normalise "
                    "and some do not: it is not supported"
                )
            return tuple(layer + 1 for layer in layers)
        for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
            if (ids := _whole_numbers(values, name)) is not None:
                # speculators' launcher may name one more, for its training.
                return tuple(ids[: self.shape("fc.weight", 2)[1] // self.width])
        return None if depth is None else self.usual_boundaries(depth)

    def usual_boundaries(self, depth: int) -> tuple[int, ...]:
        """Those of files that name none: by default those of EAGLE-3's code."""
        return tuple(sorted({2, depth // 2, depth - 3}))

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """The shape of an array that must be there."""
        if name not in self.reader.specs:
            raise UserError(f"{self.path}: 1 array missing: {name}. Copy the whole checkpoint")
        shape = self.reader.specs[name].shape
        if len(shape) != axes:
            raise UserError(f"{self.path}: {name} must have {axes} axes, but its shape is {shape}")
        return shape

    @abc.abstractmethod
    def read_config(self, boundaries: tuple[int, ...], draft_vocab: int | None) -> HeadConfig:
        """The configuration, of fields that name its options."""

    def common(self, boundaries: tuple[int, ...], draft_vocab: int | None) -> dict[str, Any]:
        """The fields of `HeadConfig`."""
        specs, vocab, width = self.reader.specs, self.layers.vocab_size, self.layers.embed_dim
        wanted = self.fields.whole("draft_vocab_size", draft_vocab or vocab)
        if wanted != (draft_vocab or vocab):
            raise UserError(
                f"draft_vocab_size={wanted} needs the array {TO_TEXT} of as many tokens: copy the "
                "whole checkpoint"
            )
        shares = self.reads_output or not {EMBEDDING, OUTPUT} <= set(specs)
        if width != self.width and (shares or self.cross_layer is not None):
            raise UserError(
                f"hidden_size={width} must be that of the verifier, {self.width}, whose embedding "
                "or output this head uses"
            )
        return {
            "layers": self.layers,
            "boundaries": boundaries,
            "windows": self.windows,
            "draft_vocab": draft_vocab,
            "own_embedding": EMBEDDING in specs,
            "own_output": OUTPUT in specs,
            "cross_layer": self.cross_layer,
        }

    @classmethod
    def names(cls, config: Any) -> Mapping[str, str]:
        """The table of names; see `NAMES`."""
        return NAMES

    @classmethod
    def stored(cls, config: Any, layer: str, path: str) -> list[Renaming]:
        """How the arrays of a parameter may be stored, in files that name a layer so.

        The first way is written.
        """
        names, (module, _, leaf) = cls.names(config), path.rpartition("/")
        number = re.search(r"_(\d+)", module)
        i = number[1] if number else "0"
        layer = layer.replace("{i}", i)
        suffix = ".bias" if leaf == "bias" else ".weight"
        for part, end in ((path, ""), (module, suffix)):
            name = names.get(re.sub(r"_\d+", "_{i}", part, count=1))
            if name is not None:
                name = name.replace("{layer}", layer).replace("{i}", i)
                return [Renaming(name + end, path, leaf == "kernel")]
        # The rest of a layer is named as in its family; speculators joins experts.
        lines = family_of(config.layers).hf_names(f"decoder/{path}")
        return [
            line._replace(hf=line.hf.replace(f"model.layers.{i}", layer), path=path)
            for line in sorted(lines, key=lambda x: "{e}" in x.hf)
        ]

    def maps(self, config: Any) -> dict[str, tuple[int, ...]]:
        """The shapes of its arrays of whole numbers."""
        if config.draft_vocab is None:
            return {}
        maps = {TO_TEXT: (config.draft_vocab,), TO_DRAFT: (config.layers.vocab_size,)}
        return {name: shape for name, shape in maps.items() if name in self.reader.specs}

    def read_maps(self, config: Any) -> dict[str, np.ndarray]:
        """The parameters that are made of them."""
        if config.draft_vocab is None:
            return {}
        size, offsets = self.layers.vocab_size, self.whole_numbers(TO_TEXT)
        tokens = np.arange(offsets.size) + offsets.astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= size:
            raise UserError(
                f"{self.path}: {TO_TEXT} names token {tokens[(tokens < 0) | (tokens >= size)][0]}, "
                f"but the verifier has {size}: copy the checkpoint again"
            )
        mask = np.zeros(size, bool)
        mask[tokens] = True
        same = TO_DRAFT not in self.reader.specs or np.array_equal(
            mask, self.whole_numbers(TO_DRAFT, "iub")
        )
        if mask.sum() != tokens.size or not same:
            raise UserError(
                f"{self.path}: {TO_TEXT} names a token twice, or others than {TO_DRAFT}: copy the "
                "checkpoint again"
            )
        return {"places": places_of(tokens, size)}

    def whole_numbers(self, name: str, kinds: str = "iu") -> np.ndarray:
        """An array of these kinds of dtypes."""
        spec = self.reader.specs[name]
        if spec.dtype.kind not in kinds:
            raise UserError(
                f"{self.path}: {name} has dtype {spec.label}, but must have whole numbers: copy "
                "the checkpoint again"
            )
        return self.reader.read(name)

    @classmethod
    def to_hf(cls, head: DraftHead, layers: dict[str, Any]) -> dict[str, Any]:
        """Its fields in speculators' format; `layers` are those of its layers."""
        config, width = head.config, head.verifier.config.embed_dim
        return {
            "transformer_layer_config": layers,
            "draft_vocab_size": config.rows,
            "target_hidden_size": None if config.layers.embed_dim == width else width,
        }


def _whole_numbers(values: Mapping[str, Any], name: str) -> list[int] | None:
    """A list of whole numbers, or None if the field is absent or null."""
    found = values.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not found or any(type(x) is not int for x in found):
        raise UserError(f"{name}={found!r} must be a list of whole numbers")
    return found
