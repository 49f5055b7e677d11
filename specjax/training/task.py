"""What a trainer knows of what it trains: a loss over parameters."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from specjax.types import Array, Params


class Total(NamedTuple):
    """A sum over the items of a batch, such as target tokens.

    Attributes:
      sum: scalar float32.
      items: scalar int32, how many there are; at least 0.
    """

    sum: Array
    items: Array


class Task(Protocol):
    """A loss over the parameters of a model.

    An instance is a frozen, hashable dataclass of plain values, model configurations and such
    dataclasses: jitted steps are kept by it, and a run records it. Arrays travel in `params`,
    which are trained, and in `constants`, which are not: a teacher's parameters, or those of the
    model that a head stands on.
    """

    def __hash__(self) -> int:
        """By value, as a frozen dataclass hashes."""

    @property
    def item_name(self) -> str:
        """What the loss is a mean over, in the plural: "target tokens"."""

    def init(self, key: Array) -> Params:
        """Parameters to start from: a nested dict of float32 arrays.

        Args:
          key: a PRNG key; consumed.
        """

    def loss(self, params: Params, constants: Any, batch: Any, key: Array) -> Total:
        """What is minimised, summed over a batch.

        Args:
          params: the parameters.
          constants: a pytree of arrays, or None.
          batch: a pytree of arrays with the rows first.
          key: a PRNG key of this step, for dropout and the like; consumed.
        """

    def evaluate(self, params: Params, constants: Any, batch: Any) -> Mapping[str, Total]:
        """Figures of a batch of validation data, without randomness.

        Args:
          params: the parameters.
          constants: a pytree of arrays, or None.
          batch: a pytree of arrays with the rows first.

        Returns:
          Totals by name. One is "loss"; `TrainerConfig.choose_by` names the one whose mean chooses
          the best checkpoint.
        """
