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


def test_greedy_texts_are_those_of_the_verifier_alone(pair, paths):
    given = {"processors": STACK, "sampling": GREEDY}
    wanted = specjax.Decoder(pair.verifier, **given, **SHAPE)(PROMPTS)
    plain = specjax.Decoder(pair, max_draft=3, sampling=GREEDY, **SHAPE)(PROMPTS)
    assert plain.texts != wanted.texts
    assert all(len(tokens) >= 6 for tokens in wanted.tokens)
    mesh = specjax.load_pair(**paths, mesh=specjax.partitioning.make_mesh(data=4, model=2))
    fixed = {"verification": verification.GreedyBlock(), "min_draft": 3}
    for models, more in (
        *((pair, {}), (pair, {"process_drafts": False}), (pair, fixed)),
        (mesh, {}),
    ):
        decoder = specjax.Decoder(models, max_draft=3, **given, **more, **SHAPE)
        assert decoder(PROMPTS).texts == wanted.texts, more


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
    # A request without processors has the engine's.
    engine.add(specjax.Request(PROMPTS[1], id=1, sampling=types.Sampling(1.0)))
    found = tiny_pair.finished_rows(engine)
    assert [found[i, 0].text for i in range(5)] == [*together, decoder(PROMPTS).texts[1]]
    for wrong, message in (
        ((processors.MinP(0.1),), r"processors\[0\] is MinP.*, the engine has RepetitionP"),
        (stack(strengths), "processors of a request must be .*, a number each"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add(specjax.Request("ba", sampling=types.Sampling(processors=wrong)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (processors.SuppressTokens((5, 6)), processors.SuppressTokens((6, 5, 6))),
        (processors.MinNewTokens(3, (5, 1)), processors.MinNewTokens(4, (1, 5))),
        (processors.LogitBias({5: 1.0, 6: 2.0}), processors.LogitBias({6: 2.0, 5: 1.0})),
        (processors.ForcedTokens({0: 5, 1: 6}), processors.ForcedTokens({1: 6, 0: 5})),
        (processors.Regex("[a-d]{3}"), processors.Regex("[a-d]{3}")),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_request_may_have_the_engines_tokens_in_another_order(pair, one, other):
    engine = specjax.Decoder(pair, processors=(one,), **SHAPE).engine(prompt_length=32)
    engine.add(specjax.Request("ba", sampling=types.Sampling(processors=(other,))))
    if isinstance(one, processors.Regex):
        another = types.Sampling(processors=(processors.Regex("[e-h]{3}"),))
        with pytest.raises(ValueError, match=r"is Constraint\(.*\[e-h\].*the engine has .*\[a-d\]"):
            engine.add(specjax.Request("ba", sampling=another))
        (row,) = tiny_pair.finished_rows(engine).values()
        assert set(row.text) <= set("abcd") and len(row.text) == 3


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
    ("processor", "eos_ids", "message"),
    [
        (NoPytree(), (1,), "NoPytree is no pytree: decorate it with @types.traced_data"),
        (
            processors.Regex("中"),
            (1,),
            r"^Regex\(.中.\): the tokenizer's tokens can write no text that matches: "
            "check the pattern or schema, and that its characters are in the vocabulary$",
        ),
        (processors.Regex("[0-9]{3}"), (), "needs a tokenizer with an end-of-sequence token"),
    ],
)
def test_a_processor_that_cannot_work_is_refused(pair, monkeypatch, processor, eos_ids, message):
    monkeypatch.setattr(pair.verifier.tokenizer, "eos_ids", eos_ids)
    with pytest.raises((AssertionError, ValueError), match=message):
        specjax.Decoder(pair, processors=(processor,), **SHAPE)
