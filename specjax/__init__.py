"""Speculative decoding and model cascades in JAX: exact, fast, and freely combined."""

from specjax import decoding, drafting, rules, sampling, verification
from specjax.runs.compilation_cache import enable_compilation_cache
from specjax.sampling import Sampling
from specjax.text import (
    Decoder,
    Engine,
    Models,
    Pair,
    Request,
    Result,
    TextModel,
    load_models,
    load_pair,
    load_text_model,
)

__all__ = [
    "Decoder",
    "Engine",
    "Models",
    "Pair",
    "Request",
    "Result",
    "Sampling",
    "TextModel",
    "decoding",
    "drafting",
    "enable_compilation_cache",
    "load_models",
    "load_pair",
    "load_text_model",
    "rules",
    "sampling",
    "verification",
]
