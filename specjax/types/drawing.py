"""How tokens are drawn: temperature, top-k and top-p, and processors before them.

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

    Its state follows the tokens of each row. It is advanced token by token along a drafted block,
    and of what is not committed nothing remains. So logits may depend on all tokens before them in
    any way, and what a method emits follows the processed distributions exactly. Confidences are
    those of the model alone.
    """

    @abc.abstractmethod
    def init(self, inputs: Array, input_lengths: Array) -> Any:
        """The state after the prompts.

        Args:
          inputs: `[B, P]` int32, padded on the right.
          input_lengths: `[B]` int32, how many of each row's inputs are real.

        Returns:
          A pytree; the leading axis of its arrays is the batch.
        """

    @abc.abstractmethod
    def process(self, params: Params, state: Any, logits: Array) -> Array:
        """The logits `[B, V]` that tokens are drawn from, in the place of these `[B, V]` float32.

        `params` are the processor's parameters: one pytree for all rows.
        """

    @abc.abstractmethod
    def advance(self, state: Any, tokens: Array) -> Any:
        """The state after one more token of each row, `[B]` int32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Processing:
    """A processor at a place in the rows' texts.

    Attributes:
      processor: static.
      params: its parameters, which belong to no row: None but while a method steps.
      state: its state after the tokens that are committed, or drafted.
    """

    processor: Processor = dataclasses.field(metadata={"static": True})
    params: Params
    state: Any


@traced_dataclass
class Sampling:
    """How tokens are drawn. Each number is one, or an array of one number per row.

    A field that is None is left out of the compiled program, so an unfiltered run never looks for
    a threshold.

    Attributes:
      temperature: >= 0, finite; logits are divided by it. 0: greedy, one-hot at the first argmax.
      top_k: >= 1, or None; only the k largest logits stay. Ties with the k-th all stay.
      top_p: in (0, 1], or None; a token stays while the tokens strictly more probable than it
        (after temperature and top-k) hold less than this mass, so ties at the edge all stay.
      processing: what changes the logits before that. A method with a processor sets it; the
        functions of `specjax.processing` read it.

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
