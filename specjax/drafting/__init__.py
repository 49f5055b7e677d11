"""Drafting: proposing blocks of tokens, and deciding when a proposal stops."""

from specjax.drafting.cascades import (
    HorizontalCascade,
    VerticalCascade,
    VerticalCascadeParams,
    cascade,
    cascade_params,
    lenience,
)
from specjax.drafting.heads import BlockDrafter, EagleDrafter, EagleTreeDrafter, OwnEstimate
from specjax.drafting.lookup import LookupDrafter, LookupFirst, LookupTreeDrafter
from specjax.drafting.neural import NeuralDrafter, NeuralDrafterParams
from specjax.drafting.ngrams import Bigram
from specjax.drafting.stopping import (
    Budget,
    Confidence,
    ConfidenceEstimate,
    CostAware,
    Costs,
    Entropy,
    Estimate,
    FixedLength,
    GreedyOracle,
    HeadEstimate,
    OnlineEstimate,
    Survival,
    read_costs,
)
from specjax.drafting.trees import (
    Beam,
    BranchesDrafter,
    CaterpillarDrafter,
    Topology,
    TreeDrafter,
    caterpillar,
    k_ary,
    paths,
)

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
