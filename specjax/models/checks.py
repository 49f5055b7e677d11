"""Checks of prompts on the host, where a user's concrete values enter.

Inside a traced function a token outside the vocabulary or a prompt past the cache's end cannot
raise; so whoever takes prompts from a user calls `check_prompts` first.
"""

from typing import Any

import numpy as np

from specjax.models.model import Model


def check_prompts(
    model: Model,
    inputs: Any,
    input_lengths: Any,
    max_length: int,
    *,
    new_tokens: int = 0,
    prefix: Any = None,
    prefix_lengths: Any = None,
) -> None:
    """Checks that prompts fit the model and its cache.

    Args:
      model: the model that is to take them in.
      inputs: `[B, P]` integers, padded on the right.
      input_lengths: `[B]`, how many of each row's inputs are real.
      max_length: S, positions of the cache.
      new_tokens: how many positions must be left after the prompt.
      prefix: `[B, F]` integers, forced first tokens of the output, or None.
      prefix_lengths: `[B]`, or None for F in each row.

    Raises:
      ValueError: for an empty row, a length beyond the array, a token outside the vocabulary, or a
        prompt that the cache cannot hold; one line that names the row, the value and the remedy.
    """
    inputs, lengths = np.asarray(inputs), np.asarray(input_lengths)
    _check_rows("inputs", inputs, lengths, 1, model.vocab_size)
    prefix_sizes = np.zeros(len(inputs), np.int64)
    if prefix is not None:
        prefix = np.asarray(prefix)
        prefix_sizes = np.full(len(prefix), prefix.shape[-1])
        if prefix_lengths is not None:
            prefix_sizes = np.asarray(prefix_lengths)
        _check_rows("prefix", prefix, prefix_sizes, 0, model.vocab_size)
        if len(prefix) != len(inputs):
            raise ValueError(f"prefix has {len(prefix)} rows but inputs have {len(inputs)}")
    needed = np.asarray(model.prompt_positions(lengths, prefix_sizes)) + new_tokens
    if np.any(needed > max_length):
        row = int(np.argmax(needed))
        generated = f" and {new_tokens} new tokens" if new_tokens else ""
        raise ValueError(
            f"row {row}: a prompt of {needed[row] - new_tokens} tokens{generated} need "
            f"{needed[row]} cache positions but there are {max_length}: "
            f"raise the cache length to {needed[row]} or shorten the prompt"
        )


def _check_rows(
    name: str, tokens: np.ndarray, lengths: np.ndarray, least: int, vocab_size: int
) -> None:
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is {tokens.dtype}{list(tokens.shape)}: must be an integer array [rows, tokens]"
        )
    rows, width = tokens.shape
    if lengths.shape != (rows,) or lengths.dtype.kind not in "iu":
        raise ValueError(
            f"the lengths of {name} are {lengths.dtype}{list(lengths.shape)}: must be an integer "
            f"array [{rows}], one per row"
        )
    for bad, remedy in (
        (lengths < least, "give every row at least one token"),
        (lengths > width, f"{name} has room for {width} per row"),
    ):
        if np.any(bad):
            row = int(np.argmax(bad))
            raise ValueError(f"{name} row {row} has length {lengths[row]}: {remedy}")
    real = np.arange(width)[None] < lengths[:, None]
    bad = real & ((tokens < 0) | (tokens >= vocab_size))
    if np.any(bad):
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{name} row {row} has token {tokens[row, column]} at position {column}: token ids "
            f"must be in 0 .. {vocab_size - 1}; is this the model's own tokenizer?"
        )
