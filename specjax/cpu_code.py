"""The code of `cpu_kernels` in LLVM's language: products of few rows, and attention of few queries.

Python writes the text of a function that computes a part of a result. A sum has one order, whatever
the number of rows, of threads and of the places around it.

Axes: M rows, K inputs, N outputs.
"""

import contextlib
import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# Of a matrix [K, N] the products of so many rows are added in registers, at most so many, before
# the sum goes to memory.
_DEPTH, _REGISTERS = 32, 16
# Of a matrix [N, K] so many rows are multiplied with so many of x at a time, in registers, then the
# rest with fewer (of queries with one).
_COLUMNS, _ROWS = 4, (6, 4, 2, 1)
# Of x in 8 bits so many numbers of a row have a factor; with it they take so many words of 4 bytes.
GROUP, WORDS = 32, 10
# So many rows of x are multiplied with a tile of a matrix.
_SWEEP = 32
# What a thread takes at a time: of [K, N] so many bytes of each row, of [N, K] rows of so many
# bytes in total, of [K, N] with x in 8 bits so many sums: long parts of rows are read fastest.
_PIECE, _PART, _SUMS = 1 << 12, 1 << 17, 1 << 15
# It adds products of bytes without a sign and bytes with one, four in each lane. LLVM 22 knows its
# types of before if they are declared.
_QUADS = "llvm.x86.avx512.vpdpbusd.512"
_DECLARED = f"declare <16 x i32> @{_QUADS}(<16 x i32>, <16 x i32>, <16 x i32>)"
# Fetches a line for the second cache; the bytes from a group to those fetched in a matrix [N, K].
_PREFETCH, _LINES = "call void @llvm.prefetch.p0(ptr {}, i32 0, i32 2, i32 1)", 256
# The work that is worth one more thread: bytes of a matrix, and products of attention.
_SHARE, _FEW = 1 << 16, 1 << 15

# From dtypes of matrices to LLVM's types.
STORED = {
    jnp.dtype(jnp.float32): "float",
    jnp.dtype(jnp.bfloat16): "i16",
    jnp.dtype(jnp.int8): "i8",
    jnp.dtype(jnp.uint8): "i8",  # two numbers of 4 bits
}
_SIZES = {"float": 4, "half": 2, "i16": 2, "i8": 1}
_SUFFIXES = {"float": "f32", "half": "f16"}  # of functions


@functools.cache
def lanes() -> int:
    """The number of floats in a vector."""
    import llvmlite.binding as llvm

    return 16 if llvm.get_host_cpu_features().get("avx512f") else 8


@functools.cache
def has_quads() -> bool:
    """Whether one instruction adds products of 8 bits in fours."""
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
        return self.smallest("%threads", most)

    def smallest(self, a: str, b: Any) -> str:
        return self.let(f"call i64 @llvm.smin.i64(i64 {a}, i64 {b})")

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

    def load(self, base: str, index: str, width: int, stored: str, mask: str | None) -> str:
        at, of = self.at(base, index, stored), f"<{width} x {stored}>"
        if mask is None:
            return self.let(f"load {of}, ptr {at}, align {_SIZES[stored]}")
        name = f"v{width}{_SUFFIXES.get(stored, stored)}"
        return self.let(
            f"call {of} @llvm.masked.load.{name}.p0(ptr {at}, i32 {_SIZES[stored]}, "
            f"<{width} x i1> {mask}, {of} zeroinitializer)"
        )

    def floats(
        self, base: str, index: str, width: int, stored: str = "float", mask: str | None = None
    ) -> str:
        vector, whole = f"<{width} x float>", f"<{width} x i32>"
        of, value = f"<{width} x {stored}>", self.load(base, index, width, stored, mask)
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

    def wide(self, value: str, width: int) -> str:
        mask = f"<{width} x i32> zeroinitializer"
        return self.let(f"shufflevector <1 x float> {value}, <1 x float> poison, {mask}")

    def add_product(self, a: str, b: str, total: str, width: int) -> str:
        of = f"<{width} x float>"
        return self.let(f"call {of} @llvm.fma.v{width}f32({of} {a}, {of} {b}, {of} {total})")

    def mixed(self, both: Sequence[str], of: str, taken: Iterable[int]) -> str:
        """The numbers of two vectors that are `taken`, as one vector."""
        indices = [f"i32 {i}" for i in taken]
        a, b = both
        mask = f"<{len(indices)} x i32> <{', '.join(indices)}>"
        return self.let(f"shufflevector {of} {a}, {of} {b}, {mask}")

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
                    taken = [at + i for at in begins for i in range(half)]
                    halves.append(self.mixed([pair[0], pair[-1]], f"<{size} x float>", taken))
                of = f"<{half * held * len(pair)} x float>"
                vectors.append(self.let(f"fadd {of} {halves[0]}, {halves[1]}"))
            held, width = held * len(pairs[0]), half
        return vectors[0]

    def in_steps(
        self, start: str, stop: str, steps: Sequence[int], body: Callable[[str, int], None]
    ) -> str:
        """Calls `body(index, size)` for whole first steps, then for the next steps in the rest.

        Returns:
          Where the rest begins that is less than any step.
        """
        for size in steps:
            whole = self.whole("sdiv", self.whole("sub", stop, start), size)
            middle = self.whole("add", start, self.whole("mul", whole, size))
            with self.loop(start, middle, size) as (index, _):
                body(index, size)
            start = middle
        return start

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
    shares = 1  # of the inputs, each with sums of its own

    def __init__(self, dtype: Any, *options: Any) -> None:
        super().__init__(dtype)
        self.bytes = dtype.itemsize
        self.scaled, *numbers = options
        for number, name in enumerate(("x", "w", "s")[: 2 + self.scaled]):
            self.do(f"%{name} = {self.data(number)}")
        self.do(f"%X = {self.size(0, 1)}")
        self.do(f"%K = {self.size(1, 1 - self.axis)}")
        self.do(f"%N = {self.size(1, self.axis)}")
        self.write(*numbers)

    def write(self, *options: Any) -> None:
        raise NotImplementedError

    def sizes(self, code: Code) -> tuple[str, str, str, str]:
        columns, depth = (code.let(self.size(1, axis)) for axis in (self.axis, 1 - self.axis))
        column = code.whole("mul", depth, self.bytes)
        threads = code.threads(code.whole("mul", column, columns), _SHARE)
        pieces = code.parts(columns, self.most(code, column))
        each = code.largest(code.whole("sdiv", threads, self.shares), 1)
        even = code.whole("mul", code.parts(code.largest(pieces, 1), each), each)
        sets = code.parts(code.parts(columns, even), self.group)
        some = code.whole("mul", code.largest(sets, 1), self.group)
        return str(self.shares), columns, some, threads

    def most(self, code: Code, column: str) -> str:
        """The most columns of so many bytes that a thread takes at a time."""
        raise NotImplementedError

    def allocate_sums(self, rows: Any) -> None:
        """`%sums`: of `%width` columns from `%n0`, for so many rows."""
        # In %y a core that fetches ahead would take lines where another one adds.
        sets = self.parts(self.whole("sub", "%n1", "%n0"), self.lanes)
        self.do(f"%width = mul i64 {sets}, {self.lanes}")
        self.do(f"%sums = alloca float, i64 {self.whole('mul', rows, '%width')}, align 64")

    def clear_sums(self, rows: Any) -> None:
        with self.loop("0", self.whole("mul", rows, "%width"), self.lanes) as (place, _):
            self.store("zeroinitializer", place, self.lanes, "%sums")

    def sum_at(self, row: Any, n: str) -> str:
        """The place in `%sums` of a column of a row."""
        return self.whole("add", self.whole("mul", row, "%width"), self.whole("sub", n, "%n0"))

    def entry(self, row: Any, n: str) -> str:
        """The place of a column of a row of an array with N columns, such as `%y`."""
        return self.whole("add", self.whole("mul", row, "%N"), n)

    def scale(self, value: str, column: str, width: int, mask: str | None = None) -> str:
        if not self.scaled:
            return value
        factor = self.floats("%s", column, width, mask=mask)
        return self.let(f"fmul <{width} x float> {value}, {factor}")


class ByColumns(_Product):
    """Of a matrix `[K, N]`: lanes are columns.

    The products of some of its rows are added in registers, then to `%sums`, which stay in a core's
    cache. The next rows are fetched meanwhile.
    """

    group, axis = 64, 1

    def most(self, code: Code, column: str) -> str:
        return str(_PIECE // self.bytes)

    def write(self, rows: int) -> None:
        lanes = self.lanes
        tiles = (lanes * max(1, min(8, _REGISTERS // rows)), lanes, 1)

        def add(first: str, last: str, n: str, size: int) -> None:
            width = min(size, lanes)
            starts = [self.whole("add", n, at) for at in range(0, size, width)]
            places = list(itertools.product(range(rows), range(len(starts))))
            kind, zeros = f"<{width} x float>", ["zeroinitializer"] * len(places)
            with self.loop(first, last, 1, kind, zeros) as (k, totals):
                at = self.whole("mul", k, "%N")
                for start in starts:
                    ahead = self.whole("add", at, start, "%ahead")
                    self.do(_PREFETCH.format(self.at("%w", ahead, self.stored)))
                weights = [
                    self.floats("%w", self.whole("add", at, start), width, self.stored)
                    for start in starts
                ]
                xs = []
                for row in range(rows):
                    place = self.at("%x", self.whole("add", self.whole("mul", row, "%K"), k))
                    x = self.let(f"load float, ptr {place}, align 4")
                    xs.append(self.splat(x, "float", width))
                for i, (row, part) in enumerate(places):
                    totals[i] = self.add_product(weights[part], xs[row], totals[i], width)
            for total, (row, part) in zip(totals, places, strict=True):
                y = self.sum_at(row, starts[part])
                value = self.let(f"fadd {kind} {self.floats('%sums', y, width)}, {total}")
                self.store(value, y, width, "%sums")

        def finish(n: str, width: int) -> None:
            for row in range(rows):
                value = self.scale(self.floats("%sums", self.sum_at(row, n), width), n, width)
                self.store(value, self.entry(row, n), width)

        self.allocate_sums(rows)
        self.clear_sums(rows)
        self.do(f"%ahead = mul i64 {_DEPTH}, %N")
        with self.loop("0", "%K", _DEPTH) as (first, _):
            last = self.smallest(self.whole("add", first, _DEPTH), "%K")
            self.in_steps("%n0", "%n1", tiles, functools.partial(add, first, last))
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
        totals = self.products(
            "%K",
            (self.starts("%x", row, rows, "float"), "float"),
            (self.starts("%w", n, columns, self.stored), self.stored),
            ["zeroinitializer"] * (columns * rows),
        )
        for i in range(rows):
            value = self.scale(self.lane_sums(totals[i::rows]), n, columns)
            self.store(value, self.entry(self.whole("add", row, i), n), columns)

    def starts(self, base: str, first: str, count: int, stored: str) -> list[str]:
        """The addresses of so many rows."""
        numbers = [self.whole("add", first, i) for i in range(count)]
        return [self.at(base, self.whole("mul", i, "%K"), stored) for i in numbers]


class _OfRows(Kernel):
    """A result for each row of `%x`, whose numbers are K floats; a thread takes whole rows."""

    def __init__(self) -> None:
        super().__init__(jnp.dtype(jnp.float32))
        self.do(f"%x = {self.data(0)}")
        self.do(f"%K = {self.size(0, 1)}")

    def sizes(self, code: Code) -> tuple[str, str, str, str]:
        rows, depth = code.let(code.size(0, 0)), code.let(code.size(0, 1))
        return "1", rows, "1", code.threads(code.whole("mul", rows, depth), _SHARE)

    @contextlib.contextmanager
    def rows(self, words: str) -> Iterator[tuple[str, str]]:
        """Where each row of `%x` begins, and its result of so many words of 4 bytes."""
        with self.loop("%n0", "%n1", 1) as (row, _):
            x = self.at("%x", self.whole("mul", row, "%K"))
            yield x, self.at("%y", self.whole("mul", row, words))


class Normalised(_OfRows):
    """Rows divided by their root mean square; the squares are added in one order."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        lanes, kind = self.lanes, f"<{self.lanes} x float>"
        with self.rows("%K") as (x, y):

            def add(k: str, totals: list[str], mask: str | None) -> None:
                value = self.floats(x, k, lanes, mask=mask)
                totals[0] = self.add_product(value, value, totals[0], lanes)

            total = self.lane_sums(self.over("%K", ["zeroinitializer"], add))
            count = self.let("uitofp i64 %K to float")
            mean = self.let(f"extractelement <1 x float> {total}, i32 0")
            mean = self.let(f"fdiv float {mean}, {count}")
            mean = self.let(f"fadd float {mean}, {_literal(eps)}")
            root = self.let(f"call float @llvm.sqrt.f32(float {mean})")
            factor = self.splat(self.let(f"fdiv float {_literal(1)}, {root}"), "float", lanes)

            def put(k: str, _: list[str], mask: str | None) -> None:
                value = self.let(f"fmul {kind} {self.floats(x, k, lanes, mask=mask)}, {factor}")
                self.store(value, k, lanes, y, mask)

            self.over("%K", [], put)


class InBytes(_OfRows):
    """Rows in 8 bits: the bytes, then for each `GROUP` a factor, then the sum of its bytes.

    With `evens_first`, of each 8 bytes those of even places come first.
    """

    def __init__(self, evens_first: bool) -> None:
        super().__init__()
        self.do(f"%groups = sdiv i64 %K, {GROUP}")
        places = (0, 2, 4, 6, 1, 3, 5, 7) if evens_first else range(8)
        self.order = [at + i for at in (0, 8) for i in places]
        words = self.whole("mul", "%groups", WORDS)
        with self.rows(words) as (x, y), self.loop("0", "%groups", 1) as (group, _):
            self.add(x, y, group)

    def add(self, x: str, begin: str, group: str) -> None:
        kind, whole, bytes_ = "<16 x float>", "<16 x i32>", "<16 x i8>"
        first = self.whole("mul", group, GROUP)
        parts = [self.floats(x, self.whole("add", first, at), 16) for at in (0, 16)]
        # Bits without a sign have the order of the floats; those of NaN are the largest.
        a, b = (self.let(f"bitcast {kind} {part} to {whole}") for part in parts)
        a, b = (self.let(f"and {whole} {bits}, splat (i32 {0x7FFFFFFF})") for bits in (a, b))
        bits = self.let(f"call {whole} @llvm.smax.v16i32({whole} {a}, {whole} {b})")
        bits = self.let(f"call i32 @llvm.vector.reduce.smax.v16i32({whole} {bits})")
        least = np.float32(1e-30).view(np.int32)
        bits = self.let(f"call i32 @llvm.smax.i32(i32 {bits}, i32 {least})")
        top = self.let(f"bitcast i32 {bits} to float")
        nothing = self.let(f"fsub float {top}, {top}")  # NaN where a number is not finite
        factor = self.let(f"fdiv float {top}, {_literal(127)}")
        factor = self.let(f"fadd float {factor}, {nothing}")
        factors = self.at(begin, self.whole("mul", "%groups", GROUP // 4))
        self.do(f"store float {factor}, ptr {self.at(factors, group)}, align 4")
        steps = self.splat(self.let(f"fdiv float {_literal(127)}, {top}"), "float", 16)
        total = "zeroinitializer"
        for part, at in zip(parts, (0, 16), strict=True):
            # Added to this number, one is rounded to a whole number, in its lowest bits.
            magic = 1.5 * 2**23
            value = self.add_product(part, steps, f"splat (float {_literal(magic)})", 16)
            value = self.let(f"bitcast {kind} {value} to {whole}")
            value = self.let(f"sub {whole} {value}, splat (i32 {np.float32(magic).view(np.int32)})")
            total = self.let(f"add {whole} {total}, {value}")
            value = self.let(f"trunc {whole} {value} to {bytes_}")
            value = self.mixed([value, "poison"], bytes_, self.order)
            place = self.at(begin, self.whole("add", first, at), "i8")
            self.do(f"store {bytes_} {value}, ptr {place}, align 1")
        value = self.let(f"call i32 @llvm.vector.reduce.add.v16i32({whole} {total})")
        sums = self.at(factors, "%groups")
        self.do(f"store i32 {value}, ptr {self.at(sums, group)}, align 4")


class BytesByColumns(_Product):
    """Of a matrix `[K, N]` of 8 bits, with x from `InBytes`: lanes are columns.

    A lane adds the products of four rows of the matrix at once, as whole numbers, which have no
    order, and at the end of a `GROUP` floats. A tile has the numbers of a group in the order in
    which they are added, for up to `_SWEEP` rows of x. The sums stay in a core's cache.

    `%y` is `[shares, M, N]`: the sums of each share of the inputs.
    """

    functions = _DECLARED
    group, axis = 64, 1
    numbers = 1  # of a byte

    def most(self, code: Code, column: str) -> str:
        return code.whole("sdiv", _SUMS, code.smallest(code.let(self.size(0, 0)), _SWEEP))

    def write(self, shares: int) -> None:
        self.shares = shares
        self.do(f"%M = {self.size(0, 0)}")
        self.do(f"%groups = sdiv i64 %X, {WORDS}")
        begin, end = (
            self.whole("sdiv", self.whole("mul", "%groups", share), shares)
            for share in ("%group", self.whole("add", "%group", 1))
        )
        self.result = self.at("%y", self.whole("mul", "%group", "%M", "%N"))
        self.do(f"%ahead = mul i64 {GROUP // self.numbers}, %N")
        self.do(f"%tile = alloca [{GROUP * 4 * self.lanes} x i8], align 64")
        self.allocate_sums(self.smallest("%M", _SWEEP))
        with self.loop("0", "%M", _SWEEP) as (low, _):
            rows = self.smallest(self.whole("sub", "%M", low), _SWEEP)
            self.clear_sums(rows)
            with self.loop(begin, end, 1) as (group, _):
                self.in_parts(functools.partial(self.add, group, low, rows))
            with self.loop("0", rows, 1) as (row, _):
                self.in_parts(functools.partial(self.finish, low, row))

    def in_parts(self, body: Callable[[str, int, str | None], None]) -> None:
        """Calls `body(column, vectors, mask)` for all columns."""
        steps = (4 * self.lanes, self.lanes)
        rest = self.in_steps("%n0", "%n1", steps, lambda n, size: body(n, size // self.lanes, None))
        with self.loop(rest, "%n1", self.lanes) as (n, _):
            body(n, 1, self.within(n, "%n1"))

    def places(self, first: str, parts: int) -> list[str]:
        """Where vectors begin, one behind the other."""
        return [self.whole("add", first, part * self.lanes) for part in range(parts)]

    def finish(self, low: str, row: str, n: str, parts: int, mask: str | None) -> None:
        places = self.places(self.entry(self.whole("add", low, row), n), parts)
        sums = [
            self.floats("%sums", place, self.lanes)
            for place in self.places(self.sum_at(row, n), parts)
        ]
        for part, (place, value) in enumerate(zip(places, self.turned(sums), strict=True)):
            column = self.whole("add", n, part * self.lanes)
            value = self.scale(value, column, self.lanes, mask)
            self.store(value, place, self.lanes, self.result, mask)

    def add(self, group: str, low: str, rows: str, n: str, parts: int, mask: str | None) -> None:
        """Adds the products of a group of inputs to the sums of some rows and columns."""
        self.fill_tile(group, n, parts, mask)
        ends = self.ends(group, n, parts, mask)
        steps = tuple(range(_ROWS[0], 0, -1))
        self.in_steps("0", rows, steps, functools.partial(self.add_rows, group, low, n, ends))

    def fill_tile(self, group: str, n: str, parts: int, mask: str | None) -> None:
        """Bytes of four inputs become lanes of 32 bits."""
        lanes, size = self.lanes, parts * self.lanes
        of, wide = f"<{size} x i8>", f"<{lanes} x i32>"
        with self.loop("0", str(GROUP // 4), self.numbers) as (quad, _):
            first, rows = self.first(group, quad), []
            for i in range(4):
                place = self.entry(self.whole("add", first, i), n)
                rows.append(self.load("%w", place, size, "i8", mask))
            if parts == 1:
                both = [self.mixed(rows[i : i + 2], of, range(2 * lanes)) for i in (0, 2)]
                taken = [i + lanes * row for i in range(lanes) for row in range(4)]
                vectors = [self.mixed(both, f"<{2 * lanes} x i8>", taken)]
            else:
                # In each 128 bits of a register, so that one instruction mixes them.
                pairs = [self.halves(rows[i : i + 2], of, 1) for i in (0, 2)]
                vectors = [
                    half for both in zip(*pairs, strict=True) for half in self.halves(both, of, 2)
                ]
            vectors = [self.let(f"bitcast <{4 * lanes} x i8> {v} to {wide}") for v in vectors]
            for number, quads in enumerate(self.quads(vectors)):
                at = self.whole("mul", self.whole("add", quad, number), parts)
                for part, value in enumerate(quads):
                    self.put(value, self.whole("add", at, part))

    def first(self, group: str, quad: str) -> str:
        """The row of the matrix where four inputs of a group begin."""
        first = self.whole("mul", group, GROUP // self.numbers)
        return self.whole("add", first, self.whole("mul", quad, 4 // self.numbers))

    def put(self, value: str, place: str) -> None:
        """Stores a vector of the tile."""
        wide = f"<{self.lanes} x i32>"
        self.do(f"store {wide} {value}, ptr {self.at('%tile', place, wide)}, align 64")

    def fetch(self, group: str, quad: str, n: str) -> None:
        """Fetches a part of what is read after these columns."""
        first = self.first(group, quad)
        for i in range(4 // self.numbers):
            place = self.whole("add", self.entry(self.whole("add", first, i), n), "%ahead")
            self.do(_PREFETCH.format(self.at("%w", place, "i8")))

    def halves(self, both: Sequence[str], of: str, width: int) -> list[str]:
        """In each 16 bytes, the first halves of two vectors in turns, and the second ones."""
        return [
            self.mixed(
                both,
                of,
                [
                    i + 64 * second + byte
                    for at in range(start, 64, 16)
                    for i in range(at, at + 8, width)
                    for second in (0, 1)
                    for byte in range(width)
                ],
            )
            for start in (0, 8)
        ]

    def quads(self, vectors: list[str]) -> list[list[str]]:
        """Numbers without a sign, by fours of inputs, then vectors of columns."""
        wide = f"<{self.lanes} x i32>"
        return [[self.let(f"xor {wide} {v}, splat (i32 {0x80808080})") for v in vectors]]

    def turned(self, vectors: list[str]) -> list[str]:
        """Four vectors in the order of a tile in that of columns, or the other way round."""
        if len(vectors) == 1:
            return vectors

        def lines(both: Sequence[str], parts: Sequence[int]) -> str:
            taken = [4 * part + i for part in parts for i in range(4)]
            return self.mixed(both, "<16 x float>", taken)

        pairs = vectors[:2], vectors[2:]
        firsts = [lines(pair, (0, 1, 4, 5)) for pair in pairs]
        lasts = [lines(pair, (2, 3, 6, 7)) for pair in pairs]
        order = ((0, 2, 4, 6), (1, 3, 5, 7))
        return [lines(both, parts) for both in (firsts, lasts) for parts in order]

    def add_rows(
        self, group: str, low: str, n: str, ends: Sequence[Any], row: str, count: int
    ) -> None:
        lanes, parts = self.lanes, len(ends)
        wide, kind = f"<{lanes} x i32>", f"<{lanes} x float>"
        rows = [self.whole("add", row, i) for i in range(count)]
        begins = [
            self.at("%x", self.whole("mul", self.whole("add", low, row), "%X")) for row in rows
        ]
        factors = self.whole("add", self.whole("mul", "%groups", GROUP // 4), group)
        sums = []
        for begin in begins:
            at = self.at(begin, self.whole("add", factors, "%groups"))
            sums.append(self.let(f"load i32, ptr {at}, align 4"))
        totals = [start for total in sums for start in [self.start(total)] * parts]
        quads = self.whole("mul", group, GROUP // 4)
        with self.loop("0", str(GROUP // 4), 1, wide, totals) as (quad, new):
            at = self.whole("mul", quad, parts)
            weights = []
            for part in range(parts):
                place = self.at("%tile", self.whole("add", at, part), wide)
                weights.append(self.let(f"load {wide}, ptr {place}, align 64"))
            self.fetch(group, quad, n)
            at = self.whole("add", quads, quad)
            for i, begin in enumerate(begins):
                x = self.let(f"load i32, ptr {self.at(begin, at)}, align 4")
                x = self.splat(x, "i32", lanes)
                for part, weight in enumerate(weights):
                    total = new[i * parts + part]
                    sums_of = f"{wide} {total}, {wide} {weight}, {wide} {x}"
                    new[i * parts + part] = self.let(f"call {wide} @{_QUADS}({sums_of})")
        for i, (row, begin) in enumerate(zip(rows, begins, strict=True)):
            factor = self.let(f"load float, ptr {self.at(begin, factors)}, align 4")
            wides = self.splat(factor, "float", lanes)
            for part, place in enumerate(self.places(self.sum_at(row, n), parts)):
                value = self.let(f"sitofp {wide} {new[i * parts + part]} to {kind}")
                y = self.floats("%sums", place, lanes)
                value, y = self.of_group(ends[part], value, y, sums[i], factor)
                self.store(self.add_product(value, wides, y, lanes), place, lanes, "%sums")

    def start(self, total: str) -> str:
        """What a sum begins with, where a row's bytes have this total."""
        # A number without a sign is 128 too large.
        return self.splat(self.let(f"mul i32 {total}, -128"), "i32", self.lanes)

    def ends(self, group: str, n: str, parts: int, mask: str | None) -> list[Any]:
        """What `of_group` reads, for each vector of columns."""
        return [None] * parts

    def of_group(
        self, end: Any, value: str, so_far: str, total: str, factor: str
    ) -> tuple[str, str]:
        """A sum of products of a group of inputs, and the sum so far, with what belongs to both."""
        return value, so_far


class FourBits(BytesByColumns):
    """As `BytesByColumns`, of a matrix of 4 bits; see `Int4Weight`. A byte has two inputs."""

    numbers = 2

    def write(self, shares: int) -> None:
        self.do(f"%s = {self.data(2)}")
        self.do(f"%lows = {self.data(3)}")
        super().write(shares)

    def quads(self, vectors: list[str]) -> list[list[str]]:
        wide = f"<{self.lanes} x i32>"
        both = [vectors, [self.let(f"lshr {wide} {v}, splat (i32 4)") for v in vectors]]
        return [
            [self.let(f"and {wide} {v}, splat (i32 {0x0F0F0F0F})") for v in half] for half in both
        ]

    def start(self, total: str) -> str:
        return "zeroinitializer"

    def ends(self, group: str, n: str, parts: int, mask: str | None) -> list[Any]:
        places = self.places(self.entry(group, n), parts)
        both = [
            self.turned([self.half(base, place, mask) for place in places])
            for base in ("%s", "%lows")
        ]
        return list(zip(*both, strict=True))

    def half(self, base: str, index: str, mask: str | None) -> str:
        value = self.load(base, index, self.lanes, "half", mask)
        return self.let(f"fpext <{self.lanes} x half> {value} to <{self.lanes} x float>")

    def of_group(
        self, end: Any, value: str, so_far: str, total: str, factor: str
    ) -> tuple[str, str]:
        scales, lows = end
        total = self.let(f"fmul float {self.let(f'sitofp i32 {total} to float')}, {factor}")
        so_far = self.add_product(self.splat(total, "float", self.lanes), lows, so_far, self.lanes)
        return self.let(f"fmul <{self.lanes} x float> {value}, {scales}"), so_far


class BytesByRows(BytesByColumns):
    """As `BytesByColumns`, of a matrix `[N, K]`; a thread takes the columns of one tile."""

    axis = 0

    def most(self, code: Code, column: str) -> str:
        return str(self.group)

    def fetch(self, group: str, quad: str, n: str) -> None:
        # A line has two groups: with each the lines of half the columns are fetched.
        odd = self.whole("and", group, 1)
        first = self.whole("add", n, self.whole("mul", odd, 32), self.whole("mul", quad, 4))
        at = self.whole("mul", self.whole("sub", group, odd), GROUP)
        for i in range(4):
            row = self.whole("mul", self.whole("add", first, i), "%K")
            self.do(_PREFETCH.format(self.at("%w", self.whole("add", row, at, _LINES), "i8")))

    def turned(self, vectors: list[str]) -> list[str]:
        return vectors

    def fill_tile(self, group: str, n: str, parts: int, mask: str | None) -> None:
        half, wide = "<8 x i32>", "<16 x i32>"
        begin, last = self.whole("mul", group, GROUP), self.whole("sub", "%N", 1)
        for part in range(parts):
            rows = []
            for i in range(16):
                row = self.whole("add", n, part * 16 + i)
                if mask is not None:
                    row = self.smallest(row, last)
                at = self.at("%w", self.whole("add", self.whole("mul", row, "%K"), begin), "i8")
                rows.append(self.let(f"load {half}, ptr {at}, align 1"))
            pairs = zip(rows[:8], rows[8:], strict=True)
            vectors = [self.mixed(pair, half, range(16)) for pair in pairs]
            for step in (1, 2, 4):  # rows and inputs change places in squares of twice this size
                places = [(i, i + 16 - step)[bool(i & step)] for i in range(16)]
                others = [(i + step, i + 16)[bool(i & step)] for i in range(16)]
                new = list(vectors)
                for i in range(8):
                    if not i & step:
                        pair = vectors[i], vectors[i + step]
                        new[i] = self.mixed(pair, wide, places)
                        new[i + step] = self.mixed(pair, wide, others)
                vectors = new
            (quads,) = self.quads(vectors)
            for quad, value in enumerate(quads):
                self.put(value, str(quad * parts + part))


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
                length = self.smallest(room, start)
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
