"""The acceptance head: how likely the verifier accepts a drafted token (SpecDec++)."""

from specjax.acceptance_head.head import Head
from specjax.acceptance_head.network import (
    AcceptanceHead,
    HeadConfig,
    apply_head,
    confidence_features,
    drawn_features,
    init_head,
)

__all__ = [
    "AcceptanceHead",
    "Head",
    "HeadConfig",
    "apply_head",
    "confidence_features",
    "drawn_features",
    "init_head",
]
