"""`Decoder(drafting=...)`: drafts copied from the text, alone or before a model's."""

import dataclasses
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafting, testing, types, verification
from specjax.drafting import Bigram
from specjax.text import setting
from specjax.types import Sampling
from tests import tiny_pair

SHAPE = {"max_new_tokens": 20, "batch_size": 2, "buckets": (32,), "sampling": Sampling(0.0)}
PROMPTS = ["abcabc", "an"]


@pytest.fixture(scope="module")
def pair():
    """The verifier goes through the alphabet again and again; the drafter is often wrong."""
    table = np.full((260, 259), -9.0, np.float32)
    table[np.arange(260), 100 + (np.arange(260) - 99) % 5] = 9.0
    words = tiny_pair.tabular(1).tokenizer
    verifier = specjax.TextModel(testing.TabularModel(259, 1), jnp.asarray(table), words)
    return specjax.Pair(drafter=tiny_pair.tabular(2), verifier=verifier)


@pytest.fixture(scope="module")
def expected(pair):
    return specjax.Decoder(pair.verifier, **SHAPE)(PROMPTS).texts


def test_lookups_alone_need_no_drafter(pair, expected):
    plan = specjax.drafting.Lookup(overlap=True)
    decoders = [
        specjax.Decoder(models, drafting=plan, max_draft=4, **SHAPE)
        for models in (pair.verifier, pair)
    ]
    results = [decoder(PROMPTS) for decoder in decoders]
    assert [result.texts for result in results] == [expected] * 2
    assert set(results[1][0].info.calls) == {"verifier"}
    assert results[0].info.tokens_per_verifier_call > 2
    # The drafter is not used, and determines nothing.
    assert "drafter" in pair.named and set(decoders[1].describe()["models"]) == {"verifier"}
    assert "Lookup" in str(decoders[1].describe()["drafter"])


def test_lookups_before_the_drafter(pair, expected):
    plan = specjax.drafting.Lookup(min_match=6, max_copy=7)
    decoder = specjax.Decoder(
        pair, drafting=plan, max_draft=3, stopping=drafting.Confidence(0.1), **SHAPE
    )
    result = decoder(PROMPTS)
    assert result.texts == expected
    assert decoder.method.max_draft == 7
    drafter = decoder.method.drafter
    assert isinstance(drafter, drafting.lookup.LookupFirst) and drafter.drafter.max_draft == 3
    assert result[0].info.calls["drafter"] > 0
    assert result.info.per_row.drafted_lengths[:, 4:].sum() > 0, "nothing was copied"


def test_costs_are_those_of_the_widths_that_copies_need(pair, expected, monkeypatch):
    asked = []

    def measured(pair, rows, widths, **_):
        asked.append(tuple(widths))
        times = ((1.0,) * len(widths),) * len(rows)
        return drafting.Costs(tuple(rows), tuple(widths), (0.01,) * len(rows), times)

    monkeypatch.setattr(setting, "measure_costs", measured)
    policy = {"max_draft": 3, "stopping": drafting.CostAware()}
    plan = specjax.drafting.Lookup(min_match=2, max_copy=6)
    decoder = specjax.Decoder(pair, drafting=plan, **policy, **SHAPE)
    assert asked == [(1, 2, 4, 7)] and decoder.method.verifier_widths == asked[0]
    assert decoder.method.drafter.drafter.max_draft == 3
    assert decoder(PROMPTS).texts == expected
    with pytest.raises(ValueError, match=r"G \+ 1 = 7, got \(1, 4\)"):
        specjax.Decoder(pair, drafting=plan, widths=(1, 4), **policy, **SHAPE)
    with pytest.raises(ValueError, match="stopping must be left out: drafting=Lookup"):
        specjax.Decoder(
            pair, drafting=specjax.drafting.Lookup(), stopping=drafting.CostAware(), **SHAPE
        )


def test_a_bigram_table_goes_on_and_is_known_by_the_fingerprint(pair, expected):
    successors = np.full(259, -1, np.int32)
    successors[100:105] = [101, 102, 103, 104, 100]
    words = pair.verifier.tokenizer.fingerprint
    tables = [Bigram(successors, words), Bigram(np.roll(successors, 1), words)]
    decoders = [
        specjax.Decoder(
            pair.verifier,
            drafting=specjax.drafting.Lookup(min_ngram=30, bigram=table),
            max_draft=4,
            **SHAPE,
        )
        for table in tables
    ]
    right = decoders[0](PROMPTS)
    assert right.texts == expected and right.info.acceptance_rate > 0.7
    assert decoders[0].describe()["own_params"] != decoders[1].describe()["own_params"]


def test_a_plan_of_one_s_own_uses_models_by_their_names(pair, expected):
    @dataclasses.dataclass(frozen=True)
    class Middle(types.Drafting):
        model_names = ("middle",)
        left_out = MappingProxyType({})

        def bind(self, models):
            return specjax.drafting.Chain("middle").bind(models)

    models = specjax.Pair(verifier=pair.verifier, middle=pair.verifier, drafter=pair.drafter)
    decoder = specjax.Decoder(models, drafting=Middle(), max_draft=3, **SHAPE)
    assert decoder.method.drafter.model is pair.verifier.model
    result = decoder(PROMPTS)
    assert result.texts == expected and result.info.acceptance_rate > 0.7
    with pytest.raises(ValueError, match="needs a model named middle, got drafter, verifier"):
        specjax.Decoder(pair, drafting=Middle())


def test_the_trees_of_ones_own_drafter_may_have_any_size(pair):
    large = drafting.lookup.LookupTree(drafting.Lookup(max_copy=200, vocab_size=259), 3)
    own = specjax.WithParams(large)
    options = {"verification": verification.Traversal()}
    assert specjax.Decoder(pair.verifier, drafting=own, **options).method.max_draft == 600


def test_the_built_in_pair_has_a_table_of_its_own_vocabulary():
    built_in = specjax.load_pair().verifier
    decoder = specjax.Decoder(built_in, drafting=specjax.drafting.Lookup(bigram="built-in"))
    assert np.mean(np.asarray(decoder.params.drafter) >= 0) > 0.5
