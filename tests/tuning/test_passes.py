"""The times of passes, from rounds of the loop."""

import itertools
from types import SimpleNamespace

import pytest

from specjax.tuning import passes
from tests import tiny_pair

SIZES = {"prompt_length": 4, "seconds": 0.0}


@pytest.fixture(scope="module")
def models():
    return [tiny_pair.tabular(1), tiny_pair.tabular(2)]


def test_a_pass_is_the_difference_of_a_long_and_a_short_run(models, monkeypatch):
    # Every look at the clock is a second later: runs of 2 and of 10 rounds take as long.
    clock = itertools.count()
    slow = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    monkeypatch.setattr(passes, "time", slow)
    with pytest.raises(ValueError, match="a pass of the model over 1 tokens seems to take no time"):
        passes.seconds_of_passes(models[:1], 2, (2,), **SIZES)


def test_each_model_has_each_width(models, monkeypatch):
    rounds = []
    clock = SimpleNamespace(perf_counter=lambda: float(sum(rounds)))
    monkeypatch.setattr(passes, "time", clock)
    for kind in (passes.Autoregressive, passes.Speculative):
        run = kind.run

        def counted(self, params, state, count, run=run):
            state = run(self, params, state, count)
            assert (state.info.calls["verifier"] == count).all()  # no row ends before
            # A pass of w tokens takes w seconds, and every call 5.
            width = getattr(getattr(self, "round", None), "verifier_widths", (1,))[-1]
            rounds.append(5 + width * count)
            return state

        monkeypatch.setattr(kind, "run", counted)
    found = passes.seconds_of_passes(models, 2, (2, 4), **SIZES)
    assert found.alone == (1.0, 1.0) and found.wide == ({2: 2.0, 4: 4.0},) * 2
    assert found.prompts == (0.0, 0.0)


def test_what_was_disturbed_is_measured_again_alone(models, monkeypatch):
    clock, runs = [0.0], {passes.Autoregressive: 0, passes.Speculative: 0}
    monkeypatch.setattr(passes, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for kind in runs:
        run = kind.run

        def counted(self, params, state, count, kind=kind, run=run):
            runs[kind] += 1
            # Other work hides the first short runs of the model alone: twelve runs are six turns.
            hidden = kind is passes.Autoregressive and count == 2 and runs[kind] <= 12
            clock[0] += count + 100 * hidden
            return run(self, params, state, count)

        monkeypatch.setattr(kind, "run", counted)
    found = passes.seconds_of_passes(models[:1], 2, (2,), **SIZES)
    assert found.alone == (1.0,) and found.wide == ({2: 1.0},)
    assert runs == {passes.Autoregressive: 24, passes.Speculative: 12}
