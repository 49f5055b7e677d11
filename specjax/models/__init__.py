"""Networks with a ragged cache: T5, Llama and Gemma 2."""

from specjax.models.config import (
    Gemma2Config,
    Llama3RopeScaling,
    LlamaConfig,
    ModelConfig,
    T5Config,
    config_from_dict,
    config_to_dict,
)

__all__ = [
    "Gemma2Config",
    "Llama3RopeScaling",
    "LlamaConfig",
    "ModelConfig",
    "T5Config",
    "config_from_dict",
    "config_to_dict",
]
