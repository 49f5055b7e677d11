import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Decoder, TextModel
from specjax.compilation import count_compilations
from specjax.data.examples import Example
from specjax.models import Seq2SeqLM
from specjax.training.recipe import Evaluation, OutputScorer
from specjax.types import Sampling
from tests.training.toy import CONFIG, Numbers, copies, copy_pairs, train_copies

EXAMPLES, PAIRS = copies(10, seed=5), copy_pairs(10, seed=5)
EVALUATION = Evaluation(metrics=("exact_match", "bleu"), max_new_tokens=40, batch_size=4)


def scorer(evaluation=EVALUATION, **changes):
    options = {"examples": EXAMPLES, "pairs": PAIRS, "name": "val"}
    return OutputScorer(evaluation, CONFIG, Numbers(), **(options | changes))


def endless():
    """Parameters that write the token 0 for ever: their logits are all 0."""
    params = Seq2SeqLM(CONFIG).init(jax.random.key(3))
    params["decoder"]["logits_dense"]["kernel"] = jnp.zeros((CONFIG.embed_dim, 12))
    return params


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_copies(tmp_path_factory.mktemp("run"), num_steps=30).params


def test_scores_are_those_of_the_public_decoder_on_the_same_prompts(trained):
    figures = scorer()(trained)
    decoder = Decoder(
        TextModel(Seq2SeqLM(CONFIG), trained, Numbers()),
        sampling=Sampling(0.0),
        max_new_tokens=40,
        batch_size=4,
    )
    texts = decoder([e.inputs for e in EXAMPLES], progress=False).texts
    expected = 100.0 * np.mean([t == e.targets for t, e in zip(texts, EXAMPLES, strict=True)])
    assert figures["val_exact_match"] == expected
    assert set(figures) == {"val_exact_match", "val_bleu", "val_cut"}
    one = dataclasses.replace(EVALUATION, metrics=("exact_match",), limit=1)
    assert scorer(one)(trained)["val_exact_match"] == 100.0 * (texts[0] == EXAMPLES[0].targets)
    assert scorer(Evaluation(metrics=()))(trained) == {}


def test_cut_outputs_are_counted_and_told(capsys, monkeypatch):
    """They may be longer than twice the inputs' bucket: a short input may have a long answer."""
    lengths, real = [], Decoder.__call__

    def spy(self, prompts, **options):
        result = real(self, prompts, **options)
        lengths.extend(map(len, result.tokens))
        return result

    monkeypatch.setattr(Decoder, "__call__", spy)
    assert scorer(progress=True)(endless())["val_cut"] == 10
    told = capsys.readouterr().err
    assert "10 of 10 val outputs were cut at MAX_NEW_TOKENS=40; raise it" in told
    assert lengths == [40] * 10  # inputs of at most 6 tokens, in a bucket of 16


def test_scoring_other_parameters_compiles_nothing(trained):
    # Another length than elsewhere: its first scoring compiles.
    score = scorer(Evaluation(metrics=("exact_match",), max_new_tokens=24, batch_size=4))
    for params, compiles in ((trained, True), (endless(), False)):
        with count_compilations() as counts:
            score(params)
        assert (counts.compiled + counts.read > 0) == compiles


def test_inputs_that_do_not_fit_are_told_and_count_as_empty(trained, capsys):
    evaluation = Evaluation(metrics=("exact_match",), max_input_tokens=4, max_new_tokens=40)
    short = scorer(evaluation, progress=True)
    long = [i for i in range(10) if len(PAIRS[i][0]) > 4]
    told = f"skipped {len(long)} of 10 val inputs, which are empty or longer than 4 tokens"
    assert len(long) > 0 and told in capsys.readouterr().err
    assert short(trained)["val_exact_match"] <= 100.0 - 10.0 * len(long)
    # Where all are too long, nothing is decoded.
    examples = [Example(0, "3 4 5 6", "3 4 5 6")]
    evaluation = dataclasses.replace(evaluation, max_input_tokens=2)
    score = scorer(evaluation, examples=examples, pairs=copy_pairs(1, seed=0))
    assert score({}) == {"val_exact_match": 0.0, "val_cut": 0}


def test_fewer_texts_than_the_limit_are_reported(capsys):
    for limit, told in ((10, ""), (11, "scoring all 10 val texts; limit=11 is larger")):
        scorer(dataclasses.replace(EVALUATION, limit=limit), progress=True)
        err = capsys.readouterr().err
        assert told in err and bool(told) == bool(err)
