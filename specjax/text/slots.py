"""Assigns requests to the slots of an engine, for a number of steps of the loop."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.text.requests import Request
from specjax.text.streaming import StreamedText


@dataclasses.dataclass
class Entry:
    """A sample of a request that waits for a slot or has a slot.

    Attributes:
      index: the request's index in the engine.
      sample: the number of the sample.
      id: the id of the row, or of the samples that share its prefill.
      request: the request, its processors bound.
      given: the request as it was added, with its id.
      tokens: `[n]` int32, its prompt.
      strengths: the leaves of its rule, or None for the engine's rule.
      known: the remaining steps of a row with a known result; None for a row that is decoded.
      since: when it got the slot, in seconds.
      compiled: the seconds of compilation until then.
      steps: the number of its steps so far.
      streamed: its text so far, if it is streamed.
      prefilled: the number of tokens of its prompt that were read for it; 0 if another sample's
        cache was copied.
    """

    index: int
    sample: int
    id: int
    request: Request
    given: Request
    tokens: np.ndarray
    strengths: list[Any] | None = None
    known: int | None = None
    since: float = 0.0
    compiled: float = 0.0
    steps: int = 0
    streamed: StreamedText | None = None
    prefilled: int = 0


class Slots:
    """B slots, and the requests that wait.

    The rows of a refill share a prefill, and results may depend on a row's place in it. So a row
    with a known result keeps its slot for as many steps as it took, without decoding: all other
    rows then get the same slots and neighbours.

    Attributes:
      held: the B slots; None is free.
      waiting: the waiting requests, in order.
      refill: the number of slots to fill together, after the first time.
    """

    def __init__(self, rows: int, refill: int) -> None:
        self.held: list[Entry | None] = [None] * rows
        self.waiting: collections.deque[Entry] = collections.deque()
        self.refill, self._begun = refill, False

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self.held.count(None)

    def next_group(self) -> tuple[list[int], list[Entry]]:
        """Returns the slots to fill together now, at first all slots, and their requests."""
        wanted = self.refill if self._begun else len(self.held)
        if not self.waiting or self.free < wanted:
            return [], []
        free = [place for place, entry in enumerate(self.held) if entry is None]
        return free[:wanted], list(itertools.islice(self.waiting, wanted))

    def occupy(self, places: Sequence[int], since: float, compiled: float) -> None:
        """Moves the first waiting requests into slots."""
        self._begun = True
        for place in places[: len(self.waiting)]:
            # In this order an interrupt loses no request.
            entry = self.held[place] = self.waiting[0]
            self.waiting.popleft()
            entry.since, entry.compiled = since, compiled

    @property
    def requests(self) -> dict[int, Request]:
        """The requests that wait or are decoded, by increasing index."""
        entries = [*filter(None, self.held), *self.waiting]
        return {x.index: x.given for x in sorted(entries, key=lambda x: x.index)}

    def drop(self, index: int) -> tuple[bool, list[int]]:
        """Removes a request; returns whether it was there, and the slots where it was decoded."""
        found = [entry for entry in self.waiting if entry.index == index]
        for entry in found:
            self.waiting.remove(entry)
        decoded = []
        for place, held in enumerate(self.held):
            if held is not None and held.index == index:
                self.held[place] = None
                decoded += [place] if held.known is None else []
                found.append(held)
        return bool(found), decoded

    def known(self) -> list[int]:
        """Returns the remaining steps of the known rows, increasing."""
        return sorted(x.known for x in self.held if x is not None and x.known is not None)

    def pass_steps(self, steps: int) -> None:
        """Counts steps, and frees the slots of known rows that have no steps left."""
        for place, entry in enumerate(self.held):
            if entry is not None and entry.known is not None:
                entry.known -= steps
                if entry.known <= 0:
                    self.held[place] = None
