"""Waste in a compiled program: padded arrays, copies, host transfers, float64.

Axes: B rows, V vocabulary, S cache positions; all sizes are per device.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from benchmarks.compiled import ArrayLayout, Instruction, Program

_TRANSPARENT = ("bitcast", "copy", "parameter", "reshape", "transpose")
_HOST = 5  # a memory space


@dataclasses.dataclass(frozen=True)
class Large:
    """The sizes that count as large, on one device.

    `layer` are the numbers in a layer's keys, of the network with the smallest layers; the sizes of
    each parameter are sorted.
    """

    rows: int
    vocab: int
    cache: int
    layer: int
    weights: frozenset[tuple[int, ...]]

    def kind(self, array: ArrayLayout) -> str:
        """The kind of an array: "weights", "cache", "vocabulary", or "" if it is not large.

        A cache has an axis S and the numbers of a layer's keys; a vocabulary array has B V numbers
        or a larger multiple of V, whatever its axes are.
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
    """The highest ratio of bytes to numbers of a large array, with its maker and the array."""
    worst: tuple[float, Instruction | None, ArrayLayout | None] = (1.0, None, None)
    for one in run:
        for array in one.arrays:
            if array.nbytes and large.kind(array) in ("cache", "vocabulary"):
                ratio = array.padded_nbytes / array.nbytes
                worst = max(worst, (ratio, one, array), key=lambda found: found[0])
    return worst


def copies(program: Program, run: Iterable[Instruction], large: Large) -> dict[str, int]:
    """Counts the instructions that copy large arrays.

    Returns:
      "cache_copies", "vocabulary_copies", "weights_copies": to another layout, or within main
        memory; without copies to on-chip memory in the same layout (`copy-start`).
      "cache_stores" and so on: from on-chip to main memory in the same layout. There are none if a
        cache is large enough to stay in main memory.
      "cache_fused" and so on: to another layout, in a fusion, whose estimate includes them.
    """
    found = {f"{kind}_{how}": 0 for how in _HOW for kind in ("cache", "vocabulary", "weights")}
    for one in run:
        for how, array in _copies(program, one):
            if kind := large.kind(array):
                found[f"{kind}_{how}"] += 1
    return found


_HOW = COPIES, STORES, FUSED = ("copies", "stores", "fused")


def _copies(program: Program, one: Instruction) -> Iterator[tuple[str, ArrayLayout]]:
    """How an instruction copies, and the copied array."""
    if one.opcode == "copy-start":
        after, before = one.arrays[:2]
        if after.minor_to_major != before.minor_to_major or after.space == before.space:
            yield COPIES, after
        elif after.space == 0:
            yield STORES, after
    elif one.opcode in ("copy", "transpose"):
        yield COPIES, one.arrays[0]
    elif one.opcode == "fusion":
        inside = list(_fused(program, one))
        moves = [inner for inner in inside if inner.opcode in ("copy", "transpose")]
        alone = all(inner.opcode in _TRANSPARENT for inner in inside)
        for inner in moves:
            yield COPIES if alone else FUSED, inner.arrays[0]


def _fused(program: Program, one: Instruction) -> Iterator[Instruction]:
    for name in one.called:
        for inner in program.instructions(name):
            yield inner
            yield from _fused(program, inner)


def host_transfers(program: Program) -> int:
    """Counts the instructions that transfer data to or from the host."""
    return _count(program, _to_host)


def doubles(program: Program) -> int:
    """Counts the instructions that make float64 numbers."""
    return _count(program, lambda one: any(array.dtype == "f64" for array in one.arrays))


def _to_host(one: Instruction) -> bool:
    if one.opcode in ("infeed", "outfeed") or "is_host_transfer=true" in one.rest:
        return True
    called = any(word in one.target for word in ("callback", "MoveToHost", "MoveToDevice"))
    moved = one.opcode == "copy-start" and any(array.space == _HOST for array in one.arrays)
    return called or moved


def _count(program: Program, test: Callable[[Instruction], bool]) -> int:
    return sum(test(one) for block in program.computations.values() for one in block)
