"""Checkpoints of Hugging Face, T5X, MaxText, tunix and GGUF, and our own Orbax directories."""

from specjax.checkpoints.heads import save_draft_head
from specjax.checkpoints.loading import load_model, read_config
from specjax.checkpoints.saving import save_model

__all__ = [
    "load_model",
    "read_config",
    "save_draft_head",
    "save_model",
]
