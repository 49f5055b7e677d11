"""Blocks that are trees: what the verifier reads of them, and the law of what rounds emit."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing, types, verification
from specjax.decoding.blocks import part_of, shape_of
from specjax.types import Sampling
from tests.decoding.helpers import begin
from tests.decoding.trees import Likeliest, Walk
from tests.laws import Law
from tests.models.tiny import quick_jit
from tests.tables import targets
from tests.variants import variants

V, N = 3, 3
MODEL = testing.TabularModel(V, 2)
P = jnp.asarray(testing.random_table(1, V, 2, scale=1.5))
Q = jnp.asarray(testing.random_table(2, V, 1, scale=1.5))
# Two children each of the root and of its first child; a grandchild below the last of these.
BUSH = (0, 0, 1, 1, 4)


def law_of(rule, prompt=(0, 1)):
    """What the first N tokens must follow."""
    p = testing.prefix_distributions(MODEL, P, prompt, N, jax.nn.softmax)
    small = testing.TabularModel(V, 1)
    q = testing.prefix_distributions(small, Q, prompt, N, jax.nn.softmax)
    return testing.target_law(targets(rule, (q, p, q, p)), N)


TREES = [(BUSH, True), *itertools.product([BUSH, (0, 0), (0, 1)], [False])]


@pytest.mark.parametrize("tree", variants(TREES, TREES[0]), ids=str)
def test_a_walk_over_trees_follows_the_target_exactly(tree):
    parents, early = tree
    one_round = decoding.Speculative(
        MODEL, Likeliest(V, parents, early), Walk(), (1 + len(parents),)
    )
    law = Law(one_round)
    for rule in (rules.Lossless(), rules.TokenV3(0.5)):
        found = law(decoding.MethodParams(P, Q, rule), (0, 1), N)
        assert testing.total_variation(found, law_of(rule)) < 1e-6
    # The control: the verifier's own law is another one.
    assert testing.total_variation(found, law_of(rules.Lossless())) > 0.01


@dataclasses.dataclass(frozen=True)
class Reordered(Walk):
    """Judges the children by the distribution after another node: a wrong parent."""

    def walk(self, uniforms, block):
        wrong = jnp.roll(block.target_probs, 1, axis=0)
        return super().walk(uniforms, block._replace(target_probs=wrong))


def test_control_of_a_wrong_parent():
    law = Law(decoding.Speculative(MODEL, Likeliest(V, BUSH), Reordered(), (6,)))
    found = law(decoding.MethodParams(P, Q), (0, 1), N)
    assert testing.total_variation(found, law_of(rules.Lossless())) > 0.05


def test_levels_read_after_each_other_are_the_tree_read_at_once():
    tree = quick_jit(shape_of)(jnp.array([BUSH] * 2, jnp.int32))
    prompts, lengths = jnp.array([[2, 1, 0, 0], [1, 0, 1, 1]], jnp.int32), jnp.array([2, 4])
    cache, last, at = quick_jit(MODEL.prefill, static_argnums=2)(
        P, types.Prompts(prompts, lengths), 12
    )
    read = quick_jit(MODEL.score_tree)
    block = jnp.concatenate([last[:, None], jnp.array([[1, 0, 2, 1, 2]] * 2)], axis=1)
    whole = read(P, cache, block, at, tree)[0]
    for start, end in ((0, 1), (1, 3), (3, 5), (5, 6)):
        given = block[:, start:end], at, part_of(tree, start, end)
        logits, _, updates = read(P, cache, *given)
        np.testing.assert_array_equal(logits, whole[:, start:end])
        cache = MODEL.write(cache, updates, at + start)


def test_nodes_see_their_path_alone_in_any_width():
    tree = quick_jit(shape_of)(jnp.array([BUSH], jnp.int32))
    np.testing.assert_array_equal(tree.depths[0], [0, 1, 1, 2, 2, 3])
    np.testing.assert_array_equal(tree.seen[0, 5], [True, True, False, False, True, True])
    assert part_of(tree, 0, 3).seen.shape == (1, 3, 3)
    # A chain is its simplest tree: what is read of it is what is read of a chain.
    prompt = jnp.array([[2, 1, 0, 0]], jnp.int32)
    prefill = quick_jit(MODEL.prefill, static_argnums=2)
    cache, _, at = prefill(P, types.Prompts(prompt, jnp.array([2])), 9)
    block = jnp.array([[1, 0, 2, 1]], jnp.int32)
    chain = quick_jit(shape_of)(jnp.arange(3, dtype=jnp.int32)[None])
    jax.tree.map(
        np.testing.assert_array_equal,
        quick_jit(MODEL.score)(P, cache, block, at),
        quick_jit(MODEL.score_tree)(P, cache, block, at, chain),
    )


def test_greedy_trees_are_the_verifiers_own_text():
    """In the loop, rows of several lengths, with draft limits that cut trees anywhere."""
    inputs, lengths = np.array([[0, 1, 2], [2, 0, 0], [1, 1, 0]], np.int32), np.array([3, 1, 2])
    given = {"ids": np.arange(3), "limits": np.array([9, 7, 9]), "max_new": 9}
    given["sampling"] = Sampling(0.0)
    method = decoding.Speculative(MODEL, Likeliest(V, BUSH), Walk())
    params = decoding.MethodParams(P, Q)
    alone = decoding.Autoregressive(MODEL)
    want = alone.run(params, begin(alone, params, inputs, lengths, **given), 100)
    for limits in (None, np.array([0, 3, 5], np.int32)):
        start = begin(method, params, inputs, lengths, draft_limits=limits, **given)
        state = method.run(params, start, 100)
        np.testing.assert_array_equal(state.tokens, want.tokens)
        assert int(state.steps.sum()) < int(want.steps.sum())


def test_parts_that_read_no_trees_are_refused():
    tree = Likeliest(V, BUSH)
    with pytest.raises(ValueError, match="Block cannot verify the trees of Likeliest"):
        decoding.Speculative(MODEL, tree)
    with pytest.raises(
        ValueError, match="Likeliest drafts trees: it cannot draft for an inner round"
    ):
        drafting.cascades.VerticalCascade(tree, MODEL, 3, verification=Walk())

    @dataclasses.dataclass(frozen=True)
    class Chains(testing.TabularModel):
        reads_trees = False

    with pytest.raises(ValueError, match="drafts trees, which Chains cannot read"):
        decoding.Speculative(Chains(V, 2), tree, Walk())
    method = decoding.Speculative(MODEL, tree, Walk())
    with pytest.raises(ValueError, match="rule must not have a carry in a round over trees"):
        method.check_rule(rules.Budgeted(rules.OPT(0.1), 0.1))
    chain = drafting.Chain(MODEL, 2)
    assert decoding.Speculative(MODEL, chain, verification.Token()).max_draft == 2


def test_the_sources_of_a_path():
    method = decoding.Speculative(MODEL, Likeliest(V, BUSH), Walk())
    batch = types.PromptBatch(
        np.full((64, 2), [0, 1]), np.full(64, 2), np.arange(64), np.full(64, 9)
    )
    params = decoding.MethodParams(P, Q, rules.Lossless())
    state = method.init(params, batch, max_new=9, sources=True)
    state = method.run(params, state, 1)
    codes, accepted = np.asarray(state.info.sources), state.info.accepted_lengths.argmax(1)
    names = method.source_names
    assert names == ("residual", "bonus", "verifier", "drafter")
    ends = set()
    for row, count in zip(codes, accepted.tolist(), strict=True):
        assert [names[code] for code in row[:count]] == ["drafter"] * count
        ends.add((count, names[row[count]]))
        assert (row[count + 1 :] == -1).all()
    # The path ends at a node with children, or at a leaf.
    assert (0, "residual") in ends and {name for _, name in ends} == {"residual", "bonus"}
