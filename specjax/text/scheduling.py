"""Which requests share which slots, and when: groups of a call, and the slots of an engine.

Any number of prompts of any length runs in few static shapes.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from specjax.decoding import Method
from specjax.text.requests import Request
from specjax.text.streaming import StreamedText

# Powers of two and a length between them: padding adds at most about half to a row. Longer ones are
# powers of two, because each is another large program.
BUCKETS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# The most prompts per slot in a group.
TURNS = 16
# The same if a resumed run must decode an unfinished group from its start.
TURNS_AGAIN = 4


class Group(NamedTuple):
    """Requests that share a set of slots.

    Attributes:
      members: the requests' places, the longest prompt first.
      rows: B, the number of slots; each sample of a prompt takes a slot.
      refill: the number of finished slots that get new prompts at once.
      length: the length of the bucket.
    """

    members: list[int]
    rows: int
    refill: int
    length: int


def buckets_to(context: int | None) -> tuple[int, ...]:
    """Returns the default bucket lengths for a model that reads so many positions."""
    longer: list[int] = []
    while context is not None and (longest := [*BUCKETS, *longer][-1]) < context:
        longer.append(min(2 * longest, context))
    return (*BUCKETS, *longer)


def row_multiple(method: Method) -> int:
    """Returns the divisor of slots and refills: a mesh spreads rows over several devices."""
    return 1 if method.partitioner is None else method.partitioner.row_multiple


def are_independent(method: Method, requests: Sequence[Request]) -> bool:
    """Whether a row's output does not depend on the rows beside it."""
    longest = (None, method.max_draft)
    return method.independent_rows and all(r.draft_limit in longest for r in requests)


def groups_of(
    method: Method,
    requests: Sequence[Request],
    buckets: Sequence[int],
    batch_size: int,
    num_samples: int = 1,
) -> list[Group]:
    """Returns the groups of a call; they depend only on the arguments.

    All samples of a prompt enter slots together: slots and refills are multiples of `num_samples`.
    """
    lengths = [len(request.prompt) for request in requests]
    turns = TURNS if are_independent(method, requests) else TURNS_AGAIN
    prompts_at_once = batch_size // num_samples
    return [
        one._replace(rows=one.rows * num_samples, refill=one.refill * num_samples)
        for one in group(lengths, buckets, prompts_at_once, row_multiple(method), turns)
    ]


def group(
    lengths: Sequence[int],
    buckets: Sequence[int],
    batch_size: int,
    row_multiple: int = 1,
    turns: int = TURNS,
) -> Iterator[Group]:
    """Sorts prompts by length and splits them into groups.

    The groups depend only on the arguments, and are decoded independently. So a resumed run has
    the same groups, and decodes the missing rows to the same outputs.

    Args:
      lengths: the lengths of the prompts, at most that of the last bucket.
      buckets: the lengths of the buckets, increasing.
      batch_size: the number of slots. Fewer prompts get the next power of four of slots, so that
        there are few shapes.
      row_multiple: slots and refills are multiples of this.
      turns: the most prompts per slot in a group.

    Yields:
      Groups of at most `turns * B` prompts. A group that fills the slots ends at the next end of a
      bucket.
    """
    rows = 1
    while rows < min(batch_size, len(lengths)):
        rows *= 4
    rows = min(rows, batch_size)
    rows += -rows % row_multiple
    refill = max(1, rows // 4)
    refill += -refill % row_multiple
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    sizes = [buckets[bisect.bisect_left(buckets, lengths[place])] for place in order]
    start = 0
    for end in range(1, len(order) + 1):
        count = end - start
        last = end == len(order)
        if last or count == turns * rows or (count >= rows and sizes[end] != sizes[end - 1]):
            yield Group(order[start:end][::-1], rows, refill, int(sizes[end - 1]))
            start = end


def split(groups: Sequence[Group], count: int) -> list[list[int]]:
    """Distributes whole groups over `count` parts with similar numbers of rows.

    Returns:
      The places of each part's requests, increasing.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    # The largest group first, always to the smallest part.
    for largest in sorted(groups, key=lambda group: -len(group.members)):
        min(parts, key=len).extend(largest.members)
    return [sorted(part) for part in parts]


@dataclasses.dataclass
class Entry:
    """A sample of a request that waits for a slot or has a slot.

    Attributes:
      index: the request's index in the engine.
      sample: the number of the sample.
      id: the id of the row, or of the samples that share its prefill.
      request: the request, its processors bound.
      original: the request as it was added, with its id.
      tokens: its prompt.
      strengths: the leaves of its rule, or None for the engine's rule.
      idle_steps: the steps for which a row with a known result still has its slot, without
        decoding; None for a row that is decoded.
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
    original: Request
    tokens: Int32[np.ndarray, " L"]
    strengths: list[Any] | None = None
    idle_steps: int | None = None
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
        self.refill, self._was_filled = refill, False

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self.held.count(None)

    def next_group(self) -> tuple[list[int], list[Entry]]:
        """Returns the slots to fill together now, at first all slots, and their requests."""
        count = self.refill if self._was_filled else len(self.held)
        if not self.waiting or self.free < count:
            return [], []
        free = [place for place, entry in enumerate(self.held) if entry is None]
        return free[:count], list(itertools.islice(self.waiting, count))

    def occupy(self, places: Sequence[int], since: float, compiled: float) -> None:
        """Moves the first waiting requests into slots."""
        self._was_filled = True
        for place in places[: len(self.waiting)]:
            # In this order an interrupt loses no request.
            entry = self.held[place] = self.waiting[0]
            self.waiting.popleft()
            entry.since, entry.compiled = since, compiled

    @property
    def requests(self) -> dict[int, Request]:
        """The requests that wait or are decoded, by increasing index."""
        entries = [*filter(None, self.held), *self.waiting]
        return {x.index: x.original for x in sorted(entries, key=lambda x: x.index)}

    def drop(self, index: int) -> tuple[bool, list[int]]:
        """Removes a request; returns whether it was there, and the slots where it was decoded."""
        dropped = [entry for entry in self.waiting if entry.index == index]
        for entry in dropped:
            self.waiting.remove(entry)
        decoded = []
        for place, held in enumerate(self.held):
            if held is not None and held.index == index:
                self.held[place] = None
                decoded += [place] if held.idle_steps is None else []
                dropped.append(held)
        return bool(dropped), decoded

    def idle_steps(self) -> list[int]:
        """Returns the remaining steps of the rows with known results, increasing."""
        return sorted(x.idle_steps for x in self.held if x is not None and x.idle_steps is not None)

    def pass_steps(self, steps: int) -> None:
        """Counts steps, and frees the slots of rows with known results that have none left."""
        for place, entry in enumerate(self.held):
            if entry is not None and entry.idle_steps is not None:
                entry.idle_steps -= steps
                if entry.idle_steps <= 0:
                    self.held[place] = None
