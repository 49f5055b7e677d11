"""Requests that arrive while others run, leave, and are dropped."""

import numpy as np
import pytest

import specjax
from specjax import partitioning, rules, verification
from tests import tiny_pair


@pytest.fixture(scope="module")
def decoder():
    return specjax.Decoder(
        _pair(), rule=rules.OPT(0.1), max_draft=3, max_new_tokens=12, batch_size=4, buckets=(16,)
    )


def _pair():
    return specjax.Pair(drafter=tiny_pair.tabular(2), verifier=tiny_pair.tabular(1))


def _request(decoder, text, stream, **options):
    return specjax.Request(decoder.encode(text), limit=12, seed=5, stream=stream, **options)


TEXTS = [f"prompt {i}" for i in range(11)]


@pytest.fixture(scope="module")
def expected(decoder):
    return decoder(TEXTS, seed=5)


def _check(finished, expected, texts=TEXTS):
    for row in finished:
        want = expected[row.id]
        tokens = row.tokens[:-1] if row.ended_by == "eos" else row.tokens
        np.testing.assert_array_equal(tokens, want.tokens)
        assert row.ended_by == want.ended_by and row.seconds > 0.0


def test_requests_may_arrive_while_others_run(decoder, expected):
    engine = decoder.engine(prompt_length=16, rows=4, refill=1)
    assert engine.step() == [] and engine.unfinished == 0
    waiting, finished = list(range(11)), []
    while waiting or engine.unfinished:
        # Two more between any two steps.
        for _ in range(min(2, len(waiting))):
            place = waiting.pop(0)
            assert engine.add(_request(decoder, TEXTS[place], place)) == place
        finished += engine.step()
    assert sorted(row.id for row in finished) == list(range(11))
    _check(finished, expected)


def test_a_request_can_be_dropped(decoder, expected):
    engine = decoder.engine(prompt_length=16, rows=2, refill=1)
    for place in range(6):
        engine.add(_request(decoder, TEXTS[place], place))
    finished = engine.step()
    running = {0, 1, 2} - {row.id for row in finished}
    dropped = {max(running), 5}  # one runs, one waits
    assert all(engine.abort(request) for request in dropped)
    assert not any(engine.abort(request) for request in [*dropped, 99])
    while engine.unfinished:
        finished += engine.step()
    assert {row.id for row in finished} == set(range(6)) - dropped
    _check(finished, expected)


def test_settings_are_each_requests_own(decoder):
    engine = decoder.engine(prompt_length=16, rows=2)
    strengths = (np.float32(-9.0),)
    engine.add(_request(decoder, "a", 0, strengths=strengths, draft_limit=0))
    engine.add(_request(decoder, "b", 1, temperature=0.0))
    rows = {}
    while engine.unfinished:
        rows |= {row.id: row for row in engine.step(until_empty=True)}
    want = decoder(["a", "b"], seed=5, rule=rules.OPT([-9.0, 0.1]), temperature=[1.0, 0.0],
                   draft_limit=[0, 3])  # fmt: skip
    _check(rows.values(), want)
    assert not rows[0].info.drafted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros(17, np.int32)}, "prompt must have 1 to 16 tokens, got 17: shorten it"),
        ({"tokens": np.zeros(0, np.int32)}, "prompt must have 1 to 16 tokens, got 0"),
        ({"tokens": np.zeros((1, 3), np.int32)}, r"tokens must be whole numbers \[n\], got int32"),
        ({"tokens": np.zeros(3)}, r"tokens must be whole numbers \[n\], got float64"),
        ({"tokens": np.full(3, 259)}, "token must be a whole number in 0 .. 258, got 259"),
        ({"tokens": np.full(3, -1)}, "token must be a whole number in 0 .. 258, got -1"),
        ({"limit": 13}, "limit must be a whole number in 1 .. 12, got 13"),
        ({"limit": 2.5}, "limit must be a whole number in 1 .. 12, got 2.5"),
        ({"top_k": 3}, "top_k must be None: this engine is comp"),
        ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1"),
        ({"temperature": [0.0, 1.0]}, "temperature must be one number, got"),
        ({"draft_limit": 4}, "draft_limit must be a whole number in 0 .. 3, got 4"),
        ({"seed": -1}, r"seed must be a whole number in 0 .. 4294967295, got -1"),
        ({"limit": None}, "limit must be a whole number in 1 .. 12, got None"),
        ({"limit": 5.0}, "limit must be a whole number in 1 .. 12, got 5.0"),
        ({"seed": None}, "seed must be a whole number in 0 .. 4294967295, got None"),
        ({"stream": "a"}, "stream must be a whole number in 0 .. 4294967295, got 'a'"),
        ({"draft_limit": True}, "draft_limit must be a whole number in 0 .. 3, got True"),
        ({"strengths": (float("nan"),)}, r"strengths\[0\] must be a number, not NaN, got nan"),
        ({"strengths": ()}, r"strengths must have 1 number, one for each of the rule, got \(\)"),
        ({"strengths": ([0.1, 0.2],)}, "strengths must have 1 number, one for each of the rule"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(decoder, change, message):
    engine = decoder.engine(prompt_length=16)
    request = {"tokens": np.zeros(3, np.int32), "limit": 5} | change
    with pytest.raises(ValueError, match=message):
        engine.add(specjax.Request(**request))
    assert engine.unfinished == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": "hello"}, r"got the text 'hello': use decoder.encode\(text\)"),
        ({"strengths": 0.1}, r"strengths must be a tuple of 1 number, got 0.1: write \(0.1,\)"),
        ({"strengths": ("x",)}, r"strengths\[0\] must be a number, got 'x'"),
        ({"strengths": (None,)}, r"strengths\[0\] must be a number, got None"),
    ],
)
def test_fields_of_a_wrong_type_are_refused(decoder, change, message):
    request = {"tokens": np.zeros(3, np.int32), "limit": 5} | change
    with pytest.raises(TypeError, match=message):
        decoder.engine(prompt_length=16).add(specjax.Request(**request))


def test_add_takes_requests_alone(decoder):
    with pytest.raises(TypeError, match=r"add takes a Request, got ndarray: write Request"):
        decoder.engine(prompt_length=16).add(np.zeros(3, np.int32))


def test_a_filter_that_is_not_compiled_in_is_told_with_the_decoders_own_option(decoder):
    request = specjax.Request(np.zeros(3, np.int32), limit=5, top_k=3)
    with pytest.raises(ValueError, match=r"make the Decoder with top_k=\.\.\., or an Engine"):
        decoder.engine(prompt_length=16).add(request)


def test_strengths_pass_the_checks_of_the_rule():
    decoder = specjax.Decoder(_pair(), rule=rules.Chow(0.1), max_draft=3, buckets=(16,))
    request = specjax.Request(np.zeros(3, np.int32), limit=5, strengths=(1.5,))
    with pytest.raises(ValueError, match=r"the rule: alpha must lie in \[0, 1\], got 1.5"):
        decoder.engine(prompt_length=16).add(request)


def test_an_engine_goes_on_after_a_refusal():
    decoder = specjax.Decoder(
        _pair(), verification=verification.GreedyBlock(), max_draft=3, max_new_tokens=12,
        batch_size=2, buckets=(16,),
    )  # fmt: skip
    engine = decoder.engine(prompt_length=16, rows=2, refill=1)
    engine.add(_request(decoder, TEXTS[0], 0))
    for bad in ({"draft_limit": 2}, {"limit": None}, {"seed": None}):
        options = {"limit": 5} | bad
        with pytest.raises(ValueError, match="^(draft_limit|limit|seed) must be"):
            engine.add(specjax.Request(decoder.encode("x"), **options))
    engine.add(_request(decoder, TEXTS[1], 1, draft_limit=3))
    finished = []
    while engine.unfinished:
        finished += engine.step()
    assert sorted(row.id for row in finished) == [0, 1]
    _check(finished, decoder(TEXTS[:2], seed=5))


def test_an_engine_takes_one_value_of_each_setting(decoder):
    with pytest.raises(ValueError, match="an engine takes one value of each setting"):
        decoder.engine(prompt_length=16, rule=rules.OPT([0.1, 0.2]))
    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, got 0"):
        decoder.engine(prompt_length=16, rows=0)
    with pytest.raises(ValueError, match="refill must be at most rows=2, got 4"):
        decoder.engine(prompt_length=16, rows=2, refill=4)
    with pytest.raises(TypeError, match="rule must be one such as"):
        decoder.engine(prompt_length=16, rule=3)


def test_an_engine_fits_its_mesh():
    mesh = partitioning.make_mesh(data=8)
    pair = specjax.Pair(*(tiny_pair.tabular(seed, mesh=mesh) for seed in (2, 1)))
    decoder = specjax.Decoder(pair, max_draft=3, max_new_tokens=12, batch_size=4, buckets=(16,))
    engine = decoder.engine(prompt_length=16)
    for i in range(9):  # one more than the slots, which are rounded up to the devices
        engine.add(_request(decoder, TEXTS[i], i))
    rows = []
    while engine.unfinished:
        rows += engine.step()
    assert sorted(row.id for row in rows) == list(range(9))
    _check(rows, decoder(TEXTS, seed=5))
