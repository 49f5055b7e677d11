"""What a trainer reads: batches that their numbers determine."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from specjax.types import Params


class Batches(Protocol):
    """Batches in an order that their numbers alone determine."""

    @property
    def batches_per_epoch(self) -> int:
        """How many until all data have been seen once."""

    def batch(self, step: int) -> Any:
        """The batch of step `step`: a pytree of arrays with the rows first."""

    def epoch(self) -> Iterator[Any]:
        """The batches of the first epoch."""

    def describe(self) -> dict[str, Any]:
        """What determines the batches, as JSON values."""


class Phases(Protocol):
    """Batches that depend on the parameters, which each phase of a run looks at once.

    A phase must leave on disk what it has made of the parameters before it returns: a run that is
    resumed in its middle has these parameters no more. What else determines the batches goes into
    the run's notes.
    """

    @property
    def every(self) -> int:
        """The updates of a phase; the first begins at step 0."""

    def begin(self, batches: Any, step: int, params: Params | None) -> Callable[[int], Any]:
        """Begins a phase, or takes it up again.

        Args:
          batches: those to train on.
          step: the first step of the phase.
          params: the parameters that would be evaluated at that step, on one device; None where
            the run has gone on from there.

        Returns:
          Makes the batch of a step of the phase; like `Batches.batch`.

        Raises:
          ValueError: what the phase has made is not on disk any more.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What a run trains on and is measured by.

    Attributes:
      training: batches; the devices share the rows of each.
      validation: batches; the checkpoint that is best on them is the result.
      grow: makes the batches to train on, in the place of `training`. It is called once the run is
        known to be the one that its directory holds, so it may take its time. What determines it
        goes into the notes.
      phases: changes the batches, with the parameters of each phase's start.
    """

    training: Batches
    validation: Batches
    grow: Callable[[], Batches] | None = None
    phases: Phases | None = None
