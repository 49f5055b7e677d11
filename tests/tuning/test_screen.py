"""Screening: exact where it says so, approximate where it says so, one program for each rule."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules, testing, verification
from specjax.text import TextModel
from specjax.tokenizers import ByteTokenizer
from specjax.tuning import ScreenGrid, Setting, Texts, Times, screen, verifier_texts
from specjax.tuning.positions import positions
from tests.tuning.chains import all_texts, expected_rounds

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
    return Texts([np.asarray([FIRST_ID + PROMPT], np.int32)] * len(outputs), outputs)


@pytest.mark.parametrize("name", ["Token", "Block"])
@pytest.mark.parametrize("longest", [1, 2])
def test_lossless_tokens_per_call_are_exact(models, texts, name, longest):
    setting = Setting(max_draft=longest, verification=name)
    (found,) = screen(models, texts, [setting])
    algorithm = getattr(verification, name)()
    want = TOKENS / expected_rounds(Q, P, PROMPT, TOKENS, longest, algorithm)
    assert found.tokens_per_call == pytest.approx(want, abs=1e-5)
    assert found.nats_per_token == 0.0 and found.defers == 1.0
    assert found.drafted_per_call == pytest.approx(longest)


def test_figures_are_means_over_positions(models, texts):
    rule = rules.Lossy(0.4)
    (found,) = screen(models, texts, [Setting(rule="lossy", strength=0.4)])
    pi = np.asarray(jax.vmap(rule)(jnp.float32(Q), jnp.float32(P)), np.float64)
    acceptance, nats = np.minimum(pi, Q).sum(1), np.zeros(3)
    for token in range(3):
        some = pi[token] > 0
        nats[token] = (pi[token][some] * np.log(pi[token][some] / P[token][some])).sum() \
            if (P[token][some] > 0).all() else 0.0  # fmt: skip
    before = [[PROMPT, *(text[:-1] - FIRST_ID)] for text in texts.outputs]
    assert found.acceptance == pytest.approx(acceptance[before].mean(), abs=1e-6)
    assert math.isnan(found.defers)
    # Lossy may keep a token of q that p cannot draw: nats are then infinite, and null in JSON.
    impossible = pi[2][0]
    assert (found.nats_per_token == math.inf) == (impossible > 1e-6)
    if impossible <= 1e-6:
        assert found.nats_per_token == pytest.approx(nats[before].mean(), abs=1e-6)


def test_what_the_verifier_cannot_draw_is_null_in_json(models, texts):
    (found,) = screen(models, texts, [Setting(rule="OPT", strength=100.0)])
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert found.nats_per_token == math.inf and told["nats_per_token"] is None
    assert found.acceptance == pytest.approx(1.0) and found.defers == 0.0
    assert found.tokens_per_call == pytest.approx(TOKENS)  # all of a text in a round
    assert Setting(**{name: told[name] for name in Setting().to_dict()}) == found.setting


def test_hundreds_of_strengths_are_one_program_each_rule(models, texts):
    few = Texts(texts.prompts[:8], texts.outputs[:8])
    before = positions.num_programs()
    strengths = tuple(np.linspace(-0.5, 1.5, 150))
    grid = ScreenGrid(rules={"OPT": strengths, "diff_log": strengths[:60]}, max_drafts=(1, 2, 3, 5))
    found = screen(models, few, grid.settings())
    assert len(found) == 1 + 210 * 4 * 2
    assert positions.num_programs() - before <= 2
    screen(models, few, ScreenGrid(rules={"OPT": (7.0,)}).settings())
    assert positions.num_programs() - before <= 2
    # Whether it would be seen: another rule is another program.
    screen(models, few, ScreenGrid(rules={"Chow": (0.5,)}).settings())
    assert positions.num_programs() - before == 3


def test_order_and_company_change_nothing(models, texts):
    settings = ScreenGrid(
        rules={"lossless": (), "token_v3": (0.3, 0.8)}, max_drafts=(1, 3)
    ).settings()
    together = screen(models, texts, settings)
    assert [one.setting for one in together] == settings
    again = screen(models, texts, [settings[3]])
    assert again[0].tokens_per_call == pytest.approx(together[3].tokens_per_call, rel=1e-12)


def test_latency_is_that_of_the_passes(models, texts):
    times = Times(1, (5.0, 1.0), ({3: 8.0}, {3: 9.0}), call=2.0, prompts=(0.5, 0.25))
    settings = [Setting(max_draft=0), Setting(max_draft=2, verification="Token")]
    alone, found = screen(models, texts, settings, times=times)
    assert alone.speedup == 1.0 and alone.latency == pytest.approx(2.0 + 5.0 * TOKENS)
    rounds = TOKENS / found.tokens_per_call
    # Two passes of the drafter, one of the verifier over three tokens, one more after whole drafts.
    least = rounds * (2 * 1.0 + 8.0)
    assert 2.25 + least < found.latency < 2.25 + least + rounds * 1.0
    assert found.speedup == pytest.approx(alone.latency / found.latency)
    four = Times(4, times.alone, times.passes, call=2.0, prompts=times.prompts)
    (batch,) = screen(models, texts, settings[1:], times=four)
    assert batch.latency > found.latency  # a whole draft in any row costs a pass


def test_greedy_screening_is_what_decoding_counts(models):
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
    alone = Setting(temperature=0.0, max_draft=0).decoder(pair, **size)
    texts = verifier_texts(pair["verifier"], alone, prompts, seed=0)
    ends = {"stopping": "confidence", "threshold": 0.2}
    settings = [
        Setting(temperature=0.0, max_draft=3),
        Setting(temperature=0.0, max_draft=4, **ends),
    ]
    for setting, found in zip(settings, screen(pair, texts, settings), strict=True):
        rows = setting.decoder(pair, **size)(list(prompts), progress=False).info.rows
        want = rows.emitted.sum() / rows.verifier_calls.sum()
        assert found.tokens_per_call == pytest.approx(want, rel=1e-9) and want > 1.2


def test_texts_of_each_temperature_are_told_apart(models, texts):
    settings = [Setting(), Setting(temperature=0.5)]
    other = Texts(texts.prompts[:4], texts.outputs[:4])
    found = screen(models, {settings[0].drawn: texts, settings[1].drawn: other}, settings)
    (alone,) = screen(models, other, settings[1:])
    assert found[1].tokens_per_call == alone.tokens_per_call != found[0].tokens_per_call
    with pytest.raises(ValueError, match="no texts for temperature, top_k, top_p = .0.5"):
        screen(models, {settings[0].drawn: texts}, settings)


WRONG = {
    "none": ([], "no settings to screen"),
    "greedy block": ([Setting(verification="greedy_block")], "screen Token or Block"),
    "online": ([Setting(stopping="online", threshold=0.5)], "stopping=online learns from earlier"),
    "head": ([Setting(stopping="head", threshold=0.5)], "the drafter has no acceptance head"),
    "model": ([Setting(drafter="other")], "no model 'other', only verifier, drafter"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_screened_is_named(models, texts, name):
    settings, told = WRONG[name]
    with pytest.raises(ValueError, match=told):
        screen(models, texts, settings)


def test_wrong_texts_are_named(models, texts):
    with pytest.raises(ValueError, match="1 prompts and 2 outputs"):
        screen(models, Texts(texts.prompts[:1], texts.outputs[:2]), [Setting()])
    with pytest.raises(ValueError, match="at least one token in each"):
        screen(models, Texts(texts.prompts[:1], [np.zeros(0, np.int32)]), [Setting()])
    with pytest.raises(TypeError, match=r"settings must be of tuning.Setting, got 'OPT'"):
        screen(models, texts, ["OPT"])


def test_a_model_that_gives_nan_is_named(models, texts):
    broken = TextModel(
        testing.TabularModel(VOCAB, 1),
        models["drafter"].params.at[FIRST_ID].set(jnp.nan),
        ByteTokenizer(),
        name="broken",
    )
    with pytest.raises(ValueError, match="broken gives NaN"):
        screen({**models, "drafter": broken}, texts, [Setting()])
