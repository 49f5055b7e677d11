"""Blocks that are trees: what the verifier reads of them. Laws: tests/drafting/test_laws.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing, types, verification
from specjax.decoding.blocks import part_of, shape_of
from tests.decoding.trees import Likeliest
from tests.models.tiny import quick_jit

V = 3
MODEL = testing.TabularModel(V, 2)
P = jnp.asarray(testing.random_table(1, V, 2, scale=1.5))
Q = jnp.asarray(testing.random_table(2, V, 1, scale=1.5))
# Two children each of the root and of its first child; a grandchild below the last of these.
BUSH = (0, 0, 1, 1, 4)


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


def test_parts_that_read_no_trees_are_refused():
    tree = Likeliest(V, BUSH)
    with pytest.raises(ValueError, match="Block cannot verify the trees of Likeliest"):
        decoding.Speculative(MODEL, tree)
    with pytest.raises(
        ValueError, match="Likeliest drafts trees: it cannot draft for an inner round"
    ):
        drafting.cascades.VerticalCascade(tree, MODEL, 3, verification=verification.Walk())

    @dataclasses.dataclass(frozen=True)
    class Chains(testing.TabularModel):
        reads_trees = False

    with pytest.raises(ValueError, match="drafts trees, which Chains cannot read"):
        decoding.Speculative(Chains(V, 2), tree, verification.Walk())
    method = decoding.Speculative(MODEL, tree, verification.Walk())
    with pytest.raises(ValueError, match="rule must not have a carry in a round over trees"):
        method.check_rule(rules.Budgeted(rules.OPT(0.1), 0.1))
    chain = drafting.Chain(MODEL, 2)
    assert decoding.Speculative(MODEL, chain, verification.Token()).max_draft == 2


def test_the_sources_of_a_path():
    method = decoding.Speculative(MODEL, Likeliest(V, BUSH), verification.Walk())
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
