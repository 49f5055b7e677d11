"""The types and protocols that cross module borders.

Those in `__all__` are for authors of parts; the package itself uses the others, too.
"""

from specjax.types.drafting import (
    Bonus,
    ChildLaw,
    DraftBlock,
    Drafter,
    DraftInputs,
    DraftOutcome,
    DraftTraits,
    Drawn,
    Stopping,
)
from specjax.types.drawing import Processing, Processor, Sampling
from specjax.types.language_model import (
    Array,
    Axes,
    Cache,
    CacheUpdates,
    Extended,
    LanguageModel,
    Params,
    Prefilled,
    PrefilledStates,
    Prompts,
    TreeShape,
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
    PromptBatch,
    StopState,
)
from specjax.types.pytrees import traced_dataclass
from specjax.types.rule import Rule
from specjax.types.verification import Acceptance, Path, ScoredBlock, Verification, Verified

__all__ = [
    "Acceptance",
    "Bonus",
    "DecodeInfo",
    "DecodeState",
    "DraftBlock",
    "DraftInputs",
    "DraftOutcome",
    "DraftTraits",
    "Drafter",
    "Drawn",
    "LanguageModel",
    "Path",
    "Prefilled",
    "Processor",
    "PromptBatch",
    "Prompts",
    "Rule",
    "Sampling",
    "ScoredBlock",
    "Stopping",
    "TreeShape",
    "Verification",
    "traced_dataclass",
]
