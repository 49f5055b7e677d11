"""Pairs of texts as token ids, and their batches: in an order that the step number determines.

Axes: B rows, L tokens of a bucket, N pairs, T tokens of all pairs, E = 2 N + 1 ends.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from specjax.checks import check_number, whole_fields
from specjax.data.examples import Example
from specjax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class TokenPairs:
    """Tokenised pairs, one after the other.

    Attributes:
      tokens: the inputs and targets of pair 0, then of pair 1, and so on.
      offsets: pair i's inputs are `tokens[offsets[2i]:offsets[2i + 1]]`, its targets end at
        `offsets[2i + 2]`.
    """

    tokens: Int32[np.ndarray, " T"]
    offsets: Int64[np.ndarray, " E"]

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> "TokenPairs":
        """Makes pairs from their parts, in the order of `tokens`."""
        tokens = np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
        return cls(tokens, np.cumsum([0, *map(len, parts)], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) // 2

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, middle, end = self.offsets[2 * i : 2 * i + 3]
        return self.tokens[start:middle], self.tokens[middle:end]

    def lengths(self) -> Int64[np.ndarray, "N 2"]:
        """The lengths of inputs and targets."""
        return np.diff(self.offsets).reshape(-1, 2)

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for array in (self.tokens, self.offsets):
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]


def check_pairs(examples: Sequence[Example], name: str = "the data") -> None:
    """Raises UserError unless there are examples, and each is a pair of texts."""
    if not examples:
        raise UserError(f"{name}: the source has no examples: give another source")
    for example in examples:
        if not isinstance(example.targets, str):
            raise UserError(
                f"{name}: example {example.id} must have a single reference text: give its field "
                "(targets_field), such as answers.0, or use aligned files"
            )
        try:
            f"{example.inputs}{example.targets}".encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{name}: example {example.id} has half a surrogate pair: correct or remove it"
            ) from None


def tokenize_pairs(
    examples: Iterable[Example],
    encode_inputs: Callable[[str], Sequence[int]],
    encode_targets: Callable[[str], Sequence[int]],
) -> TokenPairs:
    """Tokenises pairs, in order."""
    texts = ((encode_inputs(x.inputs), encode_targets(x.targets or "")) for x in examples)
    return TokenPairs.of([np.asarray(ids, np.int32) for pair in texts for ids in pair])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """How pairs are put into batches.

    Attributes:
      tokens_per_batch: padded tokens per batch (of a T5: padded target tokens).
      bucket_lengths: increasing lengths, in tokens; a pair is put into the first bucket that is
        long enough for it, including end-of-sequence tokens. Longer pairs are left out.
    """

    tokens_per_batch: int = 2048
    bucket_lengths: tuple[int, ...] = (16, 24, 32, 48, 96)

    def __post_init__(self) -> None:
        lengths: Any = check_number(
            "Batching: bucket_lengths", self.bucket_lengths, low=1, dtype=np.int32
        )
        if lengths.ndim != 1 or np.any(np.diff(lengths) < 1):
            raise UserError(
                f"Batching: bucket_lengths={self.bucket_lengths} must be increasing lengths, such "
                "as (64, 128) or (64,)"
            )
        object.__setattr__(self, "bucket_lengths", tuple(lengths.tolist()))
        whole_fields(self, "Batching: ", tokens_per_batch=1)


class PairBatch(NamedTuple):
    """A batch for an encoder-decoder, of NumPy, or of JAX inside a step; padded on the right.

    A row that only fills the shape has no targets, and as its input an end-of-sequence token, so
    that attention has a position.
    """

    inputs: Int32[Any, "B L"]
    targets: Int32[Any, "B L"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairLayout:
    """Inputs and targets in two arrays; the longer of the two determines the bucket."""

    pad_id: int = 0
    eos_id: int = 1

    def lengths(self, pairs: TokenPairs) -> np.ndarray:
        return pairs.lengths().max(axis=1)

    def fill(
        self, members: Sequence[tuple[np.ndarray, np.ndarray]], rows: int, length: int
    ) -> PairBatch:
        inputs = np.full((rows, length), self.pad_id, np.int32)
        targets = np.full((rows, length), self.pad_id, np.int32)
        inputs[:, 0] = self.eos_id
        for row, (source, target) in enumerate(members):
            inputs[row, : len(source)] = source
            targets[row, : len(target)] = target
        return PairBatch(inputs, targets)


class JoinedBatch(NamedTuple):
    """A batch for a decoder-only network, of NumPy, or of JAX inside a step.

    Attributes:
      tokens: the prompt and then the target, padded on the right.
      is_target: true for the tokens that the model predicts: the target and its end-of-sequence
        token, but neither prompt nor padding.
    """

    tokens: Int32[Any, "B L"]
    is_target: Bool[Any, "B L"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedLayout:
    """Prompt and target in one row; the sum of their lengths determines the bucket."""

    pad_id: int = 0

    def lengths(self, pairs: TokenPairs) -> np.ndarray:
        return pairs.lengths().sum(axis=1)

    def fill(
        self, members: Sequence[tuple[np.ndarray, np.ndarray]], rows: int, length: int
    ) -> JoinedBatch:
        tokens = np.full((rows, length), self.pad_id, np.int32)
        is_target = np.zeros((rows, length), bool)
        for row, (prompt, target) in enumerate(members):
            end = len(prompt) + len(target)
            tokens[row, :end] = np.concatenate([prompt, target])
            is_target[row, len(prompt) : end] = True
        return JoinedBatch(tokens, is_target)


class BucketedBatches:
    """Batches of similar lengths: a shape for each bucket, so that few programs are compiled.

    `batch(step)` depends only on the arguments and `step`, so a run needs only its step number to
    resume with the same data. Every epoch has each pair that fits once, in a new order.

    Args:
      pairs: the data.
      batching: the lengths; a bucket of length L has `tokens_per_batch // L` rows, rounded down to
        a multiple of `row_multiple` (at least one multiple).
      layout: puts pairs into the arrays of a batch; `PairLayout()` by default.
      row_multiple: the number of devices that share the rows.
      seed: the seed of the order; None keeps the order of the data (for evaluation).

    Attributes:
      num_left_out: the number of pairs that are longer than the last bucket.
      rows: the number of rows of a batch, for each bucket.
    """

    def __init__(
        self,
        pairs: TokenPairs,
        batching: Batching,
        layout: "PairLayout | JoinedLayout | None" = None,
        *,
        row_multiple: int = 1,
        seed: int | None = 0,
    ):
        self._pairs, self._batching, self._seed = pairs, batching, seed
        self._layout = PairLayout() if layout is None else layout
        self._lengths = lengths = np.asarray(batching.bucket_lengths)
        multiples = batching.tokens_per_batch // lengths // row_multiple
        self.rows: list[int] = (np.maximum(multiples, 1) * row_multiple).tolist()
        self._bucket = np.searchsorted(lengths, self._layout.lengths(pairs))
        counts = np.bincount(self._bucket, minlength=len(lengths) + 1)
        self.num_left_out = int(counts[-1])
        if self.num_left_out == len(pairs):
            raise UserError(
                f"bucket_lengths={batching.bucket_lengths}: all {len(pairs)} pairs are longer than "
                f"{lengths[-1]} tokens: add a longer bucket"
            )
        self.batches_per_epoch = int(np.sum(-(-counts[:-1] // self.rows)))
        self._epoch = -1
        self._plan: list[tuple[int, np.ndarray]] = []

    def batch(self, step: int, targets: Mapping[int, np.ndarray] | None = None) -> Any:
        """The batch of training step `step` (from 0).

        `targets` has targets by row that replace those of the data; each must fit into the bucket.
        """
        bucket, members = self._members_of(step)
        pairs = [self._pairs[member] for member in members]
        for row, target in (targets or {}).items():
            pairs[row] = pairs[row][0], target
        return self._layout.fill(pairs, self.rows[bucket], int(self._lengths[bucket]))

    def inputs(self, step: int) -> tuple[list[np.ndarray], int]:
        """The inputs of the batch of `step`, and the length of its bucket in tokens."""
        bucket, members = self._members_of(step)
        return [self._pairs[member][0] for member in members], int(self._lengths[bucket])

    def describe(self) -> dict[str, Any]:
        layout: Any = self._layout
        return {
            "data": self._pairs.fingerprint,
            **dataclasses.asdict(self._batching),
            # Depends on the number of devices; another number would lose or repeat pairs.
            "rows_per_batch": self.rows,
            "layout": {"class": type(layout).__name__, **dataclasses.asdict(layout)},
            "seed": self._seed,
        }

    def _members_of(self, step: int) -> tuple[int, np.ndarray]:
        epoch, index = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._plan, self._epoch = self._plan_epoch(epoch), epoch
        return self._plan[index]

    def _plan_epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        rng = None if self._seed is None else np.random.default_rng([self._seed, epoch])
        order = np.arange(len(self._pairs)) if rng is None else rng.permutation(len(self._pairs))
        plan = []
        for bucket, rows in enumerate(self.rows):
            members = order[self._bucket[order] == bucket]
            plan += [(bucket, members[i : i + rows]) for i in range(0, len(members), rows)]
        return plan if rng is None else [plan[i] for i in rng.permutation(len(plan))]
