"""Networks with a ragged cache; families share a file by maker (T5, Llama, Qwen, ...)."""

from specjax.models.cache import CacheEntries, RaggedCache
from specjax.models.config import DecoderOnlyConfig, LayerSpec, ModelConfig, Style
from specjax.models.families import (
    FAMILIES,
    PRESETS,
    config_from_dict,
    config_to_dict,
    family_of,
    model_from_config,
    preset,
)
from specjax.models.family import Family, HFFields
from specjax.models.gemma import Gemma2Config
from specjax.models.int8 import Int8Embedding, Int8Weight
from specjax.models.llama import LlamaConfig
from specjax.models.model import CausalLM, Model, Seq2SeqLM
from specjax.models.position_encoding import rope_frequencies
from specjax.models.rope_scaling import Llama3RopeScaling
from specjax.models.t5 import T5Config
from specjax.models.weights import StoredWeight

__all__ = [
    "FAMILIES",
    "PRESETS",
    "CacheEntries",
    "CausalLM",
    "DecoderOnlyConfig",
    "Family",
    "Gemma2Config",
    "HFFields",
    "Int8Embedding",
    "Int8Weight",
    "LayerSpec",
    "Llama3RopeScaling",
    "LlamaConfig",
    "Model",
    "ModelConfig",
    "RaggedCache",
    "Seq2SeqLM",
    "StoredWeight",
    "Style",
    "T5Config",
    "config_from_dict",
    "config_to_dict",
    "family_of",
    "model_from_config",
    "preset",
    "rope_frequencies",
]
