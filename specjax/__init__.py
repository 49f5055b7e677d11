"""Speculative decoding and model cascades in JAX: exact, fast, and freely combined."""

# Type checkers know this name; `typing` takes as long to import as the rest of Python's start.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from specjax import acceptance_head as acceptance_head
    from specjax import checkpoints as checkpoints
    from specjax import data as data
    from specjax import decoding as decoding
    from specjax import drafting as drafting
    from specjax import evaluation as evaluation
    from specjax import models as models
    from specjax import partitioning as partitioning
    from specjax import processors as processors
    from specjax import rules as rules
    from specjax import study as study
    from specjax import testing as testing
    from specjax import text as text
    from specjax import theory as theory
    from specjax import tokenizers as tokenizers
    from specjax import training as training
    from specjax import types as types
    from specjax import verification as verification
    from specjax.compilation import enable_compilation_cache
    from specjax.errors import UserError as UserError
    from specjax.text import (
        Decoder,
        Engine,
        Pair,
        Request,
        Result,
        Setting,
        TextModel,
        WithParams,
        load_pair,
        load_text_model,
        register_part,
    )
    from specjax.types import Sampling

__all__ = [
    "Decoder",
    "Engine",
    "Pair",
    "Request",
    "Result",
    "Sampling",
    "Setting",
    "TextModel",
    "UserError",
    "WithParams",
    "enable_compilation_cache",
    "load_pair",
    "load_text_model",
    "register_part",
]

# The names that do not come from `specjax.text`, and the packages that are attributes.
_FROM = {
    "Sampling": "types",
    "UserError": "errors",
    "enable_compilation_cache": "compilation",
}
_PACKAGES = (
    "acceptance_head",
    "checkpoints",
    "data",
    "decoding",
    "drafting",
    "evaluation",
    "models",
    "partitioning",
    "processors",
    "rules",
    "study",
    "testing",
    "text",
    "theory",
    "tokenizers",
    "training",
    "types",
    "verification",
)

if not TYPE_CHECKING:
    # Each name is imported on its first use: the `specjax` command must be able to say that it was
    # interrupted before JAX is imported, and Orbax alone takes as long as all else.
    def __getattr__(name):
        import importlib

        if name in _PACKAGES:
            value = importlib.import_module(f"{__name__}.{name}")
        elif name in __all__:
            module = importlib.import_module(f"{__name__}.{_FROM.get(name, 'text')}")
            value = getattr(module, name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__, *_PACKAGES})
