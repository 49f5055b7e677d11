"""Data: examples from files and seqio tasks, and batches for training."""

from specjax.data.batching import (
    Batching,
    BucketedBatches,
    JoinedBatch,
    JoinedLayout,
    Layout,
    PairBatch,
    PairLayout,
)
from specjax.data.examples import Example, read_aligned, read_examples
from specjax.data.pairs import TokenPairs, check_pairs, tokenize_pairs

__all__ = [
    "Batching",
    "BucketedBatches",
    "Example",
    "JoinedBatch",
    "JoinedLayout",
    "Layout",
    "PairBatch",
    "PairLayout",
    "TokenPairs",
    "check_pairs",
    "read_aligned",
    "read_examples",
    "tokenize_pairs",
]
