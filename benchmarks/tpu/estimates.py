"""The instructions of a step, read from the compiled program, and a TPU compiler's estimates.

The sums are over the instructions of a round's loop (in other programs: of all), each multiplied by
its runs in a usual round:

- A loop whose counter is compared with a constant runs that often. The drafting loop, which may end
early, drafts G tokens; the first is drafted where the drafter catches up, if it does. Any other
loop that the program ends counts once, such as those of `specjax.platforms.when`.
- Of branches the most expensive counts, as the widest of the verifier's passes. The bonus pass
counts under `bonus`: a round without it costs that much less.
- An instruction belongs to the outermost part in its `op_name`, or to its caller's; instructions
that the compiler adds without a name are "unnamed", all others "bookkeeping". A fusion has a single
name: everything fused into a pass counts as the pass.
- Parallel copies (`copy-start`, `slice-start`) have no estimate: their bytes are counted, and shown
beside the cycles. A kernel that reads a cache takes the time of its bytes, all positions of all
rows (libtpu's simulation is shorter); one that reads experts takes that of those in use on the
busiest chip, if all are as probable. Other instructions without an estimate that make 1024 numbers
or more are listed by name, and so are other kernels and collectives: they count as 0.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.compiled import KINDS, Instruction, Program

PARTS = (
    "verifier_pass",
    "drafter_pass",
    "distribution",
    "draw",
    "rule",
    "verification",
    "bonus",
)
BOOKKEEPING, UNNAMED = "bookkeeping", "unnamed"
ALL_PARTS = (*PARTS, BOOKKEEPING, UNNAMED)
REGIONS = OUTSIDE, DRAFTING, BONUS, SKIPPED = ("outside", "draft steps", "bonus", "skipped")

_PART = re.compile(rf"(?<![\w.])({'|'.join(PARTS)})(?![\w.])")
# They compute nothing: they only name or reserve arrays.
FREE = ("bitcast", "constant", "get-tuple-element", "parameter", "partition-id", "tuple")
_FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast")
CALLS = ("while", "conditional", "call", "async-start")
_SMALL = 1024  # numbers: one register
_MOVES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction of a step.

    Attributes:
      instruction: the instruction.
      part: one of `PARTS`, `BOOKKEEPING` or `UNNAMED`.
      region: one of `REGIONS`: outside the inner loops, in the drafting loop, in the branch of the
        bonus pass, or in a branch that a usual round does not take.
      times: how often it runs in a usual round.
      reading: the cycles in which it reads a cache or experts once, if it is a kernel.
    """

    instruction: Instruction
    part: str
    region: str
    times: int
    reading: int = 0

    @property
    def cycles(self) -> int:
        """The estimate of all its runs; 0 without one."""
        return self.times * (self.instruction.cycles or self.reading)

    @property
    def moved(self) -> int:
        """The bytes that it copies in parallel, in all its runs."""
        one = self.instruction
        if one.opcode not in _MOVES:
            return 0
        # The results include its operand and the copy: the smaller one is moved.
        arrays = [array for array in one.arrays if len(array.shape) > 0]
        return self.times * min((array.padded_nbytes for array in arrays), default=0)

    @property
    def lacks_estimate(self) -> bool:
        """Whether it takes time without an estimate."""
        one = self.instruction
        if (
            one.cycles is not None
            or self.reading
            or one.opcode in _MOVES
            or one.opcode.endswith("-done")
        ):
            return False
        if one.target or one.opcode.removesuffix("-start") in KINDS:
            return one.target not in _FREE_TARGETS
        return max((array.size for array in one.arrays), default=0) >= _SMALL


class Kernels(NamedTuple):
    """What kernels read.

    Attributes:
      length: S, the positions of a cache, all of which are read.
      rate: the bytes that a chip reads in a cycle.
      shares: the share of its experts that a network reads, for the part of its passes; of other
        parts it is 1.
    """

    length: int
    rate: float
    shares: Mapping[str, float] = MappingProxyType({})


def executed(
    program: Program, draft: int, *, loop: bool, kernels: Kernels | None = None
) -> list[Executed]:
    """The instructions of a step, each once per place from which it is called.

    G = `draft` are the runs of a drafting loop without a known limit. Of a `loop` of steps only the
    outermost loop counts, once. Without `kernels` no kernel has a time.
    """
    reader = Reader(program, draft, kernels)
    return [item for call in reader.step(loop=loop) for item in reader.block(call)]


class Call(NamedTuple):
    """A computation of a step; the fields are those of `Executed`."""

    name: str
    part: str = ""
    region: str = OUTSIDE
    times: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """Reads a compiled program; G = `draft`."""

    program: Program
    draft: int
    kernels: Kernels | None = None

    def step(self, *, loop: bool) -> list[Call]:
        """The computations of a step: a loop's body and its condition; see `executed`."""
        if not loop:
            return [Call(self.program.entry)]
        inside = self.program.instructions(self.program.entry)
        loops = [one for one in inside if one.opcode == "while"]
        if not loops:
            raise ValueError("the program has no loop of steps")
        rounds = max(loops, key=lambda one: self.cost(one.called[0]))
        return [Call(name) for name in rounds.called]

    def block(self, call: Call) -> Iterator[Executed]:
        """The instructions of a computation, with those that it calls."""
        block = self.program.instructions(call.name)
        for one in block:
            if one.opcode in CALLS:
                for inner in self.calls(one, call):
                    yield from self.block(inner)
            elif one.opcode not in FREE:
                part = self._own(one, call) or _rest(one)
                reading = self._reading(one, block, part)
                yield Executed(one, part, call.region, call.times, reading)

    def _reading(self, one: Instruction, block: Sequence[Instruction], part: str) -> int:
        if self.kernels is None or one.target != "tpu_custom_call":
            return 0
        arrays = [array for other in block if other.name in one.operands for array in other.arrays]
        arrays = [array for array in arrays if array.space == 0]
        if one.name.startswith("mixed_few"):
            read = self.kernels.shares.get(part, 1.0) * sum(x.padded_nbytes for x in arrays)
        else:
            read = sum(x.padded_nbytes for x in arrays if self.kernels.length in x.shape)
        return round(read / self.kernels.rate)

    def calls(self, one: Instruction, caller: Call) -> list[Call]:
        """The computations that an instruction of a computation calls."""
        part, region, times = self._own(one, caller), caller.region, caller.times
        if one.opcode == "while":
            region, count = self._loop(one, part, region)
            return [Call(name, part, region, times * count) for name in one.called]
        if one.opcode == "conditional":
            costs = [self.cost(name) for name in one.called]
            taken = costs.index(max(costs))
            where = BONUS if part == "bonus" else region
            return [
                Call(name, part, where, times) if i == taken else Call(name, part, SKIPPED, 0)
                for i, name in enumerate(one.called)
            ]
        return [Call(name, part, region, times) for name in one.called]

    def _own(self, one: Instruction, caller: Call) -> str:
        return caller.part if caller.part == "bonus" else _part(one) or caller.part

    def _loop(self, one: Instruction, part: str, region: str) -> tuple[str, int]:
        """The region of a loop, and the number of its runs."""
        if _is_once(one):
            return BONUS if part == "bonus" else region, 1
        drafts = not part and region == OUTSIDE and "drafter_pass" in self.parts(one.called[0])
        if drafts:
            bound = self.program.most_trips(one)
            return DRAFTING, (self.draft if bound is None else bound) - self._catches_up
        known = self.program.trips(one)
        return region, 1 if known is None else known

    @functools.cached_property
    def _catches_up(self) -> bool:
        every = (one for block in self.program.computations.values() for one in block)
        once = (one for one in every if _is_once(one) and not _part(one))
        return any("drafter_pass" in self.parts(one.called[0]) for one in once)

    @functools.cached_property
    def _known(self) -> dict[str, tuple[int, int]]:
        return {}

    def cost(self, name: str) -> tuple[int, int]:
        """The estimate of a computation, and its instructions, where a compiler gives none."""
        if name not in self._known:
            inside = list(self.block(Call(name, "bonus", BONUS)))
            self._known[name] = sum(x.cycles for x in inside), sum(x.times for x in inside)
        return self._known[name]

    def parts(self, name: str) -> set[str]:
        """The parts named in a computation, and in those that it calls."""
        own = self.program.instructions(name)
        inner = [self.parts(called) for one in own for called in one.called]
        return {_part(one) for one in own}.union(*inner)


def _is_once(one: Instruction) -> bool:
    """Whether it is the loop of `specjax.platforms.when`."""
    return one.opcode == "while" and "once/while" in one.op_name.split("/body/")[-1]


def _part(one: Instruction) -> str:
    found = _PART.search(one.op_name)
    return found[1] if found else ""


def _rest(one: Instruction) -> str:
    return BOOKKEEPING if one.op_name else UNNAMED


def by_part(run: Sequence[Executed], of: Callable[[Executed], int]) -> dict[str, int]:
    """The sum of a number of each instruction, by the part of a step."""
    sums = dict.fromkeys(ALL_PARTS, 0)
    for one in run:
        sums[one.part] += of(one)
    return sums


def by_region(run: Sequence[Executed]) -> dict[str, tuple[int, int]]:
    """For each of `REGIONS` the estimated cycles, and the bytes copied in parallel."""
    return {
        region: (
            sum(one.cycles for one in run if one.region == region),
            sum(one.moved for one in run if one.region == region),
        )
        for region in REGIONS
    }


def without_estimate(run: Sequence[Executed]) -> dict[str, int]:
    """Instructions without an estimate -> the number of their runs."""
    found: collections.Counter[str] = collections.Counter()
    for one in run:
        if one.times and one.lacks_estimate:
            step = one.instruction
            kind = re.sub(r"[.\d]+(\.clone)*$", "", step.name)
            found[step.target or (step.opcode if step.opcode in KINDS else kind)] += one.times
    return dict(found.most_common())
