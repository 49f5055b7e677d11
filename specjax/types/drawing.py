"""How tokens are drawn: temperature, top-k and top-p, and processors that run first.

Axes: B rows, P prompt length, V vocabulary.
"""

import abc
import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specjax.checks import checked
from specjax.types.language_model import Array, Params
from specjax.types.pytrees import traced_dataclass

_LARGEST = float(jnp.finfo(jnp.float32).max)


class Processor(Protocol):
    """Changes a model's logits before temperature, top-k and top-p; static and hashable.

    Its state follows the tokens of each row. It advances token by token along a drafted block, and
    returns to the last committed token. So logits may depend on all earlier tokens in any way, and
    the output follows the processed distributions exactly. Confidences do not see it.
    """

    @abc.abstractmethod
    def init(self, inputs: Array, input_lengths: Array) -> Any:
        """The state after the prompts.

        Args:
          inputs: `[B, P]` int32, padded on the right.
          input_lengths: `[B]` int32, the number of real inputs of each row.

        Returns:
          A pytree; the leading axis of its arrays is the batch.
        """

    @abc.abstractmethod
    def process(self, params: Params, state: Any, logits: Array) -> Array:
        """The logits `[B, V]` to draw from, computed from the model's `[B, V]` float32.

        `params` are the processor's parameters: the same pytree for all rows.
        """

    @abc.abstractmethod
    def advance(self, state: Any, tokens: Array) -> Any:
        """The state after one more token of each row, `[B]` int32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Processing:
    """A processor at its place in the rows' texts.

    Attributes:
      processor: static.
      params: its parameters, shared by rows: None except while a method steps.
      state: its state after the committed, or drafted, tokens.
    """

    processor: Processor = dataclasses.field(metadata={"static": True})
    params: Params
    state: Any


@traced_dataclass
class Sampling:
    """How tokens are drawn. Each value is a number, or an array with a number per row.

    A field that is None is left out of the compiled program, so an unfiltered run computes no
    threshold.

    Attributes:
      temperature: >= 0, finite; logits are divided by it. 0: greedy, one-hot at the first argmax.
      top_k: >= 1, or None; only the k largest logits stay, with all ties of the k-th.
      top_p: in (0, 1], or None; a token stays if the tokens strictly more probable than it (after
        temperature and top-k) have less than this mass, so all ties at the edge stay.
      processing: the processor of the logits, which comes first. A method with a processor sets it;
        the functions of `specjax.processing` read it.

    Raises:
      ValueError: if a concrete value is outside its range.
    """

    temperature: jax.Array | float = 1.0
    top_k: jax.Array | int | None = None
    top_p: jax.Array | float | None = None
    processing: Processing | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "temperature", checked("temperature", self.temperature, low=0.0, high=_LARGEST))
        if self.top_k is not None:
            put(self, "top_k", checked("top_k", self.top_k, low=1, dtype=jnp.int32))
        if self.top_p is not None:
            put(self, "top_p", checked("top_p", self.top_p, low=0.0, high=1.0, open_low=True))
