"""The most frequent successor of each token in a text: all that is kept of a bigram model.

Axes: V vocabulary.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Pairs of tokens that are counted at once: as int64, 8 MiB.
_AT_ONCE = 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Bigram:
    """A table of successors, and the vocabulary that it is of.

    Attributes:
      successors: `[n]` int32 for the n ids of the tokenizer; -1 where none was seen.
      tokenizer_fingerprint: of the vocabulary, as `Tokenizer.fingerprint` tells it.
      notes: what else is told of it, as JSON values.

    Raises:
      ValueError: if the table is no row of ids in its vocabulary.
    """

    successors: np.ndarray = dataclasses.field(repr=False)
    tokenizer_fingerprint: str
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        table = np.asarray(self.successors)
        if table.ndim != 1 or not table.size or table.dtype != np.int32:
            raise ValueError(f"successors must be [n] int32, got {list(table.shape)} {table.dtype}")
        if table.min() < -1 or table.max() >= table.size:
            raise ValueError(
                f"successors must lie in -1 .. {table.size - 1}, got {table.min()} .. {table.max()}"
            )

    def table(self, name: str, tokenizer_fingerprint: str, vocab_size: int) -> np.ndarray:
        """The parameters of a `MaxGram`, once the vocabulary is found to be the same.

        Args:
          name: what messages call the model.
          tokenizer_fingerprint: of its tokenizer.
          vocab_size: V of the model, which may exceed the tokenizer's.

        Returns:
          `[V]` int32; -1 where no successor is known.

        Raises:
          ValueError: if the table is of another vocabulary.
        """
        if tokenizer_fingerprint != self.tokenizer_fingerprint or vocab_size < self.successors.size:
            raise ValueError(
                f"the bigram table has {self.successors.size} ids (tokenizer "
                f"{self.tokenizer_fingerprint}) but {name} has {vocab_size} (tokenizer "
                f"{tokenizer_fingerprint}): make one with `specjax train_bigram --tokenizer` and "
                "that model's directory"
            )
        missing = vocab_size - self.successors.size
        return np.pad(self.successors, (0, missing), constant_values=-1)


def most_frequent_successors(texts: Iterable[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Counts which token follows which.

    Args:
      texts: token ids; nothing follows the last one of a text.
      vocab_size: n, one more than the largest id.

    Returns:
      `[n]` int32, the most frequent successor of each token, the smallest of several; -1 where
      none was seen.
    """
    counts: tuple[np.ndarray, np.ndarray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    waiting: list[np.ndarray] = []
    size = 0
    for text in texts:
        ids = np.asarray(text, np.int64)
        waiting.append(ids[:-1] * vocab_size + ids[1:])
        size += waiting[-1].size
        if size >= _AT_ONCE:
            counts, waiting, size = _add(counts, waiting), [], 0
    pairs, often = _add(counts, waiting)
    first, second = pairs // vocab_size, pairs % vocab_size
    order = np.lexsort((second, -often, first))
    tokens, best = np.unique(first[order], return_index=True)
    table = np.full(vocab_size, -1, np.int32)
    table[tokens] = second[order][best]
    return table


def _add(
    counts: tuple[np.ndarray, np.ndarray], waiting: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs as numbers, and how often each was seen."""
    new, often = np.unique(np.concatenate([np.zeros(0, np.int64), *waiting]), return_counts=True)
    pairs, place = np.unique(np.concatenate([counts[0], new]), return_inverse=True)
    weights = np.concatenate([counts[1], often])
    total = np.zeros(pairs.size, np.int64)
    np.add.at(total, place, weights)
    return pairs, total
