"""Networks with a ragged cache: T5, Llama and Gemma 2."""

from specjax.models.cache import CacheEntries, RaggedCache
from specjax.models.config import (
    Gemma2Config,
    Llama3RopeScaling,
    LlamaConfig,
    ModelConfig,
    T5Config,
    config_from_dict,
    config_to_dict,
)
from specjax.models.families import model_from_config
from specjax.models.gemma2 import Gemma2
from specjax.models.llama import Llama
from specjax.models.model import Model
from specjax.models.presets import PRESETS, preset
from specjax.models.t5 import T5

__all__ = [
    "PRESETS",
    "T5",
    "CacheEntries",
    "Gemma2",
    "Gemma2Config",
    "Llama",
    "Llama3RopeScaling",
    "LlamaConfig",
    "Model",
    "ModelConfig",
    "RaggedCache",
    "T5Config",
    "config_from_dict",
    "config_to_dict",
    "model_from_config",
    "preset",
]
