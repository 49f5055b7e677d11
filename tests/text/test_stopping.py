"""A Decoder with each stopping policy: the verifier's own text, and lengths that follow."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import specjax
from specjax import drafting, environment
from specjax.acceptance_head import Head, HeadConfig, init_head
from specjax.compilation import count_compilations
from specjax.text import setting
from specjax.types import Sampling
from tests import pages, tiny_pair

PAGE = "docs/adaptive_drafts.md"
SHAPE = {"max_new_tokens": 12, "batch_size": 3, "buckets": (32,)}
PROMPTS = tiny_pair.sentences(7, seed=3)


@pytest.fixture(scope="module")
def pair():
    small, large = tiny_pair.tabular(1), tiny_pair.tabular(2)
    config = HeadConfig(small.width, 1)
    head = Head(config, init_head(config, jax.random.key(0)), small.weights_fingerprint)
    return specjax.Pair(dataclasses.replace(small, head=head), large)


@pytest.fixture(scope="module")
def alone(pair):
    return specjax.Decoder(pair.verifier, sampling=Sampling(0.0), **SHAPE)(PROMPTS).texts


def mean_drafted(result):
    """Tokens per round."""
    return result.info.per_row.drafted.sum() / result.info.per_row.rounds.sum()


def costs(of, **changes):
    verifier = ((1.0,) * 4,) * 2
    made = drafting.Costs((1, 8), (1, 2, 4, 5), (0.01, 0.01), verifier)
    own = {"machine": environment.machine(), "pair": of.fingerprint}
    return dataclasses.replace(made, **{**own, **changes})


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(drafting.Confidence(0.02), marks=pytest.mark.exhaustive),
        pytest.param(drafting.Entropy(1.8), marks=pytest.mark.exhaustive),
        drafting.Survival(),
        drafting.Survival(drafting.OnlineEstimate(shared=True), 0.9),
        drafting.Budget(7),
    ],
)
def test_greedy_text_is_the_verifiers_own(pair, alone, policy):
    """Slots are refilled, rows draft different numbers of tokens, some lag behind."""
    decoder = specjax.Decoder(pair, max_draft=4, stopping=policy, sampling=Sampling(0.0), **SHAPE)
    result = decoder(PROMPTS)
    assert result.texts == alone
    assert decoder.describe()["stopping"] == repr(policy)


def test_bounds_and_thresholds_set_the_lengths(pair):
    def decoder(policy, **options):
        return specjax.Decoder(pair, max_draft=4, stopping=policy, **options, **SHAPE)

    def drafted(*policy, **options):
        return mean_drafted(decoder(*policy, **options)(PROMPTS))

    all_four = drafted(drafting.Confidence(0.0))
    with count_compilations() as counted:  # another threshold compiles nothing
        assert drafted(drafting.Confidence(1.0)) <= 1.0
    assert counted.compiled == counted.read == 0
    assert all_four > 3.0  # a row's last rounds may be cut by its length
    assert drafted(drafting.Confidence(1.0), min_draft=3) > 2.5
    # A policy that is bound has its own numbers.
    own = specjax.WithParams(*drafting.Confidence(0.3).bind())
    assert decoder(own)(PROMPTS).texts == decoder(drafting.Confidence(0.3))(PROMPTS).texts


def test_a_budget_that_the_rows_fill_is_reported(pair):
    def decoder(tokens, **options):
        return specjax.Decoder(pair, stopping=drafting.Budget(tokens), **options, **SHAPE)

    message = r"Budget\(tokens=2\) drafts nothing while 2 rows may draft.*: give more tokens"
    with pytest.warns(UserWarning, match=message):
        result = decoder(2)(PROMPTS[:2])
    assert result.info.drafted == 0
    with pytest.warns(UserWarning, match="while 3 rows may draft"):
        decoder(3).engine(prompt_length=32)
    # No warning: a third row's tokens are left; and a smallest draft comes on top.
    assert decoder(3)(PROMPTS[:2]).info.drafted > 0
    assert decoder(2)(PROMPTS[:3], draft_limit=[0, 5, 0]).info.drafted > 0
    assert decoder(2, min_draft=1)(PROMPTS[:2]).info.drafted > 0


@pytest.mark.parametrize(
    "policy", [drafting.Confidence(0.4), drafting.Survival(), drafting.FixedLength()], ids=repr
)
def test_numbers_of_a_policy_are_given_once(pair, policy):
    name = f"{type(policy).__name__}(...)"
    message = f"stopping=WithParams({name}, params) must have no params, because this policy ne"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        specjax.Decoder(pair, stopping=specjax.WithParams(policy, 5), **SHAPE)
    assert str(error.value).endswith(f": write stopping={policy!r}")


def test_rates_are_those_of_the_paper(pair):
    info = specjax.Decoder(pair, max_draft=4, **SHAPE)(PROMPTS).info
    rows = info.per_row
    emitted = rows.emitted.sum()
    assert info.verification_rate == pytest.approx(rows.verifier_calls.sum() / emitted)
    # What was drafted or drawn was emitted or discarded, but for a last token past the end.
    lost = rows.drafted + rows.rounds - rows.emitted - rows.discarded
    assert set(lost.tolist()) <= {0, 1}
    assert info.discard_rate == pytest.approx(rows.discarded.sum() / emitted)


def test_costs_decide(pair, alone):
    def decode(**changes):
        policy = drafting.CostAware(costs(pair, **changes))
        decoder = specjax.Decoder(
            pair, max_draft=4, stopping=policy, sampling=Sampling(0.0), **SHAPE
        )
        return decoder(PROMPTS)

    cheap, dear = decode(), decode(draft=(5.0, 5.0))
    assert cheap.texts == dear.texts == alone
    assert mean_drafted(cheap) > 1.0 and mean_drafted(dear) == 0.0
    for of, options, message in (
        ({"machine": "elsewhere"}, {"max_draft": 4}, r"on another machine \(elsewhere, not"),
        ({}, {"max_draft": 6}, "of up to 4 tokens, but max_draft is 6, .*--drafts 6"),
    ):
        policy = drafting.CostAware(costs(pair, **of))
        with pytest.warns(UserWarning, match=message):
            specjax.Decoder(pair, stopping=policy, **options, **SHAPE)


def test_a_draft_ends_with_the_text(pair):
    """What is drafted past an end of text could never be emitted."""
    policy = drafting.Confidence(0.0)
    decoder = specjax.Decoder(pair, max_draft=8, stopping=policy, **SHAPE)
    rows = decoder(PROMPTS, seed=1).info.per_row
    fixed = specjax.Decoder(pair, max_draft=8, **SHAPE)(PROMPTS, seed=1).info.per_row
    assert rows.drafted.sum() / rows.rounds.sum() < fixed.drafted.sum() / fixed.rounds.sum()


@pytest.mark.exhaustive
def test_the_page_runs_as_printed(pair, monkeypatch):
    monkeypatch.setattr(specjax, "load_pair", lambda: pair)
    text, names = (pages.ROOT / PAGE).read_text(encoding="utf-8"), pages.run_page(PAGE)
    # Given costs are used, and are not measured again.
    assert names["again"].costs is None
    assert f"    {names['chosen'].length.why}\n" in text
    assert "rows=(1, 4)" in str(names["again"].describe()["stopping"])
    assert len(names["result"]) == 16


def test_costs_are_measured_where_none_are_given(pair, alone, monkeypatch):
    asked = []

    def measured(of, rows, widths, prompt_length):
        assert prompt_length == SHAPE["buckets"][0]
        asked.append((rows, widths))
        return costs(of)

    monkeypatch.setattr(setting, "measure_costs", measured)

    def decoder(policy=None, **options):
        policy = drafting.CostAware(policy)
        options |= {"max_draft": 4, "sampling": Sampling(0.0), **SHAPE}
        return specjax.Decoder(pair, stopping=policy, **options)

    first = decoder()
    assert asked == [([1, first.batch_size], (1, 2, 4, 5))] and first.costs == costs(pair)
    assert first(PROMPTS).texts == alone
    with setting.use_costs(costs(pair)):
        again = decoder()
    assert len(asked) == 1 and again.costs == first.costs
    with setting.use_costs(dataclasses.replace(costs(pair), pair="another")):
        decoder()
    assert len(asked) == 2
    own, given = decoder(costs(pair)), decoder(costs=costs(pair))
    assert len(asked) == 2 and own.costs is given.costs is given.length is None
    assert first.describe() == again.describe() == own.describe() == given.describe()


# A drafted token costs a tenth of a verifier's pass, and wide passes cost no more.
CHEAP = {"draft": (0.1, 0.1), "temperatures": (0.0, 1.0)}


@pytest.mark.parametrize(("rates", "length"), [((0.7, 0.7), 4), ((0.9, 0.3), 3), ((0.0, 0.4), 1)])
def test_costs_choose_the_length_of_drafts(pair, alone, rates, length):
    """Between the temperatures of the measurement the acceptance is interpolated."""
    given = costs(pair, acceptance=rates, **CHEAP)
    warm = Sampling(np.array([0.0, 1.0], np.float32))  # for calls with two prompts
    decoder = specjax.Decoder(pair, costs=given, sampling=warm, **SHAPE)
    assert decoder.method.max_draft == decoder.length.max_draft == length
    assert f"at an acceptance of {np.mean(rates):.2f}" in decoder.length.why
    by_hand = specjax.Decoder(pair, max_draft=length, sampling=warm, **SHAPE)
    assert by_hand.length is None and by_hand.describe() == decoder.describe()
    assert decoder(PROMPTS, sampling=Sampling(0.0)).texts == alone


def test_where_no_draft_pays_the_verifier_decodes_alone(pair, alone):
    given = costs(pair, acceptance=(0.05, 0.05), **CHEAP)
    decoder = specjax.Decoder(pair, costs=given, sampling=Sampling(0.0), **SHAPE)
    assert decoder.length.max_draft == 0 and decoder.length.why.startswith("G = 0: no draft pays")
    own = specjax.Decoder(pair.verifier, sampling=Sampling(0.0), **SHAPE)
    assert decoder.describe() == own.describe()
    named = specjax.Decoder(pair, method="VerifierAlone", sampling=Sampling(0.0), **SHAPE)
    assert decoder.models is named.models and repr(decoder) == repr(named)
    result = decoder(PROMPTS, rule=specjax.rules.Lossless())
    assert result.texts == alone and "drafter" not in result.info.per_row.calls


RATES = {"acceptance": (0.7, 0.7), **CHEAP}
AWARE = {"stopping": drafting.CostAware()}


@pytest.mark.parametrize(
    ("options", "of", "message"),
    [
        ({"max_draft": 3}, RATES, "costs must be left out: they are for stopping=CostAware"),
        ({"min_draft": 2}, RATES, "costs must be left out: .* min_draft, stopping and widths are"),
        ({"widths": (1, 6)}, RATES, "costs must be left out: "),
        ({"stopping": "Confidence(0.4)"}, RATES, "costs must be left out"),
        ({"rule": "OPT(0.2)"}, RATES, "costs must be left out"),
        ({"drafting": "Lookup()"}, RATES, "costs must be left out"),
        ({"method": "TokenCascade()", "rule": "Chow(0.3)"}, RATES, "costs must be left out"),
        ({"sampling": Sampling(1.5)}, RATES, "which must include 1.5 to 1.5: measure it with `sp"),
        ({"batch_size": 9}, RATES, "the costs are those of 1 to 8 rows, but the batch has 9"),
        ({"costs": {}}, RATES, "costs must be "),
        ({}, {}, r"the temperatures \(\), which must include"),
        (
            {},
            {**RATES, "widths": (1,), "verifier": ((1.0,),) * 2},
            r"costs has the widths \(1,\), and a draft needs",
        ),
        ({**AWARE, "batch_size": 9}, {}, "to 8 rows, but the batch has 9"),
        (
            {**AWARE, "batch_size": 1},
            {"rows": (4, 8)},
            "are those of 4 to .* rows, but the batch has 1: .*--rows 1 4",
        ),
        (AWARE, {"pair": "a+b"}, r"costs belong to another pair \(a\+b, not"),
    ],
)
def test_costs_that_do_not_fit_are_refused(pair, options, of, message):
    given = {"costs": costs(pair, **of), "batch_size": 8, **options}
    with pytest.raises(specjax.UserError, match=message):
        specjax.Decoder(pair, **given)


def test_an_engine_has_no_more_rows_than_the_costs(pair):
    decoder = specjax.Decoder(pair, batch_size=8, max_draft=4, costs=costs(pair), **AWARE)
    with pytest.raises(ValueError, match="rows must be at most 8, .* got 9: make the Decoder"):
        decoder.engine(prompt_length=8, rows=9)
