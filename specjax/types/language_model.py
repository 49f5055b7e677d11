"""The interface of language models.

Axes: B rows, P prompt length, F prefix length, T tokens in one extend, N nodes of a tree, S cache
length, D width, V vocabulary, G longest path.
"""

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import jax
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer

from specjax.checks import check_scores
from specjax.errors import UserError

Params = Any  # a pytree of arrays
Cache = Any  # a pytree of arrays whose leading axis is the batch
CacheUpdates = Any  # a pytree of arrays: the entries that a block adds to a cache
Axes = Any  # a pytree with a tuple of logical axis names in place of each array


class Prompts(NamedTuple):
    """The prompts that a model reads.

    Attributes:
      inputs: padded on the right.
      input_lengths: the number of real inputs of each row, at least 1.
      prefix: forced first tokens of an encoder-decoder's output, if there are any.
      prefix_lengths: their number in each row; None without a prefix.
      predictions: K texts that each row's output may resemble, -1 after their ends. Only drafters
        read them.
    """

    inputs: Int32[Array, "B P"]
    input_lengths: Int32[Array, " B"]
    prefix: Int32[Array, "B F"] | None = None
    prefix_lengths: Int32[Array, " B"] | None = None
    predictions: Int32[Array, "B K E"] | None = None


class Prefilled(NamedTuple):
    """A prompt that was read: a cache, and the first token to extend with.

    Attributes:
      cache: the model's cache, with the whole prompt except `tokens`.
      tokens: the last token of each prompt (or the start token); not in the cache.
      positions: the cache position of `tokens`.
    """

    cache: Cache
    tokens: Int32[Array, " B"]
    positions: Int32[Array, " B"]


class PrefilledStates(NamedTuple):
    """What a model that is `reading` returns for prompts; the first fields are `Prefilled`'s.

    Attributes:
      text: the tokens at the positions before `positions`, padded.
      states: those of `text`. Where a common beginning was read before, they are 0, but for that of
        its last token.
    """

    cache: Cache
    tokens: Int32[Array, " B"]
    positions: Int32[Array, " B"]
    text: Int32[Array, "B N"]
    states: Float[Array, "B N D"]


class Extended(NamedTuple):
    """A model's output for a block of tokens.

    Attributes:
      logits: `logits[b, t]` predicts the token after `tokens[b, t]`.
      hidden: the last hidden states (before the output projection), or those of `reading`.
      cache: with the block's entries at `positions[b] .. positions[b] + T - 1`.
    """

    logits: Float32[Array, "B T V"]
    hidden: Float[Array, "B T D"]
    cache: Cache


class TreeShape(NamedTuple):
    """The places of tokens in a tree of N nodes; see `DraftBlock`.

    The tokens are the last T nodes; the first N - T are in the cache already.

    Attributes:
      depths: the distance of each node from node 0: its position in the text, while its slot in the
        cache is its number.
      seen: whether token i equals or follows node j, and so sees it.
    """

    depths: Int32[Array, "B N"]
    seen: Bool[Array, "B T N"]


def row_axes(tree: Any) -> Axes:
    """Names the leading axis of every array "batch"; None leaves the others whole."""
    return jax.tree.map(lambda x: ("batch", *(None,) * (x.ndim - 1))[: x.ndim], tree)


class LanguageModel(Protocol):
    """A causal next-token model whose rows advance, and roll back, independently.

    Derive your own model from this class and define `vocab_size`, `prompt_positions`, `prefill`,
    `score` and `write`; the rest has a default.

    Rolling back is a smaller `positions[b]` in the next call: entries are overwritten, never added
    to, and position k is seen only by queries at positions >= k. Writes past the cache's end are
    dropped. Instances are static and hashable; all arrays are in `params` and `cache`.

    Attributes:
      vocab_size: V, the size of the last axis of the logits.
      reads_trees: whether it has `score_tree` and `keep`; False by default.
      predicts_all: False if the logits of some tokens are always -inf.
      gives_odds: whether the last of a token's hidden states is the log-odds that the next token is
        accepted; False by default.
      reads_verifier: whether it is a draft head, which reads the states of its verifier.
      most_drafts: of a head whose pass drafts several tokens, their number; else None.
    """

    reads_trees: ClassVar[bool] = False
    predicts_all: ClassVar[bool] = True
    gives_odds: ClassVar[bool] = False
    reads_verifier: ClassVar[bool] = False
    most_drafts: ClassVar[int | None] = None

    @property
    def most_rollback(self) -> int | None:
        """The most tokens that a row may go back by; None for any number.

        With a number, a row must have read all tokens before its position.
        """
        return None

    # Only for the type checker: a field of a dataclass may replace it.
    if TYPE_CHECKING:

        @property
        def vocab_size(self) -> int:
            """V, the size of the last axis of the logits."""

    @abc.abstractmethod
    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """Counts the cache positions of each prompt, with its last token.

        Lengths are `[B]` or numbers; only an encoder-decoder has prefixes. The first generated
        token has this position.
        """

    @abc.abstractmethod
    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Prefilled:
        """Reads prompts into a cache of S = `max_length` (static) positions."""

    @abc.abstractmethod
    def score(
        self,
        params: Params,
        cache: Cache,
        tokens: Integer[Array, "B T"],
        positions: Int32[Array, " B"],
    ) -> tuple[Float32[Array, "B T V"], Float[Array, "B T D"], CacheUpdates]:
        """Reads tokens at `positions[b] ..` without changing the cache.

        Returns:
          Logits, hidden states, and the updates for `write`. The updates have T in one axis of each
          array that depends on it. Since they do not contain the cache, they may cross a
          `lax.switch` between several T without copying it. (A memory whose size does not depend on
          the length of a text may be among them whole.)
        """

    @abc.abstractmethod
    def write(self, cache: Cache, updates: CacheUpdates, positions: Int32[Array, " B"]) -> Cache:
        """Writes the updates of `score` at `positions[b] ..`; entries past the end are dropped."""

    def score_tree(
        self,
        params: Params,
        cache: Cache,
        tokens: Integer[Array, "B T"],
        positions: Int32[Array, " B"],
        tree: TreeShape,
    ) -> tuple[Float32[Array, "B T V"], Float[Array, "B T D"], CacheUpdates]:
        """`score` for tokens of a tree, if `reads_trees`.

        Node i of the tree has the slot `positions[b] + i` of the cache and the position
        `positions[b] + tree.depths[b, i]`. Its token sees the slots before `positions[b]`, and the
        nodes in `tree.seen`. The updates are for `write` at `positions[b] + N - T`.
        """
        raise UserError(f"{type(self).__name__} cannot read trees")

    def keep(
        self, cache: Cache, positions: Int32[Array, " B"], nodes: Int32[Array, "B G"]
    ) -> Cache:
        """Moves the entries of a path through a tree together, if `reads_trees`.

        The entry at `positions[b] + nodes[b, i]` moves to `positions[b] + 1 + i`.
        """
        raise UserError(f"{type(self).__name__} cannot read trees")

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: Integer[Array, "B T"],
        positions: Integer[Array, " B"],
        tree: TreeShape | None = None,
    ) -> Extended:
        """Reads tokens at `positions[b] ..` and writes them into the cache.

        With `tree`, if `reads_trees`, as `score_tree`: the tokens are the last T nodes, and they
        are written at `positions[b] + N - T ..`.
        """
        if tree is None:
            returned = self.score(params, cache, tokens, positions)
        else:
            returned = self.score_tree(params, cache, tokens, positions, tree)
            positions = positions.astype("int32") + (tree.depths.shape[1] - tokens.shape[1])
        logits, hidden, updates = check_scores(self, returned, tokens)
        return Extended(logits, hidden, self.write(cache, updates, positions))

    def reading(self, boundaries: tuple[int, ...]) -> "LanguageModel":
        """The model that returns states of its residual stream, side by side, as `hidden`.

        Boundary l is the input of layer l, from 0; L is the output of the last of L layers, and
        L + 1 the same after the last norm. `prefill` returns `PrefilledStates`.
        """
        raise UserError(f"{type(self).__name__} has no states for a drafter that reads a verifier")

    def for_devices(self, platform: str, ways: int | None = None) -> "LanguageModel":
        """The model for these devices; see `specjax.models.Model`. By default unchanged."""
        return self

    def prepare(self, params: Params) -> Params:
        """Arranges the parameters for fast decoding; by default unchanged."""
        return params

    def describe(self) -> str:
        """A description for fingerprints: equal texts mean equal computations from `params`."""
        return repr(self)

    def param_axes(self, params: Params) -> Axes:
        """The logical axis names of the parameters; by default every device holds all of them."""
        return jax.tree.map(lambda x: (None,) * x.ndim, params)

    def cache_axes(self, cache: Cache) -> Axes:
        """The logical axis names of a cache; by default only the rows are spread."""
        return row_axes(cache)

    def axis_units(self) -> Mapping[str, int]:
        """Logical axis -> the size of a unit that a mesh must not split; 1 by default."""
        return {}
