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
from specjax.data.few_shot import FewShot
from specjax.data.pairs import TokenPairs, check_pairs, tokenize_pairs
from specjax.data.records import Record, read_records
from specjax.data.templates import Template

__all__ = [
    "Batching",
    "BucketedBatches",
    "Example",
    "FewShot",
    "JoinedBatch",
    "JoinedLayout",
    "Layout",
    "PairBatch",
    "PairLayout",
    "Record",
    "Template",
    "TokenPairs",
    "check_pairs",
    "read_aligned",
    "read_examples",
    "read_records",
    "tokenize_pairs",
]
