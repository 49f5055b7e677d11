"""Drafting: how a block of tokens is proposed, and when a proposal stops."""

from specjax.drafting.bigram import Bigram, frequent_contexts, most_frequent_successors
from specjax.drafting.budget import Budget
from specjax.drafting.cost_aware import CostAware
from specjax.drafting.costs import Costs, read_costs
from specjax.drafting.estimates import (
    ConfidenceEstimate,
    Estimate,
    HeadEstimate,
    OnlineEstimate,
)
from specjax.drafting.hierarchy import cascade, cascade_params, check_lengths
from specjax.drafting.horizontal import HorizontalCascade, HorizontalCascadeState
from specjax.drafting.lookup_first import LookupFirst, LookupFirstParams, LookupFirstState
from specjax.drafting.max_gram import MaxGram, MaxGramState
from specjax.drafting.neural import (
    NeuralDrafter,
    NeuralDrafterParams,
    NeuralDrafterState,
    catches_up_on,
)
from specjax.drafting.ngrams import NGrams
from specjax.drafting.oracle import GreedyOracle, agreeing_runs
from specjax.drafting.stopping import FixedLength, check_policy
from specjax.drafting.thresholds import Confidence, Entropy, Survival
from specjax.drafting.vertical import (
    VerticalCascade,
    VerticalCascadeParams,
    VerticalCascadeState,
    lenience,
)
from specjax.types import Drafter, Stopping

ALL_POLICIES = (FixedLength, Confidence, Entropy, Survival, CostAware, Budget)
ALL_ESTIMATES = (ConfidenceEstimate, HeadEstimate, OnlineEstimate)

__all__ = [
    "ALL_ESTIMATES",
    "ALL_POLICIES",
    "Bigram",
    "Budget",
    "Confidence",
    "ConfidenceEstimate",
    "CostAware",
    "Costs",
    "Drafter",
    "Entropy",
    "Estimate",
    "FixedLength",
    "GreedyOracle",
    "HeadEstimate",
    "HorizontalCascade",
    "HorizontalCascadeState",
    "LookupFirst",
    "LookupFirstParams",
    "LookupFirstState",
    "MaxGram",
    "MaxGramState",
    "NGrams",
    "NeuralDrafter",
    "NeuralDrafterParams",
    "NeuralDrafterState",
    "OnlineEstimate",
    "Stopping",
    "Survival",
    "VerticalCascade",
    "VerticalCascadeParams",
    "VerticalCascadeState",
    "agreeing_runs",
    "cascade",
    "cascade_params",
    "catches_up_on",
    "check_lengths",
    "check_policy",
    "frequent_contexts",
    "lenience",
    "most_frequent_successors",
    "read_costs",
]
