"""Draft heads, which draft from the states of their verifier; each kind is in a file."""

from specjax.models.heads.assistant import AssistantConfig
from specjax.models.heads.block import MARKOV, OF_DSPARK, BlockConfig
from specjax.models.heads.eagle import EagleConfig
from specjax.models.heads.head import (
    Drafted,
    DraftHead,
    Fresh,
    HeadConfig,
    HeadFiles,
    ReadText,
    places_of,
)
from specjax.models.heads.kinds import KINDS, draft_head, kind_in, kind_of
from specjax.models.heads.parallel import ParallelConfig

__all__ = [
    "KINDS",
    "MARKOV",
    "OF_DSPARK",
    "AssistantConfig",
    "BlockConfig",
    "DraftHead",
    "Drafted",
    "EagleConfig",
    "Fresh",
    "HeadConfig",
    "HeadFiles",
    "ParallelConfig",
    "ReadText",
    "draft_head",
    "kind_in",
    "kind_of",
    "places_of",
]
