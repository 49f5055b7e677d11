import decimal
import sys

import numpy as np
import pytest

from specjax.evaluation import METRICS, figure
from specjax.evaluation.metrics import answer_number, check_metrics, normalized, token_f1

REFERENCES = ["a man rides a red bicycle with 2 wheels", "two dogs run over the grass at 9"]
OTHERS = ["someone on a bike with 2 wheels", "a pair of dogs runs on grass at 9"]
OUTPUTS = ["a man rides a bicycle", "two dogs on the grass at 9"]


@pytest.mark.parametrize("name", METRICS)
def test_the_references_themselves_score_100_and_other_words_0(name):
    assert METRICS[name](REFERENCES, REFERENCES) == pytest.approx(100.0)
    assert METRICS[name](["zzz", ""], REFERENCES) == pytest.approx(0.0, abs=2.5)


@pytest.mark.parametrize("name", METRICS)
def test_one_of_several_references_is_enough(name):
    several = list(zip(OTHERS, REFERENCES, strict=True))
    assert METRICS[name](REFERENCES, several) == pytest.approx(100.0)
    assert METRICS[name](OUTPUTS, several) >= METRICS[name](OUTPUTS, OTHERS)


@pytest.mark.parametrize(("name", "kind"), [("bleu", "BLEU"), ("chrf", "CHRF")])
def test_statistics_of_sentences_add_up_to_the_library_score(name, kind):
    import sacrebleu

    library = getattr(sacrebleu, kind)()
    made = figure(METRICS[name], OUTPUTS, REFERENCES)
    assert made.value == library.corpus_score(OUTPUTS, [REFERENCES]).score
    assert 0.0 < made.value < 100.0
    # A sentence may have fewer references than another.
    ragged = [(REFERENCES[0], OTHERS[0]), (REFERENCES[1],)]
    streams = [REFERENCES, [OTHERS[0], None]]
    assert METRICS[name](OUTPUTS, ragged) == library.corpus_score(OUTPUTS, streams).score
    # What is resampled is the corpus: a sentence twice is a corpus of three.
    sums = made.statistics[[0, 1, 1]].sum(axis=0, keepdims=True)
    twice = [[*OUTPUTS, OUTPUTS[1]], [[*REFERENCES, REFERENCES[1]]]]
    assert made.score(sums)[0] == library.corpus_score(*twice).score


def test_rouge_counts_words_pairs_and_the_longest_common_subsequence():
    outputs, references = ["a man rides a bicycle", "x"], ["a man rides a red bicycle", "y"]
    # Five of five words, five of six: F1 = 2 * 5 / 11; the second shares nothing.
    assert METRICS["rouge_l"](outputs, references) == pytest.approx(100.0 * (10 / 11) / 2)
    assert METRICS["rouge_1"](outputs, references) == pytest.approx(100.0 * (10 / 11) / 2)
    # Pairs: 3 of 4 and of 5.
    assert METRICS["rouge_2"](outputs, references) == pytest.approx(100.0 * (6 / 9) / 2)


def test_exact_match_ignores_the_space_around_a_text():
    assert (
        METRICS["exact_match"]([f" {REFERENCES[0]}\n", REFERENCES[1].upper()], REFERENCES) == 50.0
    )


def test_answers_are_compared_without_case_articles_and_punctuation():
    assert normalized("The  Cat's, a hat!") == "cats hat"
    assert METRICS["answer_match"](["the Eiffel Tower."], [["Paris", "Eiffel tower"]]) == 100.0
    # Common: "big cat" of three and of four words.
    assert token_f1("a big black cat", "the big cat sat down") == pytest.approx(2 * 2 / (3 + 4))
    # A word counts as often as it is in both.
    assert token_f1("so so so", "so so") == pytest.approx(2 * 2 / 5)
    assert token_f1("", "the") == 1.0 and token_f1("x", "") == 0.0
    assert METRICS["answer_f1"](["cat"], [["dog", "cat dog"]]) == pytest.approx(100 * 2 / 3)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is $1,234.50.", "1234.5"),
        ("she has 3 and 4, thus 7", "7"),
        ("10-5=5 or 5-10 = -5", "-5"),
        ("10-5", "5"),
        ("-$20", "-20"),
        ("$-20", "-20"),
        ("(−3)", "-3"),
        ("1,2,3", "3"),
        ("way: 3\n#### 72\n\nQ: 5 apples?", "72"),
        ("12 #### none", "12"),
        ("wait...5", "5"),
        ("about .5", "0.5"),
        ("42.00", "42"),
    ],
)
def test_numbers_are_read_from_texts(text, number):
    assert answer_number(text) == decimal.Decimal(number)


def test_a_text_without_a_number_is_wrong_and_a_reference_without_one_refused():
    assert answer_number("none, v1b") is None
    outputs = ["#### 1,000", "The answer is $1000.00.", "no idea", "1001"]
    assert METRICS["numeric_accuracy"](outputs, ["so #### 1000"] * 4) == 50.0
    with pytest.raises(
        ValueError, match=r"example 1 \(from 0\) has invalid references: 'x' has no num"
    ):
        METRICS["numeric_accuracy"](["1", "2"], ["1", "x"])


@pytest.mark.parametrize("name", METRICS)
def test_another_number_of_outputs_is_refused(name):
    with pytest.raises(ValueError, match="there are 1 outputs and 2 references: give at least"):
        METRICS[name](["a"], REFERENCES)
    with pytest.raises(ValueError, match="there are 0 outputs and 0 references"):
        METRICS[name]([], [])
    with pytest.raises(
        ValueError, match=r"example 1 \(from 0\) has invalid references: there are none"
    ):
        METRICS[name](["a", "b"], ["1", []])


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("bleu", "sacrebleu", "sacrebleu"),
        ("rouge_l", "rouge_score.rouge_scorer", "rouge_score"),
    ],
)
def test_a_missing_package_is_told_in_one_line(monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"{package}.* is not installed: run pip install '\.\[eval\]' in the checkout"
    for call in (lambda: METRICS[name](REFERENCES, REFERENCES), lambda: check_metrics([name])):
        with pytest.raises(ImportError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_means_have_one_row_per_example():
    made = figure(METRICS["exact_match"], ["a", "b", "c"], ["a", "b", "x"])
    np.testing.assert_array_equal(made.statistics, [[1, 1], [1, 1], [0, 1]])
    assert METRICS["bleu"].library == "sacrebleu"
