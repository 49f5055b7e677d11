"""Another value of a processor compiles nothing, and is not mistaken for the first."""

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import processors, types
from specjax.compilation import count_compilations
from specjax.processors import (
    ForcedTokens,
    JsonSchema,
    LinearTemperature,
    LogitBias,
    MinNewTokens,
    NoRepeatNgram,
    Regex,
    SuppressTokens,
)
from specjax.processors.byte_automata import byte_automaton
from specjax.processors.common import padded_size
from specjax.processors.token_automata import token_automaton
from specjax.tokenizers.tokenizer import Pieces
from tests import tiny_pair

V, A, B, C = 259, 100, 101, 102  # the ids of the letters in bytes
SHAPE = {"max_new_tokens": 12, "batch_size": 4, "buckets": (16,)}
GREEDY = types.Sampling(0.0)
TRACE = "/jax/core/compile/jaxpr_trace_duration"


@pytest.fixture(scope="module")
def decoder():
    return specjax.Decoder(tiny_pair.tabular(5), sampling=GREEDY, **SHAPE)


def only(*ids):
    return lambda row: set(row.tokens) == set(ids)


def but(*ids):
    return [i for i in range(V) if i not in ids]


def distinct(n):
    def is_distinct(row):
        grams = [tuple(row.tokens[i : i + n]) for i in range(len(row.tokens) - n + 1)]
        return len(grams) == len(set(grams))

    return is_distinct


def matches(*patterns):
    return lambda row: re.fullmatch(patterns[row.index], row.text)


def is_one_of(*values):
    return lambda row: json.loads(row.text) in values


def true(row):
    return True


@types.traced_dataclass
class OnlyToken(types.Processor):
    """One of a user's own, with data of the host."""

    token: int = dataclasses.field(metadata={"host": True})

    def bind(self, model):
        return self, np.array(self.token)

    def process(self, params, state, logits):
        there = jnp.arange(logits.shape[1]) == params
        return jnp.where(there[None], logits, -jnp.inf)


AB, CD, SMALL = "[ab]{1,4}", "c[0-9]{2}", {"type": "boolean"}
# Two values of each processor, and what shows in a row that it was that value.
VALUES = {
    "LogitBias": (
        (LogitBias({A: 99.0}), only(A)),
        (LogitBias({B: 99.0, 7: -3.0}), only(B)),
    ),
    "LogitBias of many": [
        (LogitBias(dict.fromkeys(but(token), -99.0)), only(token)) for token in (A, B)
    ],
    "SuppressTokens": [(SuppressTokens(but(token)), only(token)) for token in (A, B)],
    "SuppressTokens at first": (
        (SuppressTokens(but(A), first=2), lambda row: [*row.tokens[:3]] != [A] * 3),
        (SuppressTokens(but(B), first=7), lambda row: [*row.tokens[:7]] == [B] * 7),
    ),
    "ForcedTokens": (
        (ForcedTokens({0: A}), lambda row: row.tokens[0] == A),
        (ForcedTokens({0: C, 1: B, 3: A}), lambda row: [*row.tokens[[0, 1, 3]]] == [C, B, A]),
    ),
    "MinNewTokens": (
        (MinNewTokens(2), lambda row: len(row.tokens) >= 2),
        (MinNewTokens(12, eos_ids=but(A)), lambda row: [*row.tokens] == [A] * 12),
    ),
    "NoRepeatNgram": [(NoRepeatNgram(n), distinct(n)) for n in (1, 3)],
    "Regex": [(Regex(pattern), matches(pattern, pattern)) for pattern in (AB, CD)],
    "Regex of each row": (
        (Regex((AB, CD), which=np.array([1, 0])), matches(CD, AB)),
        (Regex(("x", AB, "y{3}"), which=np.array([2, 0])), matches("yyy", "x")),
    ),
    "JsonSchema": (
        (JsonSchema(SMALL), is_one_of(True, False)),
        (JsonSchema({"enum": [12, "two"]}), is_one_of(12, "two")),
    ),
    "own": [(OnlyToken(token), only(token)) for token in (A, B)],
    "LinearTemperature": [(LinearTemperature(*x), true) for x in ((1.0, 0.5, 3), (0.5, 2.0, 5))],
    **{
        kind.__name__: [(kind(strength), true) for strength in (0.3, 0.6)]
        for kind in (
            *(processors.RepetitionPenalty, processors.FrequencyPenalty),
            *(processors.PresencePenalty, processors.MinP, processors.TypicalP),
            *(processors.EpsilonCutoff, processors.EtaCutoff),
        )
    },
}


def test_every_processor_has_its_values():
    kinds = {type(value) for pair in VALUES.values() for value, _ in pair}
    assert kinds == {*processors.ALL_PROCESSORS, OnlyToken}


def rows_of(decoder, value):
    """Two rows with a processor, and the numbers of programs traced and compiled for them."""
    traces = []
    jax.monitoring.register_event_duration_secs_listener(
        listen := lambda event, *_, **__: traces.append(event) if event == TRACE else None
    )
    try:
        with count_compilations() as counts:
            rows = decoder(["one", "two"], processors=(value,)).rows
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return rows, len(traces), counts.compiled + counts.read


@pytest.mark.parametrize("name", VALUES)
def test_another_value_traces_and_compiles_nothing(decoder, name):
    (first, is_first), (second, is_second) = VALUES[name]
    one = rows_of(decoder, first)[0]
    other, *counts = rows_of(decoder, second)
    again = rows_of(decoder, first)[0]
    assert counts == [0, 0]
    assert all(map(is_first, one)) and all(map(is_second, other))
    assert [row.text for row in again] == [row.text for row in one]


@types.traced_dataclass
class ReadsTheHost(OnlyToken):
    """A mistake: a program is for other tokens, too."""

    token: int = dataclasses.field(default=A, metadata={"host": True})

    def process(self, params, state, logits):
        return jnp.where((jnp.arange(logits.shape[1]) == self.token)[None], logits, -jnp.inf)


def test_a_program_that_reads_a_value_of_the_host_is_refused(decoder):
    for one in (ReadsTheHost(), ReadsTheHost(B)):
        with pytest.raises(AttributeError, match="'ReadsTheHost' object has no attribute 'token'"):
            rows_of(decoder, one)


def test_another_shape_is_counted(decoder):
    rows_of(decoder, LogitBias({A: 99.0}))
    _, traced, compiled = rows_of(decoder, LogitBias(dict.fromkeys(range(70), 1.0)))
    assert traced and compiled


NUMBERS = {
    "n-grams": NoRepeatNgram,
    "first": lambda numbers: SuppressTokens(but(A), first=numbers),
    "ends": lambda numbers: MinNewTokens(numbers, eos_ids=but(A)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_row_has_its_own_whole_number(decoder, name):
    numbers, prompts = np.array([1, 2, 3, 40]), ["one", "two", "two", "one"]
    together = decoder(prompts, processors=(NUMBERS[name](numbers),)).texts
    apart = [decoder(prompts, processors=(NUMBERS[name](n),)).texts for n in numbers]
    assert together == [texts[i] for i, texts in enumerate(apart)]
    assert len({tuple(texts) for texts in apart}) > 1


ENDS, FIRST = {"eos_ids": (1,)}, {"first": 2}
# An engine's processor; the same with other strengths; and others of the same shape.
DATA = [
    (LogitBias({A: 99.0}), LogitBias({A: 98.0}), LogitBias({B: 99.0})),
    (
        SuppressTokens(but(A), **FIRST),
        SuppressTokens(but(A), first=3),
        SuppressTokens(but(B), **FIRST),
    ),
    *[(ForcedTokens({0: A}), None, ForcedTokens(other)) for other in ({0: B}, {1: A})],
    (MinNewTokens(2, **ENDS), MinNewTokens(4, **ENDS), MinNewTokens(2, eos_ids=(2,))),
    (NoRepeatNgram(2), NoRepeatNgram(4), NoRepeatNgram(2, "output")),
    (Regex((AB, CD)), Regex((AB, CD), which=1), Regex((AB, "c[0-8]{2}"))),
    (JsonSchema(SMALL), None, JsonSchema({"type": "null"})),
    (JsonSchema(SMALL), None, JsonSchema(SMALL, whitespace="")),
    (OnlyToken(A), None, OnlyToken(B)),
]


@pytest.mark.parametrize(("own", "same", "other"), DATA, ids=repr)
def test_a_request_has_the_data_of_its_engine(decoder, own, same, other):
    given = specjax.Decoder(decoder.models, processors=(own,), sampling=GREEDY, **SHAPE)
    engine = given.engine(prompt_length=16)
    wrong = types.Sampling(0.0, processors=(other,))
    with pytest.raises(ValueError, match=r"processors\[0\] is .*, the engine has"):
        engine.add(specjax.Request("one", sampling=wrong))
    same = own if same is None else same
    engine.add(specjax.Request("one", sampling=types.Sampling(0.0, processors=(same,))))
    rows = list(itertools.chain(*iter(lambda: engine.step() if engine.unfinished else None, None)))
    assert [row.text for row in rows] == decoder(["one"], processors=(same,)).texts


@pytest.mark.parametrize("count", [0, 1, 253, 254, 300])
def test_a_padded_table_is_the_same_automaton(count):
    """Also where the states just fit."""
    pieces = Pieces([b"", b"a", b"b", b"ab"], [b"", b"a", b"b", b"ab"])
    language = byte_automaton(f"a{{{count}}}b?")
    made, (state,) = token_automaton([language], pieces, 4, (0,), goes_on=True)
    states, end = len(language.steps), len(made.table) - 1
    assert states == count + 2 <= end and made.table.shape in {(256, 64), (512, 64)}
    assert (made.table[states:end] == -1).all() and (made.table[end] == end).all()
    assert set(np.unique(made.table)) <= {-1, *range(states), end}
    assert made.distances[end] == 0 and (made.distances[states:end] == 2**30).all()
    for length in range(count + 1):
        assert made.distances[state] == count - length
        ends, a, b, ab = made.table[state, made.classes]
        assert (ends, b >= 0) == ((end, True) if length == count else (-1, False))
        assert (a >= 0, ab >= 0) == (length < count, length == count - 1)
        state = a


def test_shapes_are_few():
    assert len({padded_size(n) for n in range(1, 152_000)}) == 16
    assert all(n <= padded_size(n) <= max(8, 2 * n - 1) for n in range(1, 5000))


def test_a_tokenizer_without_an_end_has_nothing_to_forbid():
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(eos_ids=()), model=SimpleNamespace(vocab_size=5)
    )
    _, forbidden = MinNewTokens(3).bind(model)
    assert not forbidden.any()
