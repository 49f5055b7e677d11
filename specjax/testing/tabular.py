"""A language model that is a table, so that every next-token distribution is known.

Axes: B rows, P prompt length, S cache length, T tokens in one extend, K context length,
V vocabulary.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UserError
from specjax.types import (
    Array,
    Cache,
    CacheUpdates,
    LanguageModel,
    Params,
    Prefilled,
    Prompts,
    TreeShape,
)


@dataclasses.dataclass(frozen=True)
class TabularModel(LanguageModel):
    """Reads its logits from a table indexed by the last `order` tokens; a `LanguageModel`.

    The parameters are one array `[(V + 1) ** order, V]`: the index is the context in base V + 1,
    oldest token first, with V standing for "before the start". Order 0 is an i.i.d. model.

    Attributes:
      vocab_size: V.
      order: K, the number of context tokens that the distributions depend on.
    """

    vocab_size: int
    order: int = 1

    reads_trees: ClassVar[bool] = True

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        return input_lengths

    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Prefilled:
        inputs, input_lengths = prompts.inputs, prompts.input_lengths
        assert prompts.prefix is None, "without an encoder, a prefix is the end of the prompt"
        rows, width = inputs.shape
        if width > max_length:
            raise UserError(f"a prompt of {width} tokens is longer than max_length={max_length}")
        cache = jnp.full((rows, max_length), self.vocab_size, jnp.int32)
        positions = input_lengths.astype(jnp.int32) - 1
        last = jnp.take_along_axis(inputs.astype(jnp.int32), positions[:, None], axis=1)[:, 0]
        return Prefilled(cache.at[:, :width].set(inputs.astype(jnp.int32)), last, positions)

    def score(
        self, params: Params, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Array, CacheUpdates]:

        def row(cache, tokens, position):
            # K entries before the start, then the cache up to `position`, then the block.
            padded = jnp.concatenate([jnp.full((self.order,), self.vocab_size, jnp.int32), cache])
            before = jax.lax.dynamic_slice_in_dim(padded, position, self.order)
            seen = jnp.concatenate([before, tokens])
            index = jnp.zeros(tokens.shape, jnp.int32)
            for lag in range(self.order):
                index = index * (self.vocab_size + 1) + seen[lag + 1 : lag + 1 + tokens.size]
            return index

        index = jax.vmap(row)(cache, tokens.astype(jnp.int32), positions)
        logits = params[index]
        return logits, logits, tokens.astype(jnp.int32)

    def score_tree(
        self, params: Params, cache: Cache, tokens: Array, positions: Array, tree: TreeShape
    ) -> tuple[Array, Array, CacheUpdates]:

        def row(cache, tokens, position, depths, seen):
            index = jnp.zeros(tokens.shape, jnp.int32)
            read = depths.size - tokens.size
            nodes = jnp.concatenate([cache[position + jnp.arange(read)], tokens])
            for lag in reversed(range(self.order)):
                depth = depths[read:] - lag
                # A token sees exactly one node at each depth.
                inside = nodes[jnp.argmax(seen & (depths[None] == depth[:, None]), axis=1)]
                place = position + depth
                before = jnp.where(place < 0, self.vocab_size, cache[jnp.maximum(place, 0)])
                index = index * (self.vocab_size + 1) + jnp.where(depth < 0, before, inside)
            return index

        index = jax.vmap(row)(cache, tokens.astype(jnp.int32), positions, *tree)
        logits = params[index]
        return logits, logits, tokens.astype(jnp.int32)

    def keep(self, cache: Cache, positions: Array, nodes: Array) -> Cache:
        place = positions[:, None] + nodes
        return self.write(cache, jnp.take_along_axis(cache, place, axis=1), positions + 1)

    def write(self, cache: Cache, updates: CacheUpdates, positions: Array) -> Cache:
        rows, width = updates.shape
        at = positions[:, None] + jnp.arange(width)[None]
        return cache.at[jnp.arange(rows)[:, None], at].set(updates, mode="drop")


def random_table(
    seed: int, vocab_size: int, order: int, *, scale: float = 1.0, zeros: float = 0.0
) -> np.ndarray:
    """Random logits for a `TabularModel`.

    Args:
      seed: the seed of numpy's generator.
      vocab_size: V.
      order: K.
      scale: the standard deviation of the logits.
      zeros: the share of impossible tokens (-inf); at least one token per context is possible.

    Returns:
      `[(V + 1) ** order, V]` float32 logits.
    """
    rng = np.random.default_rng(seed)
    contexts = (vocab_size + 1) ** order
    logits = scale * rng.standard_normal((contexts, vocab_size))
    impossible = rng.random((contexts, vocab_size)) < zeros
    impossible[np.arange(contexts), rng.integers(vocab_size, size=contexts)] = False
    return np.where(impossible, -np.inf, logits).astype(np.float32)
