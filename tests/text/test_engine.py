"""Requests that arrive while others run, leave, and are dropped."""

import signal

import jax
import numpy as np
import pytest

import specjax
from specjax import partitioning, rules, verification
from specjax.types import Sampling
from tests import tiny_pair


@pytest.fixture(scope="module")
def decoder():
    return specjax.Decoder(
        _pair(), rule=rules.OPT(0.1), max_draft=3, max_new_tokens=12, batch_size=4, buckets=(16,)
    )


def _pair():
    return specjax.Pair(drafter=tiny_pair.tabular(2), verifier=tiny_pair.tabular(1))


def _request(decoder, text, number, **options):
    return specjax.Request(text, seed=5, id=number, **options)


TEXTS = [f"prompt {i}" for i in range(11)]


@pytest.fixture(scope="module")
def expected(decoder):
    return decoder(TEXTS, seed=5)


def _check(finished, expected, texts=TEXTS):
    for row in finished:
        want = expected[row.index]
        np.testing.assert_array_equal(row.tokens, want.tokens)
        assert row.text == want.text and row.eos_id == want.eos_id
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
    assert sorted(row.index for row in finished) == list(range(11))
    _check(finished, expected)


def test_a_request_can_be_dropped(decoder, expected):
    engine = decoder.engine(prompt_length=16, rows=2, refill=1)
    for place in range(6):
        engine.add(_request(decoder, TEXTS[place], place))
    finished = engine.step()
    running = {0, 1, 2} - {row.index for row in finished}
    dropped = {max(running), 5}  # one runs, one waits
    assert all(engine.abort(request) for request in dropped)
    assert not any(engine.abort(request) for request in [*dropped, 99])
    while engine.unfinished:
        finished += engine.step()
    assert {row.index for row in finished} == set(range(6)) - dropped
    _check(finished, expected)


def test_settings_are_each_requests_own(decoder):
    engine = decoder.engine(prompt_length=16, rows=2)
    engine.add(_request(decoder, "a", 0, rule=rules.OPT(-9.0), draft_limit=0))
    engine.add(_request(decoder, "b", 1, sampling=Sampling(0.0)))
    rows = {}
    while engine.unfinished:
        rows |= {row.index: row for row in engine.step(until_empty=True)}
    want = decoder(["a", "b"], seed=5, rule=rules.OPT([-9.0, 0.1]), sampling=Sampling([1.0, 0.0]),
                   draft_limit=[0, 3])  # fmt: skip
    _check(rows.values(), want)
    assert not rows[0].info.drafted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prompt": np.zeros(17, np.int32)},
            "prompt has 17 tokens, the longest bucket holds 16",
        ),
        ({"prompt": np.zeros(0, np.int32)}, "the prompt has no tokens"),
        ({"prompt": np.full(3, 259)}, "prompt has token 259: tokens must be in 0 .. 258"),
        ({"prompt": np.full(3, -1)}, "prompt has token -1: tokens must be in 0 .. 258"),
        ({"max_new_tokens": 13}, "max_new_tokens must be a whole number in 1 .. 12, got 13"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number in 1 .. 12, got 2.5"),
        ({"sampling": Sampling(top_k=3)}, r"the Engine with sampling=Sampling\(top_k=\.\.\.\)"),
        ({"sampling": Sampling([0.0, 1.0])}, "temperature of a request must be a single number"),
        ({"draft_limit": 4}, "draft_limit must be a whole number in 0 .. 3, got 4"),
        ({"seed": -1}, r"seed must be a whole number in 0 .. 4294967295, got -1"),
        ({"max_new_tokens": 5.0}, "max_new_tokens must be .* in 1 .. 12, got 5.0"),
        ({"seed": None}, "seed must be a whole number in 0 .. 4294967295, got None"),
        ({"id": "a"}, "id must be a whole number in 0 .. 4294967295, got 'a'"),
        ({"draft_limit": True}, "draft_limit must be a whole number in 0 .. 3, got True"),
        ({"rule": rules.OPT([0.1, 0.2])}, "rule of a request must have scalar"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(decoder, change, message):
    engine = decoder.engine(prompt_length=16)
    request = {"prompt": np.zeros(3, np.int32), "max_new_tokens": 5} | change
    with pytest.raises(ValueError, match=message):
        engine.add(specjax.Request(**request))
    assert engine.unfinished == 0


@pytest.mark.parametrize("value", ["yes", 1, [True, False]])
def test_log_probs_are_kept_or_not(decoder, value):
    with pytest.raises(TypeError, match="log_probs must be True or False, got"):
        decoder(["ba"], log_probs=value)
    with pytest.raises(TypeError, match="log_probs must be True or False, got"):
        decoder.engine(prompt_length=16, log_probs=value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": np.zeros((1, 3), np.int32)}, "prompt must be a text, a list of token ids or a"),
        ({"prompt": np.zeros(3)}, "prompt must be a text, a list of token ids or a"),
        ({"rule": 0.1}, r"rule must be OPT\(...\) like the engine's, got 0.1"),
        ({"rule": rules.Chow(0.1)}, r"rule must be OPT\(...\) like the engine's, got Chow"),
        ({"sampling": 0.1}, r"sampling must be Sampling\(temperature=...\), got 0.1"),
    ],
)
def test_fields_of_a_wrong_type_are_refused(decoder, change, message):
    request = {"prompt": np.zeros(3, np.int32), "max_new_tokens": 5} | change
    with pytest.raises(TypeError, match=message):
        decoder.engine(prompt_length=16).add(specjax.Request(**request))


def test_add_takes_requests_alone(decoder):
    with pytest.raises(TypeError, match=r"add takes a Request, got ndarray: write Request"):
        decoder.engine(prompt_length=16).add(np.zeros(3, np.int32))


def test_an_engine_goes_on_after_a_refusal():
    decoder = specjax.Decoder(
        _pair(), verification=verification.GreedyBlock(), max_draft=3, max_new_tokens=12,
        batch_size=2, buckets=(16,),
    )  # fmt: skip
    engine = decoder.engine(prompt_length=16, rows=2, refill=1)
    engine.add(_request(decoder, TEXTS[0], 0))
    for bad in ({"draft_limit": 2}, {"max_new_tokens": 0}, {"seed": None}):
        options = {"max_new_tokens": 5} | bad
        with pytest.raises(ValueError, match="^(draft_limit|max_new_tokens|seed) must be"):
            engine.add(specjax.Request(decoder.encode("x"), **options))
    engine.add(_request(decoder, TEXTS[1], 1, draft_limit=3))
    finished = []
    while engine.unfinished:
        finished += engine.step()
    assert sorted(row.index for row in finished) == [0, 1]
    _check(finished, decoder(TEXTS[:2], seed=5))


def test_an_engine_takes_one_value_of_each_setting(decoder):
    with pytest.raises(ValueError, match="sampling of an engine must have scalar values"):
        decoder.engine(prompt_length=16, rule=rules.OPT([0.1, 0.2]))
    with pytest.raises(ValueError, match="rows must be a whole number of at least 1, got 0"):
        decoder.engine(prompt_length=16, rows=0)
    with pytest.raises(ValueError, match="refill must be at most rows=2, got 4"):
        decoder.engine(prompt_length=16, rows=2, refill=4)
    with pytest.raises(TypeError, match="rule must be like"):
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
    assert sorted(row.index for row in rows) == list(range(9))
    _check(rows, decoder(TEXTS, seed=5))


def _rows(engine):
    rows = {}
    while engine.unfinished:
        rows |= {(row.index, row.sample): row for row in engine.step()}
    return rows


@pytest.mark.parametrize("samples", [1, 2])
def test_equal_requests_differ_unless_they_have_one_id(decoder, samples):
    engine = decoder.engine(prompt_length=16, rows=4, num_samples=samples)
    for _ in range(3):
        assert engine.add(specjax.Request("a", seed=5)) is not None
    for _ in range(2):
        engine.add(specjax.Request("a", seed=5, id=7))
    rows = _rows(engine)
    texts = [rows[i, j].tokens.tolist() for i in range(5) for j in range(samples)]
    assert len(set(map(tuple, texts[: 3 * samples]))) == 3 * samples
    assert texts[3 * samples : 4 * samples] == texts[4 * samples :]
    # They are the rows of a call with the same prompts.
    want = decoder(["a"] * 3, seed=5, num_samples=samples)
    assert texts[: 3 * samples] == [row.tokens.tolist() for row in want]


class Hooked:
    """The verifier's distribution; each use calls `hook` on the host."""

    reads_draft = reads_draft_confidence = reads_verifier_confidence = False
    hook = staticmethod(lambda: None)

    def __call__(self, q, p, q_conf=None, p_conf=None):
        def call(p):
            Hooked.hook()
            return p

        shape = jax.ShapeDtypeStruct(p.shape, p.dtype)
        return jax.pure_callback(call, shape, p, vmap_method="sequential")


jax.tree_util.register_static(Hooked)


def _in_callback(monkeypatch, error):
    calls = []

    def hook():
        calls.append(0)
        if len(calls) == 60:
            raise error

    monkeypatch.setattr(Hooked, "hook", staticmethod(hook))


def _in_tokenizer(monkeypatch, error):
    def decode(self, prompt, output):
        raise error

    monkeypatch.setattr(specjax.TextModel, "decode", decode)


def _by_signal(monkeypatch, error):
    signal.signal(signal.SIGALRM, signal.default_int_handler)

    def hook():
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
        monkeypatch.setattr(Hooked, "hook", staticmethod(lambda: None))

    monkeypatch.setattr(Hooked, "hook", staticmethod(hook))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "error"),
    [
        (_in_callback, ZeroDivisionError("a bug")),
        (_in_callback, KeyboardInterrupt()),
        (_in_tokenizer, ZeroDivisionError("a bug")),
        (_in_tokenizer, KeyboardInterrupt()),
        (_by_signal, KeyboardInterrupt()),
    ],
)
def test_an_engine_that_was_ended_says_so_and_gives_its_requests_back(
    monkeypatch, stop, error, stream
):
    decoder = specjax.Decoder(
        _pair(), rule=Hooked(), max_draft=3, max_new_tokens=12, batch_size=2, buckets=(16,)
    )
    engine = decoder.engine(prompt_length=16, rows=2, refill=1)
    for text in TEXTS[:5]:
        engine.add(specjax.Request(text, seed=5))
    step = engine.stream_step if stream else engine.step
    want = decoder(TEXTS[:5], seed=5)
    rows = {}
    with monkeypatch.context() as patched, pytest.raises(BaseException) as first:
        stop(patched, error)
        while engine.unfinished:
            done = [x.row if stream else x for x in step()]
            rows |= {(row.index, 0): row for row in done if row is not None}
    assert type(error).__name__ in repr(first.value)
    again, given = decoder.engine(prompt_length=16, rows=2, refill=1), engine.unfinished_requests
    assert given.keys() | {i for i, _ in rows} == set(range(5)) and engine.unfinished
    for use in (step, lambda: engine.add(specjax.Request("a"))):
        with pytest.raises(RuntimeError, match="^this engine was ended by .* during a step: make"):
            use()
    places = [(again.add(request), i) for i, request in given.items()]
    assert engine.abort(places[-1][1]) and "ended by" in repr(engine)
    found = _rows(again)
    rows |= {(i, 0): found[new, 0] for new, i in places}
    assert [rows[i, 0].tokens.tolist() for i in range(5)] == [x.tolist() for x in want.tokens]


def test_an_engine_shows_its_shape_and_its_rows(decoder):
    engine = decoder.engine(prompt_length=16, rows=2, refill=1)
    for text in TEXTS[:4]:
        engine.add(specjax.Request(text))
    assert "2 rows with prompts of 16" in repr(engine) and "0 running, 4 waiting" in repr(engine)
    engine.step()
    assert list(engine.unfinished_requests.values())[-1].prompt == TEXTS[3]
    assert "0 waiting" not in repr(engine) and "ended" not in repr(engine)
