import sys

import pytest

from specjax.evaluation import METRICS, bleu, check_metrics, exact_match, rouge_l

REFERENCES = ["a man rides a red bicycle", "two dogs run over the grass"]


@pytest.mark.parametrize("name", METRICS)
def test_the_references_themselves_score_100_and_other_words_0(name):
    assert METRICS[name](REFERENCES, REFERENCES) == pytest.approx(100.0)
    assert METRICS[name](["nothing alike here", ""], REFERENCES) == pytest.approx(0.0, abs=2.5)


def test_bleu_is_that_of_the_corpus():
    import sacrebleu

    outputs = ["a man rides a bicycle", "two dogs run on the grass"]
    score = bleu(outputs, REFERENCES)
    assert score == sacrebleu.corpus_bleu(outputs, [REFERENCES]).score
    assert 0.0 < score < 100.0


def test_rouge_l_is_the_mean_f1_of_the_longest_common_subsequences():
    # Five of five words, five of six: F1 = 2 * 5 / 11; the second shares nothing.
    score = rouge_l(["a man rides a bicycle", "x"], REFERENCES)
    assert score == pytest.approx(100.0 * (10 / 11) / 2)


def test_exact_match_ignores_the_space_around_a_text():
    assert exact_match([f" {REFERENCES[0]}\n", REFERENCES[1].upper()], REFERENCES) == 50.0


@pytest.mark.parametrize("name", METRICS)
def test_another_number_of_outputs_is_refused(name):
    with pytest.raises(ValueError, match="there are 1 outputs and 2 references; give one ref"):
        METRICS[name](["a"], REFERENCES)
    with pytest.raises(ValueError, match="there are 0 outputs and 0 references"):
        METRICS[name]([], [])


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("bleu", "sacrebleu", "sacrebleu"),
        ("rouge_l", "rouge_score.rouge_scorer", "rouge_score"),
    ],
)
def test_a_missing_package_is_told_in_one_line(monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"{package}.* is not installed; install it with: pip install 'specjax\[eval\]'"
    for call in (lambda: METRICS[name](REFERENCES, REFERENCES), lambda: check_metrics([name])):
        with pytest.raises(ImportError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_unknown_metrics_are_refused_and_known_ones_pass():
    check_metrics(METRICS)
    with pytest.raises(ValueError, match="`metrics` must be among bleu, rouge_l, .* got 'meteor'"):
        check_metrics(["bleu", "meteor"])
