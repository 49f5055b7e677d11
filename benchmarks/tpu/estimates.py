"""Estimates of a TPU's compiler for a step: cycles by part, read from the compiled program.

The sum is over the estimates of the instructions of a round's loop (in other programs: of all),
each multiplied by its runs in a usual round:

- A loop whose counter is compared with a constant runs that often. The drafting loop, which may end
early, runs to its limit, G times. Any other loop that the program ends counts once.
- Of branches the most expensive counts: the widest of the verifier's passes, and the drafter's
catching up, which a round makes after any row's whole draft was accepted. The bonus pass counts
under `bonus`: a round without it costs that much less.
- An instruction belongs to the outermost part in its `op_name`, or to its caller's; instructions
that the compiler adds without a name are "unnamed", all others "bookkeeping". A fusion has a single
name: everything fused into a pass counts as the pass.
- Parallel copies (`copy-start`, `slice-start`) have no estimate: their bytes are counted, and shown
beside the cycles. Other instructions without an estimate that make 1024 numbers or more are listed
by name, and so are kernels and collectives: they count as 0.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

from benchmarks.compiled import Instruction, Program
from benchmarks.traffic import KINDS

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
REGIONS = OUTSIDE, DRAFTING, BONUS, SKIPPED = ("outside", "draft steps", "bonus", "skipped")

_PART = re.compile(rf"(?<![\w.])({'|'.join(PARTS)})(?![\w.])")
# They compute nothing: they only name or reserve arrays.
_FREE = ("bitcast", "constant", "get-tuple-element", "parameter", "partition-id", "tuple")
_FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast")
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
    """

    instruction: Instruction
    part: str
    region: str
    times: int

    @property
    def cycles(self) -> int:
        """The estimate of all its runs; 0 without one."""
        return self.times * (self.instruction.cycles or 0)

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
        if one.cycles is not None or one.opcode in _MOVES or one.opcode.endswith("-done"):
            return False
        if one.target or one.opcode.removesuffix("-start") in KINDS:
            return one.target not in _FREE_TARGETS
        return max((array.size for array in one.arrays), default=0) >= _SMALL


def executed(program: Program, draft: int, *, loop: bool) -> list[Executed]:
    """The instructions of a step.

    Args:
      program: a compiled program.
      draft: G, the runs of a drafting loop without a known limit.
      loop: whether the program is a loop of steps: only its outermost loop counts, once.

    Returns:
      Each once per place from which it is called.

    Raises:
      ValueError: the program has no loop.
    """
    reader = _Reader(program, draft)
    if not loop:
        return list(reader.block(program.entry, "", OUTSIDE, 1))
    loops = [one for one in program.instructions(program.entry) if one.opcode == "while"]
    if not loops:
        raise ValueError("the program has no loop of steps")
    rounds = max(loops, key=lambda one: reader.cycles(one.called[0]))
    return [item for name in rounds.called for item in reader.block(name, "", OUTSIDE, 1)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Reader:
    program: Program
    draft: int

    def block(self, name: str, part: str, region: str, times: int) -> Iterator[Executed]:
        """The instructions of a computation; `part` is its caller's, "" without a caller."""
        for one in self.program.instructions(name):
            own = part if part == "bonus" else _part(one) or part
            if one.opcode == "while":
                inside, count = self._loop(one, own, region)
                for called in one.called:
                    yield from self.block(called, own, inside, times * count)
            elif one.opcode == "conditional":
                yield from self._branches(one, own, region, times)
            elif one.opcode in ("call", "async-start"):
                for called in one.called:
                    yield from self.block(called, own, region, times)
            elif one.opcode not in _FREE:
                yield Executed(one, own or _rest(one), region, times)

    def _loop(self, one: Instruction, part: str, region: str) -> tuple[str, int]:
        """The region of a loop, and the number of its runs."""
        drafts = not part and region == OUTSIDE and "drafter_pass" in self.parts(one.called[0])
        if drafts:
            bound = self.program.most_trips(one)
            return DRAFTING, self.draft if bound is None else bound
        known = self.program.trips(one)
        return region, 1 if known is None else known

    def _branches(self, one: Instruction, part: str, region: str, times: int) -> Iterator[Executed]:
        costs = [self.cycles(name) for name in one.called]
        taken = costs.index(max(costs))
        where = BONUS if part == "bonus" else region
        for i, name in enumerate(one.called):
            if i == taken:
                yield from self.block(name, part, where, times)
            else:
                yield from self.block(name, part, SKIPPED, 0)

    @functools.cached_property
    def _known(self) -> dict[str, int]:
        return {}

    def cycles(self, name: str) -> int:
        """The estimate of a computation."""
        if name not in self._known:
            self._known[name] = sum(x.cycles for x in self.block(name, "bonus", BONUS, 1))
        return self._known[name]

    def parts(self, name: str) -> set[str]:
        """The parts named in a computation, and in those that it calls."""
        own = self.program.instructions(name)
        inner = [self.parts(called) for one in own for called in one.called]
        return {_part(one) for one in own}.union(*inner)


def _part(one: Instruction) -> str:
    found = _PART.search(one.op_name)
    return found[1] if found else ""


def _rest(one: Instruction) -> str:
    return BOOKKEEPING if one.op_name else UNNAMED


def cycles_by_part(run: Sequence[Executed]) -> dict[str, int]:
    """The estimated cycles of each part of a step, and of instructions outside all parts."""
    sums = dict.fromkeys((*PARTS, BOOKKEEPING, UNNAMED), 0)
    for one in run:
        sums[one.part] += one.cycles
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
