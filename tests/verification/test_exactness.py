"""Exactness by enumeration, and controls that it must see fail.

The law of the emitted tokens over several rounds, put together from the library's own acceptance
probabilities and residuals, against the law that the target distributions define.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

from specjax import testing, verification
from specjax.verification import GreedyBlockCarry
from tests.tables import RULES, VERIFICATIONS, prefix_tables, targets

NUM_TOKENS = 4
# (V, G, share of impossible tokens)
SIZES = [(2, 1, 0.0), (2, 2, 0.3), (2, 3, 0.0), (3, 1, 0.3), (3, 2, 0.0), (3, 3, 0.3)]


def after_token_one(context, drafted):
    """Stops after token 1, and after two equal tokens."""
    return float(drafted[-1] == 1 or drafted[-2:] == (0, 0))


def after_the_context(context, drafted):
    """Stops after one token if the last emitted token was 0, else after two."""
    return float(len(drafted) >= (1 if context[-1:] == (0,) else 2))


def by_chance(context, drafted):
    """Stops with a probability that depends on the draft."""
    return 0.3 if drafted[-1] == 0 else 0.6


STOPS = [after_token_one, after_the_context, by_chance]


def distance(algorithm, rule, size, stop, **kwargs):
    vocab, max_draft, zeros = size
    tables = prefix_tables(vocab, NUM_TOKENS + 3, zeros=zeros)
    pi = targets(rule, tables)
    law = testing.emitted_law(algorithm, tables[0], pi, NUM_TOKENS, max_draft, stop=stop, **kwargs)
    assert law.sum() == pytest.approx(1.0, abs=1e-5)
    return testing.total_variation(law, testing.target_law(pi, NUM_TOKENS))


# A carry needs drafts of a fixed length.
WITHOUT_CARRY = [name for name, each in VERIFICATIONS.items() if not each.has_carry]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("name", "stop"),
    [
        *((name, testing.fixed_length) for name in VERIFICATIONS),
        *itertools.product(WITHOUT_CARRY, STOPS),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_emitted_tokens_follow_the_target(name, stop, size):
    for rule_name, rule in RULES.items():
        off = distance(VERIFICATIONS[name], rule, size, stop)
        assert off < 1e-5, (rule_name, off)


@pytest.mark.exhaustive
def test_a_longer_run_with_nested_carries():
    tables = prefix_tables(2, 10, zeros=0.2)
    for rule in (RULES["Lossless"], RULES["TokenV2"]):
        pi = targets(rule, tables)
        law = testing.emitted_law(verification.GreedyBlock(), tables[0], pi, 6, 4)
        assert testing.total_variation(law, testing.target_law(pi, 6)) < 1e-5


# Negative controls: each is biased by an amount that the test above would see.

SIZE = (3, 3, 0.0)


def shared_uniform(algorithm, thresholds):
    """The law of the last pass when all positions share one uniform."""
    at_least = jnp.maximum.accumulate(thresholds[::-1])[::-1]
    one, zero = jnp.ones((1,)), jnp.zeros((1,))
    return jnp.concatenate([one, at_least]) - jnp.concatenate([at_least, zero])


def first_failure(algorithm, thresholds):
    """The law when block verification stops at its first failure."""
    return verification.num_accepted_probs(verification.Token(), thresholds)


@pytest.mark.parametrize("law", [shared_uniform, first_failure], ids=lambda f: f.__name__)
def test_control_uniforms_of_block_verification(law):
    off = distance(
        verification.Block(), RULES["Lossless"], SIZE, testing.fixed_length, accepted_probs=law
    )
    assert off > 1e-3


@pytest.mark.parametrize("name", WITHOUT_CARRY)
def test_control_a_token_dropped_because_of_its_value(name):
    # The draft ends after token 1, and token 1 is then removed from the block.
    def ends_at_one(context, drafted):
        return float(drafted[-1] == 1)

    def drop_it(context, drafted):
        return len(drafted) - (drafted[-1] == 1)

    kept = distance(VERIFICATIONS[name], RULES["Lossless"], SIZE, ends_at_one)
    dropped = distance(VERIFICATIONS[name], RULES["Lossless"], SIZE, ends_at_one, kept=drop_it)
    assert kept < 1e-5 and dropped > 1e-3


@pytest.mark.parametrize("rule", ["Diff", "TokenV3", "Lossy"])
@pytest.mark.parametrize("name", ["Token", "Block"])
def test_control_bonus_from_the_verifier_under_a_cascade(name, rule):
    p = prefix_tables(3, NUM_TOKENS + 3)[1]
    off = distance(VERIFICATIONS[name], RULES[rule], (3, 1, 0.0), testing.fixed_length, bonus=p)
    assert off > 1e-3


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_control_q_taken_before_temperature(name):
    hot = prefix_tables(3, NUM_TOKENS + 3, temperature=1.0)
    cold = prefix_tables(3, NUM_TOKENS + 3, temperature=0.5)
    pi = targets(RULES["Lossless"], cold)
    law = testing.emitted_law(VERIFICATIONS[name], hot[0], pi, NUM_TOKENS, 3, drawn_from=cold[0])
    assert testing.total_variation(law, testing.target_law(pi, NUM_TOKENS)) > 1e-3


def test_control_greedy_block_without_its_carry():
    greedy = verification.GreedyBlock()
    off = distance(greedy, RULES["Lossless"], SIZE, testing.fixed_length, keep_carry=False)
    assert off > 1e-3


@dataclasses.dataclass(frozen=True)
class OnlyTheLatest(verification.GreedyBlock):
    """Carry-overs do not nest: an older one is dropped when a new one starts."""

    def next_carry(self, *args):
        new = super().next_carry(*args)
        return GreedyBlockCarry(new.ratio, new.remaining.at[:-1].set(0))


def test_control_carries_that_do_not_nest():
    assert distance(OnlyTheLatest(), RULES["Lossless"], SIZE, testing.fixed_length) > 1e-3
