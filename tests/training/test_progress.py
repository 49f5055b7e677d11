import re
import sys

import numpy as np
import pytest

from specjax.training import progress as module
from specjax.training.progress import Progress
from specjax.training.step import StepMetrics
from tests.training.toy import train_copies


def test_a_run_tells_its_size_and_its_loss(tmp_path, capsys):
    train_copies(tmp_path, num_steps=2)
    assert capsys.readouterr() == ("", "")
    train_copies(tmp_path, progress=True, num_steps=10)
    told = capsys.readouterr().err
    assert "training 19,552 parameters from step 2 of 10 steps, 10 batches per epoch" in told
    assert re.search(r"step 5 of 10: loss \d\.\d{3}, [\d,]+ target tokens/s\n", told)
    assert re.search(r"step 10: validation accuracy 0\.\d+, validation loss \d\.\d+", told)
    # The copy task's schedule warms up for 30 steps.
    assert "warning: the warm-up takes 30 steps, but the run ends after 10" in told
    assert "lower WARMUP_STEPS, or raise NUM_STEPS" in told


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


def test_an_evaluation_does_not_count_for_the_rate(clock, capsys):
    progress = Progress(100, 10, items="target tokens", enabled=True)
    for loss in (3.0, 2.0):
        progress.add(metrics(loss))
        clock.now += 2.0
    assert progress.means(12) == {"loss": 2.5, "grad_norm": 1.0, "items_per_second": 50.0}
    clock.now += 500.0  # a checkpoint
    progress.restart()
    progress.add(metrics(1.0))
    clock.now += 4.0
    assert progress.means(13)["items_per_second"] == 25.0
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "specjax: step 12 of 100: loss 2.500, 50 target tokens/s",
        "specjax: step 13 of 100: loss 1.000, 25 target tokens/s",
    ]


def test_on_a_terminal_a_bar_shows_them(monkeypatch, clock, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress(100, 10, items="tokens", enabled=True)
    progress.add(metrics(3.25))
    clock.now += 2.0
    progress.means(11)
    progress.close()
    shown = capsys.readouterr().err
    assert "11/100" in shown and "loss 3.250, 50 tokens/s" in shown
