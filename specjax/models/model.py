"""Code that the models of all families share: parameters, their axes, `score`, `write`."""

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax.core import unfreeze
from flax.linen.partitioning import get_axis_names

from specjax.compilation import jit
from specjax.errors import UserError
from specjax.models import cache as cache_lib
from specjax.models.attention import Memory
from specjax.models.cache import CacheEntries, CacheLayout, RaggedCache, layout_for
from specjax.models.config import ModelConfig
from specjax.models.layers import TRANSPOSED
from specjax.models.transformer import Network
from specjax.models.weights import StoredWeight, is_stored
from specjax.types import (
    Array,
    Axes,
    Extended,
    LanguageModel,
    Params,
    Prefilled,
    Prompts,
    TreeShape,
)


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
    """

    config: ModelConfig
    split: bool = True
    layout: CacheLayout = CacheLayout()  # noqa: RUF009  immutable
    tokens: int | None = None

    reads_trees: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size if self.tokens is None else self.tokens

    @property
    def network(self) -> Network:
        """The flax.linen module."""
        return Network(self.config, self.layout, self.tokens)

    @abc.abstractmethod
    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Prefilled:
        """See `specjax.types.LanguageModel`."""

    @abc.abstractmethod
    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """The number of cache positions of each prompt, including its last token.

        Args:
          input_lengths: `[B]`.
          prefix_lengths: `[B]`.

        Returns:
          `[B]`; the first generated token has this position.
        """

    @abc.abstractmethod
    def _init_variables(self, key: Array) -> Any:
        """The network's variables, parameters and axis names."""

    def for_devices(self, platform: str, ways: int = 1) -> "Model":
        """The same model with the fastest cache layout for these devices.

        Args:
          platform: as `jax.Device.platform` names it: "cpu", "gpu" or "tpu".
          ways: the number of devices that split it.

        Returns:
          A model of the same parameters.
        """
        config, ways = self.config, ways if self.split else 1
        sizes = (config.num_heads, config.kv_heads, config.head_dim)
        return dataclasses.replace(self, layout=layout_for(platform, *sizes, ways))

    def init(self, key: Array) -> Params:
        """Random parameters.

        Args:
          key: a PRNG key.

        Returns:
          A nested dict of arrays of `config.param_dtype`.
        """
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
        """The configuration as text."""
        return str(self.config) + ("" if self.tokens is None else f", {self.tokens} tokens")

    def axis_units(self) -> dict[str, int]:
        """Logical axis -> the size of a unit that a mesh must not split: a head."""
        # Common to the heads of the encoder and the decoder.
        head = math.lcm(self.config.head_dim, self.config.encoder_config.head_dim)
        return {"joined_kv": head, "joined_grouped_kv": head}

    def num_params(self) -> int:
        """The number of parameters; it allocates nothing."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params()))

    def prepare(self, params: Params) -> Params:
        """Adds arrays that make decoding faster on the devices that hold the parameters.

        On a CPU a tied embedding gets a transposed copy (V·E more numbers), because the product of
        several tokens with `[V, E]` takes 1.5 times as long as with `[E, V]`. On other devices
        nothing changes. All methods accept prepared parameters; checkpoints and training need the
        originals.

        Args:
          params: the parameters.

        Returns:
          The parameters with the addition. Arrays are shared, not copied.
        """
        table = params["token_embedder"]["embedding"]
        stored = isinstance(table, StoredWeight)
        if stored or not self.config.tie_embeddings or platforms_of(table) != {"cpu"}:
            return params
        transposed = {TRANSPOSED: _transpose(table)}
        return {**params, "token_embedder": {**params["token_embedder"], **transposed}}

    def score(
        self, params: Params, cache: RaggedCache, tokens: Array, positions: Array
    ) -> tuple[Array, Array, CacheEntries]:
        """Like `extend`, but does not change the cache: returns (logits, hidden, updates).

        The block attends to the cache entries before `positions[b]` and to itself.

        Args:
          params: the parameters.
          cache: the cache.
          tokens: `[B, T]` of an integer dtype, T >= 1.
          positions: `[B]` of an integer dtype, the cache position of `tokens[b, 0]`.

        Returns:
          logits `[B, T, V]` float32, hidden `[B, T, E]` (after the last norm), and the block's
          keys and values.

        Raises:
          ValueError: if the shapes or dtypes do not agree.
        """
        memory = self._memory(cache, tokens, positions)
        return self._apply(params, tokens, memory, method="score")

    def score_tree(
        self,
        params: Params,
        cache: RaggedCache,
        tokens: Array,
        positions: Array,
        tree: TreeShape,
    ) -> tuple[Array, Array, CacheEntries]:
        """`score` for tokens of a tree; see `specjax.types.LanguageModel`.

        Rotations, relative positions and windows follow the depths of the nodes.

        Args:
          params: the parameters.
          cache: the cache, with the first N - T nodes at `positions[b] ..`.
          tokens: `[B, T]` of an integer dtype, the last T nodes.
          positions: `[B]` of an integer dtype, the cache position of node 0.
          tree: the places of the nodes.

        Returns:
          As `score`; the updates are for `write` at `positions[b] + N - T`.

        Raises:
          ValueError: if the shapes or dtypes do not agree.
        """
        memory = self._memory(cache, tokens, positions, tree)
        return self._apply(params, tokens, memory, method="score")

    def keep(self, cache: RaggedCache, positions: Array, nodes: Array) -> RaggedCache:
        """See `specjax.types.LanguageModel`; if the cache is donated, only the path is copied.

        The numbers in `nodes` after the path may be arbitrary; entries past the end are dropped.

        Raises:
          ValueError: if the shapes or dtypes do not agree.
        """
        rows = cache.keys[0].shape[0]
        check_integers("positions", positions, (rows,))
        check_integers("nodes", nodes, (rows, None))
        return cache_lib.keep(cache, positions, nodes, self.layout)

    def extend(
        self,
        params: Params,
        cache: RaggedCache,
        tokens: Array,
        positions: Array,
        tree: TreeShape | None = None,
    ) -> Extended:
        """See `specjax.types.LanguageModel`.

        Where a position's entries lie together in the cache, each layer writes its entries before
        it reads them: one product over the cache instead of two, and one softmax without a
        concatenation.
        """
        if not self.layout.by_position:
            return super().extend(params, cache, tokens, positions, tree)
        memory = self._memory(cache, tokens, positions, tree, written=True)
        logits, hidden, new = self._apply(params, tokens, memory, method="score")
        return Extended(logits, hidden, cache._replace(keys=new.keys, values=new.values))

    def write(self, cache: RaggedCache, updates: CacheEntries, positions: Array) -> RaggedCache:
        """Writes the updates from `score` at `positions[b] ..`; entries past the end are dropped.

        Args:
          cache: the cache that `score` got; if it is donated, nothing is copied.
          updates: the updates that `score` returned.
          positions: `[B]` of an integer dtype, as given to `score`.

        Returns:
          The cache that includes the block.

        Raises:
          ValueError: if `positions` is not an integer per row.
        """
        check_integers("positions", positions, updates.computed.shape[:1])
        return cache_lib.write(cache, updates, positions, self.layout)

    def _memory(
        self,
        cache: RaggedCache,
        tokens: Array,
        positions: Array,
        tree: TreeShape | None = None,
        written: bool = False,
    ) -> Memory:
        """The memory of a block; raises ValueError if the shapes or dtypes do not agree."""
        rows = cache.keys[0].shape[0]
        check_integers("tokens", tokens, (rows, None))
        check_integers("positions", positions, (rows,))
        if tree is not None:
            length = tokens.shape[1]
            check_integers("tree.depths", tree.depths, (rows, None), least=length)
            wanted = (rows, length, tree.depths.shape[1])
            if tree.seen.shape != wanted or tree.seen.dtype != bool:
                raise UserError(
                    f"tree.seen must be booleans of shape {list(wanted)}, "
                    f"got {tree.seen.dtype}{list(tree.seen.shape)}"
                )
            tree = tree._replace(depths=tree.depths.astype(jnp.int32))
        # In 8-bit or unsigned dtypes, sums and differences of positions would wrap around.
        return Memory(cache, positions.astype(jnp.int32), self.layout, written, tree)

    def _empty_cache(self, rows: int, max_length: int) -> RaggedCache:
        """A cache without entries; raises ValueError if `max_length` is below 1."""
        config = self.config
        sizes = (len(config.style.windows), rows, config.kv_heads, max_length, config.head_dim)
        return cache_lib.allocate(*sizes, config.dtype, self.layout)

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


def check_integers(
    name: str, array: Array, shape: tuple[int | None, ...], *, least: int = 1
) -> None:
    """Asserts at trace time that an array has integers and a shape.

    Args:
      name: of the array, for the message.
      array: the array.
      shape: the shape; None for a size that is at least `least`.
      least: the lower limit of the sizes that are None.

    Raises:
      ValueError: if it does not.
    """
    sizes = ", ".join(f"{least} or more" if size is None else str(size) for size in shape)
    wanted = f"{name} must be integers of shape [{sizes}]"
    if not hasattr(array, "dtype"):
        raise UserError(f"{wanted}, got a {type(array).__name__}: use numpy.asarray")
    fits = len(array.shape) == len(shape) and all(
        size == expected if expected is not None else size >= least
        for size, expected in zip(array.shape, shape, strict=True)
    )
    if not fits or not jnp.issubdtype(array.dtype, jnp.integer):
        raise UserError(f"{wanted}, got {array.dtype}{list(array.shape)}")


def repeat_first(inputs: Array, lengths: Array) -> Array:
    """Replaces the padding of each row by the row's first token.

    Padding is masked, but a NaN in its embedding is not: the product of zero and NaN is NaN.

    Args:
      inputs: `[B, P]`.
      lengths: `[B]`, the number of tokens in each row without padding.

    Returns:
      `[B, P]` int32.
    """
    inside = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None] < lengths.astype(jnp.int32)[:, None]
    return jnp.where(inside, inputs, inputs[:, :1]).astype(jnp.int32)


def prefix_or_empty(prompts: Prompts) -> tuple[Array, Array]:
    """The forced first tokens of the output and their number per row; empty by default.

    Returns:
      prefix `[B, F]` and lengths `[B]`, int32.

    Raises:
      ValueError: if the shapes or dtypes do not agree, or only the lengths are given.
    """
    rows, prefix, prefix_lengths = prompts.inputs.shape[0], prompts.prefix, prompts.prefix_lengths
    if prefix is None:
        if prefix_lengths is not None:
            raise UserError("prefix_lengths must be None if prefix is None: give both or neither")
        return jnp.zeros((rows, 0), jnp.int32), jnp.zeros(rows, jnp.int32)
    check_integers("prefix", prefix, (rows, None), least=0)
    if prefix_lengths is None:
        prefix_lengths = jnp.full(rows, prefix.shape[1], jnp.int32)
    check_integers("prefix_lengths", prefix_lengths, (rows,))
    return prefix.astype(jnp.int32), prefix_lengths.astype(jnp.int32)


def _is_names(value: Any) -> bool:
    plain = type(value) is tuple and all(isinstance(name, str | None) for name in value)
    return plain or isinstance(value, jax.P)
