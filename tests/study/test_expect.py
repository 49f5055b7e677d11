"""Estimates: exact where they say so, approximate elsewhere, one program for each rule."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules, testing
from specjax.study.expect import (
    PRICES,
    Expected,
    cannot_estimate,
    estimate,
    expect,
    frontier_of,
    positions,
    sampling_key,
)
from specjax.text import Decoder, TextModel
from specjax.text.setting import Setting
from specjax.text.teacher_forcing import KnownTexts, decode_texts
from specjax.tokenizers import ByteTokenizer
from tests.benchmarks.tree_rounds import rounds_of
from tests.study.chains import all_texts

VOCAB, FIRST_ID, TOKENS, PROMPT = 259, 100, 3, 1
# Quarters, so that so many copies of each text are the verifier's law exactly.
P = np.asarray([[2, 1, 1], [1, 2, 1], [0, 1, 3]]) / 4
Q = np.asarray([[1, 1, 2], [2, 2, 0], [1, 2, 1]]) / 4


def model(law):
    table = np.full((VOCAB + 1, VOCAB), -np.inf, np.float32)
    table[:, FIRST_ID] = 0.0
    with np.errstate(divide="ignore"):
        table[FIRST_ID : FIRST_ID + 3, FIRST_ID : FIRST_ID + 3] = np.log(law)
    return TextModel(testing.TabularModel(VOCAB, 1), jnp.asarray(table), ByteTokenizer())


@pytest.fixture(scope="module")
def models():
    return {"verifier": model(P), "drafter": model(Q)}


@pytest.fixture(scope="module")
def texts():
    rows, _, weights = all_texts(P, PROMPT, TOKENS)
    copies = np.rint(weights * 4**TOKENS).astype(int)
    outputs = list(np.repeat(rows + FIRST_ID, copies, axis=0).astype(np.int32))
    return KnownTexts([np.asarray([FIRST_ID + PROMPT], np.int32)] * len(outputs), outputs)


ALONE, DRAFTER = Setting(method="VerifierAlone"), Setting(method="DrafterAlone")


def of(models, texts, settings, **options):
    """Estimates of settings that all draw alike."""
    return expect(models, dict.fromkeys(map(sampling_key, settings), texts), settings, **options)


@pytest.mark.parametrize(("name", "longest"), [("Token", 2), ("Block", 2)])
def test_lossless_tokens_per_call_are_exact(models, texts, name, longest):
    setting = Setting(max_draft=longest, verification=name)
    (found,) = of(models, texts, [setting])
    judge = {"Token": "TopDown", "Block": "Traversal"}[name]  # a chain is a tree
    want = TOKENS / rounds_of(tuple(range(longest)), "independent", judge, Q, P, PROMPT, TOKENS)
    assert found.tokens_per_call == pytest.approx(want, abs=1e-5)
    assert found.nats_per_token == 0.0
    assert found.drafted_per_call == pytest.approx(longest)


def test_figures_are_means_over_positions(models, texts):
    rule = rules.Lossy(0.4)
    (found,) = of(models, texts, [Setting(rule="Lossy(0.4)")])
    pi = np.asarray(jax.vmap(rule)(jnp.float32(Q), jnp.float32(P)), np.float64)
    acceptance, nats = np.minimum(pi, Q).sum(1), np.zeros(3)
    for token in range(3):
        some = pi[token] > 0
        nats[token] = (pi[token][some] * np.log(pi[token][some] / P[token][some])).sum() \
            if (P[token][some] > 0).all() else 0.0  # fmt: skip
    before = [[PROMPT, *(text[:-1] - FIRST_ID)] for text in texts.outputs]
    assert found.acceptance == pytest.approx(acceptance[before].mean(), abs=1e-6)
    # Lossy may keep a token of q that p cannot draw: nats are then infinite, and null in JSON.
    impossible = pi[2][0]
    assert (found.nats_per_token == math.inf) == (impossible > 1e-6)
    if impossible <= 1e-6:
        assert found.nats_per_token == pytest.approx(nats[before].mean(), abs=1e-6)


def test_what_the_verifier_cannot_draw_is_null_in_json(models, texts):
    (found,) = of(models, texts, [Setting(rule="OPT(1e999)")])
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert found.nats_per_token == math.inf and told["nats_per_token"] is None
    assert found.acceptance == pytest.approx(1.0)
    assert found.tokens_per_call == pytest.approx(TOKENS)  # all of a text in a round
    again = Expected.of(found.setting, told)
    assert again.nats_per_token == math.inf and again.to_dict() == found.to_dict()


def test_the_drafter_alone_is_as_far_from_the_verifier_as_it_is(models, texts):
    pair = {"verifier": models["drafter"], "drafter": models["verifier"]}
    texts = KnownTexts(texts.prompts, [np.where(x == 101, 100, x) for x in texts.outputs])
    (found,) = of(pair, texts, [DRAFTER])
    # After the token 101 the drafter has one that the verifier never draws, and it is left out.
    nats = (P * np.log(np.where(P > 0, P, 1.0) / np.where(Q > 0, Q, 1.0))).sum(1)
    before = np.asarray([[PROMPT, *(text[:-1] - FIRST_ID)] for text in texts.outputs])
    assert found.tokens_per_call == math.inf and math.isnan(found.acceptance)
    assert found.nats_per_token == math.inf and (before == 1).any()
    later = KnownTexts([np.asarray([100], np.int32)] * len(texts.outputs), texts.outputs)
    (found,) = of(pair, later, [DRAFTER])
    before[:, 0] = 0
    assert found.nats_per_token == pytest.approx(nats[before].mean(), abs=1e-6)
    assert Expected.of(DRAFTER, found.to_dict()).tokens_per_call == math.inf


def test_hundreds_of_strengths_are_one_program_each_rule(models, texts):
    few = KnownTexts(texts.prompts[:8], texts.outputs[:8])
    # Other tests may have compiled the same rules for the same shapes.
    positions._alone(jax.default_backend()).clear_cache()
    strengths = np.linspace(-0.5, 1.0, 60).tolist()
    rule = [f"OPT({x})" for x in strengths] + [f"DiffLog({x})" for x in strengths[:40]]
    settings = [
        Setting(rule=one, max_draft=g, verification=v)
        for one in rule
        for g, v in ((1, "Token"), (2, "Block"), (5, "Block"))
    ]
    assert len(of(models, few, settings)) == 100 * 3
    assert positions.num_programs() == 2
    of(models, few, [Setting(rule="OPT(0.7)")])
    assert positions.num_programs() == 2
    # Whether it would be seen: another rule is another program.
    of(models, few, [Setting(rule="Chow(0.5)")])
    assert positions.num_programs() == 3


def test_order_company_and_other_texts_change_nothing(models, texts):
    settings = [ALONE, DRAFTER]
    settings += [Setting(rule=f"TokenV3({x})", max_draft=g) for x in (0.3, 0.8) for g in (1, 3)]
    settings.append(Setting(temperature=0.5))
    other = KnownTexts(texts.prompts[:4], texts.outputs[:4])
    known = {sampling_key(ALONE): texts, sampling_key(settings[-1]): other}
    together = expect(models, known, settings)
    assert [one.setting for one in together] == settings
    (again,), (cold,) = of(models, texts, settings[3:4]), of(models, other, settings[-1:])
    assert again.tokens_per_call == pytest.approx(together[3].tokens_per_call, rel=1e-12)
    assert cold.tokens_per_call == together[-1].tokens_per_call


def test_greedy_estimates_are_what_decoding_counts(models):
    """At temperature 0 the verifier's text is also the one that each lossless setting writes."""
    rng = np.random.default_rng(0)
    table = testing.random_table(5, VOCAB, 1, scale=2.0)
    table[:, 1] += 5.0  # some rows end by themselves
    near = table + testing.random_table(6, VOCAB, 1, scale=1.2)
    words = ByteTokenizer()
    pair = {
        name: TextModel(testing.TabularModel(VOCAB, 1), jnp.asarray(x), words)
        for name, x in (("verifier", table), ("drafter", near))
    }
    prompts = [rng.integers(3, VOCAB, 4).astype(np.int32) for _ in range(24)]
    size = {"max_new_tokens": 12, "batch_size": 8}
    alone = Decoder(pair, Setting(method="VerifierAlone", temperature=0.0), **size)
    texts = decode_texts(alone, prompts, seed=0)
    settings = [
        Setting(temperature=0.0, max_draft=3),
        Setting(temperature=0.0, max_draft=4, stopping="Confidence(0.2)"),
        Setting(temperature=0.0, max_draft=4, stopping="Confidence(0.2)", min_draft=2),
    ]
    for setting, found in zip(settings, of(pair, texts, settings), strict=True):
        rows = Decoder(pair, setting, **size)(list(prompts), progress=False).info.per_row
        want = rows.emitted.sum() / rows.verifier_calls.sum()
        assert found.tokens_per_call == pytest.approx(want, rel=1e-9) and want > 1.2


CANNOT = {
    "carry": ({"verification": "greedy_block"}, "GreedyBlock carries its targets from round"),
    "online": ({"stopping": "Survival(OnlineEstimate(), 0.5)"}, "uses earlier rounds"),
    "head": ({"stopping": "Survival(HeadEstimate(), 0.5)"}, "the drafter has no acceptance head"),
    "model": ({"drafter": "other"}, "no model 'other'; the models are verifier, drafter"),
    "budget": (
        {"rule": "Budgeted(OPT(0.5), 0.1)"},
        "the decisions of Budgeted(OPT(0.5), 0.1) depend on",
    ),
    "method": (
        {"rule": "Chow(0.3)", "method": "TokenCascade"},
        "choice of the model depends on the text",
    ),
    "drafting": ({"drafting": "Lookup()"}, "drafting=Lookup is not a chain of one drafter"),
    "tree": ({"drafting": "Tree(depth=2, width=2)"}, "is not a chain of one drafter"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_can_only_be_measured_is_named(models, texts, name):
    values, told = CANNOT[name]
    assert told in (cannot_estimate(Setting(**values), models) or "")
    with pytest.raises(ValueError, match="cannot be estimated: "):
        of(models, texts, [Setting(**values)])


def test_prompts_are_decoded_at_each_temperature(models, texts, capsys):
    settings = [ALONE, DRAFTER, Setting(max_draft=3), Setting(temperature=0.0)]
    options = {"max_new_tokens": 4, "buckets": (16,)}
    found = estimate(models, settings, texts.prompts[:6], options=options, batch_size=2)
    assert [one.setting for one in found] == settings
    assert all(one.tokens_per_call >= 1.0 for one in found)
    assert capsys.readouterr().err.count("the verifier decodes 6 prompts") == 2


def test_each_sampling_and_drafter_has_a_frontier():
    settings = [ALONE, Setting(), Setting(rule="OPT(0.1)"), Setting(rule="OPT(0.2)", max_draft=3)]
    line = frontier_of(settings)
    assert [setting.strength for setting in line] == list(PRICES)
    assert {setting.rule.split("(")[0] for setting in line} == {"KLPrice"}
    assert frontier_of([ALONE, Setting()]) == []
    assert frontier_of([Setting(rule="OPT(0.1)", temperature=0.0)]) == []
    more = [*settings, Setting(rule="OPT(0.1)", drafter="small"), Setting(rule="OPT(0.1)", top_k=5)]
    assert len(frontier_of(more)) == 3 * len(PRICES)


def test_a_model_that_gives_nan_is_named(models, texts):
    broken = TextModel(
        testing.TabularModel(VOCAB, 1),
        models["drafter"].params.at[FIRST_ID].set(jnp.nan),
        ByteTokenizer(),
        name="broken",
    )
    with pytest.raises(ValueError, match="broken gives NaN"):
        of({**models, "drafter": broken}, texts, [Setting()])
