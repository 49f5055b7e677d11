"""Requests that arrive while others run, leave, and are dropped."""

import concurrent.futures
import signal

import jax
import numpy as np
import pytest

import specjax
from specjax import partitioning, rules
from specjax.compilation import compile_seconds
from specjax.decoding import Method
from specjax.text import engine as engines
from specjax.types import Sampling
from tests import tiny_pair
from tests.tiny_pair import finished_rows
from tests.variants import variants

SHAPE = {"max_new_tokens": 12, "batch_size": 4, "buckets": (16,)}
PAIR = specjax.Pair(drafter=tiny_pair.tabular(2), verifier=tiny_pair.tabular(1))


@pytest.fixture(scope="module")
def decoder():
    return specjax.Decoder(PAIR, rule=rules.OPT(0.1), max_draft=3, **SHAPE)


def _request(text, number, **options):
    return specjax.Request(text, seed=5, id=number, **options)


TEXTS = [f"prompt {i}" for i in range(11)]


@pytest.fixture(scope="module")
def expected(decoder):
    return decoder(TEXTS, seed=5)


def _check(finished, expected):
    for row in finished:
        want = expected[row.index]
        np.testing.assert_array_equal(row.tokens, want.tokens)
        for name in ("text", "eos_id", "ended_by"):
            assert getattr(row, name) == getattr(want, name)
        assert row.seconds > 0.0


def _steps(engine, streams):
    if not streams:
        return engine.step()
    return [added.row for added in engine.stream_step(every=2) if added.row is not None]


@pytest.mark.parametrize("streams", [False, True])
def test_requests_come_and_go_while_others_run(decoder, expected, streams):
    engine = decoder.engine(prompt_length=16, rows=2, refill=1)
    assert engine.step() == [] and engine.unfinished == 0
    assert "2 rows with prompts of 16" in repr(engine) and "0 running, 0 waiting" in repr(engine)
    waiting, finished, dropped = list(range(11)), [], set()
    while waiting or engine.unfinished:
        # Two more between any two steps.
        for place in waiting[:2]:
            assert engine.add(_request(TEXTS[place], place)) == place
        waiting = waiting[2:]
        finished += _steps(engine, streams)
        if len(waiting) == 3:
            running, *_, last = engine.unfinished_requests
            assert "0 running" not in repr(engine) and "0 waiting" not in repr(engine)
            dropped = {running, last}
            assert all(engine.abort(index) for index in dropped)
            assert not any(engine.abort(index) for index in [*dropped, 99])
    assert sorted(row.index for row in finished) == sorted({*range(11)} - dropped)
    _check(finished, expected)


def test_a_stream_starts_a_run_before_it_reads_the_last(decoder, monkeypatch):
    events, run, read = [], Method.run, engines._unpacked

    def recorded(name, call):
        return lambda *args: events.append(name) or call(*args)

    monkeypatch.setattr(Method, "run", recorded("run", run))
    monkeypatch.setattr(engines, "_unpacked", recorded("read", read))
    rows = []
    for every in (None, 1, 3):
        engine = decoder.engine(prompt_length=16, rows=4, refill=2, log_probs=True, sources=True)
        for number, text in enumerate(TEXTS):
            engine.add(_request(text, number))
        events.clear()
        added = sorted(engine.added(every), key=lambda one: one.index)
        rows.append([one.row for one in added if one.row is not None])
        runs = 1 if every is None else 2
        assert events == ["run"] * (runs - 1) + ["run", "read"] * events.count("read")
    # The rounds that were started after its end change nothing of a row.
    for step, *streamed in zip(*rows, strict=True):
        for row in streamed:
            jax.tree.map(np.testing.assert_array_equal, row.info, step.info)
            assert row.tokens.tolist() == step.tokens.tolist() and row.sources == step.sources
            np.testing.assert_array_equal(row.log_probs, step.log_probs)


@pytest.mark.parametrize("samples", [1, 2])
def test_equal_requests_differ_unless_they_have_one_id(decoder, samples):
    engine = decoder.engine(prompt_length=16, rows=4, num_samples=samples)
    for _ in range(3):
        assert engine.add(specjax.Request("a", seed=5)) is not None
    for _ in range(2):
        engine.add(specjax.Request("a", seed=5, id=7))
    rows = finished_rows(engine)
    texts = [rows[i, j].tokens.tolist() for i in range(5) for j in range(samples)]
    assert len(set(map(tuple, texts[: 3 * samples]))) == 3 * samples
    assert texts[3 * samples : 4 * samples] == texts[4 * samples :]
    # They are the rows of a call with the same prompts.
    want = decoder(["a"] * 3, seed=5, num_samples=samples)
    assert texts[: 3 * samples] == [row.tokens.tolist() for row in want]


def test_settings_are_each_requests_own(decoder):
    engine = decoder.engine(prompt_length=16, rows=2, log_probs=True)
    engine.add(_request("a", 0, rule=rules.OPT(-0.9), draft_limit=0, log_probs=False))
    for bad in ({"draft_limit": 4}, {"max_new_tokens": 0}, {"seed": None}):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))} must be"):
            engine.add(specjax.Request("x", **bad))
    engine.add(_request("b", 1, sampling=Sampling(0.0), log_probs=True))
    rows = {row.index: row for row in engine.step(until_empty=True)}
    options = {"rule": rules.OPT([-0.9, 0.1]), "sampling": Sampling([1.0, 0.0])}
    _check(rows.values(), decoder(["a", "b"], seed=5, draft_limit=[0, 3], **options))
    assert len(rows) == 2 and not rows[0].info.drafted
    assert rows[0].log_probs is None is not rows[1].log_probs
    assert "log_probs" not in rows[0].to_dict()


def test_an_engine_fits_its_mesh():
    mesh = partitioning.make_mesh(data=8)
    pair = specjax.Pair(*(tiny_pair.tabular(seed, mesh=mesh) for seed in (2, 1)))
    decoder = specjax.Decoder(pair, max_draft=3, **SHAPE)
    engine = decoder.engine(prompt_length=16)
    for i in range(9):  # one more than the slots, which are rounded up to the devices
        engine.add(_request(TEXTS[i], i))
    rows = finished_rows(engine)
    assert len(rows) == 9
    _check(rows.values(), decoder(TEXTS, seed=5))


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


ENDS = [
    (_in_callback, ZeroDivisionError("a bug")),
    (_in_callback, KeyboardInterrupt()),
    (_in_tokenizer, ZeroDivisionError("a bug")),
    (_in_tokenizer, KeyboardInterrupt()),
    (_by_signal, KeyboardInterrupt()),
]
ENDS = [(*end, stream) for end in ENDS for stream in (False, True)]


@pytest.mark.parametrize("end", variants(ENDS, ENDS[0], ENDS[7], ENDS[8]))
def test_an_engine_that_was_ended_says_so_and_gives_its_requests_back(monkeypatch, end):
    stop, error, stream = end
    decoder = specjax.Decoder(
        PAIR, rule=Hooked(), max_draft=3, max_new_tokens=12, batch_size=2, buckets=(16,)
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
        with pytest.raises(
            specjax.UserError, match="^this engine was ended by .* during a step: make"
        ):
            use()
    places = [(again.add(request), i) for i, request in given.items()]
    assert engine.abort(places[-1][1]) and "ended by" in repr(engine)
    found = finished_rows(again)
    rows |= {(i, 0): found[new, 0] for new, i in places}
    assert [rows[i, 0].tokens.tolist() for i in range(5)] == [x.tolist() for x in want.tokens]


METHODS = {
    "chain": {"max_draft": 3},
    "tree": {"drafting": specjax.drafting.Tree(depth=2, width=2)},
    "token cascade": {"method": specjax.decoding.TokenCascade(3), "rule": rules.Chow(0.97)},
    "sequence cascade": {
        "method": specjax.decoding.SequenceCascade(),
        "rule": rules.SequenceChow(0.95),
    },
    "alone": {},
}


def _own(name, **options):
    models = tiny_pair.tabular(1) if name == "alone" else PAIR
    return specjax.Decoder(
        models, **METHODS[name], max_new_tokens=60, batch_size=3, buckets=(8, 16), **options
    )


def _stops(decoder, count):
    """For each request None, strings in its text, or none."""
    for place in range(count):
        text = decoder([TEXTS[place % 4]], seed=5, ids=[place]).texts[0]
        own = text[2:4] or "z"
        yield [None, text[1:2] or "z", (own, "never", own), (), ["n"]][place % 5]


OWN_STOPS = [(name, default) for name in METHODS for default in ((), ("a", "$"))]


@pytest.mark.parametrize(
    "case", variants(OWN_STOPS, OWN_STOPS[0], OWN_STOPS[1], ("tree", ()), ("token cascade", ()))
)
def test_stop_strings_are_each_requests_own(case):
    name, default = case
    stops = list(_stops(_own(name), 10))
    engine = _own(name, stop=default).engine(prompt_length=16, rows=3, refill=1)
    waiting, rows = list(enumerate(stops)), {}
    while waiting or engine.unfinished:
        for place, strings in waiting[:1]:  # the first without strings of its own
            assert engine.add(specjax.Request(TEXTS[place % 4], seed=5, stop=strings)) == place
        waiting = waiting[1:]
        rows |= {row.index: row for row in engine.step()}
    ended = set()
    for place, strings in enumerate(stops):
        one = _own(name, stop=default if strings is None else strings)
        want = one([TEXTS[place % 4]], seed=5, ids=[place])[0]
        row = rows[place]
        assert (row.text, row.ended_by) == (want.text, want.ended_by)
        np.testing.assert_array_equal(row.tokens, want.tokens)
        assert row.info.emitted == want.info.emitted and row.info.rounds == want.info.rounds
        ended.add((bool(strings), row.ended_by))
    assert {(True, "stop"), (False, "eos")} <= ended


def test_new_stop_strings_compile_nothing_and_take_no_room(monkeypatch):
    decoder, reads = _own("chain"), []
    words = type(decoder.tokenizer)
    pieces = words.pieces
    monkeypatch.setattr(words, "pieces", lambda self: reads.append(0) or pieces(self))
    engine = decoder.engine(prompt_length=16, rows=3)
    for number in range(60):
        engine.add(specjax.Request("a", stop=(f"never {number}",), max_new_tokens=3))
        if number == 8:  # slots have been filled again
            finished_rows(engine)
            compiled = compile_seconds()
        if number % 3 == 2:
            finished_rows(engine)
    assert compile_seconds() == compiled
    assert engine._blocks.table.shape[0] <= 64
    assert len(reads) <= 1


@pytest.mark.parametrize("of_engine", [1, 2])
@pytest.mark.parametrize("of_request", [None, 2, 4])
def test_each_request_has_its_own_number_of_samples(of_engine, of_request):
    decoder = _own("chain")
    engine = decoder.engine(prompt_length=16, rows=4, num_samples=of_engine)
    for text in TEXTS[:2]:
        engine.add(specjax.Request(text, seed=5, num_samples=of_request))
    rows, count = finished_rows(engine), of_request or of_engine
    four = specjax.Decoder(PAIR, max_draft=3, max_new_tokens=60, batch_size=4, buckets=(16,))
    want = four(TEXTS[:2], seed=5, num_samples=count)
    assert sorted(rows) == [(row.index, row.sample) for row in want]
    for row in want:
        np.testing.assert_array_equal(rows[row.index, row.sample].tokens, row.tokens)


def test_a_request_whose_samples_were_returned_in_part_gives_all_of_them_again(monkeypatch):
    decoder = _own("chain")
    engine = decoder.engine(prompt_length=16, rows=3, refill=1)
    engine.add(specjax.Request("a", seed=5, num_samples=4))
    rows = {(row.index, row.sample): row for row in engine.step()}
    assert 0 < len(rows) < 4
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        _in_tokenizer(patched, KeyboardInterrupt())
        finished_rows(engine)
    with pytest.raises(ValueError, match="several samples gives all of them again, so keep"):
        engine.step()
    again = decoder.engine(prompt_length=16, rows=3, refill=1)
    (request,) = engine.unfinished_requests.values()
    again.add(request)
    others = finished_rows(again)
    assert len(others) == 4
    for key, row in rows.items():
        np.testing.assert_array_equal(others[key].tokens, row.tokens)


def test_requests_of_unequal_numbers_of_samples_share_no_id():
    engine = _own("chain").engine(prompt_length=16, rows=4)
    samples = [1, 4, 1, 2, 1]
    for count in samples:
        engine.add(specjax.Request("a", seed=5, num_samples=count))
    ids = [row.id for row in engine.unfinished_requests.values()]
    assert ids == [0, 1, 8, 5, 12]
    rows = finished_rows(engine)
    assert len({tuple(row.tokens.tolist()) for row in rows.values()}) == len(rows) == sum(samples)


@pytest.mark.parametrize("name", variants(["chain", "encoder"], "chain"))
def test_a_prompt_is_padded_to_its_own_bucket(monkeypatch, pair, name):
    if name == "chain":
        decoder = specjax.Decoder(PAIR, max_new_tokens=60, batch_size=3, buckets=(4, 8, 16))
    else:  # its cache has the prompt's length
        decoder = specjax.Decoder(pair, max_new_tokens=6, batch_size=3, buckets=(4, 8, 16))
    widths, init = [], type(decoder.method).init

    def noted(self, params, prompts, **options):
        widths.append(prompts.inputs.shape[1])
        return init(self, params, prompts, **options)

    monkeypatch.setattr(type(decoder.method), "init", noted)
    traced, first_state = [], engines.first_state

    def traced_state(method, sizes, params, batch):
        traced.append(batch.inputs.shape[1])
        return first_state(method, sizes, params, batch)

    monkeypatch.setattr(engines, "first_state", traced_state)
    engine = decoder.engine(prompt_length=16, rows=2, refill=1)
    lengths = [3, 8, 9, 16, 2, 8]
    rows = {}
    for length in lengths:
        engine.add(specjax.Request(np.full(length, 5, np.int32), seed=5))
        rows |= finished_rows(engine)
    # The first fills both slots.
    assert widths == ([4, 8, 16, 16, 4, 8] if name == "chain" else [16] * 6)
    assert traced == [4, 16]
    want = decoder([np.full(length, 5, np.int32) for length in lengths], seed=5)
    for i, tokens in enumerate(want.tokens):
        np.testing.assert_array_equal(rows[i, 0].tokens, tokens)


def test_several_threads_may_call_a_decoder_and_have_engines(decoder, expected):
    def call(number):
        if number % 2:
            return decoder(TEXTS, seed=5).tokens
        engine = decoder.engine(prompt_length=16, rows=4, refill=1)
        for text in TEXTS:
            engine.add(specjax.Request(text, seed=5))
        rows = finished_rows(engine)
        return [rows[i, 0].tokens for i in range(len(TEXTS))]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(call, range(8)):
            for tokens, want in zip(found, expected.tokens, strict=True):
                np.testing.assert_array_equal(tokens, want)
