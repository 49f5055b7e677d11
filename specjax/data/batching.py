"""Batches of tokenised pairs: the shapes are fixed, and the step number determines the order."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import checked
from specjax.data.examples import Example


@dataclasses.dataclass(frozen=True, eq=False)
class TokenPairs:
    """Tokenised pairs, one after the other in two arrays.

    Attributes:
      tokens: `[all tokens]` int32, the inputs and targets of pair 0, then of pair 1, and so on.
      offsets: `[2 * pairs + 1]` int64; pair i's inputs are `tokens[offsets[2i]:offsets[2i + 1]]`,
        its targets end at `offsets[2i + 2]`.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) // 2

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, middle, end = self.offsets[2 * i : 2 * i + 3]
        return self.tokens[start:middle], self.tokens[middle:end]

    def lengths(self) -> np.ndarray:
        """`[pairs, 2]` int64: the lengths of inputs and targets."""
        return np.diff(self.offsets).reshape(-1, 2)


def check_pairs(examples: Sequence[Example], name: str = "data") -> None:
    """Checks that there are examples, and that each is a pair of texts.

    Args:
      examples: the examples.
      name: their name, for the message.

    Raises:
      ValueError: there is no example, or an example has no targets or half a surrogate pair.
    """
    if not examples:
        raise ValueError(f"{name}: no examples to train on: the source has none")
    for example in examples:
        if example.targets is None:
            raise ValueError(
                f"{name}: example {example.id} has no reference text: name its field "
                "(targets_field) or use aligned files"
            )
        for text in (example.inputs, example.targets):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{name}: example {example.id} has half a surrogate pair at character "
                    f"{error.start + 1}, which is not text: correct or remove it"
                ) from None


def tokenize_pairs(
    examples: Iterable[Example], encode: Callable[[str], Sequence[int]], eos_id: int
) -> TokenPairs:
    """Tokenises pairs and appends the end-of-sequence token to every text.

    Args:
      examples: pairs with `targets`.
      encode: text -> token ids, without special tokens.
      eos_id: the end-of-sequence token.

    Returns:
      The pairs, in order.

    Raises:
      ValueError: see `check_pairs`.
    """
    examples = list(examples)
    check_pairs(examples)
    chunks = [
        np.asarray([*encode(text or ""), eos_id], np.int32)
        for example in examples
        for text in (example.inputs, example.targets)
    ]
    return TokenPairs(np.concatenate(chunks), np.cumsum([0, *map(len, chunks)], dtype=np.int64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """How pairs are put into batches.

    Attributes:
      tokens_per_batch: padded target tokens per batch.
      bucket_lengths: increasing lengths, in tokens; a pair goes into the first bucket that is
        long enough for its inputs and its targets, with end-of-sequence tokens. If there is none,
        the pair is left out.

    Raises:
      TypeError: if a value is not a number.
      ValueError: if a value is not whole or is below 1, or the lengths do not increase.
    """

    tokens_per_batch: int = 2048
    bucket_lengths: tuple[int, ...] = (16, 24, 32, 48, 96)

    def __post_init__(self) -> None:
        lengths: Any = checked(
            "Batching: bucket_lengths", self.bucket_lengths, low=1, dtype=np.int32
        )
        if lengths.ndim != 1 or np.any(np.diff(lengths) < 1):
            raise ValueError(
                f"Batching: bucket_lengths={self.bucket_lengths} must be lengths that "
                "increase, such as (64, 128), or one length, written (64,)"
            )
        tokens = checked("Batching: tokens_per_batch", self.tokens_per_batch, low=1, dtype=np.int32)
        object.__setattr__(self, "bucket_lengths", tuple(lengths.tolist()))
        object.__setattr__(self, "tokens_per_batch", int(tokens))


class Batch(NamedTuple):
    """One batch of a fixed shape.

    Attributes:
      inputs: `[B, L]` int32, padded on the right. A row that only fills the shape has one
        end-of-sequence token, so that attention has at least one position.
      targets: `[B, L]` int32, padded on the right; a row that only fills the shape has no tokens.
    """

    inputs: np.ndarray
    targets: np.ndarray


class BucketedBatches:
    """Batches of similar lengths: one shape per bucket, so that few programs are compiled.

    `batch(step)` depends only on the arguments and `step`. So a run resumes with the same data from
    its step number alone, and the order is not stored. Every epoch has each pair that fits once, in
    a new order.

    Args:
      pairs: the data.
      batching: the lengths; a bucket of length L has `tokens_per_batch // L` rows, rounded down to
        a multiple of `row_multiple` (at least one multiple).
      row_multiple: the number of devices that share the rows.
      seed: the seed of the order; None keeps the order of the data (for evaluation).
      pad_id: the padding token.
      eos_id: the end-of-sequence token, the one input of a row that only fills the shape.

    Attributes:
      num_left_out: the number of pairs that are longer than the last bucket.
      rows: the number of rows of a batch, for each bucket.
      batches_per_epoch: the number of batches of an epoch.

    Raises:
      ValueError: every pair is longer than the last bucket.
    """

    def __init__(
        self,
        pairs: TokenPairs,
        batching: Batching,
        *,
        row_multiple: int = 1,
        seed: int | None = 0,
        pad_id: int = 0,
        eos_id: int = 1,
    ):
        self._pairs = pairs
        self._lengths = lengths = np.asarray(batching.bucket_lengths)
        multiples = batching.tokens_per_batch // lengths // row_multiple
        self.rows: list[int] = (np.maximum(multiples, 1) * row_multiple).tolist()
        self._bucket = np.searchsorted(lengths, pairs.lengths().max(axis=1))
        counts = np.bincount(self._bucket, minlength=len(lengths) + 1)
        self.num_left_out = int(counts[-1])
        if self.num_left_out == len(pairs):
            raise ValueError(
                f"bucket_lengths={batching.bucket_lengths}: all {len(pairs)} pairs are longer than "
                f"{lengths[-1]} tokens: add a longer bucket"
            )
        self.batches_per_epoch = int(np.sum(-(-counts[:-1] // self.rows)))
        self._seed = seed
        self._pad_id, self._eos_id = pad_id, eos_id
        self._planned_epoch = -1
        self._plan: list[tuple[int, np.ndarray]] = []

    def batch(self, step: int) -> Batch:
        """The batch of training step `step` (from 0)."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if epoch != self._planned_epoch:
            self._plan, self._planned_epoch = self._plan_epoch(epoch), epoch
        bucket, members = self._plan[index]
        rows, length = self.rows[bucket], self._lengths[bucket]
        inputs = np.full((rows, length), self._pad_id, np.int32)
        targets = np.full((rows, length), self._pad_id, np.int32)
        inputs[len(members) :, 0] = self._eos_id
        for row, member in enumerate(members):
            source, target = self._pairs[member]
            inputs[row, : len(source)] = source
            targets[row, : len(target)] = target
        return Batch(inputs, targets)

    def epoch(self) -> Iterator[Batch]:
        """The batches of the first epoch."""
        return (self.batch(step) for step in range(self.batches_per_epoch))

    def _plan_epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        rng = None if self._seed is None else np.random.default_rng([self._seed, epoch])
        order = np.arange(len(self._pairs)) if rng is None else rng.permutation(len(self._pairs))
        plan = []
        for bucket, rows in enumerate(self.rows):
            members = order[self._bucket[order] == bucket]
            plan += [(bucket, members[i : i + rows]) for i in range(0, len(members), rows)]
        return plan if rng is None else [plan[i] for i in rng.permutation(len(plan))]
