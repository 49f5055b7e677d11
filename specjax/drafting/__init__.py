"""Drafting: how a block of tokens is proposed, and when a proposal stops."""

from specjax.drafting._base import Drafter, Stopping
from specjax.drafting.neural import FixedLength, NeuralDrafter, NeuralDrafterState

__all__ = ["Drafter", "FixedLength", "NeuralDrafter", "NeuralDrafterState", "Stopping"]
