"""Checkpoints: Hugging Face safetensors, T5X, GGUF, and our own Orbax directories."""

from specjax.checkpoints.attachments import has_head, load_head, save_head
from specjax.checkpoints.heads import (
    has_mtp,
    is_draft_head,
    load_draft_head,
    open_draft_head,
    save_draft_head,
)
from specjax.checkpoints.loading import LoadedModel, load_model, read_config, sized
from specjax.checkpoints.saving import FORMATS, save_model, save_t5x_pair
from specjax.tokenizers.model_files import SpecialIds

__all__ = [
    "FORMATS",
    "LoadedModel",
    "SpecialIds",
    "has_head",
    "has_mtp",
    "is_draft_head",
    "load_draft_head",
    "load_head",
    "load_model",
    "open_draft_head",
    "read_config",
    "save_draft_head",
    "save_head",
    "save_model",
    "save_t5x_pair",
    "sized",
]
