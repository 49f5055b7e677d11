"""Which request has which slot, and for how long; on the host, in steps of the loop."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from specjax.text.requests import Request


class Waiting(NamedTuple):
    """A request without a slot.

    Attributes:
      id: its id.
      request: the request.
      steps: for a row whose result is known, how many steps it took; None for one to decode.
    """

    id: int
    request: Request
    steps: int | None = None


@dataclasses.dataclass
class Held:
    """A request in a slot.

    Attributes:
      id: its id.
      request: the request.
      since: when it got the slot, in seconds.
      left: for a row whose result is known, how many steps it still has the slot; None for one that
        is decoded.
      steps: of one that is decoded, the steps that it has made.
    """

    id: int
    request: Request
    since: float
    left: int | None
    steps: int = 0


class Slots:
    """B slots, and the requests that wait for one.

    The rows of a refill share one prefill, and a row's place in it is part of what is computed. So
    a row whose result is known has its slot for as many steps as it took, though nothing is decoded
    there: then all others come into the slots, and beside the places, that they would have had.

    Attributes:
      held: the B slots; None is free.
      waiting: the requests that wait, in their order.
    """

    def __init__(self, rows: int, refill: int) -> None:
        self.held: list[Held | None] = [None] * rows
        self.waiting: collections.deque[Waiting] = collections.deque()
        self._refill, self._begun = refill, False

    @property
    def free(self) -> int:
        """How many slots are free."""
        return self.held.count(None)

    def next_group(self) -> tuple[list[int], list[Waiting]]:
        """The slots that are filled together now, first all of them, and the requests for them."""
        wanted = self._refill if self._begun else len(self.held)
        if not self.waiting or self.free < wanted:
            return [], []
        free = [place for place, slot in enumerate(self.held) if slot is None]
        return free[:wanted], list(itertools.islice(self.waiting, wanted))

    def occupy(self, places: Sequence[int], since: float) -> None:
        """Moves the first waiting requests into slots."""
        self._begun = True
        for place in places[: len(self.waiting)]:
            asked = self.waiting.popleft()
            self.held[place] = Held(asked.id, asked.request, since, asked.steps)

    def drop(self, request_id: int) -> tuple[bool, int | None]:
        """Removes a request; says whether it was there, and the slot in which it was decoded."""
        for waiting in self.waiting:
            if waiting.id == request_id:
                self.waiting.remove(waiting)
                return True, None
        for place, slot in enumerate(self.held):
            if slot is not None and slot.id == request_id:
                self.held[place] = None
                return True, place if slot.left is None else None
        return False, None

    def known(self) -> list[int]:
        """How many steps each row whose result is known still has its slot, increasing."""
        return sorted(slot.left for slot in self.held if slot is not None and slot.left is not None)

    def pass_steps(self, steps: int) -> None:
        """Frees the slots of known rows whose time is over after so many steps more."""
        for place, slot in enumerate(self.held):
            if slot is not None and slot.left is not None:
                slot.left -= steps
                if slot.left <= 0:
                    self.held[place] = None
