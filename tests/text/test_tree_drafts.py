"""`Decoder(drafting=Tree(...))`: the verifier's texts, in fewer passes."""

import pytest

import specjax
from specjax import verification
from specjax.data.examples import read_examples
from specjax.text import Branches, Cascade, Lookup, Tree
from specjax.text.directories import built_in_pair
from specjax.types import Sampling
from tests import tiny_pair

SHAPE = {"max_new_tokens": 12, "batch_size": 4, "buckets": (32,)}
PROMPTS = tiny_pair.sentences(6, seed=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return specjax.load_pair(**tiny_pair.write_pair(tmp_path_factory.mktemp("pair")))


@pytest.mark.parametrize(
    ("tree", "judge"),
    [
        (Tree(depth=3, width=2), None),
        (Tree(depth=3, width=2, beam=2, children="top"), verification.Walk()),
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
    decoder = specjax.Decoder(pair, drafting=Tree(depth=2, width=2), **SHAPE)
    together = decoder(PROMPTS, seed=5)
    assert decoder(PROMPTS[2:3], ids=[2], seed=5).texts == together.texts[2:3]
    assert together.info.accepted > 0


def test_parents_may_be_a_list():
    tree = Tree(parents=[0, 0, 1])
    assert hash(tree) == hash(Tree(parents=(0, 0, 1))) and tree.shape.size == 3


PLANS = {
    "binary": (Tree(depth=3, width=2), None),
    "most probable": (Tree(depth=2, width=4, children="top"), verification.Walk()),
    "beam": (Tree(depth=4, width=2, beam=2), None),
    "kept": (Tree(depth=4, width=3, beam=3, keep=12, children="top"), verification.Walk()),
    "own": (Tree(parents=(0, 0, 0, 1, 1, 2, 4), children="without"), None),
    "independent": (Tree(depth=3, width=2, children="independent"), None),
    "copies": (Lookup(copies=3), None),
    "siblings": (Cascade([[1, 3], [0, 1]], last=Lookup(), width=8), None),
    "branches": (Branches((Tree(depth=3, width=2), "drafter", Lookup(copies=2))), None),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["multi30k_ende", "gsm8k"])
def test_greedy_texts_of_the_built_in_pairs(name):
    pair = specjax.load_pair(name)
    (source,) = built_in_pair(name).glob("samples.*")
    field = "en" if source.suffix == ".tsv" else "question"
    samples = [example.inputs for example in read_examples(source, inputs_field=field)]
    # A hundred: the samples, and their beginnings.
    cut = [
        " ".join(words[: size * len(words) // 4])
        for size in (2, 3, 1)
        for words in map(str.split, samples)
    ]
    prompts = [*samples, *cut][:100]
    options = {"sampling": Sampling(0.0), "max_new_tokens": 24, "batch_size": 25}
    want = specjax.Decoder(pair.verifier, **options)(prompts, progress=False)
    for kind, (tree, judge) in PLANS.items():
        found = specjax.Decoder(pair, drafting=tree, verification=judge, **options)(
            prompts, progress=False
        )
        wrong = [i for i in range(100) if found.texts[i] != want.texts[i]]
        assert not wrong, (kind, wrong)
        assert found.info.verifier_calls < want.info.verifier_calls
