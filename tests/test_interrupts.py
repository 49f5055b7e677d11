"""An interrupt, as Ctrl-C in a notebook, leaves nothing for the next call of a helper process."""

import argparse
import contextlib
import gc
import os
import signal
import subprocess
import time

import pytest

from specjax.cli import audit
from specjax.evaluation import sandbox
from specjax.testing import auditing  # noqa: F401  so that no import is interrupted
from specjax.tokenizers import chat_template
from specjax.tokenizers.chat_template import render_chat

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")


class Interrupted(BaseException):
    """Like KeyboardInterrupt, which pytest takes for its own end."""


@contextlib.contextmanager
def interrupt_after(seconds):
    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # an exception in XLA's callback of the collector is lost
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupts(delays, call):
    count = 0
    for delay in delays:
        try:
            with interrupt_after(delay):
                call()
        except Interrupted:
            count += 1
    return count


def running():
    """The children of this process that have not ended."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(name)
    return found


def open_pipes():
    """The number of this process's pipes, to helpers; libraries open other files at any time."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("pipe:")
    return count


@pytest.fixture
def nothing_left():
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc")
    before, pipes = running(), open_pipes()
    yield
    end = time.monotonic() + 30
    while running() - before and time.monotonic() < end:
        time.sleep(0.05)
    subprocess.run("true", check=True)  # a start takes leave of the lost ones that have ended
    gc.collect()
    # An interrupt between the making of a pipe and its keeping may lose its two ends.
    assert running() <= before and open_pipes() <= pipes + 2


def test_a_conversation_gets_its_own_prompt_after_an_interrupt():
    inner = "{% for i in range(99999) %}{% endfor %}"
    slow = "{% for j in range(60) %}" + inner + "{% endfor %}{{ messages[0].content }}"
    count = 0
    for i in range(8):
        assert render_chat("ready", []) == "ready"
        earlier = [{"role": "user", "content": f"an earlier conversation {i}"}]
        count += interrupts([0.001 * (i + 1)], lambda earlier=earlier: render_chat(slow, earlier))
        for text in ("first", "second"):
            assert render_chat("{{ messages[0].content }}", [{"content": text}]) == text
    assert count > 4


# An interrupt inside Popen's constructor leaves an object that warns; the child ends by itself.
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_program_gets_its_own_outcome_after_an_interrupt(nothing_left):
    contained = sandbox.Sandbox(uncontained=True, seconds=100.0)
    delays = [0.002, 0.01, 0.03, 0.1, 0.3]
    assert interrupts(delays, lambda: contained.run("import time; time.sleep(60)")) == len(delays)
    assert contained.run("raise ValueError('own')").reason == "ValueError: own"
    assert contained.run("pass").passed


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("call", ["a program", "a template"])
def test_a_child_ends_whose_start_was_interrupted_at_its_last_step(nothing_left, call):
    contained = sandbox.Sandbox(uncontained=True)
    tried = []

    class Started(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            tried.append(call)
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(subprocess, "Popen", Started)
        contained.run("pass") if call == "a program" else chat_template._Renderer()
    assert tried == [call]


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_an_interrupted_audit_ends_its_process(nothing_left, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\ndef verify(): pass\n")
    parser = argparse.ArgumentParser()
    audit.add_arguments(parser)
    args = parser.parse_args([f"{tmp_path}/slow.py:verify"])
    start = time.monotonic()
    assert interrupts([0.2], lambda: audit.run(args)) == 1
    assert time.monotonic() - start < 30
