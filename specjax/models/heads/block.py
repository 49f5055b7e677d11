"""Block heads: DFlash, DFlash 2, DSpark and Domino.

The entry of a position in the cache is made of the verifier's state there alone.

Axes: see `head.py`; also N tokens of a block, M of them that predict, r rank, H memory.

Sources: DFlash (arXiv 2602.06036); the code of `vllm-project/speculators` for DSpark and DFlash 2,
and that of `sgl-project/SpecForge` for Domino (arXiv 2605.29707).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.partitioning import param_with_axes
from jaxtyping import Array, Float, Float32, Int32

from specjax.errors import UserError
from specjax.models.attention import LayerMemory, Memory, Segment, block_bias, seen_bias
from specjax.models.cache import places_from
from specjax.models.family import HFFields
from specjax.models.heads.convolved import ConvolvedLayer
from specjax.models.heads.head import (
    EMBEDDING,
    NAMES,
    Drafted,
    DraftHead,
    Encoded,
    HeadCache,
    HeadConfig,
    HeadFiles,
    HeadLayer,
    HeadNetwork,
    Known,
    Published,
    ReadText,
    Reranked,
    encoder_segment,
    pick,
)
from specjax.models.layers import Embed, LogitsDense
from specjax.models.transformer import norm_of
from specjax.types import Params

OF_DSPARK, _DOMINO, _SELECTOR = ("vanilla", "gated", "rnn"), "domino", "selector"
MARKOV = (*OF_DSPARK, _DOMINO, _SELECTOR)
_MASK, _MARKOV_IN = "mask_embedding", "markov_head.markov_w1"
_PREDECESSORS = "candidate_selector.predecessor_codebook"
_NAMES = {
    **NAMES,
    "mask": _MASK,
    "input_norm_{i}": "{layer}.input_layernorm",
    "markov_in": _MARKOV_IN,
    "markov_out": "markov_head.markov_w2",
    "confidence": "confidence_head.proj",
}
_OF_DOMINO = {
    **_NAMES,
    "gru_in/kernel": "prefix_gru.weight_ih_l0",
    "gru_memory/kernel": "prefix_gru.weight_hh_l0",
    "markov_gate": "embed_proj.0",
    "markov_out": "embed_proj.2",
}
_OF_DFLASH2 = {
    **_NAMES,
    "markov_in/embedding": _PREDECESSORS,
    "markov_out/kernel": "candidate_selector.successor_codebook",
    "markov_gate": "candidate_selector.hidden_projection",
    **{
        f"layers_{{i}}/{name}": f"{{layer}}.{name.replace('/', '.')}"
        for conv in ("attention_conv", "mlp_conv")
        for name in (f"{conv}/kernel_projection", f"{conv}/base_kernel")
    },
}


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
      markov: one of `MARKOV`: a correction of the logits by the token before, or by all tokens of
        the block before ("rnn" and "domino"); None for none. DFlash 2's "selector" drafts none but
        the tokens with the largest logits before it.
      markov_rank: r.
      markov_memory: H of "domino"; None: r.
      markov_start: the first draft that is corrected, from 0.
      candidates: the number of tokens of which "selector" drafts one.
      conv_taps: K of DFlash 2's convolutions (see `convolved.py`); 0: there are none.
      conv_group: the lanes that share the change of a kernel.
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
    markov_memory: int | None = None
    markov_start: int = 0
    candidates: int = 0
    conv_taps: int = 0
    conv_group: int = 1
    confidence: bool = False
    confidence_reads_markov: bool = False

    @property
    def kind(self) -> str:
        if self.markov == _DOMINO:
            return "Domino"
        if self.markov == _SELECTOR:
            return "DFlash 2"
        return "DSpark" if self.markov or self.confidence else "DFlash"

    @property
    def is_ours(self) -> bool:
        # speculators' DFlash 2 drafts all tokens and has no confidence.
        more = self.draft_vocab is not None or self.confidence
        of_ours = self.markov == _DOMINO or (self.markov == _SELECTOR and more)
        return super().is_ours or self.mask_token is None or of_ours

    @property
    def memory(self) -> int:
        """H."""
        return self.markov_memory or self.markov_rank

    @property
    def most_drafts(self) -> int:  # type: ignore[override]
        """M, the longest draft."""
        return self.block_size - (0 if self.from_anchor else 1)


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
    memory: Float[Array, "B M+1 H"]


class BlockNetwork(HeadNetwork):
    """A block head. Embeddings are given; `places` are those of the rotation."""

    def setup(self) -> None:
        config, layers = self.config, self.config.layers
        norm = functools.partial(norm_of, layers, layers.style)
        self.fc = self._dense(layers.embed_dim, "fc")
        self.state_norm, self.norm = norm("state_norm"), norm("norm")
        count = range(layers.num_layers)
        self.input_norms = [norm(f"input_norm_{i}") for i in count]
        kind: Any = HeadLayer
        if config.conv_taps:
            kind = functools.partial(ConvolvedLayer, taps=config.conv_taps, group=config.conv_group)
        self.layers = [kind(layers, self.layout, self.verifier) for _ in count]
        self._set_up_output()
        if config.mask_token is None:
            init, size = nn.initializers.normal(1.0), (layers.embed_dim,)
            self.mask = param_with_axes("mask", init, size, layers.param_dtype, axes=("embed",))
        if config.markov is not None:
            self.markov_out = LogitsDense(config.rows, layers.param_dtype)
        if config.markov in (*OF_DSPARK, _SELECTOR):
            sizes = (layers.vocab_size, config.markov_rank, layers.dtype, layers.param_dtype)
            self.markov_in = Embed(*sizes, 0.02)
        if config.markov == _DOMINO:
            self.gru_in = self._dense(3 * config.memory, "gru_in")
            self.gru_memory = self._dense(3 * config.memory, "gru_memory")
        if config.markov not in (None, "vanilla"):
            width, bias = config.markov_rank, config.markov in OF_DSPARK
            width *= 3 if config.markov == "rnn" else 1
            self.markov_gate = self._dense(width, "markov_gate", bias=bias)
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

    def correct(
        self,
        states: Float[Array, "B 1 E"],
        tokens: Int32[Array, "B 1"] | Float[Array, "B 1 E"],
        memory: Float[Array, "B H"],
    ) -> tuple[Float32[Array, "B 1 W"], Float32[Array, "B 1"] | None, Array]:
        """What the tokens before add to the logits, the log-odds of acceptance, and the memory.

        Domino reads the verifier's embedding of the tokens.
        """
        kind, kept = self.config.markov, memory[:, None]
        before = tokens if kind == _DOMINO else self.markov_in(tokens)
        read = before
        if kind == "gated":
            gate = self.markov_gate(jnp.concatenate([states, before], axis=-1))
            read = jax.nn.sigmoid(gate) * before
        if kind == "rnn":
            parts = self.markov_gate(jnp.concatenate([kept, before, states], axis=-1))
            gate, candidate, out = jnp.split(parts, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            kept = gate * kept + (1.0 - gate) * jnp.tanh(candidate)
            read = jnp.tanh(out)
        if kind == _DOMINO:
            given = jnp.split(self.gru_in(before), 3, axis=-1)
            known = jnp.split(self.gru_memory(kept), 3, axis=-1)
            reset, keep = (jax.nn.sigmoid(x + y) for x, y in zip(given[:2], known[:2], strict=True))
            kept = keep * kept + (1.0 - keep) * jnp.tanh(given[2] + reset * known[2])
            read = jax.nn.silu(self.markov_gate(jnp.concatenate([states, kept], axis=-1)))
        if kind == _SELECTOR:
            read = before * self.markov_gate(states)
        return self.markov_out(read), self.log_odds(states, before), kept[:, 0]

    def log_odds(self, states: Array, before: Array | None) -> Float32[Array, "B T"] | None:
        """The log-odds that the slots' tokens are accepted; None without a confidence head."""
        if not self.config.confidence:
            return None
        if self.config.confidence_reads_markov and before is not None:
            states = jnp.concatenate([states, before], axis=-1)
        return self.confidence(states)[..., 0].astype(jnp.float32)

    def run(self, states: Array, embedded: Array, places: Array, bias: Array, cross: Any) -> Array:
        self.entries(states, places)
        count = len(self.layers)
        y = self.block(embedded, places, [bias] * count, [None] * count, cross)
        if self.config.markov is not None:
            none = jnp.zeros((y.shape[0], self.config.memory), y.dtype)
            tokens = embedded if self.config.markov == _DOMINO else jnp.zeros((1, 1), jnp.int32)
            self.correct(y, tokens, none)
        elif self.config.confidence:
            self.log_odds(y, None)
        return y


@dataclasses.dataclass(frozen=True)
class BlockHead(DraftHead):
    """A block head as a language model: `block` reads a block, `extend` its drafted tokens."""

    config: BlockConfig

    @property
    def gives_odds(self) -> bool:  # type: ignore[override]  # it may have a confidence head
        return self.config.confidence

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
        logits = self._candidates(self._logits(params, states))
        none = jnp.zeros((rows, count + 1, self.config.memory), states.dtype)
        return BlockOutputs(positions, states, logits, none)

    def _states_along(
        self, params: Params, text: ReadText, anchors: Int32[Array, "B A"], count: int
    ) -> tuple[Float[Array, "_ B A E"], Array]:
        rows, length = text.tokens.shape
        places = places_from(jnp.zeros(rows, jnp.int32), length)
        pairs = self._apply(params, text.states, places, method="entries")

        def block(anchors: Int32[Array, " B"]) -> Float[Array, "B _ E"]:
            def layer(i: int, bias: Array) -> LayerMemory:
                keys, values = pairs[i]
                return LayerMemory(keys, values, bias)

            tokens = pick(text.tokens, anchors)[:, 0]
            return self._block(params, tokens, anchors, count, length, layer, text.encoded)

        states = jax.vmap(block, in_axes=1, out_axes=1)(anchors)
        memory = jnp.zeros((anchors.size, self.config.memory), states.dtype)
        return jnp.moveaxis(states, 2, 0), memory

    def _said(
        self,
        params: Params,
        draft: Int32[Array, ""],
        states: Float[Array, "B A E"],
        tokens: Int32[Array, "B A"],
        memory: Array,
    ) -> tuple[Drafted, Array]:
        # All places in one axis, each with its memory.
        each = states.reshape(tokens.size, 1, -1)
        base = self._logits(params, each)
        given = draft, each, base, tokens.reshape(-1, 1), memory
        logits, odds, memory = self._correct(params, *given)
        odds = None if odds is None else odds.reshape(tokens.shape)
        base, logits = (x.reshape(*tokens.shape, -1) for x in (base, logits))
        if not self.config.candidates:
            return Drafted(logits, odds), memory
        drafted = jnp.where(jnp.isfinite(self._candidates(base)), logits, -jnp.inf)
        return Drafted(drafted, odds, Reranked(base, logits)), memory

    def _candidates(self, logits: Float32[Array, "*B W"]) -> Float32[Array, "*B W"]:
        """The logits of the tokens that may be drafted; -inf for the others."""
        if not self.config.candidates:
            return logits
        # Not the last of them: XLA on CPUs sorts the vocabulary where only a part is read.
        best = jax.lax.top_k(logits, self.config.candidates)[0]
        least = jnp.min(best, axis=-1, keepdims=True)
        return jnp.where(logits >= least, logits, -jnp.inf)

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
                seen = seen & (slots > places_from(starts, size)[:, :, None] - window)
            elif window is not None:
                seen &= slots > last - window
            pasts.append(layer(i, seen_bias(seen)))
            causal = window is not None and config.causal_windows
            whole = jnp.zeros((1, 1, 1, size, size), jnp.float32)
            biases.append(block_bias(size) if causal else whole)
        given = embedded, places_from(starts, size), biases, pasts, encoder_segment(encoded)
        return self._apply(params, *given, method="block")[:, first : first + count]

    def _correct(
        self,
        params: Params,
        draft: Array,
        states: Array,
        logits: Array,
        tokens: Array,
        memory: Array,
    ) -> tuple[Array, Array | None, Array]:
        """Logits after the Markov correction by the tokens before, log-odds, and the memory."""
        if self.config.markov is not None:
            read = self._embed(params, tokens) if self.config.markov == _DOMINO else tokens
            more, odds, memory = self._apply(params, states, read, memory, method="correct")
            corrected = draft.reshape(-1, 1, 1) >= self.config.markov_start
            more = jnp.where(corrected, more[..., : logits.shape[-1]], 0.0)
            return logits + more, odds, memory
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
            pick(outputs.states, slots),
            pick(outputs.logits, slots),
            pick(outputs.memory, slots)[:, 0],
        )
        logits, odds, memory = self._correct(params, slots, states, logits, tokens, memory)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFiles(HeadFiles):
    """The files of z-lab, DeepSpec, SpecForge and speculators."""

    config = BlockConfig
    head = BlockHead
    speculators = (
        Published("DFlash", "dflash", "DFlashDraftModel"),
        Published("DSpark", "dspark", "DSparkDraftModel"),
        Published("Domino", "domino", "DominoDraftModel"),
        Published("DFlash 2", "dflash2", "DFlash2DraftModel"),
    )
    marks = ("dflash_config", "target_layer_ids")
    tables = (EMBEDDING, f"{_MARKOV_IN}.weight", _PREDECESSORS)

    @classmethod
    def format_in(cls, fields: HFFields, arrays: Collection[str]) -> tuple[str, str]:
        if fields.values.get("dflash_config") is None:
            return "DeepSpec", "DSpark"
        inner = _inner(fields)
        if inner.values.get("projector_type") == _DOMINO:
            return "DFlash", "Domino"
        if inner.values.get("selector_rank") is not None:
            return "DFlash", "DFlash 2"
        own = inner.whole("markov_rank", 0, least=0) or inner.flag("enable_confidence_head")
        return "DFlash", "DSpark" if own else "DFlash"

    def usual_boundaries(self, depth: int) -> tuple[int, ...]:
        count = self.layers.num_layers
        if count == 1:
            return (depth // 2 + 1,)
        return tuple(round(1 + i * (depth - 4) / (count - 1)) + 1 for i in range(count))

    def read_config(self, boundaries: tuple[int, ...], draft_vocab: int | None) -> BlockConfig:
        common, vocab = self.common(boundaries, draft_vocab), self.layers.vocab_size
        inner = _inner(self.fields)
        domino, selects = self.kind == "Domino", self.kind == "DFlash 2"
        judges = inner.flag("enable_confidence_head", False)
        rank = inner.whole("markov_rank", 0, least=0)
        own_slot = self.kind == "DSpark" or rank > 0 or judges
        from_anchor = inner.flag("sample_from_anchor", own_slot)
        if domino:
            rank, from_anchor = inner.whole("emb_dim"), inner.flag("shift_label", False)
        if selects:
            rank = inner.whole("selector_rank")
        size = inner.whole("block_size", least=1 if from_anchor else 2)
        if rank:
            inner.refuse("markov_head_type", OF_DSPARK, OF_DSPARK[0])
        own = inner.values.get("markov_head_type") or OF_DSPARK[0]
        markov = _DOMINO if domino else _SELECTOR if selects else own
        mask = None if _MASK in self.reader.specs else inner.whole("mask_token_id", least=0)
        if mask is not None and mask >= vocab:
            raise UserError(f"mask_token_id={mask} must be below {vocab}, the number of tokens")
        moves = self.format == "DFlash" and any(self.windows)
        shortest = min(filter(None, self.windows), default=size)
        if moves and shortest < size:
            raise UserError(
                f"sliding_window={shortest} must be at least block_size={size}: what a block sees "
                "of itself is not defined below"
            )
        return BlockConfig(
            **common,
            block_size=size,
            mask_token=mask,
            from_anchor=from_anchor,
            causal_windows=not inner.flag("sliding_window_non_causal", selects),
            windows_move=moves,
            markov=markov if rank else None,
            markov_rank=rank,
            markov_memory=inner.whole("gru_hidden_dim") if domino else None,
            markov_start=inner.whole("pure_draft_prefix_len", 0, least=0) if domino else 0,
            candidates=inner.whole("selector_top_k") if selects else 0,
            conv_taps=inner.whole("conv_kernel_size") if selects else 0,
            conv_group=inner.whole("conv_group_size") if selects else 1,
            confidence=judges,
            confidence_reads_markov=inner.flag("confidence_head_with_markov", False) and rank > 0,
        )

    @classmethod
    def names(cls, config: BlockConfig) -> Mapping[str, str]:
        if config.markov == _DOMINO:
            return _OF_DOMINO
        if config.markov == _SELECTOR:
            return _OF_DFLASH2
        gate = "joint" if config.markov == "rnn" else "gate"
        return {**_NAMES, "markov_gate": f"markov_head.{gate}_proj"}

    @classmethod
    def to_hf(cls, head: DraftHead, layers: dict[str, Any]) -> dict[str, Any]:
        config, values = head.config, super().to_hf(head, layers)
        values |= {
            "aux_hidden_state_layer_ids": list(config.boundaries),
            "block_size": config.block_size,
            "mask_token_id": config.mask_token,
            "sample_from_anchor": config.from_anchor,
            "sliding_window_non_causal": not config.causal_windows,
        }
        if config.kind == "DFlash":
            return values
        values["enable_confidence_head"] = config.confidence
        if config.kind == "DFlash 2":
            return values | {
                "selector_rank": config.markov_rank,
                "selector_top_k": config.candidates,
                "conv_kernel_size": config.conv_taps,
                "conv_group_size": config.conv_group,
            }
        if config.kind == "Domino":
            return values | {
                "shift_label": config.from_anchor,
                "emb_dim": config.markov_rank,
                "gru_hidden_dim": config.memory,
                "pure_draft_prefix_len": config.markov_start,
            }
        return values | {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov or OF_DSPARK[0],
            "confidence_head_with_markov": config.confidence_reads_markov,
        }


def _inner(fields: HFFields) -> HFFields:
    """With those that SpecForge and z-lab keep in an inner object."""
    return dataclasses.replace(fields, values={**fields.values, **fields.objects("dflash_config")})
