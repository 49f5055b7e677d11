"""Processors: changes of the distribution that tokens are drawn from.

They run in this order, which is transformers': `LogitBias`, `Regex` and `JsonSchema`,
`RepetitionPenalty`, `FrequencyPenalty`, `PresencePenalty`, `NoRepeatNgram`, `MinNewTokens`,
`ForcedTokens`, `SuppressTokens`, `LinearTemperature`; then temperature, top-k and top-p of
`Sampling`; then `MinP`, `TypicalP`, `EpsilonCutoff`, `EtaCutoff`. Each is exact under speculation:
its state follows the tokens of each row, also inside a drafted block. Strengths are numbers, or one
number per row.
"""

from specjax.processors.constraints import Constraint, JsonSchema, Regex
from specjax.processors.cutoffs import EpsilonCutoff, EtaCutoff, MinP, TypicalP
from specjax.processors.penalties import (
    FrequencyPenalty,
    NoRepeatNgram,
    PresencePenalty,
    RepetitionPenalty,
)
from specjax.processors.tokens import (
    ForcedTokens,
    LinearTemperature,
    LogitBias,
    MinNewTokens,
    SuppressTokens,
)

# In the order in which they run.
ALL_PROCESSORS = (
    LogitBias,
    Regex,
    JsonSchema,
    RepetitionPenalty,
    FrequencyPenalty,
    PresencePenalty,
    NoRepeatNgram,
    MinNewTokens,
    ForcedTokens,
    SuppressTokens,
    LinearTemperature,
    MinP,
    TypicalP,
    EpsilonCutoff,
    EtaCutoff,
)

__all__ = [
    "ALL_PROCESSORS",
    "Constraint",
    "EpsilonCutoff",
    "EtaCutoff",
    "ForcedTokens",
    "FrequencyPenalty",
    "JsonSchema",
    "LinearTemperature",
    "LogitBias",
    "MinNewTokens",
    "MinP",
    "NoRepeatNgram",
    "PresencePenalty",
    "Regex",
    "RepetitionPenalty",
    "SuppressTokens",
    "TypicalP",
]
