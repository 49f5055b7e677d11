"""How tokens are drawn: temperature, top-k, top-p, and processors.

Axes: B rows, V vocabulary.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from specjax.checks import check_part, checked
from specjax.errors import UserError
from specjax.types.language_model import Params
from specjax.types.pytrees import traced_dataclass, without_host

if TYPE_CHECKING:
    from specjax.types.method import PromptBatch

_LARGEST = float(jnp.finfo(jnp.float32).max)


def _in_program(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def on_the_device(self: Any, *args: Any, **options: Any) -> Any:
        return method(without_host(self), *args, **options)

    return on_the_device


class Processor(Protocol):
    """Changes the distribution that tokens are drawn from; a pytree.

    Its leaves are its strengths: numbers, or `[B]` a number per row. Everything else about it is
    static and hashable, or of the host: data such as token ids, which `bind` turns into arrays, so
    that other ids compile nothing. Derive your own from this class and decorate it with
    `types.traced_dataclass`; `init`, `advance` and `bind` may be left out.

    Its state follows the tokens of each row. It advances token by token along a drafted block, and
    returns to the last committed token. So the change may depend on all earlier tokens in any way,
    and the output follows the processed distributions exactly. Confidences do not see it.

    Attributes:
      order: processors run in the order of this number, those of one number as they are given.
        Below 100 `process` gets the model's logits, before temperature, top-k and top-p; from 100
        on the logarithms of what these leave, in rows that are not greedy.
      forbids: whether it may set entries to -inf. If it would leave a row no token, it is left out
        at this position. If False, entries below -1e37 are raised to it (with an order below 100).
    """

    order: ClassVar[int] = 0
    forbids: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in {"init", "process", "advance"} & {*vars(cls)}:
            setattr(cls, name, _in_program(getattr(cls, name)))

    def bind(self, model: Any) -> tuple["Processor", Params]:
        """The processor for the verifier, a `specjax.TextModel`, and the `params` of `process`.

        Raises:
          UserError: it does not fit the model, as an unknown token does not.
        """
        return self, ()

    def init(self, params: Params, prompts: "PromptBatch", vocab_size: int, room: int) -> Any:
        """The state after the prompts; the leading axis of its arrays is the batch.

        `room` is the most tokens that follow a prompt, those of a draft past its end included.
        """
        return ()

    def check_limit(self, limit: int) -> None:
        """Raises UserError if a row of at most `limit` new tokens is too short for it.

        It is called for each request. The strengths are then those of the request: numbers.
        """
        return None

    @abc.abstractmethod
    def process(
        self, params: Params, state: Any, logits: Float32[Array, "B V"]
    ) -> Float32[Array, "B V"]:
        """The changed logits; those of a token that must not follow are -inf."""

    def advance(self, params: Params, state: Any, tokens: Int32[Array, " B"]) -> Any:
        """The state after one more token of each row."""
        return state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Processing:
    """The processors at their place in the rows' texts; see `Sampling.processors`.

    Attributes:
      params: for each processor the arrays that rows share: None except while a method steps.
      state: for each processor its state after the committed, or drafted, tokens.
    """

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
      processors: further changes, a tuple of `specjax.processors`; None: there is none.
      processing: their states, which a method sets; the functions of `specjax.processing` read it.
    """

    temperature: jax.Array | float = 1.0
    top_k: jax.Array | int | None = None
    top_p: jax.Array | float | None = None
    processors: tuple[Any, ...] | None = None
    processing: Processing | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "temperature", checked("temperature", self.temperature, low=0.0, high=_LARGEST))
        if self.top_k is not None:
            put(self, "top_k", checked("top_k", self.top_k, low=1, dtype=jnp.int32))
        if self.top_p is not None:
            put(self, "top_p", checked("top_p", self.top_p, low=0.0, high=1.0, open_low=True))
        if self.processors is not None:
            put(self, "processors", _in_order(self.processors))


def _in_order(processors: Any) -> tuple[Any, ...] | None:
    """The processors in the order in which they run; None if there are none."""
    if not isinstance(processors, tuple | list):
        raise UserError(
            f"processors must be a tuple such as (processors.MinP(0.05),), got {processors!r}"
        )
    for i, one in enumerate(processors):
        check_part(f"processors[{i}]", one, ("process", "init", "order"), "processors.MinP(0.05)")
    return tuple(sorted(processors, key=lambda one: one.order)) or None
