"""From directories to text: models with their tokenizers, the decoder, and the engine below it."""

from specjax.text.decoder import Decoder
from specjax.text.directories import load_pair, load_text_model
from specjax.text.drafts import WithParams
from specjax.text.engine import Engine
from specjax.text.parts import register_part
from specjax.text.requests import Request
from specjax.text.results import Result
from specjax.text.setting import Setting
from specjax.text.text_models import Pair, TextModel

__all__ = [
    "Decoder",
    "Engine",
    "Pair",
    "Request",
    "Result",
    "Setting",
    "TextModel",
    "WithParams",
    "load_pair",
    "load_text_model",
    "register_part",
]
