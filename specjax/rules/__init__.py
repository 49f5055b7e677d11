"""Rules map the two models' distributions at a position to the target distribution.

`FallbackRollback`, `SequenceChow` and `SequenceChowLog` give no target: sequential cascades use
them to decide. `Budgeted` limits a rule's divergence while decoding.
"""

from specjax.rules.accept_functions import (
    AcceptThreshold,
    Cactus,
    Mixture,
    TokenV1,
    TokenV2,
    TokenV3,
    Typical,
)
from specjax.rules.deferral import (
    OPT,
    BiLD,
    Chow,
    ChowLog,
    Deferral,
    Diff,
    DiffLog,
    FallbackRollback,
    Lossless,
    Mean,
    OPTLog,
    Quantile,
    SequenceChow,
    SequenceChowLog,
    Sum,
)
from specjax.rules.lossy import KLBall, KLPrice, Lossy, LossyTuned, Mentored
from specjax.rules.target import accept_probability, check_rule
from specjax.rules.varying import Budgeted

ALL_RULES = (
    Lossless,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    OPT,
    OPTLog,
    TokenV1,
    TokenV2,
    TokenV3,
    Typical,
    BiLD,
    Lossy,
    LossyTuned,
    Mentored,
    KLBall,
    KLPrice,
    Mixture,
    AcceptThreshold,
    Cactus,
)
SEQUENTIAL_RULES = (FallbackRollback, SequenceChow, SequenceChowLog)
ALL_AGGREGATIONS = (Sum, Mean, Quantile)

__all__ = [
    "OPT",
    "AcceptThreshold",
    "BiLD",
    "Budgeted",
    "Cactus",
    "Chow",
    "ChowLog",
    "Deferral",
    "Diff",
    "DiffLog",
    "FallbackRollback",
    "KLBall",
    "KLPrice",
    "Lossless",
    "Lossy",
    "LossyTuned",
    "Mean",
    "Mentored",
    "Mixture",
    "OPTLog",
    "Quantile",
    "SequenceChow",
    "SequenceChowLog",
    "Sum",
    "TokenV1",
    "TokenV2",
    "TokenV3",
    "Typical",
    "accept_probability",
    "check_rule",
]
