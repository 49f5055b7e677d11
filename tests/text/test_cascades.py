"""`Decoder(drafting=specjax.drafting.Cascade(...))`: drafters of several levels."""

import dataclasses

import jax.numpy as jnp
import pytest

import specjax
from specjax import drafting, rules, testing
from specjax.types import Sampling
from tests import tiny_pair
from tests.variants import variants

SHAPE = {"max_new_tokens": 20, "batch_size": 2, "buckets": (32,), "sampling": Sampling(0.0)}
PROMPTS = ["abcabc", "an", "b"]
K = ((2, 2), (0, 2))


def near(model, seed, noise):
    table = model.params + noise * jnp.asarray(testing.random_table(seed, 259, 1))
    return dataclasses.replace(model, params=table)


@pytest.fixture(scope="module")
def models():
    """Four models, each nearer to the verifier than the next one."""
    verifier = tiny_pair.tabular(1)
    named = {"drafter": 0.3, "small": 0.6, "least": 1.2}
    levels = {name: near(verifier, i, size) for i, (name, size) in enumerate(named.items(), 5)}
    return specjax.Pair(verifier=verifier, **levels)


@pytest.fixture(scope="module")
def pair(models):
    return specjax.Pair(models.named["drafter"], models.verifier)


@pytest.fixture(scope="module")
def expected(models):
    return specjax.Decoder(models.verifier, **SHAPE)(PROMPTS).texts


def two(pair, named, **options):
    plan = {"lengths": K, "models": ("drafter", named.named["small"]), **options}
    return specjax.Decoder(pair, drafting=specjax.drafting.Cascade(**plan), **SHAPE)


DEEP = {"lengths": ((3, 1, 0, 2), (0, 2, 1, 0), (0, 0, 2, 1), (0, 0, 0, 3))}
DEEP |= {"models": ("drafter", "small", "least"), "last": specjax.drafting.Lookup(overlap=True)}
GREEDY = {
    "two": {"lengths": K, "models": ("drafter", "small"), "lenience": 3.0},
    "one after the other": {"lengths": ((3, 2), (0, 0)), "models": ("drafter", "small")},
    "copies": {
        "lengths": ((3, 2), (0, 2)),
        "last": specjax.drafting.Lookup(),
        "rules": rules.TokenV3(0.7),
    },
    "deep": DEEP,
    "deep, cumulative": {**DEEP, "cumulative": True, "lenience": 2.0},
    "rules": {**DEEP, "rules": (rules.Lossless(), rules.TokenV3(0.6), None), "lenience": 5.0},
}


@pytest.mark.parametrize("name", variants(GREEDY, "two", "copies"))
def test_greedy_outputs_are_the_verifier_s(models, expected, name):
    plan = specjax.drafting.Cascade(**GREEDY[name])
    decoder = specjax.Decoder(models, drafting=plan, **SHAPE)
    result = decoder(PROMPTS)
    assert result.texts == expected
    # Some tokens stand, others fall.
    assert 0.2 < result.info.acceptance_rate < 0.98
    calls = result[0].info.calls
    used = ("verifier", *plan.models)
    assert set(calls) == set(used) and all(calls[name] > 0 for name in used), calls


@pytest.mark.exhaustive
def test_models_are_given_by_name_by_directory_and_loaded(tmp_path):
    paths = tiny_pair.write_pair(tmp_path)
    least = tiny_pair.write_model(tmp_path / "least", "drafter", seed=7)
    tiny_pair.write_vocabulary(least)
    pair = specjax.load_pair(**paths)
    loaded = specjax.text.load_text_model(least)
    shape = {**SHAPE, "max_new_tokens": 8}
    prompts = tiny_pair.sentences(3)
    alone = specjax.Decoder(pair.verifier, **shape)(prompts).texts
    kinds = {}
    for kind, models in {"path": ("drafter", least), "loaded": ("drafter", loaded)}.items():
        plan = specjax.drafting.Cascade(lengths=[[2, 1], [0, 1]], models=models)
        kinds[kind] = specjax.Decoder(pair, drafting=plan, **shape)
    assert kinds["path"](prompts).texts == alone
    # One and the same decoder: its programs are shared.
    assert kinds["path"].method == kinds["loaded"].method
    described = kinds["path"].describe()
    assert described == kinds["loaded"].describe()
    assert described["models"]["level_2"] == loaded.fingerprint
    first, second = described["drafter"]["drafters"]
    assert (first["name"], first["min_draft"], second["name"]) == ("drafter", 2, "level_2")
    # Without a drafter of its own; a copy follows what the model alone has drafted.
    plan = specjax.drafting.Cascade(
        lengths=[[2, 1], [0, 0]], models=(least,), last=specjax.drafting.Lookup()
    )
    assert specjax.Decoder(pair.verifier, drafting=plan, **shape)(prompts).texts == alone


def test_a_stopping_policy_ends_the_drafts_of_the_lowest_model(pair, models, expected):
    plan = specjax.drafting.Cascade(lengths=K, models=("drafter", models.named["small"]))
    decoder = specjax.Decoder(
        pair, drafting=plan, stopping=drafting.Confidence(0.6), min_draft=9, **SHAPE
    )
    lowest = [
        part.drafter if hasattr(part, "drafter") else part
        for part in decoder.method.drafter.drafters
    ]
    assert [type(part.stopping) for part in lowest] == [drafting.Confidence] * 2
    # No level is asked for more than K says.
    assert [(part.max_draft, part.min_draft) for part in lowest] == [(2, 2), (2, 2)]
    free = specjax.Decoder(pair, drafting=plan, stopping=drafting.Confidence(0.6), **SHAPE)
    assert free(PROMPTS).texts == expected
    other = specjax.Decoder(pair, drafting=plan, stopping=drafting.Confidence(0.3), **SHAPE)
    assert other.method == free.method
    assert other.describe()["own_params"] != free.describe()["own_params"]


def test_each_level_has_its_own_rule_and_strength(pair, models):
    def made(**options):
        return two(pair, models, **options)

    def inner(decoder):
        return decoder.params.drafter[0].rule

    assert type(inner(made())) is rules.Lossless
    lenient = made(lenience=4.0)
    assert type(inner(lenient)) is rules.Lossy and float(inner(lenient).strength) == 0.75
    decoders = [made(rules=rule) for rule in (rules.OPT(0.1), rules.OPT(0.3), rules.Diff(0.3))]
    listed = made(rules=(rules.OPT(0.1), None), lenience=4.0)
    assert float(inner(listed).strength) == float(inner(decoders[0]).strength)
    assert listed.describe() == decoders[0].describe()
    # Another strength compiles nothing, and is another run; another rule is, too.
    assert decoders[0].method == decoders[1].method
    marks = {d.describe()["own_params"] for d in [*decoders, lenient, made()]}
    assert len(marks) == 5


@pytest.mark.exhaustive
def test_a_rule_below_changes_what_a_rule_above_mixes(pair, models):
    """pi = T(T'(q', p'), p): where the top keeps the draft, the level below decides."""
    shape = {**SHAPE, "max_new_tokens": 6}
    texts = {}
    for name, rule in {"keeps": rules.TokenV3(1.0), "reviews": rules.Lossless()}.items():
        plan = specjax.drafting.Cascade(
            lengths=((2, 0), (0, 2)), models=("drafter", "least"), rules=rule
        )
        decoder = specjax.Decoder(models, drafting=plan, rule=rules.TokenV3(1.0), **shape)
        texts[name] = decoder(PROMPTS).texts
    for name, level in {"keeps": "least", "reviews": "drafter"}.items():
        assert texts[name] == specjax.Decoder(models.named[level], **shape)(PROMPTS).texts, name
    assert texts["keeps"] != texts["reviews"]
