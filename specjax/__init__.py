"""Speculative decoding and model cascades in JAX: exact, fast, and freely combined."""

import importlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from specjax import (
        checkpoints,
        data,
        evaluation,
        models,
        partitioning,
        testing,
        text,
        tokenizers,
        training,
        types,
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
    "checkpoints",
    "data",
    "decoding",
    "drafting",
    "enable_compilation_cache",
    "evaluation",
    "load_models",
    "load_pair",
    "load_text_model",
    "models",
    "partitioning",
    "rules",
    "sampling",
    "testing",
    "text",
    "tokenizers",
    "training",
    "types",
    "verification",
]

if not TYPE_CHECKING:
    # The modules that `import specjax` leaves out to stay quick; each is imported on its first use.
    def __getattr__(name):
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
