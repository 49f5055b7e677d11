"""Data: examples from files and seqio tasks, and batches for training."""

from specjax.data.batching import Batch, Batching, BucketedBatches, TokenPairs, tokenize_pairs
from specjax.data.examples import Example, read_aligned, read_examples

__all__ = [
    "Batch",
    "Batching",
    "BucketedBatches",
    "Example",
    "TokenPairs",
    "read_aligned",
    "read_examples",
    "tokenize_pairs",
]
