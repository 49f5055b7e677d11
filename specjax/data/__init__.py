"""Data: examples from files and seqio tasks, batches for training, and tokenizers."""

from specjax.data.batching import Batch, Batching, BucketedBatches, TokenPairs, tokenize_pairs
from specjax.data.examples import Example, read_aligned, read_examples
from specjax.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Batching",
    "BucketedBatches",
    "ByteTokenizer",
    "Example",
    "TokenPairs",
    "Tokenizer",
    "load_tokenizer",
    "read_aligned",
    "read_examples",
    "tokenize_pairs",
]
