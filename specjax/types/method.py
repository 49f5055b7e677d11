"""The inputs, state and statistics of a decoding method, for rows that advance independently.

Axes: B rows, P prompt length, F prefix length, N longest output, G longest draft block.
"""

from typing import Any, NamedTuple

import numpy as np

from specjax.types.drawing import Sampling
from specjax.types.language_model import Array, Prompts

# Why a row ended: the codes in `DecodeState.ended_by`, and their names.
RUNNING, EOS, LENGTH, NAN, ABORTED, STOP = range(6)
ENDED_BY = ("running", "eos", "length", "nan", "aborted", "stop")


class PromptBatch(NamedTuple):
    """The inputs of a method; the leading axis of every array is the batch.

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

    inputs: Any  # [B, P]
    input_lengths: Any  # [B]
    ids: Any  # [B]
    limits: Any  # [B]
    seeds: Any = 0  # [] or [B]
    sampling: Sampling = Sampling()
    draft_limits: Any = None  # [B]
    prefix: Any = None  # [B, F]
    prefix_lengths: Any = None  # [B]

    @property
    def prompts(self) -> Prompts:
        """The part that models read."""
        return Prompts(self.inputs, self.input_lengths, self.prefix, self.prefix_lengths)


class DecodeInfo(NamedTuple):
    """Statistics of decoding, per row since its start: written by the loop, never read by it.

    Attributes:
      calls: model's name -> `[B]` int32, its passes while the row was unfinished. A pass serves the
        whole batch, so other rows that draft more can add passes of the drafter; the pass after a
        whole block counts only if this row's block was accepted whole.
      drafted_lengths: `[B, G + 1]` int32, the number of rounds with 0 .. G drafted tokens. Tokens
        that nothing can reject do not count as drafted. Of a tree count the accepted tokens, and
        one more if the path ended by a rejection.
      accepted_lengths: `[B, G + 1]` int32, the number of rounds with 0 .. G accepted tokens; tokens
        past an EOS or the limit count too.
      token_sum: `[B]` float32, sum over rounds of sum_i prod_{j <= i} min(1, pi_j / q_j).
      block_sum: `[B]` float32, sum over rounds of sum_i P_i on the same drafts; never smaller.
      log_conf: `[B]` float32, log-probability of the emitted tokens under the verifier itself, in
        nats: at temperature 1, without filters and processors. NaN if it has not read them all, as
        in cascades that keep the end of a draft unread; None unless requested.
      log_p: `[B]` float32, the same after temperature, filters and processors; -inf if a rule
        emitted a token that the verifier could not.
      log_target: `[B]` float32, the same under the target distributions.
      nan_in: `[B]` int32, for a row that ended by NaN the index of its source in
        `Method.nan_sources`; else -1.
      deferrals: `[B]` int32, how often the drafter deferred to the verifier: the verifier's passes.
        If both models read every token, or the verifier writes whole responses: the emitted tokens
        that are the verifier's.
      rollbacks: `[B]` int32, the number of rounds with rejected tokens.
      token_log_conf: `[B, N]` float32, `log_conf` per token, or None unless requested; NaN past the
        output, or if a method reports none (see `specjax.decoding.Step`).
      token_log_p: `[B, N]` float32, `log_p` per token, or None.
      token_log_target: `[B, N]` float32, `log_target` per token, or None.
      token_sources: `[B, N]` int8, the index into `Method.source_names` of where each token came
        from, or None unless requested; -1 past the output, or if a method reports none.
      nodes: `[B, 2, G]` int32, in how many rounds each node of a tree was drafted, and accepted;
        None of chains.
    """

    calls: dict[str, Array]
    drafted_lengths: Array  # [B, G + 1]
    accepted_lengths: Array  # [B, G + 1]
    token_sum: Array  # [B]
    block_sum: Array  # [B]
    log_conf: Array | None  # [B]
    log_p: Array  # [B]
    log_target: Array  # [B]
    nan_in: Array  # [B]
    deferrals: Array  # [B]
    rollbacks: Array  # [B]
    token_log_conf: Array | None = None  # [B, N]
    token_log_p: Array | None = None  # [B, N]
    token_log_target: Array | None = None  # [B, N]
    token_sources: Array | None = None  # [B, N]
    nodes: Array | None = None  # [B, 2, G]


class StopState(NamedTuple):
    """The rows' progress towards a stop string.

    Attributes:
      states: `[B]` int32, states of an automaton that reads tokens.
      first: `[B]` int32, the states before the first token.
      table: `[S, V]` int16 or int32, the state after each token in each state; S - 1 means that a
        stop string is complete. It is here while a method steps, and None between two calls of
        `run`, which get it as an argument: rows share it.
    """

    states: Array  # [B]
    first: Array  # [B]
    table: Array | None = None  # [S, V]


class DecodeState(NamedTuple):
    """The rows between two calls of `run`; the leading axis of every array is the batch.

    Attributes:
      tokens: `[B, N]` int32, the output; zero past `lengths`.
      lengths: `[B]` int32, the number of emitted tokens.
      limits: `[B]` int32, the most tokens of each row; at most N.
      draft_limits: `[B]` int32 in 0 .. G, the longest block of each row. Between two calls it may
        be replaced, by numbers that depend only on committed tokens. A verification with a carry
        (GreedyBlock) ignores it and drafts G tokens.
      ended_by: `[B]` int32, a code of `ENDED_BY`. A row that is not running stays frozen.
      keys: `[B]` keys, one stream per row.
      steps: `[B]` int32, the row's steps so far: its counter of random numbers.
      sampling: fields `[B]`.
      inner: the method's own state.
      info: statistics.
      stop: the progress towards stop strings, if there are any; else None.
    """

    tokens: Array  # [B, N]
    lengths: Array  # [B]
    limits: Array  # [B]
    draft_limits: Array  # [B]
    ended_by: Array  # [B]
    keys: Array  # [B]
    steps: Array  # [B]
    sampling: Sampling
    inner: Any
    info: DecodeInfo
    stop: StopState | None = None

    @property
    def finished(self) -> Array:
        """`[B]` bool, the rows that emit no more tokens."""
        return self.ended_by != RUNNING

    @property
    def wants_log_conf(self) -> bool:
        """Whether steps must report log-probabilities under the verifier itself."""
        return self.info.log_conf is not None

    @property
    def wants_sources(self) -> bool:
        """Whether steps must report where their tokens came from."""
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
