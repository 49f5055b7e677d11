"""Drafting: proposing blocks of tokens, and deciding when a proposal stops.

`Chain`, `Tree`, `Lookup`, `Branches` and `Cascade` say how drafts are made. Their fields are plain
values and names of models; `bind` puts networks in the place of names, and gives the parameters.
"""

from specjax.drafting.chain import Chain
from specjax.drafting.heads import OwnEstimate
from specjax.drafting.lookup import Lookup
from specjax.drafting.matrix import Cascade, lenience
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
    HeadEstimate,
    OnlineEstimate,
    Survival,
    read_costs,
)
from specjax.drafting.trees import Branches, Tree

ALL_DRAFTS = (Chain, Tree, Lookup, Branches, Cascade)
ALL_POLICIES = (FixedLength, Confidence, Entropy, Survival, CostAware, Budget)
ALL_ESTIMATES = (ConfidenceEstimate, HeadEstimate, OnlineEstimate, OwnEstimate)

__all__ = [
    "Bigram",
    "Branches",
    "Budget",
    "Cascade",
    "Chain",
    "Confidence",
    "ConfidenceEstimate",
    "CostAware",
    "Costs",
    "Entropy",
    "Estimate",
    "FixedLength",
    "HeadEstimate",
    "Lookup",
    "OnlineEstimate",
    "OwnEstimate",
    "Survival",
    "Tree",
    "lenience",
    "read_costs",
]
