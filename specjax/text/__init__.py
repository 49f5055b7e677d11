"""From directories to text: models with their tokenizers, and the decoder over them."""

from specjax.text.decoder import Decoder
from specjax.text.models import Pair, TextModel, load_pair, load_text_model
from specjax.text.prompts import BUCKETS, Prompt
from specjax.text.results import Result, Row, RunInfo

__all__ = [
    "BUCKETS",
    "Decoder",
    "Pair",
    "Prompt",
    "Result",
    "Row",
    "RunInfo",
    "TextModel",
    "load_pair",
    "load_text_model",
]
