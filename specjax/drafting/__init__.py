"""Drafting: how a block of tokens is proposed, and when a proposal stops."""

from specjax.drafting.neural import NeuralDrafter, NeuralDrafterParams, NeuralDrafterState
from specjax.drafting.stopping import FixedLength
from specjax.types import Drafter, Stopping

__all__ = [
    "Drafter",
    "FixedLength",
    "NeuralDrafter",
    "NeuralDrafterParams",
    "NeuralDrafterState",
    "Stopping",
]
