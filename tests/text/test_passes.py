"""Regression recovers the costs of passes: from counts, and from a loop whose clock is known."""

import itertools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from specjax import Pair, TextModel, decoding
from specjax.drafting import read_costs
from specjax.text import passes
from specjax.text.passes import Run
from specjax.tokenizers import ByteTokenizer
from tests import tiny_pair
from tests.heads.tiny_heads import encoded_head, tiny_head
from tests.variants import variants

DRAFT, VERIFIER, CALL = 0.25, {1: 2.0, 2: 3.0, 4: 3.5}, 0.125
# A step of the verifier alone, without the work of a round.
ALONE = 1.5


@pytest.fixture(scope="module")
def pair():
    return Pair(tiny_pair.tabular(1), tiny_pair.tabular(2))


def pair_of(kind):
    """Two tables; or a verifier and its head, of an encoder-decoder if the kind says so."""
    if kind == "tables":
        return Pair(tiny_pair.tabular(1), tiny_pair.tabular(2))
    make, words = encoded_head if "encoded" in kind else tiny_head, ByteTokenizer()
    tiny = make(kind.split()[-1], vocab=words.vocab_size)
    verifier = TextModel(tiny.verifier, tiny.verifier_params, words)
    return Pair(TextModel(tiny.head, tiny.params, words), verifier)


KINDS = variants(
    ["tables", "eagle3", "dflash", "encoded eagle3", "encoded dflash"], "tables", "eagle3", "dflash"
)


def _runs(noise=0.0):
    rng = np.random.default_rng(0)
    for width, cost in VERIFIER.items():
        for drafted in range(width):
            for verifier in (3, 8):
                draft = verifier * drafted + int(rng.integers(3)) * (drafted > 0)
                seconds = CALL + DRAFT * draft + cost * verifier
                yield Run(draft, verifier, width, seconds + noise * rng.normal())


def test_known_costs_are_recovered_from_counts():
    runs = list(_runs())
    found = passes.fit(runs)
    assert found.draft == pytest.approx(DRAFT) and found.call == pytest.approx(CALL)
    assert found.verifier == pytest.approx(VERIFIER)
    assert found.r_squared == pytest.approx(1.0)
    assert [found.seconds(run) for run in runs] == pytest.approx([run.seconds for run in runs])
    runs = list(_runs(noise=3.0))
    found, seconds = passes.fit(runs), np.array([run.seconds for run in runs])
    left = seconds - [found.seconds(run) for run in runs]
    assert found.r_squared == pytest.approx(1 - left @ left / (len(runs) * seconds.var()))
    assert 0 < found.r_squared < 0.99
    # No cost is negative: the best line would have a drafter that gives time back.
    found = passes.fit([Run(0, 1, 1, 5.0), Run(4, 1, 1, 4.0), Run(0, 2, 1, 8.0), Run(8, 2, 1, 6.0)])
    assert found.draft == 0.0 and found.call >= 0 and found.verifier[1] > 0


def test_each_width_has_its_shortest_and_its_longest_draft():
    assert passes.draft_lengths((1, 2, 4, 6)) == [0, 1, 2, 3, 4, 5]
    assert passes.draft_lengths((1, 2, 4, 8, 16)) == [0, 1, 2, 3, 4, 7, 8, 15]
    assert passes.draft_lengths((8,)) == [0, 7]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the passes of the loop move: two rows cost three times one."""
    now = [0.0]
    run = decoding.Speculative.run

    def timed(self, params, state, stop_after):
        scale = {1: 1.0, 2: 3.0}[state.ended_by.shape[0]]
        limit = int(np.max(state.draft_limits))
        now[0] += scale * CALL
        for _ in range(stop_after):
            before = jax.device_get(state.info.calls)
            state = run(self, params, state, 1)
            after = jax.device_get(state.info.calls)
            drafted, verified = (
                np.max(after[name] - before[name]) for name in ("drafter", "verifier")
            )
            # Another program, whose rounds cost something else.
            wide = len(self.verifier_widths) == 1
            pass_of = 9.0 if wide else VERIFIER[next(n for n in VERIFIER if n > limit)]
            now[0] += scale * (DRAFT * drafted + pass_of * verified)
        return state

    run_alone = decoding.Autoregressive.run

    def timed_alone(self, params, state, stop_after):
        now[0] += {1: 1.0, 2: 3.0}[state.ended_by.shape[0]] * (2 * CALL + ALONE * stop_after)
        return run_alone(self, params, state, stop_after)

    monkeypatch.setattr(decoding.Speculative, "run", timed)
    monkeypatch.setattr(decoding.Autoregressive, "run", timed_alone)
    monkeypatch.setattr(passes.time, "perf_counter", lambda: now[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_loops_own_passes_are_measured(kind, clock, monkeypatch):
    pair, at_once = pair_of(kind), "dflash" in kind
    monkeypatch.setattr(passes, "machine", lambda: "here")
    # A block of four tokens drafts three, of three two.
    widths = (1, 2, 3) if kind == "encoded dflash" else (1, 2, 4)
    options = {"prompt_length": 4, "seconds": 0.0, "with_alone": True}
    found = passes.measure_costs(pair, (1, 2), widths, **options)
    assert found.rows == (1, 2) and found.widths == widths
    drafts = DRAFT * np.array([1, 3]) * (not at_once)
    np.testing.assert_allclose(found.draft, drafts, rtol=1e-6, atol=1e-12)
    # The one pass of a block is a part of rounds with drafts.
    round_of = [*VERIFIER.values()] + DRAFT * at_once * np.array([0, 1, 1])
    np.testing.assert_allclose(found.verifier, [round_of, 3 * round_of], rtol=1e-6)
    np.testing.assert_allclose(found.alone, [ALONE, 3 * ALONE], rtol=1e-6)
    assert found.machine == "here"
    assert found.pair == f"{pair.drafter.fingerprint}+{pair.verifier.fingerprint}"
    apart = passes.measure_costs(pair, (1,), widths, block_apart=True, **options)
    np.testing.assert_allclose(apart.draft, [DRAFT], rtol=1e-6)
    np.testing.assert_allclose(apart.verifier, [[*VERIFIER.values()]], rtol=1e-6)


def test_a_disturbed_measurement_is_made_again(pair, monkeypatch):
    tried = []

    def runs(cases, rows, prompt_length, seconds, bar):
        tried.append(seconds)
        if cases[0].limit is None:
            return [Run(0, 2, 1, 3.0), Run(0, 10, 1, 15.0)]
        broken = [Run(0, 1, 1, 0.0), Run(2, 1, 1, 1.0)]
        return list(_runs()) if len(tried) == 2 else broken

    monkeypatch.setattr(passes, "_runs", runs)
    found = passes.measure_costs(pair, (1,), tuple(VERIFIER), seconds=0.5, with_alone=True)
    assert tried == [0.5, 1.5, 0.5] and min(found.verifier[0]) > 0
    assert found.alone == pytest.approx((1.5,))


def test_a_file_of_costs_is_read_back(pair, tmp_path):
    fits = [passes.Fit(1.0, {1: 2.0, 2: 9.0, 4: 3.0, 0: 9.0}, 0.5, 1.0)]
    ours = passes.as_costs(fits, (4,), (1, 2, 4), pair.fingerprint)
    assert ours.verifier == ((2.0, 3.0, 3.0),)  # a wider pass takes no less
    path = tmp_path / "costs.json"
    # What else the file tells takes the place of no cost.
    path.write_bytes(passes.costs_file(ours, rows="no", fit={"call": [0.5]}))
    assert read_costs(path) == ours
    told = json.loads(path.read_text())
    assert told["fit"] == {"call": [0.5]} and told["environment"]["versions"]["jax"]


def test_what_measures_nothing_is_refused(pair, monkeypatch):
    """Every look at the clock is a second later: runs of 2 and of 10 rounds take as long."""
    clock = itertools.count()
    monkeypatch.setattr(passes, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    with pytest.raises(ValueError, match="a step of .* is 0"):
        passes.measure_costs(pair, (2,), (1, 2), prompt_length=4, seconds=0.0, with_alone=True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="several processes must share the same costs"):
        passes.measure_costs(pair, (1,), (1, 2))
