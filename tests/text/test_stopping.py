"""A Decoder with each stopping policy: the verifier's own text, and lengths that follow."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax import drafting, environment
from specjax.acceptance_head import Head, HeadConfig, init_head
from specjax.compilation import count_compilations
from specjax.text import setting
from specjax.types import Sampling
from tests import tiny_pair

PAGE = Path(__file__).parents[2] / "docs" / "adaptive_drafts.md"
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
    def drafted(policy, **options):
        decoder = specjax.Decoder(pair, max_draft=4, stopping=policy, **options, **SHAPE)
        return mean_drafted(decoder(PROMPTS))

    one, all_four = drafted(drafting.Confidence(1.0)), drafted(drafting.Confidence(0.0))
    assert one <= 1.0 and all_four > 3.0  # a row's last rounds may be cut by its length
    assert drafted(drafting.Confidence(1.0), min_draft=3) > 2.5
    message = r"Budget\(tokens=1\) drafts nothing while 3 rows may draft.*: give more tokens"
    with pytest.warns(UserWarning, match=message):
        assert drafted(drafting.Budget(1)) == 0.0  # the rows' own tokens fill it


def test_a_budget_that_the_rows_fill_is_reported(pair):
    def decoder(tokens, **options):
        return specjax.Decoder(pair, stopping=drafting.Budget(tokens), **options, **SHAPE)

    with pytest.warns(UserWarning, match=r"Budget\(tokens=2\) drafts nothing while 2 rows may"):
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
    name = type(policy).__name__
    message = (
        f"stopping=WithParams({name}(...), params) must have no params, because this policy ne"
    )
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        specjax.Decoder(pair, stopping=specjax.WithParams(policy, 5), **SHAPE)
    assert str(error.value).endswith(f": write stopping={policy!r}")


def test_a_policy_that_is_bound_has_its_params(pair):
    whole = specjax.Decoder(pair, stopping=drafting.Confidence(0.3), **SHAPE)
    own = specjax.WithParams(*drafting.Confidence(0.3).bind())
    found = specjax.Decoder(pair, stopping=own, **SHAPE)(PROMPTS[:2])
    assert found.texts == whole(PROMPTS[:2]).texts


def test_rates_are_those_of_the_paper(pair):
    info = specjax.Decoder(pair, max_draft=4, **SHAPE)(PROMPTS).info
    rows = info.per_row
    emitted, calls = rows.emitted.sum(), rows.verifier_calls.sum()
    assert info.verification_rate == pytest.approx(calls / emitted)
    # What was drafted or drawn was emitted or discarded, but for a last token past the end.
    lost = rows.drafted + rows.rounds - rows.emitted - rows.discarded
    assert set(lost.tolist()) <= {0, 1}
    assert info.discard_rate == pytest.approx(rows.discarded.sum() / emitted)


def test_costs_decide(pair, alone):
    def decode(**changes):
        policy = drafting.CostAware(costs(pair, **changes))
        return specjax.Decoder(pair, max_draft=4, stopping=policy, sampling=Sampling(0.0), **SHAPE)(
            PROMPTS
        )

    cheap, dear = decode(), decode(draft=(5.0, 5.0))
    assert cheap.texts == dear.texts == alone
    assert mean_drafted(cheap) > 1.0 and mean_drafted(dear) == 0.0


def test_costs_of_other_sizes_are_told(pair):
    few = drafting.CostAware(costs(pair, rows=(4, 8)))
    with pytest.raises(
        ValueError, match="are those of 4 to .* rows, but the batch has 1: .*--rows 1 4"
    ):
        specjax.Decoder(pair, stopping=few, max_draft=4, batch_size=1)
    with pytest.warns(UserWarning, match="of up to 4 tokens, but max_draft is 6, .*--drafts 6"):
        specjax.Decoder(pair, stopping=drafting.CostAware(costs(pair)), max_draft=6, **SHAPE)


def test_a_draft_ends_with_the_text(pair):
    """What is drafted past an end of text could never be emitted."""
    policy = drafting.Confidence(0.0)
    decoder = specjax.Decoder(pair, max_draft=8, stopping=policy, **SHAPE)
    rows = decoder(PROMPTS, seed=1).info.per_row
    fixed = specjax.Decoder(pair, max_draft=8, **SHAPE)(PROMPTS, seed=1).info.per_row
    assert rows.drafted.sum() / rows.rounds.sum() < fixed.drafted.sum() / fixed.rounds.sum()


def test_costs_of_another_pair_or_machine_are_told(pair):
    with pytest.raises(ValueError, match=r"costs belong to another pair \(a\+b, not"):
        specjax.Decoder(pair, stopping=drafting.CostAware(costs(pair, pair="a+b")))
    with pytest.warns(UserWarning, match="measured on another machine \\(elsewhere, not"):
        specjax.Decoder(
            pair,
            batch_size=8,
            max_draft=4,
            stopping=drafting.CostAware(costs(pair, machine="elsewhere")),
        )


@pytest.mark.exhaustive
def test_the_page_runs_as_printed(pair, monkeypatch):
    monkeypatch.setattr(specjax, "load_pair", lambda: pair)
    text, names = PAGE.read_text(encoding="utf-8"), {}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) == text.count("```python") == 5
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    # Given costs are used, and are not measured again.
    assert names["again"].costs is None
    assert f"    {names['chosen'].length.why}\n" in text
    assert "rows=(1, 4)" in str(names["again"].describe()["stopping"])
    assert len(names["result"]) == 16


def test_another_threshold_compiles_nothing(pair):
    options = {"max_draft": 4, "sampling": Sampling(0.0), **SHAPE}
    specjax.Decoder(pair, stopping=drafting.Confidence(0.1), **options)(PROMPTS)
    with count_compilations() as counted:
        specjax.Decoder(pair, stopping=drafting.Confidence(0.2), **options)(PROMPTS)
    assert counted.compiled == counted.read == 0


def test_costs_are_measured_where_none_are_given(pair, alone, monkeypatch):
    asked = []

    def measured(of, rows, widths, prompt_length):
        assert prompt_length == SHAPE["buckets"][0]
        asked.append((rows, widths))
        return costs(of)

    monkeypatch.setattr(setting, "measure_costs", measured)
    options = {"max_draft": 4, "sampling": Sampling(0.0), **SHAPE}
    decoder = specjax.Decoder(pair, stopping=drafting.CostAware(), **options)
    rows = decoder.batch_size
    assert asked == [([1, rows], (1, 2, 4, 5))] and decoder.costs == costs(pair)
    assert decoder(PROMPTS).texts == alone
    with setting.measured_costs(costs(pair)):
        again = specjax.Decoder(pair, stopping=drafting.CostAware(), **options)
    assert len(asked) == 1 and again.describe() == decoder.describe()
    assert again.costs == decoder.costs
    with setting.measured_costs(dataclasses.replace(costs(pair), pair="another")):
        specjax.Decoder(pair, stopping=drafting.CostAware(), **options)
    assert len(asked) == 2
    own = specjax.Decoder(pair, stopping=drafting.CostAware(costs(pair)), **options)
    assert own.costs is None and own.describe() == decoder.describe()


def test_costs_of_smaller_batches_are_refused(pair):
    with pytest.raises(ValueError, match="to 8 rows, but the batch has 9"):
        specjax.Decoder(pair, stopping=drafting.CostAware(costs(pair)), batch_size=9)


def test_an_engine_has_no_more_rows_than_the_costs(pair):
    policy = drafting.CostAware(costs(pair))
    decoder = specjax.Decoder(pair, batch_size=8, max_draft=4, stopping=policy)
    with pytest.raises(ValueError, match="rows must be at most 8, .* got 9: make the Decoder"):
        decoder.engine(prompt_length=8, rows=9)


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


def test_given_costs_serve_a_policy_without_costs(pair):
    policy, given = drafting.CostAware(), costs(pair)
    options = {"max_draft": 4, "batch_size": 8}
    decoder = specjax.Decoder(pair, stopping=policy, costs=given, **options)
    own = specjax.Decoder(pair, stopping=drafting.CostAware(given), **options)
    assert decoder.describe() == own.describe() and decoder.length is decoder.costs is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_draft": 3}, "costs must be left out: they are for stopping=CostAware"),
        ({"min_draft": 2}, "costs must be left out: .* min_draft, stopping and widths are left"),
        ({"widths": (1, 6)}, "costs must be left out: "),
        ({"stopping": "Confidence(0.4)"}, "costs must be left out"),
        ({"rule": "OPT(0.2)"}, "costs must be left out"),
        ({"drafting": "Lookup()"}, "costs must be left out"),
        ({"method": "TokenCascade()", "rule": "Chow(0.3)"}, "costs must be left out"),
        ({"sampling": Sampling(1.5)}, "which must include 1.5 to 1.5: measure it with `specjax"),
        ({"batch_size": 9}, "the costs are those of 1 to 8 rows, but the batch has 9"),
        ({"costs": {}}, "costs must be "),
        ({"max_draft": 0, "costs": None}, "max_draft must be .* at least 1, got 0"),
    ],
)
def test_costs_that_choose_nothing_are_refused(pair, options, message):
    given = {"costs": costs(pair, acceptance=(0.7, 0.7), **CHEAP), "batch_size": 8, **options}
    with pytest.raises(specjax.UserError, match=message):
        specjax.Decoder(pair, **given)


def test_costs_without_a_width_of_drafts_choose_nothing(pair):
    given = drafting.Costs((1,), (1,), (0.1,), ((1.0,),), temperatures=(1.0,), acceptance=(0.7,))
    with pytest.raises(specjax.UserError, match=r"costs has the widths \(1,\), and a draft needs"):
        specjax.Decoder(pair, costs=given, batch_size=1)


def test_costs_without_an_acceptance_choose_nothing(pair):
    with pytest.raises(specjax.UserError, match=r"the temperatures \(\), which must include"):
        specjax.Decoder(pair, costs=costs(pair), batch_size=8)
