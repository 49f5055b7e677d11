"""The processes of one JAX program over several hosts."""

import asyncio
import contextlib
import dataclasses
import errno
import importlib
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.checks import one_line
from specjax.compilation import jit
from specjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Process:
    """One of the processes of a JAX program; the index is from 0."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UserError(
                f"process_index must be below process_count={self.count}, got {self.index}"
            )


_DAY_MS = 24 * 60 * 60 * 1000


class LostProcessError(RuntimeError):
    """Another process of the program has ended, or cannot be reached."""


_AGAIN = "read the errors of the other processes, and start all processes again; rows are kept"


def join(
    address: str | None = None, count: int | None = None, index: int | None = None
) -> Process | None:
    """Joins the processes of one JAX program, before JAX has started its devices.

    Without an address (host and port of process 0) the cluster gives all three arguments: a TPU
    pod, Slurm, Open MPI; see `jax.distributed.initialize`. None if this process is the only one.
    """
    # This service would catch SIGTERM, with which launchers end a run.
    jax.config.update("jax_enable_preemption_service", False)
    where = "the cluster's environment" if address is None else address
    state = importlib.import_module("jax._src.distributed").global_state
    try:
        jax.distributed.initialize(address, count, index)
        if jax.process_count() == 1:
            return None
        # Not JAX's index: a TPU may number the processes in another order than its workers.
        process = Process(state.process_id, jax.process_count())
        # The processes exchange the list of their devices.
        by_process = np.array(jax.devices()).reshape(process.count, -1)
    except jax.errors.JaxRuntimeError as error:
        raise LostProcessError(
            f"the processes cannot be joined by {where} ({one_line(error)[:200]}): {_AGAIN}"
        ) from None
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(
            f"the processes cannot be joined by {where} ({one_line(error)[:200]}): give "
            "--coordinator_address=HOST:PORT of process 0, --process_count and --process_index"
        ) from None
    with naming_lost_processes(process):
        # This wait needs no connected devices, but finds a lost process late.
        connect(
            Mesh(by_process, ("process", "device")),
            wait=lambda: state.client.wait_at_barrier("specjax-joined", timeout_in_ms=_DAY_MS),
        )
    return process


def connect(mesh: Mesh, *, wait: Callable[[], Any] | None = None) -> None:
    """Connects the devices of a JAX program's mesh; all processes must call it.

    gloo, the collectives of CPUs, connects a group of devices when a program first needs it, and
    waits only 30 seconds for the others: a process that still compiles would look lost. So a small
    program that all processes start together connects all groups here; then they wait much longer.

    `wait` waits for all processes; it is `gather` by default.
    """
    axes = mesh.axis_names
    groups = [some for n in range(1, len(axes) + 1) for some in itertools.combinations(axes, n)]

    def sums() -> jax.Array:
        index = jax.lax.axis_index(axes)  # not a constant, whose sum the compiler would know
        return jax.lax.psum(jnp.stack([jax.lax.psum(index, some) for some in groups]), axes)

    program = jax.shard_map(sums, mesh=mesh, in_specs=(), out_specs=jax.P(), check_vma=False)
    compiled = jit(program).lower().compile()
    gather(np.int32(0)) if wait is None else wait()
    jax.block_until_ready(compiled())


def gather(values: Any) -> np.ndarray:
    """Gathers an array of each process of a JAX program, `[P, ...]`; all processes must call it."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(np.asarray(values)))


def check_same(what: str, text: str) -> None:
    """Checks that all processes of a JAX program have the same hash; all processes must call it.

    `what` names the difference in the message, such as "another input".
    """
    texts = [bytes(row).decode() for row in gather(np.frombuffer(text.encode(), np.uint8))]
    other = next((i for i, theirs in enumerate(texts) if theirs != texts[0]), None)
    if other is not None:
        raise UserError(
            f"process {other} has {what} than process 0: give all processes the same files and the "
            "same command"
        )


@contextlib.contextmanager
def naming_lost_processes(process: Process | None) -> Iterator[None]:
    """Raises LostProcessError if a collective fails."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # XLA's errors begin with their status code.
        is_full = str(error).startswith("RESOURCE_EXHAUSTED")
        if process is None or is_full:
            raise
        raise LostProcessError(
            f"process {process.index} of {process.count} lost another process "
            f"({one_line(error)[:120]}): {_AGAIN}"
        ) from None


_SECONDS = 300.0  # for all processes to start, as in JAX
_ANSWER = 5.0  # for a line that is sent at once
_WAIT, _JOIN = b"specjax wait\n", b"specjax join\n"


def meet(address: str, count: int, index: int) -> None:
    """Waits until all processes are there; process 0 listens at the address, host and port.

    JAX's coordinator ends with a segmentation fault if its port is in use; and a process that
    reaches the coordinator of another run, such as one that was not cleaned up, ends that run and
    then waits for minutes. So process 0 first listens at the port itself. Each other process says
    who it is; when all have, process 0 sends them on, and leaves the port to the coordinator.
    """
    if index == 0:
        return asyncio.run(_wait_for_others(_listen(address), count))
    answer = b""
    with _reach(address) as first, contextlib.suppress(OSError), first.makefile("rb") as lines:
        first.sendall(b"specjax %d %d\n" % (index, count))
        answer = lines.readline(100)
        if answer == _WAIT:
            first.settimeout(_SECONDS + _ANSWER)
            if lines.readline(100) == _JOIN:
                return
    if answer == _WAIT:
        raise LostProcessError(f"process 0 ended before all processes had started: {_AGAIN}")
    raise UserError(
        f"--coordinator_address={address}: another program answers at this port: end it, or give "
        "all processes another port"
    )


def _reach(address: str) -> socket.socket:
    """A connection to process 0, or to another program at its address."""
    host, _, port = address.rpartition(":")
    ends = time.monotonic() + _SECONDS
    while True:
        try:
            first = socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER)
        except OSError as error:  # it has not started yet
            if time.monotonic() > ends:
                raise LostProcessError(
                    f"process 0 cannot be reached at {address} ({error}): {_AGAIN}"
                ) from None
        else:
            # A port of this machine that nobody has opened may be given to the caller itself.
            if first.getsockname() != first.getpeername():
                return first
            first.close()
        time.sleep(0.2)


def _listen(address: str) -> socket.socket:
    """A server at all addresses of this machine, as JAX's coordinator will be one."""
    port = int(address.rpartition(":")[2])
    try:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                family: Any = {"family": socket.AF_INET6, "dualstack_ipv6": True}
                return socket.create_server(("", port), **family)
        return socket.create_server(("", port))
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise UserError(
            f"--coordinator_address={address}: process 0 cannot open port {port} ({reason}): end "
            "the program that uses it, or give all processes another port"
        ) from None


async def _wait_for_others(server: socket.socket, count: int) -> None:
    present: dict[int, asyncio.StreamWriter] = {}
    complete = asyncio.get_running_loop().create_future()

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A stranger's words, a caller that ends, and the end of this program.
        ends = (ValueError, OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError)
        with contextlib.closing(writer), contextlib.suppress(*ends):
            name, *numbers = (await reader.readuntil()).split()
            index, theirs = map(int, numbers)
            if name != b"specjax" or complete.done():
                return
            writer.write(_WAIT)
            if theirs != count or not 0 < index < count:
                text = (
                    f"process {index} was started with --process_count={theirs}, process 0 with "
                    f"{count}: give all processes the same"
                )
                return complete.set_exception(UserError(text))
            if index in present:
                text = f"two processes have --process_index={index}: give each its own index"
                return complete.set_exception(UserError(text))
            present[index] = writer
            try:
                if len(present) == count - 1:
                    complete.set_result(None)
                await reader.read()  # until it ends, and is perhaps started again
            finally:
                del present[index]

    serving = await asyncio.start_server(welcome, sock=server, limit=100)
    try:
        await asyncio.wait_for(complete, _SECONDS)
    except TimeoutError:
        absent = ", ".join(str(i) for i in range(1, count) if i not in present)
        raise LostProcessError(
            f"process {absent} of {count} did not start within {_SECONDS:g} s: {_AGAIN}"
        ) from None
    finally:
        serving.close()
    for caller in present.values():
        caller.write(_JOIN)
    for caller in list(present.values()):
        with contextlib.suppress(OSError):  # it has ended, as JAX will find
            await caller.drain()
