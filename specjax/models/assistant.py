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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Float32, Int32

from specjax.compilation import product_precision
from specjax.models.attention import Segment, block_bias
from specjax.models.cache import CacheLayout, RaggedCache
from specjax.models.config import Style
from specjax.models.heads import EagleHead, HeadCache, HeadConfig, Known, draft_head, seen_bias
from specjax.models.layers import Dense, Embed, LogitsDense, RMSNorm
from specjax.models.model import Model
from specjax.models.position_encoding import rope_angles
from specjax.models.transformer import Layer
from specjax.types import Params


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


def layers_read(style: Style) -> dict[bool, int]:
    """The verifier's layers whose entries are read, by whether they are without a window."""
    return {style.windows[i] is None: i for i in style.cached}


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
        for layer, ropes, (keys, values, bias, _) in zip(
            self.layers, style.ropes, memory, strict=True
        ):
            rope = rope_angles(places, np.asarray(ropes, np.float32), style.rope_scale)
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
    """An assistant as a language model, whose tokens must follow the committed ones.

    Its parameters also have the verifier's memory while it drafts; see `with_memory`.
    """

    reads_trees = False

    @property
    def network(self) -> AssistantNetwork:
        return AssistantNetwork(self.config, self.verifier.layout, self.verifier.config.embed_dim)

    # For each layer, the place in the verifier's cache of the entries that it reads.
    @property
    def _sources(self) -> list[int]:
        theirs = self.verifier.config.style
        read = layers_read(theirs)
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

    def with_memory(self, params: Params, memory: RaggedCache) -> Params:
        """The parameters with the entries that its layers read."""
        pairs = [(memory.keys[place], memory.values[place]) for place in self._sources]
        return {**params, "memory": pairs}

    def _with(self, params: Params, cache: HeadCache, known: Known) -> HeadCache:
        newest = known.kept & ~jnp.pad(known.kept[:, 1:], ((0, 0), (0, 1)))
        return cache._replace(ring=self._put(cache, known.states, known.places, newest))

    def score(
        self, params: Params, cache: HeadCache, tokens: Array, positions: Array
    ) -> tuple[Array, Array, Any]:
        """Reads a token of each row, the last committed one or a drafted one after it."""
        assert tokens.shape[1] == 1 and cache.ring is not None
        last, layout, memory = cache.known[:, None], self.verifier.layout, []
        for (keys, values), window in zip(params["memory"], self.config.windows, strict=True):
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


@draft_head.register
def _(config: AssistantConfig, verifier: Model) -> AssistantHead:
    return AssistantHead(config, verifier)
