"""Speculative decoding and model cascades in JAX: exact, fast, and freely combined."""

from specjax import rules, sampling, verification
from specjax.runs.compilation_cache import enable_compilation_cache
from specjax.sampling import Sampling
from specjax.text import Decoder, Pair, Result, TextModel, load_pair, load_text_model

__all__ = [
    "Decoder",
    "Pair",
    "Result",
    "Sampling",
    "TextModel",
    "enable_compilation_cache",
    "load_pair",
    "load_text_model",
    "rules",
    "sampling",
    "verification",
]
