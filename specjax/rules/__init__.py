"""Rules map the two models' distributions at one position to the target distribution.

Those of `SEQUENTIAL_RULES` are no targets: cascades that decode sequentially decide by them.
`Budgeted` holds any of `ALL_RULES` to a divergence budget while decoding.
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
from specjax.rules.quantities import accept_probability
from specjax.rules.sequential import (
    ALL_AGGREGATIONS,
    SEQUENTIAL_RULES,
    FallbackRollback,
    Mean,
    Quantile,
    SequenceChow,
    SequenceChowLog,
    Sum,
    check_deferral,
    check_reads_drafter_alone,
)
from specjax.rules.token_specific import TokenV1, TokenV2, TokenV3
from specjax.types import Rule

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

__all__ = [
    "ALL_AGGREGATIONS",
    "ALL_RULES",
    "OPT",
    "SEQUENTIAL_RULES",
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
    "Rule",
    "SequenceChow",
    "SequenceChowLog",
    "Sum",
    "TokenV1",
    "TokenV2",
    "TokenV3",
    "accept_probability",
    "check_deferral",
    "check_reads_drafter_alone",
    "check_rule",
]
