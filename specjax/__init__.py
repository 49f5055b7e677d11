"""Speculative decoding and model cascades in JAX: exact, fast, and freely combined."""

from specjax import rules, sampling, verification
from specjax.api import Decoder, Pair, Result, TextModel, load_pair, load_text_model
from specjax.sampling import Sampling

__all__ = [
    "Decoder",
    "Pair",
    "Result",
    "Sampling",
    "TextModel",
    "load_pair",
    "load_text_model",
    "rules",
    "sampling",
    "verification",
]
