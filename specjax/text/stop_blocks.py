"""Stop strings of single requests: their automatons are blocks of one table, which rows share.

Axes: S states, V vocabulary.
"""

from collections.abc import Collection

import jax
import numpy as np

from specjax.decoding import Method
from specjax.text.stops import token_table
from specjax.text.text_models import TextModel
from specjax.types import Array

_NONE = ()
# The fewest states of a table. More are a power of two, so that few shapes are compiled.
_FEWEST = 32


class StopBlocks:
    """A table with the automatons of several sets of stop strings.

    Args:
      model: the model that writes the texts.
      method: the method, on whose devices the table is.
      strings: the strings of rows without their own; their automaton begins at state 0.

    Attributes:
      starts: the strings of a row -> its state before the first token.
    """

    def __init__(self, model: TextModel, method: Method, strings: tuple[str, ...]) -> None:
        self._model, self._method = model, method
        self._blocks = {strings: self._block(strings)}
        self.starts, self._size = {strings: 0}, _FEWEST
        self._table: Array | None = None

    @property
    def table(self) -> Array:
        """`[S, V]`, for `Method.run`; another array after new strings."""
        if self._table is None:
            final = self._size - 1
            made = np.full((self._size, self._method.vocab_size), final, np.int32)
            for strings, start in self.starts.items():
                block = self._blocks[strings]
                made[start : start + len(block)] = np.where(block < 0, final, block + start)
            where, made = self._method.partitioner, made.astype(_integers(self._size))
            self._table = jax.device_put(made) if where is None else where.replicate(made)
        return self._table

    def add(self, strings: tuple[str, ...], used: Collection[tuple[str, ...]]) -> None:
        """Adds the strings of a row.

        Args:
          strings: the strings; none for a row that no string ends.
          used: the strings of all rows; the states of others may be used again.

        Raises:
          ValueError: the text of a token depends on other tokens.
        """
        if strings in self.starts:
            return
        block, (_, *others) = self._block(strings), self.starts
        for old in others:
            if old not in used:
                del self.starts[old], self._blocks[old]
        place = 0
        for other, start in sorted(self.starts.items(), key=lambda item: item[1]):
            if start - place >= len(block):
                break
            place = start + len(self._blocks[other])
        while place + len(block) >= self._size:
            self._size *= 2
        self._blocks[strings], self.starts[strings], self._table = block, place, None

    def _block(self, strings: tuple[str, ...]) -> np.ndarray:
        """`[S - 1, V]` int32, the automaton without its final state, which is -1."""
        if strings == _NONE:
            return np.zeros((1, self._method.vocab_size), np.int32)
        goes_on, words = self._model.continues_prompts, self._model.tokenizer
        table = token_table(strings, words, self._method.vocab_size, goes_on=goes_on)
        return np.where(table == len(table) - 1, -1, table)[:-1].astype(np.int32)


def _integers(size: int) -> type:
    return np.int16 if size <= 2**15 else np.int32
