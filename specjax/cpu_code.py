"""The code of `cpu_kernels` in LLVM's language: products of few rows, and attention of few queries.

Python writes the text of a function that computes a part of a result. A sum has one order, whatever
the number of rows, of threads and of the places around it.

Axes: M rows, K inputs, N outputs.
"""

import contextlib
import functools
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# Of a matrix [K, N] the products of so many rows are added in registers, at most so many, before
# the sum goes to memory.
_DEPTH, _REGISTERS = 32, 16
# Of a matrix [N, K] so many rows are multiplied with so many of x at a time, in registers, then the
# rest with fewer (of queries with one).
_COLUMNS, _ROWS = 4, (6, 4, 2, 1)
# Of x in 16 bits so many numbers of a row have a factor. The sum of so many products with 8 bits is
# a number of 32.
BLOCK = 256
# What a thread takes at a time: of [K, N] so many bytes of each row, of [N, K] rows of so many
# bytes in total.
_PIECE, _PART = 1 << 12, 1 << 17
# The work that is worth one more thread: bytes of a matrix, and products of attention.
_SHARE, _FEW = 1 << 16, 1 << 15

# From dtypes of matrices to LLVM's types.
STORED = {
    jnp.dtype(jnp.float32): "float",
    jnp.dtype(jnp.bfloat16): "i16",
    jnp.dtype(jnp.int8): "i8",
    jnp.dtype(jnp.uint8): "i8",  # two numbers of 4 bits
}
_SIZES = {"float": 4, "i16": 2, "i8": 1}


@functools.cache
def lanes() -> int:
    """The number of floats in a vector."""
    import llvmlite.binding as llvm

    return 16 if llvm.get_host_cpu_features().get("avx512f") else 8


@functools.cache
def has_pairs() -> bool:
    """Whether one instruction adds products of 16 bits in pairs."""
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get("avx512vnni"))


class Code:
    """The body of a function in LLVM's language, as it grows."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._label = "entry"
        self._numbers = itertools.count()

    def do(self, line: str) -> None:
        self.lines.append(f"  {line}")

    def let(self, value: str) -> str:
        name = f"%v{next(self._numbers)}"
        self.do(f"{name} = {value}")
        return name

    def whole(self, operation: str, *values: Any) -> str:
        """A chain of an operation on whole numbers, such as "add"."""
        return functools.reduce(
            lambda a, b: self.let(f"{operation} i64 {a}, {b}"), map(str, values)
        )

    def at(self, base: str, index: str, stored: str = "float") -> str:
        return self.let(f"getelementptr {stored}, ptr {base}, i64 {index}")

    def data(self, number: int) -> str:
        """The address of an argument's numbers."""
        return f"call ptr @data(ptr %arguments, i64 {number})"

    def size(self, number: int, axis: int) -> str:
        return f"call i64 @size(ptr %arguments, i64 {number}, i64 {axis})"

    def parts(self, total: str, size: Any) -> str:
        return self.let(f"call i64 @parts(i64 {total}, i64 {size})")

    def threads(self, work: str, share: int) -> str:
        """So many that each has its share of the work, or one."""
        most = self.whole("add", self.whole("sdiv", work, share), 1)
        return self.let(f"call i64 @llvm.smin.i64(i64 %threads, i64 {most})")

    def largest(self, a: str, b: Any) -> str:
        return self.let(f"call i64 @llvm.smax.i64(i64 {a}, i64 {b})")

    @contextlib.contextmanager
    def loop(
        self, start: str, stop: str, step: int, kind: str = "", values: Sequence[str] = ()
    ) -> Iterator[tuple[str, list[str]]]:
        """`for index in range(start, stop, step)`.

        It carries values of an LLVM type: the body replaces them in the list, which has the last
        ones afterwards.
        """
        number, before = next(self._numbers), self._label
        index, carried = f"%i{number}", [f"%c{number}.{i}" for i in range(len(values))]
        self.do(f"br label %head{number}")
        self.lines.append(f"head{number}:")
        place = len(self.lines)
        more = self.let(f"icmp slt i64 {index}, {stop}")
        self.do(f"br i1 {more}, label %body{number}, label %after{number}")
        self._label = f"body{number}"
        self.lines.append(f"{self._label}:")
        new = list(carried)
        yield index, new
        following = self.whole("add", index, step)
        self.do(f"br label %head{number}")
        self.lines[place:place] = [
            f"  {name} = phi {of} [{first}, %{before}], [{then}, %{self._label}]"
            for name, of, first, then in [
                (index, "i64", start, following),
                *((c, kind, v, n) for c, v, n in zip(carried, values, new, strict=True)),
            ]
        ]
        self._label = f"after{number}"
        self.lines.append(f"{self._label}:")
        new[:] = carried


class Kernel(Code):
    """The columns `%n0` .. `%n1` of a group of the result `%y`: `@part` of `cpu_kernels`."""

    functions = ""  # that it calls

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.stored, self.lanes = STORED[dtype], lanes()

    def sizes(self, code: Code) -> tuple[str, str, str, str]:
        """The numbers of groups, of their columns, of columns in a part, and of useful threads.

        `code` is that of the caller, which knows `%threads`.
        """
        raise NotImplementedError

    def floats(
        self, base: str, index: str, width: int, stored: str = "float", mask: str | None = None
    ) -> str:
        vector, whole = f"<{width} x float>", f"<{width} x i32>"
        of = f"<{width} x {stored}>"
        at = self.at(base, index, stored)
        if mask is None:
            value = self.let(f"load {of}, ptr {at}, align {_SIZES[stored]}")
        else:
            name = f"v{width}{stored.replace('float', 'f32')}"
            value = self.let(
                f"call {of} @llvm.masked.load.{name}.p0(ptr {at}, i32 {_SIZES[stored]}, "
                f"<{width} x i1> {mask}, {of} zeroinitializer)"
            )
        if stored == "float":
            return value
        sign = "sext" if stored == "i8" else "zext"
        value = self.let(f"{sign} {of} {value} to {whole}")
        if stored == "i8":
            return self.let(f"sitofp {whole} {value} to {vector}")
        value = self.let(f"shl {whole} {value}, splat (i32 16)")  # bfloat16 is a half of a float
        return self.let(f"bitcast {whole} {value} to {vector}")

    def store(
        self, value: str, index: str, width: int, base: str = "%y", mask: str | None = None
    ) -> None:
        at, of = self.at(base, index), f"<{width} x float>"
        if mask is None:
            self.do(f"store {of} {value}, ptr {at}, align 4")
        else:
            self.do(
                f"call void @llvm.masked.store.v{width}f32.p0({of} {value}, ptr {at}, i32 4, "
                f"<{width} x i1> {mask})"
            )

    def splat(self, value: str, kind: str, width: int) -> str:
        of, mask = f"<{width} x {kind}>", f"<{width} x i32> zeroinitializer"
        value = self.let(f"insertelement {of} poison, {kind} {value}, i32 0")
        return self.let(f"shufflevector {of} {value}, {of} poison, {mask}")

    def scalar(self, base: str, index: str, width: int) -> str:
        at = self.at(base, index)
        return self.splat(self.let(f"load float, ptr {at}, align 4"), "float", width)

    def wide(self, value: str, width: int) -> str:
        mask = f"<{width} x i32> zeroinitializer"
        return self.let(f"shufflevector <1 x float> {value}, <1 x float> poison, {mask}")

    def add_product(self, a: str, b: str, total: str, width: int) -> str:
        of = f"<{width} x float>"
        return self.let(f"call {of} @llvm.fma.v{width}f32({of} {a}, {of} {b}, {of} {total})")

    def sixteen(self, value: str, size: int) -> str:
        return self.let(f"sext <{size} x i8> {value} to <{size} x i16>")

    def add_pairs(self, a: str, b: str, total: str, width: int) -> str:
        """Adds products of 16 bits, two in each lane of 32."""
        of, twice = f"<{width} x i32>", f"<{2 * width} x i16>"
        b = self.let(f"bitcast {of} {b} to {twice}")
        if width == 16:
            both = self.let(f"call {of} @llvm.x86.avx512.pmaddw.d.512({twice} {a}, {twice} {b})")
            return self.let(f"add {of} {total}, {both}")
        for odd in (0, 1):
            parts = []
            for x in (a, b):
                part = self.let(f"extractelement {twice} {x}, i32 {odd}")
                parts.append(self.let(f"sext i16 {part} to i32"))
            product = self.let(f"mul i32 {parts[0]}, {parts[1]}")
            product = self.let(f"insertelement {of} poison, i32 {product}, i32 0")
            total = self.let(f"add {of} {total}, {product}")
        return total

    def lane_sums(self, totals: Sequence[str]) -> str:
        """The sums of the lanes of each vector (1, 2, 4 .. lanes of them), as one vector."""
        vectors, held, width = list(totals), 1, self.lanes
        while width > 1:
            size, half = held * width, width // 2
            pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
            vectors = []
            for pair in pairs:
                halves = []
                for first in (0, half):
                    begins = [first + width * i for i in range(held * len(pair))]
                    taken = ", ".join(f"i32 {at + i}" for at in begins for i in range(half))
                    a, b = pair[0], pair[-1]
                    halves.append(
                        self.let(
                            f"shufflevector <{size} x float> {a}, <{size} x float> {b}, "
                            f"<{half * len(begins)} x i32> <{taken}>"
                        )
                    )
                of = f"<{half * held * len(pair)} x float>"
                vectors.append(self.let(f"fadd {of} {halves[0]}, {halves[1]}"))
            held, width = held * len(pairs[0]), half
        return vectors[0]

    def in_steps(
        self, start: str, stop: str, steps: Sequence[int], body: Callable[[str, int], None]
    ) -> None:
        """Calls `body(index, size)` for whole first steps, then for the next steps in the rest."""
        for size in steps:
            whole = self.whole("sdiv", self.whole("sub", stop, start), size)
            middle = self.whole("add", start, self.whole("mul", whole, size))
            with self.loop(start, middle, size) as (index, _):
                body(index, size)
            start = middle

    def within(self, index: str, high: str, low: str | None = None) -> str:
        """Which lanes of the vector at `index` have a number from `low` up to `high`."""
        numbers = ", ".join(f"i32 {i}" for i in range(self.lanes))
        tests = []
        for test, bound in (("slt", high), ("sge", low)):
            if bound is not None:
                left = self.let(f"trunc i64 {self.whole('sub', bound, index)} to i32")
                left = self.splat(left, "i32", self.lanes)
                tests.append(self.let(f"icmp {test} <{self.lanes} x i32> <{numbers}>, {left}"))
        return functools.reduce(lambda a, b: self.let(f"and <{self.lanes} x i1> {a}, {b}"), tests)

    def over(
        self, stop: str, values: Sequence[str], body: Callable[[str, list[str], str | None], None]
    ) -> list[str]:
        """`body(index, values, mask)` for all vectors up to `stop`, the last one with a mask."""
        whole = self.whole("mul", self.whole("sdiv", stop, self.lanes), self.lanes)
        # Only AVX-512 reads every type under a mask as fast as without.
        for first, last in (("0", whole), (whole, stop)):
            kind = f"<{self.lanes} x float>"
            with self.loop(first, last, self.lanes, kind, values) as (index, new):
                body(index, new, None if first == "0" else self.within(index, stop))
            values = new
        return list(values)

    def products(
        self,
        depth: str,
        rows: tuple[Sequence[str], str],
        columns: tuple[Sequence[str], str],
        totals: Sequence[str],
    ) -> list[str]:
        """Adds products of vectors to the sums of each column with each row.

        Args:
          depth: of all vectors.
          rows: addresses of vectors, and LLVM's type of their numbers.
          columns: others.
          totals: the sums, for each column those of all rows.
        """

        def add(k: str, totals: list[str], mask: str | None) -> None:
            a, b = (
                [self.floats(base, k, self.lanes, stored, mask) for base in bases]
                for bases, stored in (columns, rows)
            )
            for place, (column, row) in enumerate(itertools.product(a, b)):
                totals[place] = self.add_product(column, row, totals[place], self.lanes)

        return self.over(depth, totals, add)


class _Product(Kernel):
    """`%y = (%x @ %w) * %s`; see `cpu_kernels.product`."""

    group: int  # a thread takes a multiple of so many columns
    axis: int  # of the columns in the matrix

    def __init__(self, dtype: Any, *options: Any) -> None:
        super().__init__(dtype)
        self.bytes = dtype.itemsize
        *numbers, self.scaled = options
        for number, name in enumerate(("x", "w", "s")[: 2 + self.scaled]):
            self.do(f"%{name} = {self.data(number)}")
        self.do(f"%K = {self.size(0, 1)}")
        self.do(f"%N = {self.size(1, self.axis)}")
        self.write(*numbers)

    def write(self, *options: Any) -> None:
        raise NotImplementedError

    def sizes(self, code: Code) -> tuple[str, str, str, str]:
        columns, depth = code.let(self.size(1, self.axis)), code.let(self.size(0, 1))
        column = code.whole("mul", depth, self.bytes)
        threads = code.threads(code.whole("mul", column, columns), _SHARE)
        pieces = code.parts(columns, self.most(code, column))
        even = code.whole("mul", code.parts(code.largest(pieces, 1), threads), threads)
        sets = code.parts(code.parts(columns, even), self.group)
        some = code.whole("mul", code.largest(sets, 1), self.group)
        return "1", columns, some, threads

    def most(self, code: Code, column: str) -> str:
        """The most columns of so many bytes that a thread takes at a time."""
        raise NotImplementedError

    def scale(self, value: str, column: str, width: int) -> str:
        if not self.scaled:
            return value
        return self.let(f"fmul <{width} x float> {value}, {self.floats('%s', column, width)}")


class ByColumns(_Product):
    """Of a matrix `[K, N]`: lanes are columns.

    The products of some of its rows are added in registers, then to `%y`, which stays in a core's
    cache. The next rows are fetched meanwhile.
    """

    group, axis = 64, 1

    def most(self, code: Code, column: str) -> str:
        return str(_PIECE // self.bytes)

    def write(self, rows: int) -> None:
        lanes = self.lanes
        tiles = (lanes * max(1, min(8, _REGISTERS // rows)), lanes, 1)

        def entry(row: int, n: str) -> str:
            return self.whole("add", self.whole("mul", row, "%N"), n)

        def clear(n: str, width: int) -> None:
            for row in range(rows):
                self.store("zeroinitializer", entry(row, n), width)

        def add(first: str, last: str, n: str, size: int) -> None:
            width = min(size, lanes)
            starts = [self.whole("add", n, at) for at in range(0, size, width)]
            places = list(itertools.product(range(rows), range(len(starts))))
            kind, zeros = f"<{width} x float>", ["zeroinitializer"] * len(places)
            with self.loop(first, last, 1, kind, zeros) as (k, totals):
                at = self.whole("mul", k, "%N")
                for start in starts:
                    ahead = self.whole("add", at, start, "%ahead")
                    to = self.at("%w", ahead, self.stored)
                    self.do(f"call void @llvm.prefetch.p0(ptr {to}, i32 0, i32 2, i32 1)")
                weights = [
                    self.floats("%w", self.whole("add", at, start), width, self.stored)
                    for start in starts
                ]
                xs = [self.scalar("%x", entry_of_x(row, k), width) for row in range(rows)]
                for place, (row, part) in enumerate(places):
                    totals[place] = self.add_product(weights[part], xs[row], totals[place], width)
            for total, (row, part) in zip(totals, places, strict=True):
                y = entry(row, starts[part])
                self.store(
                    self.let(f"fadd {kind} {self.floats('%y', y, width)}, {total}"), y, width
                )

        def entry_of_x(row: int, k: str) -> str:
            return self.whole("add", self.whole("mul", row, "%K"), k)

        def finish(n: str, width: int) -> None:
            for row in range(rows):
                y = entry(row, n)
                self.store(self.scale(self.floats("%y", y, width), n, width), y, width)

        self.in_steps("%n0", "%n1", (lanes, 1), clear)
        self.do(f"%ahead = mul i64 {_DEPTH}, %N")
        with self.loop("0", "%K", _DEPTH) as (first, _):
            last = self.whole("add", first, _DEPTH)
            last = self.let(f"call i64 @llvm.smin.i64(i64 {last}, i64 %K)")
            self.in_steps("%n0", "%n1", tiles, functools.partial(add, first, last))
        if self.scaled:
            self.in_steps("%n0", "%n1", (lanes, 1), finish)


class ByRows(_Product):
    """Of a matrix `[N, K]`: lanes are parts of a sum."""

    group, axis = _COLUMNS, 0

    def most(self, code: Code, column: str) -> str:
        return code.largest(code.whole("sdiv", _PART, code.largest(column, 1)), 1)

    def write(self) -> None:
        self.do(f"%M = {self.size(0, 0)}")

        def at(n: str, columns: int) -> None:
            self.in_steps("0", "%M", _ROWS, functools.partial(self.put, n, columns))

        self.in_steps("%n0", "%n1", (_COLUMNS, 1), at)

    def put(self, n: str, columns: int, row: str, rows: int) -> None:
        totals = self.sums(n, columns, row, rows)
        for i in range(rows):
            value = self.scale(self.lane_sums(totals[i::rows]), n, columns)
            place = self.whole("mul", self.whole("add", row, i), "%N")
            self.store(value, self.whole("add", place, n), columns)

    def sums(self, n: str, columns: int, row: str, rows: int) -> list[str]:
        """The sums of each column with each row, as vectors."""
        return self.products(
            "%K",
            (self.starts("%x", row, rows, "float"), "float"),
            (self.starts("%w", n, columns, self.stored), self.stored),
            ["zeroinitializer"] * (columns * rows),
        )

    def starts(self, base: str, first: str, count: int, stored: str) -> list[str]:
        """The addresses of so many rows."""
        numbers = [self.whole("add", first, i) for i in range(count)]
        return [self.at(base, self.whole("mul", i, "%K"), stored) for i in numbers]


class PairsByColumns(_Product):
    """Of a matrix `[K, N]` of 8 bits, with x in 16 bits and a factor for each `BLOCK` of its row.

    A lane adds the products of two rows of the matrix at once, as whole numbers, which have no
    order. It is `ByColumns` otherwise, for any number of rows of x, some of them at a time.
    """

    group, axis = 64, 1
    most = ByColumns.most

    def write(self) -> None:
        lanes = self.lanes
        self.do(f"%M = {self.size(0, 0)}")
        self.do(f"%a = {self.data(3)}")
        self.do(f"%blocks = {self.size(3, 1)}")
        self.do(f"%ahead = mul i64 {_DEPTH}, %N")
        every = tuple(range(_ROWS[0], 0, -1))

        def clear(row: str, n: str, width: int) -> None:
            self.store("zeroinitializer", self.entry(row, n), width)

        def finish(row: str, n: str, width: int) -> None:
            y = self.entry(row, n)
            self.store(self.scale(self.floats("%y", y, width), n, width), y, width)

        def add(span: tuple[str, str, str], rows: tuple[str, str], n: str, size: int) -> None:
            self.in_steps(
                *rows, every, lambda row, count: self.add_block(span, row, count, n, size)
            )

        with self.loop("0", "%M", _REGISTERS) as (low, _):
            high = self.whole("add", low, _REGISTERS)
            high = self.let(f"call i64 @llvm.smin.i64(i64 {high}, i64 %M)")
            with self.loop(low, high, 1) as (row, _):
                self.in_steps("%n0", "%n1", (lanes, 1), functools.partial(clear, row))
            with self.loop("0", "%K", _DEPTH) as (first, _):
                last = self.whole("add", first, _DEPTH)
                last = self.let(f"call i64 @llvm.smin.i64(i64 {last}, i64 %K)")
                span = (first, last, self.whole("sdiv", first, BLOCK))
                tile = functools.partial(add, span, (low, high))
                self.in_steps("%n0", "%n1", (4 * lanes, lanes, 1), tile)
            with self.loop(low, high, 1) as (row, _):
                self.in_steps("%n0", "%n1", (lanes, 1), functools.partial(finish, row))

    def entry(self, row: str, n: str) -> str:
        return self.whole("add", self.whole("mul", row, "%N"), n)

    def add_block(
        self, span: tuple[str, str, str], row: str, count: int, n: str, size: int
    ) -> None:
        """Adds the products of some of a block to so many rows and columns of `%y`."""
        first, last, block = span
        width = min(size, self.lanes)
        parts, kind = size // width, f"<{width} x i32>"
        rows = [self.whole("add", row, i) for i in range(count)]
        starts = [self.at("%x", self.whole("mul", row, "%K"), "i16") for row in rows]
        zeros = ["zeroinitializer"] * (parts * count)
        with self.loop(first, last, 2, kind, zeros) as (k, totals):
            pairs = self.pairs(k, n, size)
            for i, start in enumerate(starts):
                x = self.let(f"load i32, ptr {self.at(start, k, 'i16')}, align 4")
                x = self.splat(x, "i32", width)
                for part, pair in enumerate(pairs):
                    number = i * parts + part
                    totals[number] = self.add_pairs(pair, x, totals[number], width)
        ends = self.ends(first, n, parts, width)
        for i, row in enumerate(rows):
            factor = self.scalar(
                "%a", self.whole("add", self.whole("mul", row, "%blocks"), block), width
            )
            sums = self.in_order(totals[i * parts : (i + 1) * parts], width)
            for part, total in enumerate(sums):
                y = self.whole("add", self.entry(row, n), part * width)
                value = self.let(f"sitofp {kind} {total} to <{width} x float>")
                so_far = self.floats("%y", y, width)
                value, so_far = self.of_group(ends[part], row, first, value, so_far, width)
                self.store(self.add_product(value, factor, so_far, width), y, width)

    def ends(self, first: str, n: str, parts: int, width: int) -> list[Any]:
        """What `of_group` reads, for each vector of columns."""
        return [None] * parts

    def of_group(
        self, end: Any, row: str, first: str, value: str, so_far: str, width: int
    ) -> tuple[str, str]:
        """A sum of products of a group of inputs, and the sum so far, with what belongs to both."""
        return value, so_far

    def pairs(self, k: str, n: str, size: int) -> list[str]:
        """Numbers of two rows of the matrix, in turns, as 16 bits."""
        of, at = f"<{size} x i8>", self.entry(k, n)
        both = []
        for row in ("0", "%N"):
            place = self.whole("add", at, row)
            if size > self.lanes:
                ahead = self.at("%w", self.whole("add", place, "%ahead"), "i8")
                self.do(f"call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 2, i32 1)")
            both.append(self.let(f"load {of}, ptr {self.at('%w', place, 'i8')}, align 1"))
        if size <= self.lanes:
            turns = [i + size * odd for i in range(size) for odd in (0, 1)]
            return [self.sixteen(self.mixed(both, of, turns), 2 * size)]
        # In each 128 bits of a register, so that one instruction mixes them.
        halves = [
            self.mixed(both, of, [i + 64 * odd for at in range(start, 64, 16)
                                  for i in range(at, at + 8) for odd in (0, 1)])
            for start in (0, 8)
        ]  # fmt: skip
        quarters = [
            self.mixed([half, "poison"], of, list(range(start, start + 32)))
            for start in (0, 32)
            for half in halves
        ]
        return [self.sixteen(quarter, 32) for quarter in quarters]

    def in_order(self, totals: Sequence[str], width: int) -> list[str]:
        """Sums of `pairs` by columns."""
        if len(totals) == 1:
            return list(totals)
        of = f"<{width} x i32>"
        return [
            self.mixed(totals[i : i + 2], of, [x + y for y in (0, 16) for x in range(at, at + 8)])
            for i in (0, 2)
            for at in (0, 8)
        ]

    def mixed(self, both: Sequence[str], of: str, taken: Sequence[int]) -> str:
        mask = ", ".join(f"i32 {i}" for i in taken)
        a, b = both
        return self.let(f"shufflevector {of} {a}, {of} {b}, <{len(taken)} x i32> <{mask}>")


class FourBits(PairsByColumns):
    """As `PairsByColumns`, of a matrix of 4 bits; see `Int4Weight`. A byte has a pair."""

    def write(self) -> None:
        self.do(f"%s = {self.data(2)}")
        self.do(f"%lows = {self.data(4)}")
        self.do(f"%sums = {self.data(5)}")
        self.do(f"%groups = {self.size(5, 1)}")
        super().write()

    def pairs(self, k: str, n: str, size: int) -> list[str]:
        width = min(size, self.lanes)
        of = f"<{width} x i32>"
        at = self.entry(self.whole("sdiv", k, 2), n)
        ahead = self.at("%w", self.whole("add", at, "%ahead"), "i8")
        self.do(f"call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 2, i32 1)")
        pairs = []
        for part in range(0, size, width):
            place = self.at("%w", self.whole("add", at, part), "i8")
            both = self.let(f"load <{width} x i8>, ptr {place}, align 1")
            low = self.let(f"zext <{width} x i8> {both} to {of}")
            high = self.let(f"shl {of} {low}, splat (i32 12)")
            both = self.let(f"or {of} {low}, {high}")
            both = self.let(f"and {of} {both}, splat (i32 {0xF000F})")
            pairs.append(self.let(f"bitcast {of} {both} to <{2 * width} x i16>"))
        return pairs

    def in_order(self, totals: Sequence[str], width: int) -> list[str]:
        return list(totals)

    def ends(self, first: str, n: str, parts: int, width: int) -> list[Any]:
        at = self.entry(self.whole("sdiv", first, _DEPTH), n)
        return [
            (self.half("%s", place, width), self.half("%lows", place, width))
            for place in (self.whole("add", at, part * width) for part in range(parts))
        ]

    def half(self, base: str, index: str, width: int) -> str:
        at, of = self.at(base, index, "half"), f"<{width} x half>"
        value = self.let(f"load {of}, ptr {at}, align 2")
        return self.let(f"fpext {of} {value} to <{width} x float>")

    def of_group(
        self, end: Any, row: str, first: str, value: str, so_far: str, width: int
    ) -> tuple[str, str]:
        scales, lows = end
        group = self.whole("sdiv", first, _DEPTH)
        at = self.whole("add", self.whole("mul", row, "%groups"), group)
        so_far = self.add_product(self.scalar("%sums", at, width), lows, so_far, width)
        return self.let(f"fmul <{width} x float> {value}, {scales}"), so_far


class PairsByRows(ByRows):
    """Of a matrix `[N, K]`, as `PairsByColumns`; K is a multiple of 32."""

    def write(self) -> None:
        self.do(f"%a = {self.data(3)}")
        self.do(f"%blocks = {self.size(3, 1)}")
        super().write()

    def sums(self, n: str, columns: int, row: str, rows: int) -> list[str]:
        lanes = self.lanes
        floats, whole = f"<{lanes} x float>", f"<{lanes} x i32>"
        ws, xs = self.starts("%w", n, columns, "i8"), self.starts("%x", row, rows, "i16")
        zeros = ["zeroinitializer"] * (columns * rows)
        with self.loop("0", "%K", BLOCK, floats, zeros) as (first, totals):
            last = self.whole("add", first, BLOCK)
            last = self.let(f"call i64 @llvm.smin.i64(i64 {last}, i64 %K)")
            with self.loop(first, last, 2 * lanes, whole, zeros) as (k, products):
                a = [self.let(f"load <32 x i8>, ptr {self.at(w, k, 'i8')}, align 1") for w in ws]
                a = [self.sixteen(w, 2 * lanes) for w in a]
                b = [self.let(f"load {whole}, ptr {self.at(x, k, 'i16')}, align 2") for x in xs]
                for number, (w, x) in enumerate(itertools.product(a, b)):
                    products[number] = self.add_pairs(w, x, products[number], lanes)
            block = self.whole("sdiv", first, BLOCK)
            for i in range(rows):
                at = self.whole("mul", self.whole("add", row, i), "%blocks")
                factor = self.scalar("%a", self.whole("add", at, block), lanes)
                for number in range(i, columns * rows, rows):
                    value = self.let(f"sitofp {whole} {products[number]} to {floats}")
                    totals[number] = self.add_product(value, factor, totals[number], lanes)
        return totals


class _Softmax(Kernel):
    """Turns a query's logits, without scale and bias, into powers of e, and returns their sum."""

    def __init__(self, segments: int, sinks: bool, scale: float, softcap: float | None) -> None:
        super().__init__(jnp.dtype(jnp.float32))
        lanes, kind = self.lanes, f"<{self.lanes} x float>"
        parts = [(f"%begin{i}", f"%length{i}", f"%bias{i}") for i in range(segments)]
        lowest = self.number(-np.inf)
        largest = [lowest]
        for begin, length, bias in parts:

            def add_bias(
                k: str, most: list[str], mask: str | None, begin: str = begin, bias: str = bias
            ) -> None:
                value = self.floats(begin, k, lanes, mask=mask)
                if scale != 1.0:
                    value = self.let(f"fmul {kind} {value}, {self.number(scale)}")
                if softcap is not None:
                    value = self.cap(value, softcap)
                added = self.floats(bias, k, lanes, mask=mask)
                value = self.let(f"fadd {kind} {value}, {added}")
                self.store(value, k, lanes, begin, mask)
                if mask is not None:
                    value = self.let(
                        f"select <{lanes} x i1> {mask}, {kind} {value}, {kind} {lowest}"
                    )
                most[0] = self.maximum(most[0], value)

            largest = self.over(length, largest, add_bias)
        top = self.let(f"call float @llvm.vector.reduce.fmaximum.v{lanes}f32({kind} {largest[0]})")
        top = self.splat(top, "float", lanes)
        if sinks:
            top = self.maximum(top, self.wide("%sink", lanes))
        for begin, length, _ in parts:

            def power(k: str, _: list[str], mask: str | None, begin: str = begin) -> None:
                value = self.let(f"fsub {kind} {self.floats(begin, k, lanes, mask=mask)}, {top}")
                self.store(self.exp(value), k, lanes, begin, mask)

            self.over(length, [], power)
        with self.loop("0", "%width", lanes, kind, ["zeroinitializer"]) as (k, total):
            total[0] = self.let(f"fadd {kind} {total[0]}, {self.floats('%shares', k, lanes)}")
        value = self.lane_sums(total)
        if sinks:
            own = self.exp(self.let(f"fsub {kind} {self.wide('%sink', lanes)}, {top}"))
            own = self.let(f"shufflevector {kind} {own}, {kind} poison, <1 x i32> zeroinitializer")
            value = self.let(f"fadd <1 x float> {value}, {own}")
        self.do(f"ret <1 x float> {value}")
        names = ["ptr %shares", "i64 %width"]
        names += [f"ptr {begin}, i64 {length}, ptr {bias}" for begin, length, bias in parts]
        names += ["<1 x float> %sink"] if sinks else []
        begin = f"define internal <1 x float> @softmax({', '.join(names)}) noinline {{"
        self.text = "\n".join([begin, "entry:", *self.lines, "}"])

    def maximum(self, a: str, b: str) -> str:
        of = f"<{self.lanes} x float>"
        return self.let(f"call {of} @llvm.maximum.v{self.lanes}f32({of} {a}, {of} {b})")

    def number(self, value: float) -> str:
        return f"splat (float {_literal(value)})"

    def exp(self, x: str) -> str:
        """The power of e, 0 for less than about -87.7; x is at most 0, or NaN."""
        kind, whole, lanes = f"<{self.lanes} x float>", f"<{self.lanes} x i32>", self.lanes
        x = self.maximum(x, self.number(-88.0))
        # Added to this number, x is rounded to a whole number, in its lowest bits.
        magic = self.number(1.5 * 2**23)
        shifted = self.add_product(x, self.number(1 / np.log(2)), magic, lanes)
        turns = self.let(f"fsub {kind} {shifted}, {magic}")
        for part in (0.693359375, -2.12194440e-4):  # log(2) in two parts
            x = self.add_product(turns, self.number(-part), x, lanes)
        # Cephes, expf.c.
        y = self.number(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
            y = self.add_product(y, x, self.number(factor), lanes)
        y = self.add_product(y, self.let(f"fmul {kind} {x}, {x}"), x, lanes)
        y = self.let(f"fadd {kind} {y}, {self.number(1.0)}")
        power = self.let(f"bitcast {kind} {shifted} to {whole}")
        power = self.let(f"shl {whole} {power}, splat (i32 23)")
        power = self.let(f"add {whole} {power}, splat (i32 {127 << 23})")
        return self.let(f"fmul {kind} {y}, {self.let(f'bitcast {whole} {power} to {kind}')}")

    def cap(self, x: str, softcap: float) -> str:
        """`softcap * tanh(x / softcap)`."""
        kind, name = f"<{self.lanes} x float>", f"v{self.lanes}f32"
        size = self.let(f"call {kind} @llvm.fabs.{name}({kind} {x})")
        size = self.let(f"fmul {kind} {size}, {self.number(-2.0 / softcap)}")
        power = self.exp(size)
        one = self.number(1.0)
        above, below = (self.let(f"{sign} {kind} {one}, {power}") for sign in ("fsub", "fadd"))
        y = self.let(f"fdiv {kind} {above}, {below}")
        y = self.let(f"fmul {kind} {y}, {self.number(softcap)}")
        return self.let(f"call {kind} @llvm.copysign.{name}({kind} {y}, {kind} {x})")


class _Segment(NamedTuple):
    """Values of LLVM.

    Attributes:
      length: the number of keys that are read.
      room: that of all, read or not.
      before: how many numbers a query has before those of the segment, and of zeros.
      offset: the lane of the first key, after zeros; "0" is known to be 0.
      keys: the address of those of a head.
      values: likewise.
      bias: likewise.
      of_group: the step of the bias from one query of a position to the next.
      of_position: from one position to the next.
    """

    length: str
    room: str
    before: str
    offset: str
    keys: str
    values: str
    bias: str
    of_group: str
    of_position: str


class Attention(Kernel):
    """See `cpu_kernels.attention`: groups are heads of keys, columns their queries.

    A query's logits lie by position, then those of the second segment, which begin in the lane of
    their first position, with zeros around them.
    """

    def __init__(
        self, dtype: Any, segments: int, sinks: bool, scale: float, softcap: float | None
    ) -> None:
        super().__init__(dtype)
        self.count, self.sinks = segments, sinks
        self.functions = _Softmax(segments, sinks, scale, softcap).text
        for axis, name in enumerate("TKND", 1):
            self.do(f"%{name} = {self.size(0, axis)}")
        self.do("%b = sdiv i64 %group, %K")
        self.do("%k = srem i64 %group, %K")
        self.do(f"%queries = {self.data(0)}")
        self.segments: list[_Segment] = []
        self.width = "0"
        for i in range(segments):
            self.segments.append(self.segment(1 + 3 * i))
        size = self.whole("mul", self.width, 4 * _ROWS[0])
        self.shares = self.let(f"call ptr @aligned_alloc(i64 64, i64 {size})")
        self.in_steps("%n0", "%n1", (_ROWS[0], 1), self.attend)
        self.do(f"call void @free(ptr {self.shares})")

    def segment(self, number: int) -> _Segment:
        """The segment whose first argument has this number."""
        room, before, offset = self.let(self.size(number, 2)), self.width, "0"
        length = room
        if self.count > 1:
            at = self.at(self.let(self.data(7)), "%b", "i32")
            start = self.let(f"sext i32 {self.let(f'load i32, ptr {at}')} to i64")
            if self.segments:
                offset = self.whole("and", start, self.lanes - 1)
            else:
                # A cache has nothing from where the block begins.
                length = self.let(f"call i64 @llvm.smin.i64(i64 {room}, i64 {start})")
        end = self.whole("add", length, offset, self.lanes - 1)
        taken = self.whole("mul", self.whole("sdiv", end, self.lanes), self.lanes)
        self.width = self.whole("add", before, taken)
        begin = self.whole("mul", "%group", room, "%D")
        keys, values = (
            self.at(self.let(self.data(number + i)), begin, self.stored) for i in (0, 1)
        )
        step, steps = room, []
        for axis in (3, 2, 1, 0):
            size = self.let(self.size(number + 2, axis))
            more = self.let(f"icmp sgt i64 {size}, 1")
            steps.append(self.let(f"select i1 {more}, i64 {step}, i64 0"))
            step = self.whole("mul", step, size)
        of_position, of_group, of_head, of_row = steps
        begin = self.whole("mul", "%b", of_row)
        begin = self.whole("add", begin, self.whole("mul", "%k", of_head))
        bias = self.at(self.let(self.data(number + 2)), begin)
        return _Segment(length, room, before, offset, keys, values, bias, of_group, of_position)

    def sizes(self, code: Code) -> tuple[str, str, str, str]:
        batch, length, heads, groups, depth = (code.let(self.size(0, i)) for i in range(5))
        keys = [code.let(self.size(1 + 3 * i, 2)) for i in range(self.count)]
        columns, sets = code.whole("mul", length, groups), code.whole("mul", batch, heads)
        work = code.whole("mul", columns, sets, depth, code.whole("add", *keys, 0))
        return sets, columns, str(_ROWS[0]), code.threads(work, _FEW)

    def attend(self, first: str, rows: int) -> None:
        """The results of so many queries."""
        lanes, kind = self.lanes, f"<{self.lanes} x float>"
        most = min(lanes, max(_COLUMNS, _REGISTERS // rows))
        steps = tuple(dict.fromkeys((most, _COLUMNS, 1)))
        queries, ys, sinks = [], [], []
        biases: list[list[str]] = []
        for i in range(rows):
            m = self.whole("add", first, i)
            t, n = self.whole("sdiv", m, "%N"), self.whole("srem", m, "%N")
            head = self.whole("add", self.whole("mul", "%k", "%N"), n)
            row = self.whole("add", self.whole("mul", "%b", "%T"), t)
            place = self.whole("add", self.whole("mul", row, "%K", "%N"), head)
            place = self.whole("mul", place, "%D")
            queries.append(self.at("%queries", place, self.stored))
            ys.append(self.at("%y", place))
            biases.append([])
            for segment in self.segments:
                of_n, of_t = segment.of_group, segment.of_position
                at = self.whole("add", self.whole("mul", n, of_n), self.whole("mul", t, of_t))
                biases[-1].append(self.at(segment.bias, at))
            if self.sinks:
                number = 1 + 3 * self.count + (self.count > 1)
                at = self.at(self.let(self.data(number)), head)
                sinks.append(self.let(f"load <1 x float>, ptr {at}, align 4"))
        shares = [self.at(self.shares, self.whole("mul", self.width, i)) for i in range(rows)]
        with self.loop("0", self.whole("mul", self.width, rows), lanes) as (index, _):
            self.store("zeroinitializer", index, lanes, self.shares)

        own = [[self.at(share, segment.before) for share in shares] for segment in self.segments]
        begins = [
            [self.at(share, segment.offset) for share in each]
            for segment, each in zip(self.segments, own, strict=True)
        ]
        for segment, places in zip(self.segments, begins, strict=True):

            def logits(
                key: str, count: int, keys: str = segment.keys, places: list[str] = places
            ) -> None:
                numbers = [self.whole("add", key, i) for i in range(count)]
                columns = [self.at(keys, self.whole("mul", i, "%D"), self.stored) for i in numbers]
                totals = self.products(
                    "%D",
                    (queries, self.stored),
                    (columns, self.stored),
                    ["zeroinitializer"] * (count * rows),
                )
                for i, place in enumerate(places):
                    self.store(self.lane_sums(totals[i::rows]), key, count, place)

            self.in_steps("0", segment.length, steps, logits)

        totals = []
        for i, (share, bias) in enumerate(zip(shares, biases, strict=True)):
            arguments = [f"ptr {share}", f"i64 {self.width}"]
            for segment, places, at in zip(self.segments, begins, bias, strict=True):
                arguments += [f"ptr {places[i]}", f"i64 {segment.length}", f"ptr {at}"]
            arguments += [f"<1 x float> {sinks[i]}"] if sinks else []
            totals.append(self.let(f"call <1 x float> @softmax({', '.join(arguments)})"))

        def finish(d: str, count: int) -> None:
            numbers = [self.whole("add", d, i) for i in range(count)]
            sums = ["zeroinitializer"] * (count * rows)
            for segment, numerators in zip(self.segments, own, strict=True):
                length, offset = segment.length, segment.offset
                columns = [
                    self.at(segment.values, self.whole("mul", i, segment.room), self.stored)
                    for i in numbers
                ]
                if offset == "0":
                    parts = (numerators, "float"), (columns, self.stored)
                    sums = self.products(length, *parts, sums)
                    continue
                end = self.whole("add", offset, length)
                with self.loop("0", end, lanes, kind, sums) as (k, new):
                    mask, at = self.within(k, end, offset), self.whole("sub", k, offset)
                    a = [self.floats(x, at, lanes, self.stored, mask) for x in columns]
                    b = [self.floats(x, k, lanes) for x in numerators]
                    for place, (column, row) in enumerate(itertools.product(a, b)):
                        new[place] = self.add_product(column, row, new[place], lanes)
                sums = new
            for i, (y, total) in enumerate(zip(ys, totals, strict=True)):
                value, of = self.lane_sums(sums[i::rows]), f"<{count} x float>"
                self.store(self.let(f"fdiv {of} {value}, {self.wide(total, count)}"), d, count, y)

        self.in_steps("0", "%D", steps, finish)


def _literal(value: float) -> str:
    """A float32 in LLVM's language."""
    return "0x" + struct.pack(">d", np.float32(value)).hex().upper()
