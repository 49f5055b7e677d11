"""The formulas against simulations, and the shape of a published table."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from specjax import theory, verification
from specjax.drafting.trees import Topology
from specjax.types import ScoredBlock
from tests.benchmarks.tree_rounds import outcomes, rates_of

TRIALS = 400_000


def emitted(rng, acceptance, draft, trials=TRIALS):
    """How many tokens rounds emit: those accepted before the first rejection, and one."""
    stands = rng.random((trials, draft)) < acceptance
    return 1 + np.cumprod(stands, axis=1).sum(axis=1)


@pytest.mark.parametrize(
    ("acceptance", "draft"), [(0.8, 5), (0.3, 2), (1.0, 3), (0.0, 4), (0.6, 0)]
)
def test_one_drafter(acceptance, draft):
    found = emitted(np.random.default_rng(0), acceptance, draft)
    assert found.mean() == pytest.approx(theory.expected_tokens(acceptance, draft), rel=0.01)
    want = found.mean() / (1 + 0.1 * draft)
    assert theory.speculative_ewif(acceptance, draft, 0.1) == pytest.approx(want, rel=0.01)


@pytest.mark.parametrize(
    ("acceptance", "inner", "draft", "rounds"),
    [(0.8, 0.6, 3, 4), (0.5, 0.9, 5, 1), (1.0, 0.5, 2, 3), (0.9, 0.0, 2, 2), (0.7, 0.5, 1, 0)],
)
def test_a_vertical_cascade(acceptance, inner, draft, rounds):
    rng = np.random.default_rng(1)
    lengths = np.zeros(TRIALS, int)
    for _ in range(rounds):
        lengths += emitted(rng, inner, draft)
    longest = rounds * (draft + 1)
    stands = rng.random((TRIALS, longest)) < acceptance
    stands &= np.arange(longest) < lengths[:, None]
    found = 1 + np.cumprod(stands, axis=1).sum(axis=1).mean()
    want = theory.vertical_expected_tokens(acceptance, inner, draft, rounds)
    assert found == pytest.approx(want, rel=0.01)
    time = 1 + rounds * 0.2 + rounds * draft * 0.01
    got = theory.vertical_ewif(acceptance, inner, draft, rounds, (0.2, 0.01))
    assert found / time == pytest.approx(got, rel=0.01)


def test_a_horizontal_cascade():
    rng = np.random.default_rng(2)
    rates = np.array([0.9, 0.9, 0.7, 0.5, 0.5])
    found = 1 + np.cumprod(rng.random((TRIALS, 5)) < rates, axis=1).sum(axis=1).mean()
    costs = [0.2, 0.2, 0.1, 0.0, 0.0]
    assert theory.horizontal_ewif(rates, costs) == pytest.approx(found / 1.5, rel=0.01)
    one = theory.speculative_ewif(0.8, 4, 0.1)
    assert theory.horizontal_ewif([0.8] * 4, [0.1] * 4) == pytest.approx(one)


# Table 1 of arXiv 2312.11462: draft length and EWIF of T5-small, T5-base, and of both. A pass takes
# 0.02 and 0.04 of the verifier's time (arXiv 2211.17192, table 2).
PUBLISHED = {
    "CNNDM": ((9, 2.65), (8, 2.96), (5, 3, 3.03)),
    "ENDE": ((12, 3.61), (11, 3.75), (5, 8, 3.93)),
}
COSTS = (0.02, 0.04)


@pytest.mark.parametrize("task", PUBLISHED)
def test_a_horizontal_cascade_beats_one_drafter_as_published(task):
    """The acceptance rates behind the single drafters' figures give the figure of both."""
    *alone, (first, second, published) = PUBLISHED[task]
    small, base = (
        optimize.brentq(lambda a, k=k, c=c, e=e: theory.speculative_ewif(a, k, c) - e, 0.1, 0.99)
        for (k, e), c in zip(alone, COSTS, strict=True)
    )
    rates = [base] * first + [small] * second
    found = theory.horizontal_ewif(rates, [COSTS[1]] * first + [COSTS[0]] * second)
    assert found == pytest.approx(published, rel=0.01)
    for rate, cost in zip((small, base), COSTS, strict=True):
        assert max(theory.speculative_ewif(rate, k, cost) for k in range(1, 30)) < found


def test_the_standardised_improvement():
    calls = {"verifier": 40.0, "base": 100.0, "small": 300.0}
    sizes = {"verifier": 11000.0, "base": 220.0, "small": 77.0}
    want = 100 * 11000 / (40 * 11000 + 100 * 220 + 300 * 77)
    found = theory.standardised_improvement(100, calls, sizes, "verifier")
    assert found == pytest.approx(want)


@pytest.mark.parametrize(("acceptance", "cost"), [(0.8, 0.05), (0.6, 0.2), (0.95, 0.01)])
def test_the_best_draft_length_is_best(acceptance, cost):
    best = theory.optimal_draft(acceptance, cost)
    ewifs = [theory.speculative_ewif(acceptance, k, cost) for k in range(65)]
    assert 0 < best < 64 and ewifs[best] == max(ewifs) and ewifs[best] > ewifs[0] == 1.0


def test_where_drafts_do_not_help_none_is_best():
    assert theory.optimal_draft(0.3, 0.4) == theory.optimal_draft(0.0, 0.0) == 0
    assert theory.optimal_draft(1.0, 0.5, longest=7) == 7


def models(rng, vocab, draft):
    """Two models that look at all tokens before."""
    tables = [rng.dirichlet(np.ones(vocab), size=(vocab + 1) ** draft) for _ in range(2)]

    def number(prefix):
        return sum((x + 1) * (vocab + 1) ** i for i, x in enumerate(prefix))

    return [lambda prefix, table=table: table[number(prefix)] for table in tables]


def test_tokens_of_given_models_are_those_of_verification():
    vocab, draft = 3, 3
    q, p = models(np.random.default_rng(3), vocab, draft)
    blocks = list(np.ndindex(*[vocab] * draft))
    laws = [
        jnp.asarray([[f(x[:i]) for i in range(draft + 1)] for x in blocks], jnp.float32)
        for f in (q, p)
    ]
    chances = [np.prod([q(x[:i])[x[i]] for i in range(draft)]) for x in blocks]
    found = []
    for algorithm in (verification.Token(), verification.Block()):

        def accepted(tokens, dq, dp, algorithm=algorithm):
            block = ScoredBlock(tokens, dq, dp, jnp.int32(draft))
            thresholds = algorithm.acceptance(block).thresholds
            return verification.expected_accepted(algorithm, thresholds)

        each = jax.vmap(accepted)(jnp.asarray(blocks, jnp.int32), *laws)
        found.append(1.0 + np.dot(chances, np.asarray(each, np.float64)))
    assert found == pytest.approx(theory.tokens_of_models(q, p, draft), rel=1e-5)
    assert found[1] > found[0] + 0.01  # the two are told apart


def test_models_that_agree_emit_all_and_others_one():
    same = [0.5, 0.5]
    assert theory.tokens_of_models(lambda _: same, lambda _: same, 4) == pytest.approx((5, 5))
    apart = theory.tokens_of_models(lambda _: [1.0, 0.0], lambda _: [0.0, 1.0], 4)
    assert apart == (1.0, 1.0)


PAIR = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.35, 0.45])
SHAPES = [(0, 0), (0, 0, 1, 1), (0, 0, 2, 3), (0, 1, 1, 2), (0, 0, 1, 2, 2)]


@pytest.mark.parametrize("kind", ["top", "top+1", "independent", "without"])
def test_tokens_of_a_tree_are_those_of_its_enumeration(kind):
    q, pi = (np.tile(x, (3, 1)) for x in PAIR)
    rates = rates_of(*PAIR, kind, 2)
    for parents in SHAPES:
        found = theory.expected_tree_tokens(parents, rates)
        law = {x: outcomes(parents, kind, x, q, pi, 0).sum(1) for x in ("TopDown", "Traversal")}
        tokens = {x: (1 + np.arange(len(y))) @ y for x, y in law.items()}
        assert found == pytest.approx(tokens["TopDown"], abs=1e-9)
        assert found < tokens["Traversal"] + 1e-9


def trees(size):
    """All trees of this size, by their parents."""
    found = [()]
    for node in range(size):
        found = [(*x, p) for x in found for p in range(x[-1] if x else 0, node + 1)]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_best_tree_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    rates = np.tril(rng.dirichlet(np.ones(4), 3)[:, :3])
    passes = np.cumsum(rng.uniform(0.0, 0.1, 8)) + 1.0
    level = float(rng.uniform(0.0, 0.3))

    def value(parents):
        depth, most = [0], np.bincount(parents, minlength=1).max() if parents else 0
        for parent in parents:
            depth.append(depth[parent] + 1)
        if most > 3 or max(depth) > 3:
            return 0.0
        tokens = theory.expected_tree_tokens(parents, rates) if parents else 1.0
        return tokens / (passes[len(parents) + 1] + level * max(depth))

    given = {"verifier": lambda n: passes[n], "drafter": lambda _: level, "depth": 3}
    for sizes in (range(7), (4,), (6,)):
        best = theory.best_tree(rates, sizes=sizes, **given)
        want = max(value(tree) for size in sizes for tree in trees(size))
        assert best.tokens / best.time == pytest.approx(want) and len(best.parents) in sizes
        assert value(best.parents) == pytest.approx(want)
        if best.parents:
            assert Topology(best.parents).parents == best.parents
            tokens = theory.expected_tree_tokens(best.parents, rates)
            assert best.tokens == pytest.approx(tokens)


def test_the_best_tree_follows_the_costs():
    rates = np.array([[0.8, 0.0], [0.8, 0.1]])
    flat = {"verifier": lambda n: 1.0, "sizes": range(9)}
    # Where depth costs nothing, a chain; where it costs all, the children of the root; or none.
    assert theory.best_tree(rates, drafter=lambda n: 0.0, **flat).parents == tuple(range(8))
    assert theory.best_tree(rates, drafter=lambda n: 0.85, **flat).parents == (0, 0)
    assert theory.best_tree(rates, drafter=lambda n: 2.0, **flat).parents == ()
    # The first pass reads a token, the second the first level.
    wide = theory.best_tree(rates, lambda n: 1.0, lambda n: n / 8, sizes=(6,), depth=2)
    assert wide.parents == (0, 0, 1, 1, 2, 2) and wide.time == pytest.approx(1.0 + 3 / 8)


def improvement(calls, costs):
    return theory.standardised_improvement(100, calls, costs, "verifier")


def of_models(target):
    return theory.tokens_of_models(lambda _: [0.5, 0.5], lambda _: target, 1)


REFUSED = [
    (lambda: theory.expected_tokens(1.5, 3), "acceptance must lie in [0, 1], got 1.5"),
    (lambda: theory.expected_tokens(0.5, -1), "draft must be a whole number of at least 0, got -1"),
    (lambda: theory.speculative_ewif(0.5, 3, -0.1), "cost must be"),
    (lambda: theory.horizontal_ewif([0.5], [0.1, 0.2]), "acceptances and costs must have a number"),
    (
        lambda: improvement({"small": 3.0}, {"verifier": 1.0}),
        "costs must have an entry 'small', got",
    ),
    (
        lambda: improvement({}, {"verifier": 1.0}),
        "calls and costs must add up to more than 0, got 0",
    ),
    (lambda: of_models([0.5, 0.2]), "target must give probabilities"),
    (lambda: of_models([1.0]), "must share V, got 2 and 1"),
    (lambda: theory.expected_tree_tokens((0, 0), [[0.5]]), "a node with 2 children, but rates has"),
    (lambda: theory.expected_tree_tokens((0,), [[1.5]]), "rates must be a square table of prob"),
    (lambda: theory.best_tree([[0.5]], float, float, sizes=()), "sizes is empty"),
    (lambda: theory.best_tree([[0.5]], float, float, sizes=(3,), depth=2), "no tree of 2 levels"),
    (lambda: theory.best_tree([[0.5]], lambda n: -1.0, float), "verifier must be finite and at"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_wrong_is_told(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
