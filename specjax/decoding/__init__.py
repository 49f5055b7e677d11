"""Decoding: loops that turn prompts into tokens, each one jitted program."""

from specjax.decoding.autoregressive import Autoregressive
from specjax.decoding.compilation import step_options
from specjax.decoding.loop import DecodeInfo, DecodeState, insert_rows
from specjax.decoding.speculative import Speculative

__all__ = [
    "Autoregressive",
    "DecodeInfo",
    "DecodeState",
    "Speculative",
    "insert_rows",
    "step_options",
]
