"""A common beginning of prompts, which the models read once.

Axes: L tokens.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from specjax.checks import shown
from specjax.decoding import Method
from specjax.errors import UserError
from specjax.memory import nbytes
from specjax.models.beginnings import Beginning
from specjax.text.requests import Prompt
from specjax.types import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """A common beginning of prompts with the caches of the models; from `Decoder.prefix`.

    Attributes:
      prompt: the text, token ids or chat messages that prompts continue; None if they are whole.
      method: the method of its Decoder.
      params: the parameters of the method.
      taken: the caches if a row has left them; None reads the tokens when they are first needed.
    """

    tokens: Int32[np.ndarray, " L"]
    prompt: Prompt | None = dataclasses.field(repr=False)
    method: Method = dataclasses.field(repr=False)
    params: Params = dataclasses.field(repr=False)
    taken: Beginning | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.tokens.setflags(write=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Prefix({len(self)} tokens)"

    @functools.cached_property
    def beginning(self) -> Beginning | None:
        """The caches of the models; None without tokens, or if no model continues a prompt."""
        if not len(self):
            return None
        read = self.taken or self.method.begin(self.params, self.tokens)
        return read if read.caches else None

    @functools.cached_property
    def nbytes(self) -> int:
        """The least bytes of its caches on each device, from their shapes."""
        if not len(self):
            return 0
        begin = self.method.begin
        read = self.taken or jax.eval_shape(lambda now: begin(now, self.tokens), self.params)
        where = self.method.partitioner
        return nbytes(read.caches) // (1 if where is None else where.mesh.size)

    def join(self, prompt: Any, name: str) -> Prompt:
        """Returns the whole prompt from its rest, which is of the prefix's kind.

        If prompts are whole, it is `prompt` itself. `name` is its name in messages.
        """
        if self.prompt is None:
            return prompt
        if isinstance(self.prompt, str) and isinstance(prompt, str):
            return self.prompt + prompt
        texts = isinstance(self.prompt, str), isinstance(prompt, str)
        if any(texts) or not isinstance(prompt, Sequence | np.ndarray):
            kind = "a text"
            if not isinstance(self.prompt, str):
                ids = isinstance(self.prompt[0], int | np.integer)
                kind = "a list of token ids" if ids else "a list of messages"
            raise UserError(
                f"{name} must be {kind}, because the prefix is {kind}, got {shown(prompt)}"
            )
        if isinstance(prompt, np.ndarray):
            return np.concatenate([self.prompt, prompt])
        return [*self.prompt, *prompt]

    def common(self, tokens: np.ndarray) -> int:
        """Returns the number of the prefix's first tokens with which a longer prompt begins."""
        return common_length(self.tokens, tokens[:-1])


def common_of(prompts: Sequence[np.ndarray]) -> Int32[np.ndarray, " L"]:
    """Returns the longest tokens with which more than half of the prompts begin.

    Each of these prompts has at least one more token.
    """
    # Among sorted prompts, more than half lie around the middle.
    middle = sorted(prompts, key=lambda prompt: prompt.tolist())[len(prompts) // 2]
    lengths = sorted(common_length(middle, prompt[:-1]) for prompt in prompts)
    return middle[: lengths[(len(prompts) - 1) // 2]].copy()


def common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Returns the number of tokens with which two sequences begin alike."""
    shorter = min(len(first), len(second))
    differ = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differ[0]) if differ.size else shorter
