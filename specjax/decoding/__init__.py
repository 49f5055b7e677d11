"""Decoding: methods that turn prompts into tokens, each one jitted program."""

from specjax.compilation import step_options
from specjax.decoding.autoregressive import (
    Autoregressive,
    AutoregressiveParams,
    AutoregressiveState,
)
from specjax.decoding.loop import LoopMethod
from specjax.decoding.oracle_cascade import OracleCascade
from specjax.decoding.outcome import (
    RoundInfo,
    RoundMark,
    RoundOutcome,
    RoundParams,
    RoundState,
)
from specjax.decoding.pair_method import CascadeParams, CascadeState, PairMethod
from specjax.decoding.round import Round
from specjax.decoding.sequence_cascade import SequenceCascade
from specjax.decoding.speculative import Speculative
from specjax.decoding.state import (
    add_log_probs,
    append,
    end_by_nan,
    end_row,
    insert_rows,
    step_uniforms,
    watch_stops,
)
from specjax.decoding.token_cascade import BiLDCascade, TokenCascade, check_limit
from specjax.types import DecodeInfo, DecodeState, PromptBatch

__all__ = [
    "Autoregressive",
    "AutoregressiveParams",
    "AutoregressiveState",
    "BiLDCascade",
    "CascadeParams",
    "CascadeState",
    "DecodeInfo",
    "DecodeState",
    "LoopMethod",
    "OracleCascade",
    "PairMethod",
    "PromptBatch",
    "Round",
    "RoundInfo",
    "RoundMark",
    "RoundOutcome",
    "RoundParams",
    "RoundState",
    "SequenceCascade",
    "Speculative",
    "TokenCascade",
    "add_log_probs",
    "append",
    "check_limit",
    "end_by_nan",
    "end_row",
    "insert_rows",
    "step_options",
    "step_uniforms",
    "watch_stops",
]
