"""The types and protocols that cross module borders.

Axes: B rows, G longest draft block, N longest output, V vocabulary, T tokens in one extend,
S cache length, D model width.
"""

from specjax.types.drafting import (
    Bonus,
    DraftBlock,
    Drafter,
    DraftOutcome,
    DraftTraits,
    Stopping,
)
from specjax.types.language_model import (
    Array,
    Axes,
    Cache,
    CacheUpdates,
    Extended,
    LanguageModel,
    Params,
    Prefilled,
    row_axes,
)
from specjax.types.method import (
    ABORTED,
    ENDED_BY,
    EOS,
    LENGTH,
    NAN,
    RUNNING,
    STOP,
    DecodeInfo,
    DecodeState,
    Method,
    PromptBatch,
    StopState,
)
from specjax.types.pytrees import traced_dataclass
from specjax.types.rule import Rule
from specjax.types.sampling import Sampling
from specjax.types.verification import Acceptance, Verification, Verified

__all__ = [
    "ABORTED",
    "ENDED_BY",
    "EOS",
    "LENGTH",
    "NAN",
    "RUNNING",
    "STOP",
    "Acceptance",
    "Array",
    "Axes",
    "Bonus",
    "Cache",
    "CacheUpdates",
    "DecodeInfo",
    "DecodeState",
    "DraftBlock",
    "DraftOutcome",
    "DraftTraits",
    "Drafter",
    "Extended",
    "LanguageModel",
    "Method",
    "Params",
    "Prefilled",
    "PromptBatch",
    "Rule",
    "Sampling",
    "StopState",
    "Stopping",
    "Verification",
    "Verified",
    "row_axes",
    "traced_dataclass",
]
