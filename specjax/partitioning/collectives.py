"""What a compiled program moves between devices, read from its text.

An array named here is what one device has of a collective's result.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(
    rf"= (\(?\w+\[.*?) ({'|'.join(KINDS)})(-start)?\(|= \(?.*? (while)\(", re.S
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:to_apply|calls|condition|body|true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}|called_computations=\{([^}]*)\}"
)
_BODY = re.compile(r"body=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of a program.

    Attributes:
      kind: one of `KINDS`.
      shapes: the sizes of the arrays that it makes, several where the compiler has joined them.
      nbytes: their bytes, on one device.
      loops: for each loop around it, the outermost first, how often it runs; None where the
        program decides.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    loops: tuple[int | None, ...]


def collectives(program: str) -> list[Collective]:
    """Lists the collectives of a program.

    Args:
      program: the text of a compiled program: `jitted.lower(...).compile().as_text()`.

    Returns:
      Each collective as often as it stands in the program, for each loop that calls it.

    Raises:
      ValueError: the text has no entry.
    """
    blocks, entry = _blocks(program)
    if entry is None:
        raise ValueError("the program has no ENTRY: give the text of a compiled program")
    return list(_walk(blocks, entry, ()))


def _blocks(program: str) -> tuple[dict[str, list[str]], str | None]:
    """The lines of each computation by its name, and the name of the first one that runs."""
    blocks: dict[str, list[str]] = {}
    entry, lines = None, None
    for line in program.splitlines():
        if header := _HEADER.match(line):
            lines = blocks.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif lines is not None:
            lines.append(line)
    return blocks, entry


def _walk(
    blocks: dict[str, list[str]], name: str, loops: tuple[int | None, ...]
) -> Iterator[Collective]:
    for line in blocks.get(name, ()):
        if found := _INSTRUCTION.search(line):
            if found[2]:
                yield _collective(found[1], found[2], bool(found[3]), loops)
                continue  # what it calls is the sum of two numbers
            trips = _TRIPS.search(line)
            body = _BODY.search(line)
            assert body, line
            inside = (*loops, int(trips[1]) if trips else None)
            yield from _walk(blocks, body[1], inside)
            yield from _walk(blocks, _condition(line), inside)
            continue
        for called in _CALLED.findall(line):
            for one in ",".join(called).split(","):
                if one.strip():
                    yield from _walk(blocks, one.strip().lstrip("%"), loops)


def _condition(line: str) -> str:
    found = re.search(r"condition=%?([\w.\-]+)", line)
    assert found, line
    return found[1]


def _collective(result: str, kind: str, started: bool, loops: tuple[int | None, ...]) -> Collective:
    arrays = [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(result)
    ]
    # One that is waited for elsewhere also returns its operands, first.
    if started and kind == "all-gather":
        arrays = arrays[len(arrays) // 2 :]
    elif started and kind == "collective-permute":
        arrays = arrays[1:2]
    nbytes = sum(_itemsize(dtype) * math.prod(shape) for dtype, shape in arrays)
    return Collective(kind, tuple(shape for _, shape in arrays), nbytes, loops)


def _itemsize(dtype: str) -> int:
    bits = re.match(r"[a-z]+(\d+)", dtype)  # such as f8e4m3fn; pred has none
    return max(1, int(bits[1] if bits else 8) // 8)
