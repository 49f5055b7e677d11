"""From directories to text: models with their tokenizers, the decoder, and the engine below it."""

from specjax.text.decoder import Decoder
from specjax.text.directories import load_models, load_pair, load_text_model
from specjax.text.drafts import WithParams
from specjax.text.engine import Engine
from specjax.text.parts import register_part
from specjax.text.requests import Request
from specjax.text.results import Result
from specjax.text.setting import Setting
from specjax.text.text_models import Models, Pair, TextModel

__all__ = [
    "Decoder",
    "Engine",
    "Models",
    "Pair",
    "Request",
    "Result",
    "Setting",
    "TextModel",
    "WithParams",
    "load_models",
    "load_pair",
    "load_text_model",
    "register_part",
]
