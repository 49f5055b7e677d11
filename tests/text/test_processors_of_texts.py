"""Processors of a Decoder: speculation, calls and engines agree; wrong ones are refused."""

import dataclasses

import numpy as np
import pytest

import specjax
from specjax import processors, types, verification
from tests import tiny_pair

SHAPE = {"max_new_tokens": 12, "batch_size": 4, "buckets": (32,)}
PROMPTS = tiny_pair.sentences(4, seed=3)
GREEDY = types.Sampling(0.0)
STACK = (
    processors.MinP(0.02),
    processors.RepetitionPenalty(1.5),
    processors.NoRepeatNgram(3),
    processors.MinNewTokens(6),
)


@pytest.fixture(scope="module")
def decoder(pair):
    return specjax.Decoder(pair, max_draft=3, processors=STACK, **SHAPE)


def test_greedy_texts_are_those_of_the_verifier_alone(pair, decoder):
    alone = specjax.Decoder(pair.verifier, processors=STACK, sampling=GREEDY, **SHAPE)
    wanted = alone(PROMPTS)
    assert decoder(PROMPTS, sampling=GREEDY).texts == wanted.texts
    plain = specjax.Decoder(pair, max_draft=3, sampling=GREEDY, **SHAPE)(PROMPTS)
    assert plain.texts != wanted.texts
    unprocessed = specjax.Decoder(
        pair, max_draft=3, processors=STACK, process_drafts=False, sampling=GREEDY, **SHAPE
    )(PROMPTS)
    assert unprocessed.texts == wanted.texts
    assert all(len(tokens) >= 6 for tokens in wanted.tokens)


def test_a_row_has_its_own_strengths_in_calls_and_engines(decoder):
    strengths = np.array([1.0, 1.5, 3.0, 9.0], np.float32)

    def stack(strength):
        return (STACK[0], processors.RepetitionPenalty(strength), *STACK[2:])

    together = decoder(PROMPTS, processors=stack(strengths)).texts
    for i, strength in enumerate(strengths):
        assert decoder(PROMPTS, processors=stack(strength)).texts[i] == together[i]
    assert decoder(PROMPTS, processors=stack(1.0)).texts != together
    engine = decoder.engine(prompt_length=32)
    for i, strength in enumerate(strengths):
        drawn = types.Sampling(processors=stack(strength))
        engine.add(specjax.Request(PROMPTS[i], id=i, sampling=drawn))
    found = {}
    while engine.unfinished:
        found |= {row.index: row.text for row in engine.step()}
    assert [found[i] for i in range(4)] == together
    with pytest.raises(ValueError, match=r"processors\[0\] is MinP.*, the engine has RepetitionP"):
        drawn = types.Sampling(processors=(processors.MinP(0.1),))
        engine.add(specjax.Request(PROMPTS[0], sampling=drawn))
    with pytest.raises(ValueError, match=r"processors of a request must be .*, a number each"):
        drawn = types.Sampling(processors=stack(strengths))
        engine.add(specjax.Request(PROMPTS[0], sampling=drawn))
    # A request without processors has the engine's.
    engine.add(specjax.Request(PROMPTS[1], id=1, sampling=types.Sampling(1.0)))
    rows = []
    while engine.unfinished:
        rows += engine.step()
    assert rows[0].text == decoder(PROMPTS).texts[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (processors.SuppressTokens((5, 6)), processors.SuppressTokens((6, 5, 6))),
        (processors.MinNewTokens(3, (5, 1)), processors.MinNewTokens(4, (1, 5))),
        (processors.LogitBias({5: 1.0, 6: 2.0}), processors.LogitBias({6: 2.0, 5: 1.0})),
        (processors.ForcedTokens({0: 5, 1: 6}), processors.ForcedTokens({1: 6, 0: 5})),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_request_may_have_the_engines_tokens_in_another_order(pair, one, other):
    engine = specjax.Decoder(pair, processors=(one,), **SHAPE).engine(prompt_length=32)
    drawn = types.Sampling(processors=(other,))
    engine.add(specjax.Request(PROMPTS[0], sampling=drawn))


def test_a_call_may_have_other_processors(pair, decoder):
    other = (processors.SuppressTokens((5, 6)),)
    wanted = specjax.Decoder(pair, max_draft=3, processors=other, **SHAPE)(PROMPTS).texts
    assert decoder(PROMPTS, processors=other).texts == wanted
    none = specjax.Decoder(pair, max_draft=3, **SHAPE)
    assert decoder(PROMPTS, processors=()).texts == none(PROMPTS).texts
    assert none(PROMPTS, processors=other).texts == wanted


def test_a_decoder_with_a_constraint_per_row_encodes(pair):
    each = processors.Regex(("[a-z]+", "[a-z ]+"), which=np.arange(2))
    decoder = specjax.Decoder(pair, processors=(each,), **SHAPE)
    assert decoder.encode("ba").tolist() == specjax.Decoder(pair, **SHAPE).encode("ba").tolist()
    with pytest.raises(ValueError, match="a prompt has 33 tokens"):
        decoder.encode(np.full(33, 3), "a prompt")


def test_a_description_has_every_strength(pair, decoder):
    again = specjax.Decoder(pair, max_draft=3, processors=STACK, **SHAPE).describe()
    assert again == decoder.describe()
    other = (processors.MinP(0.03), *STACK[1:])
    assert specjax.Decoder(pair, max_draft=3, processors=other, **SHAPE).describe() != again
    many = np.linspace(1.0, 2.0, 2000, dtype=np.float32)
    written = [
        specjax.Decoder(
            pair, processors=(processors.RepetitionPenalty(strengths),), **SHAPE
        ).describe()
        for strengths in (many, np.where(np.arange(2000) == 1000, 9.0, many))
    ]
    assert written[0] != written[1]
    assert "processors" not in specjax.Decoder(pair, **SHAPE).describe()


@dataclasses.dataclass(frozen=True)
class NoPytree(types.Processor):
    def process(self, params, state, logits):
        return logits


@pytest.mark.parametrize(
    ("processor", "kind", "message"),
    [
        (NoPytree(), AssertionError, "NoPytree is no pytree: decorate it with @types.traced_data"),
        (processors.Regex("中"), ValueError, r"Regex\(.中.\): the tokenizer's tokens can write no"),
    ],
)
def test_a_processor_that_cannot_work_is_refused(pair, processor, kind, message):
    with pytest.raises(kind, match=message):
        specjax.Decoder(pair, processors=(processor,), **SHAPE)


def test_a_request_cannot_have_another_constraint(pair):
    decoder = specjax.Decoder(pair, processors=(processors.Regex("[a-d]{3}"),), **SHAPE)
    engine = decoder.engine(prompt_length=32)
    other = types.Sampling(processors=(processors.Regex("[e-h]{3}"),))
    with pytest.raises(ValueError, match=r"is Constraint\(.*\[e-h\].*the engine has .*\[a-d\]"):
        engine.add(specjax.Request(PROMPTS[0], sampling=other))
    same = types.Sampling(processors=(processors.Regex("[a-d]{3}"),))
    engine.add(specjax.Request(PROMPTS[0], sampling=same))
    rows = []
    while engine.unfinished:
        rows += engine.step()
    assert set(rows[0].text) <= set("abcd") and len(rows[0].text) == 3


def test_a_constraint_needs_an_end_of_sequence(pair, monkeypatch):
    given = (processors.Regex("[0-9]{3}"),)
    monkeypatch.setattr(pair.verifier.tokenizer, "eos_ids", ())
    with pytest.raises(ValueError, match="needs a tokenizer with an end-of-sequence token"):
        specjax.Decoder(pair, processors=given, **SHAPE)


def test_samples_and_greedy_block_follow_their_processors(pair, decoder):
    """Each of several samples is the row of its own id; greedy block verification is greedy."""
    samples = decoder(PROMPTS[:2], num_samples=2)
    one = decoder([PROMPTS[0]] * 2 + [PROMPTS[1]] * 2)
    assert samples.texts == one.texts
    given = {"processors": STACK, "sampling": GREEDY}
    alone = specjax.Decoder(pair.verifier, **given, **SHAPE)(PROMPTS).texts
    greedy = specjax.Decoder(
        pair, verification=verification.GreedyBlock(), max_draft=3, min_draft=3, **given, **SHAPE
    )
    assert greedy(PROMPTS).texts == alone


def test_a_mesh_gives_the_same_texts(tmp_path):
    where = tiny_pair.write_pair(tmp_path)
    options = {"max_draft": 3, "processors": STACK, "sampling": GREEDY, **SHAPE}
    plain = specjax.Decoder(specjax.load_pair(**where), **options)(PROMPTS).texts
    mesh = specjax.partitioning.make_mesh(data=4, model=2)
    assert specjax.Decoder(specjax.load_pair(**where, mesh=mesh), **options)(PROMPTS).texts == plain
