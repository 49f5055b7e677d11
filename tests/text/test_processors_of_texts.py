"""Processors of a Decoder: speculation, calls and engines agree; wrong ones are refused."""

import dataclasses

import numpy as np
import pytest

import specjax
from specjax import processors, rules, types
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
def pair(tmp_path_factory):
    return specjax.load_pair(**tiny_pair.write_pair(tmp_path_factory.mktemp("pair")))


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
    with pytest.raises(ValueError, match="must be the engine's with other strengths"):
        drawn = types.Sampling(processors=(processors.MinP(0.1),))
        engine.add(specjax.Request(PROMPTS[0], sampling=drawn))
    # A request without processors has the engine's.
    engine.add(specjax.Request(PROMPTS[1], id=1, sampling=types.Sampling(1.0)))
    rows = []
    while engine.unfinished:
        rows += engine.step()
    assert rows[0].text == decoder(PROMPTS).texts[1]


def test_a_call_may_have_other_processors(pair, decoder):
    other = (processors.SuppressTokens((5, 6)),)
    wanted = specjax.Decoder(pair, max_draft=3, processors=other, **SHAPE)(PROMPTS).texts
    assert decoder(PROMPTS, processors=other).texts == wanted
    none = specjax.Decoder(pair, max_draft=3, **SHAPE)
    assert decoder(PROMPTS, processors=()).texts == none(PROMPTS).texts
    assert none(PROMPTS, processors=other).texts == wanted


def test_a_description_has_every_strength(pair, decoder):
    again = specjax.Decoder(pair, max_draft=3, processors=STACK, **SHAPE).describe()
    assert again == decoder.describe()
    other = (processors.MinP(0.03), *STACK[1:])
    assert specjax.Decoder(pair, max_draft=3, processors=other, **SHAPE).describe() != again
    assert "processors" not in specjax.Decoder(pair, **SHAPE).describe()


@dataclasses.dataclass(frozen=True)
class NoPytree(types.Processor):
    def process(self, params, state, logits):
        return logits


LOOKUP = {"drafting": specjax.Lookup(), "rule": rules.Lossy(0.4)}
WRONG = [
    ({"processors": processors.MinP(0.1)}, TypeError, "processors must be a tuple"),
    ({"processors": "MinP"}, TypeError, "processors must be a tuple"),
    ({"processors": (0.1,)}, TypeError, r"processors\[0\] must be like"),
    ({"processors": (NoPytree(),)}, TypeError, "decorate NoPytree with @types.traced_dataclass"),
    (
        {"processors": (processors.LogitBias({10**6: 1.0}),)},
        ValueError,
        "bias has the token id 1000000, but the verifier has",
    ),
    ({"processors": (processors.SuppressTokens((9999,)),)}, ValueError, "ids has the token id"),
    ({"processors": (processors.ForcedTokens({0: 9999}),)}, ValueError, "tokens has the token id"),
    (
        {"processors": STACK, "sampling": types.Sampling(processors=STACK)},
        ValueError,
        "processors must be given once",
    ),
    (
        {"processors": (processors.SuppressTokens((5,)),), **LOOKUP},
        ValueError,
        "SuppressTokens cannot be used with rule Lossy here, .*LookupDrafter ignores processors",
    ),
    (
        {"processors": STACK, "process_drafts": False, "rule": rules.OPT(0.2)},
        ValueError,
        "process_drafts is False",
    ),
    ({"process_drafts": 3}, TypeError, "process_drafts must be True or False"),
    ({"repetition_penalty": 1.1}, TypeError, r"write processors=\(processors.RepetitionPenalty"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG)
def test_a_wrong_option_is_refused(pair, options, kind, message):
    with pytest.raises(kind, match=message):
        specjax.Decoder(pair, **options, **SHAPE)
