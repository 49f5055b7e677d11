"""Rules map the two models' distributions at one position to the target distribution."""

from specjax.rules.checking import check_rule
from specjax.rules.deferral import OPT, BiLD, Chow, ChowLog, Diff, DiffLog, Lossless, OPTLog
from specjax.rules.lossy import Lossy, LossyTuned, Mentored
from specjax.rules.quantities import accept_probability
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
    "ALL_RULES",
    "OPT",
    "BiLD",
    "Chow",
    "ChowLog",
    "Diff",
    "DiffLog",
    "Lossless",
    "Lossy",
    "LossyTuned",
    "Mentored",
    "OPTLog",
    "Rule",
    "TokenV1",
    "TokenV2",
    "TokenV3",
    "accept_probability",
    "check_rule",
]
