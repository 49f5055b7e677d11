"""How many tokens a verifier's pass over a tree gives: the loop's counts against exact sums."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing, verification
from specjax.types import Sampling
from tests.decoding.helpers import begin
from tests.drafting import binding

V, PAIRS, ROWS = 4, 20, 8000
MODEL = testing.TabularModel(V, 2)
PROMPT = (0, 1)


def tables(seed):
    """Probabilities after each two tokens: the verifier's, and a drafter's, far or near."""
    rng = np.random.default_rng(seed)
    p, other = (rng.dirichlet(np.ones(V), (V + 1) ** 2) for _ in range(2))
    return p, (other if seed % 2 else 0.8 * p + 0.2 * other)


def children(kind, q):
    """The ways to draw two children: (chance, their tokens, the law of each)."""
    top = int(np.argmax(q))
    fixed = np.eye(V)[top]
    off = q * (1.0 - fixed)
    for first in range(V):
        if kind == "top+1":
            yield off[first] / off.sum(), (first, top), (off / off.sum(), fixed)
            continue
        if kind == "chain":
            yield q[first], (first,), (q,)
            continue
        left = q.copy()
        if kind == "without":
            left[first] = 0.0
            left /= left.sum()
        for second in range(V):
            yield q[first] * left[second], (first, second), (q, left)


def expected(p, q, kind, joint, depth, before=PROMPT, scale=1.0):
    """The expected number of accepted nodes below a node whose mass is `scale` times p."""
    if depth == 0:
        return 0.0
    row, mean = before[-2] * (V + 1) + before[-1], 0.0
    for chance, tokens, laws in children(kind, q[row]):
        mass, reached = (scale if joint else 1.0) * p[row], 1.0
        for token, law in zip(tokens, laws, strict=True):
            accepted = min(1.0, mass[token] / law[token]) if law[token] else 0.0
            below = expected(p, q, kind, joint, depth - 1, (*before, token), accepted)
            mean += chance * reached * (accepted + (below if joint else accepted * below))
            reached *= 1.0 - accepted
            rest = np.maximum(mass - law, 0.0)
            total = rest.sum() + 1.0 - mass.sum()
            mass = rest / total if total > 1e-12 else rest
    return mean


# Name -> tree, its children, the verification.
CASES = {
    "SpecInfer": (drafting.trees.k_ary(2, 2), "independent", verification.TopDown()),
    "Sequoia": (drafting.trees.k_ary(2, 2), "without", verification.TopDown()),
    "Traversal, without": (drafting.trees.k_ary(2, 2), "without", verification.Traversal()),
    "Traversal, top+1": (drafting.trees.k_ary(2, 2), "top+1", verification.Traversal()),
    "chain of two": (drafting.trees.k_ary(2, 1), "chain", verification.Traversal()),
}


@pytest.fixture(scope="module")
def means():
    """Name -> the mean over all pairs, by exact sums and as counted."""
    found = {}
    for name, (tree, kind, judge) in CASES.items():
        kinds = "without" if kind == "chain" else kind
        method = decoding.Speculative(MODEL, binding.tree(MODEL, tree, kinds), judge)
        exact, counted = [], []
        for seed in range(PAIRS):
            p, q = tables(seed)
            exact.append(1.0 + expected(p, q, kind, isinstance(judge, verification.Traversal), 2))
            logits = (jnp.asarray(np.log(x), jnp.float32) for x in (p, q))
            verifier, drafter = logits
            small = drafting.chain.ChainParams(drafter)
            params = decoding.MethodParams(verifier, small, rules.Lossless())
            rows = {"ids": np.arange(ROWS), "limits": np.full(ROWS, 12), "seeds": seed}
            rows["sampling"] = Sampling(1.0)
            prompts = np.tile(np.array(PROMPT, np.int32), (ROWS, 1))
            start = begin(method, params, prompts, np.full(ROWS, 2), max_new=12, **rows)
            counted.append(np.mean(method.run(params, start, 1).lengths))
        found[name] = np.mean(exact), np.mean(counted)
    return found


@pytest.mark.exhaustive
def test_the_loop_counts_what_the_sums_say(means):
    for name, (exact, counted) in means.items():
        assert abs(exact - counted) < 0.01, (name, exact, counted)


@pytest.mark.exhaustive
def test_a_drawn_child_beside_the_top_ones_is_best(means):
    order = ["SpecInfer", "Sequoia", "Traversal, without", "Traversal, top+1"]
    for column in (0, 1):
        tokens = [means[name][column] for name in order]
        assert (np.diff(tokens) > 0.02).all(), tokens
    # But six nodes give less than a chain of six would: only two passes draft them.
    assert means["chain of two"][0] < means["SpecInfer"][0]
