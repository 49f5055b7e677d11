"""The interfaces of drafters and of stopping policies.

Axes: B rows, G longest block, V vocabulary, D drafter's width, T committed tokens.
"""

import abc
import enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from specjax.types.drawing import Sampling
from specjax.types.language_model import Array, Axes, Params, Prompts, row_axes


class ChildLaw(enum.IntEnum):
    """How a token of a tree was drawn, given its elder siblings: those before it in the block.

    Attributes:
      TOP: not drawn: it follows from the text before it and from its elder siblings.
      DRAWN: from the distribution after its parent; equal siblings may occur. Of several drafters,
        from that of its own drafter (see `DraftBlock.drawn_from`).
      WITHOUT: the same without its elder siblings of the same drafter.
      OFF: the same without all its siblings of the same drafter, which are known before the draw.

    Source: Sequoia (arXiv 2402.12374) for WITHOUT. OFF, for a first child that is drawn beside the
    most probable tokens, has the largest acceptance of these.
    """

    TOP = 0
    DRAWN = 1
    WITHOUT = 2
    OFF = 3


class DraftBlock(NamedTuple):
    """A drafted block for each row, padded to G tokens.

    A block is a tree: node 0 is the last committed token, and node i + 1 is `tokens[:, i]`. Most
    blocks are chains, in which each token follows the token before.

    Attributes:
      tokens: `[B, G]` int32; arbitrary past `num_drafted`, but for siblings that a law of `OFF`
        needs: they stay there, with their `parents` or `drawn_from`, if the limit cuts them off.
      probs: `[B, G + 1, V]` float32; row i is the drafter's distribution after node i: in a chain,
        the distribution that `tokens[:, i]` was drawn from. The row at `num_drafted`, the bonus
        position, is filled in only if needed; likewise the rows of a tree's leaves. None if the
        drafter draws nothing (`num_uniforms` is 0): each token is certain, as a copy is.
      confidences: `[B, G + 1, V]` float32, the drafter's confidence distributions, or None.
      num_drafted: `[B]` int32, at most the row's limit; a round cuts longer blocks.
      calls: model's name -> int32 scalar, the number of its passes for the block.
      parents: `[B, G]` int32, the node that each token follows, parents before their children;
        None for a chain.
      laws: `[B, G]` int32, the `ChildLaw` of each token of a tree; None for a chain, or if the
        verification does not read it. A draw without mass gives a token that is never accepted.
      sources: `[B, G]` int32, the index into `Drafter.source_names` of each token's part; None
        unless it is requested, or of a single part.
      drawn_from: `[B, G]` int32, the row of `probs` that each token of a tree was drawn from.
        Tokens of one row are siblings for WITHOUT and OFF. None: the row of the parent. With it,
        `probs` may have any number of rows, and row i need not be the distribution after node i
        (`DraftTraits.has_distributions`).
    """

    tokens: Array  # [B, G]
    probs: Any  # [B, G + 1, V], or None
    confidences: Array | None  # [B, G + 1, V]
    num_drafted: Array  # [B]
    calls: dict[str, Array]
    parents: Array | None = None  # [B, G]
    laws: Array | None = None  # [B, G]
    sources: Array | None = None  # [B, G]
    drawn_from: Array | None = None  # [B, G]


class Bonus(NamedTuple):
    """A drafter's distribution at the position after its block.

    Attributes:
      probs: `[B, V]` float32, the distribution there.
      confidences: `[B, V]` float32, its confidence, or None.
      calls: model's name -> int32 scalar, the number of its passes.
    """

    probs: Array  # [B, V]
    confidences: Array | None  # [B, V]
    calls: dict[str, Array]


class DraftTraits(NamedTuple):
    """Properties of drafting that a verification algorithm may need to know.

    Attributes:
      prefix_only: each draft distribution depends only on the tokens before it, and comes from a
        single drafter (no horizontal cascade, no statistics gathered from earlier rounds).
      random_stops: whether the decision to stop a draft uses extra randomness.
      fixed_length: every block is as long as its row's limit allows. False is always safe: True
        allows `GreedyBlock`, which is biased if it does not apply.
      independent_rows: if all limits are G, a row's block and the passes that `propose` counts do
        not depend on the other rows. False is always safe; see `Method.independent_rows`.
      catches_up: whether the next draft reads the tokens that an accepted block has left unread,
        without a further pass. Then `bonus` is called only for its distribution, not to fill a
        cache.
      drafts_trees: whether blocks have `parents`.
      independent_children: whether the children of a node are drawn independently of each other,
        their number fixed before.
      independent_paths: whether a tree consists of independent paths of the same length.
      reads_verifier_hidden: whether `commit` needs the verifier's hidden states, which are not kept
        otherwise.
      processes: whether its distributions are processed (see `specjax.types.Processor`), so that it
        drafts no token that a processor forbids. False is always safe.
      has_distributions: whether row i of `DraftBlock.probs` is one drafter's distribution after
        node i. False refuses rules that read the drafter.
    """

    prefix_only: bool = True
    random_stops: bool = False
    fixed_length: bool = False
    independent_rows: bool = False
    catches_up: bool = False
    drafts_trees: bool = False
    independent_children: bool = False
    independent_paths: bool = False
    reads_verifier_hidden: bool = False
    processes: bool = False
    has_distributions: bool = True


class Drafter(Protocol):
    """Proposes blocks of tokens; static and hashable, arrays in `params` and the state.

    Derive your own drafter from this class; methods with a default may be left out.

    A drafter gets the committed tokens, and may lag: a row that drafts nothing for some rounds
    still commits tokens, and the drafter reads them when the row drafts again.

    Attributes:
      max_draft: G, the longest block.
      vocab_size: V.
      num_uniforms: the number of uniforms per block of a row; 0 by default.
      has_confidence: whether there is a confidence distribution (a statistical drafter has none);
        False by default.
      traits: see `DraftTraits`; `DraftTraits()` by default.
      model_names: the names of its models, for counting their passes; none by default.
      source_names: the names of the parts that draw its tokens; by default its first model. With
        several names `propose` takes an argument `with_sources`, which requests
        `DraftBlock.sources`.
    """

    # Only for the type checker: fields of a dataclass may replace them.
    if TYPE_CHECKING:

        @property
        def max_draft(self) -> int:
            """G."""

        @property
        def vocab_size(self) -> int:
            """V."""

    @property
    def num_uniforms(self) -> int:
        return 0

    @property
    def has_confidence(self) -> bool:
        return False

    @property
    def traits(self) -> DraftTraits:
        return DraftTraits()

    @property
    def model_names(self) -> tuple[str, ...]:
        return ()

    @property
    def source_names(self) -> tuple[str, ...]:
        return self.model_names[:1] or ("drafter",)

    def describe(self) -> Any:
        """The settings that determine its drafts besides its parameters, as JSON values."""
        return repr(self)

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """Counts the cache positions of each prompt; see `LanguageModel.prompt_positions`."""
        return 0 * input_lengths

    @abc.abstractmethod
    def prefill(self, params: Params, prompts: Prompts, max_length: int) -> Any:
        """Reads prompts (see `LanguageModel.prefill`).

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
        """Drafts a block for each row.

        Args:
          params: the drafter's parameters.
          state: its state.
          tokens: `[B]` int32, each row's last committed token.
          limits: `[B]` int32 in 0 .. G, the longest block of each row this round.
          uniforms: `[B, num_uniforms]` float32 in [0, 1), independent.
          sampling: fields `[B]`; the block's probabilities are the distributions tokens are drawn
            from. The drafter may ignore its processors.
          active: `[B]` bool, the rows that draft or may need a bonus; other rows need nothing, and
            no pass is made only for them.
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
        """The distribution after each row's last token, which is drafted or the last committed one.

        Args:
          params: the drafter's parameters.
          state: its state after `propose`.
          tokens: `[B]` int32, each row's last committed token, as given to `propose`.
          block: what `propose` returned; of a tree, the accepted path as a chain.
          sampling: fields `[B]`, for the token after the block.
          with_confidence: whether the rule reads confidences (static).

        Returns:
          The distributions, and the state, which is complete if the whole block is accepted.
        """

    def commit(self, state: Any, tokens: Array, counts: Array, hidden: Array | None = None) -> Any:
        """Takes the committed tokens; all other drafted tokens are rolled back.

        Args:
          state: its state after `propose` or `bonus`.
          tokens: `[B, T]` int32; the first `counts[b]` of row b are committed. They may be fewer
            than were accepted, and may differ from the drafter's tokens.
          counts: `[B]` int32; 0 leaves a row unchanged since before the round.
          hidden: `[B, T, D]`, the verifier's states that predicted `tokens`; or None, see `traits`.

        Returns:
          The state for the next round.
        """
        return state

    def mark(self, state: Any) -> Any:
        """A mark for `rewind`, in case a level above rejects tokens that were committed here.

        Returns:
          A pytree; the leading axis of its arrays is the batch. By default the state itself, which
          is always right; a drafter with a cache leaves out the cache.
        """
        return state

    def rewind(self, state: Any, mark: Any) -> Any:
        """Takes back the tokens committed since a mark; a `commit` of other tokens follows.

        Returns:
          The state at the mark, by default the mark itself. It may keep entries of the newest
          `state` that are overwritten before they are seen.
        """
        return mark

    def draft_limits(self, params: Params, state: Any, limits: Array) -> Array:
        """The most tokens that each row drafts, decided before anything is drafted.

        Args:
          params: the drafter's parameters.
          state: its state.
          limits: `[B]` int32 in 0 .. G, the allowed lengths.

        Returns:
          `[B]` int32, by default `limits`. `propose` gets `limits` too; a row with 0 here is not
          `active` there, unless it may need a bonus.
        """
        return limits

    def state_axes(self, state: Any) -> Axes:
        """The logical axis names of the state; by default only the rows are spread."""
        return row_axes(state)


class DraftOutcome(NamedTuple):
    """The outcome of the rows' last drafts.

    Attributes:
      drafted: `[B]` int32, the number of drafted tokens.
      agreed: `[B]` int32, the number of drafted tokens that were committed.
      rejected: `[B]` bool, whether the next drafted token was replaced by another one. False if the
        row's output ended before it.
    """

    drafted: Array  # [B]
    agreed: Array  # [B]
    rejected: Array  # [B]


class Drawn(NamedTuple):
    """The token that each row has just drawn, for a stopping policy.

    Attributes:
      token: `[B]` int32, the token.
      probs: `[B, V]` float32, the distribution it was drawn from: one-hot at temperature 0.
      confidences: `[B, V]` float32, the drafter's softmax at temperature 1, unfiltered; None
        unless `reads_confidence`.
      hidden: `[B, D]`, the drafter's last hidden state of the token before it.
      place: int32 scalar, the number of tokens drafted before it.
    """

    token: Array  # [B]
    probs: Array  # [B, V]
    confidences: Any  # [B, V]
    hidden: Array  # [B, D]
    place: Array  # []


class Stopping(Protocol):
    """Decides when a row's draft ends; static and hashable, arrays in `params` and the state.

    Derive your own policy from this class and define `step`; the rest has defaults.

    The decision after token i may depend on the tokens up to i, on what was known with them, and on
    earlier rounds, never on a later token: then verification stays exact. The token just drawn is
    always kept.

    Attributes:
      is_random: whether it uses extra randomness; False by default.
      is_fixed: whether it never stops a draft before its longest length; False by default.
      reads_confidence: whether `step` reads the confidence distributions, which are None otherwise;
        False by default.
      reads_past: whether it keeps a memory of earlier rounds; False by default.
    """

    @property
    def is_random(self) -> bool:
        return False

    @property
    def is_fixed(self) -> bool:
        return False

    @property
    def reads_confidence(self) -> bool:
        return False

    @property
    def reads_past(self) -> bool:
        return False

    def bind(self, head: Any = None) -> "tuple[Stopping, Params]":
        """Splits the policy: a static part, and its numbers, which are traced.

        Changing a number then compiles nothing. By default the policy itself and no parameters.

        Args:
          head: the drafter's acceptance head, or None if it has none.

        Raises:
          ValueError: if the policy needs a head but has none.
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
        """The state before a draft's first token, for a policy that does not define `begin`."""
        return ()

    def begin(self, params: Params, memory: Any, limits: Array, longest: int) -> tuple[Array, Any]:
        """Limits the drafts of a round, before the first token.

        Args:
          params: the policy's own parameters.
          memory: the memory of earlier rounds.
          limits: `[B]` int32 in 0 .. G, the most tokens of each row; 0 in rows that do not draft.
          longest: G.

        Returns:
          `[B]` int32, the most tokens each row drafts (cut to `limits`), and the policy's state;
          the leading axis of its arrays is the batch. By default `limits` and the result of `init`.
        """
        return limits, self.init(limits.shape[0])

    @abc.abstractmethod
    def step(self, params: Params, state: Any, drawn: Drawn) -> tuple[Array, Any]:
        """Decides whether each row's draft ends with the token just drawn.

        Args:
          params: the policy's own parameters.
          state: its state.
          drawn: the token just drawn.

        Returns:
          `[B]` bool, and the new state.
        """

    def learn(self, memory: Any, state: Any, outcome: DraftOutcome) -> Any:
        """Updates the memory by the outcome of the drafts; called if `reads_past`.

        Rows without committed tokens keep their memory, whatever is returned.

        Args:
          memory: the memory of earlier rounds.
          state: the policy's state at the end of the drafts.
          outcome: their outcome.

        Returns:
          The new memory.
        """
        return memory
