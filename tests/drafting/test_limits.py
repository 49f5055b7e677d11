"""Drafters of drafters under every draft limit: what a limit cuts off changes no law.

All outputs of the whole loop are enumerated, with an end of sequence and a limit of their length.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing, verification
from specjax.drafting import trees
from specjax.drafting.trees import CHILDREN
from specjax.sampling import Sampling, distribution
from tests.drafting.choices import Outputs
from tests.variants import variants

V, EOS, PROMPT = 3, 2, (0, 1, 1, 0, 2, 1, 0, 1)
MODEL = testing.TabularModel(V, 2)
P, A, B = (jnp.asarray(testing.random_table(seed, V, 2, scale=1.5)) for seed in (1, 2, 3))
OF_A, OF_B = (drafting.NeuralDrafterParams(table) for table in (A, B))
COPIES = drafting.LookupDrafter(V, 2)
COPY = drafting.LookupDrafter(V, 1)
CHAIN = drafting.NeuralDrafter(MODEL, 1, name="b")
MATRIX = drafting.cascade([[1, 1], [0, 1]], {"a": MODEL}, COPY)
BY_A = drafting.VerticalCascadeParams(A, OF_B)


def tree(children, parents=(0, 0)):
    return drafting.TreeDrafter(MODEL, drafting.Topology(parents), children, "a")


def side_by_side(*drafters):
    return drafting.BranchesDrafter(drafters)


def reviewed(count, enough=None):
    return drafting.VerticalCascade(CHAIN, MODEL, count, enough, name="a")


# Name -> (a drafter, by how children are drawn, and its parameters).
WITH_TREES = {
    "tree and copies": lambda x: (side_by_side(tree(x), COPIES), (OF_A, ())),
    "copies and tree": lambda x: (side_by_side(COPIES, tree(x)), ((), OF_A)),
    "tree and chain": lambda x: (side_by_side(tree(x), CHAIN), (OF_A, OF_B)),
    "branches of branches": lambda x: (
        side_by_side(CHAIN, side_by_side(COPY, tree(x))),
        (OF_B, ((), OF_A)),
    ),
    "a deeper tree": lambda x: (side_by_side(tree(x, (0, 0, 1, 1)), COPY), (OF_A, ())),
}
OTHERS = {
    "wide chain": (drafting.CaterpillarDrafter(drafting.NeuralDrafter(MODEL, 2), 2), OF_A),
    "wide cascade": (drafting.CaterpillarDrafter(reviewed(2), 2), BY_A),
    "copies": (drafting.LookupTreeDrafter(COPIES, 2), ()),
    "chain and copies": (
        side_by_side(CHAIN, drafting.LookupTreeDrafter(COPY, 2), COPIES),
        (OF_B, (), ()),
    ),
    "copies or chain, and copies": (
        side_by_side(drafting.LookupFirst(COPIES, CHAIN, min_match=2), COPY),
        (((), OF_B), ()),
    ),
    "in turn, and a chain": (
        side_by_side(drafting.HorizontalCascade((CHAIN, COPY)), drafting.NeuralDrafter(MODEL, 1)),
        ((OF_B, ()), OF_A),
    ),
    "reviewed, and copies": (side_by_side(reviewed(2, 1), COPY), (BY_A, ())),
    "wide chain and copies": (
        side_by_side(drafting.CaterpillarDrafter(CHAIN, 2), COPIES),
        (OF_B, ()),
    ),
}
CHAINS = {
    "copy": (COPIES, ()),
    "copies or chain": (drafting.LookupFirst(COPIES, CHAIN, min_match=2), ((), OF_B)),
    "in turn": (drafting.HorizontalCascade((CHAIN, COPIES)), (OF_B, ())),
    "reviewed": (reviewed(2, 1), BY_A),
    "reviewed copies": (
        drafting.VerticalCascade(COPIES, MODEL, 2, name="a"),
        drafting.VerticalCascadeParams(A, ()),
    ),
    "a matrix": (MATRIX, drafting.cascade_params(MATRIX, {"a": A})),
}
JUDGES = {
    "Walk": verification.Walk(),
    "Traversal": verification.Traversal(),
    "TopDown": verification.TopDown(),
    "Token": verification.Token(),
    "Block": verification.Block(),
}
OF_TREES, OF_CHAINS = ("Walk", "Traversal", "TopDown"), ("Token", "Block", "Traversal")
# (drafter, how children are drawn, verification)
CASES = [
    *itertools.product(WITH_TREES, CHILDREN, OF_TREES),
    *((x, None, judge) for x, judge in itertools.product(OTHERS, OF_TREES)),
    *((x, None, judge) for x, judge in itertools.product(CHAINS, OF_CHAINS)),
]
QUICK = [
    *(("tree and copies", x, "Traversal") for x in CHILDREN),
    ("tree and copies", "top+1", "TopDown"),
    ("branches of branches", "top+1", "Traversal"),
    ("chain and copies", None, "Traversal"),
    ("wide chain", None, "Traversal"),
    ("copy", None, "Block"),
    ("reviewed copies", None, "Token"),
]


def made(name, children):
    if name in WITH_TREES:
        return WITH_TREES[name](children)
    return (OTHERS | CHAINS)[name]


def wanted(limit):
    """The law of the verifier's own outputs."""
    p = testing.prefix_distributions(MODEL, P, PROMPT, limit, lambda x: distribution(x, Sampling()))
    full, law = testing.target_law(p, limit), {}
    for value, text in enumerate(itertools.product(range(V), repeat=limit)):
        end = text.index(EOS) + 1 if EOS in text else limit
        law[text[:end]] = law.get(text[:end], 0.0) + full[value]
    return law


def distance(found, law):
    return 0.5 * sum(abs(found.get(x, 0.0) - law.get(x, 0.0)) for x in {*found, *law})


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=str)
def test_every_limit_leaves_the_law(case):
    name, children, judge = case
    drafter, own = made(name, children)
    outputs = Outputs(decoding.Speculative(MODEL, drafter, JUDGES[judge], eos_ids=(EOS,)))
    params = decoding.MethodParams(P, own, rules.Lossless())
    for length, limit in itertools.product((1, 3), range(drafter.max_draft + 1)):
        found = outputs(params, PROMPT, length, limit)
        assert distance(found, wanted(length)) < 1e-6, (length, limit)


FIRST, SECOND = (
    np.log([x], dtype=np.float32) for x in ([0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.15, 0.05])
)


@pytest.mark.parametrize("judge", ["Traversal", "TopDown"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_child_is_judged_by_its_law_without_the_siblings_that_a_limit_cuts(
    judge, kept, monkeypatch
):
    """The control leaves them out: the drawn token then seems to come from the whole of q."""
    if not kept:
        monkeypatch.setattr(trees, "_with_cut_siblings", lambda tree, parts: tree)
    model = testing.TabularModel(4, 0)
    pair = drafting.TreeDrafter(model, drafting.k_ary(1, 2), "top+1")
    drafter = side_by_side(pair, drafting.LookupDrafter(4, 2))
    outputs = Outputs(decoding.Speculative(model, drafter, JUDGES[judge]))
    own = drafting.NeuralDrafterParams(jnp.asarray(SECOND)), ()
    found = outputs(decoding.MethodParams(jnp.asarray(FIRST), own, rules.Lossless()), (0, 1), 1, 1)
    emitted = [found.get((token,), 0.0) for token in range(4)]
    want = [0.4, 0.3, 0.2, 0.1] if kept else [0.0, 0.6, 0.3, 0.1]
    np.testing.assert_allclose(emitted, want, atol=1e-6)
