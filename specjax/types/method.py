"""The inputs, state and statistics of a decoding method, for rows that advance independently.

Axes: B rows, P prompt length, F prefix length, N longest output, G longest draft block,
L = G + 1 lengths of a block, S states of an automaton, V vocabulary.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int8, Int32, Key

from specjax.types.drawing import Sampling
from specjax.types.language_model import Prompts

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
      prefix_lengths: `[B]` int32, or None for F in each row.
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

    @property
    def prompts(self) -> Prompts:
        """The part that models read."""
        return Prompts(self.inputs, self.input_lengths, self.prefix, self.prefix_lengths)


class DecodeInfo(NamedTuple):
    """Statistics of decoding, per row since its start: written by the loop, never read by it.

    Log-probabilities are in nats. An array of single tokens is None unless requested, and NaN or -1
    past the output or if a method reports none (see `specjax.decoding.Step`).

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
      log_conf: log-probability of the emitted tokens under the verifier itself: at temperature 1,
        without filters and processors. NaN if it has not read them all, as in cascades that keep
        the end of a draft unread; None unless requested.
      log_p: the same after temperature, filters and processors; -inf if a rule emitted a token that
        the verifier could not.
      log_target: the same under the target distributions.
      nan_in: for a row that ended by NaN the index of its source in `Method.nan_sources`; else -1.
      deferrals: how often the drafter deferred to the verifier: the verifier's passes. If both
        models read every token, or the verifier writes whole responses: the emitted tokens that are
        the verifier's.
      rollbacks: the number of rounds with rejected tokens.
      token_log_conf: `log_conf` per token; likewise the next two.
      token_sources: the index into `Method.source_names` of where each token came from.
      nodes: in how many rounds each node of a tree was drafted, and accepted; None of chains.
    """

    calls: dict[str, Int32[Array, " B"]]
    drafted_lengths: Int32[Array, "B L"]
    accepted_lengths: Int32[Array, "B L"]
    token_sum: Float32[Array, " B"]
    block_sum: Float32[Array, " B"]
    log_conf: Float32[Array, " B"] | None
    log_p: Float32[Array, " B"]
    log_target: Float32[Array, " B"]
    nan_in: Int32[Array, " B"]
    deferrals: Int32[Array, " B"]
    rollbacks: Int32[Array, " B"]
    token_log_conf: Float32[Array, "B N"] | None = None
    token_log_p: Float32[Array, "B N"] | None = None
    token_log_target: Float32[Array, "B N"] | None = None
    token_sources: Int8[Array, "B N"] | None = None
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
    def wants_log_conf(self) -> bool:
        return self.info.log_conf is not None

    @property
    def wants_sources(self) -> bool:
        return self.info.token_sources is not None


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
