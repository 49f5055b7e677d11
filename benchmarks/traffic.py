"""What a compiled program moves between devices, read from its text.

An array named here is what one device has of a collective's result.
"""

import dataclasses
from collections.abc import Iterator

from benchmarks.compiled import Instruction, Program, parse

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


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
    parsed = parse(program)
    return list(_walk(parsed, parsed.entry, ()))


def _walk(program: Program, name: str, loops: tuple[int | None, ...]) -> Iterator[Collective]:
    for one in program.instructions(name):
        if one.opcode.removesuffix("-start") in KINDS:
            yield _collective(one, loops)
            continue  # what it calls is the sum of two numbers
        inside = (*loops, program.trips(one)) if one.opcode == "while" else loops
        for called in one.called:
            yield from _walk(program, called, inside)


def _collective(one: Instruction, loops: tuple[int | None, ...]) -> Collective:
    kind, arrays = one.opcode.removesuffix("-start"), one.arrays
    # One that is waited for elsewhere also returns its operands, first.
    if one.opcode == "all-gather-start":
        arrays = arrays[len(arrays) // 2 :]
    elif one.opcode == "collective-permute-start":
        arrays = arrays[1:2]
    nbytes = sum(array.nbytes for array in arrays)
    return Collective(kind, tuple(array.shape for array in arrays), nbytes, loops)
