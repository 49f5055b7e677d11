"""`Decoder(drafting=...)`: whatever drafts, greedy texts are the verifier's own."""

import dataclasses
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafting, rules, testing, types, verification
from specjax.data.examples import read_examples
from specjax.drafting import Bigram, Branches, Cascade, Lookup, Tree
from specjax.text import setting
from specjax.text.directories import built_in_pair
from specjax.types import Sampling
from tests import tiny_pair
from tests.variants import variants

GREEDY = {"sampling": Sampling(0.0)}
SHAPE = {"max_new_tokens": 20, "batch_size": 2, "buckets": (32,), **GREEDY}
PROMPTS = [[100, 50], [7], [200, 9, 31]]
TWO = ("drafter", "small")
K = ((2, 2), (0, 2))
DEEP = {"lengths": ((2, 1, 1), (0, 2, 1), (0, 0, 4)), "models": TWO, "last": Lookup(overlap=True)}
LENIENT = Cascade(((4, 0), (0, 3)), models=TWO, lenience=3.0)
PLANS = {
    "copy": Lookup(overlap=True),
    "copy before the drafter": Lookup(min_match=6, max_copy=7),
    "copies": Lookup(copies=3, max_copy=3),
    "binary tree": Tree(depth=3, width=2),
    "most probable": Tree(depth=2, width=4, children="top"),
    "kept": Tree(depth=4, width=3, beam=3, keep=12, children="top"),
    "own tree": Tree(parents=(0, 0, 0, 1, 1, 2, 4), children="without"),
    "independent": Tree(depth=3, width=2, children="independent"),
    "chains of two models": Branches(TWO),
    "branches": Branches((Tree(depth=3, width=2), "drafter", Lookup(copies=2))),
    "siblings": Cascade([[1, 3], [0, 1]], last=Lookup(), width=8),
    "one after the other": Cascade(((3, 2), (0, 0)), models=TWO),
    "copies below the drafter": Cascade(((3, 2), (0, 3)), last=Lookup(), rules=rules.TokenV3(0.7)),
    "two": LENIENT,
    "deep, cumulative": Cascade(**DEEP, cumulative=True, lenience=2.0),
    "deep, rules": Cascade(**DEEP, rules=(rules.TokenV3(0.7), None), lenience=5.0),
}
WALKED = {"most probable", "kept"}
OWN = {"residual", "bonus", "verifier"}


@pytest.fixture(scope="module")
def models():
    """Each nearer to the verifier than the next one; its greedy texts soon repeat themselves."""
    verifier = tiny_pair.tabular(1)
    table = np.array(verifier.params)
    table[:, 1] = -9.0  # texts do not end by themselves
    before = np.arange(len(table))
    table[before, 100 + (before - 99) % 12] += 5.5
    verifier = dataclasses.replace(verifier, params=jnp.asarray(table))
    named = {"drafter": 0.4, "small": 0.8, "least": 1.6}
    levels = {name: tiny_pair.near(verifier, i, x) for i, (name, x) in enumerate(named.items(), 5)}
    return specjax.Pair(verifier=verifier, **levels)


@pytest.fixture(scope="module")
def pair(models):
    return specjax.Pair(models.named["drafter"], models.verifier)


@pytest.fixture(scope="module")
def alone(models):
    return specjax.Decoder(models.verifier, **SHAPE)(PROMPTS)


QUICK = ("copy", "copies", "binary tree", "branches", "two", "copies below the drafter")


@pytest.mark.parametrize("name", variants(PLANS, *QUICK))
def test_greedy_texts_are_the_verifiers_own(models, alone, name):
    plan, judge = PLANS[name], verification.Walk() if name in WALKED else None
    decoder = specjax.Decoder(models, drafting=plan, verification=judge, **SHAPE)
    result = decoder(PROMPTS, sources=True)
    assert result.texts == alone.texts
    # Not because nothing was drafted, nor because all was right.
    assert result.info.verifier_calls < alone.info.verifier_calls
    assert 0.0 < result.info.acceptance_rate < 0.98
    if plan.drafts_trees:
        assert decoder.method.verification == (judge or verification.Traversal())
    calls, drafts = result[0].info.calls, {*plan.model_names}
    assert set(calls) == {"verifier", *drafts} == set(decoder.describe()["models"])
    assert all(calls.values()), calls
    sources = [source for row in result for source in row.sources]
    assert {*sources} <= OWN | drafts | {"lookup"}
    drafted = sum(source not in OWN for source in sources)
    # Tokens after a row's end are accepted, too, but are not part of it.
    assert 0 < drafted <= result.info.accepted


def of_built_in(name):
    """The pair, and a drafter below its own: the small one, or the own one with noise."""
    pair = specjax.load_pair(name)
    directory = built_in_pair(name) / "drafter_small"
    if directory.is_dir():
        small = specjax.load_text_model(directory)
    else:
        keys = iter(jax.random.split(jax.random.key(0), 500))
        worse = jax.tree.map(
            lambda x: x + 0.1 * jnp.std(x) * jax.random.normal(next(keys), x.shape, x.dtype),
            pair.drafter.params,
        )
        small = dataclasses.replace(pair.drafter, params=worse, head=None, name="noisy")
    return specjax.Pair(verifier=pair.verifier, drafter=pair.drafter, small=small)


def a_hundred(name):
    """The samples, and their beginnings."""
    (source,) = built_in_pair(name).glob("samples.*")
    field = "en" if source.suffix == ".tsv" else "question"
    samples = [example.inputs for example in read_examples(source, inputs_field=field)]
    words = [text.split() for text in samples]
    cut = [" ".join(x[: size * len(x) // 4]) for size in (2, 3, 1) for x in words]
    return [*samples, *cut][:100]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "longest", "bucket"), [("multi30k_ende", 48, 64), ("gsm8k", 96, 256)]
)
def test_no_draft_changes_a_greedy_output_of_a_built_in_pair(name, longest, bucket):
    given, prompts = of_built_in(name), a_hundred(name)
    shape = {"max_new_tokens": longest, "batch_size": 25, "buckets": (bucket,), **GREEDY}

    def decode(models, **options):
        return specjax.Decoder(models, **options, **shape)(prompts, progress=False)

    want = decode(given.verifier)
    for kind, plan in PLANS.items():
        judge = verification.Walk() if kind in WALKED else None
        found = decode(given, drafting=plan, verification=judge)
        wrong = [i for i, text in enumerate(found.texts) if text != want.texts[i]]
        assert not wrong, (kind, wrong)
        assert found.info.verifier_calls < want.info.verifier_calls, kind
    # The control: under a rule at the top, texts do change.
    assert decode(given, drafting=LENIENT, rule=rules.OPT(0.9)).texts != want.texts


@pytest.mark.exhaustive
def test_branches_accept_no_less_than_each_drafter(pair):
    plans = (None, Lookup(max_copy=5), Branches(("drafter", Lookup(max_copy=5))))
    calls = [specjax.Decoder(pair, drafting=x, **SHAPE)(PROMPTS[:1]).info for x in plans]
    assert calls[2].verifier_calls <= min(x.verifier_calls for x in calls[:2])


@pytest.mark.exhaustive
def test_models_are_given_by_name_by_directory_and_loaded(tmp_path):
    paths = tiny_pair.write_pair(tmp_path)
    least = tiny_pair.write_model(tmp_path / "least", "drafter", seed=7)
    tiny_pair.write_vocabulary(least)
    pair, loaded = specjax.load_pair(**paths), specjax.text.load_text_model(least)
    shape = {**SHAPE, "max_new_tokens": 8}
    prompts = tiny_pair.sentences(3)
    alone = specjax.Decoder(pair.verifier, **shape)(prompts).texts
    plans = [Cascade(((2, 1), (0, 1)), models=("drafter", one)) for one in (least, loaded)]
    by_path, by_model = (specjax.Decoder(pair, drafting=plan, **shape) for plan in plans)
    assert by_path(prompts).texts == alone
    # One and the same decoder: its programs are shared.
    assert by_path.method == by_model.method
    described = by_path.describe()
    assert described == by_model.describe()
    assert described["models"]["level_2"] == loaded.fingerprint
    first, second = described["drafter"]["drafters"]
    assert (first["name"], first["min_draft"], second["name"]) == ("drafter", 2, "level_2")
    # Without a drafter of its own; a copy follows what the model alone has drafted.
    plan = Cascade([[2, 1], [0, 0]], models=(least,), last=Lookup())
    assert specjax.Decoder(pair.verifier, drafting=plan, **shape)(prompts).texts == alone


def test_a_stopping_policy_ends_the_drafts_of_the_lowest_model(models, alone):
    plan = Cascade(lengths=K, models=TWO)

    def made(threshold, **options):
        policy = drafting.Confidence(threshold)
        return specjax.Decoder(models, drafting=plan, stopping=policy, **options, **SHAPE)

    lowest = [getattr(x, "drafter", x) for x in made(0.6, min_draft=9).method.drafter.drafters]
    assert [type(part.stopping) for part in lowest] == [drafting.Confidence] * 2
    # No level is asked for more than K says.
    assert [(part.max_draft, part.min_draft) for part in lowest] == [(2, 2), (2, 2)]
    free, other = made(0.6), made(0.3)
    assert free(PROMPTS).texts == alone.texts
    assert other.method == free.method
    assert other.describe()["own_params"] != free.describe()["own_params"]


def test_each_level_has_its_own_rule_and_strength(models):
    def made(**options):
        plan = Cascade(lengths=K, models=TWO, **options)
        return specjax.Decoder(models, drafting=plan, **SHAPE)

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
def test_a_rule_below_changes_what_a_rule_above_mixes(models):
    """pi = T(T'(q', p'), p): where the top keeps the draft, the level below decides."""
    shape, keeps = {**SHAPE, "max_new_tokens": 6}, rules.TokenV3(1.0)
    texts = {}
    for level, rule in {"least": keeps, "drafter": rules.Lossless()}.items():
        plan = Cascade(((2, 0), (0, 2)), models=("drafter", "least"), rules=rule)
        texts[level] = specjax.Decoder(models, drafting=plan, rule=keeps, **shape)(PROMPTS).texts
        assert texts[level] == specjax.Decoder(models.named[level], **shape)(PROMPTS).texts, level
    assert texts["least"] != texts["drafter"]


def test_lookups_before_the_drafter(models, alone):
    plan, policy = PLANS["copy before the drafter"], drafting.Confidence(0.1)
    decoder = specjax.Decoder(models, drafting=plan, max_draft=3, stopping=policy, **SHAPE)
    result, drafter = decoder(PROMPTS), decoder.method.drafter
    assert result.texts == alone.texts
    assert isinstance(drafter, drafting.lookup.LookupFirst) and drafter.drafter.max_draft == 3
    assert decoder.method.max_draft == 7 and result[0].info.calls["drafter"] > 0
    assert result.info.per_row.drafted_lengths[:, 4:].sum() > 0, "nothing was copied"


def test_costs_are_those_of_the_widths_that_copies_need(pair, alone, monkeypatch):
    asked = []

    def measured(pair, rows, widths, **_):
        asked.append(tuple(widths))
        times = ((1.0,) * len(widths),) * len(rows)
        return drafting.Costs(tuple(rows), tuple(widths), (0.01,) * len(rows), times)

    monkeypatch.setattr(setting, "measure_costs", measured)
    options = {"drafting": Lookup(min_match=2, max_copy=6), "stopping": drafting.CostAware()}
    decoder = specjax.Decoder(pair, max_draft=3, **options, **SHAPE)
    assert asked == [(1, 2, 4, 7)] and decoder.method.verifier_widths == asked[0]
    assert decoder.method.drafter.drafter.max_draft == 3
    assert decoder(PROMPTS).texts == alone.texts
    with pytest.raises(ValueError, match=r"G \+ 1 = 7, got \(1, 4\)"):
        specjax.Decoder(pair, widths=(1, 4), max_draft=3, **options, **SHAPE)


@pytest.fixture(scope="module")
def turning():
    """It goes through five tokens again and again."""
    table = np.full((260, 259), -9.0, np.float32)
    table[np.arange(260), 100 + (np.arange(260) - 99) % 5] = 9.0
    words = tiny_pair.tabular(1).tokenizer
    return specjax.TextModel(testing.TabularModel(259, 1), jnp.asarray(table), words)


def test_a_bigram_table_goes_on_and_is_known_by_the_fingerprint(turning):
    successors = np.full(259, -1, np.int32)
    successors[100:105] = [101, 102, 103, 104, 100]
    words = turning.tokenizer.fingerprint
    decoders = [
        specjax.Decoder(
            turning,
            drafting=Lookup(min_ngram=30, bigram=Bigram(np.roll(successors, by), words)),
            max_draft=4,
            **SHAPE,
        )
        for by in (0, 1)
    ]
    right = decoders[0](PROMPTS)
    assert right.texts == specjax.Decoder(turning, **SHAPE)(PROMPTS).texts
    assert right.info.acceptance_rate > 0.7
    assert decoders[0].describe()["own_params"] != decoders[1].describe()["own_params"]


def test_a_plan_of_one_s_own_uses_models_by_their_names(pair, alone):
    @dataclasses.dataclass(frozen=True)
    class Middle(types.Drafting):
        model_names = ("middle",)
        left_out = MappingProxyType({})

        def bind(self, models):
            return drafting.Chain("middle").bind(models)

    models = specjax.Pair(verifier=pair.verifier, middle=pair.verifier, drafter=pair.drafter)
    decoder = specjax.Decoder(models, drafting=Middle(), max_draft=3, **SHAPE)
    assert decoder.method.drafter.model is pair.verifier.model
    result = decoder(PROMPTS)
    assert result.texts == alone.texts and result.info.acceptance_rate > 0.7
    with pytest.raises(ValueError, match="needs a model named middle, got drafter, verifier"):
        specjax.Decoder(pair, drafting=Middle())


def test_the_trees_of_ones_own_drafter_may_have_any_size(pair):
    large = drafting.lookup.LookupTree(Lookup(max_copy=200, vocab_size=259), 3)
    own = {"drafting": specjax.WithParams(large), "verification": verification.Traversal()}
    assert specjax.Decoder(pair.verifier, **own).method.max_draft == 600
