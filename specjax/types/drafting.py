"""What a drafter is, and what decides when its draft ends.

Axes: B rows, G longest block, V vocabulary, D drafter's width, T committed tokens.
"""

import abc
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from specjax.types.drawing import Sampling
from specjax.types.language_model import Array, Axes, Params, row_axes


class DraftBlock(NamedTuple):
    """A drafted block for each row, padded to G tokens.

    A block is a tree, whose node 0 is the last committed token and whose node i + 1 is
    `tokens[:, i]`. Most are chains, in which each token follows the one before it.

    Attributes:
      tokens: `[B, G]` int32; past `num_drafted` anything.
      probs: `[B, G + 1, V]` float32; row i is what the drafter would draw after node i: in a chain,
        what `tokens[:, i]` was drawn from. The row at `num_drafted`, the bonus position, is filled
        in only where it is asked for; so are the rows of a tree's leaves.
      confidences: `[B, G + 1, V]` float32, the drafter's confidence distributions, or None.
      num_drafted: `[B]` int32, at most the row's limit; a round cuts off what is longer.
      calls: model's name -> int32 scalar, how many passes of it made the block.
      parents: `[B, G]` int32, the node that each token follows, parents before their children;
        None for a chain.
    """

    tokens: Array  # [B, G]
    probs: Array  # [B, G + 1, V]
    confidences: Array | None  # [B, G + 1, V]
    num_drafted: Array  # [B]
    calls: dict[str, Array]
    parents: Array | None = None  # [B, G]


class Bonus(NamedTuple):
    """What a drafter says of the position after its block.

    Attributes:
      probs: `[B, V]` float32, the distribution there.
      confidences: `[B, V]` float32, its confidence, or None.
      calls: model's name -> int32 scalar, how many passes it took.
    """

    probs: Array  # [B, V]
    confidences: Array | None  # [B, V]
    calls: dict[str, Array]


class DraftTraits(NamedTuple):
    """What a verification algorithm may have to know of the way blocks are drafted.

    Attributes:
      prefix_only: each draft distribution depends on the tokens before it alone, and on one drafter
        (no horizontal cascade, no statistics gathered from earlier rounds).
      random_stops: whether the decision to stop a draft uses randomness of its own.
      fixed_length: every block is as long as its row's limit allows. False is always safe: True
        lets `GreedyBlock` in, which is biased where it is not so.
      independent_rows: where all limits are G, a row's block and the passes that `propose` counts
        do not depend on the other rows. False is always safe; see `Method.independent_rows`.
      catches_up: whether the next draft reads what a block that stands has left unread, at no
        further pass. Then `bonus` is called for its distribution alone, not to fill a cache.
      drafts_trees: whether blocks have `parents`.
      reads_verifier_hidden: whether `commit` is to be given the verifier's hidden states, which are
        not kept otherwise.
    """

    prefix_only: bool = True
    random_stops: bool = False
    fixed_length: bool = False
    independent_rows: bool = False
    catches_up: bool = False
    drafts_trees: bool = False
    reads_verifier_hidden: bool = False


class Drafter(Protocol):
    """Proposes blocks of tokens; static and hashable, arrays in `params` and the state.

    A drafter of your own derives from this class; what has a default may be left out.

    A drafter is told what was committed, and may lag: a row that drafts nothing for some rounds is
    still committed to, and the drafter reads those tokens when the row drafts again.

    Attributes:
      max_draft: G, the longest block.
      vocab_size: V.
      num_uniforms: how many uniforms a row's block takes; 0 by default.
      has_confidence: whether there is a confidence distribution (a statistical drafter has none);
        False by default.
      traits: what verification algorithms may have to know; `DraftTraits()` by default.
      model_names: the names of its models, under which their passes are counted; none by default.
    """

    # For the type checker alone: a field of a dataclass may take their places.
    if TYPE_CHECKING:

        @property
        def max_draft(self) -> int:
            """G."""

        @property
        def vocab_size(self) -> int:
            """V."""

    @property
    def num_uniforms(self) -> int:
        """See above."""
        return 0

    @property
    def has_confidence(self) -> bool:
        """See above."""
        return False

    @property
    def traits(self) -> DraftTraits:
        """See above."""
        return DraftTraits()

    @property
    def model_names(self) -> tuple[str, ...]:
        """See above."""
        return ()

    def describe(self) -> Any:
        """What determines its drafts besides its parameters, as JSON values."""
        return repr(self)

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """Counts the cache positions of each prompt; see `LanguageModel.prompt_positions`."""
        return 0 * input_lengths

    @abc.abstractmethod
    def prefill(
        self,
        params: Params,
        inputs: Array,
        input_lengths: Array,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> Any:
        """Takes prompts in (see `LanguageModel.prefill`).

        Returns:
          The drafter's state; the leading axis of every array in it is the batch.
        """

    @abc.abstractmethod
    def propose(
        self,
        params: Params,
        state: Any,
        tokens: Array,
        limits: Array,
        uniforms: Array,
        sampling: Sampling,
        active: Array,
        *,
        with_confidence: bool,
    ) -> tuple[DraftBlock, Any]:
        """Drafts one block for each row.

        Args:
          params: the drafter's parameters.
          state: its state.
          tokens: `[B]` int32, each row's last committed token.
          limits: `[B]` int32 in 0 .. G, the longest block of each row this round.
          uniforms: `[B, num_uniforms]` float32 in [0, 1), independent.
          sampling: fields `[B]`; the block's probabilities are what tokens are drawn from. Whether
            it also draws by a processor's logits is the drafter's choice.
          active: `[B]` bool, the rows that draft or may be asked for a bonus; others need nothing,
            and no pass is made for them alone.
          with_confidence: whether the rule reads confidences (static).

        Returns:
          The block and the new state.
        """

    @abc.abstractmethod
    def bonus(
        self,
        params: Params,
        state: Any,
        tokens: Array,
        block: DraftBlock,
        sampling: Sampling,
        *,
        with_confidence: bool,
    ) -> tuple[Bonus, Any]:
        """Says what follows each row's last drafted token (its last committed one if none is).

        Args:
          params: the drafter's parameters.
          state: its state after `propose`.
          tokens: `[B]` int32, each row's last committed token, as given to `propose`.
          block: what `propose` returned; of a tree, the accepted path as a chain.
          sampling: fields `[B]`, for the token after the block.
          with_confidence: whether the rule reads confidences (static).

        Returns:
          The distributions, and the state, which then lacks nothing if the block is accepted.
        """

    def commit(self, state: Any, tokens: Array, counts: Array, hidden: Array | None = None) -> Any:
        """Takes note of what was committed; whatever else was drafted is rolled back.

        Args:
          state: its state after `propose` or `bonus`.
          tokens: `[B, T]` int32; the first `counts[b]` of row b are committed. They may be fewer
            than were accepted, and need not be the drafter's own.
          counts: `[B]` int32; 0 leaves a row where it was before the round.
          hidden: `[B, T, D]`, the verifier's hidden states from which it said what `tokens` may
            be; given where the traits say `reads_verifier_hidden`.

        Returns:
          The state for the next round.
        """
        return state

    def mark(self, state: Any) -> Any:
        """What `rewind` needs to come back, if a level above refuses what was told as committed.

        Returns:
          A pytree; the leading axis of its arrays is the batch. By default the state itself, which
          is always right; a drafter with a cache leaves the cache out.
        """
        return state

    def rewind(self, state: Any, mark: Any) -> Any:
        """Takes back what was committed since a mark; a `commit` of something else follows.

        Returns:
          A state as it was at the mark, by default the mark itself. Of the newest `state` it may
          keep what is overwritten before it is seen.
        """
        return mark

    def draft_limits(self, params: Params, state: Any, limits: Array) -> Array:
        """How many tokens each row is to draft at most, before anything is drafted.

        Args:
          params: the drafter's parameters.
          state: its state.
          limits: `[B]` int32 in 0 .. G, what is allowed.

        Returns:
          `[B]` int32, by default those allowed. `propose` is given those allowed too; a row with 0
          here is not `active` there, unless it may be asked for a bonus.
        """
        return limits

    def state_axes(self, state: Any) -> Axes:
        """The logical axis names of the state; by default only the rows are spread."""
        return row_axes(state)


class DraftOutcome(NamedTuple):
    """What became of the rows' last drafts.

    Attributes:
      drafted: `[B]` int32, how many tokens were drafted; 0 where a row drafted nothing.
      agreed: `[B]` int32, how many of them were committed as they were drafted.
      rejected: `[B]` bool, whether another token was committed in the place of the next one. False
        too where the row's output ended before it.
    """

    drafted: Array  # [B]
    agreed: Array  # [B]
    rejected: Array  # [B]


class Drawn(NamedTuple):
    """What a stopping policy sees of the token that each row has just drawn.

    Attributes:
      token: `[B]` int32, the token.
      probs: `[B, V]` float32, what it was drawn from: one-hot at temperature 0.
      confidences: `[B, V]` float32, the drafter's softmax at temperature 1, unfiltered; None
        unless `reads_confidence`.
      hidden: `[B, D]`, the drafter's last hidden state of the token before it.
      place: int32 scalar, how many tokens were drafted before it.
    """

    token: Array  # [B]
    probs: Array  # [B, V]
    confidences: Any  # [B, V]
    hidden: Array  # [B, D]
    place: Array  # []


class Stopping(Protocol):
    """Decides when a row's draft ends; static and hashable, arrays in `params` and the state.

    A policy of your own derives from this class and defines `step`; the rest has defaults.

    The decision after token i may look at the tokens up to i and what was known with them, and at
    earlier rounds, never at a later token: then verification stays exact. The token just drawn is
    always kept.

    Attributes:
      is_random: whether it uses randomness of its own; False by default.
      is_fixed: whether it never stops a draft before its longest length; False by default.
      reads_confidence: whether `step` reads the confidence distributions, which are None otherwise;
        False by default.
      reads_past: whether it keeps a memory of earlier rounds; False by default.
    """

    @property
    def is_random(self) -> bool:
        """See above."""
        return False

    @property
    def is_fixed(self) -> bool:
        """See above."""
        return False

    @property
    def reads_confidence(self) -> bool:
        """See above."""
        return False

    @property
    def reads_past(self) -> bool:
        """See above."""
        return False

    def bind(self, head: Any = None) -> "tuple[Stopping, Params]":
        """Takes the policy apart: its static part, and its numbers, which are traced.

        Another number then compiles nothing. By default the policy itself and no parameters.

        Args:
          head: the drafter's acceptance head, or None if it has none.

        Raises:
          ValueError: if the policy needs a head and there is none.
        """
        return self, ()

    def remember(self, params: Params, rows: int, longest: int) -> Any:
        """The memory of rows that have drafted nothing yet; see `reads_past`.

        Args:
          params: the policy's own parameters.
          rows: B.
          longest: G.

        Returns:
          A pytree; the leading axis of its arrays is the batch.
        """
        return ()

    def init(self, rows: int) -> Any:
        """The state before a draft's first token, of a policy that leaves `begin` as it is."""
        return ()

    def begin(self, params: Params, memory: Any, limits: Array, longest: int) -> tuple[Array, Any]:
        """Says how much a round may draft, before its first token.

        Args:
          params: the policy's own parameters.
          memory: what is known of earlier rounds.
          limits: `[B]` int32 in 0 .. G, what each row may draft; 0 in rows that take no part.
          longest: G.

        Returns:
          `[B]` int32, what each row is to draft at most (what exceeds `limits` is cut off), and the
          policy's state; the leading axis of its arrays is the batch. By default `limits` and what
          `init` gives.
        """
        return limits, self.init(limits.shape[0])

    @abc.abstractmethod
    def step(self, params: Params, state: Any, drawn: Drawn) -> tuple[Array, Any]:
        """Says whether each row's draft ends with the token just drawn.

        Args:
          params: the policy's own parameters.
          state: its state.
          drawn: the token just drawn.

        Returns:
          `[B]` bool, and the new state.
        """

    def learn(self, memory: Any, state: Any, outcome: DraftOutcome) -> Any:
        """Takes note of what became of the drafts; called where `reads_past`.

        Rows to which nothing was committed keep their memory, whatever is returned.

        Args:
          memory: what is known of earlier rounds.
          state: the policy's state at the end of the drafts.
          outcome: what became of them.

        Returns:
          The new memory.
        """
        return memory
