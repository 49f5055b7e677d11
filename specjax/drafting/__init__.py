"""Drafting: how a block of tokens is proposed, and when a proposal stops."""

from specjax.drafting.costs import Costs, read_costs
from specjax.drafting.neural import NeuralDrafter, NeuralDrafterParams, NeuralDrafterState
from specjax.drafting.stopping import FixedLength
from specjax.types import Drafter, Stopping

__all__ = [
    "Costs",
    "Drafter",
    "FixedLength",
    "NeuralDrafter",
    "NeuralDrafterParams",
    "NeuralDrafterState",
    "Stopping",
    "read_costs",
]
