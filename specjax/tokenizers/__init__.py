"""Tokenizers of model directories, without TensorFlow."""

from specjax.tokenizers.load import load_tokenizer
from specjax.tokenizers.tokenizer import ByteTokenizer, Tokenizer, added_text

__all__ = ["ByteTokenizer", "Tokenizer", "added_text", "load_tokenizer"]
