"""The processes of a program meet before JAX joins them: process 0 waits for all at its address.

JAX's coordinator ends with a segmentation fault if its port is in use; and a process that reaches
the coordinator of another run, such as one that was not cleaned up, ends that run and then waits
for minutes. So process 0 first listens at the port itself. Each other process says who it is; when
all have, process 0 sends them on, and leaves the port to the coordinator.
"""

import contextlib
import errno
import selectors
import socket
import time
from typing import Any, cast

from specjax.errors import UserError
from specjax.runs.processes import LostProcessError

_SECONDS = 300.0  # for all processes to start, as in JAX
_ANSWER = 5.0  # for a line that is sent at once
_WAIT, _JOIN = b"specjax wait\n", b"specjax join\n"
_AGAIN = "read the errors of the other processes, and start all processes again"


def meet(address: str, count: int, index: int) -> None:
    """Waits until all processes are there; process 0 listens at the address, host and port."""
    if index == 0:
        _wait_for_others(address, count)
    else:
        _wait_for_first(address, count, index)


def _wait_for_others(address: str, count: int) -> None:
    ends = time.monotonic() + _SECONDS
    present: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_opened(address, count))
        # The server, and the callers that have not said yet who they are.
        strangers = stack.enter_context(selectors.DefaultSelector())
        strangers.register(server, selectors.EVENT_READ)
        while len(present) < count - 1:
            left = ends - time.monotonic()
            if left <= 0:
                absent = ", ".join(str(i) for i in range(1, count) if i not in present)
                raise LostProcessError(
                    f"process {absent} of {count} did not start within {_SECONDS:g} s: {_AGAIN}"
                )
            for key, _ in strangers.select(left):
                if key.fileobj is server:
                    caller = stack.enter_context(server.accept()[0])
                    caller.setblocking(False)
                    strangers.register(caller, selectors.EVENT_READ, bytearray())
                elif (index := _index_of(key, strangers, count)) is not None:
                    if index in present and not _has_ended(present[index]):
                        raise UserError(
                            f"two processes have --process_index={index}: give each its own index"
                        )
                    present[index] = cast(socket.socket, key.fileobj)
            present = {i: caller for i, caller in present.items() if not _has_ended(caller)}
        for caller in present.values():
            with contextlib.suppress(OSError):  # it has ended, as JAX will find
                caller.sendall(_JOIN)


def _opened(address: str, count: int) -> socket.socket:
    """A server at all addresses of this machine, as JAX's coordinator will be one."""
    port = int(address.rpartition(":")[2])
    try:
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, backlog=count, dualstack_ipv6=True
                )
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise
        return socket.create_server(("", port), backlog=count)
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise UserError(
            f"--coordinator_address={address}: process 0 cannot open port {port} ({reason}): end "
            "the program that uses it, or give all processes another port"
        ) from None


def _index_of(key: selectors.SelectorKey, strangers: Any, count: int) -> int | None:
    """The index that a caller says; None: it has said too little yet, or it is no process."""
    caller, line = cast(socket.socket, key.fileobj), key.data
    words = b""
    with contextlib.suppress(OSError):
        words = caller.recv(100)
    line += words
    if words and len(line) < 100 and not line.endswith(b"\n"):
        return None
    strangers.unregister(caller)
    try:
        name, *numbers = line.split()
        index, theirs = map(int, numbers)
        if name != b"specjax":
            return None
        caller.sendall(_WAIT)
    except (OSError, ValueError):
        return None
    if theirs != count or not 0 < index < count:
        raise UserError(
            f"process {index} was started with --process_count={theirs}, process 0 with "
            f"{count}: give all processes the same"
        )
    return index


def _has_ended(caller: socket.socket) -> bool:
    try:
        return not caller.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _wait_for_first(address: str, count: int, index: int) -> None:
    answer = b""
    with _reached(address) as first, contextlib.suppress(OSError), first.makefile("rb") as lines:
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


def _reached(address: str) -> socket.socket:
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
