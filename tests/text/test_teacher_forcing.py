"""What a reading of known texts says is what decoding them said."""

import functools

import jax
import numpy as np
import pytest

from specjax import Decoder, TextModel
from specjax.models import model_from_config
from specjax.partitioning import Partitioner, make_mesh
from specjax.text.teacher_forcing import (
    KnownTexts,
    batches,
    begin,
    decode_texts,
    read,
    read_on,
    rows_at_once,
    with_top,
)
from specjax.types import Sampling
from tests.models.tiny import CONFIGS, random_params
from tests.training.toy import Numbers
from tests.variants import variants

SAMPLING = Sampling(0.7, top_k=5)
PROMPTS = [
    np.random.default_rng(n).integers(Numbers.vocab_size, size=n).astype(np.int32)
    for n in (3, 17, 8, 1, 5)
]
FAMILIES = ("t5_v1_1", "llama", "gemma2")


@functools.cache
def model_of(family):
    model = model_from_config(CONFIGS[family])
    return TextModel(model, random_params(model), Numbers())


def log_probs(model, texts, sampling=SAMPLING):
    return [values for values, _ in with_top(model, texts, sampling, 0)]


@functools.cache
def decoded(family):
    """Texts, and the log-probabilities that decoding gave their tokens."""
    model = model_of(family)
    decoder = Decoder(model, sampling=Sampling(0.7, top_k=5), max_new_tokens=18, batch_size=4)
    result = decoder(list(PROMPTS), seed=1, log_probs=True, progress=False)
    return decode_texts(decoder, PROMPTS, seed=1), [row.log_probs_processed for row in result]


@pytest.mark.parametrize("family", variants(FAMILIES, "t5_v1_1"))
def test_log_probs_are_those_of_decoding(family):
    texts, want = decoded(family)
    found = log_probs(model_of(family), texts)
    for mine, theirs in zip(found, want, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    # After another prompt, or drawn otherwise, the same tokens have other log-probabilities.
    turned = KnownTexts(texts.prompts[::-1], texts.outputs)
    assert abs(log_probs(model_of(family), turned)[1] - want[1]).max() > 0.1
    assert abs(log_probs(model_of(family), texts, Sampling(1.4))[1] - want[1]).max() > 0.1


@pytest.mark.parametrize("family", variants(FAMILIES, "t5_v1_1"))
def test_a_mesh_changes_nothing(family):
    model, (texts, want) = model_of(family), decoded(family)
    mesh = make_mesh(data=4, model=2)
    where = Partitioner(mesh)
    params = where.place(model.params, where.param_shardings(model.model, model.params))
    spread = TextModel(model.model, params, model.tokenizer, mesh)
    for mine, theirs in zip(log_probs(spread, texts, SAMPLING), want, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_chunks_and_batches_read_the_same():
    model, (texts, _) = model_of("t5_v1_1"), decoded("t5_v1_1")
    params, small = model.prepared, model.model
    (_, whole), *more = batches(texts, 8)
    assert not more and whole.real.sum() == sum(map(len, texts.outputs))
    want = jax.jit(lambda rows: read(small, params, rows))(whole)

    @jax.jit
    def chunk(begun, at):
        return read_on(small, params, begun, at, 8)

    begun = jax.jit(lambda rows: begin(small, params, rows))(whole)
    for at in range(0, whole.outputs.shape[1], 8):
        said, begun = chunk(begun, np.int32(at))
        for mine, theirs in zip(said, want, strict=True):
            np.testing.assert_allclose(mine, theirs[:, at : at + 8], atol=2e-5)
    seen = []
    for places, rows in batches(texts, 2, by_length=True):
        said = read(small, params, rows)
        for row, i in enumerate(places):
            size = len(texts.outputs[i])
            assert rows.ends[row] == size and rows.lengths[row] == len(texts.prompts[i])
            np.testing.assert_allclose(said.logits[row, :size], want.logits[i, :size], atol=2e-5)
            seen.append(i)
    assert sorted(seen) == list(range(5)) and not rows.real[len(places) :].any()


def test_rows_that_fit_into_memory(monkeypatch):
    texts = KnownTexts([np.ones(3)] * 6, [np.ones(40)] * 6)
    assert rows_at_once(texts, 100, 2) == 4
    monkeypatch.setattr("specjax.text.teacher_forcing._ENTRIES", 2 * 100 * 64 * 2)
    assert rows_at_once(texts, 100, 2) == 2
    assert rows_at_once(texts, 1000, 2) == 1


def test_nan_and_prompts_that_cannot_be_decoded_are_refused():
    model, (texts, _) = model_of("t5_v1_1"), decoded("t5_v1_1")
    params = jax.tree.map(lambda x: x * np.float32(np.nan), model.params)
    broken = TextModel(model.model, params, model.tokenizer, name="broken")
    with pytest.raises(ValueError, match="broken gives NaN: check the checkpoint"):
        log_probs(broken, texts, SAMPLING)
    with pytest.raises(ValueError, match="prompt 1 has 17 tokens"):
        decode_texts(
            Decoder(model, max_new_tokens=2, buckets=(4,)), [PROMPTS[0], PROMPTS[1]], seed=0
        )
