"""Runs untrusted Python programs, such as a model's answers to HumanEval and MBPP: pass@1.

A program runs under `bwrap` (bubblewrap): no network, no other processes, no privileges, and a file
system of nothing but Python and its libraries, read-only, with an empty directory in memory; with
limits of time, of memory per process, and of processes. It can use the processor, the memory of all
its processes, shared memory, and any number of files within its directory's size, until its time is
over. A hole in the kernel is a hole in the sandbox. A malicious program may be able to claim that
it has passed.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.checks import PathLike, check_flag, one_number, whole_fields
from specjax.data.examples import read_objects
from specjax.errors import UserError
from specjax.evaluation.metrics import MeanMetric
from specjax.writing import temporary_directory

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
    """Whether a program reached its end without an error, in time; `reason`: why not, or ""."""

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
    """

    seconds: float = 10.0
    memory: int = 512
    processes: int = 8
    disk: int = 16
    uncontained: bool = False

    def __post_init__(self) -> None:
        seconds = one_number("Sandbox: seconds", self.seconds, low=0.0, open_low=True, high=3600.0)
        object.__setattr__(self, "seconds", seconds)
        whole_fields(self, "Sandbox: ", memory=64, processes=1, disk=1)
        check_flag("Sandbox: uncontained", self.uncontained)

    def check(self) -> None:
        """Raises UserError if programs cannot be contained, and `uncontained` is False."""
        reason = None if self.uncontained else missing()
        if reason is not None:
            raise UserError(
                f"programs cannot be contained here ({reason}): install bubblewrap, such as by "
                "apt-get install bubblewrap, or, if you trust the programs with your files and the "
                "network, set Sandbox.uncontained=True"
            )

    def run(self, source: str) -> Outcome:
        """Runs a program, in a Python without site-packages; `exit(0)` is not its end.

        Raises:
          OSError: the program could not be contained.
          UserError: see `check`.
        """
        self.check()
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
        with temporary_directory() as directory, contextlib.ExitStack() as stack:
            reading, writing = os.pipe()
            status = stack.enter_context(os.fdopen(reading, "rb", buffering=0))
            # Not Popen's own pipe: one that an interrupt ends stays open, and its child waits.
            taking, giving = os.pipe()
            stdin = stack.enter_context(os.fdopen(giving, "wb"))
            try:
                job |= {"limits": limits, "status": writing}
                process = subprocess.Popen(
                    command,
                    stdin=taking,
                    stdout=subprocess.DEVNULL,
                    stderr=writing,
                    pass_fds=(writing,),
                    start_new_session=True,
                    cwd=directory,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                )
            finally:
                os.close(taking)
                os.close(writing)
            try:
                with contextlib.suppress(BrokenPipeError), stdin:
                    stdin.write(json.dumps(job).encode())
                # Unlike select, poll takes any number of file descriptors.
                started = select.poll()
                started.register(status, select.POLLIN)
                started.poll(_GRACE * 1000)
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


class Problem(NamedTuple):
    """A programming problem with its tests.

    Attributes:
      prompt: the beginning of the program, which the output continues; "" if there is none.
      entry_point: the tested function, if the prompt begins it, otherwise "".
      tests: code to run after the program, which raises an error if the program is wrong.
    """

    prompt: str
    entry_point: str
    tests: str


def read_problems(path: PathLike) -> list[Problem]:
    """Reads the problems of HumanEval or MBPP.

    Args:
      path: a JSONL file, plain or `.gz`, whose objects have the keys of HumanEval (`prompt`,
        `entry_point`, `test`) or of MBPP (`test_list`, and `test_setup_code` or `test_imports`).

    Raises:
      OSError: the file does not exist.
      UserError: the file is empty or not JSONL, or a line has other keys.
    """
    problems, name = [], os.path.expanduser(path)
    for number, _, row in read_objects(name):
        lists = [row.get("test_imports", []), row.get("test_list")]
        if all(isinstance(row.get(key), str) for key in ("prompt", "entry_point", "test")):
            tests = f"{row['test']}\ncheck({row['entry_point']})\n"
            problems.append(Problem(row["prompt"], row["entry_point"], tests))
        elif all(isinstance(x, list) and all(isinstance(y, str) for y in x) for x in lists):
            setup = str(row.get("test_setup_code") or "")
            tests = "\n".join([setup, *lists[0], *row["test_list"]]) + "\n"
            problems.append(Problem("", "", tests))
        else:
            raise UserError(
                f"{name}:{number}: the line must have the keys of HumanEval (prompt, entry_point, "
                "test) or of MBPP (test_list)"
            )
    return problems


def check_problems(
    problems: Sequence[Problem], inputs: Sequence[str | None], path: Any, source: Any
) -> None:
    """Raises UserError unless each input has the name of the function that its problem tests."""
    if len(problems) != len(inputs):
        raise UserError(
            f"{path} has {len(problems)} problems, but {source} has {len(inputs)} rows: give one "
            "problem for each"
        )
    for i, (problem, text) in enumerate(zip(problems, inputs, strict=True)):
        if text is not None and problem.entry_point not in text:
            raise UserError(
                f"problem {i} of {path} tests {problem.entry_point!r}, which is not in row {i} of "
                f"{source}: give the problems of these inputs, in the same order"
            )


def program(problem: Problem, output: str) -> str:
    """The program of an output, with the problem's tests.

    The output is the continuation of the prompt, or a whole function, perhaps in a Markdown block
    (the first block counts).
    """
    fenced = re.search(r"^```[\w+-]*[ \t]*\n(.*?)(?:^```|\Z)", output, re.DOTALL | re.MULTILINE)
    code = fenced[1] if fenced else output
    whole = re.search(rf"^def\s+{re.escape(problem.entry_point)}\b", code, re.MULTILINE)
    prompt = problem.prompt
    if prompt and whole:
        # Keeps the prompt's imports and definitions; the output defines the function again.
        prompt = f"{prompt.rstrip()}\n    pass\n\n"
    return f"{prompt}{code}\n\n{problem.tests}"


# Lossless settings often write the same.
@functools.lru_cache(maxsize=1 << 14)
def _passes(sandbox: Sandbox, source: str) -> bool:
    return sandbox.run(source).passed


class PassAt1(MeanMetric):
    """The share of outputs that pass their problem's tests.

    The references of an output are the fields of its `Problem`. Equal programs are run only once in
    a process; `workers` programs run at a time, by default as many as processors.

    Source: Chen et al. 2021 (HumanEval), Austin et al. 2021 (MBPP); one output per problem.
    """

    def __init__(self, sandbox: Sandbox, *, workers: int | None = None):
        self._sandbox, self._workers = sandbox, workers or os.cpu_count() or 1

    def values(self, outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
        pairs = zip(outputs, references, strict=True)
        sources = [program(Problem(*problem), output) for output, problem in pairs]
        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            return list(map(float, pool.map(functools.partial(_passes, self._sandbox), sources)))

    def refusal(self, references: Sequence[str]) -> str | None:
        if len(references) == len(Problem._fields):
            return None
        return f"pass@1 needs {', '.join(Problem._fields)}, got {len(references)} texts"
