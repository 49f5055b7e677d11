import re
import sys

import pytest

from specjax.training import Cosine, InverseSqrt
from specjax.training.progress import Progress, warn_of_warmup
from tests.training.toy import train_copies


def test_a_run_tells_its_size_and_its_loss(tmp_path, capsys):
    train_copies(tmp_path, progress=True, num_steps=10)
    told = capsys.readouterr().err
    assert "training 19,552 parameters for 10 steps, 10 batches per epoch" in told
    assert re.search(r"step 1 of 10: loss \d\.\d{3}\n", told)
    assert re.search(r"step 10: validation accuracy 0\.\d+, validation loss \d\.\d+", told)
    # The copy task's schedule warms up for 30 steps.
    assert "warning: the warm-up takes 30 steps, but the run ends after 10" in told


def test_a_quiet_run_tells_nothing(tmp_path, capsys):
    train_copies(tmp_path, num_steps=2)
    assert capsys.readouterr() == ("", "")


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_without_a_terminal_a_line_tells_loss_rate_and_time_left(capsys):
    progress = Progress(100, 10, items="target tokens", enabled=True, every=0.0)
    assert progress.update()
    progress.tell(3.25, None)
    assert progress.update()
    progress.tell(3.0, 12_345.6)
    progress.close()
    first, second = lines(capsys)
    assert first == "specjax: step 11 of 100: loss 3.250"
    expected = "specjax: step 12 of 100: loss 3.000, 12,346 target tokens/s, 0:0"
    assert second.startswith(expected)
    assert second.endswith(" left")


def test_figures_are_asked_for_now_and_then_only():
    progress = Progress(100, 0, items="tokens", enabled=True, every=3600.0)
    asked = []
    for _ in range(5):
        asked.append(progress.update())
        if asked[-1]:
            progress.tell(1.0, None)
    assert asked == [True, False, False, False, False]
    disabled = Progress(100, 0, items="tokens", enabled=False, every=0.0)
    assert not disabled.update()


def test_on_a_terminal_a_bar_shows_them(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress(100, 10, items="tokens", enabled=True, every=0.0)
    progress.update()
    progress.tell(3.25, 99.0)
    progress.close()
    told = capsys.readouterr().err
    assert "11/100" in told
    assert "loss 3.250, 99 tokens/s" in told


@pytest.mark.parametrize(
    ("schedule", "num_steps", "warned"),
    [
        (InverseSqrt(peak=1.0, warmup_steps=1000), 999, True),
        (InverseSqrt(peak=1.0, warmup_steps=1000), 1000, False),
        (Cosine(peak=1.0, warmup_steps=10, total_steps=20), 5, True),
        (lambda step: 1.0, 1, False),
    ],
)
def test_a_warmup_longer_than_the_run_is_told(capsys, schedule, num_steps, warned):
    warn_of_warmup(schedule, num_steps)
    told = capsys.readouterr().err
    assert ("lower warmup_steps, or raise num_steps" in told) == warned
