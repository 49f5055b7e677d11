"""The acceptance head: how likely the verifier accepts a drafted token (SpecDec++)."""

from specjax.acceptance_head.head import Head
from specjax.acceptance_head.network import (
    NUM_FEATURES,
    AcceptanceHead,
    HeadConfig,
    apply_head,
    confidence_features,
    drawn_confidences,
    drawn_features,
    init_head,
)

__all__ = [
    "NUM_FEATURES",
    "AcceptanceHead",
    "Head",
    "HeadConfig",
    "apply_head",
    "confidence_features",
    "drawn_confidences",
    "drawn_features",
    "init_head",
]
