"""Prompts and known texts side by side, and what a model says along them.

Axes: B rows, P prompt length, N longest text, V vocabulary, D width.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.types import Array, LanguageModel, Params

# Entries of the distributions of all models that are held at once.
_ENTRIES = 2**27


class Rows(NamedTuple):
    """Some rows, padded.

    Attributes:
      inputs: `[B, P]` int32 prompts.
      lengths: `[B]` int32, of the prompts.
      texts: `[B, N]` int32.
      ends: `[B]` int32, the lengths of the texts; 0 in rows that only fill up.
    """

    inputs: np.ndarray  # [B, P]
    lengths: np.ndarray  # [B]
    texts: np.ndarray  # [B, N]
    ends: np.ndarray  # [B]


class Said(NamedTuple):
    """What a model says of a text, position by position.

    Attributes:
      logits: `[B, N, V]` float32, of the text's token there.
      hidden: `[B, N, D]`, the last hidden states of the tokens before.
      before: `[B, N]` int32, these tokens.
    """

    logits: Array  # [B, N, V]
    hidden: Array  # [B, N, D]
    before: Array  # [B, N]


def batches(
    prompts: Sequence[np.ndarray],
    texts: Sequence[np.ndarray],
    vocab_size: int,
    arrays: int,
    entries: int | None = None,
) -> Iterator[tuple[slice, Rows]]:
    """Cuts rows into batches of one shape that fit into memory.

    Args:
      prompts: the tokens of each row, at least one.
      texts: likewise.
      vocab_size: V.
      arrays: how many arrays `[B, N, V]` are held at once.
      entries: how many entries these may have together.

    Yields:
      The places of the rows, and the rows.
    """
    width, longest = (_rounded(max(map(len, rows))) for rows in (prompts, texts))
    at_once = max(1, (entries or _ENTRIES) // (arrays * longest * vocab_size))
    at_once = 1 << (min(at_once, len(texts)).bit_length() - 1)
    for begin in range(0, len(texts), at_once):
        part = slice(begin, min(begin + at_once, len(texts)))
        yield part, _padded(prompts[part], texts[part], at_once, width, longest)


def read_texts(
    model: LanguageModel, params: Params, inputs: Array, lengths: Array, texts: Array
) -> Said:
    """Reads texts in one pass; see `Rows`. To be jitted."""
    longest = model.prompt_positions(inputs.shape[1], 0) + texts.shape[1]
    filled = model.prefill(params, inputs, lengths, longest)
    before = jnp.concatenate([filled.tokens[:, None], texts[:, :-1]], axis=1)
    said = model.extend(params, filled.cache, before, filled.positions)
    return Said(said.logits, said.hidden, before)


def _padded(
    prompts: Sequence[np.ndarray], texts: Sequence[np.ndarray], rows: int, width: int, longest: int
) -> Rows:
    """So many rows; those that are too few are filled up with a row of one token, and no text."""
    inputs, outputs = np.zeros((rows, width), np.int32), np.zeros((rows, longest), np.int32)
    lengths, ends = np.ones(rows, np.int32), np.zeros(rows, np.int32)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        inputs[i, : len(prompt)], lengths[i] = prompt, len(prompt)
        outputs[i, : len(text)], ends[i] = text, len(text)
    return Rows(inputs, lengths, outputs, ends)


def _rounded(length: int) -> int:
    """The next power of two from 16 up: few shapes."""
    return max(16, 1 << (length - 1).bit_length())
