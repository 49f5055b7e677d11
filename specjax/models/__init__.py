"""Networks with a ragged cache; families share a file by maker (T5, Llama, Qwen, ...)."""

from specjax.models.config import DecoderOnlyConfig, LayerSpec, ModelConfig, Style
from specjax.models.families import FAMILIES, PRESETS, model_from_config, preset
from specjax.models.family import Family
from specjax.models.gemma import Gemma2Config
from specjax.models.llama import LlamaConfig
from specjax.models.model import CausalLM, Model, Seq2SeqLM
from specjax.models.t5 import T5Config
from specjax.models.weights import StoredWeight

__all__ = [
    "FAMILIES",
    "PRESETS",
    "CausalLM",
    "DecoderOnlyConfig",
    "Family",
    "Gemma2Config",
    "LayerSpec",
    "LlamaConfig",
    "Model",
    "ModelConfig",
    "Seq2SeqLM",
    "StoredWeight",
    "Style",
    "T5Config",
    "model_from_config",
    "preset",
]
