"""A way to decode in plain values, and the texts that name its parts."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafting, processors, rules
from specjax.study.grid import USUAL_METHODS, Grid
from specjax.text import Decoder
from specjax.text.parts import Part
from specjax.text.setting import Setting
from tests import tiny_pair


def test_a_setting_is_json_and_its_key_is_its_own():
    setting = Setting(
        rule="Lossy(0.2)", stopping="Confidence(0.4)", drafting="Lookup(min_match=3)", top_p=0.9
    )
    costs = drafting.Costs(
        (1,), (1, 3), (1.0,), ((2.0, 3.0),), temperatures=(0.0,), acceptance=(0.9,)
    )
    settings = [
        setting,
        Setting(temperature=(0.5, 1.0), processors=("MinP(0.1)",), widths=(1, 6)),
        Setting(costs=costs),
        Setting(stopping="CostAware", costs=costs, process_drafts=False),
    ]
    for one in settings:
        again = Setting(**json.loads(json.dumps(one.to_dict())))
        assert again == one and hash(again) == hash(one) and again.key == one.key
    assert Setting(rule="OPT(0.3)").key != Setting(rule="OPT(0.2)").key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"rule": "lossless()"}, {}),
        ({"rule": "token_v3(0.5)"}, {"rule": "TokenV3(0.5)"}),
        ({"rule": "budgeted( opt(0.5),0.1 )"}, {"rule": "Budgeted(OPT(0.5), 0.1)"}),
        (
            {"drafting": drafting.Tree(parents=[0, 0, 1])},
            {"drafting": "Tree(parents=(0, 0, 1))"},
        ),
        (
            {"processors": ("RepetitionPenalty(over='output', penalty=1.3)",)},
            {"processors": ("RepetitionPenalty(1.3, over='output')",)},
        ),
        ({"max_draft": None}, {}),
        ({"verification": None}, {}),
        ({"verification": "Block"}, {}),
        ({"top_p": 1}, {"top_p": 1.0}),
        (
            {"drafting": "tree(depth=2, width=2)", "verification": "traversal"},
            {"drafting": specjax.drafting.Tree(depth=2, width=2)},
        ),
        ({"top_k": np.int32(3)}, {"top_k": 3}),
        ({"rule": rules.OPT(0.2)}, {"rule": "OPT(0.2)"}),
        ({"rule": rules.Typical(alpha=0.9)}, {"rule": "Typical(0.3, 0.9)"}),
        ({"rule": rules.Typical(0.2, 0.9)}, {"rule": "Typical(0.2, 0.9)"}),
        (
            {"rule": rules.TokenV2(0.3, top_k=10, replacement="argmax")},
            {"rule": "TokenV2(0.3, replacement='argmax', top_k=10)"},
        ),
        ({"stopping": drafting.Budget(8)}, {"stopping": "Budget(8)"}),
        ({"processors": (processors.MinP(0.05),)}, {"processors": ("MinP(0.05)",)}),
        ({"drafting": "Lookup()", "drafter": "x"}, {"drafting": "Lookup()"}),
        (
            {"rule": "Budgeted(rule=OPT(strength=0.2), nats_per_token=1)"},
            {"rule": "Budgeted(OPT(0.2), 1)"},
        ),
        ({"processors": ("min_p(min_p=0.05)",)}, {"processors": ("MinP(0.05)",)}),
        (
            {"processors": ("LinearTemperature(2.0, tokens=9, last=1.0)",)},
            {"processors": ("LinearTemperature(2.0, 1.0, 9)",)},
        ),
        (
            {"processors": ("NoRepeatNgram(2)", "PresencePenalty(0.5, over='both')")},
            {"processors": ("PresencePenalty(over='both', penalty=0.5)", "NoRepeatNgram(2)")},
        ),
        (
            {"drafting": "Cascade(((2, 1), (0, 1)), ('a', 'b'))", "drafter": "x"},
            {"drafting": "Cascade(((2, 1), (0, 1)), ('a', 'b'))"},
        ),
    ],
)
def test_one_way_to_decode_is_one_setting_with_one_key(one, other):
    assert Setting(**one) == Setting(**other)
    assert Setting(**one).key == Setting(**other).key


@pytest.mark.parametrize(
    ("values", "drafters"),
    [
        ({"method": "VerifierAlone"}, ()),
        ({"method": "DrafterAlone", "drafter": "x"}, ("x",)),
        ({"rule": "Chow(0.3)", "method": "TokenCascade(limit=4)"}, ("drafter",)),
        ({"drafting": "Lookup()"}, ()),
        ({"drafting": "Lookup(min_match=2)", "drafter": "x"}, ("x",)),
        ({"drafting": "Tree(depth=2, width=2)", "drafter": "x"}, ("x",)),
        ({"drafting": "Cascade(((2, 1), (0, 1)), ('drafter', 'b'))", "drafter": "x"}, ("x", "b")),
        (
            {
                "drafting": "Branches((Cascade(((2, 1), (0, 1)), ('drafter', 'b')), Lookup()))",
                "drafter": "x",
            },
            ("x", "b"),
        ),
    ],
)
def test_the_models_that_draft(values, drafters):
    assert Setting(**values).drafters == drafters


def test_the_short_form_of_a_decoder_makes_its_setting():
    models = specjax.Pair(tiny_pair.tabular(2), tiny_pair.tabular(1))
    for parts in (
        {"rule": rules.OPT(0.2)},
        {"stopping": drafting.Confidence(0.4), "max_draft": 8},
        {"drafting": drafting.Tree(depth=2, width=2)},
        {"rule": rules.Chow(0.3), "method": specjax.decoding.TokenCascade(limit=4)},
    ):
        assert Decoder(models, **parts).setting == Setting(**parts)
    for name, model in (("VerifierAlone", models.verifier), ("DrafterAlone", models.drafter)):
        alone = Decoder(models, Setting(method=name))
        assert alone.models is model and alone.method.model is model.model


def test_strength_threshold_and_curve():
    setting = Setting(rule="FallbackRollback(Chow(0.4), BiLD(2.0))", method="BiLDCascade(limit=4)")
    assert setting.strength == 2.0
    assert Part.parse("Survival(OnlineEstimate(shared=True), 0.6)").number == 0.6
    assert Setting(rule="OPT(0.2)").curve == Setting(rule="OPT(0.3)").curve
    assert Setting(rule="OPT(0.2)").curve != Setting(rule="Diff(0.2)").curve
    assert Part.parse("Budgeted(OPT(0.1), 0.1)").template == "Budgeted(OPT(0.1), {})"
    # A number by position counts before numbers by name.
    relaxed = Setting(rule="TokenV2(0.3, top_k=10, replacement='argmax')")
    assert relaxed.strength == 0.3
    assert "TokenV2(top_k=10, replacement='argmax')" in relaxed.described(without={"strength"})
    # The strength is the rule's own number, not that of its aggregation.
    kinds = [
        Setting(rule=f"SequenceChow({x}, aggregation=Quantile(0.2))", method="SequenceCascade")
        for x in (0.2, 0.9)
    ]
    assert [one.strength for one in kinds] == [0.2, 0.9] and kinds[0].curve == kinds[1].curve
    told = kinds[0].described(without={"strength", "temperature"})
    assert told == "SequenceCascade, SequenceChow(aggregation=Quantile(0.2))"
    assert Part.parse("Budget(tokens=8, estimate=OnlineEstimate(prior=9.0))").number == 8.0
    tree = "Tree(3, 2, children='x3', parents=(1, 2))"
    assert Part.parse(tree).template == tree.replace(", 2, ", ", {}, ")


USUAL = [
    (name, strength) for name, several in USUAL_METHODS.items() for strength in several or (None,)
]


def greedy_laws(rule):
    """The targets where the drafter's token is the verifier's, and where it is another."""
    one, other = jnp.eye(2, dtype=jnp.float32)
    return [np.asarray(rule(q, other)).tolist() for q in (one, other)]


@pytest.mark.parametrize(
    ("name", "strength"),
    [
        *USUAL,
        ("AcceptThreshold({})", 0.0),
        ("AcceptThreshold({}, 0.3)", 0.5),
        ("AcceptThreshold(1e-44)", None),  # a program reads it as 0
        ("AcceptThreshold(1.2e-38)", None),
        ("AcceptThreshold(0.5, 1e-44)", None),
        ("Lossy({}, 0.7)", 0.4),
        *((f"{name}(1e999)", None) for name in ("KLBall", "KLPrice", "Mentored", "Cactus")),
        ("KLBall({})", 20.0),
        ("Mentored({})", 20.0),
    ],
)
def test_what_is_lossless_at_temperature_0_is_no_setting_of_its_own_in_a_grid(name, strength):
    found = Grid(methods={name: strength}, temperatures=(0.5, 0.0)).settings()
    warm, cold = (one for one in found if not one.is_alone)
    rule = warm.part("rule")
    assert warm.rule == str(Part.parse(name if strength is None else name.format(strength)))
    if rule.reads_draft_confidence or rule.reads_verifier_confidence:
        assert cold.rule == warm.rule  # two tokens say nothing of the confidences
    else:
        gives_the_verifiers_token = greedy_laws(rule) == [[0.0, 1.0], [0.0, 1.0]]
        usual = Setting(temperature=0.0, max_draft=5)
        assert (cold == usual) == cold.is_lossless == gives_the_verifiers_token
