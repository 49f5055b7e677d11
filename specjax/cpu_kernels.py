"""Products of few rows on CPUs, in machine code that LLVM makes and XLA calls.

XLA's product of 2 to 8 rows takes 1.5 to 2.9 times as long as that of one, and it turns matrices of
16 or 8 bits into floats first. Here each weight is read once, in its own form, for all rows. A sum
has one order, whatever the number of rows and threads.

Axes: M rows, K inputs, N outputs.
"""

import ctypes
import functools
import itertools
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Float32, Int32

from specjax.cpu_code import (
    GROUP,
    STORED,
    WORDS,
    Attention,
    ByColumns,
    ByRows,
    BytesByColumns,
    BytesByRows,
    Code,
    FourBits,
    InBytes,
    Kernel,
    Normalised,
    has_quads,
    lanes,
)

# A product of more rows is XLA's, but not with x in 8 bits. XLA's is slower than the kernels up to
# the second number with matrices [N, K] and with those of fewer bits, which it also makes floats.
MOST_ROWS, _MANY_ROWS = 16, 256
# Rows of a matrix [K, N] up to this N are read whole, in two halves of K. If two threads read
# halves of each row, they would fetch much past their ends.
_NARROW = 4096
# Attention of more queries is XLA's; a pass over a part of a prompt has so many.
MOST_QUERIES = 64
# The passes of LLVM that make the code fast; all its standard ones take ten times as long.
_PASSES = ("always_inliner", "new_gvn", "instruction_combine", "simplify_cfg")


def takes(x: Array, weight: Array, *, by_rows: bool) -> bool:
    """Whether `product` multiplies them; without llvmlite it multiplies nothing."""
    known = x.dtype in (jnp.float32, jnp.bfloat16) and jnp.dtype(weight.dtype) in STORED
    if not (known and x.shape[0] and available()):
        return False
    if _in_bytes(weight, by_rows=by_rows):
        return True
    most = MOST_ROWS if weight.dtype == jnp.float32 and not by_rows else _MANY_ROWS
    return weight.dtype != jnp.uint8 and x.shape[0] <= most


def product(
    x: Float32[Array, "M K"],
    weight: Array,
    scales: Float[Array, "*G N"] | None = None,
    lows: Float16[Array, "G N"] | None = None,
    *,
    by_rows: bool = False,
) -> Float32[Array, "M N"]:
    """`(x @ weight) * scales` in a program for one CPU; `lows` as in `models.int4.Int4Weight`.

    With matrices of 8 or 4 bits, a CPU with AVX-512 VNNI multiplies x in 8 bits: whole numbers of
    its rows, with a factor for each `GROUP`. It takes a quarter of the instructions of floats.

    The matrix is `[K, N]`, or `[N, K]` if `by_rows`; each output has a factor of `scales`.
    """
    dtype = jnp.dtype(weight.dtype)
    rows, columns = x.shape[0], weight.shape[0 if by_rows else 1]
    form: Any
    options: tuple[Any, ...] = (dtype, scales is not None and lows is None)
    if _in_bytes(weight, by_rows=by_rows):
        form = FourBits if lows is not None else BytesByRows if by_rows else BytesByColumns
        words = x.shape[1] // GROUP * WORDS
        x = _call([x], (rows, words), InBytes, lows is not None, dtype=jnp.int32)
        arrays = [value for value in (x, weight, scales, lows) if value is not None]
        shares = 2 if columns <= _NARROW and not by_rows else 1
        y = _call(arrays, (shares, rows, columns), form, *options, shares)
        return y[0] + y[1] if shares == 2 else y[0]
    if by_rows:
        form = ByRows
    elif rows > MOST_ROWS:
        parts = [x[i : i + MOST_ROWS] for i in range(0, rows, MOST_ROWS)]
        return jnp.concatenate([product(part, weight, scales) for part in parts])
    else:
        form, options = ByColumns, (*options, rows)
    arrays = [x, weight] if scales is None else [x, weight, scales]
    return _call(arrays, (rows, columns), form, *options)


def has_bytes() -> bool:
    """Whether x has 8 bits in products with matrices of 8 or 4 bits."""
    return available() and has_quads()


def _in_bytes(weight: Array, *, by_rows: bool) -> bool:
    even = weight.dtype == jnp.int8 and weight.shape[1 if by_rows else 0] % GROUP == 0
    return (even or (weight.dtype == jnp.uint8 and not by_rows)) and has_bytes()


def attention(
    query: Float[Array, "B T K N D"],
    segments: Sequence[
        tuple[Float[Array, "B K S D"], Float[Array, "B K D S"], Float32[Array, "..."]]
    ],
    start: Int32[Array, " B"] | None,
    sinks: Float32[Array, " H"] | None,
    scale: float,
    softcap: float | None,
) -> Float32[Array, "B T K N D"]:
    """Attention to one segment of keys, values and bias, or to two, under one softmax.

    A lane adds the values whose positions are the same modulo `lanes`, in their order: a token has
    the same numbers, whether the tokens before it are beside the cache or in it.

    Args:
      segments: keys, values, and a bias, which is `[B, K, N, T, S]`; its sizes but S may be 1.
      start: the position of the second segment's first key; that of the first one's is 0.
      sinks: a logit of each head that has no value.
    """
    arrays = [query, *itertools.chain(*segments)]
    if len(segments) > 1:
        length = segments[0][0].shape[2]
        arrays.append(jnp.full(len(query), length, jnp.int32) if start is None else start)
    if sinks is not None:
        arrays.append(sinks)
    dtype = jnp.dtype(query.dtype)
    return _call(
        arrays, query.shape, Attention, dtype, len(segments), sinks is not None, scale, softcap
    )


def normalised(x: Float32[Array, "M K"], eps: float) -> Float32[Array, "M K"]:
    """Rows divided by their root mean square, in a program for one CPU.

    XLA takes another square root for one row than for several. A block's token would have another
    last bit than the same token alone, and so another byte in the next product.
    """
    return _call([x], x.shape, Normalised, eps)


def _call(
    arrays: list[Array], shape: tuple[int, ...], form: Any, *options: Any, dtype: Any = jnp.float32
) -> Array:
    with _compiling:
        name = _target(form, lanes(), *options)
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, dtype))(*arrays)


def available() -> bool:
    """Whether this machine has the kernels."""
    return not obstacle()


@functools.cache
def obstacle() -> str:
    """Why this machine has no kernels, or ""."""
    try:
        import llvmlite
        import llvmlite.binding as llvm
    except ImportError:
        return "llvmlite is not installed (pip install '.[cpu]')"
    if llvm.llvm_version_info < (20, 0, 0):
        return f"llvmlite {llvmlite.__version__} is too old (0.45 is enough)"
    # A sum without this instruction of x86 would call a function for each number.
    if not llvm.get_host_cpu_features().get("fma", True):
        return "this CPU has no FMA"
    if os.name != "posix":  # the code calls aligned_alloc and sched_yield
        return f"they run on Linux and macOS, not on {os.name}"
    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")
    text = header.read_text() if header.exists() else ""
    version = ".".join(re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", text))
    return "" if version == "0.3" else f"XLA's FFI has version {version or 'unknown'}, not 0.3"


# XLA calls `handler`; the layouts are those of version 0.3 of xla/ffi/api/c_api.h, in words of 8
# bytes. The caller and threads of XLA's pool take parts of the columns until there are none; then
# the caller waits for those that others have begun, not for threads that come late. The last to
# leave frees the job.
# A job's words: next part, finished parts, members, parts, parts of a group, columns of a part,
# columns, arguments, y.
_HANDLER = """
declare ptr @malloc(i64)
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare i32 @sched_yield()

define internal i64 @word(ptr %base, i64 %i) alwaysinline {{
  %at = getelementptr i64, ptr %base, i64 %i
  %value = load i64, ptr %at, align 8
  ret i64 %value
}}
define internal ptr @pointer(ptr %base, i64 %i) alwaysinline {{
  %at = getelementptr ptr, ptr %base, i64 %i
  %value = load ptr, ptr %at, align 8
  ret ptr %value
}}
define internal void @put(ptr %base, i64 %i, i64 %value) alwaysinline {{
  %at = getelementptr i64, ptr %base, i64 %i
  store i64 %value, ptr %at, align 8
  ret void
}}
define internal ptr @data(ptr %arguments, i64 %i) alwaysinline {{
  %buffer = call ptr @pointer(ptr %arguments, i64 %i)
  %value = call ptr @pointer(ptr %buffer, i64 3)
  ret ptr %value
}}
define internal i64 @size(ptr %arguments, i64 %i, i64 %axis) alwaysinline {{
  %buffer = call ptr @pointer(ptr %arguments, i64 %i)
  %sizes = call ptr @pointer(ptr %buffer, i64 5)
  %value = call i64 @word(ptr %sizes, i64 %axis)
  ret i64 %value
}}
define internal i64 @parts(i64 %total, i64 %size) alwaysinline {{
  %over = add i64 %total, %size
  %last = sub i64 %over, 1
  %count = sdiv i64 %last, %size
  ret i64 %count
}}

define internal void @work(ptr %job) {{
  %finished = getelementptr i64, ptr %job, i64 1
  %parts = call i64 @word(ptr %job, i64 3)
  %in.group = call i64 @word(ptr %job, i64 4)
  %size = call i64 @word(ptr %job, i64 5)
  %columns = call i64 @word(ptr %job, i64 6)
  %arguments = call ptr @pointer(ptr %job, i64 7)
  %y = call ptr @pointer(ptr %job, i64 8)
  br label %take
take:
  %part = atomicrmw add ptr %job, i64 1 monotonic
  %more = icmp slt i64 %part, %parts
  br i1 %more, label %compute, label %end
compute:
  %group = sdiv i64 %part, %in.group
  %own = srem i64 %part, %in.group
  %n0 = mul i64 %own, %size
  %full = add i64 %n0, %size
  %n1 = call i64 @llvm.smin.i64(i64 %full, i64 %columns)
  call void @part(ptr %arguments, ptr %y, i64 %group, i64 %n0, i64 %n1)
  %before = atomicrmw add ptr %finished, i64 1 release
  br label %take
end:
  ret void
}}
define internal void @leave(ptr %job) {{
  %members = getelementptr i64, ptr %job, i64 2
  %before = atomicrmw sub ptr %members, i64 1 acq_rel
  %last = icmp eq i64 %before, 1
  br i1 %last, label %free, label %end
free:
  call void @free(ptr %job)
  br label %end
end:
  ret void
}}
define internal void @task(ptr %job) {{
  call void @work(ptr %job)
  call void @leave(ptr %job)
  ret void
}}

define ptr @handler(ptr %frame) {{
  %extension = call ptr @pointer(ptr %frame, i64 1)
  %is.plain = icmp eq ptr %extension, null
  br i1 %is.plain, label %called, label %asked
asked:
  %kind.word = call i64 @word(ptr %extension, i64 1)
  %kind = trunc i64 %kind.word to i32
  %is.metadata = icmp eq i32 %kind, 1
  br i1 %is.metadata, label %version, label %called
version:
  %metadata = call ptr @pointer(ptr %extension, i64 3)
  call void @put(ptr %metadata, i64 3, i64 {version})
  ret ptr null
called:
  %stage.word = call i64 @word(ptr %frame, i64 4)
  %stage = trunc i64 %stage.word to i32
  %is.execution = icmp eq i32 %stage, 3
  br i1 %is.execution, label %run, label %end
run:
  %arguments = call ptr @pointer(ptr %frame, i64 9)
  %results = call ptr @pointer(ptr %frame, i64 14)
  %y.data = call ptr @data(ptr %results, i64 0)
  %y = ptrtoint ptr %y.data to i64
  %api = call ptr @pointer(ptr %frame, i64 2)
  %context = call i64 @word(ptr %frame, i64 3)
  %threads.at = alloca i64
  store i64 1, ptr %threads.at
  %question = alloca [5 x i64]
  call void @put(ptr %question, i64 0, i64 32)
  call void @put(ptr %question, i64 1, i64 0)
  call void @put(ptr %question, i64 2, i64 %context)
  %threads.word = ptrtoint ptr %threads.at to i64
  call void @put(ptr %question, i64 3, i64 %threads.word)
  %count.threads = call ptr @pointer(ptr %api, i64 18)
  %none = call ptr %count.threads(ptr %question)
  %threads = load i64, ptr %threads.at
{sizes}
  %in.group = call i64 @parts(i64 {columns}, i64 {size})
  %parts = mul i64 %in.group, {groups}
  %useful = call i64 @llvm.smin.i64(i64 %parts, i64 {threads})
  %members = call i64 @llvm.smax.i64(i64 %useful, i64 1)
  %arguments.word = ptrtoint ptr %arguments to i64

  %job = call ptr @malloc(i64 72)
  call void @put(ptr %job, i64 0, i64 0)
  call void @put(ptr %job, i64 1, i64 0)
  call void @put(ptr %job, i64 2, i64 %members)
  call void @put(ptr %job, i64 3, i64 %parts)
  call void @put(ptr %job, i64 4, i64 %in.group)
  call void @put(ptr %job, i64 5, i64 {size})
  call void @put(ptr %job, i64 6, i64 {columns})
  call void @put(ptr %job, i64 7, i64 %arguments.word)
  call void @put(ptr %job, i64 8, i64 %y)
  call void @put(ptr %question, i64 0, i64 40)
  %task = ptrtoint ptr @task to i64
  call void @put(ptr %question, i64 3, i64 %task)
  %job.word = ptrtoint ptr %job to i64
  call void @put(ptr %question, i64 4, i64 %job.word)
  %schedule = call ptr @pointer(ptr %api, i64 17)
  br label %invite
invite:
  %i = phi i64 [1, %run], [%next, %ask]
  %is.more = icmp slt i64 %i, %members
  br i1 %is.more, label %ask, label %own
ask:
  %no.error = call ptr %schedule(ptr %question)
  %next = add i64 %i, 1
  br label %invite
own:
  call void @work(ptr %job)
  %finished.at = getelementptr i64, ptr %job, i64 1
  br label %wait
wait:
  %finished = load atomic i64, ptr %finished.at acquire, align 8
  %is.ready = icmp eq i64 %finished, %parts
  br i1 %is.ready, label %leave, label %yield
yield:
  %yielded = call i32 @sched_yield()
  br label %wait
leave:
  call void @leave(ptr %job)
  br label %end
end:
  ret ptr null
}}

{functions}
define internal void @part(ptr %arguments, ptr noalias %y, i64 %group, i64 %n0, i64 %n1) {{
entry:
{part}
  ret void
}}
"""


def _machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )


_engines: list[Any] = []  # a program may call their code as long as the process lives
_compiling = threading.Lock()  # or two threads would register a name twice


def _text(form: type[Kernel], *options: Any) -> str:
    code, caller = form(*options), Code()
    groups, columns, size, threads = code.sizes(caller)
    return _HANDLER.format(
        version=3 << 32,
        sizes="\n".join(caller.lines),
        groups=groups,
        columns=columns,
        size=size,
        threads=threads,
        functions=code.functions,
        part="\n".join(code.lines),
    )


@functools.cache
def _target(form: type[Kernel], lanes: int, *options: Any) -> str:
    """The name under which XLA calls a kernel."""
    import llvmlite.binding as llvm

    machine = _machine()
    module = llvm.parse_assembly(_text(form, *options))
    passes = llvm.create_new_module_pass_manager()
    for name in _PASSES:
        getattr(passes, f"add_{name}_pass")()
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    passes.run(module, llvm.create_pass_builder(machine, tuning))
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    handler = ctypes.cast(engine.get_function_address("handler"), ctypes.c_void_p)
    name = "_".join(["specjax", form.__name__, str(lanes), *map(str, options)])
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return name
