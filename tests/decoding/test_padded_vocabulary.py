"""The law of tokens from models whose embeddings are padded to different sizes."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import specjax
from specjax.models import LlamaConfig, model_from_config
from tests import laws
from tests.models.tiny import quick_jit, random_params
from tests.training.toy import Numbers

TOKENS, EOS = 5, 1
SIZES = {
    "embed_dim": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 16,
    "num_layers": 1,
}  # fmt: skip
PROMPT = np.array([3, 2, 4], np.int32)


class Words(Numbers):
    vocab_size = TOKENS


def model(rows, seed, tied):
    network = model_from_config(LlamaConfig(vocab_size=rows, tie_embeddings=tied, **SIZES))
    params = random_params(network, seed)
    # Flat enough that drafts are accepted and rejected.
    if tied:
        params["token_embedder"]["embedding"] *= 0.3
    else:
        params["decoder"]["logits_dense"]["kernel"] *= 0.3
    return specjax.TextModel(network, params, Words())


def law(text_model, tokens=TOKENS):
    """The probability of each output of at most two tokens, from full passes."""
    paths = np.array(list(itertools.product(range(tokens), repeat=2)), np.int32)
    texts = np.concatenate([np.tile(PROMPT, (len(paths), 1)), paths], axis=1)
    network = dataclasses.replace(text_model.model, tokens=tokens)
    logits = quick_jit(network.apply)(text_model.params, texts)
    probs = np.asarray(jax.nn.softmax(logits[:, 2:4], axis=-1))
    found = {}
    for path, (first, second) in zip(paths.tolist(), probs, strict=True):
        if path[0] == EOS:
            found[(EOS,)] = first[EOS]
        else:
            found[tuple(path)] = first[path[0]] * second[path[1]]
    return found


@pytest.mark.parametrize(("verification", "tied"), [("Token", True), ("Block", False)])
def test_the_law_is_the_verifiers_over_the_tokens(verification, tied):
    drafter, verifier = model(7, 1, tied), model(9, 2, tied)
    decoder = specjax.Decoder(
        specjax.Pair(drafter, verifier),
        verification=getattr(specjax.verification, verification)(),
        max_draft=2,
    )
    texts = laws.Texts(decoder.method, max_new=2)
    (found,) = texts(decoder.params, [laws.Row(tuple(PROMPT.tolist()), 2)])
    assert laws.distance(found, law(verifier)) < 1e-5
    # Without the renormalisation, or by the drafter's law, it would be far away.
    assert laws.distance(found, law(verifier, tokens=9)) > 0.1
    assert laws.distance(found, law(drafter)) > 0.1
