"""Runs untrusted Python programs, such as a model's answers to HumanEval and MBPP.

On Linux a program runs in its own namespaces (user, mount, process, network, ipc): no network, all
files read-only except an empty directory in memory, no other processes, no privileges; with limits
of time, memory per process, processes and files, and without the system calls that could exceed
them. It can still read the files that the user may read (but cannot send them anywhere), and use
the processor and the memory within its limits. A hole in the kernel is a hole in the sandbox. A
malicious program may be able to claim that it has passed.
"""

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from specjax.checks import check_flag, one_number, whole_number

_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_MIB = 1 << 20
# Seconds for the processes to start; the launcher measures the program's own time.
_GRACE = 30.0
# In the pipe, all before this word is the launcher's, and all after it may be the program's.
_STARTED = "started\n"


class Outcome(NamedTuple):
    """The result of a program.

    Attributes:
      passed: whether it reached its end without an error, in time.
      reason: why it did not pass, otherwise "".
    """

    passed: bool
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Runs programs within limits.

    Attributes:
      seconds: the most wall-clock seconds of a program.
      memory: the most MiB of address space of each of its processes.
      processes: the most processes at a time.
      disk: the most MiB that it may write, into memory.
      uncontained: run programs even without namespaces. Then only the time and the memory of a
        process are limited: a program can write and delete the user's files, use the network, and
        start any number of processes.

    Raises:
      TypeError: a value has a wrong type.
      ValueError: a value is out of range.
    """

    seconds: float = 10.0
    memory: int = 512
    processes: int = 8
    disk: int = 16
    uncontained: bool = False

    def __post_init__(self) -> None:
        seconds = one_number("Sandbox: seconds", self.seconds, low=0.0, open_low=True, high=3600.0)
        object.__setattr__(self, "seconds", seconds)
        for name, low in (("memory", 64), ("processes", 1), ("disk", 1)):
            value = whole_number(f"Sandbox: {name}", getattr(self, name), low=low)
            object.__setattr__(self, name, value)
        check_flag("Sandbox: uncontained", self.uncontained)

    def check(self) -> None:
        """Checks, before long work, that programs can be contained.

        Raises:
          OSError: programs cannot be contained, and `uncontained` is False.
        """
        reason = None if self.uncontained else missing()
        if reason is not None:
            raise OSError(
                f"programs cannot be contained here ({reason}): they could write files, use the "
                "network and start processes. Run this where user namespaces are allowed, or, if "
                "you trust the programs, set Sandbox.uncontained=True"
            )

    def run(self, source: str) -> Outcome:
        """Runs a program in a Python without site-packages.

        Args:
          source: the program; it must reach its end: `exit(0)` fails.

        Returns:
          The result.

        Raises:
          OSError: the program could not be contained.
        """
        contained = not (self.uncontained and missing() is not None)
        try:
            return self._run(source, contained=contained)
        except _NotStartedError as why:
            raise OSError(f"a program could not be contained ({why}): see Sandbox.check") from None

    def _run(self, source: str, *, contained: bool) -> Outcome:
        token, late = secrets.token_hex(16), f"timed out after {self.seconds:g} seconds"
        with tempfile.TemporaryDirectory(prefix="specjax-sandbox-") as work:
            reading, writing = os.pipe()
            job = {
                "source": source,
                "started": _STARTED,
                "token": token,
                "late": late,
                "status": writing,
                "work": os.path.realpath(work),
                "contained": contained,
                "memory": self.memory * _MIB,
                "seconds": self.seconds,
                "processes": self.processes,
                "disk": self.disk * _MIB,
            }
            with os.fdopen(reading, "rb", buffering=0) as status:
                try:
                    in_time = _start(job, writing, self.seconds + _GRACE)
                finally:
                    os.close(writing)
                content = _content(status)
        if not in_time or content == late:
            return Outcome(False, late)
        if not content.startswith(_STARTED):
            raise _NotStartedError(content[:200] or "the process ended early")
        told = content.removeprefix(_STARTED)
        return Outcome(True, "") if told == token else Outcome(False, told[:200] or "exited early")


class _NotStartedError(Exception):
    """Why the launcher did not start a program."""


@functools.cache
def missing() -> str | None:
    """Returns why programs cannot be contained on this machine, or None."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    try:
        outcome = Sandbox()._run("pass", contained=True)
    except _NotStartedError as why:
        return str(why)
    return None if outcome.passed else outcome.reason


def _start(job: dict[str, Any], writing: int, seconds: float) -> bool:
    """Runs a job to its end; returns whether it ended in time."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_LAUNCHER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(writing,),
        start_new_session=True,
        cwd=job["work"],
        env={"PATH": os.defpath, "TMPDIR": job["work"], "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
    )
    try:
        process.communicate(json.dumps(job).encode(), timeout=seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        process.kill()
        process.wait()
        if not job["contained"]:
            _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _content(status: Any) -> str:
    """The content of the pipe, without waiting for processes that keep it open."""
    os.set_blocking(status.fileno(), False)
    return (status.read(4096) or b"").decode(errors="replace")
