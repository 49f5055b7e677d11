"""The exact law of whole texts that the loop writes with trees: ragged, cut, and ended by EOS.

Rows of several prompts, limits and draft limits share each batch, in different rounds, with rows
that are finished.
"""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing, verification
from specjax.decoding import method as methods
from specjax.decoding import speculative
from specjax.sampling import Sampling
from tests.decoding.helpers import begin
from tests.drafting import test_branches as branches
from tests.drafting.choices import Choices, round_slots
from tests.drafting.test_tree_controls import Changed, mislabelled
from tests.drafting.test_tree_drafter import JUDGES, RULES, TREES, wanted
from tests.models.tiny import quick_jit
from tests.variants import variants

V, NEW, ENDS = 3, 4, 2
MODEL = testing.TabularModel(V, 2)
P, Q = (jnp.asarray(testing.random_table(seed, V, 2, scale=1.5)) for seed in (1, 2))
PROMPTS = [(0, 1), (1,), (2, 1, 0), (0, 0)]
LIMITS, DRAFT_LIMITS = np.array([NEW, 3, NEW, 2]), np.array([9, 0, 3, 1], np.int32)
# The prompts and rounds that share a batch.
TOGETHER = 6


class Texts:
    """Enumerates the rounds of a method; a program for each rule."""

    def __init__(self, method):
        self.method, self.choices = method, Choices()
        self.outcomes = round_slots(method)
        each = [np.arange(1, n + 1, dtype=np.float32) for n in self.outcomes]
        combos = np.array(list(itertools.product(*each)))
        self.size, self.uniforms = len(combos), np.tile(combos, (TOGETHER, 1))

        @quick_jit
        def step(params, state, uniforms):
            with mock.patch.object(speculative, "step_uniforms", lambda *_: uniforms):
                return methods._loop(method, params, state, jnp.int32(1), jnp.int32(10**6), None)

        self.step = step

    def __call__(self, params, temperature):
        """For each prompt the law of its text: tokens -> probability."""
        found = [{} for _ in PROMPTS]
        with self.choices.installed():
            state = started(self.method, params, temperature)
            # (prompt, its text so far) -> probability, and one of the states that come there.
            left = {(i, ()): (1.0, take(state, i)) for i in range(len(PROMPTS))}
            done = take(state, 0)._replace(ended_by=jnp.ones(1, jnp.int32))
            while left:
                now = sorted(left, key=lambda key: (len(key[1]), key))[:TOGETHER]
                chances, states = zip(*(left.pop(key) for key in now), strict=True)
                states += (done,) * (TOGETHER - len(now))
                for slot, row, chance, after in self.outcomes_of(params, states, chances):
                    prompt, text = now[slot][0], tuple(after.tokens[row, : after.lengths[row]])
                    if after.ended_by[row]:
                        found[prompt][text] = found[prompt].get(text, 0.0) + chance
                        continue
                    before, kept = left.get((prompt, text), (0.0, None))
                    kept = take(after, row) if kept is None else kept
                    left[prompt, text] = before + chance, kept
        return found

    def outcomes_of(self, params, states, chances):
        """Yields (the number of a state, a row, its probability, all rows) after a step."""
        batch = jax.tree.map(lambda *x: jnp.repeat(jnp.concatenate(x), self.size, axis=0), *states)
        self.choices.start(len(self.uniforms), self.outcomes)
        after = jax.block_until_ready(self.step(params, batch, self.uniforms))
        numbers = {name: np.asarray(getattr(after, name)) for name in ("tokens", "lengths")}
        after = after._replace(**numbers, ended_by=np.asarray(after.ended_by))
        weights = self.choices.weights.reshape(TOGETHER, self.size)
        np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-4)
        for slot, chance in enumerate(chances):
            for i in np.flatnonzero(weights[slot]):
                yield slot, slot * self.size + int(i), chance * weights[slot, i], after


def started(method, params, temperature):
    """The state of the prompts."""
    inputs = np.zeros((len(PROMPTS), 3), np.int32)
    for i, prompt in enumerate(PROMPTS):
        inputs[i, : len(prompt)] = prompt
    return begin(
        method,
        params,
        inputs,
        np.array(list(map(len, PROMPTS))),
        ids=np.arange(len(PROMPTS)),
        limits=LIMITS,
        draft_limits=np.minimum(DRAFT_LIMITS, method.max_draft),
        sampling=Sampling(temperature),
        max_new=NEW,
    )


def take(state, row):
    return jax.tree.map(lambda x: x[row : row + 1], state)


def law_of(text_law, prompt):
    """What the texts must follow, from the law of the first `NEW` tokens."""
    found, limit = {}, LIMITS[prompt]
    for tokens, chance in zip(itertools.product(range(V), repeat=NEW), text_law, strict=True):
        end = tokens.index(ENDS) + 1 if ENDS in tokens else NEW
        text = tokens[: min(end, limit)]
        found[text] = found.get(text, 0.0) + chance
    return found


def worst(method, params, rule, temperatures):
    """The largest distance of the law of a prompt's texts."""
    found_texts, off = Texts(method), 0.0
    for temperature in temperatures:
        found = found_texts(params, temperature)
        for i, prompt in enumerate(PROMPTS):
            want = law_of(wanted(RULES[rule], temperature, (P, Q), prompt, NEW), i)
            both = set(want) | set(found[i])
            off = max(off, sum(abs(want.get(x, 0.0) - found[i].get(x, 0.0)) for x in both) / 2)
    return off


def method_of(drafter, judge):
    return decoding.Speculative(MODEL, drafter, judge, eos_ids=(ENDS,))


KINDS = list(itertools.product(drafting.trees.CHILDREN, JUDGES))
# (tree, children, verification, rule)
CASES = [
    *(("bush", *kind, rule) for kind in KINDS for rule in RULES),
    *(("deep", *kind, "TokenV3") for kind in KINDS if kind[0].startswith("top")),
    *(("beam", *kind, "Diff") for kind in KINDS if kind[0].startswith("top")),
]
QUICK = [("bush", "top+1", "Traversal", "Diff")]


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=str)
def test_the_law_of_whole_texts(case):
    tree, children, judge, rule = case
    drafter = drafting.TreeDrafter(MODEL, TREES[tree], children)
    method = method_of(drafter, JUDGES[judge])
    params = decoding.MethodParams(P, drafting.NeuralDrafterParams(Q), RULES[rule])
    temperatures = (0.6,) if case in QUICK else (1.0, 0.6, 0.0)
    assert worst(method, params, rule, temperatures) < 1e-6


@pytest.mark.parametrize("name", variants(["chain and tree", "wide chain", "copies"], "wide chain"))
def test_the_law_of_whole_texts_of_branches(name):
    drafter, params = branches.DRAFTERS[name]
    method = method_of(drafter, verification.Traversal())
    given = decoding.MethodParams(P, params, rules.Lossless())
    assert worst(method, given, "Lossless", (1.0,)) < 1e-6


def test_a_wrong_tree_writes_other_texts():
    drafter = Changed(MODEL, TREES["pair"], "top+1", change=mislabelled)
    method = method_of(drafter, verification.Traversal())
    params = decoding.MethodParams(P, drafting.NeuralDrafterParams(Q), rules.Lossless())
    assert worst(method, params, "Lossless", (1.0,)) > 0.02
