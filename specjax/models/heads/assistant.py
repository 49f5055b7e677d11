"""Gemma 4's assistants: heads that attend to the verifier's own keys and values.

An assistant's layers have queries only, for the entries of committed tokens in the verifier's
cache: those of its last layer of the same type that has entries. A draft reads each token together
with the state of the token before it, the verifier's or its own, as other recurrent heads do, but
all of a draft's queries stand at the last committed token, and see no token of the draft.

The output projection may be cut into clusters of tokens: then only those of a few clusters are
scored, the ones whose centroids score best, and all others get less than the worst of these.

Axes: B rows, E model width, D width of the verifier's states, V vocabulary, C clusters of V / C
tokens, of which k are scored, S positions of the verifier's cache.

Sources: `transformers/models/gemma4_assistant`, whose decoding loop lets a rejected token's entry
stay, and finds the worst score over all rows: here a row's draft depends on its own text only.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Float32, Int32

from specjax.compilation import product_precision
from specjax.errors import UserError
from specjax.models.attention import Segment, block_bias, seen_bias
from specjax.models.cache import CacheLayout, RaggedCache
from specjax.models.config import ModelConfig, Style
from specjax.models.families import FAMILIES, family_of
from specjax.models.family import HFFields, Renaming, T
from specjax.models.gemma4 import Gemma4Config
from specjax.models.heads.eagle import EagleHead
from specjax.models.heads.head import HeadCache, HeadConfig, HeadFiles, Known
from specjax.models.layers import Dense, Embed, LogitsDense, RMSNorm
from specjax.models.position_encoding import rope_angles
from specjax.models.transformer import Layer
from specjax.types import Params

# The families of which layers may be.
_LAYERS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
_ORDER = "masked_embedding.token_ordering"  # of clusters
_OUTPUT = "model.embed_tokens.weight"
_NAMES = {
    "pre_projection/kernel": ("pre_projection.weight", T),
    "post_projection/kernel": ("post_projection.weight", T),
    "norm/scale": ("model.norm.weight", False),
    "logits_dense/kernel": (_OUTPUT, T),
    "output/embedding": (_OUTPUT, False),
    "centroids/kernel": ("masked_embedding.centroids.weight", T),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadConfig):
    """An assistant; its `windows` count the committed tokens before the last one.

    Attributes:
      clusters: C; None: all tokens are scored.
      scored_clusters: k.
    """

    clusters: int | None = None
    scored_clusters: int = 1

    @property
    def kind(self) -> str:
        return "assistant"


def _layers_read(style: Style) -> dict[bool, int]:
    """The verifier's layers whose entries are read, by whether they are without a window."""
    return {style.layers[i].window is None: i for i in style.cached}


class AssistantNetwork(nn.Module):
    """An assistant. Embeddings are given.

    Attributes:
      layout: of the verifier's cache.
      width: D.
    """

    config: AssistantConfig
    layout: CacheLayout
    width: int

    def setup(self) -> None:
        config, layers = self.config, self.config.layers
        dtypes = layers.dtype, layers.param_dtype
        between = ("embed", "embed")
        self.pre_projection = Dense(layers.embed_dim, between, *dtypes)
        self.post_projection = Dense(self.width, between, *dtypes)
        self.layers = [
            Layer(layers.of_layer(i), layers.style, self.layout) for i in range(layers.num_layers)
        ]
        self.norm = RMSNorm(layers.norm_eps, *dtypes)
        if config.clusters is None:
            self.logits_dense = LogitsDense(layers.vocab_size, layers.param_dtype)
        else:
            self.centroids = Dense(config.clusters, ("embed", "vocab"), *dtypes)
            self.output = Embed(layers.vocab_size, layers.embed_dim, *dtypes)

    def step(
        self,
        embedded: Float[Array, "B 1 D"],
        states: Float[Array, "B 1 D"],
        places: Int32[Array, "B 1"],
        memory: list[Segment],
    ) -> tuple[Float[Array, "B 1 E"], Float[Array, "B 1 D"]]:
        """The output, and the state that the next step reads."""
        style = self.config.layers.style
        x = self.pre_projection(jnp.concatenate([embedded, states.astype(embedded.dtype)], axis=-1))
        for layer, spec, (keys, values, bias, _) in zip(
            self.layers, style.layers, memory, strict=True
        ):
            rope = rope_angles(places, spec.rope, style.rope_scale)
            x, _ = layer(x, bias, None, rope, None, (keys, values))
        normed = self.norm(x)
        return normed, self.post_projection(normed)

    def logits(
        self, hidden: Float[Array, "B 1 E"], clusters: Int32[Array, "C _"] | None
    ) -> Float32[Array, "B 1 V"]:
        if clusters is None:
            return self.logits_dense(hidden)
        hidden = hidden[:, 0]
        _, best = jax.lax.top_k(self.centroids(hidden), self.config.scored_clusters)
        scored = jnp.take(clusters, best, axis=0, mode="clip").reshape(len(hidden), -1)
        logits = jnp.einsum(
            "be,bne->bn",
            hidden,
            self.output(scored),
            precision=product_precision(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        others = jnp.min(logits, axis=1, keepdims=True) - 1.0
        others = jnp.broadcast_to(others, (len(hidden), self.config.layers.vocab_size))
        put = jax.vmap(lambda row, at, new: row.at[at].set(new, unique_indices=True))
        return put(others, scored, logits)[:, None]

    def __call__(
        self,
        embedded: Array,
        states: Array,
        places: Array,
        memory: list[Segment],
        clusters: Array | None,
    ) -> Array:
        return self.logits(self.step(embedded, states, places, memory)[0], clusters)


@dataclasses.dataclass(frozen=True)
class AssistantHead(EagleHead):
    """An assistant as a language model, whose tokens must follow the committed ones."""

    reads_trees = False
    reads_memory = True

    @property
    def network(self) -> AssistantNetwork:
        return AssistantNetwork(self.config, self.verifier.layout, self.verifier.config.embed_dim)

    # For each layer, the place in the verifier's cache of the entries that it reads.
    @property
    def _sources(self) -> list[int]:
        theirs = self.verifier.config.style
        read = _layers_read(theirs)
        return [theirs.cached.index(read[window is None]) for window in self.config.windows]

    def _init_variables(self, key: Array) -> Any:
        theirs, style = self.verifier.config, self.verifier.config.style
        state = jnp.zeros((1, 1, theirs.embed_dim), self.config.layers.dtype)
        memory = []
        for place in self._sources:
            size = theirs.of_layer(style.cached[place])
            one = jnp.zeros((1, 1, size.kv_heads, size.head_dim), theirs.dtype)
            memory.append(Segment(*self.verifier.layout.arrange(one, one), block_bias(1)))
        clusters = None
        if (count := self.config.clusters) is not None:
            clusters = jnp.zeros((count, self.config.layers.vocab_size // count), jnp.int32)
        places = jnp.zeros((1, 1), jnp.int32)
        return self.network.init(key, state, state, places, memory, clusters)

    def empty(self, rows: int, max_length: int, path: int, nodes: int) -> HeadCache:
        cache = super().empty(rows, max_length, path, nodes)
        assert cache.ring is not None
        shape = (*cache.ring.shape[:2], self.verifier.config.embed_dim)
        ring = jnp.zeros(shape, cache.ring.dtype)
        return cache._replace(entries=RaggedCache((), ()), ring=ring)

    def with_memory(self, cache: HeadCache, memory: RaggedCache | None) -> HeadCache:
        pairs = memory and [(memory.keys[place], memory.values[place]) for place in self._sources]
        return cache._replace(memory=pairs)

    def _with(self, params: Params, cache: HeadCache, known: Known) -> HeadCache:
        newest = known.kept & ~jnp.pad(known.kept[:, 1:], ((0, 0), (0, 1)))
        return cache._replace(ring=self._put(cache, known.states, known.places, newest))

    def score(
        self, params: Params, cache: HeadCache, tokens: Array, positions: Array, tree: Any = None
    ) -> tuple[Array, Array, Any]:
        """Reads a token of each row, the last committed one or a drafted one after it."""
        assert tokens.shape[1] == 1 and cache.ring is not None
        last, layout, memory = cache.known[:, None], self.verifier.layout, []
        for (keys, values), window in zip(cache.memory, self.config.windows, strict=True):
            slots = jnp.arange(keys.shape[1 + layout.key_axis], dtype=jnp.int32)[None]
            seen = slots < last
            if window is not None:
                seen &= slots >= last - window
            memory.append(Segment(keys, values, seen_bias(seen[:, None])))
        given = self._embed(params, tokens), self._at(cache.ring, positions[:, None] - 1)
        hidden, states = self._apply(params, *given, last, memory, method="step")
        logits = self._apply(params, hidden, params.get("clusters"), method="logits")
        # Before the second token there is nothing to attend to, so any token is as good.
        nothing = last[..., None] == 0
        logits, states = (jnp.where(nothing, 0.0, x).astype(x.dtype) for x in (logits, states))
        return logits[..., : self.vocab_size], states, states

    def write(self, cache: HeadCache, updates: Any, positions: Int32[Array, " B"]) -> HeadCache:
        places = positions[:, None]
        return cache._replace(ring=self._put(cache, updates, places, places >= 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantFiles(HeadFiles):
    """The files of Gemma's assistants."""

    config = AssistantConfig
    head = AssistantHead
    model_types = tuple(_LAYERS)
    nested = None
    reads_output = True

    @classmethod
    def opened(cls, fields: HFFields, reader: Any) -> Self:
        family = _LAYERS[fields.values["model_type"]]
        fields.refuse("tie_word_embeddings", (True,), True)
        inner = fields.part("text_config", family)
        # All layers read the verifier's entries.
        changes = {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": None}
        layers = FAMILIES[family].from_hf(HFFields({**inner.values, **changes}))
        assert isinstance(layers, Gemma4Config)
        for name in ("layer_input_dim", "num_experts", "final_logit_softcap"):
            if (found := getattr(layers, name)) is not None:
                raise UserError(f"text_config: an assistant has no {name}, got {found}")
        return cls(
            fields=fields,
            reader=reader,
            format="Gemma",
            kind="assistant",
            layers=layers,
            width=fields.whole("backbone_hidden_size", 1536),
            # The window reaches back from the last committed token, whose entry is not there yet.
            windows=tuple(None if size is None else size + 1 for size in layers.windows),
        )

    def share_read(self, name: str) -> float:
        if name == _OUTPUT and _ORDER in self.reader.specs:
            scored, clusters = self._clusters
            return scored / clusters
        return super().share_read(name)

    # The entries that it reads, and that the verifier does not have.
    def differing(self, verifier: ModelConfig) -> list[str]:
        read, wrong = _layers_read(verifier.style), []
        for number, window in enumerate(x.window for x in self.layers.style.layers):
            found = read.get(window is None)
            entries = None if found is None else verifier.of_layer(found)
            named, theirs = (
                "none" if x is None else f"{x.kv_heads} heads of {x.head_dim}"
                for x in (self.layers.of_layer(number), entries)
            )
            if named != theirs:
                kind = "without a window" if window is None else "with a window"
                wrong.append(f"keys in layers {kind} of {named}, not {theirs}")
        return sorted(set(wrong))

    # Those that are scored, and all of them.
    @property
    def _clusters(self) -> tuple[int, int]:
        names = {"centroid_intermediate_top_k": 32, "num_centroids": 2048}
        scored, count = (self.fields.whole(name, default) for name, default in names.items())
        return scored, count

    def read_config(self, boundaries: tuple[int, ...], draft_vocab: int | None) -> AssistantConfig:
        config = AssistantConfig(
            layers=self.layers, boundaries=boundaries, windows=self.windows, own_output=True
        )
        if not self.fields.flag("use_ordered_embeddings", False):
            return config
        (scored, clusters), vocab = self._clusters, self.layers.vocab_size
        if vocab % clusters or scored > clusters:
            raise UserError(
                f"num_centroids={clusters} must divide the {vocab} tokens, and be at least "
                f"centroid_intermediate_top_k={scored}"
            )
        return dataclasses.replace(config, clusters=clusters, scored_clusters=scored)

    @classmethod
    def stored(cls, config: AssistantConfig, layer: str, path: str) -> list[Renaming]:
        if path.startswith("layers_"):
            return family_of(config.layers).hf_names(f"decoder/{path}")
        hf, transposed = _NAMES[path]
        return [Renaming(hf, path, transposed)]

    def maps(self, config: AssistantConfig) -> dict[str, tuple[int, ...]]:
        return {} if config.clusters is None else {_ORDER: (config.layers.vocab_size,)}

    def read_maps(self, config: AssistantConfig) -> dict[str, np.ndarray]:
        if config.clusters is None:
            return {}
        order = self.whole_numbers(_ORDER)
        if not np.array_equal(np.sort(order), np.arange(order.size)):
            raise UserError(
                f"{self.path}: {_ORDER} must have each of {order.size} tokens once: copy the "
                "checkpoint again"
            )
        return {"clusters": order.astype(np.int32).reshape(config.clusters, -1)}
