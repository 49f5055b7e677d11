"""Pairs of texts as token ids."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specjax.data.examples import Example
from specjax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class TokenPairs:
    """Tokenised pairs, one after the other in two arrays.

    Attributes:
      tokens: `[all tokens]` int32, the inputs and targets of pair 0, then of pair 1, and so on.
      offsets: `[2 * pairs + 1]` int64; pair i's inputs are `tokens[offsets[2i]:offsets[2i + 1]]`,
        its targets end at `offsets[2i + 2]`.
    """

    tokens: np.ndarray  # [all tokens]
    offsets: np.ndarray  # [2 * pairs + 1]

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> "TokenPairs":
        """Makes pairs from the inputs and targets of pair 0, then of pair 1, and so on."""
        tokens = np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
        return cls(tokens, np.cumsum([0, *map(len, parts)], dtype=np.int64))

    @classmethod
    def joined(cls, several: Sequence["TokenPairs"]) -> "TokenPairs":
        """Concatenates several sequences of pairs."""
        lengths = np.concatenate([np.diff(pairs.offsets) for pairs in several])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(np.concatenate([pairs.tokens for pairs in several]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) // 2

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, middle, end = self.offsets[2 * i : 2 * i + 3]
        return self.tokens[start:middle], self.tokens[middle:end]

    def lengths(self) -> np.ndarray:
        """`[pairs, 2]` int64: the lengths of inputs and targets."""
        return np.diff(self.offsets).reshape(-1, 2)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all tokens and lengths."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.offsets):
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]


def check_pairs(examples: Sequence[Example], name: str = "the data") -> None:
    """Checks that there are examples, and that each is a pair of texts.

    Args:
      examples: the examples.
      name: their name in messages.
    """
    if not examples:
        raise UserError(f"{name}: the source has no examples: give another source")
    for example in examples:
        if example.targets is None:
            raise UserError(
                f"{name}: example {example.id} has no reference text: give its field "
                "(targets_field) or use aligned files"
            )
        if not isinstance(example.targets, str):
            raise UserError(
                f"{name}: example {example.id} has several reference texts: choose the field of a "
                "single text (targets_field), such as answers.0"
            )
        for text in (example.inputs, example.targets):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{name}: example {example.id} has half a surrogate pair at character "
                    f"{error.start + 1}: correct or remove this character"
                ) from None


def tokenize_pairs(
    examples: Iterable[Example],
    encode_inputs: Callable[[str], Sequence[int]],
    encode_targets: Callable[[str], Sequence[int]],
) -> TokenPairs:
    """Tokenises pairs, in order.

    Args:
      examples: pairs with `targets`; see `check_pairs`.
      encode_inputs: text -> token ids with special tokens, as a model reads a prompt.
      encode_targets: text -> token ids with the end-of-sequence token.
    """
    parts = []
    for example in examples:
        parts.append(np.asarray(encode_inputs(example.inputs), np.int32))
        parts.append(np.asarray(encode_targets(example.targets or ""), np.int32))
    return TokenPairs.of(parts)
