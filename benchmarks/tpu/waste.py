"""What a compiled program should not have: padded arrays, copies, host transfers, float64.

Axes: B rows, V vocabulary, S cache positions; all sizes are those on one device.
"""

import dataclasses
from collections.abc import Callable, Iterable

from specjax.compiled import ArrayLayout, Instruction, Program

_TRANSPARENT = ("bitcast", "copy", "parameter", "reshape", "transpose")
_HOST = 5  # a memory space


@dataclasses.dataclass(frozen=True)
class Large:
    """What counts as large, on one device.

    Attributes:
      rows: B.
      vocab: V.
      cache: S.
      layer: the numbers of one layer's keys, of the network where they are fewest.
      weights: the sizes of the parameters, each sorted.
    """

    rows: int
    vocab: int
    cache: int
    layer: int
    weights: frozenset[tuple[int, ...]]

    def kind(self, array: ArrayLayout) -> str:
        """Of what an array is: "weights", "cache", "vocabulary", or "" for what is not large.

        A cache has an axis S and the numbers of a layer's keys; a vocabulary array has B V numbers
        or a multiple of V above, whatever its axes are.
        """
        if tuple(sorted(size for size in array.shape if size > 1)) in self.weights:
            return "weights"
        if self.cache in array.shape and array.size >= self.layer:
            return "cache"
        if array.size >= self.rows * self.vocab and array.size % self.vocab == 0:
            return "vocabulary"
        return ""


def worst_padding(
    run: Iterable[Instruction], large: Large
) -> tuple[float, Instruction | None, ArrayLayout | None]:
    """The large array that takes the most bytes for those of its numbers.

    Returns:
      The ratio, what makes the array, and the array; 1 and None where none is large.
    """
    worst: tuple[float, Instruction | None, ArrayLayout | None] = (1.0, None, None)
    for one in run:
        for array in one.arrays:
            if array.nbytes and large.kind(array) in ("cache", "vocabulary"):
                ratio = array.padded_nbytes / array.nbytes
                worst = max(worst, (ratio, one, array), key=lambda found: found[0])
    return worst


def copies(program: Program, run: Iterable[Instruction], large: Large) -> dict[str, int]:
    """How many instructions copy large arrays, by kind.

    No copy is what fetches an array into on-chip memory beside the rest and leaves its layout
    (`copy-start`). What takes an array from there back to main memory is one, and so is whatever
    only changes a layout.
    """
    found = dict.fromkeys(("cache", "vocabulary", "weights"), 0)
    for one in run:
        if one.arrays and (kind := large.kind(one.arrays[0])) and _copies(program, one):
            found[kind] += 1
    return found


def _copies(program: Program, one: Instruction) -> bool:
    if one.opcode == "copy-start":
        after, before = one.arrays[:2]
        return after.space != 1 or after.minor_to_major != before.minor_to_major
    if one.opcode == "fusion" and one.called:
        inside = program.instructions(one.called[0])
        moves = any(inner.opcode in ("copy", "transpose") for inner in inside)
        return moves and all(inner.opcode in _TRANSPARENT for inner in inside)
    return one.opcode in ("copy", "transpose")


def host_transfers(program: Program) -> int:
    """How many instructions talk to the host."""
    return _count(program, _to_host)


def doubles(program: Program) -> int:
    """How many instructions make float64 numbers."""
    return _count(program, lambda one: any(array.dtype == "f64" for array in one.arrays))


def _to_host(one: Instruction) -> bool:
    if one.opcode in ("infeed", "outfeed") or "is_host_transfer=true" in one.rest:
        return True
    called = any(word in one.target for word in ("callback", "MoveToHost", "MoveToDevice"))
    moved = one.opcode == "copy-start" and any(array.space == _HOST for array in one.arrays)
    return called or moved


def _count(program: Program, test: Callable[[Instruction], bool]) -> int:
    return sum(test(one) for block in program.computations.values() for one in block)
