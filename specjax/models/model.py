"""What the models of all families share: parameters, their axes, `extend` and `write`."""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze
from flax.linen.partitioning import get_axis_names

from specjax.base import Array, Extended, Params, Prefilled
from specjax.models import cache as cache_lib
from specjax.models.cache import RaggedCache, Updates
from specjax.models.config import ModelConfig
from specjax.models.layers import TRANSPOSED, Memory


@dataclasses.dataclass(frozen=True)
class Model(abc.ABC):
    """A network as a `specjax.base.LanguageModel`; all arrays travel in `params` and the cache.

    Attributes:
      config: what it is made of.
    """

    config: ModelConfig

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    @abc.abstractmethod
    def network(self) -> nn.Module:
        """The flax.linen module."""

    @abc.abstractmethod
    def prefill(
        self,
        params: Params,
        inputs: Array,
        input_lengths: Array,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> Prefilled:
        """See `specjax.base.LanguageModel`."""

    @abc.abstractmethod
    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """How many cache positions each prompt takes, its last token included.

        Args:
          input_lengths: `[B]`.
          prefix_lengths: `[B]`.

        Returns:
          `[B]`; the first generated token has this position.
        """

    @abc.abstractmethod
    def _init_variables(self, key: Array) -> Any:
        """The network's variables, parameters and axis names."""

    def init(self, key: Array) -> Params:
        """Random parameters.

        Args:
          key: a PRNG key.

        Returns:
          A nested dict of arrays of `config.param_dtype`.
        """
        return _init(self, key)

    def abstract_params(self) -> Params:
        """The shapes and dtypes of the parameters, without memory: `jax.ShapeDtypeStruct`s."""
        return _abstract_variables(self)["params"]

    def logical_axes(self) -> Params:
        """The axis names of each parameter: tuples of str in the place of arrays."""
        names = unfreeze(get_axis_names(_abstract_variables(self)["params_axes"]))
        return jax.tree.map(tuple, names, is_leaf=lambda x: isinstance(x, jax.P))

    def axis_units(self) -> dict[str, int]:
        """Logical axis -> the size of what a mesh must not cut through: a head."""
        head = self.config.head_dim
        return {"joined_kv": head, "joined_grouped_kv": head}

    def num_params(self) -> int:
        """How many numbers the parameters are; counted without memory."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params()))

    def prepare(self, params: Params) -> Params:
        """Parameters laid out for fast decoding on the devices where they lie.

        On a CPU a tied embedding gets a transposed copy (V·E more numbers), since several tokens
        against `[V, E]` take half as long again as against `[E, V]`. Elsewhere nothing changes.
        All methods take prepared parameters; checkpoints and training want the plain ones.

        Args:
          params: the parameters.

        Returns:
          The parameters, and what was added. Arrays are shared, not copied.
        """
        table = params["token_embedder"]["embedding"]
        if not self.config.tie_embeddings or {d.platform for d in table.devices()} != {"cpu"}:
            return params
        transposed = {TRANSPOSED: jax.jit(jnp.transpose)(table)}
        return {**params, "token_embedder": {**params["token_embedder"], **transposed}}

    def score(
        self, params: Params, cache: RaggedCache, tokens: Array, positions: Array
    ) -> tuple[Array, Array, Updates]:
        """Like `extend`, but leaves the cache alone: returns (logits, hidden, updates).

        The block attends to the cache's entries before `positions[b]` and to itself.

        Args:
          params: the parameters.
          cache: the cache.
          tokens: `[B, T]` int32.
          positions: `[B]` int32, the cache position of `tokens[b, 0]`.

        Returns:
          logits `[B, T, V]` float32, hidden `[B, T, E]` (after the last norm), and the block's
          keys and values.

        Raises:
          ValueError: if the shapes or dtypes do not fit together.
        """
        check_block(cache, tokens, positions)
        return self._apply(params, tokens, Memory(cache, positions), method="score")

    def write(self, cache: RaggedCache, updates: Updates, positions: Array) -> RaggedCache:
        """Writes what `score` returned at `positions[b] ..`; what falls past the end is dropped."""
        return cache_lib.write(cache, updates, positions)

    def extend(
        self, params: Params, cache: RaggedCache, tokens: Array, positions: Array
    ) -> Extended:
        """Reads `tokens [B, T]` at `positions[b] ..` and writes them: `score`, then `write`."""
        logits, hidden, updates = self.score(params, cache, tokens, positions)
        return Extended(logits, hidden, self.write(cache, updates, positions))

    def _apply(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        return self.network.apply({"params": params}, *args, **kwargs)


@functools.partial(jax.jit, static_argnums=0)
def _init(model: Model, key: Array) -> Params:
    return model._init_variables(key)["params"]


@functools.lru_cache(maxsize=64)
def _abstract_variables(model: Model) -> Any:
    return jax.eval_shape(model._init_variables, jax.random.key(0))


def check_tokens(name: str, tokens: Array, lengths: Array | None = None) -> None:
    """Asserts at trace time that `tokens` is `[B, n]` and `lengths` `[B]`, both integer.

    Args:
      name: of `tokens`, for the message.
      tokens: the tokens.
      lengths: how many of each row are real.

    Raises:
      ValueError: if not.
    """
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"{name} is {tokens.dtype}{list(tokens.shape)}: must be an integer array [rows, tokens]"
        )
    if lengths is not None and (
        lengths.shape != tokens.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer)
    ):
        raise ValueError(
            f"the lengths of {name} are {lengths.dtype}{list(lengths.shape)}: must be an integer "
            f"array [{tokens.shape[0]}], one per row"
        )


def check_block(cache: RaggedCache, tokens: Array, positions: Array) -> None:
    """Asserts at trace time that a block fits its cache.

    Args:
      cache: the cache.
      tokens: `[B, T]`.
      positions: `[B]`.

    Raises:
      ValueError: if the shapes or dtypes do not fit together.
    """
    check_tokens("tokens", tokens, positions)
    rows = cache.keys[0].shape[0]
    if tokens.shape[0] != rows:
        raise ValueError(f"tokens have {tokens.shape[0]} rows but the cache has {rows}")


def prefix_or_empty(
    inputs: Array, prefix: Array | None, prefix_lengths: Array | None
) -> tuple[Array, Array]:
    """The forced first tokens of the output and their numbers; none of them by default.

    Args:
      inputs: `[B, P]`, for the number of rows.
      prefix: `[B, F]` or None.
      prefix_lengths: `[B]`, or None for F in each row.

    Returns:
      prefix `[B, F]` and lengths `[B]`, int32.
    """
    rows = inputs.shape[0]
    if prefix is None:
        return jnp.zeros((rows, 0), jnp.int32), jnp.zeros(rows, jnp.int32)
    if prefix.shape[0] != rows:
        raise ValueError(f"prefix has {prefix.shape[0]} rows but inputs have {rows}")
    if prefix_lengths is None:
        prefix_lengths = jnp.full(rows, prefix.shape[1], jnp.int32)
    check_tokens("prefix", prefix, prefix_lengths)
    return prefix.astype(jnp.int32), prefix_lengths.astype(jnp.int32)
