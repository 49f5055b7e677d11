"""Branches of several drafters, of copies, and beside a chain: the exact laws of their rounds."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing, verification
from specjax.drafting.lookup import longest_matches
from specjax.drafting.trees import united
from specjax.sampling import Sampling, distribution
from specjax.types import ChildLaw, DraftBlock
from tests.decoding.helpers import begin
from tests.drafting.choices import Law
from tests.tables import targets
from tests.variants import variants

V, N = 3, 3
PROMPT = (0, 1, 1, 0, 2, 1, 0, 1)
MODEL = testing.TabularModel(V, 2)
P, A, B = (jnp.asarray(testing.random_table(seed, V, 2, scale=1.5)) for seed in (1, 2, 3))
LENIENT = drafting.lenience(2.0)
OF = {name: drafting.NeuralDrafterParams(table) for name, table in (("a", A), ("b", B))}


def chain(name, length):
    return drafting.NeuralDrafter(MODEL, length, name=name)


def tree(name, parents, children):
    return drafting.TreeDrafter(MODEL, drafting.Topology(parents), children, name)


def copies(length, count=1):
    lookup = drafting.LookupDrafter(V, length)
    return lookup if count == 1 else drafting.LookupTreeDrafter(lookup, count)


def side_by_side(*drafters):
    return drafting.BranchesDrafter(drafters)


def reviewed(length, below, enough=None):
    return drafting.VerticalCascade(below, MODEL, length, enough, name="a")


def wide(drafter, width=2):
    return drafting.CaterpillarDrafter(drafter, width)


UNDER_A = drafting.VerticalCascadeParams(A, OF["b"], LENIENT)
COPIED_A = drafting.VerticalCascadeParams(A, (), LENIENT)
# Name -> the drafter and its parameters.
DRAFTERS = {
    "copies": (copies(2, 2), ()),
    "chain and chain": (side_by_side(chain("a", 2), chain("b", 1)), (OF["a"], OF["b"])),
    "chain and tree": (
        side_by_side(chain("a", 1), tree("b", (0, 0, 1), "top+1")),
        (OF["a"], OF["b"]),
    ),
    "tree and tree": (
        side_by_side(tree("a", (0, 0), "without"), tree("b", (0, 0), "without")),
        (OF["a"], OF["b"]),
    ),
    "tree and copies": (
        side_by_side(tree("a", (0, 0, 1), "top+1"), copies(2, 2)),
        (OF["a"], ()),
    ),
    "copies and tree": (
        side_by_side(copies(2), tree("a", (0, 0, 1, 1), "without")),
        ((), OF["a"]),
    ),
    "wide chain": (wide(chain("a", 2)), OF["a"]),
    "wide cascade": (wide(reviewed(2, chain("b", 1))), UNDER_A),
    "wide cascade and copies": (
        wide(drafting.HorizontalCascade((reviewed(2, copies(1), 1), copies(1))), 3),
        (COPIED_A, ()),
    ),
}
JUDGES = {
    "Walk": verification.Walk(),
    "Traversal": verification.Traversal(),
    "TopDown": verification.TopDown(),
}
# (drafter, verification, rule, temperature, limit of the draft)
CASES = [
    *((*x, "Lossless", 1.0, None) for x in itertools.product(DRAFTERS, JUDGES)),
    *((*x, "Lossless", 0.6, 3) for x in itertools.product(DRAFTERS, JUDGES)),
    *((*x, "Lossless", 0.0, None) for x in itertools.product(DRAFTERS, JUDGES)),
    *(
        (*x, None)
        for x in itertools.product(["wide chain", "wide cascade"], JUDGES, ["OPT"], [1.0, 0.6, 0.0])
    ),
]
QUICK = [
    ("copies", "Traversal", "Lossless", 1.0, None),
    ("chain and chain", "Traversal", "Lossless", 1.0, None),
    ("chain and tree", "TopDown", "Lossless", 0.6, 3),
    ("tree and copies", "Traversal", "Lossless", 1.0, None),
    ("wide chain", "Traversal", "OPT", 1.0, None),
    ("wide cascade and copies", "Traversal", "Lossless", 1.0, None),
]
RULES = {"Lossless": rules.Lossless(), "OPT": rules.OPT(0.2)}


def after(table, temperature=1.0):
    """The distributions after all texts of up to N tokens."""
    probs = lambda x: distribution(x, Sampling(temperature))  # noqa: E731
    return testing.prefix_distributions(MODEL, table, PROMPT, N, probs)


def wanted(name, rule, temperature=1.0, verifier=P):
    """The law of the first N tokens."""
    p, q = after(verifier, temperature), after(A, temperature)
    if "cascade" in name:
        q = targets(LENIENT, (after(B, temperature), q, None, None))
    conf = after(A), after(verifier)
    return testing.target_law(targets(RULES[rule], (q, p, *conf)), N)


def found_law(
    drafter, params, judge="Traversal", rule="Lossless", temperature=1.0, limit=None, verifier=P
):
    law = Law(decoding.Round(MODEL, drafter, JUDGES[judge]), limit=limit)
    return law(decoding.MethodParams(verifier, params, RULES[rule]), PROMPT, N, temperature)


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=str)
def test_the_law_of_branches(case):
    name, judge, rule, temperature, limit = case
    found = found_law(*DRAFTERS[name], judge, rule, temperature, limit)
    assert testing.total_variation(found, wanted(name, rule, temperature)) < 1e-6


class Mislabelled(drafting.CaterpillarDrafter):
    """Says that the siblings were drawn from q."""

    def propose(self, *args, **options):
        block, state = super().propose(*args, **options)
        return block._replace(laws=jnp.full_like(block.laws, ChildLaw.DRAWN)), state


class OneLaw(drafting.BranchesDrafter):
    """Says that all children of the root were drawn by the first drafter."""

    def propose(self, *args, **options):
        block, state = super().propose(*args, **options)
        rows = jnp.where(block.parents == 0, 0, block.drawn_from)
        return block._replace(drawn_from=rows), state


class Merged(drafting.BranchesDrafter):
    """Leaves out the second of two equal tokens that were drawn."""

    def propose(self, *args, **options):
        block, state = super().propose(*args, **options)
        equal = block.tokens[:, 0] == block.tokens[:, 1]
        count = block.num_drafted - equal.astype(jnp.int32)
        return block._replace(num_drafted=count), state


ONE, TWO = chain("a", 1), chain("b", 1)
# Name -> a wrong drafter, its parameters, and the least distance.
CONTROLS = {
    "siblings verified with q": (Mislabelled(chain("a", 2), 2), OF["a"], 0.02),
    "siblings of a cascade": (Mislabelled(reviewed(2, chain("b", 1)), 2), UNDER_A, 0.02),
    "the first drafter's q for all": (OneLaw((ONE, TWO)), (OF["a"], OF["b"]), 0.01),
    "equal draws joined": (Merged((ONE, TWO)), (OF["a"], OF["a"]), 0.001),
}


SHORT = [name for name in CONTROLS if name != "siblings of a cascade"]


@pytest.mark.parametrize("name", variants(CONTROLS, *SHORT))
def test_wrong_branches_have_another_law(name):
    drafter, params, least = CONTROLS[name]
    assert testing.total_variation(found_law(drafter, params), wanted(name, "Lossless")) > least


INPUTS = np.array([[0, 1, 2, 0, 1], [2, 0, 0, 0, 0], [1, 1, 0, 1, 0]], np.int32)
LENGTHS = np.array([5, 1, 4], np.int32)
ROWS = {"ids": np.arange(3), "limits": np.array([9, 7, 9]), "max_new": 9}


@pytest.mark.parametrize("name", variants(DRAFTERS, "wide cascade and copies"))
def test_greedy_branches_are_the_verifiers_own_text(name):
    """Ragged rows, with draft limits and an end-of-sequence token in the middle of trees."""
    drafter, params = DRAFTERS[name]
    alone = decoding.Autoregressive(MODEL, eos_ids=(2,))
    params, rows = (
        decoding.MethodParams(P, params, RULES["Lossless"]),
        ROWS | {"sampling": Sampling(0.0)},
    )
    want = alone.run(params, begin(alone, params, INPUTS, LENGTHS, **rows), 100)
    method = decoding.Speculative(MODEL, drafter, JUDGES["Traversal"], eos_ids=(2,))
    for limits in (None, np.array([0, 2, 3], np.int32)):
        start = begin(method, params, INPUTS, LENGTHS, draft_limits=limits, **rows)
        state = method.run(params, start, 100)
        np.testing.assert_array_equal(state.tokens, want.tokens)
        np.testing.assert_array_equal(state.lengths, want.lengths)


def block_of(tokens, parents=None, laws=None, certain=True):
    """A block of one row; `certain`: its tokens have all of their distributions."""
    tokens = jnp.asarray([tokens], jnp.int32)
    probs = jax.nn.one_hot(jnp.pad(tokens, ((0, 0), (0, 1))), 6)
    shared = {"parents": parents, "laws": laws}
    shared = {
        name: None if x is None else jnp.asarray([x], jnp.int32) for name, x in shared.items()
    }
    return DraftBlock(
        tokens, probs if certain else probs / 2, None, jnp.array([tokens.size]), {}, **shared
    )


def test_equal_certain_tokens_are_joined():
    union = united([block_of([1, 2, 3]), block_of([1, 2, 0, 1]), block_of([2])])
    assert union.num_drafted == 6 and union.tokens.shape == (1, 8)
    np.testing.assert_array_equal(union.tokens[0, :6], [1, 2, 3, 0, 1, 2])
    np.testing.assert_array_equal(union.parents[0, :6], [0, 1, 2, 2, 4, 0])
    np.testing.assert_array_equal(union.laws[0, :6], [ChildLaw.TOP] * 6)
    # Each token's own row, whatever was joined.
    rows = union.drawn_from[0, :6]
    np.testing.assert_array_equal(union.probs[0, rows].argmax(axis=-1), union.tokens[0, :6])


def test_drawn_tokens_are_not_joined():
    union = united([block_of([1, 2], certain=False), block_of([1, 2], certain=False)])
    np.testing.assert_array_equal(union.parents[0], [0, 1, 0, 3])
    # A fixed token beside one that was drawn without it: it stays, for the law of the other.
    pair = block_of([3, 1, 4], [0, 0, 2], [ChildLaw.OFF, ChildLaw.TOP, ChildLaw.OFF], False)
    union = united([block_of([1], certain=False), pair])
    np.testing.assert_array_equal(union.tokens[0], [1, 3, 1, 4])
    np.testing.assert_array_equal(union.parents[0], [0, 0, 0, 1])
    np.testing.assert_array_equal(union.drawn_from[0], [0, 1, 1, 3])


@pytest.mark.parametrize("latest", [False, True])
def test_the_longest_matches(latest):
    rng = np.random.default_rng(0)
    for _ in range(20):
        length, ahead = int(rng.integers(2, 14)), 2
        text = rng.integers(0, 3, 16)
        context, lengths = jnp.asarray(text[None], jnp.int32), jnp.array([length], jnp.int32)
        found = longest_matches(context, lengths, 3, ahead, latest=latest)
        own, left = list(text[:length]), list(range(1, length))
        for number in range(3):
            agree = {at: agreement(own, at) for at in left}
            best = max(agree.values(), default=0)
            assert found.lengths[0, number] == best
            if not left or not best:
                break
            at = [x for x in left if agree[x] == best][-1 if latest else 0]
            assert found.places[0, number] == at
            copied = own[at : at + ahead]
            left = [x for x in left if copied[: length - x] != own[x : x + ahead]]


def agreement(text, at):
    """The number of tokens before a place that equal the ending."""
    n = 0
    while n < at and text[at - 1 - n] == text[-1 - n]:
        n += 1
    return n


WRONG = [
    (lambda: drafting.BranchesDrafter([ONE, TWO]), ValueError, "drafters must be a tuple"),
    (lambda: drafting.BranchesDrafter((ONE,)), ValueError, "drafters must be at least two, got 1"),
    (lambda: drafting.BranchesDrafter((ONE, 3)), ValueError, r"drafters\[1\] must be like"),
    (
        lambda: side_by_side(ONE, ONE),
        ValueError,
        "two drafters of BranchesDrafter have the name 'a'",
    ),
    (
        lambda: side_by_side(ONE, drafting.LookupDrafter(V + 1, 2)),
        ValueError,
        r"must have the same vocabulary, got sizes \[3, 4\]",
    ),
    (lambda: drafting.LookupTreeDrafter(ONE, 2), AssertionError, "lookup must be a LookupDrafter"),
    (lambda: copies(2, 0), ValueError, "copies must be a whole number of at least 1, got 0"),
    (lambda: wide(ONE, 1), ValueError, "width must be a whole number of at least 2, got 1"),
    (lambda: wide(ONE, 4), ValueError, "width must be at most the number of tokens, 3, got 4"),
    (lambda: wide(copies(2)), ValueError, "LookupDrafter has no confidence, by which siblings"),
    (lambda: wide(wide(ONE)), ValueError, "CaterpillarDrafter drafts trees: use it without"),
    (lambda: wide(3), ValueError, "drafter must be like"),
    (
        lambda: decoding.Round(MODEL, side_by_side(ONE, TWO), verification.Walk()).check_rule(
            rules.OPT(0.2)
        ),
        ValueError,
        "OPT reads the drafter's distribution after each token, but the branches of Branches",
    ),
]


@pytest.mark.parametrize(("make", "kind", "message"), WRONG)
def test_wrong_branches_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_nan_of_any_drafter_ends_its_rows():
    drafter, params = DRAFTERS["chain and chain"]
    broken = params[1]._replace(model=B.at[:, 1].set(jnp.nan))
    method = decoding.Speculative(MODEL, drafter, JUDGES["Traversal"])
    params = decoding.MethodParams(P, (params[0], broken), RULES["Lossless"])
    state = method.run(params, begin(method, params, INPUTS, LENGTHS, **ROWS), 100)
    assert [method.nan_sources[i] for i in state.info.nan_in] == ["drafter"] * 3
    np.testing.assert_array_equal(state.lengths, 0)
