"""A head follows a verifier whose weights change, and a head that is left alone does not."""

import jax
import numpy as np

from specjax import Decoder, Pair, TextModel
from specjax.compilation import count_compilations
from specjax.models.heads import draft_head, places_of
from specjax.partitioning import Partitioner, make_mesh
from specjax.text.teacher_forcing import decode_texts
from specjax.tokenizers import ByteTokenizer
from specjax.training import DrafterRecipe, HeadRefresh
from tests.heads.tiny_heads import llama

VOCAB = ByteTokenizer().vocab_size
PROMPTS = [np.arange(first, first + 4, dtype=np.int32) for first in range(10, 26)]


def verifier_of(seed, mesh=None):
    model, params = llama(VOCAB, seed, scale=6.0)
    if mesh is not None:
        params = Partitioner(mesh).replicate(params)
    return TextModel(model, params, ByteTokenizer(), mesh)


def head_of(verifier, draft_vocab=None):
    recipe = DrafterRecipe(max_draft=3, draft_vocab=draft_vocab)
    config = recipe.head_for(verifier)
    head = draft_head(config, verifier.model)
    params = head.init(jax.random.key(1))
    if draft_vocab is not None:
        params["places"] = places_of(np.arange(draft_vocab), VOCAB)
    params = verifier.place(params)
    return recipe, TextModel(head, params, verifier.tokenizer, verifier.mesh)


def texts_of(verifier):
    return decode_texts(Decoder(verifier, max_new_tokens=12), PROMPTS, seed=3)


def tokens_per_call(head, verifier):
    decoder = Decoder(Pair(head, verifier), max_draft=3, max_new_tokens=12)
    return decoder(PROMPTS, seed=4).info.tokens_per_verifier_call


def test_a_head_follows_its_verifier():
    first, second = verifier_of(0), verifier_of(1)
    recipe, head = head_of(first)
    refresh = HeadRefresh(recipe, updates=60, rows=12, learning_rate=1e-2)
    start = tokens_per_call(head, first)
    trained = refresh(Pair(head, first), texts_of(first))
    with count_compilations() as counts:
        again = refresh(Pair(trained, second), texts_of(second))
    assert counts.compiled + counts.read == 0
    learnt, left, followed = (
        tokens_per_call(*each) for each in ((trained, first), (trained, second), (again, second))
    )
    assert learnt > start + 0.3, "the arrays of an earlier head stay"
    assert followed > left + 0.3, (start, learnt, left, followed)


def test_a_head_of_some_tokens_keeps_its_output():
    verifier = verifier_of(0)
    recipe, head = head_of(verifier, draft_vocab=20)
    after = HeadRefresh(recipe, updates=2)(Pair(head, verifier), texts_of(verifier)).params
    same = jax.tree.map(lambda x, y: bool((x == y).all()), head.params, after)
    assert same.pop("places") and same["network"].pop("logits_dense") == {"kernel": True}
    assert not any(jax.tree.leaves(same))


def test_devices_share_the_texts():
    ours = []
    for mesh in (None, make_mesh(2, 1)):
        verifier = verifier_of(0, mesh)
        recipe, head = head_of(verifier)
        refresh = HeadRefresh(recipe, updates=2, rows=5 if mesh else 6)
        ours.append(refresh(Pair(head, verifier), texts_of(verifier_of(0))).params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), *ours)
