"""A method's inputs, its state and statistics, and how the tokens of its rows are drawn.

Axes: B rows, P prompt length, F prefix length, N longest output, G longest draft block,
L = G + 1 lengths of a block, S states of an automaton, V vocabulary.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int8, Int32, Key

from specjax.checks import check_number, check_part, options_of
from specjax.errors import UserError
from specjax.types.language_model import Params, Prompts
from specjax.types.pytrees import traced_dataclass, without_host

_LARGEST = float(jnp.finfo(jnp.float32).max)


def _in_program(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def on_the_device(self: Any, *args: Any, **options: Any) -> Any:
        return method(without_host(self), *args, **options)

    return on_the_device


class Processor(Protocol):
    """Changes the distribution that tokens are drawn from; a pytree.

    Its leaves are its strengths: numbers, or `[B]` a number per row. Everything else about it is
    static and hashable, or of the host: data such as token ids, which `bind` turns into arrays, so
    that other ids compile nothing. Derive your own from this class and decorate it with
    `types.traced_dataclass`; `init`, `advance` and `bind` may be left out.

    Its state follows the tokens of each row. It advances token by token along a drafted block, and
    returns to the last committed token. So the change may depend on all earlier tokens in any way,
    and the output follows the processed distributions exactly. Confidences do not see it.

    Attributes:
      order: processors run in the order of this number, those of one number as they are given.
        Below 100 `process` gets the model's logits, before temperature, top-k and top-p; from 100
        on the logarithms of what these leave, in rows that are not greedy.
      forbids: whether it may set entries to -inf. If it would leave a row no token, it is left out
        at this position. If False, entries below -1e37 are raised to it (with an order below 100).
    """

    order: ClassVar[int] = 0
    forbids: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in {"init", "process", "advance"} & {*vars(cls)}:
            setattr(cls, name, _in_program(getattr(cls, name)))

    def bind(self, model: Any) -> tuple["Processor", Params]:
        """The processor for the verifier, a `specjax.TextModel`, and the `params` of `process`.

        Raises:
          UserError: it does not fit the model, as an unknown token does not.
        """
        return self, ()

    def init(self, params: Params, prompts: "PromptBatch", vocab_size: int, room: int) -> Any:
        """The state after the prompts; the leading axis of its arrays is the batch.

        `room` is the most tokens that follow a prompt, those of a draft past its end included.
        """
        return ()

    def check_limit(self, limit: int) -> None:
        """Raises UserError if a row of at most `limit` new tokens is too short for it.

        It is called for each request. The strengths are then those of the request: numbers.
        """
        return None

    @abc.abstractmethod
    def process(
        self, params: Params, state: Any, logits: Float32[Array, "B V"]
    ) -> Float32[Array, "B V"]:
        """The changed logits; those of a token that must not follow are -inf."""

    def advance(self, params: Params, state: Any, tokens: Int32[Array, " B"]) -> Any:
        """The state after one more token of each row."""
        return state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Processing:
    """The processors at their place in the rows' texts; see `Sampling.processors`.

    Attributes:
      params: for each processor the arrays that rows share: None except while a method steps.
      state: for each processor its state after the committed, or drafted, tokens.
    """

    params: Params
    state: Any


@options_of("Sampling")
@traced_dataclass
class Sampling:
    """How tokens are drawn. Each value is a number, or an array with a number per row.

    A field that is None is left out of the compiled program, so an unfiltered run computes no
    threshold.

    Attributes:
      temperature: >= 0, finite; logits are divided by it. 0: greedy, one-hot at the first argmax.
      top_k: >= 1, or None; only the k largest logits stay, with all ties of the k-th.
      top_p: in (0, 1], or None; a token stays if the tokens strictly more probable than it (after
        temperature and top-k) have less than this mass, so all ties at the edge stay.
      processors: further changes, a tuple of `specjax.processors`; None: there is none.
      processing: their states, which a method sets; the functions of `specjax.processing` read it.
    """

    temperature: jax.Array | float = 1.0
    top_k: jax.Array | int | None = None
    top_p: jax.Array | float | None = None
    processors: tuple[Any, ...] | None = None
    processing: Processing | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(
            self,
            "temperature",
            check_number("temperature", self.temperature, low=0.0, high=_LARGEST),
        )
        if self.top_k is not None:
            put(self, "top_k", check_number("top_k", self.top_k, low=1, dtype=jnp.int32))
        if self.top_p is not None:
            put(self, "top_p", check_number("top_p", self.top_p, low=0.0, high=1.0, open_low=True))
        if self.processors is None:
            return
        if not isinstance(self.processors, tuple | list):
            raise UserError(
                "processors must be a tuple such as (processors.MinP(0.05),), got "
                f"{self.processors!r}"
            )
        needed = ("process", "init", "order")
        for i, one in enumerate(self.processors):
            check_part(f"processors[{i}]", one, needed, "processors.MinP(0.05)")
        put(self, "processors", tuple(sorted(self.processors, key=lambda one: one.order)) or None)


# Why a row ended: the codes in `DecodeState.ended_by`, and their names.
RUNNING, EOS, LENGTH, NAN, ABORTED, STOP = range(6)
ENDED_BY = ("running", "eos", "length", "nan", "aborted", "stop")


class PromptBatch(NamedTuple):
    """The inputs of a method, of NumPy or JAX; the leading axis of every array is the batch.

    Attributes:
      inputs: `[B, P]` int32 prompts, padded on the right.
      input_lengths: `[B]` int32, at least 1.
      ids: `[B]` int32; a row's random stream depends only on the seed and its id.
      limits: `[B]` int32, the most tokens of each row.
      seeds: a number, or `[B]` of an integer dtype, in 0 .. 2**32 - 1.
      sampling: fields scalar or `[B]`.
      draft_limits: `[B]` int32 in 0 .. G, the longest block of each row, or None for G. A row with
        limit 0 emits one token per round.
      prefix: `[B, F]` int32, forced first tokens of the output (encoder-decoder models), or None.
      prefix_lengths: `[B]` int32, their number in each row; None without a prefix.
      predictions: `[B, K, E]` int32, -1 after their ends, or None; see `Prompts`.
    """

    inputs: Any
    input_lengths: Any
    ids: Any
    limits: Any
    seeds: Any = 0
    sampling: Sampling = Sampling()
    draft_limits: Any = None
    prefix: Any = None
    prefix_lengths: Any = None
    predictions: Any = None

    @property
    def prompts(self) -> Prompts:
        """The part that models and drafters read."""
        return Prompts(*(getattr(self, name) for name in Prompts._fields))


class LogProbs(NamedTuple):
    """Log-probabilities of emitted tokens in nats: of each token, or summed.

    They are float32 arrays of one shape; None for what a method does not report.

    Attributes:
      plain: under the verifier itself: at temperature 1, without filters and processors. NaN for
        what it has not read, as in cascades that keep the end of a draft unread; None unless
        requested.
      processed: the same after temperature, filters and processors; -inf if a rule emitted a token
        that the verifier could not.
      target: under the target distributions.
    """

    plain: Any = None
    processed: Any = None
    target: Any = None


class DecodeInfo(NamedTuple):
    """Statistics of decoding, per row since its start: written by the loop, never read by it.

    An array of single tokens is None unless requested, and NaN or -1 past the output or if a method
    reports none (see `specjax.decoding.Step`).

    Attributes:
      calls: model's name -> its passes while the row was unfinished. A pass serves the whole batch,
        so other rows that draft more can add passes of the drafter; the pass after a whole block
        counts only if this row's block was accepted whole.
      drafted_lengths: the number of rounds with 0 .. G drafted tokens. Tokens that nothing can
        reject do not count as drafted. Of a tree count the accepted tokens, and one more if the
        path ended by a rejection.
      accepted_lengths: the number of rounds with 0 .. G accepted tokens; tokens past an EOS or the
        limit count too.
      token_sum: sum over rounds of sum_i prod_{j <= i} min(1, pi_j / q_j).
      block_sum: sum over rounds of sum_i P_i on the same drafts; never smaller.
      log_prob: of the output, `[B]`.
      nan_in: for a row that ended by NaN the index of its source in `Method.nan_sources`; else -1.
      deferrals: how often the drafter deferred to the verifier: the verifier's passes. If both
        models read every token, or the verifier writes whole responses: the emitted tokens that are
        the verifier's.
      rollbacks: the number of rounds with rejected tokens.
      log_probs: of each token, `[B, N]`.
      sources: the index into `Method.source_names` of where each token came from.
      nodes: in how many rounds each node of a tree was drafted, and accepted; None of chains.
    """

    calls: dict[str, Int32[Array, " B"]]
    drafted_lengths: Int32[Array, "B L"]
    accepted_lengths: Int32[Array, "B L"]
    token_sum: Float32[Array, " B"]
    block_sum: Float32[Array, " B"]
    log_prob: LogProbs
    nan_in: Int32[Array, " B"]
    deferrals: Int32[Array, " B"]
    rollbacks: Int32[Array, " B"]
    log_probs: LogProbs | None = None
    sources: Int8[Array, "B N"] | None = None
    nodes: Int32[Array, "B 2 G"] | None = None


class StopState(NamedTuple):
    """The rows' progress towards a stop string.

    Attributes:
      states: states of an automaton that reads tokens.
      first: the states before the first token.
      table: int16 or int32, the state after each token in each state; S - 1 means that a stop
        string is complete. It is here while a method steps, and None between two calls of `run`,
        which get it as an argument: rows share it.
    """

    states: Int32[Array, " B"]
    first: Int32[Array, " B"]
    table: Int[Array, "S V"] | None = None


class DecodeState(NamedTuple):
    """The rows between two calls of `run`; the leading axis of every array is the batch.

    Attributes:
      tokens: the output; zero past `lengths`.
      lengths: the number of emitted tokens.
      limits: the most tokens of each row; at most N.
      draft_limits: in 0 .. G, the longest block of each row. Between two calls it may be replaced,
        by numbers that depend only on committed tokens. A verification with a carry (GreedyBlock)
        ignores it and drafts G tokens.
      ended_by: a code of `ENDED_BY`. A row that is not running stays frozen.
      keys: one stream per row.
      steps: the row's steps so far: its counter of random numbers.
      sampling: fields `[B]`.
      inner: the method's own state.
      info: statistics.
      stop: the progress towards stop strings, if there are any; else None.
    """

    tokens: Int32[Array, "B N"]
    lengths: Int32[Array, " B"]
    limits: Int32[Array, " B"]
    draft_limits: Int32[Array, " B"]
    ended_by: Int32[Array, " B"]
    keys: Key[Array, " B"]
    steps: Int32[Array, " B"]
    sampling: Sampling
    inner: Any
    info: DecodeInfo
    stop: StopState | None = None

    @property
    def finished(self) -> Bool[Array, " B"]:
        return self.ended_by != RUNNING

    @property
    def wants_log_probs(self) -> bool:
        return self.info.log_probs is not None

    @property
    def wants_sources(self) -> bool:
        return self.info.sources is not None


def past_end(accepted: np.ndarray, rounds: np.ndarray, emitted: np.ndarray) -> np.ndarray:
    """Accepted tokens past the ends of rows, which were not emitted, from counts of one shape."""
    # One token past the end belongs to the last pass and was not drafted.
    return np.maximum(accepted + rounds - emitted - 1, 0) * (accepted > 0)


def discarded(
    drafted: np.ndarray, accepted: np.ndarray, rounds: np.ndarray, emitted: np.ndarray
) -> np.ndarray:
    """Drafted tokens that were not emitted, from counts of one shape; see `RowInfo.discarded`."""
    lost = drafted - accepted + past_end(accepted, rounds, emitted)
    # In methods that draft no blocks, rounds have another meaning.
    return np.minimum(lost, drafted)
