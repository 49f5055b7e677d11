"""The types that cross module borders.

Axes: B rows, G longest draft block, V vocabulary, T tokens in one extend, S cache length,
D model width.
"""

from typing import Any, NamedTuple, Protocol

import jax

Array = jax.Array
Params = Any  # a pytree of arrays
Cache = Any  # a pytree of arrays whose leading axis is the batch
Updates = Any  # a pytree of arrays: what one block adds to a cache


class Prefilled(NamedTuple):
    """A prompt taken in: a cache, and the first token to extend with.

    Attributes:
cache: the model's cache, with all of the prompt but `tokens` in it.
tokens: `[B]` int32, the last token of each prompt (or the start token); not in the cache.
positions: `[B]` int32, the cache position at which `tokens` belongs.
    """

    cache: Cache
    tokens: Array  # [B]
    positions: Array  # [B]


class Extended(NamedTuple):
    """What a model says of a block of tokens.

    Attributes:
logits: `[B, T, V]` float32; `logits[b, t]` predicts the token after `tokens[b, t]`.
hidden: `[B, T, D]`, the last hidden states (before the output projection).
cache: the cache, with the block's entries at `positions[b] .. positions[b] + T - 1`.
    """

    logits: Array  # [B, T, V]
    hidden: Array  # [B, T, D]
    cache: Cache


class LanguageModel(Protocol):
    """A causal next-token model whose rows advance, and roll back, independently.

    Rolling back is a smaller `positions[b]` in the next call: entries are overwritten, never added
    to, and position k is seen only by queries at positions >= k. Writes past the cache's end are
    dropped. Instances are static and hashable; all arrays travel in `params` and `cache`.
    """

    @property
    def vocab_size(self) -> int:
  """V, the size of the last axis of the logits."""

    def prefill(
  self,
  params: Params,
  inputs: Array,
  input_lengths: Array,
  max_length: int,
  prefix: Array | None = None,
  prefix_lengths: Array | None = None,
    ) -> Prefilled:
  """Takes prompts in.

  Args:
    params: the model's parameters.
    inputs: `[B, P]` int32 prompts, padded on the right.
    input_lengths: `[B]` int32, how many of each row's inputs are real (>= 1).
    max_length: S, the number of positions the cache must hold (static).
    prefix: `[B, F]` int32, forced first tokens of the output (encoder-decoder models).
    prefix_lengths: `[B]` int32.

  Returns:
    A `Prefilled`.
  """

    def extend(self, params: Params, cache: Cache, tokens: Array, positions: Array) -> Extended:
  """Reads `tokens [B, T]` at `positions[b] ..` and writes them into the cache: score + write."""

    def score(
  self, params: Params, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Array, Updates]:
  """Like `extend`, but leaves the cache alone: returns (logits, hidden, updates).

  The updates have T in one axis. Being free of the cache they may cross a `lax.switch`
  between several T without copying it.
  """

    def write(self, cache: Cache, updates: Updates, positions: Array) -> Cache:
  """Writes what `score` returned at `positions[b] ..`; what falls past the end is dropped."""
