"""Speculative decoding and model cascades in JAX: exact, fast, and freely combined."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax import (
        acceptance_head,
        checkpoints,
        data,
        decoding,
        drafting,
        evaluation,
        models,
        partitioning,
        rules,
        sampling,
        sweeping,
        testing,
        text,
        theory,
        tokenizers,
        training,
        tuning,
        types,
        verification,
    )
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
    "acceptance_head",
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
    "sweeping",
    "testing",
    "text",
    "theory",
    "tokenizers",
    "training",
    "tuning",
    "types",
    "verification",
]

# Where the names that are no modules come from.
_MODULES = {
    "Sampling": "sampling",
    "enable_compilation_cache": "runs.compilation_cache",
    **dict.fromkeys(
        (
            "Decoder",
            "Engine",
            "Models",
            "Pair",
            "Request",
            "Result",
            "TextModel",
            "load_models",
            "load_pair",
            "load_text_model",
        ),
        "text",
    ),
}

if not TYPE_CHECKING:
    # Each name is imported on its first use: the `specjax` command must be able to say that it was
    # interrupted before JAX is imported, and Orbax alone takes as long as all else.
    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
        if name in _MODULES:
            value = getattr(value, name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
