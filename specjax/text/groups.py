"""Groups requests that share slots: any number of prompts of any length, in few static shapes."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import checked
from specjax.decoding import Method
from specjax.errors import UserError
from specjax.text.requests import Request

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
      length: L, the length of the bucket.
    """

    members: list[int]
    rows: int
    refill: int
    length: int


def buckets_to(context: int | None) -> tuple[int, ...]:
    """The default bucket lengths for a model that reads so many positions."""
    longer: list[int] = []
    while context is not None and (longest := [*BUCKETS, *longer][-1]) < context:
        longer.append(min(2 * longest, context))
    return (*BUCKETS, *longer)


def check_buckets(buckets: Any) -> tuple[int, ...]:
    """Checks the bucket lengths of a caller: they must be whole, at least 1, and increase."""
    if np.shape(buckets) == (0,):
        raise UserError("buckets is empty: give lengths such as (64, 128)")
    lengths: Any = checked("buckets", buckets, low=1, dtype=np.int32)
    if not lengths.ndim or np.any(np.diff(lengths) < 1):
        raise UserError(f"buckets must be increasing lengths, such as (64, 128), got {buckets}")
    return tuple(lengths.tolist())


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
        found._replace(rows=found.rows * num_samples, refill=found.refill * num_samples)
        for found in group(lengths, buckets, prompts_at_once, row_multiple(method), turns)
    ]


def group(
    lengths: Sequence[int],
    buckets: Sequence[int],
    batch_size: int,
    row_multiple: int = 1,
    turns: int = TURNS,
) -> Iterator[Group]:
    """Sorts prompts by length and splits them into groups.

    The groups depend only on the arguments, and are decoded independently. So a resumed run finds
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

    Args:
      groups: the groups.
      count: the number of parts.

    Returns:
      The places of each part's requests, increasing.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    # The largest group first, always to the smallest part.
    for largest in sorted(groups, key=lambda group: -len(group.members)):
        min(parts, key=len).extend(largest.members)
    return [sorted(part) for part in parts]
