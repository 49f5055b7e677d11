"""Drafted trees, beside their laws in tests/drafting/test_laws.py."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, processors, rules, types, verification
from specjax.types import ChildLaw, Sampling, ScoredBlock
from specjax.verification.chains import accept
from tests import laws
from tests.decoding.helpers import begin
from tests.drafting import binding
from tests.drafting.test_laws import JUDGES, SHAPES
from tests.laws import MODEL, A, P, V
from tests.models.tiny import quick_jit
from tests.tables import targets

N = 3


def given(rule, tables=(P, A)):
    return decoding.MethodParams(tables[0], drafting.chain.ChainParams(tables[1]), rule)


@pytest.mark.parametrize("judge", ["Traversal", "TopDown"])
def test_a_tree_without_branches_is_a_chain(judge):
    """Draft by draft, the thresholds are those of Block and of Token."""
    plain = {"Traversal": verification.Block(), "TopDown": verification.Token()}[judge]
    chain, laws = jnp.arange(3, dtype=jnp.int32), jnp.full(3, ChildLaw.WITHOUT, jnp.int32)

    @jax.jit
    def both(uniforms, tokens, q, p, count):
        block = ScoredBlock(tokens, q, p, count, chain, laws)
        return accept(plain, uniforms, block), JUDGES[judge].walk(uniforms, block)

    rng = np.random.default_rng(0)
    for _ in range(20):
        q, p = (rng.dirichlet(np.ones(V), 4).astype(np.float32) for _ in range(2))
        tokens = np.array([rng.choice(V, p=row / row.sum()) for row in q[:3]], np.int32)
        uniforms = rng.random(3, np.float32)
        count = jnp.int32(rng.integers(4))
        (acceptance, accepted), path = both(uniforms, tokens, q, p, count)
        assert path.length == accepted
        np.testing.assert_array_equal(path.nodes[: int(accepted)], np.arange(1, accepted + 1))
        if accepted < count:
            rest = np.maximum(acceptance.scales[accepted] * p[accepted] - q[accepted], 0.0)
            np.testing.assert_allclose(
                path.weights / path.weights.sum(), rest / rest.sum(), atol=2e-6
            )


INPUTS = np.array([[0, 1, 2], [2, 0, 0], [1, 1, 0]], np.int32)
LENGTHS = np.array([3, 1, 2], np.int32)
ROWS = {"ids": np.arange(3), "limits": np.array([9, 7, 9]), "max_new": 9}


@pytest.mark.parametrize("limits", [None, np.array([0, 2, 3], np.int32)])
@pytest.mark.parametrize(
    "kind", [("Walk", "top"), ("Traversal", "top+1"), ("TopDown", "without")], ids=str
)
def test_greedy_trees_are_the_verifiers_own_text(kind, limits):
    """Larger than those whose laws are enumerated; limits and ends are in the middle of trees."""
    judge, children = kind
    alone = decoding.Autoregressive(MODEL, eos_ids=(2,))
    params, rows = given(rules.Lossless()), ROWS | {"sampling": Sampling(0.0)}
    want = alone.run(params, begin(alone, params, INPUTS, LENGTHS, **rows), 100)
    tree = drafting.trees.Topology((0, 0, 0, 1, 1, 2, 4))
    drafter = binding.tree(MODEL, tree, children)
    method = decoding.Speculative(MODEL, drafter, JUDGES[judge], eos_ids=(2,))
    start = begin(method, params, INPUTS, LENGTHS, draft_limits=limits, **rows)
    state = method.run(params, start, 100)
    np.testing.assert_array_equal(state.tokens, want.tokens)
    np.testing.assert_array_equal(state.lengths, want.lengths)


@pytest.mark.parametrize("children", ["top", "without"])
def test_a_greedy_tree_grows_below_the_most_probable_paths(children):
    """As it does when sampling, where the most probable tokens are the children."""
    beam = drafting.trees.Beam(3, 2, 2, keep=6 if children == "top" else None)

    def blocks(children, temperature):
        drafter = binding.tree(MODEL, beam, children)
        params = drafting.chain.ChainParams(A)
        state = drafter.prefill(params, types.Prompts(INPUTS, LENGTHS), 20)
        inputs = types.DraftInputs(
            jnp.array([2, 2, 1]),
            jnp.full(3, drafter.max_draft),
            jnp.zeros((3, drafter.num_uniforms)),
            Sampling(jnp.full(3, temperature)),
            jnp.ones(3, bool),
        )
        return drafter.propose(params, state, inputs)[0]

    blocks = quick_jit(blocks, static_argnums=0)
    drawn, greedy = blocks("top", 1.0), blocks(children, 0.0)
    np.testing.assert_array_equal(greedy.tokens, drawn.tokens)
    np.testing.assert_array_equal(greedy.parents, drawn.parents)
    # The control: ranked by a greedy distribution, paths of the first child would win ties.
    first = jnp.array([[0, 0, 1, 1, 3, 3]])
    assert (np.asarray(drawn.parents)[:, :2] == 0).all() and (drawn.parents[:, :6] != first).any()


def test_processors_follow_the_paths_of_trees():
    """The law of a penalised verifier, whose state differs from sibling to sibling."""
    penalty, row = processors.FrequencyPenalty(1.2), laws.Row(limit=N)
    drafter = binding.tree(MODEL, SHAPES["bush"], "top+1")
    texts = laws.Texts(
        decoding.Speculative(MODEL, drafter, verification.Traversal()), processors=(penalty,)
    )
    (found,) = texts(given(rules.OPT(0.2))._replace(processors=((),)), [row])
    tails = itertools.chain(*(itertools.product(range(V), repeat=n) for n in range(N)))
    counts = np.array([np.bincount(np.array(tail, int), minlength=V) for tail in tails])

    def penalised(table):
        weights = laws.after(table, row) * np.exp(-1.2 * counts)
        return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)

    confidences = laws.after(A, row), laws.after(P, row)
    pi = targets(rules.OPT(0.2), (penalised(A), penalised(P), *confidences))
    assert laws.distance(found, laws.law_of(pi, row, ends=())) < 1e-5


def test_greedy_trees_propose_what_processors_leave():
    """A verifier that drafts for itself accepts all."""
    drafter = binding.tree(MODEL, drafting.trees.k_ary(2, 1), "top")
    method = decoding.Speculative(MODEL, drafter, verification.Walk())
    penalised = Sampling(0.0, processors=(processors.FrequencyPenalty(1.2),))
    params = given(rules.Lossless(), (P, P))._replace(processors=((),))
    start = begin(method, params, INPUTS, LENGTHS, **ROWS, sampling=penalised)
    state = method.run(params, start, 100)
    np.testing.assert_array_equal(state.lengths, ROWS["limits"])
    np.testing.assert_array_equal(state.steps, [3, 3, 3])
    assert (np.asarray(state.tokens)[:, :3] != np.asarray(state.tokens)[:, 3:6]).any()


WRONG = [
    (lambda: drafting.trees.Topology(()), "parents must be a tuple such as"),
    (lambda: drafting.trees.Topology("00"), "parents must be a tuple such as"),
    (lambda: drafting.trees.Topology((0, 0.5)), r"parents\[1\] must be a whole number"),
    (lambda: drafting.trees.Topology((0, 2)), r"parents\[1\] must be at most 1"),
    (lambda: drafting.trees.Topology((0, 1, 0)), "must not decrease"),
    (lambda: drafting.trees.Topology((0, -1)), r"parents\[1\]"),
    (lambda: drafting.trees.Beam(0, 2, 1), "depth must be a whole number of at least 1"),
    (lambda: drafting.Tree(2, 0), "width must be a whole number of at least 1"),
    (lambda: drafting.trees.Beam(2, 2, 2, keep=7), "keep must lie between 2"),
    (lambda: drafting.trees.Beam(2, 2, 2, keep=1), "keep must lie between 2"),
    (
        lambda: binding.tree(MODEL, SHAPES["kept"], "without"),
        "keep=4 needs beam and children='top': leaving out drawn tokens by their values would",
    ),
    (
        lambda: binding.tree(MODEL, drafting.trees.k_ary(1, 4)),
        "a node of the tree has 4 children, but there are only 3 tokens",
    ),
    (
        lambda: binding.tree(MODEL, SHAPES["pair"], "best"),
        "children must be one of 'top', 'top.1', 'without', 'independent', got 'best'",
    ),
    (
        lambda: decoding.Round(MODEL, drafting.Chain(MODEL, 2), verification.Walk()),
        "Walk needs a drafter of trees",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_wrong_tree_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_traversal_needs_to_know_how_tokens_were_drawn():
    @dataclasses.dataclass(frozen=True)
    class Silent(drafting.Tree):
        def propose(self, *args, **options):
            block, state = super().propose(*args, **options)
            return block._replace(laws=None), state

    method = decoding.Speculative(
        MODEL, Silent(parents=(0, 0), model=MODEL), verification.Traversal()
    )
    params = given(rules.Lossless())
    with pytest.raises(AssertionError, match="must set DraftBlock.laws"):
        method.run(params, begin(method, params, INPUTS, LENGTHS, **ROWS), 3)


def test_shapes():
    assert drafting.trees.k_ary(2, 2).parents == (0, 0, 1, 1, 2, 2)
    assert drafting.trees.Topology((0, 0, 1, 1, 4)).depths == (1, 1, 2, 2, 3)
    assert drafting.trees.Beam(3, 2, 2).size == 10 and drafting.trees.Beam(3, 3, 2).size == 15
    assert types.ChildLaw.OFF == 3
    assert jax.tree.leaves(drafting.trees.k_ary(2, 2)) == [drafting.trees.k_ary(2, 2)]
