"""Whatever a stopping policy looks at that it may look at, the emitted law is the target's."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafting, sampling, testing, verification
from specjax.acceptance_head import Head, HeadConfig, init_head
from specjax.types import Sampling
from tests.drafting.rounds import law
from tests.variants import variants

# With three tokens the second decision can depend on the first token drawn.
V, G = 2, 3
MODEL = testing.TabularModel(V, 3)
SMALL, LARGE = (jnp.asarray(testing.random_table(s, V, 3, scale=1.3)) for s in (20, 8))
# After these two prompts the drafter is right and wrong in other places.
PROMPTS = np.array([[0, 0, 1], [1, 1, 0]])
COSTS = drafting.Costs(
    (1, 2), (1, 2, 3, 4), (0.3, 0.45), ((1.0, 1.1, 1.2, 1.3), (1.2, 1.35, 1.5, 1.65))
)
CONFIG = HeadConfig(V, 1, confidences=True)
HEAD = Head(
    CONFIG,
    jax.tree.map(
        lambda x: 0.7 * jax.random.normal(jax.random.key(x.size + 20), x.shape, jnp.float32),
        init_head(CONFIG, jax.random.key(1)),
    ),
    "of a test",
)

POLICIES = {
    "confidence": drafting.Confidence(0.7),
    "entropy": drafting.Entropy(0.76),
    "survival": drafting.Survival(drafting.ConfidenceEstimate(0.7, 0.1), 0.4),
    "head": drafting.Survival(drafting.HeadEstimate(), 0.45),
    "online": drafting.Survival(drafting.OnlineEstimate(prior=0.5), 0.35),
    "online, shared": drafting.Survival(drafting.OnlineEstimate(shared=True, prior=0.5), 0.35),
    "cost": drafting.CostAware(COSTS),
    "cost, head": drafting.CostAware(COSTS, drafting.HeadEstimate()),
    "budget": drafting.Budget(7),
    "budget, head": drafting.Budget(7, drafting.HeadEstimate()),
}
VERIFICATIONS = {"token": verification.Token(), "block": verification.Block()}


@functools.cache
def tables(num_tokens, temperature):
    """q and p after every continuation of each prompt: `[B, P, V]`."""
    settings = Sampling(temperature)

    def table(params, prompt):
        return testing.prefix_distributions(
            MODEL,
            params,
            prompt,
            num_tokens,
            lambda x: sampling.distributions.distribution(x, settings),
        )

    return tuple(np.stack([table(m, prompt) for prompt in PROMPTS]) for m in (SMALL, LARGE))


def distance(policy, verify, rows, num_tokens, temperature=1.0, cut=None, drafter=None):
    """The total variation distance of the emitted law and the target's; and what `law` tells."""
    bound, own = policy.bind(HEAD)
    drafter = drafter or drafting.Chain(MODEL, G, bound)
    params = drafting.chain.ChainParams(SMALL, own)
    q, p = (x[rows] for x in tables(num_tokens + G, temperature))
    found, varied = law(
        drafter, params, verify, q, p, PROMPTS[rows], num_tokens, temperature=temperature, cut=cut
    )
    target = functools.reduce(
        np.multiply.outer, (testing.target_law(table, num_tokens) for table in p)
    )
    return testing.total_variation(found, target.reshape(found.shape)), varied


# Most policies meet one verification here, some none, and all of them in `make test-all`.
QUICK = {("confidence", "token"), ("head", "block"), ("budget", "block")}
QUICK |= {("online, shared", "token")}
PAIRS = variants(itertools.product(POLICIES, VERIFICATIONS), *QUICK, several=True)


@pytest.mark.parametrize(("policy", "verify"), PAIRS)
def test_two_rows_follow_the_target(policy, verify):
    found, varied = distance(POLICIES[policy], VERIFICATIONS[verify], [0, 1], 2)
    assert found < 1e-5
    assert varied, "what was drawn decided nothing: nothing was tried"


LEARNING = variants(
    itertools.product(["online", "cost", "budget"], VERIFICATIONS),
    ("online", "block"),
    several=True,
)


@pytest.mark.parametrize(("policy", "verify"), LEARNING)
def test_a_row_follows_the_target_over_many_rounds(policy, verify):
    """What is learnt of earlier rounds changes lengths, not the law."""
    assert distance(POLICIES[policy], VERIFICATIONS[verify], [1], 4)[0] < 1e-5


def test_a_draft_may_end_with_the_text():
    bound = POLICIES["confidence"].bind(HEAD)[0]
    drafter = drafting.Chain(MODEL, G, bound, eos_ids=(1,))
    found, varied = distance(
        POLICIES["confidence"], VERIFICATIONS["block"], [0, 1], 2, drafter=drafter
    )
    assert found < 1e-5 and varied


def without_a_last_one(block):
    """Drops the last drafted token for its value."""
    last = jnp.take_along_axis(block.tokens, jnp.maximum(block.num_drafted - 1, 0)[:, None], 1)
    return block.num_drafted - (last[:, 0] == 1).astype(jnp.int32)


def by_what_comes_later(block):
    """An estimate that sees the present draft: drops a token for what the drafter says after it."""
    return jnp.where(jnp.max(block.confidences[:, 1], axis=-1) < 0.85, 0, block.num_drafted)


@pytest.mark.parametrize("cut", [without_a_last_one, by_what_comes_later])
def test_control_what_may_not_be_looked_at_is_seen(cut):
    # It never ends a draft: the cut alone does.
    policy = drafting.Survival(drafting.OnlineEstimate(), 1.0)
    # So many tokens that the last drafted one is among them.
    assert distance(policy, VERIFICATIONS["token"], [1], G)[0] < 1e-5
    assert distance(policy, VERIFICATIONS["token"], [1], G, cut=cut)[0] > 1e-3
