"""The text of a row while it grows: only what no later token can change."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from specjax.text.results import Row
from specjax.text.stops import cut
from specjax.text.text_models import TextModel
from specjax.tokenizers import Tokenizer, added_text
from specjax.tokenizers.tokenizer import common_prefix

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True, eq=False)
class Added:
    """The text that a row got in a step.

    Attributes:
      index: the `index` of the row.
      sample: its `sample`.
      text: the text; the texts of a row together are its `text`.
      row: the row, once it is finished, or None.
    """

    index: int
    sample: int
    text: str
    row: Row | None = None


class StreamedText:
    """The text of a row, token by token.

    It holds back incomplete characters, and the beginning of a text that may become a stop string.

    Args:
      model: the model that writes the row; None: there is no text.
      prompt: the tokens of its prompt.
      stop: the stop strings.
    """

    def __init__(self, model: TextModel | None, prompt: np.ndarray, stop: Sequence[str]) -> None:
        self._words = None if model is None else model.tokenizer
        goes_on = model is not None and model.continues_prompts
        self._before = prompt.tolist() if goes_on else []
        self._stop, self._read, self._text, self._sent = stop, 0, "", 0

    def more(self, tokens: np.ndarray) -> str:
        """Returns the text that became certain, from all tokens of the unfinished row."""
        if self._words is None:
            return ""
        by_token, breaks = _breaking(self._words)
        new = tokens[self._read :].tolist()
        if not by_token or not new:
            return ""
        text = certain = added_text(self._words, self._before, new)
        if breaks is not None:
            # Some decoders read a run of bytes as a whole, so a later byte may change all of it.
            broken = added_text(self._words, self._before, [*new, breaks])
            certain = common_prefix(text, broken).rstrip(_REPLACEMENT)
        whole = self._text + certain
        if certain and certain == text:
            # The next tokens are read after these alone: reading all again would take longer.
            self._text, self._before, self._read = whole, new, len(tokens)
        until_stop = cut(whole, self._stop)
        # A stop string across bytes that are left out of the text does not end the row.
        end = len(until_stop)
        if until_stop == whole:
            end -= _pending(whole, self._stop)
        added, self._sent = whole[self._sent : end], max(self._sent, end)
        return added

    def rest(self, text: str) -> str:
        """Returns what `more` has held back of the finished row's text."""
        return text[self._sent :]


def _pending(text: str, strings: Sequence[str]) -> int:
    """The length of the longest end of `text` with which a string may begin."""
    ends = (
        length
        for string in strings
        for length in range(min(len(string) - 1, len(text)), 0, -1)
        if text.endswith(string[:length])
    )
    return max(ends, default=0)


@functools.lru_cache(maxsize=8)
def _breaking(tokenizer: Tokenizer) -> tuple[bool, int | None]:
    """Whether texts can be read token by token, and a token that is not a whole character."""
    try:
        pieces = tokenizer.all_pieces.later
    except ValueError:
        return False, None
    parts = [i for i, piece in enumerate(pieces) if _REPLACEMENT in piece.decode(errors="replace")]
    return True, min(parts, key=lambda i: pieces[i] != b"\xff", default=None)
