"""The interface of verification algorithms, and their results for a block.

Axes: G longest block, N = G + 1 nodes, V vocabulary.
"""

import abc
from typing import Any, ClassVar, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float32, Int32

from specjax.errors import UserError
from specjax.types.drafting import DraftTraits


class ScoredBlock(NamedTuple):
    """One row's drafted block with the target distributions; for fields of trees see `DraftBlock`.

    Attributes:
      tokens: entries past `num_drafted` are ignored.
      draft_probs: row i is the exact distribution that `tokens[i]` was drawn from. Only an
        algorithm with a carry reads row `num_drafted` (the bonus position). None if the tokens are
        certain. With `drawn_from` it may have any number of rows.
      target_probs: the rule's target distribution after each node; unknown at the leaves of a tree
        if the rule reads the drafter.
      num_drafted: at most G. It may be a stopping time of the draft.
      parents: None for a chain.
      still_drafting: read by an algorithm with a carry of C slots; entry (c, i) says that the
        drafter of slot c's block would not have stopped after the first i tokens of this block, or
        earlier. None: drafts have a fixed length.
    """

    tokens: Int32[Array, " G"]
    draft_probs: Float32[Array, "N V"] | None
    target_probs: Float32[Array, "N V"]
    num_drafted: Int32[Array, ""]
    parents: Int32[Array, " G"] | None = None
    laws: Int32[Array, " G"] | None = None
    drawn_from: Int32[Array, " G"] | None = None
    still_drafting: Bool[Array, "C N"] | None = None


class Acceptance(NamedTuple):
    """An algorithm's thresholds and scales for a drafted block.

    Attributes:
      thresholds: uniform i (all independent) passes iff it is below thresholds[i]. Zero past the
        block's length.
      scales: the token after i accepted ones is drawn from
        norm((scales[i] * targets[i] - draft_probs[i])_+), or from targets[i] if i is the length.
      targets: the target distributions after carry-over.
      detail: values that the algorithm needs for its next carry.
    """

    thresholds: Float32[Array, " G"]
    scales: Float32[Array, " N"]
    targets: Float32[Array, "N V"]
    detail: Any = ()


class Path(NamedTuple):
    """The accepted path of a tree, and the weights of the next token.

    Attributes:
      nodes: the accepted nodes in order, each a child of the node before, the first a child of
        node 0 (see `DraftBlock`); arbitrary past `length`.
      length: the number of accepted nodes.
      weights: the weights of the next token, not negative, if the path ends at an inner node. After
        a leaf, the target distribution there.
    """

    nodes: Int32[Array, " G"]
    length: Int32[Array, ""]
    weights: Float32[Array, " V"]


class Verified(NamedTuple):
    """The outcome of verifying one row's block.

    Attributes:
      num_accepted: in 0 .. num_drafted.
      next_token: the token that follows the accepted ones.
      carry: state for the row's next round (for most algorithms an empty pytree).
    """

    num_accepted: Int32[Array, ""]
    next_token: Int32[Array, ""]
    carry: Any


class Verification(Protocol):
    """A verification algorithm: static, hashable and without arrays of its own.

    Derive your own algorithm from this class and define `acceptance`.

    Attributes:
      keeps_last_pass: the number accepted is the last index whose uniform passes its threshold
        (block verification), not the index before the first failure (token verification).
      has_carry: whether a round's carry changes the targets of later rounds. Then the drafter's
        distribution is needed at the bonus position whatever the rule.
      needs_probs: whether `acceptance` reads the distributions of drafts that are certain, too.
        False: it gets None for them, instead of one-hot distributions.
      walks_trees: whether it has a `walk`.
    """

    keeps_last_pass: ClassVar[bool] = False
    has_carry: ClassVar[bool] = False
    needs_probs: ClassVar[bool] = True
    walks_trees: ClassVar[bool] = False

    @abc.abstractmethod
    def acceptance(self, block: ScoredBlock, carry: Any = ()) -> Acceptance:
        """Thresholds and scales for a chain."""

    def walk(self, uniforms: Float32[Array, " G"], block: ScoredBlock) -> Path:
        """Verifies a tree; called if the drafter's traits set `drafts_trees`."""
        raise UserError(f"{type(self).__name__} cannot verify trees")

    def check(self, max_draft: int, traits: DraftTraits) -> None:
        """Raises UserError if the algorithm is not exact for drafts of this kind."""
        return None

    def init_carry(self, max_draft: int) -> Any:
        """The carry before a row's first round."""
        return ()

    def next_carry(
        self,
        acceptance: Acceptance,
        block: ScoredBlock,
        carry: Any,
        num_accepted: Int32[Array, ""],
        next_token: Int32[Array, ""],
    ) -> Any:
        """The carry into the next round, once the outcome of `acceptance` is known."""
        return ()
