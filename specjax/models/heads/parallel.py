"""Parallel heads: P-EAGLE, an EAGLE-3 of several layers that drafts in one pass.

A draft is a block: the last committed token with the verifier's state before it, then masks, each a
token and a state that are learnt. As layers read what earlier layers make of a token, committed
tokens take a pass, too.

Axes: see `head.py`; also N tokens of a block.

Sources: P-EAGLE (arXiv 2602.01469); the code of `vllm-project/speculators` and `vllm`.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Bool, Float, Int32

from specjax.models.attention import LayerMemory, Segment, seen_bias
from specjax.models.cache import places_from
from specjax.models.family import HFFields
from specjax.models.heads.block import BlockConfig, BlockHead, BlockOutputs
from specjax.models.heads.eagle import (
    FLAGS,
    OF_EAGLE3,
    EagleConfig,
    EagleNetwork,
    fields_of_eagle3,
)
from specjax.models.heads.head import (
    EMBEDDING,
    LAYERS,
    OUTPUT,
    DraftHead,
    Encoded,
    HeadCache,
    HeadFiles,
    Known,
    Published,
    ReadText,
    encoder_segment,
    pick,
)
from specjax.models.transformer import norm_of
from specjax.types import Params

_MASK = "mask_hidden"
_DRAFTS = 8  # of files that do not tell


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(EagleConfig, BlockConfig):
    """A parallel head: the options of an EAGLE-3 and the block, of which every slot predicts."""

    mask_token: int
    from_anchor: bool = True

    @property
    def kind(self) -> str:
        return "P-EAGLE"


class ParallelNetwork(EagleNetwork):
    """A parallel head. Embeddings are given; `places` are those of the rotation.

    Attributes:
      width: of the verifier's states.
    """

    width: int = 0

    def setup(self) -> None:
        super().setup()
        config, layers = self.config, self.config.layers
        norm = functools.partial(norm_of, layers, layers.style)
        self.input_norms = [norm(f"input_norm_{i}") for i in range(1, layers.num_layers)]
        shape = 1, 1, len(config.boundaries) * self.width
        init: Any = nn.initializers.normal(1.0)
        axes: Any = (None, None, "embed")
        self.mask_state = param_with_axes("mask_state", init, shape, layers.param_dtype, axes=axes)

    def pass_(
        self,
        embedded: Float[Array, "B T E"],
        states: Float[Array, "B T E"],
        places: Int32[Array, "B T"],
        biases: Sequence[Array],
        pasts: Sequence[LayerMemory | None],
        encoded: Segment | None = None,
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        """The outputs, and the keys and values of each layer."""
        y, x = self._read(embedded, states)
        pairs = []
        for i, layer in enumerate(self.layers):
            if i > 0:
                y = self.input_norms[i - 1](x)
            rope = self.rope(places, i)
            x, keys, values = layer(y, x, biases[i], pasts[i], rope, encoded)
            pairs.append((keys, values))
        return self.norm(x), pairs

    def block(
        self,
        embedded: Float[Array, "B T E"],
        state: Float[Array, "B 1 E"],
        *given: Any,
    ) -> Float[Array, "B T E"]:
        """The outputs of a block, whose first token follows `state`."""
        rows, length, _ = embedded.shape
        mask = jnp.broadcast_to(self.project(self.mask_state), (rows, length - 1, state.shape[-1]))
        states = jnp.concatenate([state, mask.astype(state.dtype)], axis=1)
        return self.pass_(embedded, states, *given)[0]

    def run(self, states: Array, embedded: Array, places: Array, bias: Array, cross: Any) -> Array:
        count = len(self.layers)
        none: list[LayerMemory | None] = [None] * count
        return self.pass_(embedded, self.project(states), places, [bias] * count, none, cross)[0]


@dataclasses.dataclass(frozen=True)
class ParallelHead(BlockHead):
    """A parallel head as a language model: `block` reads a block, `extend` its drafted tokens."""

    config: ParallelConfig

    @property
    def network(self) -> Any:
        width = self.verifier.config.embed_dim
        return ParallelNetwork(self.config, self.layout, self._encoding_verifier, width)

    def empty(self, rows: int, max_length: int, path: int, nodes: int) -> HeadCache:
        cache, layers = super().empty(rows, max_length, path, nodes), self.config.layers
        return cache._replace(ring=jnp.zeros((rows, 1, layers.embed_dim), layers.dtype))

    # What `pass_` takes after the states, of tokens at these slots of the cache. They see each
    # other and the layers' `entries`, `length` of them, from slot 1 to the first of the tokens.
    def _seeing(
        self,
        slots: Int32[Array, "B T"],
        kept: Bool[Array, "B T"],
        length: int,
        entries: Sequence[tuple[Array, Array]] | None,
        encoded: Encoded | None,
    ) -> tuple[Any, ...]:
        queries, last = slots[:, :, None], jnp.max(slots, axis=1, keepdims=True)
        first = jnp.min(jnp.where(kept, slots, last), axis=1)[:, None, None]
        numbers = jnp.arange(length, dtype=jnp.int32)[None, None]
        own = kept[:, None] & (slots[:, None] <= queries)
        biases, pasts = [], []
        for i, window in enumerate(self.config.windows):
            seen, inside = (numbers > 0) & (numbers < first), own
            if window is not None:
                seen = seen & (numbers > queries - window)
                inside = own & (slots[:, None] > queries - window)
            biases.append(seen_bias(inside))
            pasts.append(None if entries is None else LayerMemory(*entries[i], seen_bias(seen)))
        return slots - 1, biases, pasts, encoder_segment(encoded)

    def _entries(self, cache: HeadCache) -> tuple[int, list[tuple[Array, Array]]]:
        """The number of a layer's entries, and the layers' keys and values."""
        entries = cache.entries
        return entries.max_length(self.layout), [*zip(entries.keys, entries.values, strict=True)]

    def _with(self, params: Params, cache: HeadCache, known: Known) -> HeadCache:
        assert cache.ring is not None
        states = self._apply(params, known.states, method="project")
        slots = known.places + 1
        given = self._seeing(slots, known.kept, *self._entries(cache), cache.encoded)
        embedded = self._embed(params, known.tokens)
        _, pairs = self._apply(params, embedded, states, *given, method="pass_")
        newest = known.kept & ~jnp.pad(known.kept[:, 1:], ((0, 0), (0, 1)))
        last = jnp.sum(jnp.where(newest[..., None], states, 0.0), axis=1, keepdims=True)
        some = jnp.any(newest, axis=1)[:, None, None]
        return cache._replace(
            entries=self._written(cache, pairs, slots[:, 0], known.kept),
            ring=jnp.where(some, last.astype(cache.ring.dtype), cache.ring),
        )

    def block(
        self,
        params: Params,
        cache: HeadCache,
        tokens: Int32[Array, " B"],
        positions: Int32[Array, " B"],
        count: int,
    ) -> BlockOutputs:
        assert cache.ring is not None
        given = tokens, cache.ring, positions, count, *self._entries(cache), cache.encoded
        states = self._after(params, *given)
        none = jnp.zeros((tokens.size, count + 1, 0), states.dtype)
        return BlockOutputs(positions, states, self._logits(params, states), none)

    def _after(
        self,
        params: Params,
        tokens: Int32[Array, " B"],
        state: Float[Array, "B 1 E"],
        starts: Int32[Array, " B"],
        count: int,
        length: int,
        entries: Sequence[tuple[Array, Array]],
        encoded: Encoded | None,
    ) -> Float[Array, "B _ E"]:
        """The states of a block's first `count` slots; see `_seeing`."""
        masks = jnp.full((tokens.size, count - 1), self.config.mask_token, jnp.int32)
        embedded = self._embed(params, jnp.concatenate([tokens[:, None], masks], axis=1))
        slots = places_from(starts, count)
        given = self._seeing(slots, jnp.ones_like(slots, bool), length, entries, encoded)
        return self._apply(params, embedded, state, *given, method="block")

    def _states_along(
        self, params: Params, text: ReadText, anchors: Int32[Array, "B A"], count: int
    ) -> tuple[Float[Array, "_ B A E"], Array]:
        rows, length = text.tokens.shape
        states = self._apply(params, text.states, method="project")
        # The state before each token, of which the first has none.
        before = jnp.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0)))
        slots = places_from(jnp.zeros(rows, jnp.int32), length)
        given = self._seeing(slots, slots > 0, 0, None, text.encoded)
        embedded = self._embed(params, text.tokens)
        _, pairs = self._apply(params, embedded, before, *given, method="pass_")

        def block(anchors: Int32[Array, " B"]) -> Float[Array, "B _ E"]:
            tokens = pick(text.tokens, anchors)[:, 0]
            given = tokens, pick(before, anchors), anchors, count, length, pairs, text.encoded
            return self._after(params, *given)

        blocks = jax.vmap(block, in_axes=1, out_axes=1)(anchors)
        return jnp.moveaxis(blocks, 2, 0), jnp.zeros(())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelFiles(HeadFiles):
    """The files of speculators, and those that vLLM reads."""

    config = ParallelConfig
    head = ParallelHead
    speculators = (
        Published(
            "P-EAGLE", "peagle", "PEagleDraftModel", copies=(EMBEDDING, OUTPUT), families=LAYERS
        ),
    )
    model_types, array = LAYERS, _MASK

    @classmethod
    def format_in(cls, fields: HFFields, arrays: Collection[str]) -> tuple[str, str]:
        return "vLLM", "P-EAGLE"

    def read_config(self, boundaries: tuple[int, ...], draft_vocab: int | None) -> ParallelConfig:
        fields, names = self.fields, ("mask_token_id", "pard_token", "ptd_token_id")
        name = next((x for x in names if fields.values.get(x) is not None), names[0])
        methods: Any = fields.objects("speculators_config").get("proposal_methods") or ({},)
        return ParallelConfig(
            **self.common(boundaries, draft_vocab),
            **{x: fields.flag(x, False) for x in FLAGS},
            block_size=HFFields(methods[0]).whole("speculative_tokens", _DRAFTS),
            mask_token=fields.whole(name, least=0),
        )

    @classmethod
    def names(cls, config: Any) -> Mapping[str, str]:
        own = {"mask_state": _MASK, "input_norm_{i}": "{layer}.input_layernorm"}
        return {**OF_EAGLE3, **own}

    @classmethod
    def to_hf(cls, head: DraftHead, layers: dict[str, Any]) -> dict[str, Any]:
        values = {**super().to_hf(head, layers), **fields_of_eagle3(head.config)}
        return {**values, "mask_token_id": head.config.mask_token}
