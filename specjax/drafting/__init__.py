"""Drafting: proposing blocks of tokens, and deciding when a proposal stops."""

from specjax.drafting.branches import BranchesDrafter
from specjax.drafting.caterpillars import CaterpillarDrafter
from specjax.drafting.cost_aware import CostAware, Costs, read_costs
from specjax.drafting.estimates import (
    ConfidenceEstimate,
    Estimate,
    HeadEstimate,
    OnlineEstimate,
)
from specjax.drafting.heads import BlockDrafter, EagleDrafter, EagleTreeDrafter, OwnEstimate
from specjax.drafting.hierarchy import cascade, cascade_params
from specjax.drafting.horizontal import HorizontalCascade
from specjax.drafting.lookup import LookupDrafter, LookupFirst, LookupTreeDrafter
from specjax.drafting.neural import NeuralDrafter, NeuralDrafterParams
from specjax.drafting.ngrams import Bigram
from specjax.drafting.stopping import (
    Budget,
    Confidence,
    Entropy,
    FixedLength,
    GreedyOracle,
    Survival,
)
from specjax.drafting.trees import Beam, Topology, TreeDrafter, caterpillar, k_ary, paths
from specjax.drafting.vertical import VerticalCascade, VerticalCascadeParams, lenience

ALL_POLICIES = (FixedLength, Confidence, Entropy, Survival, CostAware, Budget)
ALL_ESTIMATES = (ConfidenceEstimate, HeadEstimate, OnlineEstimate, OwnEstimate)

__all__ = [
    "Beam",
    "Bigram",
    "BlockDrafter",
    "BranchesDrafter",
    "Budget",
    "CaterpillarDrafter",
    "Confidence",
    "ConfidenceEstimate",
    "CostAware",
    "Costs",
    "EagleDrafter",
    "EagleTreeDrafter",
    "Entropy",
    "Estimate",
    "FixedLength",
    "GreedyOracle",
    "HeadEstimate",
    "HorizontalCascade",
    "LookupDrafter",
    "LookupFirst",
    "LookupTreeDrafter",
    "NeuralDrafter",
    "NeuralDrafterParams",
    "OnlineEstimate",
    "OwnEstimate",
    "Survival",
    "Topology",
    "TreeDrafter",
    "VerticalCascade",
    "VerticalCascadeParams",
    "cascade",
    "cascade_params",
    "caterpillar",
    "k_ary",
    "lenience",
    "paths",
    "read_costs",
]
