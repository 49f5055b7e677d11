"""Texts of parts: what they name, that reading and writing agree, hostile texts, which ones fit."""

import inspect
import itertools
import json
import time
import warnings
from typing import ClassVar

import pytest

import specjax
from specjax import drafting, processors, rules, verification
from specjax.text import parts
from specjax.text.parts import PARTS, Part, make_part, register_part
from specjax.text.setting import MisfitError, Setting, use_costs
from specjax.types import traced_dataclass
from tests.variants import variants

_OF_A_NUMBER = """
Chow ChowLog Diff DiffLog OPT OPTLog TokenV1 TokenV2 TokenV3 BiLD Lossy LossyTuned Mentored KLBall
KLPrice Mixture Cactus SequenceChow SequenceChowLog Quantile Confidence Entropy MinP EpsilonCutoff
EtaCutoff TypicalP
"""
# Only a text: the object is the model itself, `Decoder(pair.verifier)`.
ALONE = ("VerifierAlone", "DrafterAlone")
_PLAIN = """
Lossless Sum Mean FixedLength CostAware ConfidenceEstimate HeadEstimate OnlineEstimate OwnEstimate
Token Block GreedyBlock Walk TopDown Traversal TokenCascade OracleCascade SequenceCascade
VerifierAlone DrafterAlone
"""
# A text of each part, in the standard form.
TEXTS = {
    **{name: f"{name}(0.3)" for name in _OF_A_NUMBER.split()},
    **{name: name for name in _PLAIN.split()},
    "Typical": "Typical(0.3, 0.09, replacement='residual')",
    "AcceptThreshold": "AcceptThreshold(0.9, acc=0.5)",
    "Budgeted": "Budgeted(OPT(0.5), 1e999)",
    "FallbackRollback": "FallbackRollback(Chow(0.4), BiLD(2.0))",
    "Survival": "Survival(OnlineEstimate(shared=True), 0.6)",
    "Budget": "Budget(8, estimate=OnlineEstimate(prior=9.0))",
    "Lookup": "Lookup(bigram='a \\\\ \"b\\'', min_match=3)",
    "Cascade": "Cascade(((4, 0), (0, 3)), rules=(Lossy(0.1),), last=Lookup(max_ngram=4))",
    "Tree": "Tree(parents=(0, 0, 1), children='top')",
    "Chain": "Chain(model='small', max_draft=3)",
    "Branches": "Branches(('drafter', Lookup(copies=2)))",
    "BiLDCascade": "BiLDCascade(limit=4)",
    "LogitBias": "LogitBias({3: -1.5, 4: 2.0})",
    "Regex": "Regex('[0-9]+')",
    "JsonSchema": "JsonSchema({'type': 'object', 'properties': {'a': {'enum': [1, True, None]}}})",
    "RepetitionPenalty": "RepetitionPenalty(1.3, over='output')",
    "FrequencyPenalty": "FrequencyPenalty(0.3)",
    "PresencePenalty": "PresencePenalty(-0.3)",
    "NoRepeatNgram": "NoRepeatNgram(2)",
    "MinNewTokens": "MinNewTokens(4)",
    "ForcedTokens": "ForcedTokens(((0, 5), (1, 6)))",
    "SuppressTokens": "SuppressTokens((5, 6))",
    "LinearTemperature": "LinearTemperature(2.0, 1.0, 9)",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_written_as_it_was_read(name):
    text = TEXTS[name]
    part = Part.parse(text)
    assert str(part) == text and Part.parse(str(part)) == part
    assert str(Part.parse(text.replace(name, name.lower(), 1))) == text
    one, other = part.make(), Part.parse(str(part)).make()
    assert type(one) is PARTS[name] and repr(one) == repr(other)


def test_each_part_is_reached_in_one_way():
    """In its package."""
    places = {
        rules: (*rules.ALL_RULES, rules.Budgeted, *rules.SEQUENTIAL_RULES),
        verification: verification.ALL_VERIFICATIONS,
        drafting: (*drafting.ALL_DRAFTS, *drafting.ALL_POLICIES, *drafting.ALL_ESTIMATES),
        specjax.decoding: parts.CASCADES,
        specjax.processors: processors.ALL_PROCESSORS,
    }
    for package, kinds in places.items():
        for kind in kinds:
            assert getattr(package, kind.__name__) is kind and kind.__name__ in package.__all__
    assert set(TEXTS) == set(parts.SHIPPED)
    placed = {kind.__name__ for kinds in places.values() for kind in kinds}
    assert {*parts.SHIPPED} - placed == {"Sum", "Mean", "Quantile", *ALONE}


OPENED = "open('{0}', 'w')"
CALLS = [
    "os.system('touch {0}')",
    "specjax.rules.OPT(0.2)",
    "__import__('os').system('touch {0}')",
    "getattr(OPT, '__init__')(0.2)",
    "OPT(0.2).__class__",
    "OPT[0](0.2)",
    "OPT(os.environ)",
    f"OPT({OPENED})",
    "OPT(__import__('os').system('touch {0}'))",
    "OPT(*(0.2,))",
    "OPT(**dict(strength=0.2))",
    "OPT(strength=0.2, **dict())",
    "(lambda: OPT(0.2))()",
    "OPT([x for x in (0.2,)])",
    "OPT(f'{__import__(\"os\")}')",
    "OPT(0.1 + 0.1)",
    "OPT(2 ** 9999999999)",
    "OPT(-(-0.2))",
    "OPT(0.2 if True else 0.3)",
    "OPT(0.2j)",
    "OPT({0.2})",
    "OPT({OPT: 1})",
    "OPT({**{}})",
    "OPT(0.2); import os",
    "OPT(0.2), OPT(0.3)",
    "OPT(99999999999999999999)",
    "OPT(" + "9" * 5000 + ")",
    "",
    "0.2",
    "'OPT(0.2)'",
    "\0",
    "OPT(\ud800)",
    "(" * 5000,
    "OPT(" + "-" * 50_000 + "1)",
    "OPT(" + "1+" * 40_000 + "1)",
    "OPT" + "()" * 40_000,
    "OPT" + ".x" * 40_000,
    "OPT(" * 150 + "1" + ")" * 150,
    "OPT(" + "(" * 60 + "1" + ",)" * 60 + ")",
    "OPT(" + "{1:[" * 30 + "1" + "]}" * 30 + ")",
    "OPT('" + "x" * 200_000 + "')",
]


@pytest.mark.parametrize("field", ["rule", "stopping", "drafting", "processors"])
@pytest.mark.parametrize("text", CALLS, ids=range(len(CALLS)))
def test_a_hostile_text_is_refused_in_one_line_and_runs_nothing(text, field, tmp_path):
    mark = tmp_path / "mark"
    given = text.replace("{0}", str(mark))
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # Python's, on calls of literals
        with pytest.raises(ValueError) as told:
            Setting(**{field: (given,) if field == "processors" else given})
    assert time.monotonic() - start < 5.0
    message = str(told.value)
    assert message.startswith(field) and "\n" not in message and len(message) < 800
    assert not mark.exists()


@pytest.mark.parametrize(
    "values",
    [
        {"drafting": f"Lookup(max_ngram={2**62}, max_copy={2**62}, copies={2**62})"},
        {"drafting": f"Tree(depth=500, width=500, beam={2**62}, children='top', keep={2**62})"},
        {"drafting": f"Tree(parents={(0,) * 9_000})"},
        {"drafting": f"Cascade((({2**62}, {2**62}), (0, {2**62})), ('drafter', 'b'))"},
        {"drafting": f"Branches({('drafter',) * 2_000})"},
        {"drafting": "Branches((" + "Lookup()," * 2_000 + "))"},
        {"max_draft": 2**31 - 1, "min_draft": 2**31 - 1},
        {"max_draft": 10**30},
        {"method": f"TokenCascade(limit={2**62})", "rule": "Chow(0.3)"},
        {"processors": (f"NoRepeatNgram({2**62})",)},
        {"rule": f"TokenV2(0.3, top_k={2**62})"},
        {"rule": "Budgeted(" * 40 + "OPT(0.2)" + ", 0.1)" * 40},
        {"temperature": 10**400},
    ],
    ids=str,
)
def test_large_numbers_take_no_time_and_no_memory(values):
    start = time.monotonic()
    try:
        one = Setting(**values)
    except (TypeError, ValueError) as error:
        assert "\n" not in str(error)
    else:
        assert Setting(**one.to_dict()) == one
    assert time.monotonic() - start < 5.0


ODD = [
    *(
        "None",
        "True",
        "'x'",
        "''",
        "-1",
        "0",
        "1e999",
        "-1e999",
        str(2**62),
        "()",
        "(1,)",
        "(None,)",
    ),
    *("('a',)", "((1,),)", "((1, 2), (3,))", "{}", "{'a': 1}", "{1: 'a'}", "OPT(0.2)", "Lookup"),
    *("Block", "Confidence(0.4)", "Sum", "MinP(0.1)", "TokenCascade"),
]


@pytest.mark.filterwarnings("ignore:.* should lie in")
@pytest.mark.parametrize("name", variants(PARTS, "OPT", "Budgeted", "Cascade", "Tree", "LogitBias"))
def test_odd_arguments_are_refused_or_read_again_as_they_were_written(name):
    field = next(field for field, kinds in parts.BY_FIELD.items() if PARTS[name] in kinds)
    names = inspect.signature(PARTS[name]).parameters
    forms = ["{0}({2})", *(f"{{0}}({x}={{2}})" for x in names), "{0}({2}, {2})", "{0}(0.5, {2})"]
    for form, odd in itertools.product(forms, ODD):
        text = form.format(name, "", odd)
        try:
            if field:
                one = Setting(**{field: (text,) if field == "processors" else text})
                assert Setting(**json.loads(json.dumps(one.to_dict()))) == one
                assert one.key and one.described() and one.curve
            else:
                part = Part.parse(text)
                assert repr(Part.parse(str(part)).make()) == repr(part.make())
        except (TypeError, ValueError) as error:
            assert "\n" not in str(error)


@traced_dataclass
class Halfway(rules.Deferral):
    strength: float

    reads_verifier_confidence: ClassVar[bool] = False

    def defers(self, q, p, q_conf, p_conf):
        return q_conf[0] < self.strength


def test_a_registered_class_is_named_like_others(monkeypatch):
    monkeypatch.setattr(parts, "PARTS", dict(PARTS))
    register_part(Halfway)
    setting = Setting(rule="halfway(0.3)")
    assert setting.rule == "Halfway(0.3)" and setting.strength == 0.3
    assert isinstance(setting.part("rule"), Halfway)
    assert isinstance(make_part("rule", "Budgeted(Halfway(0.3), 0.1)").rule, Halfway)
    with pytest.raises(ValueError, match="drafting must be like specjax.drafting.Lookup"):
        Setting(drafting="Halfway(0.3)")
    with pytest.raises(ValueError, match="stopping must be like"):
        Setting(stopping="Halfway(0.3)")
    register_part(Halfway)  # again, as a notebook does
    other = type("Halfway", (), {})
    assert specjax.register_part(other) is other and parts.PARTS["Halfway"] is other
    for wrong, message in (
        (type("kl_ball", (), {}), "KLBall is a part of specjax: rename kl_ball"),
        (Halfway(0.3), "needs a class"),
    ):
        with pytest.raises(ValueError, match=message):
            register_part(wrong)
    parts._made.cache_clear()


# Every kind of each part; strengths do not matter.
KINDS = {
    "rule": [
        *(TEXTS[kind.__name__] for kind in (*rules.ALL_RULES, *rules.SEQUENTIAL_RULES)),
        *("Budgeted(OPT(0.5), 0.1)", "Budgeted(Lossy(0.5), 0.1)"),
    ],
    "verification": [kind.__name__ for kind in verification.ALL_VERIFICATIONS],
    "stopping": [
        *("FixedLength", "Confidence(0.4)", "Entropy", "CostAware", TEXTS["Budget"]),
        # OwnEstimate needs a drafter that makes it.
        *(f"Survival({kind.__name__}, 0.6)" for kind in drafting.ALL_ESTIMATES[:-1]),
    ],
    "drafting": [
        *("Lookup", "Lookup(min_match=2)", "Lookup(copies=2)", "Lookup(bigram='built-in')"),
        *(f"Tree(depth=2, width=2, children={x!r})" for x in ("top", "top+1", "independent")),
        *("Tree(depth=2, width=2, children='top', beam=1)", "Tree(depth=1, width=3)"),
        "Tree(parents=(0, 0, 1, 2), children='independent')",
        "Branches(('drafter', Lookup(copies=2)))",
        "Branches(('drafter', Tree(depth=2, width=2)))",
        *(
            "Cascade(((3,),))",
            "Cascade(((3,),), width=2)",
            "Cascade(((3,),), width=2, models=('x',))",
        ),
        "Cascade(((3, 2), (0, 2)), last=Lookup())",
        *(
            f"Cascade(((3, 0), (0, 2)), last=Lookup(), {x})"
            for x in ("lenience=2.0", "rules=OPT(0.1)", "rules=(Lossy(0.1),)", "cumulative=True")
        ),
        *(
            f"Cascade(((0, 2), (0, 2)), last=Lookup(), verification={x})"
            for x in ("Token()", "GreedyBlock()", "Traversal()")
        ),
    ],
    "method": [
        *("TokenCascade", "BiLDCascade(limit=3)", "OracleCascade", "SequenceCascade"),
        *("VerifierAlone", "DrafterAlone"),
    ],
    "processors": [
        *(("MinP(0.05)",), ("NoRepeatNgram(2)",), (TEXTS["SuppressTokens"],)),
        ("Regex('[a-z]+')", "Regex('b')"),
    ],
    "min_draft": [1, 4],
}


@pytest.fixture(scope="module")
def models():
    """The built-in pair, and a model of the same vocabulary named x."""
    pair = specjax.load_pair()
    return specjax.Pair(**pair.named, x=specjax.load_text_model(pair.drafter.name))


def check_pair_of_parts(models, values):
    """A setting is refused, or each of its decoders can be made."""
    try:
        setting = Setting(**values)
    except MisfitError as error:
        assert "\n" not in str(error)
    else:
        specjax.Decoder(models, setting, max_new_tokens=8, buckets=(16,))


def costs_of(models):
    pair = specjax.Pair(models.named["drafter"], models.verifier).fingerprint
    return drafting.Costs((1, 16), (1, 7), (1.0, 1.0), ((2.0, 3.0),) * 2, pair=pair)


PAIRS = [*itertools.combinations(KINDS, 2)]
QUICK = (
    *(("verification", "stopping"), ("verification", "drafting"), ("stopping", "min_draft")),
    *(("rule", "method"), ("drafting", "processors"), ("method", "processors")),
)


@pytest.mark.parametrize("fields", variants(PAIRS, *QUICK), ids="-".join)
def test_what_a_setting_accepts_can_be_built(models, fields):
    with use_costs(costs_of(models)):
        for pair in itertools.product(*(KINDS[field] for field in fields)):
            check_pair_of_parts(models, dict(zip(fields, pair, strict=True)))
