"""The data that a compiled program moves between devices, read from its text.

Arrays are the parts of a collective's result on one device.
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
      shapes: the sizes of the arrays that it makes, several if the compiler has joined collectives.
      nbytes: their bytes, on one device.
      loops: for each loop around it, the outermost first, the number of its runs; None if the
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
      Each collective once per place in the program, for each loop that calls it.

    Raises:
      ValueError: the text has no entry.
    """
    parsed = parse(program)
    return list(_walk(parsed, parsed.entry, ()))


def _walk(program: Program, name: str, loops: tuple[int | None, ...]) -> Iterator[Collective]:
    for one in program.instructions(name):
        if one.opcode.removesuffix("-start") in KINDS:
            yield _collective(one, loops)
            continue  # it calls the sum of two numbers
        inside = (*loops, program.trips(one)) if one.opcode == "while" else loops
        for called in one.called:
            yield from _walk(program, called, inside)


def _collective(one: Instruction, loops: tuple[int | None, ...]) -> Collective:
    kind, arrays = one.opcode.removesuffix("-start"), one.arrays
    # An asynchronous collective also returns its operands, first.
    if one.opcode == "all-gather-start":
        arrays = arrays[len(arrays) // 2 :]
    elif one.opcode == "collective-permute-start":
        arrays = arrays[1:2]
    nbytes = sum(array.nbytes for array in arrays)
    return Collective(kind, tuple(array.shape for array in arrays), nbytes, loops)
