"""Branches of several drafters, of copies, and beside a chain: the exact laws of their rounds."""

import itertools

import jax.numpy as jnp
import pytest

from specjax import decoding, drafting, rules, testing, verification
from specjax.sampling import Sampling, distribution
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
    ("tree and copies", "Walk", "Lossless", 0.0, None),
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
