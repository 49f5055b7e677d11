"""Rules map the two models' distributions at a position to the target distribution.

`FallbackRollback`, `SequenceChow` and `SequenceChowLog` give no target: sequential cascades use
them to decide. `Budgeted` limits a rule's divergence while decoding.
"""

from specjax.rules.budgeted import Budgeted
from specjax.rules.checking import check_rule
from specjax.rules.deferral import (
    OPT,
    BiLD,
    Chow,
    ChowLog,
    Deferral,
    Diff,
    DiffLog,
    Lossless,
    OPTLog,
)
from specjax.rules.lossy import Lossy, LossyTuned, Mentored
from specjax.rules.sequential import (
    FallbackRollback,
    Mean,
    Quantile,
    SequenceChow,
    SequenceChowLog,
    Sum,
)
from specjax.rules.target import accept_probability
from specjax.rules.token_specific import TokenV1, TokenV2, TokenV3

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
    BiLD,
    Lossy,
    LossyTuned,
    Mentored,
)
SEQUENTIAL_RULES = (FallbackRollback, SequenceChow, SequenceChowLog)
ALL_AGGREGATIONS = (Sum, Mean, Quantile)

__all__ = [
    "OPT",
    "BiLD",
    "Budgeted",
    "Chow",
    "ChowLog",
    "Deferral",
    "Diff",
    "DiffLog",
    "FallbackRollback",
    "Lossless",
    "Lossy",
    "LossyTuned",
    "Mean",
    "Mentored",
    "OPTLog",
    "Quantile",
    "SequenceChow",
    "SequenceChowLog",
    "Sum",
    "TokenV1",
    "TokenV2",
    "TokenV3",
    "accept_probability",
    "check_rule",
]
