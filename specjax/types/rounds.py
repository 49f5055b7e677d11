"""The parts of a round: drafters with their stopping policies, rules, and verifications.

Axes: B rows, G longest block, N = G + 1 nodes, V vocabulary, P prompt length, F prefix length,
D a model's width, T committed tokens, U uniforms of a row's block, C slots of a carry.
"""

import abc
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Float32, Int32

from specjax.errors import UserError
from specjax.types.language_model import Axes, Params, Prompts, row_axes
from specjax.types.method import Sampling


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
      tokens: arbitrary past `num_drafted`, but for siblings that a law of `OFF` needs: they stay
        there, with their `parents` or `drawn_from`, if the limit cuts them off.
      probs: `[B, N, V]` float32; row i is the drafter's distribution after node i: in a chain, the
        distribution that `tokens[:, i]` was drawn from. The row at `num_drafted`, the bonus
        position, is filled in only if needed; likewise the rows of a tree's leaves. None if the
        drafter draws nothing (`num_uniforms` is 0): each token is certain, as a copy is.
      confidences: the drafter's confidence distributions.
      num_drafted: at most the row's limit; a round cuts longer blocks.
      calls: model's name -> the number of its passes for the block.
      parents: the node that each token follows, parents before their children; None for a chain.
      laws: the `ChildLaw` of each token of a tree; None for a chain, or if the verification does
        not read it. A draw without mass gives a token that is never accepted.
      sources: the index into `Drafter.source_names` of each token's part; None unless it is
        requested, or of a single part.
      drawn_from: the row of `probs` that each token of a tree was drawn from. Tokens of one row are
        siblings for WITHOUT and OFF. None: the row of the parent. With it, `probs` may have any
        number of rows, and row i need not be the distribution after node i
        (`DraftTraits.has_distributions`).
    """

    tokens: Int32[Array, "B G"]
    probs: Any
    confidences: Float32[Array, "B N V"] | None
    num_drafted: Int32[Array, " B"]
    calls: dict[str, Int32[Array, ""]]
    parents: Int32[Array, "B G"] | None = None
    laws: Int32[Array, "B G"] | None = None
    sources: Int32[Array, "B G"] | None = None
    drawn_from: Int32[Array, "B G"] | None = None


class Bonus(NamedTuple):
    """A drafter's distribution at the position after its block; fields as in `DraftBlock`."""

    probs: Float32[Array, "B V"]
    confidences: Float32[Array, "B V"] | None
    calls: dict[str, Int32[Array, ""]]


class DraftTraits(NamedTuple):
    """Properties of drafting that a verification algorithm may need to know.

    Attributes:
      prefix_only: each draft distribution depends only on the tokens before it, and comes from a
        single drafter (no horizontal cascade, no statistics gathered from earlier rounds).
      fixed_length: every block is as long as its row's limit allows. False is always safe: True
        allows `GreedyBlock`, which is biased if it does not apply.
      independent_rows: if all limits are G, a row's block and the passes that `propose` counts do
        not depend on the other rows. False is always safe; see `Method.independent_rows`.
      catches_up: whether the next draft reads the tokens that an accepted block has left unread,
        without a further pass. Then `bonus` is called only for its distribution, not to fill a
        cache.
      drafts_trees: whether blocks have `parents`.
      reads_verifier_hidden: whether `commit` needs the verifier's hidden states, which are not kept
        otherwise.
      boundaries: which of them, see `LanguageModel.reading`; `prefill` then gets what the verifier
        returned for the prompts, as `verifier`. (): the last.
      draws_bonus: whether `bonus` has a distribution after a block of G tokens. False refuses rules
        that read it.
      processes: whether its distributions are processed (see `specjax.types.Processor`), so that it
        drafts no token that a processor forbids. False is always safe; it must be False if its
        model does not predict all tokens: a processor may leave only the others.
      has_distributions: whether row i of `DraftBlock.probs` is one drafter's distribution after
        node i. False refuses rules that read the drafter.
      predictions: the number of texts in `Prompts.predictions` that it copies from: one that is
        given with a prompt, and earlier answers to the prompt.
    """

    prefix_only: bool = True
    fixed_length: bool = False
    independent_rows: bool = False
    catches_up: bool = False
    drafts_trees: bool = False
    reads_verifier_hidden: bool = False
    processes: bool = False
    has_distributions: bool = True
    boundaries: tuple[int, ...] = ()
    draws_bonus: bool = True
    predictions: int = 0


class DraftInputs(NamedTuple):
    """What a drafter gets to draft a block for each row.

    Attributes:
      tokens: each row's last committed token.
      limits: 0 .. G, the longest block of each row this round.
      uniforms: in [0, 1), independent; U is `Drafter.num_uniforms`.
      sampling: fields `[B]`; the block's probabilities are the distributions tokens are drawn from.
        The drafter may ignore its processors.
      active: the rows that draft or may need a bonus; other rows need nothing, and no pass is made
        only for them.
      with_confidence: whether the rule reads confidences (static).
      with_sources: whether to return `DraftBlock.sources` (static).
      memory: the verifier's, for a drafter that `reads_verifier_hidden`: entries before the last
        committed token are live.
    """

    tokens: Int32[Array, " B"]
    limits: Int32[Array, " B"]
    uniforms: Float32[Array, "B U"]
    sampling: Sampling
    active: Bool[Array, " B"]
    with_confidence: bool = False
    with_sources: bool = False
    memory: Any = None


class DraftModels(Protocol):
    """What a decoder gives to `Drafting.bind`.

    Attributes:
      max_draft: G of drafts that set none, or None if the decoder sets none either.
      min_draft: the decoder's.
      rule: the decoder's.
      eos_ids: the ends of a text.
    """

    max_draft: int | None
    min_draft: int
    rule: "Rule"
    eos_ids: tuple[int, ...]

    def model(self, name: str) -> Any:
        """The `TextModel` of this name.

        None while only the parts of a setting are checked: then networks stay names, and no file is
        read.
        """

    def level(self, place: int, source: Any, **loading: Any) -> tuple[str, Any]:
        """The name of a cascade's model, and the `TextModel` or None as above.

        `source` is its name, a directory, which is read with the options `loading`, or the model.
        """

    def network(self, drafter: Any) -> tuple[Any, Params]:
        """A drafter with the network of `drafter.model`, a name; and the network's parameters.

        While only parts are checked, the drafter itself and ().
        """

    def policy(self, model: Any, own: "Stopping | None") -> "tuple[Stopping, Params]":
        """The stopping policy of a model's drafts, the decoder's unless they have their `own`."""

    def table(self, bigram: Any) -> Params:
        """The parameters of `Lookup` with this `bigram`; () for None."""

    def place(self, params: Params) -> Params:
        """Puts parameters that belong to no model on the verifier's devices."""


class Drafting(Protocol):
    """How drafts are made: a drafter, or what becomes one when it is bound to models."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The models that draft, for counting their passes; none by default."""
        return ()

    @property
    def left_out(self) -> Mapping[str, str]:
        """Option of a decoder that has no effect with these drafts -> why."""
        why = f"drafting={type(self).__name__}(...) sets its own"
        return dict.fromkeys(("max_draft", "min_draft", "stopping"), why)

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts are trees, which the decoder then verifies with `Traversal` by default."""
        return False

    @property
    def weighs_costs(self) -> bool:
        """Whether `drafting.CostAware` can be used, which needs chains of a single model."""
        return False

    @abc.abstractmethod
    def bind(self, models: DraftModels) -> "tuple[Drafter, Params]":
        """The drafter with networks in the place of names, and its parameters."""


class Drafter(Drafting, Protocol):
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
      source_names: the names of the parts that draw its tokens; by default its first model.
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

    def bind(self, models: DraftModels) -> "tuple[Drafter, Params]":
        return self, ()

    @property
    def drafts_trees(self) -> bool:
        return self.traits.drafts_trees

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

        The leading axis of every array in it is the batch.
        """

    @abc.abstractmethod
    def propose(self, params: Params, state: Any, inputs: DraftInputs) -> tuple[DraftBlock, Any]:
        """Drafts a block for each row, and returns it with the new state."""

    @abc.abstractmethod
    def bonus(
        self, params: Params, state: Any, inputs: DraftInputs, block: DraftBlock
    ) -> tuple[Bonus, Any]:
        """The distribution after each row's last token, which is drafted or the last committed one.

        The state that it gives is complete if the whole block is accepted.

        Args:
          inputs: those of `propose`, but for `sampling`: that of the token after the block.
          block: what `propose` returned; of a tree, the accepted path as a chain.
        """

    def commit(
        self,
        state: Any,
        tokens: Int32[Array, "B T"],
        counts: Int32[Array, " B"],
        hidden: Float[Array, "B T D"] | None = None,
    ) -> Any:
        """Takes the committed tokens; all other drafted tokens are rolled back.

        Args:
          state: its state after `propose` or `bonus`.
          tokens: the first `counts[b]` of row b are committed. They may be fewer than were
            accepted, and may differ from the drafter's tokens.
          counts: 0 leaves a row unchanged since before the round.
          hidden: the verifier's states that predicted `tokens`; or None, see `traits`.
        """
        return state

    def mark(self, state: Any) -> Any:
        """A mark for `rewind`, in case a level above rejects tokens that were committed here.

        The leading axis of its arrays is the batch. By default it is the state itself, which is
        always right; a drafter with a cache leaves out the cache.
        """
        return state

    def rewind(self, state: Any, mark: Any) -> Any:
        """The state at a mark; a `commit` of other tokens follows.

        It may keep entries of the newest `state` that are overwritten before they are seen.
        """
        return mark

    def draft_limits(
        self, params: Params, state: Any, limits: Int32[Array, " B"]
    ) -> Int32[Array, " B"]:
        """The most tokens that each row drafts, decided before anything is drafted.

        `limits`, in 0 .. G, are the allowed lengths. `propose` gets them too; a row with 0 here is
        not `active` there, unless it may need a bonus.
        """
        return limits

    def check_within(self, before: int) -> None:
        """Raises UserError unless its drafts can be taken back together with `before` tokens."""
        return

    def state_axes(self, state: Any) -> Axes:
        """The logical axis names of the state; by default only the rows are spread."""
        return row_axes(state)


class DraftOutcome(NamedTuple):
    """The outcome of the rows' last drafts.

    Attributes:
      drafted: the number of drafted tokens.
      agreed: the number of drafted tokens that were committed.
      rejected: whether the next drafted token was replaced by another one. False if the row's
        output ended before it.
      lags: whether the drafter reads the last token of a draft that is accepted whole in a pass of
        its own.
    """

    drafted: Int32[Array, " B"]
    agreed: Int32[Array, " B"]
    rejected: Bool[Array, " B"]
    lags: bool = True


class Drawn(NamedTuple):
    """The token that each row has just drawn, for a stopping policy.

    Attributes:
      probs: the distribution it was drawn from: one-hot at temperature 0.
      confidences: `[B, V]` float32, the drafter's softmax at temperature 1, unfiltered; None
        unless `reads_confidence`.
      hidden: the drafter's last hidden state of the token before it.
      place: the number of tokens drafted before it.
    """

    token: Int32[Array, " B"]
    probs: Float32[Array, "B V"]
    confidences: Any
    hidden: Float[Array, "B D"]
    place: Int32[Array, ""]


class Stopping(Protocol):
    """Decides when a row's draft ends; static and hashable, arrays in `params` and the state.

    Derive your own policy from this class and define `step`; the rest has defaults.

    The decision after token i may depend on the tokens up to i, on what was known with them, and on
    earlier rounds, never on a later token: then verification stays exact. The token just drawn is
    always kept.

    Attributes:
      is_fixed: whether it never stops a draft before its longest length; False by default.
      reads_confidence: whether `step` reads the confidence distributions, which are None otherwise;
        False by default.
      reads_past: whether it keeps a memory of earlier rounds; False by default.
    """

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
        `head` is the drafter's acceptance head, or None if it has none.
        """
        return self, ()

    def remember(self, params: Params, rows: int, longest: int) -> Any:
        """The memory of rows that have drafted nothing yet; see `reads_past`.

        The leading axis of its arrays is the batch; `longest` is G.
        """
        return ()

    def init(self, rows: int) -> Any:
        """The state before a draft's first token, for a policy that does not define `begin`."""
        return ()

    def begin(
        self, params: Params, memory: Any, limits: Int32[Array, " B"], longest: int
    ) -> tuple[Int32[Array, " B"], Any]:
        """The most tokens that each row drafts in a round, and the policy's state.

        By default `limits` and the result of `init`.

        Args:
          params: the policy's own parameters.
          memory: the memory of earlier rounds.
          limits: in 0 .. G; 0 in rows that do not draft. The result is cut to it.
          longest: G.
        """
        return limits, self.init(limits.shape[0])

    @abc.abstractmethod
    def step(self, params: Params, state: Any, drawn: Drawn) -> tuple[Bool[Array, " B"], Any]:
        """Whether each row's draft ends with the token just drawn, and the new state."""

    def learn(self, memory: Any, state: Any, outcome: DraftOutcome) -> Any:
        """Updates the memory by the outcome of the drafts; called if `reads_past`.

        `state` is the policy's at the end of the drafts. Rows without committed tokens keep their
        memory, whatever is returned.
        """
        return memory


class Rule(Protocol):
    """A target distribution pi = T(q, p): a pytree whose leaves are its strengths.

    `specjax.types.traced_dataclass` makes such a pytree of a class with fields.

    Attributes:
      reads_draft: whether pi depends on the drafter. If it does, the drafter also gives its
        distribution at the bonus position (only `Lossless` does without).
      reads_draft_confidence: whether pi depends on q_conf (drafters must then have it).
      reads_verifier_confidence: whether pi depends on p_conf.

    A rule whose pi depends on earlier positions of its row has a carry, as `rules.Budgeted` has:
    `init_carry()` at the start, which reads no strength, and `targets(carry, q, p, q_conf,
    p_conf)`, which returns pi at successive positions and the carries after 0 .. N of them.
    """

    reads_draft: ClassVar[bool]
    reads_draft_confidence: ClassVar[bool]
    reads_verifier_confidence: ClassVar[bool]

    def __call__(
        self,
        q: Float32[Array, " V"],
        p: Float32[Array, " V"],
        q_conf: Float32[Array, " V"] | None = None,
        p_conf: Float32[Array, " V"] | None = None,
    ) -> Float32[Array, " V"]:
        """The target distribution pi at one position: not negative, and its sum is 1.

        Args:
          q: the drafter's distribution.
          p: the verifier's distribution.
          q_conf: the drafter's confidence; may be None if it is not read.
          p_conf: the verifier's confidence; may be None if it is not read.
        """


class ScoredBlock(NamedTuple):
    """One row's drafted block with the target distributions; for fields of trees see `DraftBlock`.

    Attributes:
      tokens: entries past `num_drafted` are ignored.
      draft_probs: row i is the exact distribution that `tokens[i]` was drawn from. Only an
        algorithm with a carry reads row `num_drafted` (the bonus position). None if the tokens are
        certain. With `drawn_from` it may have any number of rows.
      target_probs: the rule's target distribution after each node; unknown at the leaves of a tree
        if the rule reads the drafter.
      num_drafted: at most G. It may be a stopping time of the draft, but for an algorithm with a
        carry drafts have a fixed length.
      parents: None for a chain.
    """

    tokens: Int32[Array, " G"]
    draft_probs: Float32[Array, "N V"] | None
    target_probs: Float32[Array, "N V"]
    num_drafted: Int32[Array, ""]
    parents: Int32[Array, " G"] | None = None
    laws: Int32[Array, " G"] | None = None
    drawn_from: Int32[Array, " G"] | None = None


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
      has_carry: whether a round's carry changes the targets of later rounds. Then drafts must have
        a fixed length, and the drafter's distribution is needed at the bonus position whatever the
        rule.
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
