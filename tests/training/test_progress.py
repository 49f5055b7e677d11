import re
import sys

import numpy as np
import pytest

from specjax.data.batching import Batching
from specjax.training import progress as module
from specjax.training.progress import Progress
from specjax.training.step import StepMetrics
from tests.training.toy import train_copies


def test_a_run_tells_its_size_and_its_loss(tmp_path, capsys):
    train_copies(tmp_path, progress=True, num_steps=10)
    told = capsys.readouterr().err
    assert "training 19,552 parameters for 10 steps, 10 batches per epoch" in told
    assert re.search(r"step 1 of 10: loss \d\.\d{3}\n", told)
    assert re.search(r"step 10: validation accuracy 0\.\d+, validation loss \d\.\d+", told)
    # The copy task's schedule warms up for 30 steps.
    assert "warning: the warm-up takes 30 steps, but the run ends after 10" in told
    assert "lower WARMUP_STEPS, or raise NUM_STEPS" in told


def test_a_quiet_run_tells_nothing(tmp_path, capsys):
    train_copies(tmp_path, num_steps=2)
    assert capsys.readouterr() == ("", "")


def metrics(loss, items=100):
    return StepMetrics(np.float32(loss), np.float32(1.0), np.int32(items))


class Clock:
    """Seconds that pass only where a test says so."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_compilation_and_evaluation_count_neither_for_the_rate_nor_for_the_time_left(clock, capsys):
    progress = Progress(100, 10, items="target tokens", enabled=True, every=0.0)
    with progress.apart():
        clock.now += 1000.0  # compiles
    progress.add(metrics(3.25), timed=False)
    clock.now += 2.0
    progress.add(metrics(3.0))
    with progress.apart():
        clock.now += 500.0  # another shape
    progress.add(metrics(2.5), timed=False)
    clock.now += 4.0
    progress.add(metrics(2.0))
    means = progress.means()
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "specjax: step 11 of 100: loss 3.250",
        "specjax: step 12 of 100: loss 3.000, 50 target tokens/s, 2:56 left",
        "specjax: step 13 of 100: loss 2.500, 50 target tokens/s, 2:54 left",
        # Two steps in six seconds.
        "specjax: step 14 of 100: loss 2.000, 33 target tokens/s, 4:18 left",
    ]
    assert means == {"loss": 2.6875, "grad_norm": 1.0, "items_per_second": 33.3}
    assert progress.means() == {}


@pytest.mark.exhaustive
def test_a_run_leaves_the_compilation_of_each_shape_out(tmp_path, monkeypatch):
    """Two lengths of batches: two steps compile, and two are timed."""
    timed = []
    add = Progress.add

    def spy(self, metrics, *, timed_steps=timed, **options):
        timed_steps.append(options["timed"])
        add(self, metrics, **options)

    monkeypatch.setattr(Progress, "add", spy)
    batching = Batching(tokens_per_batch=64, bucket_lengths=(4, 8))
    train_copies(tmp_path, num_steps=6, batching=batching)
    assert timed.count(False) == 2


def test_figures_are_shown_now_and_then_only(clock, capsys):
    progress = Progress(100, 0, items="tokens", enabled=True, every=30.0)
    for _ in range(5):
        clock.now += 12.0
        progress.add(metrics(1.0))
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ["1", "4"]
    disabled = Progress(100, 0, items="tokens", enabled=False, every=0.0)
    disabled.add(metrics(1.0))
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_shows_them(monkeypatch, clock, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress(100, 10, items="tokens", enabled=True, every=0.0)
    clock.now += 2.0
    progress.add(metrics(3.25))
    progress.close()
    shown = capsys.readouterr().err
    assert "11/100" in shown
    assert "loss 3.250, 50 tokens/s, 2:58 left" in shown
