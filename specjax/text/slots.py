"""Which request has which slot of an engine, and for how long, in steps of the loop."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.text.requests import Request


@dataclasses.dataclass
class Entry:
    """A request in an engine, while it waits for a slot and while it has one.

    Attributes:
      index: which it is.
      request: what is asked.
      tokens: `[n]` int32, its prompt.
      strengths: the leaves of its rule, or None for the engine's own.
      known: for a row whose result is known, how many steps it still has the slot; None for one
        that is decoded.
      since: when it got the slot, in seconds.
      compiled: the seconds of compilation until then.
      steps: the steps that it has made.
    """

    index: int
    request: Request
    tokens: np.ndarray
    strengths: list[Any] | None = None
    known: int | None = None
    since: float = 0.0
    compiled: float = 0.0
    steps: int = 0


class Slots:
    """B slots, and the requests that wait for one.

    The rows of a refill share one prefill, and a row's place in it is part of what is computed. So
    a row whose result is known has its slot for as many steps as it took, though nothing is decoded
    there: then all others come into the slots, and beside the places, that they would have had.

    Attributes:
      held: the B slots; None is free.
      waiting: the requests that wait, in their order.
      refill: how many are filled together, after the first.
    """

    def __init__(self, rows: int, refill: int) -> None:
        self.held: list[Entry | None] = [None] * rows
        self.waiting: collections.deque[Entry] = collections.deque()
        self.refill, self._begun = refill, False

    @property
    def free(self) -> int:
        """How many slots are free."""
        return self.held.count(None)

    def next_group(self) -> tuple[list[int], list[Entry]]:
        """The slots that are filled together now, first all of them, and the requests for them."""
        wanted = self.refill if self._begun else len(self.held)
        if not self.waiting or self.free < wanted:
            return [], []
        free = [place for place, entry in enumerate(self.held) if entry is None]
        return free[:wanted], list(itertools.islice(self.waiting, wanted))

    def occupy(self, places: Sequence[int], since: float, compiled: float) -> None:
        """Moves the first waiting requests into slots."""
        self._begun = True
        for place in places[: len(self.waiting)]:
            entry = self.held[place] = self.waiting.popleft()
            entry.since, entry.compiled = since, compiled

    def drop(self, index: int) -> tuple[bool, int | None]:
        """Removes a request; says whether it was there, and the slot in which it was decoded."""
        for entry in self.waiting:
            if entry.index == index:
                self.waiting.remove(entry)
                return True, None
        for place, held in enumerate(self.held):
            if held is not None and held.index == index:
                self.held[place] = None
                return True, place if held.known is None else None
        return False, None

    def known(self) -> list[int]:
        """How many steps each row whose result is known still has its slot, increasing."""
        return sorted(x.known for x in self.held if x is not None and x.known is not None)

    def pass_steps(self, steps: int) -> None:
        """Frees the slots of known rows whose time is over after so many steps more."""
        for place, entry in enumerate(self.held):
            if entry is not None and entry.known is not None:
                entry.known -= steps
                if entry.known <= 0:
                    self.held[place] = None
