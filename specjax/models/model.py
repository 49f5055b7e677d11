"""Networks as language models: decoder-only ones, and encoder-decoders.

Axes: B rows, P prompt length, F prefix length, T tokens of a block, N nodes of a tree, G longest
block, S cache length, E model width, V vocabulary.
"""

import abc
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import unfreeze
from flax.linen.partitioning import get_axis_names
from flax.traverse_util import flatten_dict
from jax import lax
from jaxtyping import Array, Bool, Float32, Integer

from specjax import cpu_kernels
from specjax.compilation import jit
from specjax.models import cache as cache_lib
from specjax.models.attention import Memory
from specjax.models.beginnings import fill, next_beginning, note
from specjax.models.cache import CacheEntries, CacheLayout, RaggedCache, layout_for
from specjax.models.config import DecoderOnlyConfig, ModelConfig
from specjax.models.layers import TRANSPOSED
from specjax.models.position_encoding import check_length
from specjax.models.recurrent import empty_memory
from specjax.models.transformer import Network
from specjax.models.weights import StoredWeight, is_stack, is_stored
from specjax.types import (
    Axes,
    Extended,
    LanguageModel,
    Params,
    Prefilled,
    PrefilledStates,
    Prompts,
    TreeShape,
)

# The tokens of a prompt that one of several passes reads: one program serves prompts of any length.
_PASS = 64


@dataclasses.dataclass(frozen=True)
class Model(LanguageModel, abc.ABC):
    """A network as a `specjax.types.LanguageModel`; all arrays are in `params` and the cache.

    Attributes:
      config: its sizes and options.
      split: whether a mesh may split its parameters and its cache; if not, a mesh splits only the
        rows of the cache, and each device has all parameters.
      layout: of the keys and values in its cache; see `for_devices`.
      tokens: V, the first tokens, which get logits; None: all rows of the embedding. Embeddings may
        be padded with rows that are no tokens.
      boundaries: what it returns as hidden states; see `reading`.
      rollback: the most tokens that a row may go back by, if it has recurrent layers; see
        `specjax.models.recurrent`. Their time and memory grow with it.
      in_passes: whether `prefill` reads long prompts in several passes, as many as the longest
        needs. On a CPU a pass takes the time of its tokens, with those of the padding.
    """

    config: ModelConfig
    split: bool = True
    layout: CacheLayout = CacheLayout()  # noqa: RUF009  immutable
    tokens: int | None = None
    boundaries: tuple[int, ...] = ()
    rollback: int = 32
    in_passes: bool = False

    @property
    def reads_trees(self) -> bool:  # type: ignore[override]  # a state has no branches
        return not self.config.style.deltas

    @property
    def most_rollback(self) -> int | None:
        return self.rollback if self.config.style.deltas else None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size if self.tokens is None else self.tokens

    @property
    def network(self) -> Network:
        return Network(self.config, self.layout, self.tokens, self.boundaries)

    @property
    def continues_beginnings(self) -> bool:
        """Whether `prefill` continues a common beginning; see `specjax.models.beginnings`."""
        return False

    def reading(self, boundaries: tuple[int, ...]) -> "Model":
        assert max(boundaries) <= len(self.config.style.layers) + 1
        return dataclasses.replace(self, boundaries=boundaries)

    @abc.abstractmethod
    def _init_variables(self, key: Array) -> Any: ...

    def for_devices(self, platform: str, ways: int | None = None) -> "Model":
        """The same model with the fastest cache layout for these devices.

        Args:
          platform: as `jax.Device.platform` names it: "cpu", "gpu" or "tpu".
          ways: the number of a mesh's devices that split it; None: there is a single device.
        """
        config = self.config
        if ways is not None and not self.split:
            ways = 1
        layers = [config.of_layer(i) for i in config.style.cached]
        kv_heads = math.gcd(*(layer.kv_heads for layer in layers))
        sizes = (config.num_heads, kv_heads, min(layer.head_dim for layer in layers))
        layout = layout_for(platform, *sizes, ways)
        # A pass over a cache runs all layers; a whole prompt needs none after the last cached one.
        whole = (
            platform != "cpu"
            or ways is not None
            or config.style.cached[-1] + 1 < len(config.style.layers)
        )
        return dataclasses.replace(self, layout=layout, in_passes=not whole)

    def init(self, key: Array) -> Params:
        """Random parameters: a nested dict of arrays of `config.param_dtype`."""
        return _init(self, key)

    def abstract_params(self) -> Params:
        """The parameters as `jax.ShapeDtypeStruct`s; it allocates nothing."""
        return _abstract_variables(self)["params"]

    def param_axes(self, params: Params) -> Axes:
        names = unfreeze(get_axis_names(_abstract_variables(self)["params_axes"]))
        names = jax.tree.map(
            lambda x, axes: x.axes(axes) if isinstance(x, StoredWeight) else axes,
            params,
            names,
            is_leaf=is_stored,
        )
        return self._axes(names)

    def cache_axes(self, cache: RaggedCache) -> Axes:
        return self._axes(cache_lib.logical_axes(cache, self.layout))

    def _axes(self, names: Any) -> Axes:
        def renamed(axes: Any) -> tuple[str | None, ...]:
            return tuple(name if self.split or name == "batch" else None for name in axes)

        return jax.tree.map(renamed, names, is_leaf=_is_names)

    def describe(self) -> str:
        return str(self.config) + ("" if self.tokens is None else f", {self.tokens} tokens")

    def axis_units(self) -> dict[str, int]:
        # Heads. Common to all layers, and to the heads of the encoder and the decoder.
        layers = (self.config.of_layer(i) for i in range(len(self.config.style.layers)))
        head = math.lcm(self.config.encoder_config.head_dim, *(x.head_dim for x in layers))
        units = {"joined_kv": head, "joined_grouped_kv": head}
        for size in self.config.style.deltas:
            # A key's head, and the heads of values that share it.
            groups = size.value_heads // size.key_heads
            units |= {
                "joined_delta_keys": size.key_dim,
                "joined_delta_values": groups * size.value_dim,
                "joined_delta_heads": groups,
            }
        return units

    def num_params(self) -> int:
        """The number of parameters; it allocates nothing."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params()))

    def params_read(self, tokens: int) -> dict[str, float]:
        """How many numbers of each parameter a decoding pass of so many tokens reads, by path.

        Not the encoder, the kernels that only read its output, and an embedding of which a pass
        takes rows. Of experts it is what `Routing.expected` says.
        """
        once = r"encoder/|.*/encoder_decoder_attention/(key|value)/|layer_inputs/embedding"
        if not self.config.tie_embeddings:
            once += "|token_embedder/"
        layers = self.config.style.layers
        found: dict[str, float] = {}
        for path, leaf in flatten_dict(self.abstract_params(), sep="/").items():
            if re.match(once, path):
                continue
            found[path] = leaf.size
            if is_stack(path, leaf.shape):
                routing = layers[int(path.split("/layers_")[1].split("/")[0])].routing
                assert routing is not None
                found[path] *= routing.expected(tokens) / routing.experts
        return found

    def prepare(self, params: Params) -> Params:
        """Adds arrays that make decoding faster on the devices that hold the parameters.

        On a CPU without `cpu_kernels` a tied embedding gets a transposed copy (V·E more numbers),
        because XLA's product of several tokens with `[V, E]` takes much longer than with `[E, V]`.
        Else nothing changes. All methods accept prepared parameters; checkpoints and training need
        the originals. Arrays are shared, not copied.
        """
        table = params["token_embedder"]["embedding"]
        stored = isinstance(table, StoredWeight)
        tied = self.config.tie_embeddings and platforms_of(table) == {"cpu"}
        if stored or not tied or cpu_kernels.available():
            return params
        transposed = {TRANSPOSED: _transpose(table)}
        return {**params, "token_embedder": {**params["token_embedder"], **transposed}}

    def score(
        self,
        params: Params,
        cache: RaggedCache,
        tokens: Integer[Array, "B T"],
        positions: Integer[Array, " B"],
        tree: TreeShape | None = None,
    ) -> tuple[Float32[Array, "B T V"], Array, CacheEntries]:
        """Like `extend`, but does not change the cache.

        The block attends to the cache entries before `positions[b]` and to itself; rotations,
        relative positions and windows follow the depths of a tree's nodes. Hidden states are those
        after the last norm.
        """
        memory = self._memory(cache, positions, tree)
        return self._apply(params, tokens, memory, method="score")

    def score_tree(self, *given: Any) -> tuple[Float32[Array, "B T V"], Array, CacheEntries]:
        """See `specjax.types.LanguageModel`."""
        return self.score(*given)

    def keep(
        self,
        cache: RaggedCache,
        positions: Integer[Array, " B"],
        nodes: Integer[Array, "B G"],
    ) -> RaggedCache:
        """See `specjax.types.LanguageModel`; if the cache is donated, only the path is copied.

        The numbers in `nodes` after the path may be arbitrary; entries past the end are dropped.
        """
        return cache_lib.keep(cache, positions, nodes, self.layout)

    def extend(
        self,
        params: Params,
        cache: RaggedCache,
        tokens: Integer[Array, "B T"],
        positions: Integer[Array, " B"],
        tree: TreeShape | None = None,
    ) -> Extended:
        """See `specjax.types.LanguageModel`.

        Where a position's entries lie together in the cache, each layer writes its entries before
        it reads them: one product over the cache instead of two, and one softmax without a
        concatenation.
        """
        if not self.layout.by_position:
            return super().extend(params, cache, tokens, positions, tree)
        memory = self._memory(cache, positions, tree, written=True)
        logits, hidden, new = self._apply(params, tokens, memory, method="score")
        layers = {"keys": new.keys, "values": new.values, "recurrent": new.recurrent}
        return Extended(logits, hidden, cache._replace(**layers))

    def write(
        self, cache: RaggedCache, updates: CacheEntries, positions: Integer[Array, " B"]
    ) -> RaggedCache:
        """See `specjax.types.LanguageModel`; if the cache is donated, nothing is copied."""
        return cache_lib.write(cache, updates, positions, self.layout)

    def _memory(
        self,
        cache: RaggedCache,
        positions: Integer[Array, " B"],
        tree: TreeShape | None = None,
        written: bool = False,
    ) -> Memory:
        if tree is not None:
            tree = tree._replace(depths=tree.depths.astype(jnp.int32))
        # In 8-bit or unsigned dtypes, sums and differences of positions would wrap around.
        return Memory(cache, positions.astype(jnp.int32), self.layout, written, tree)

    def _empty_cache(self, rows: int, max_length: int) -> RaggedCache:
        config, deltas = self.config, self.config.style.deltas
        layers = [config.of_layer(i) for i in config.style.cached]
        cache = cache_lib.allocate(layers, rows, max_length, self.layout)
        if not deltas:
            return cache
        memory = empty_memory(deltas, rows, self.rollback, config.dtype)
        return cache._replace(recurrent=memory)

    def _prefilled(
        self, cache: RaggedCache, last: Array, positions: Array, text: Array, states: Array | None
    ) -> Prefilled | PrefilledStates:
        if not self.boundaries:
            return Prefilled(cache, last, positions)
        if states is None:  # there is no text
            width = len(self.boundaries) * self.config.embed_dim
            states = jnp.zeros((last.size, 0, width), self.config.dtype)
        return PrefilledStates(cache, last, positions, text, states)

    def _apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        return self.network.apply({"params": params}, *args, **kwargs)


def platforms_of(array: Any) -> set[str]:
    """The platforms of an array's devices; the default platform for a host array."""
    if isinstance(array, jax.Array):
        return {device.platform for device in array.devices()}
    return {jax.default_backend()}


_transpose = jit(jnp.transpose)


@functools.partial(jit, static_argnums=0)
def _init(model: Model, key: Array) -> Params:
    return model._init_variables(key)["params"]


@functools.lru_cache(maxsize=64)
def _abstract_variables(model: Model) -> Any:
    # The key is made inside, where nothing is compiled.
    return jax.eval_shape(lambda: model._init_variables(jax.random.key(0)))


# Replaces the padding of each row by the row's first token. Padding is masked, but a NaN in its
# embedding is not: the product of zero and NaN is NaN.
def _repeat_first(
    inputs: Integer[Array, "B P"], lengths: Integer[Array, " B"]
) -> Integer[Array, "B P"]:
    inside = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None] < lengths.astype(jnp.int32)[:, None]
    return jnp.where(inside, inputs, inputs[:, :1]).astype(jnp.int32)


def _is_names(value: Any) -> bool:
    plain = type(value) is tuple and all(isinstance(name, str | None) for name in value)
    return plain or isinstance(value, jax.P)


class CausalLM(Model):
    """A decoder-only network as a language model."""

    config: DecoderOnlyConfig

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        return input_lengths

    def _init_variables(self, key: Array) -> Any:
        return self.network.init(key, jnp.zeros((1, 1), jnp.int32))

    def apply(self, params: Params, tokens: Integer[Array, "B T"]) -> Float32[Array, "B T V"]:
        """The logits of known tokens (teacher forcing); entry t predicts token t + 1."""
        return self._apply(params, tokens)

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Any:
        """Reads all tokens of each prompt except its last.

        If all tokens of a prompt see each other (`Style.bidirectional_inputs`), the last is read
        too; the first extend overwrites its entries.
        """
        assert prompts.prefix is None, "without an encoder, a prefix is the end of the prompt"
        check_length(self.config.style.most_positions, max_length)
        inputs, input_lengths = prompts.inputs, prompts.input_lengths
        rows = inputs.shape[0]
        lengths = input_lengths.astype(jnp.int32)
        tokens, positions = _repeat_first(inputs, lengths), lengths - 1
        last = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
        cache = self._empty_cache(rows, max_length)
        continues, whole = self.continues_beginnings, self.config.style.bidirectional_inputs
        starts: Any = None
        if continues and (common := next_beginning()) is not None:
            starts, cache = common[0], fill(cache, common[1])
        elif continues and self.in_passes and tokens.shape[1] > _PASS + 1:
            starts = 0
        if starts is not None:
            cache, states = self._continued(params, tokens, positions, starts, cache)
            return self._prefilled(note(cache), last, positions, tokens, states)
        read, seen = tokens[:, :-1], None
        if whole:
            seen = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] <= positions[:, None]
            read = tokens
        states = None
        if read.shape[1]:
            recurrent = {"fresh": cache.recurrent, "counts": positions}
            updates, states = self._apply(params, read, seen=seen, **recurrent, method="read")
            cache = self.write(cache, updates, jnp.zeros_like(positions))
        cache = note(cache) if continues else cache
        return self._prefilled(cache, last, positions, read, states)

    @property
    def continues_beginnings(self) -> bool:
        style = self.config.style
        # A recurrent layer cannot go back to where a prompt leaves the beginning.
        return not (style.bidirectional_inputs or style.deltas)

    # The cache with the tokens from `starts`, of each row or of all, up to `ends`; and the states
    # of these tokens and of the one before, for a drafter that reads them.
    def _continued(
        self,
        params: Params,
        tokens: Integer[Array, "B P"],
        ends: Integer[Array, " B"],
        starts: Array | int,
        cache: RaggedCache,
    ) -> tuple[RaggedCache, Array | None]:
        width = min(_PASS, tokens.shape[1])
        at = jnp.broadcast_to(jnp.asarray(starts, jnp.int32), ends.shape)
        states = None
        if self.boundaries:
            at = jnp.maximum(at - 1, 0)
            wide = len(self.boundaries) * self.config.embed_dim
            states = jnp.zeros((*tokens.shape, wide), self.config.dtype)

        def step(carry: tuple[Array, RaggedCache, Any]) -> tuple[Array, RaggedCache, Any]:
            at, cache, states = carry
            place = at[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
            # Later entries than the end of a row are stale.
            block = jnp.take_along_axis(tokens, place, axis=1, mode="clip")
            _, hidden, cache = self.extend(params, cache, block, at)
            if states is not None:
                put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
                states = put(states, place, hidden)
            return at + width, cache, states

        start = (at, cache, states)
        return lax.while_loop(lambda carry: jnp.any(carry[0] < ends), step, start)[1:]


class Seq2SeqLM(Model):
    """An encoder-decoder as a language model of its outputs."""

    config: Any  # with `decoder_start_token`

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        # The start token and the prefix: the inputs take no positions of the decoder's cache.
        return prefix_lengths + 1

    def _init_variables(self, key: Array) -> Any:
        tokens = jnp.zeros((1, 1), jnp.int32)
        return self.network.init(key, tokens, tokens, tokens == 0)

    def apply(
        self,
        params: Params,
        encoder_tokens: Integer[Array, "B P"],
        decoder_tokens: Integer[Array, "B T"],
        *,
        encoder_mask: Bool[Array, "B P"] | None = None,
        dropout_key: Array | None = None,
    ) -> Float32[Array, "B T V"]:
        """The logits of known outputs, all positions at once (teacher forcing).

        Args:
          params: the parameters.
          encoder_tokens: the inputs.
          decoder_tokens: the start token, then the outputs without their last token; entry t of
            the logits predicts the output after token t.
          encoder_mask: false at padding (not in a whole row); None: no padding.
          dropout_key: a PRNG key; it is consumed. Without it there is no dropout.
        """
        if encoder_mask is None:
            encoder_mask = jnp.ones(encoder_tokens.shape, bool)
        return self._apply(
            params,
            decoder_tokens,
            encoder_tokens,
            encoder_mask,
            deterministic=dropout_key is None,
            rngs=None if dropout_key is None else {"dropout": dropout_key},
        )

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Any:
        """Runs the encoder, and the decoder on all tokens of a forced prefix except its last.

        Without a prefix, the rows continue from the start token, at position 0.
        """
        inputs, input_lengths = prompts.inputs, prompts.input_lengths
        rows = inputs.shape[0]
        positions = jnp.zeros(rows, jnp.int32)
        lengths = input_lengths.astype(jnp.int32)[:, None]
        mask = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None] < lengths
        inputs = _repeat_first(inputs, input_lengths)
        cross = self._apply(params, inputs, mask, method="encode")
        tokens = jnp.full((rows, 1), self.config.decoder_start_token, jnp.int32)
        if prompts.prefix is not None:
            assert prompts.prefix_lengths is not None, "a prefix needs prefix_lengths"
            tokens = jnp.concatenate([tokens, prompts.prefix.astype(jnp.int32)], axis=1)
            positions = prompts.prefix_lengths.astype(jnp.int32)
        cache = self._empty_cache(rows, max_length)._replace(cross=cross)
        read, states = tokens[:, :-1], None
        if read.shape[1]:
            updates, states = self._apply(params, read, cross, method="read")
            cache = self.write(cache, updates, jnp.zeros_like(positions))
        last = jnp.take_along_axis(tokens, positions[:, None], axis=1)[:, 0]
        return self._prefilled(cache, last, positions, read, states)
