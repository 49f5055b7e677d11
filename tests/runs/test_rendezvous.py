"""Processes meet at the address of process 0, or each is told at once why not."""

import concurrent.futures
import contextlib
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

from specjax.cli.main import main
from specjax.errors import UserError
from specjax.runs import processes
from specjax.runs.processes import LostProcessError


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def outcomes(address, *calls):
    """What `meet` gives to each (count, index), started in this order; and the seconds."""
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        found = []
        for call in calls:
            found.append(threads.submit(processes.meet, address, *call))
            time.sleep(0.05)
        errors = [one.exception() for one in found]
    return errors, time.monotonic() - start


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_meet_in_any_order(address, order):
    errors, seconds = outcomes(address, *((3, index) for index in order))
    assert errors == [None] * 3 and seconds < 5
    # The port is free for JAX's coordinator.
    socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))).close()


@contextlib.contextmanager
def program(address, answer):
    """Another program at the address; `answer` gets each connection."""
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as server, contextlib.ExitStack() as stack:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    answer(stack.enter_context(server.accept()[0]))

        threading.Thread(target=serve, daemon=True).start()
        yield
        server.shutdown(socket.SHUT_RDWR)


COORDINATOR = """
import sys, time, jax
jax.distributed.initialize(sys.argv[1], 1, 0)
print("ready", flush=True)
sys.stdin.read()
jax.distributed.shutdown()
print("ended well", flush=True)
"""


@contextlib.contextmanager
def coordinator(address):
    """A run that was not cleaned up; it must not notice."""
    run = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert run.stdout.readline() == "ready\n"
    yield
    assert run.communicate("")[0] == "ended well\n" and run.returncode == 0


PROGRAMS = {
    "silent": lambda address: program(address, lambda caller: None),
    "closing": lambda address: program(address, lambda caller: caller.close()),
    "answering": lambda address: program(address, lambda caller: caller.sendall(b"SSH-2.0-x\r\n")),
    "endless": lambda address: program(address, lambda caller: caller.sendall(bytes(1 << 16))),
    "echoing": lambda address: program(address, lambda caller: caller.sendall(caller.recv(99))),
    "another run": coordinator,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_port_in_use_is_told_to_all_at_once(address, name):
    with PROGRAMS[name](address):
        errors, seconds = outcomes(address, (3, 0), (3, 1), (3, 2))
    assert [type(error) for error in errors] == [UserError] * 3
    assert "process 0 cannot open port" in str(errors[0]) and "it is in use" in str(errors[0])
    for error in errors[1:]:
        assert f"{address}: another program answers at this port" in str(error)
    assert seconds < 8 and not any("\n" in str(error) for error in errors)


def test_the_command_ends_with_status_2(address, tmp_path, capsys):
    words = ["infer", f"--gin.INPUT={tmp_path / 'in.txt'}", f"--gin.OUTPUT_DIR={tmp_path / 'out'}"]
    words += ["--process_count=2", f"--coordinator_address={address}"]
    with PROGRAMS["closing"](address):
        for index, what in enumerate(("cannot open port", "another program answers")):
            assert main([*words, f"--process_index={index}"]) == 2
            told = capsys.readouterr().err
            assert what in told and told.startswith("specjax infer: ") and told.count("\n") == 1


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (
            ((3, 0), (3, 1), (2, 1)),
            "process 1 was started with --process_count=2, process 0 with 3",
        ),
        (((2, 0), (3, 2)), "process 2 was started with --process_count=3, process 0 with 2"),
        (((3, 0), (3, 2), (3, 2)), "two processes have --process_index=2"),
    ],
)
def test_other_options_end_all_at_once(address, calls, told):
    errors, seconds = outcomes(address, *calls)
    assert type(errors[0]) is UserError and told in str(errors[0])
    assert all(type(error) is LostProcessError for error in errors[1:]) and seconds < 5


def test_a_process_that_does_not_start_is_named(address, monkeypatch):
    monkeypatch.setattr(processes, "_SECONDS", 0.5)
    errors, _ = outcomes(address, (4, 0), (4, 2))
    assert "process 1, 3 of 4 did not start within 0.5 s" in str(errors[0])
    assert "process 0 ended before all processes had started" in str(errors[1])
    errors, _ = outcomes(address, (2, 1))
    assert f"process 0 cannot be reached at {address}" in str(errors[0])
    assert all(type(error) is LostProcessError for error in errors)


def say(address, words):
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 5) as caller:
        caller.sendall(words)
        return caller.recv(100) if words.startswith(b"specjax 1 3") else b""


def test_strangers_and_processes_that_are_started_again_do_not_count(address):
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        first = threads.submit(processes.meet, address, 3, 0)
        time.sleep(0.1)
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"specjax\n", b"specjax a b\n", bytes(1000)):
            say(address, words)
        assert say(address, b"specjax 1 3\n") == b"specjax wait\n"  # and ends
        others = [threads.submit(processes.meet, address, 3, index) for index in (1, 2)]
        assert [one.exception() for one in (first, *others)] == [None] * 3


@pytest.mark.parametrize("words", [b"", b"specjax 1", b"GET / HTTP/1.1\r\n"])
def test_callers_that_stay_silent_hold_up_nobody(address, words):
    host, port = address.split(":")
    with concurrent.futures.ThreadPoolExecutor(3) as threads, contextlib.ExitStack() as stack:
        first = threads.submit(processes.meet, address, 3, 0)
        time.sleep(0.1)
        for _ in range(2):
            caller = stack.enter_context(socket.create_connection((host, int(port))))
            caller.sendall(words)
        start = time.monotonic()
        others = [threads.submit(processes.meet, address, 3, index) for index in (1, 2)]
        assert [one.exception() for one in (first, *others)] == [None] * 3
        assert time.monotonic() - start < 3


def test_a_process_that_ended_while_it_waited_is_waited_for_again(address):
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        first = threads.submit(processes.meet, address, 3, 0)
        time.sleep(0.1)
        assert say(address, b"specjax 1 3\n") == b"specjax wait\n"  # and ends
        second = threads.submit(processes.meet, address, 3, 2)
        assert not concurrent.futures.wait([first, second], 0.5).done
        again = threads.submit(processes.meet, address, 3, 1)
        assert [one.exception() for one in (first, second, again)] == [None] * 3


def test_a_lost_process_is_told_in_one_line():
    lost = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed:\nConnection closed by peer")
    first = processes.Process(0, 2)
    with (
        pytest.raises(LostProcessError, match="process 0 of 2 lost another process"),
        processes.naming_lost_processes(first),
    ):
        raise lost
    for process, error in ((None, lost), (first, ValueError("UNAVAILABLE"))):
        with pytest.raises(type(error)), processes.naming_lost_processes(process):
            raise error
