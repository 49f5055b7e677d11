"""The interface of verification algorithms, and their results for a block.

Axes: G longest block, V vocabulary.
"""

import abc
from typing import Any, ClassVar, NamedTuple, Protocol

from specjax.errors import UserError
from specjax.types.drafting import DraftTraits
from specjax.types.language_model import Array


class Acceptance(NamedTuple):
    """An algorithm's thresholds and scales for a drafted block.

    Attributes:
      thresholds: `[G]` float32; uniform i (all independent) passes iff it is below thresholds[i].
        Zero past the block's length.
      scales: `[G + 1]` float32; the token after i accepted ones is drawn from
        norm((scales[i] * targets[i] - draft_probs[i])_+), or from targets[i] if i is the length.
      targets: `[G + 1, V]` float32; the target distributions after carry-over.
      detail: values that the algorithm needs for its next carry.
    """

    thresholds: Array  # [G]
    scales: Array  # [G + 1]
    targets: Array  # [G + 1, V]
    detail: Any = ()


class Path(NamedTuple):
    """The accepted path of a tree, and the weights of the next token.

    Attributes:
      nodes: `[G]` int32, the accepted nodes in order, each a child of the node before, the first a
        child of node 0 (see `DraftBlock`); arbitrary past `length`.
      length: int32 scalar, the number of accepted nodes.
      weights: `[V]` float32, non-negative: the weights of the next token if the path ends at an
        inner node. After a leaf, the target distribution there.
    """

    nodes: Array  # [G]
    length: Array
    weights: Array  # [V]


class Verified(NamedTuple):
    """The outcome of verifying one row's block.

    Attributes:
      num_accepted: int32 scalar in 0 .. num_drafted: the number of accepted tokens.
      next_token: int32 scalar: the token that follows them.
      carry: state for the row's next round (for most algorithms an empty pytree).
    """

    num_accepted: Array
    next_token: Array
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
        False: it gets None for them, instead of one-hot distributions. A class with an `acceptance`
        of its own does not inherit False.
      walks_trees: whether it has a `walk`.
      is_exact: whether what it emits follows the target distributions. If not, results do not know
        the distance from the verifier, and it cannot verify inside a cascade.
    """

    keeps_last_pass: ClassVar[bool] = False
    has_carry: ClassVar[bool] = False
    needs_probs: ClassVar[bool] = True
    walks_trees: ClassVar[bool] = False
    is_exact: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        flag, method = (
            next(i for i, kind in enumerate(cls.__mro__) if name in vars(kind))
            for name in ("needs_probs", "acceptance")
        )
        if method < flag:
            cls.needs_probs = True

    @abc.abstractmethod
    def acceptance(
        self,
        tokens: Array,
        draft_probs: Any,
        target_probs: Array,
        num_drafted: Array,
        carry: Any = (),
        still_drafting: Array | None = None,
    ) -> Acceptance:
        """Thresholds and scales for one block; arguments as in `specjax.verification.verify`."""

    def stands(self, passes: Array, detail: Any) -> Array:
        """Which tokens stand, given which passed their thresholds; by default these, `[G]` bool.

        Only an algorithm that is not exact may let others stand. `detail` is that of `acceptance`.
        """
        return passes

    def walk(
        self,
        uniforms: Array,
        tokens: Array,
        parents: Array,
        laws: Array | None,
        draft_probs: Any,
        target_probs: Array,
        num_drafted: Array,
        drawn_from: Array | None = None,
    ) -> Path:
        """Verifies a row's tree; called if the drafter's traits set `drafts_trees`.

        Args:
          uniforms: `[G]` float32 in [0, 1), independent.
          tokens: `[G]` int32.
          parents: `[G]` int32; see `DraftBlock`.
          laws: `[G]` int32, or None; see `DraftBlock`.
          draft_probs: `[G + 1, V]` float32, the drafter's distribution after each node; None if no
            token was drawn. With `drawn_from`, any number of rows.
          target_probs: `[G + 1, V]` float32, the rule's target distribution after each node;
            unknown at leaves if the rule reads the drafter.
          num_drafted: int32 scalar, the number of tokens.
          drawn_from: `[G]` int32, see `DraftBlock`; given only if the block has it.
        """
        raise UserError(f"{type(self).__name__} cannot verify trees")

    def check(self, max_draft: int, traits: DraftTraits) -> None:
        """Raises ValueError if the algorithm is not exact for drafts of this kind."""
        return None

    def init_carry(self, max_draft: int) -> Any:
        """The carry before a row's first round."""
        return ()

    def next_carry(
        self,
        acceptance: Acceptance,
        draft_probs: Array,
        num_drafted: Array,
        carry: Any,
        num_accepted: Array,
        next_token: Array,
    ) -> Any:
        """The carry into the next round, once the outcome of `acceptance` is known."""
        return ()
