"""Drafts copied from a text that is given with the prompt."""

import random

import pytest

import specjax
from specjax.errors import UserError

GREEDY = specjax.Sampling(temperature=0.0)
PROMPTS = [
    "A man rides a bicycle down the street.",
    "Two dogs play in the snow.",
    "A boy with a red hat climbs a rock.",
    "Several people wait for a bus in the rain.",
]


def changed(text, count):
    """The text with so many of its words replaced."""
    words, rng = text.split(), random.Random(0)
    for place in rng.sample(range(len(words)), min(count, len(words))):
        words[place] = "Fenster"
    return " ".join(words)


@pytest.fixture(scope="module")
def pair():
    return specjax.load_pair()


@pytest.fixture(scope="module")
def texts(pair):
    return specjax.Decoder(pair.verifier, sampling=GREEDY, max_new_tokens=32)(PROMPTS).texts


def decoder_of(pair, drafting="Lookup()", **options):
    models = pair.verifier if drafting == "Lookup()" else pair
    options = {"max_draft": 8, "sampling": GREEDY, "max_new_tokens": 32, **options}
    return specjax.Decoder(models, drafting=drafting, **options)


def test_a_text_that_is_right_takes_few_passes_and_a_wrong_one_changes_nothing(pair, texts):
    decoder, calls = decoder_of(pair), []
    for count in (0, 1, 5, 99):
        result = decoder(PROMPTS, predictions=[changed(text, count) for text in texts])
        assert result.texts == texts
        calls.append(int(result.info.verifier_calls))
    assert calls == sorted(calls) and 2 * calls[0] < calls[-1]
    # One changed word costs a pass or two of a row: the copies go on after it.
    assert calls[1] <= calls[0] + 2 * len(PROMPTS)
    none, without = decoder(PROMPTS, predictions=[None] * 4), decoder(PROMPTS)
    assert none.texts == texts and none.info.verifier_calls == without.info.verifier_calls


def test_a_drafter_drafts_where_the_prediction_does_not_match(pair, texts):
    joined = decoder_of(pair, "Lookup(min_match=2)")
    predicted = joined(PROMPTS, predictions=[texts[0], None, changed(texts[2], 1), None])
    assert predicted.texts == joined(PROMPTS).texts == texts
    calls = [row.info.calls for row in joined(PROMPTS, predictions=[None] * 4)]
    assert calls == [row.info.calls for row in joined(PROMPTS)]
    right = joined(PROMPTS[:1], predictions=texts[:1])
    half = joined(PROMPTS[:1], predictions=[texts[0][: len(texts[0]) // 2]])
    assert right.texts == half.texts == texts[:1]
    assert right[0].info.calls["drafter"] == 0 < half[0].info.calls["drafter"]


def test_an_engine_takes_token_ids_and_samples_share_them(pair, texts):
    decoder = decoder_of(pair)
    ids = pair.verifier.tokenizer.encode(texts[0], add_special_tokens=False)
    engine = decoder.engine(prompt_length=32, rows=4, predictions=True, num_samples=2)
    engine.add(specjax.Request(PROMPTS[0], prediction=ids))
    engine.add(specjax.Request(PROMPTS[1], prediction=texts[1] + 99 * " zu lang"))
    rows = sorted(engine.step(until_empty=True), key=lambda row: (row.index, row.sample))
    assert [row.text for row in rows] == [texts[0]] * 2 + [texts[1]] * 2
    assert all(row.info.verifier_calls <= 3 for row in rows)


def test_the_rest_of_a_prompt_has_a_prediction_too():
    pair = specjax.load_pair("gsm8k")
    decoder = decoder_of(pair, max_new_tokens=24)
    question = "Tom has 3 apples and buys 4 more. How many apples does he have?"
    whole = decoder([question])
    prefix = decoder.prefix("Tom has 3 apples")
    rest = question.removeprefix("Tom has 3 apples")
    again = decoder([rest], prefix=prefix, predictions=whole.rows)
    assert again.texts == whole.texts
    assert again.info.verifier_calls <= 4 < whole.info.verifier_calls


@pytest.mark.parametrize(
    ("predictions", "told"),
    [
        ("a text", "predictions must be a list with a text, .* each of the 4 prompts, got"),
        (["a"], "each of the 4 prompts, got"),
        (
            [1, 2, 3, 4],
            r"predictions\[0\] must be a text, a list of token ids or a row of a result, got 1",
        ),
        ([None, [-1], None, None], r"predictions\[1\] has token -1"),
        ([None, "\ud800", None, None], r"predictions\[1\] has half a surrogate pair"),
    ],
)
def test_other_predictions_are_refused(pair, predictions, told):
    with pytest.raises(UserError, match=told):
        decoder_of(pair)(PROMPTS, predictions=predictions)


def test_without_copies_there_is_nothing_to_predict(pair):
    decoder = specjax.Decoder(pair, sampling=GREEDY)
    with pytest.raises(UserError, match='no drafter here copies: .* drafting="Lookup'):
        decoder(PROMPTS, predictions=PROMPTS)
    with pytest.raises(UserError, match="no drafter here copies"):
        decoder.engine(prompt_length=32, predictions=True)
    engine = decoder_of(pair).engine(prompt_length=32)
    with pytest.raises(UserError, match="make the engine with predictions=True"):
        engine.add(specjax.Request(PROMPTS[0], prediction="Ein Mann"))
