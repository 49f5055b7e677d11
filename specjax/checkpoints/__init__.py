"""Checkpoints: Hugging Face safetensors, T5X, and our own Orbax directories."""

from specjax.checkpoints.load import LoadedModel, load_model, read_config
from specjax.checkpoints.save import FORMATS, save_model
from specjax.tokenizers.model_files import SpecialIds

__all__ = ["FORMATS", "LoadedModel", "SpecialIds", "load_model", "read_config", "save_model"]
