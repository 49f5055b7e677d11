"""Checkpoints: Hugging Face safetensors, T5X, and our own Orbax directories."""

from specjax.checkpoints.load import LoadedModel, load_model
from specjax.checkpoints.save import FORMATS, save_model

__all__ = ["FORMATS", "LoadedModel", "load_model", "save_model"]
