"""A compiled program, and what it moves between devices, read from its text.

The text is `jitted.lower(...).compile().as_text()`. Instructions inside a fusion are not counted:
the fusion is a single instruction.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"(?:to_apply|calls|condition|body|true_computation|false_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}|called_computations=\{([^}]*)\}"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """An array in a program.

    Attributes:
      dtype: its name in the text, such as `bf16`.
      shape: its sizes, on one device.
      minor_to_major: its axes, the axis of adjacent numbers first.
      tiles: the tiles that it is split into, each a tuple of sizes, the outermost first; the last
        axes are padded to whole tiles.
      space: 0 for the device's main memory, 1 for a TPU's on-chip memory, 5 for the host's.
    """

    dtype: str
    shape: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    space: int = 0

    @property
    def size(self) -> int:
        """The number of its entries."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its entries."""
        return self.size * self._itemsize

    @property
    def padded_nbytes(self) -> int:
        """Its bytes in memory, in whole tiles."""
        sizes = [self.shape[axis] for axis in reversed(self.minor_to_major)] or list(self.shape)
        for tile in self.tiles:
            sizes = [1] * (len(tile) - len(sizes)) + sizes
            cut = sizes[-len(tile) :]
            counts = [-(-size // of) for size, of in zip(cut, tile, strict=True)]
            sizes = [*sizes[: -len(tile)], *counts, *tile]
        return math.prod(sizes) * self._itemsize

    @property
    def _itemsize(self) -> int:
        bits = re.match(r"[a-z]+(\d+)", self.dtype)  # such as f8e4m3fn; pred has none
        return max(1, int(bits[1] if bits else 8) // 8)

    def __str__(self) -> str:
        tiles = "".join(f"({','.join(map(str, tile))})" for tile in self.tiles)
        layout = ",".join(map(str, self.minor_to_major)) + (f":T{tiles}" if tiles else "")
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{{{layout}}}"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a program: its name, operation, result's type, and the text after the opcode."""

    name: str
    opcode: str
    result: str
    rest: str

    @functools.cached_property
    def arrays(self) -> tuple[ArrayLayout, ...]:
        """Its results; those of a tuple in order."""
        return tuple(map(_array, _ARRAY.findall(self.result)))

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0]))

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it calls; for a loop the body first, then the condition."""
        if self.opcode == "while":
            return self._one("body"), self._one("condition")
        names = ",".join(",".join(found) for found in _CALLED.findall(self.rest)).split(",")
        return tuple(name.strip().lstrip("%") for name in names if name.strip())

    @property
    def op_name(self) -> str:
        """Its origin: the scopes of the traced code, separated by slashes; "" if unknown."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def cycles(self) -> int | None:
        """The cycles that a TPU's compiler estimates; None without an estimate."""
        found = re.search(r'estimated_cycles":"(\d+)"', self.rest)
        return int(found[1]) if found else None

    @property
    def target(self) -> str:
        """The target of a `custom-call`, else ""."""
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found[1] if found else ""

    def _one(self, attribute: str) -> str:
        found = re.search(rf"{attribute}=%?([\w.\-]+)", self.rest)
        assert found, self
        return found[1]


def _array(found: tuple[str, str, str]) -> ArrayLayout:
    dtype, sizes, layout = found
    order, _, rest = layout.partition(":")
    tiles = re.search(r"T((?:\([\d,]+\))+)", rest)
    space = re.search(r"S\((\d+)\)", rest)
    return ArrayLayout(
        dtype,
        _numbers(sizes),
        _numbers(order),
        tuple(map(_numbers, re.findall(r"\(([\d,]+)\)", tiles[1]))) if tiles else (),
        int(space[1]) if space else 0,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of a program: instructions by name, the root last if it is marked."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    def instructions(self, name: str) -> tuple[Instruction, ...]:
        return self.computations.get(name, ())

    def trips(self, loop: Instruction) -> int | None:
        """How often a loop runs; None if the program decides."""
        if found := _TRIPS.search(loop.rest):
            return int(found[1])
        bounds = list(self._bounds(loop))
        return bounds[0][0] if len(bounds) == 1 and bounds[0][1] else None

    def most_trips(self, loop: Instruction) -> int | None:
        """How often a loop runs at most; None if this is unknown."""
        known = self.trips(loop)
        return min((n for n, _ in self._bounds(loop)), default=None) if known is None else known

    def _bounds(self, loop: Instruction) -> Iterator[tuple[int, bool]]:
        """(Trips that a counter allows, whether nothing else ends the loop)."""
        inside = {one.name: one for one in self.instructions(loop.called[1])}
        todo = list(inside.values())[-1:]
        alone = bool(todo) and todo[0].opcode == "compare"
        while todo:
            one = todo.pop()
            read = [inside[name] for name in one.operands if name in inside]
            if one.opcode == "and":
                todo += read
            elif one.opcode == "compare" and "direction=LT" in one.rest:
                counter, bound = (*read, None, None)[:2]
                if counter and bound and bound.opcode == "constant":
                    place = re.search(r"index=(\d+)", counter.rest)
                    start = self._start(loop, int(place[1])) if place else 0
                    yield int(bound.rest.partition(")")[0]) - start, alone

    def _start(self, loop: Instruction, place: int) -> int:
        """The first value of a loop's counter; 0 if the program computes it."""
        block = next(x for x in self.computations.values() if any(one is loop for one in x))
        names = {one.name: one for one in block}
        one = names.get(loop.operands[0])
        if one is not None and one.opcode == "tuple":
            one = names.get(one.operands[place])
        while one is not None and one.opcode in ("copy", "bitcast"):
            one = names.get(one.operands[0])
        if one is None or one.opcode != "constant":
            return 0
        return int(one.rest.partition(")")[0])


def parse(text: str) -> Program:
    """Reads the text of a compiled program."""
    computations: dict[str, list[Instruction]] = {}
    entry, lines = None, None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif lines is not None and (found := _INSTRUCTION.match(line)):
            lines.append(Instruction(found[2], found[4], found[3], found[5]))
    if entry is None:
        raise ValueError("the program has no ENTRY: give the text of a compiled program")
    return Program({name: tuple(block) for name, block in computations.items()}, entry)


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
    """Each collective once per place in the program's text, for each loop that calls it."""
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
