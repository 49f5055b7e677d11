"""Decoding: methods that turn prompts into tokens, each one jitted program."""

from specjax.decoding.autoregressive import (
    Autoregressive,
    AutoregressiveParams,
    AutoregressiveState,
)
from specjax.decoding.compilation import step_options
from specjax.decoding.loop import LoopMethod
from specjax.decoding.outcome import (
    RoundInfo,
    RoundMark,
    RoundOutcome,
    RoundParams,
    RoundState,
)
from specjax.decoding.round import Round
from specjax.decoding.speculative import Speculative
from specjax.decoding.state import (
    add_log_probs,
    append,
    end_by_nan,
    end_row,
    insert_rows,
    step_uniforms,
)
from specjax.types import DecodeInfo, DecodeState, PromptBatch

__all__ = [
    "Autoregressive",
    "AutoregressiveParams",
    "AutoregressiveState",
    "DecodeInfo",
    "DecodeState",
    "LoopMethod",
    "PromptBatch",
    "Round",
    "RoundInfo",
    "RoundMark",
    "RoundOutcome",
    "RoundParams",
    "RoundState",
    "Speculative",
    "add_log_probs",
    "append",
    "end_by_nan",
    "end_row",
    "insert_rows",
    "step_options",
    "step_uniforms",
]
