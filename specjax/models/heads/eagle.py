"""Recurrent heads: EAGLE-1, EAGLE-3 and MTP.

The entry of a token at position t in the cache is made of this token and of the state at t - 1;
position 0 has none.

Axes: see `head.py`.

Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840), DeepSeek-V3 (2412.19437) for MTP; the code
of `vllm-project/speculators` for the options of norms.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from specjax.errors import UserError
from specjax.models import cache as cache_lib
from specjax.models.attention import (
    LayerMemory,
    Memory,
    Segment,
    block_bias,
    block_updates,
    seen_bias,
)
from specjax.models.cache import places_from
from specjax.models.decoder_only import FULL
from specjax.models.family import HFFields
from specjax.models.heads.head import (
    AS_MODEL,
    EMBEDDING,
    LAYERS,
    NAMES,
    OUTPUT,
    QWEN_LAYERS,
    DraftHead,
    HeadCache,
    HeadConfig,
    HeadFiles,
    HeadLayer,
    HeadNetwork,
    Known,
    Published,
    ReadText,
    encoder_segment,
    pick,
)
from specjax.models.transformer import norm_of
from specjax.types import Params

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of EAGLE-3
OF_EAGLE3 = {
    **NAMES,
    "states_norm": "input_norm",
    "state_norm": "{layer}.hidden_norm",
    "token_norm": "{layer}.input_layernorm",
    "fc_norm_{i}": "fc_norm.{i}",
}
_NAMES = {
    "EAGLE-1": NAMES,
    "EAGLE-3": OF_EAGLE3,
    "MTP": {
        **NAMES,
        "fc": "{layer}.input_proj",
        "token_norm": "{layer}.token_layernorm",
        "state_norm": "{layer}.hidden_layernorm",
        "input_norm": "{layer}.input_layernorm",
        "norm": "{layer}.final_layernorm",
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """A recurrent head of one layer, or what a parallel head has of it.

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


class EagleNetwork(HeadNetwork):
    """A recurrent head. Embeddings are given; `places` are those of the rotation."""

    def setup(self) -> None:
        config, layers = self.config, self.config.layers
        norm = functools.partial(norm_of, layers, layers.style)
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
        count = range(layers.num_layers)
        self.layers = [HeadLayer(layers, self.layout, self.verifier) for _ in count]
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
        return self.layers[0].keys_values(self._read(embedded, states)[0], self.rope(places))

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
        x, keys, values = self.layers[0](y, residual, bias, past, rope, encoded, more)
        normed = self.norm(x) if self.config.norms else x
        return normed, normed if self.config.norm_output else x, keys, values

    def run(self, states: Array, embedded: Array, places: Array, bias: Array, cross: Any) -> Array:
        return self.step(embedded, self.project(states), places, bias, encoded=cross)[0]


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
        places = places_from(jnp.zeros(tokens.shape[0], jnp.int32), tokens.shape[1])
        keys, values = self._apply(params, embedded, before, places - 1, method="entries")
        none = jnp.zeros((tokens.shape[0], count, layers.kv_heads, layers.head_dim), layers.dtype)
        encoded, steps = encoder_segment(text.encoded), jnp.arange(count, dtype=jnp.int32)

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
                given = pick(embedded, anchors + i), state, ends + (i - 1), block_bias(1)
                output, state, key, value = self._apply(
                    params, *given, None, encoded, more, method="step"
                )
                put = lax.dynamic_update_slice_in_dim
                own_keys = put(own_keys, key, i, 1 + self.layout.key_axis)
                own_values = put(own_values, value, i, 1 + self.layout.value_axis)
                return (state, own_keys, own_values), output[:, 0]

            start = pick(before, anchors), *self.layout.arrange(none, none)
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
        self, params: Params, cache: HeadCache, tokens: Array, positions: Array, tree: Any = None
    ) -> tuple[Array, Array, Any]:
        """Reads a token of each row; several, if the states before all of them are known."""
        assert cache.ring is not None
        memory = Memory(cache.entries, positions, self.layout, False, tree)
        length, window = tokens.shape[1], self.config.windows[0]
        places, known = memory.places(length), cache.known[:, None, None]
        before, inside = places - 1, block_bias(length)
        if tree is not None:
            inside = memory.tree_bias(length)
            parent = tree.seen & (tree.depths[:, None] == tree.depths[:, -length:, None] - 1)
            before = memory.positions[:, None] + jnp.argmax(parent, axis=2).astype(jnp.int32)

        def bias(keys: Int32[Array, "_ S"]) -> Array:
            queries, keys = places[:, :, None], keys[:, None]
            seen = (keys > 0) | (keys == queries)  # no state precedes position 0
            if window is not None:
                seen &= keys > jnp.minimum(queries, known) - window
            return seen_bias(seen)

        past = memory.layer(0, memory.bias(length) + bias(memory.slots()))
        states = self._at(cache.ring, before)
        given = (
            self._embed(params, tokens),
            states,
            places - 1,
            inside + bias(places),
            past,
            encoder_segment(cache.encoded),
        )
        normed, states, keys, values = self._apply(params, *given, method="step")
        logits = self._spread(params, self._logits(params, normed))
        return logits, states, (block_updates([keys], [values], normed), states)

    def score_tree(self, *given: Any) -> tuple[Array, Array, Any]:
        return self.score(*given)

    def write(self, cache: HeadCache, updates: Any, positions: Int32[Array, " B"]) -> HeadCache:
        entries, states = updates
        places = places_from(positions, states.shape[1])
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


def fields_of_eagle3(config: EagleConfig) -> dict[str, Any]:
    """The fields of an EAGLE-3's options, in its own files and speculators'."""
    return {
        **{flag: getattr(config, flag) for flag in FLAGS},
        "eagle_aux_hidden_state_layer_ids": list(config.boundaries),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleFiles(HeadFiles):
    """EAGLE's own files, speculators', and an MTP inside the checkpoint of a Qwen."""

    config = EagleConfig
    head = EagleHead
    speculators = (
        Published(
            "EAGLE-3", "eagle3", "Eagle3DraftModel", copies=(EMBEDDING, OUTPUT), families=LAYERS
        ),
        Published("MTP", "mtp", "MTPDraftModel", "mtp_layers.{i}", copies=()),
    )
    marks = ("draft_vocab_size",)
    model_types, array = LAYERS, "fc.weight"  # of an EAGLE-1
    families = MappingProxyType({"MTP": ("llama", *QWEN_LAYERS)})
    verifiers, array_inside = ("qwen3_next", "qwen3_5"), "mtp.fc.weight"
    inside = dataclasses.replace(
        AS_MODEL,
        prefixes={
            "mtp.layers.": "mtp_layers.",
            "mtp.fc.": "mtp_layers.0.input_proj.",
            "mtp.norm.": "mtp_layers.0.final_layernorm.",
            "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
            "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
        },
        others=r"(?!mtp\.).*",
    )

    @classmethod
    def format_in(cls, fields: HFFields, arrays: Collection[str]) -> tuple[str, str]:
        if "mtp_layers.0.input_proj.weight" in arrays:
            return "Qwen", "MTP"
        eagle3 = "midlayer.input_layernorm.weight" in arrays or "norm.weight" in arrays
        return "EAGLE", "EAGLE-3" if eagle3 else "EAGLE-1"

    # There is one layer, and the fields may be the verifier's.
    @classmethod
    def layer_fields(cls, kind: str, fields: HFFields, arrays: Collection[str]) -> HFFields:
        numbers = {found[1] for x in arrays if (found := re.match(r"(?:mtp_)?layers\.(\d+)\.", x))}
        if len(numbers) > 1:
            raise UserError(
                f"a head of kind {kind} has one layer, but these arrays are of {len(numbers)}: "
                "give the directory of such a head"
            )
        types = fields.values.get("layer_types")
        first = types[:1] if isinstance(types, list) else types
        one = {"num_hidden_layers": 1, "layer_types": first}
        if kind == "MTP":
            one |= {"layer_types": [FULL], "sliding_window": None, "use_sliding_window": False}
        return HFFields({**fields.values, **one})

    @property
    def layer(self) -> str:
        if self.kind == "MTP":
            return "mtp_layers.{i}"
        own = any(name.startswith("midlayer.") for name in self.reader.specs)
        return "midlayer" if own else "layers.{i}"

    @property
    def reads_output(self) -> bool:
        return self.kind != "EAGLE-3"

    def read_config(self, boundaries: tuple[int, ...], draft_vocab: int | None) -> EagleConfig:
        common = self.common(boundaries, draft_vocab)
        common["fc_bias"] = "fc.bias" in self.reader.specs
        if self.kind == "EAGLE-3":
            return EagleConfig(**common, **{x: self.fields.flag(x, False) for x in FLAGS})
        normed = self.kind == "MTP"
        return EagleConfig(**common, projects=True, norms=normed, norm_output=normed)

    @classmethod
    def names(cls, config: EagleConfig) -> Mapping[str, str]:
        return _NAMES[config.kind]

    @classmethod
    def to_hf(cls, head: DraftHead, layers: dict[str, Any]) -> dict[str, Any]:
        config, depth = head.config, len(head.verifier.config.style.layers)
        if config.kind == "MTP":
            # These fields are the verifier's.
            layers |= {"num_hidden_layers": depth, "layer_types": [FULL] * depth}
            return {"transformer_layer_config": layers, "num_nextn_predict_layers": 1}
        return {**super().to_hf(head, layers), **fields_of_eagle3(config)}
