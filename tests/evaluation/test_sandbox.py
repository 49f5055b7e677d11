"""What untrusted programs do is contained, and scored as a failure."""

import contextlib
import fcntl
import functools
import json
import os
import resource
import shutil
import socket
import subprocess
import time

import pytest

from specjax.evaluation import METRICS, PassAt1, Sandbox, figure
from specjax.evaluation import sandbox as sandbox_lib
from specjax.evaluation.sandbox import Problem, program, read_problems

needs_bwrap = pytest.mark.skipif(
    sandbox_lib.missing() is not None, reason=f"no sandbox here: {sandbox_lib.missing()}"
)
QUICK = Sandbox(seconds=20.0)
HUMAN_EVAL = Problem(
    "import math\n\ndef half(x):\n    '''Half of x.'''\n",
    "half",
    "def check(f):\n    assert f(3) == 1.5\n    assert math.pi\n\ncheck(half)\n",
)
# Raises with what a call gave, -1 if it was refused.
CALL = (
    "import ctypes, os\nl = ctypes.CDLL(None)\n"
    "CLONE = {'x86_64': 56}.get(os.uname().machine, 220)\n"
    "def given(x): raise OSError(f'told {x}')\n"
)
MBPP = Problem("", "", "assert double(2) == 4\nassert double(0) == 0\n")


@needs_bwrap
def test_a_program_that_is_right_passes():
    # A control for all below: files in its own directory, processes, memory and modules it may use.
    source = """
import os, re, tempfile
open("mine", "w").write("x")
tempfile.TemporaryFile().write(b"x")
child = os.fork()
if child == 0: os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert len(bytearray(1 << 26))
"""
    assert QUICK.run(source) == (True, "")


@needs_bwrap
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("x = (", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "exited early"),
        ("def f(): f()\nf()", "RecursionError"),
        ("x = bytearray(10 << 30)", "MemoryError"),
        pytest.param(
            "x = []\nwhile True: x.append(bytearray(1 << 20))",
            "MemoryError",
            marks=pytest.mark.exhaustive,
        ),
        ("import os\nwhile True: os.fork()", "BlockingIOError"),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 2)", "Network is unreachable"),
        ("open('x', 'wb').write(bytes(1 << 25))", "File too large"),
        ("i = 0\nwhile True: open(str(i), 'wb').write(bytes(1 << 20)); i += 1", "No space left"),
        ("import os, signal; os.kill(1, signal.SIGKILL)", "PermissionError"),
        ("import numpy", "ModuleNotFoundError"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "PermissionError"),
        ("import os, signal; os.kill(0, signal.SIGKILL)", "exited early"),
        # A mount, for which it has no right.
        (
            "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/', None, 32 | 4096, None):"
            "\n  raise OSError('no rights')",
            "no rights",
        ),
    ],
)
def test_what_goes_wrong_is_a_failure(source, reason):
    outcome = QUICK.run(source)
    assert not outcome.passed and reason in outcome.reason


WRITE = "for i in range(3, 4096):\n  try: os.write(i, {text!r})\n  except OSError: pass\n"
# What a program says of itself, and what is told of it.
CLAIMS = {
    "class setup(Exception): pass\nraise setup('hello')": "setup: hello",
    "class started(Exception): pass\nraise started('hello')": "started: hello",
    "import os\n" + WRITE.format(text=b"setup: x") + "os._exit(0)": "setup: x",
    "import os\n" + WRITE.format(text=b"started\n") + "os._exit(0)": "started\n",
    "import os\n"
    + WRITE.format(text=b"timed out after 9 s")
    + "os._exit(0)": "timed out after 9 s",
    "import os\n" + WRITE.format(text=b"setup: y") + "1 / 0": "setup: yZeroDivisionError: divi",
    "class E(Exception):\n  def __str__(self): 1 / 0\nraise E": "E",
    "class E(Exception):\n  def __str__(self): raise SystemExit\nraise E": "E",
    "class E(Exception):\n  def __str__(self): import os; os._exit(1)\nraise E": "exited early",
}


@needs_bwrap
@pytest.mark.parametrize("source", CLAIMS)
@pytest.mark.parametrize("contained", [True, False])
def test_a_programs_words_are_not_the_sandboxs(source, contained, monkeypatch):
    if not contained:
        monkeypatch.setattr(sandbox_lib, "missing", lambda: "no bwrap")
    sandbox = Sandbox(seconds=20.0, uncontained=not contained)
    outcome = sandbox.run(source)
    assert not outcome.passed and outcome.reason.startswith(CLAIMS[source])


@needs_bwrap
@pytest.mark.parametrize("number", [64, 1024])  # above the limit of a program, and of select
def test_a_process_may_have_many_open_files(number, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this machine allows a process {hard} open files")
    pipe = os.pipe

    def high_pipe():
        ends = pipe()
        moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, number) for end in ends)
        for end in ends:
            os.close(end)
        return moved

    monkeypatch.setattr(sandbox_lib.os, "pipe", high_pipe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        assert QUICK.run("pass") == (True, "")
        assert QUICK.run("1 / 0").reason == "ZeroDivisionError: division by zero"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_bwrap
def test_what_keeps_a_program_from_its_start_is_an_error(monkeypatch, tmp_path):
    runner = tmp_path / "runner.py"
    runner.write_text("raise KeyError('a defect')")
    monkeypatch.setattr(sandbox_lib, "_RUNNER", runner)
    with pytest.raises(OSError, match="a program could not be contained .*a defect"):
        QUICK.run("pass")
    assert "a defect" in sandbox_lib.missing.__wrapped__()


@needs_bwrap
@pytest.mark.parametrize("busy", ["while True: pass", "import time; time.sleep(1000)"])
def test_an_endless_program_ends(busy):
    outcome = Sandbox(seconds=0.5).run(f"import os\nif os.fork() == 0: os.setsid()\n{busy}")
    assert outcome == (False, "timed out after 0.5 seconds")


@needs_bwrap
@pytest.mark.parametrize(
    ("busy", "reason"),
    [
        ("while True: os.write(1, bytes(1 << 20))", "timed out after 0.5 seconds"),
        # Into the pipe that tells how it ended: nobody waits for that.
        ("for i in range(3, 4096):\n  try:\n    while True: os.write(i, b'x')\n  except OSError: 0",
         "x" * 200),
    ],
)  # fmt: skip
def test_a_program_that_writes_without_end_ends(busy, reason):
    assert Sandbox(seconds=0.5).run(f"import os\n{busy}") == (False, reason)


@needs_bwrap
def test_the_environment_is_not_seen(monkeypatch):
    monkeypatch.setenv("SPECJAX_SECRET", "mark-of-a-secret")
    look = (
        "import os\n"
        "assert 'SPECJAX_SECRET' not in os.environ\n"
        "for p in filter(str.isdigit, os.listdir('/proc') if os.path.exists('/proc') else ()):\n"
        "  try: found = open(f'/proc/{p}/environ', 'rb').read()\n"
        "  except OSError: continue\n"
        "  assert b'mark-of-a-secret' not in found\n"
    )
    other = subprocess.Popen(["sleep", "100"])  # has it from its start
    try:
        assert QUICK.run(look) == (True, "")
        # The control: without a sandbox it is there to be read.
        assert Sandbox()._run(look, contained=False).reason.startswith("AssertionError")
    finally:
        other.kill()
        other.wait()


@needs_bwrap
def test_nothing_outside_is_written_or_seen(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    home = os.path.expanduser("~")
    for path in (mine, tmp_path / "new", "/tmp/specjax-evil", f"{home}/specjax-evil", "/dev/null"):
        outcome = QUICK.run(f"open({str(path)!r}, 'w').write('evil')")
        assert not outcome.passed and "Error" in outcome.reason
    assert mine.read_text() == "mine" and os.listdir(tmp_path) == ["mine"]
    assert not os.path.exists("/tmp/specjax-evil") and not os.path.exists(f"{home}/specjax-evil")
    assert QUICK.run("import os\nassert not {'proc', 'dev', 'tmp'} & {*os.listdir('/')}").passed


@needs_bwrap
def test_a_server_of_this_machine_is_out_of_reach(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        assert not QUICK.run(connect).passed
        # The control: without a sandbox the same program connects.
        assert Sandbox()._run(connect, contained=False).passed


# What each tries must fail in the sandbox, though it works outside, or needs only rights.
ESCAPES = {
    "a socket of a path": "import socket; socket.socket(1).connect({server!r})",
    "a pipe": "import os; os.open({pipe!r}, os.O_WRONLY | os.O_NONBLOCK)",
    "a file": "open({file!r}).read()",
    "a home directory": "import os; os.listdir(os.path.expanduser('~root'))",
    "/etc": "open('/etc/passwd').read()",
    "/opt": "import os; os.listdir('/opt')",
    "/mnt": "import os; os.listdir('/mnt')",
    "/var": "import os; os.listdir('/var')",
    "a device": "open('/dev/zero').read(1)",
    "its own device": "import os; os.mknod('x', 0o20600, os.makedev(1, 5)); open('x').read(1)",
    "the root of process 1": "import os; os.listdir('/proc/1/root')",
    "the work of process 1": "open('/proc/1/mem', 'rb').read(1)",
    "the mounts": "{call}given(l.umount2(b'/tmp', 2))",
    "the library": "import os; open(os.__file__, 'a')",
    "the root": "open('/evil', 'w')",
    "a handle": "{call}given(l.open_by_handle_at(-1, ctypes.create_string_buffer(64), 0))",
    "a process outside": "import os; os.kill({pid}, 0)",
}


@pytest.fixture
def outside(tmp_path):
    """A server, a pipe with a reader and a file outside, and the number of this process."""
    names = {name: str(tmp_path / name) for name in ("server", "pipe", "file")}
    (tmp_path / "file").write_text("secret")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(names["server"])
        server.listen()
        yield names | {"pid": os.getpid(), "call": CALL}
    os.close(reader)


@needs_bwrap
@pytest.mark.parametrize("name", ["a socket of a path", "a pipe", "a file", "a process outside"])
def test_the_outside_can_be_reached_without_the_sandbox(outside, name):
    """The control of the test above."""
    assert Sandbox()._run(ESCAPES[name].format(**outside), contained=False).passed


NOBODY = {"user": 65534, "group": 65534, "extra_groups": []}


@pytest.fixture(params=["user of the tests", "ordinary user"])
def user(request, monkeypatch):
    """Who starts the programs: also an ordinary user, with a Python that this user may read."""
    if os.getuid() or request.param == "user of the tests":
        yield
        return
    python = os.path.realpath(shutil.which("python3", path=os.defpath) or "")
    try:
        show = [python, "-c", "import sys; print(sys.base_prefix)"]
        prefix = subprocess.run(show, check=True, capture_output=True, text=True, **NOBODY).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("every Python here is readable for root alone")
    monkeypatch.setattr(sandbox_lib.sys, "executable", python)
    monkeypatch.setattr(sandbox_lib.sys, "base_prefix", prefix.strip())
    monkeypatch.setattr(sandbox_lib.os, "getuid", lambda: 65534)
    start = functools.partial(subprocess.Popen, **NOBODY)
    monkeypatch.setattr(sandbox_lib.subprocess, "Popen", start)
    if (why := sandbox_lib.missing.__wrapped__()) is not None:
        pytest.skip(f"no sandbox for an ordinary user: {why}")
    yield


# All of them in one program: which of them got out.
ESCAPED = """
out = []
for name, source in {sources!r}.items():
    try:
        exec(source, {{}})
        out.append(name)
    except BaseException as error:
        if "told" in str(error) and "told -1" not in str(error):
            out.append(name)
assert not out, out
"""


@needs_bwrap
@pytest.mark.usefixtures("user")
def test_nothing_gets_out(outside):
    assert QUICK.run("open('mine', 'w').write('x')") == (True, "")
    sources = {name: source.format(**outside) for name, source in ESCAPES.items()}
    assert QUICK.run(ESCAPED.format(sources=sources)) == (True, "")
    # The control: what gets out is named.
    sources = {"a": "1 / 0", "b": "raise OSError('told 0')", "c": "pass"}
    assert "['b', 'c']" in QUICK.run(ESCAPED.format(sources=sources)).reason


@needs_bwrap
def test_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mark = f"mark-{os.getpid()}"
    name_itself = (
        "import ctypes, os, time\nl = ctypes.CDLL(None)\n"
        f"l.prctl(15, {mark.encode()!r})\nname = ctypes.create_string_buffer(16)\n"
        f"l.prctl(16, name)\nassert name.value == {mark[:15].encode()!r}\n"
        "if os.fork() == 0: time.sleep(1000)"
    )
    assert QUICK.run(name_itself) == (True, "")

    def names():
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
                yield file.read().strip()

    end = time.monotonic() + 10  # the system takes a while to end what it has killed
    while mark[:15] in names() and time.monotonic() < end:
        time.sleep(0.05)
    found = list(names())
    assert mark[:15] not in found and found
    assert not list(tmp_path.iterdir())


def test_without_bwrap_it_refuses_unless_asked(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = sandbox_lib.missing.__wrapped__
    monkeypatch.setattr(sandbox_lib, "missing", missing)
    assert missing() == "bwrap is not installed"
    for refused in (
        Sandbox().check,
        lambda: Sandbox().run("pass"),
        lambda: PassAt1(Sandbox()).values(["def double(x): return 2"], [MBPP]),
    ):
        with pytest.raises(ValueError, match="cannot be contained here .* install bubblewrap"):
            refused()
    asked = Sandbox(seconds=5.0, uncontained=True)
    assert asked.run("import os\nassert not os.listdir()").passed
    asked.check()
    assert asked.run("assert True") == (True, "")
    assert not asked.run("x = bytearray(10 << 30)").passed


@pytest.mark.parametrize(
    ("output", "right"),
    [
        ("    return x / 2\n", True),
        ("    return x\n", False),
        ("Sure:\n```python\ndef half(x):\n    return x / 2\n```\nas you see", True),
        ("def half(x):\n    return x / 2", True),
        ("", False),
    ],
)
@needs_bwrap
def test_an_output_goes_on_with_the_prompt_or_defines_the_function(output, right):
    assert QUICK.run(program(HUMAN_EVAL, output)).passed == right


@needs_bwrap
def test_pass_at_1_is_the_share_that_passes():
    outputs = ["def double(x): return 2 * x", "def double(x): return 4", "double ="]
    made = figure(PassAt1(QUICK, workers=2), outputs, [MBPP] * 3)
    assert made.value == pytest.approx(100 / 3)
    assert made.statistics[:, 0].tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="pass@1 needs prompt, entry_point, tests, got 1 texts"):
        PassAt1(QUICK)(["x"], ["assert True"])
    assert "pass_at_1" not in METRICS


def test_problems_are_those_of_humaneval_and_mbpp(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [
        {"prompt": "def f():\n", "entry_point": "f", "test": "def check(g): g()"},
        {"test_list": ["assert a", "assert b"], "test_setup_code": "a = 1", "code": ""},
        {"test_list": ["assert a"], "test_imports": ["import math"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third = read_problems(path)
    assert first == ("def f():\n", "f", "def check(g): g()\ncheck(f)\n")
    assert second == ("", "", "a = 1\nassert a\nassert b\n")
    assert third.tests.split() == ["import", "math", "assert", "a"]
    path.write_text('{"test_list": "no list"}\n')
    with pytest.raises(ValueError, match=r"problems.jsonl:1: the line must have the keys of"):
        read_problems(path)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"seconds": 0}, ValueError, "Sandbox: seconds must"),
        ({"memory": 1}, ValueError, "Sandbox: memory must be .* at least 64"),
        ({"processes": 0}, ValueError, "Sandbox: processes must"),
        ({"uncontained": 1}, ValueError, "Sandbox: uncontained must be True or False, got 1"),
    ],
)
def test_bad_limits_are_refused(settings, kind, message):
    with pytest.raises(kind, match=message):
        Sandbox(**settings)


@needs_bwrap
def test_a_program_is_run_once(monkeypatch):
    ran, unchanged = [], Sandbox.run

    def run(self, source):
        ran.append(source)
        return unchanged(self, source)

    monkeypatch.setattr(Sandbox, "run", run)
    outputs = ["def own(x):\n    return x  # once", "def own(x):\n    return 3  # once"]
    problem = Problem("", "", "assert own(4) == 4\n")
    for _ in range(2):
        assert PassAt1(QUICK, workers=1).values(outputs, [problem] * 2) == [1.0, 0.0]
    assert len(ran) == 2
