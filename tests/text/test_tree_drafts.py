"""`Decoder(drafting=Tree(...))`: the verifier's texts, in fewer passes."""

import pytest

import specjax
from specjax import verification
from specjax.drafting import Tree
from specjax.types import Sampling
from tests import tiny_pair

SHAPE = {"max_new_tokens": 12, "batch_size": 4, "buckets": (32,)}
PROMPTS = tiny_pair.sentences(6, seed=3)


@pytest.mark.parametrize(
    ("tree", "judge"),
    [
        (Tree(depth=3, width=2), None),
        pytest.param(
            Tree(depth=3, width=2, beam=2, children="top"),
            verification.Walk(),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_greedy_texts_are_the_verifiers_own(pair, tree, judge):
    greedy = {"sampling": Sampling(0.0), **SHAPE}
    want = specjax.Decoder(pair.verifier, **greedy)(PROMPTS)
    decoder = specjax.Decoder(pair, drafting=tree, verification=judge, **greedy)
    found = decoder(PROMPTS)
    assert found.texts == want.texts
    assert found.info.verifier_calls < want.info.verifier_calls
    assert decoder.method.verification == (judge or verification.Traversal())
    # The same rows in an engine.
    engine = decoder.engine(prompt_length=32)
    for i, prompt in enumerate(PROMPTS):
        engine.add(specjax.Request(prompt, id=i))
    texts = {}
    while engine.unfinished:
        texts |= {row.index: row.text for row in engine.step()}
    assert [texts[i] for i in range(len(PROMPTS))] == want.texts


def test_drawn_texts_do_not_depend_on_the_batch(pair):
    decoder = specjax.Decoder(pair, drafting=Tree(depth=3, width=2), **SHAPE)
    together = decoder(PROMPTS, seed=5)
    assert decoder(PROMPTS[2:3], ids=[2], seed=5).texts == together.texts[2:3]
    assert together.info.accepted > 0


def test_parents_may_be_a_list():
    tree = Tree(parents=[0, 0, 1])
    assert hash(tree) == hash(Tree(parents=(0, 0, 1))) and tree.shape.size == 3
