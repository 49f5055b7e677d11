"""Pairs of texts as token ids."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specjax.data.examples import Example


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

    Raises:
      ValueError: there is no example, or an example has no targets or half a surrogate pair.
    """
    if not examples:
        raise ValueError(f"{name}: the source has no examples: give another source")
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
    examples: Iterable[Example],
    encode_inputs: Callable[[str], Sequence[int]],
    encode_targets: Callable[[str], Sequence[int]],
) -> TokenPairs:
    """Tokenises pairs.

    Args:
      examples: pairs with `targets`.
      encode_inputs: text -> token ids with special tokens, as a model reads a prompt.
      encode_targets: text -> token ids with the end-of-sequence token.

    Returns:
      The pairs, in order.

    Raises:
      ValueError: see `check_pairs`.
    """
    examples = list(examples)
    check_pairs(examples)
    chunks = [
        np.asarray(encode(text or ""), np.int32)
        for example in examples
        for encode, text in (
            (encode_inputs, example.inputs),
            (encode_targets, example.targets),
        )
    ]
    return TokenPairs(np.concatenate(chunks), np.cumsum([0, *map(len, chunks)], dtype=np.int64))
