"""Decoding: loops that turn prompts into tokens, each one jitted program."""

from specjax.decoding._autoregressive import Autoregressive
from specjax.decoding._compile import step_options
from specjax.decoding._loop import DecodeInfo, DecodeState, insert_rows
from specjax.decoding._speculative import Speculative

__all__ = [
    "Autoregressive",
    "DecodeInfo",
    "DecodeState",
    "Speculative",
    "insert_rows",
    "step_options",
]
