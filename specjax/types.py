"""The types that cross module borders.

Axes: B rows, G longest draft block, V vocabulary, T tokens in one extend, S cache length,
D model width.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, TypeVar, dataclass_transform

import jax
import numpy as np

Array = jax.Array
Params = Any  # a pytree of arrays
Cache = Any  # a pytree of arrays whose leading axis is the batch
Updates = Any  # a pytree of arrays: what one block adds to a cache


_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def traced_dataclass(cls: type[_T]) -> type[_T]:
    """Makes a frozen dataclass whose fields are the leaves of a pytree.

    Unflattening bypasses `__init__` and `__post_init__`: ranges are checked once, where a user's
    concrete value enters, and jit, vmap, eval_shape and tree maps may put anything in the fields.
    """
    data: Any = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    names = tuple(field.name for field in dataclasses.fields(data))

    def flatten(value: Any) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(value, name) for name in names), None

    def flatten_with_keys(value: Any) -> tuple[tuple[tuple[Any, Any], ...], None]:
        keys = (jax.tree_util.GetAttrKey(name) for name in names)
        return tuple(zip(keys, flatten(value)[0], strict=True)), None

    def unflatten(_: None, children: Any) -> Any:
        value = object.__new__(data)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(value, name, child)
        return value

    def show(value: Any) -> str:
        shown = (f"{name}={_show(getattr(value, name))}" for name in names)
        return f"{data.__name__}({', '.join(shown)})"

    data.__repr__ = show
    jax.tree_util.register_pytree_with_keys(data, flatten_with_keys, unflatten, flatten)
    return data


def _show(leaf: Any) -> str:
    return str(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else repr(leaf)


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

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """How many cache positions each prompt takes, its last token included.

        Args:
          input_lengths: `[B]`, or one number.
          prefix_lengths: `[B]`, or one number.

        Returns:
          The same shape; the first generated token has this position.
        """

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
        """Reads `tokens [B, T]` at `positions[b] ..` and writes them into the cache."""

    def score(
        self, params: Params, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Array, Updates]:
        """Like `extend`, but leaves the cache alone: returns (logits, hidden, updates).

        The updates have T in one axis. Being free of the cache they may cross a `lax.switch`
        between several T without copying it.
        """

    def write(self, cache: Cache, updates: Updates, positions: Array) -> Cache:
        """Writes what `score` returned at `positions[b] ..`; what falls past the end is dropped."""


class DraftBlock(NamedTuple):
    """A drafted block for each row, padded to G tokens.

    Attributes:
      tokens: `[B, G]` int32; past `num_drafted` anything.
      probs: `[B, G + 1, V]` float32; row i is what `tokens[:, i]` was drawn from. The row at
        `num_drafted`, the bonus position, is filled in only where it is asked for.
      confidences: `[B, G + 1, V]` float32, the drafter's confidence distributions, or None.
      num_drafted: `[B]` int32, at most G.
      calls: int32 scalar, how many passes of the drafter made the block.
    """

    tokens: Array  # [B, G]
    probs: Array  # [B, G + 1, V]
    confidences: Array | None  # [B, G + 1, V]
    num_drafted: Array  # [B]
    calls: Array


class DraftTraits(NamedTuple):
    """What a verification algorithm may have to know of the way blocks are drafted.

    Attributes:
      prefix_only: each draft distribution depends on the tokens before it alone, and on one drafter
        (no horizontal cascade, no statistics gathered from earlier rounds).
      random_stops: whether the decision to stop a draft uses randomness of its own.
      stops_at_eos: whether a draft ends after an end-of-sequence token.
      nested: whether this is an inner level of a vertical cascade.
      fixed_length: every block has the same length G.
    """

    prefix_only: bool = True
    random_stops: bool = False
    stops_at_eos: bool = False
    nested: bool = False
    fixed_length: bool = True


class Acceptance(NamedTuple):
    """How a verification algorithm judges one drafted block.

    Attributes:
      thresholds: `[G]` float32; uniform i (independent ones) passes iff it is below thresholds[i].
        Zero past the block's length.
      scales: `[G + 1]` float32; the token after i accepted ones is drawn from
        norm((scales[i] * targets[i] - draft_probs[i])_+), or from targets[i] if i is the length.
      targets: `[G + 1, V]` float32; the target distributions after carry-over.
      detail: what the algorithm itself needs for its next carry.
    """

    thresholds: Array  # [G]
    scales: Array  # [G + 1]
    targets: Array  # [G + 1, V]
    detail: Any = ()


class Verified(NamedTuple):
    """The outcome of verifying one row's block.

    Attributes:
      num_accepted: int32 scalar in 0 .. num_drafted: how many drafted tokens stand.
      next_token: int32 scalar: the token that follows them.
      carry: what the algorithm takes into the row's next round (an empty pytree for most).
    """

    num_accepted: Array
    next_token: Array
    carry: Any
