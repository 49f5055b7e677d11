"""Tokenizers of model directories, without TensorFlow."""

from specjax.tokenizers.load import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = ["ByteTokenizer", "Tokenizer", "load_tokenizer"]
