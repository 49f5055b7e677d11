"""From directories to text: models with their tokenizers, the decoder, and the engine below it."""

from specjax.text.baselines import (
    ALL_CASCADES,
    BiLDCascade,
    MethodPlan,
    OracleCascade,
    SequenceCascade,
    TokenCascade,
)
from specjax.text.cascades import Cascade
from specjax.text.decoder import Decoder
from specjax.text.engine import Engine, Finished
from specjax.text.models import Models, Pair, TextModel, load_models, load_pair, load_text_model
from specjax.text.plans import DraftPlan, Ingredients, Lookup, Planned
from specjax.text.prompts import BUCKETS, Prompt
from specjax.text.requests import Request
from specjax.text.results import Result, Row, RowInfo, RunInfo

__all__ = [
    "ALL_CASCADES",
    "BUCKETS",
    "BiLDCascade",
    "Cascade",
    "Decoder",
    "DraftPlan",
    "Engine",
    "Finished",
    "Ingredients",
    "Lookup",
    "MethodPlan",
    "Models",
    "OracleCascade",
    "Pair",
    "Planned",
    "Prompt",
    "Request",
    "Result",
    "Row",
    "RowInfo",
    "RunInfo",
    "SequenceCascade",
    "TextModel",
    "TokenCascade",
    "load_models",
    "load_pair",
    "load_text_model",
]
