"""A failed command ends with one line, and a status that says what kind of failure it was."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from specjax import checks
from specjax.cli import BROKEN_PIPE
from specjax.cli.main import main, tell
from specjax.errors import REFUSALS
from specjax.runs import inference
from tests import tiny_pair
from tests.variants import variants
from tests.xla_flags import quick_flags

COMMAND = [sys.executable, "-m", "specjax"]


def error_of(function, *args):
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


def test_a_refusal_is_one_line_and_status_2(capsys):
    error = error_of(checks.check_count, "a", 0, "do\n b")
    assert tell("infer", error) == 2
    line = "specjax infer: a must be a whole number of at least 1, got 0: do b\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    "function",
    [
        lambda: int("x"),
        lambda: {}["x"],
        lambda: checks.check_part("a", object(), 5, "b"),  # in specjax, but no `raise` of it
        lambda: np.zeros(2) @ np.zeros(3),
    ],
)
def test_what_specjax_does_not_raise_is_an_accident(function):
    assert not isinstance(error_of(function), REFUSALS)


def oops():
    raise ValueError("oops\n!")


def test_anything_else_is_one_line_with_a_log_and_status_1(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert tell("infer", error_of(oops)) == 1
    (log,) = tmp_path.iterdir()
    line = f"specjax infer: unexpected ValueError: oops !; the traceback is in {log}\n"
    assert capsys.readouterr().err == line
    assert "Traceback" in log.read_text() and "raise ValueError" in log.read_text()
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    assert tell("infer", error_of(lambda: {}["x"])) == 1
    assert (
        "could not be saved (Not a directory): set SPECJAX_TRACEBACK=1" in capsys.readouterr().err
    )


def test_a_command_that_breaks_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(inference, "read_inputs", lambda *_, **__: 1 / 0)
    assert main(["infer", "--gin.INPUT=x", f"--gin.OUTPUT_DIR={tmp_path / 'out'}"]) == 1
    error = capsys.readouterr().err
    assert "unexpected ZeroDivisionError" in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_PLATFORMS": "cuda"}, "JAX_PLATFORMS=cuda: JAX cannot start this platform"),
        (
            {"JAX_ENABLE_X64": "maybe"},
            "'JAX_ENABLE_X64': correct or unset this environment variable",
        ),
    ],
)
def test_settings_of_jax_that_cannot_work_are_told(variables, message, tmp_path):
    ended = subprocess.run(
        [*COMMAND, "infer", "--gin.INPUT=x", f"--gin.OUTPUT_DIR={tmp_path / 'out'}"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("specjax") and message in last
    assert "Traceback" not in ended.stderr


def test_a_reader_that_goes_is_no_error():
    shell = f"{sys.executable} -m specjax infer --help | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, check=False, env=os.environ
    )
    assert ended.returncode in (0, BROKEN_PIPE)
    assert ended.stderr == ""


@pytest.fixture(autouse=True, scope="module")
def heard():
    """Processes hear SIGINT, also if the tests are a shell's background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    directory = tmp_path_factory.mktemp("interrupted")
    paths = tiny_pair.write_pair(directory / "models")
    source = directory / "input.txt"
    source.write_text("".join(f"{text}\n" for text in tiny_pair.sentences(40, seed=5)))
    names = {"INPUT": source, **{k.upper(): v for k, v in paths.items()}}
    return [*COMMAND, "infer", *(f"--gin.{name}={value}" for name, value in names.items())]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has /dev/full")
def test_an_output_that_cannot_be_written_is_named(work, tmp_path):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [*work, f"--gin.OUTPUT_DIR={tmp_path / 'out'}"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "XLA_FLAGS": quick_flags(1)},
        )
    assert process.returncode == 2
    told = "specjax infer: standard output cannot be written (No space left on device): redirect"
    assert process.stderr.splitlines()[-1].startswith(told)


SLEEPER = "from specjax.cli import entry; entry._end_on_interrupt(); import time; time.sleep({})"


def interrupted(*before, stderr, threads=2, seconds=60):
    code = SLEEPER.format(seconds)
    process = subprocess.Popen([*before, sys.executable, "-c", code], stderr=stderr)
    if process.stderr is not None:
        process.stderr.close()
    _await_threads(process, threads)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    return process.wait(timeout=60)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ctrl_c_is_heard_though_nobody_reads_and_not_where_it_is_ignored():
    assert interrupted(stderr=subprocess.DEVNULL) == 130
    assert interrupted(stderr=subprocess.PIPE) == 130
    ignoring = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    assert interrupted(*ignoring, stderr=subprocess.DEVNULL, threads=1, seconds=3) == 0


def _await_threads(process, count):
    """Waits until the process has so many threads, or has ended."""
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if int(status.split("Threads:")[1].split()[0]) >= count:
            return
        time.sleep(0.01)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "count", [2, pytest.param(40, marks=pytest.mark.exhaustive)], ids=["few", "many"]
)
def test_ctrl_c_at_any_moment_ends_with_130_and_one_line(work, tmp_path, count):
    rng = random.Random(count)
    for i in range(count):
        process = subprocess.Popen(
            [*work, f"--gin.OUTPUT_DIR={tmp_path / str(i)}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": quick_flags(1)},
        )
        _await_threads(process, 2)  # before, Python has not come to the first line of specjax
        time.sleep(7.0 * rng.random())
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode in (0, 130), error
        if process.returncode:
            assert error.splitlines()[-1] == "specjax: interrupted"
        assert "Traceback" not in error


def test_the_handler_of_ctrl_c_is_set_before_any_slow_import():
    code = """
import sys
sys.path.insert(0, sys.argv[1])
begun = set(sys.modules)
import specjax.cli.entry
print(*(set(sys.modules) - begun))
"""
    command = [sys.executable, "-I", "-S", "-c", code, str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    slow = {"typing", "re", "socket", "threading", "warnings", "argparse", "numpy", "jax", "gin"}
    assert not slow & set(done.stdout.split())


@pytest.mark.parametrize(
    ("set_by_user", "level"), [({}, "3"), ({"TF_CPP_MIN_LOG_LEVEL": "1"}, "1")]
)
def test_xla_logs_nothing_unless_the_user_asks(set_by_user, level):
    """Its alarms about slow compilations are errors in its log, whose level is read once."""
    code = """
import os, sys, types
def main():
    print(os.environ["TF_CPP_MIN_LOG_LEVEL"], "jax" in sys.modules)
    return 0
sys.modules["specjax.cli.main"] = types.SimpleNamespace(main=main)
import specjax.cli.entry
specjax.cli.entry.run()
"""
    names = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    command, environment = [sys.executable, "-c", code], names | set_by_user
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{level} False\n"


@pytest.mark.parametrize("seconds", variants([0.05, 0.1, 0.2, 0.4, 0.6, 0.8], 0.2, 0.6))
def test_ctrl_c_while_python_starts_is_no_traceback_of_imports(seconds):
    """Only Python's own start, before it runs a line of specjax, prints a traceback."""
    process = subprocess.Popen(
        [*COMMAND, "--help"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    if process.returncode in (0, 130):
        assert error.split("\n") in (["", "specjax: interrupted", ""], [""])
    else:
        assert not any(package in error for package in ("/jax/", "numpy", "/gin/", "argparse")), (
            error
        )
