"""Rounds of trees along texts: the numbers of rounds are those of an enumeration."""

import itertools

import numpy as np
import pytest

import specjax
from benchmarks import tree_walks
from benchmarks.tree_walks import expect_trees
from specjax.study.expect import expect, sampling_key
from specjax.text import Decoder
from specjax.text.setting import Setting
from specjax.text.teacher_forcing import decode_texts
from tests.benchmarks.tree_rounds import rates_of, rounds_of
from tests.study.test_expect import FIRST_ID, PROMPT, TOKENS, P, Q, models, texts  # noqa: F401
from tests.variants import variants

TREES = {
    "pair": (0, 0),
    "bush": (0, 0, 1, 1),
    "late": (0, 0, 2, 2),
    "path": (0, 1),
    "two": (0, 0, 1, 2),
}


def setting_of(tree, kind, judge, **values):
    drafting = f"Tree(parents={TREES[tree]}, children={kind!r})"
    return Setting(drafting=drafting, verification=judge, **values)


def estimated(models, texts, settings, **options):  # noqa: F811
    return [found.expected for found in expect_trees(models, texts, settings, **options)]


KINDS = ("top", "top+1", "independent", "without")
CASES = list(itertools.product(TREES, KINDS, ("Traversal", "TopDown", "Walk")))
QUICK = [
    ("late", "top", "Walk"),
    ("two", "top+1", "Traversal"),
    ("two", "top+1", "TopDown"),
    ("bush", "independent", "Traversal"),
    ("pair", "without", "Walk"),
    ("two", "without", "Traversal"),
]


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=str)
def test_tokens_per_call_are_exact(models, texts, case):  # noqa: F811
    tree, kind, judge = case
    # Draws of elder siblings leave noise.
    draws, error = (32, 0.03) if kind == "without" else (1, 1e-5)
    (found,) = estimated(models, texts, [setting_of(*case)], draws=draws)
    want = TOKENS / rounds_of(TREES[tree], kind, judge, Q, P, PROMPT, TOKENS)
    assert found.tokens_per_call == pytest.approx(want, abs=error)
    assert found.drafted_per_call == len(TREES[tree]) and found.nats_per_token == 0.0


def test_a_wrong_walk_is_off(models, texts, monkeypatch):  # noqa: F811
    """Whether the test above would see a node's weight that is not passed on."""
    case = ("bush", "independent", "Traversal")
    want = TOKENS / rounds_of(TREES["bush"], "independent", "Traversal", Q, P, PROMPT, TOKENS)
    monkeypatch.setattr(
        tree_walks, "_JUDGES", {type(setting_of(*case).part("verification")): False}
    )
    (found,) = estimated(models, texts, [setting_of(*case)])
    assert abs(found.tokens_per_call - want) > 1e-3


@pytest.mark.parametrize("rule", ["Lossless", "OPT(0.2)"])
def test_a_tree_without_branches_is_a_chain(models, texts, rule):  # noqa: F811
    for judge, plain in (("Traversal", "Block"), ("TopDown", "Token")):
        chain = Setting(rule=rule, max_draft=2, verification=plain)
        tree = setting_of("path", "independent", judge, rule=rule)
        (found,) = estimated(models, texts, [tree], draws=16)
        (want,) = expect(models, {sampling_key(chain): texts}, [chain], draws=16)
        error = 1e-6 if rule == "Lossless" else 0.04
        assert found.tokens_per_call == pytest.approx(want.tokens_per_call, abs=error)
        assert found.nats_per_token == want.nats_per_token


@pytest.mark.parametrize("kind", KINDS)
def test_rates_are_means_over_the_texts(models, texts, kind):  # noqa: F811
    setting = setting_of("pair", kind, "Traversal")
    few = texts._replace(prompts=texts.prompts[::4], outputs=texts.outputs[::4])
    rates = tree_walks.tree_rates(models, few, setting, 2, draws=8)
    before = np.concatenate([[PROMPT, *(text[:-1] - FIRST_ID)] for text in few.outputs])
    want = np.mean([rates_of(Q[x], P[x], kind, 2) for x in before], axis=0)
    np.testing.assert_allclose(rates, want, atol=0.03 if kind == "without" else 1e-6)
    with pytest.raises(ValueError, match="setting must draft trees, got drafting=None"):
        tree_walks.tree_rates(models, few, Setting(), 2)


CAPTIONS = ["A man rides a bicycle.", "Two dogs play in the snow.", "A child eats an apple."]
PARENTS = (0, 0, 0, 1, 1, 2, 4)


def of_built_in_pair(temperature, prompts, seed):
    """The estimate of a tree on texts, and its tokens per call on others of the same prompts."""
    pair, shape = specjax.load_pair(), {"max_new_tokens": 48, "batch_size": 8}
    alone = Setting(method="VerifierAlone", temperature=temperature)
    setting = Setting(drafting=f"Tree(parents={PARENTS})", temperature=temperature)
    decoder = Decoder(pair.named, alone, **shape)
    known = decode_texts(decoder, [decoder.encode(text) for text in prompts], seed=seed)
    (found,) = estimated(pair.named, known, [setting])
    rows = Decoder(pair.named, setting, **shape)(list(prompts), seed=seed + 1).info.per_row
    return found, rows.emitted.sum() / rows.verifier_calls.sum()


def test_greedy_estimates_are_what_decoding_counts():
    found, measured = of_built_in_pair(0.0, CAPTIONS, 0)
    assert found.tokens_per_call == pytest.approx(measured, rel=1e-9) and measured > 1.5


@pytest.mark.exhaustive
def test_drawn_estimates_are_what_decoding_counts():
    """The estimate and the measurement have other texts: four errors of their difference."""
    found, measured = of_built_in_pair(1.0, CAPTIONS * 40, 0)
    assert abs(found.tokens_per_call - measured) < 4 * 2**0.5 * found.error < 0.4
