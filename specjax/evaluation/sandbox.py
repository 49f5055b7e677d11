"""Runs untrusted Python programs, such as a model's answers to HumanEval and MBPP.

A program runs under `bwrap` (bubblewrap): no network, no other processes, no privileges, and a file
system of nothing but Python and its libraries, read-only, with an empty directory in memory; with
limits of time, of memory per process, and of processes. It can use the processor, the memory of all
its processes, shared memory, and any number of files within its directory's size, until its time is
over. A hole in the kernel is a hole in the sandbox. A malicious program may be able to claim that
it has passed.
"""

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from specjax.checks import check_flag, one_number, whole_number
from specjax.errors import UserError

_RUNNER = Path(__file__).with_name("sandbox_runner.py")
_MIB = 1 << 20
_GRACE = 30.0  # seconds for the processes to start
_WORK = "/work"
# Users that the system gives to nobody: for each program one, so that its processes are counted.
_USERS = range(61184, 65280)
# Where the shared libraries of the system are.
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
# In the pipe, all before this word is bwrap's, and all after it may be the program's.
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
      uncontained: run programs even without bwrap. Then only the time and the memory of a process
        are limited: a program can write and delete the user's files, use the network, and start any
        number of processes.

    Raises:
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
          ValueError: they cannot, and `uncontained` is False.
        """
        reason = None if self.uncontained else missing()
        if reason is not None:
            raise UserError(
                f"programs cannot be contained here ({reason}): install bubblewrap, such as by "
                "apt-get install bubblewrap, or, if you trust the programs with your files and the "
                "network, set Sandbox.uncontained=True"
            )

    def run(self, source: str) -> Outcome:
        """Runs a program in a Python without site-packages.

        Args:
          source: the program; it must reach its end: `exit(0)` fails.

        Raises:
          OSError: the program could not be contained.
        """
        return self._run(source, contained=not (self.uncontained and missing() is not None))

    def _run(self, source: str, *, contained: bool) -> Outcome:
        token = secrets.token_hex(16)
        limits = {
            "AS": self.memory * _MIB,
            "CPU": int(self.seconds) + 1,
            "FSIZE": self.disk * _MIB,
            "NOFILE": 64,
            "CORE": 0,
        }
        job: dict[str, Any] = {"source": source, "started": _STARTED, "token": token, "user": None}
        python = [os.path.realpath(sys.executable), *("-I", "-S", "-B", "-c", _RUNNER.read_text())]
        command = python
        if contained:
            command = [*_bwrap(self.disk * _MIB), *python]
            is_root = os.getuid() == 0
            job["user"] = secrets.choice(_USERS) if is_root else None
            limits["NPROC"] = self.processes + (0 if is_root else 1)  # bwrap's process 1
        reading, writing = os.pipe()
        with (
            os.fdopen(reading, "rb", buffering=0) as status,
            tempfile.TemporaryDirectory(prefix="specjax-sandbox-") as directory,
        ):
            try:
                job |= {"limits": limits, "status": writing}
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=writing,
                    pass_fds=(writing,),
                    start_new_session=True,
                    cwd=directory,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                )
            finally:
                os.close(writing)
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(json.dumps(job).encode())
                select.select([status], [], [], _GRACE)
                process.wait(self.seconds)
            except subprocess.TimeoutExpired:
                return Outcome(False, f"timed out after {self.seconds:g} seconds")
            finally:
                # With bwrap's first process all others end.
                process.kill()
                process.wait()
                if not contained:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            # Without waiting for processes that keep the pipe open.
            os.set_blocking(status.fileno(), False)
            content = (status.read(4096) or b"").decode(errors="replace")
        if not content.startswith(_STARTED):
            why = " ".join(content[:200].split()) or "the process ended early"
            raise OSError(f"a program could not be contained ({why}): see Sandbox.check")
        end = content.removeprefix(_STARTED)
        return Outcome(True, "") if end == token else Outcome(False, end[:200] or "exited early")


@functools.cache
def missing() -> str | None:
    """Returns why programs cannot be contained on this machine, or None."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        outcome = Sandbox()._run("import json, random", contained=True)
    except OSError as error:
        return str(error)
    return None if outcome.passed else outcome.reason


def _bwrap(disk: int) -> list[str]:
    """The command before the program's own."""
    prefix = os.path.realpath(sys.base_prefix)
    wanted = (os.path.realpath(sys.executable), f"{prefix}/lib", f"{prefix}/lib64", *_LIBRARIES)
    places = [place for place in dict.fromkeys(wanted) if os.path.exists(place)]
    above = {str(parent) for place in places for parent in list(Path(place).parents)[:-1]}
    command = ["bwrap", "--die-with-parent", "--new-session", "--clearenv"]
    command += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    if os.getuid() == 0:
        # The runner needs these two to become an ordinary user.
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    for directory in sorted(above, key=len):
        command += ["--perms", "0755", "--dir", directory]
    for place in places:
        command += ["--ro-bind", place, place]
    command += ["--perms", "0777", "--size", str(disk), "--tmpfs", _WORK, "--remount-ro", "/"]
    return [*command, "--chdir", _WORK, "--setenv", "TMPDIR", _WORK]
