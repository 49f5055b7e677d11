"""What each stopping policy decides, against plain numpy."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import stopping
from specjax import drafting, testing
from specjax.acceptance_head import Head, HeadConfig, apply_head, drawn_features, init_head
from specjax.drafting.stopping import Weighing, confidence_log_odds
from specjax.types import DraftInputs, DraftOutcome, Drawn, Prompts, Sampling
from tests.models.tiny import quick_jit

B, V, G = 5, 6, 4
RNG = np.random.default_rng(0)


def distributions(count, sharpness=1.0):
    x = np.exp(sharpness * RNG.standard_normal((count, V)))
    return (x / x.sum(-1, keepdims=True)).astype(np.float32)


def lengths(policy, confidences, hidden, params=None, memory=()):
    """How many tokens each row drafts, all shown in turn: `[B]`."""
    if params is None:
        policy, params = policy.bind()
    limits, state = policy.begin(params, memory, jnp.full(B, G, jnp.int32), G)
    going, count = np.asarray(limits) > 0, np.zeros(B, int)
    for i in range(G):
        count += going
        none = jnp.zeros(B, jnp.int32)
        drawn = Drawn(none, confidences[i], confidences[i], hidden[i], jnp.int32(i))
        stops, state = policy.step(params, state, drawn)
        going &= ~np.asarray(stops) & (i + 1 < np.asarray(limits))
    return count


def expected_lengths(stops):
    """Of `[G, B]` decisions."""
    return np.argmax(np.concatenate([stops[:-1], np.ones((1, B), bool)]), axis=0) + 1


CONF = np.stack([distributions(B, 2.0) for _ in range(G)])
HIDDEN = RNG.standard_normal((G, B, 3)).astype(np.float32)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 1.0])
def test_confidence(threshold):
    expected = expected_lengths(CONF.max(-1) < np.float32(threshold))
    np.testing.assert_array_equal(lengths(drafting.Confidence(threshold), CONF, HIDDEN), expected)


@pytest.mark.parametrize("threshold", [0.0, 0.9, 1.1, 2.0])
def test_entropy(threshold):
    entropy = -np.sum(CONF * np.log(CONF), axis=-1)
    expected = expected_lengths(np.sqrt(entropy) > threshold)
    np.testing.assert_array_equal(lengths(drafting.Entropy(threshold), CONF, HIDDEN), expected)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 1.0])
def test_survival_of_an_estimate(threshold):
    line = drafting.ConfidenceEstimate(0.8, 0.3)
    largest = CONF.max(-1)
    chance = 1 / (1 + np.exp(-(0.8 * np.log(largest / (1 - largest)) + 0.3)))
    expected = expected_lengths(1 - np.cumprod(chance, axis=0) > threshold)
    found = lengths(drafting.Survival(line, threshold), CONF, HIDDEN)
    np.testing.assert_array_equal(found, expected)


def test_a_head_judges_the_token_before():
    config = HeadConfig(3, 2)
    head = Head(config, init_head(config, jax.random.key(0)), "of a test")
    policy, params = drafting.Survival(drafting.HeadEstimate(), 0.5).bind(head)
    chance = np.array(jax.nn.sigmoid(apply_head(config, head.params, jnp.asarray(HIDDEN))))
    # The hidden state of a step is that of the token before: at the first, no drafted one.
    chance[0] = 1.0
    expected = expected_lengths(1 - np.cumprod(chance, axis=0) > 0.5)
    np.testing.assert_array_equal(lengths(policy, CONF, HIDDEN, params), expected)
    assert expected.min() >= 2


def test_a_head_reads_what_a_token_was_drawn_from():
    config = HeadConfig(3, 1, confidences=True)
    params = jax.tree.map(
        lambda x: jnp.asarray(RNG.standard_normal(x.shape), jnp.float32),
        init_head(config, jax.random.key(0)),
    )
    head = Head(config, params, "of a test")
    policy, own = drafting.Survival(drafting.HeadEstimate(), 0.5).bind(head)
    assert policy.reads_confidence
    seen = jax.vmap(lambda conf: drawn_features(conf, jnp.int32(0)))
    chance = np.ones((G, B))
    for i in range(1, G):
        # All tokens of `lengths` are 0. The features come one step before the hidden state.
        log_odds = apply_head(config, params, jnp.asarray(HIDDEN[i]), seen(CONF[i - 1]))
        chance[i] = np.asarray(jax.nn.sigmoid(log_odds))
    expected = expected_lengths(1 - np.cumprod(chance, axis=0) > 0.5)
    np.testing.assert_array_equal(lengths(policy, CONF, HIDDEN, own), expected)
    assert len(set(expected)) > 1


def test_unbound_policies_use_their_own_numbers():
    for policy in (drafting.Confidence(0.5), drafting.Entropy(1.0), drafting.Survival(
        drafting.ConfidenceEstimate(), 0.5)):  # fmt: skip
        same = lengths(policy, CONF, HIDDEN, ())
        np.testing.assert_array_equal(lengths(policy, CONF, HIDDEN), same)


def test_numbers_are_traced():
    """Another threshold compiles nothing."""
    for one, other in (
        (drafting.Confidence(0.1), drafting.Confidence(0.2)),
        (drafting.Entropy(0.1), drafting.Entropy(0.2)),
        (drafting.Budget(3), drafting.Budget(4)),
        (drafting.Survival(drafting.OnlineEstimate(), 0.1), drafting.Survival(
            drafting.OnlineEstimate(), 0.2)),
    ):  # fmt: skip
        assert one.bind()[0] == other.bind()[0] and one != other


def outcome(drafted, agreed, rejected, **others):
    counts = (jnp.asarray(x, jnp.int32) for x in (drafted, agreed))
    return DraftOutcome(*counts, jnp.asarray(rejected), **others)


@pytest.mark.parametrize("shared", [False, True])
def test_the_online_estimate_is_a_logistic_regression(shared):
    """Near the maximum of the posterior, which plain gradient ascent finds."""
    truth = np.array([0.6, -0.4])
    estimate = drafting.OnlineEstimate(shared=shared, prior=8.0)
    memory, seen = estimate.remember((), B), [[] for _ in range(B)]
    rng = np.random.default_rng(1)
    for _ in range(150):
        features = np.clip(rng.standard_normal((B, G)) * 2, -6, 6).astype(np.float32)
        accepted = rng.random((B, G)) < 1 / (1 + np.exp(-(truth[0] * features + truth[1])))
        agreed = np.cumprod(accepted, axis=1).sum(axis=1)
        rejected = agreed < G
        for b in range(B):
            for i in range(min(agreed[b] + 1, G)):
                seen[b].append((features[b, i], float(accepted[b, i])))
        recalled = estimate.recall((), memory)
        memory = estimate.learn(memory, recalled, features, outcome([G] * B, agreed, rejected))
    recalled = np.asarray(estimate.recall((), memory))
    for b in range(B):
        pairs = np.array(list(itertools.chain(*seen)) if shared else seen[b])
        best = np.array([1.0, 0.0])
        for _ in range(3000):
            chance = 1 / (1 + np.exp(-(pairs[:, 0] * best[0] + best[1])))
            error = pairs[:, 1] - chance
            slope = np.array([np.sum(error * pairs[:, 0]), np.sum(error)])
            slope -= 0.25 * 8.0 * np.array([9.0, 1.0]) * (best - np.array([1.0, 0.0]))
            best = best + 2.0 / len(pairs) * slope
        np.testing.assert_allclose(recalled[b], best, atol=0.12)
    assert shared == bool(np.allclose(recalled, recalled[:1]))


def test_the_online_estimate_ignores_what_it_cannot_know():
    estimate = drafting.OnlineEstimate()
    memory = estimate.remember((), B)
    recalled = estimate.recall((), memory)
    features = jnp.ones((B, G), jnp.float32)
    # Nothing drafted; the output ended within the draft; all stood.
    same = estimate.learn(memory, recalled, features, outcome([0] * B, [0] * B, [False] * B))
    assert not any(np.any(x) for x in same)
    some = estimate.learn(memory, recalled, features, outcome([3] * B, [1] * B, [False] * B))
    more = estimate.learn(memory, recalled, features, outcome([3] * B, [1] * B, [True] * B))
    np.testing.assert_allclose(2 * some.precision, more.precision, rtol=1e-6)
    # NaN in tokens that were drawn past the end of a row's draft.
    holes = features.at[:, 2:].set(jnp.nan)
    known = estimate.learn(memory, recalled, holes, outcome([2] * B, [1] * B, [True] * B))
    for found, wanted in zip(known, more, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("seed", range(20))
def test_a_budget_pays_the_most_probable_tokens(seed):
    rng = np.random.default_rng(seed)
    limits = rng.integers(0, G + 1, B)
    drafted = np.minimum(rng.integers(0, 2, B), limits)
    going = (rng.random(B) < 0.8) & (drafted < limits)
    survival, rate = rng.random(B), rng.random(B)
    pays = int(rng.integers(0, 9))
    chances = rate[:, None] ** np.arange(1, G + 1)
    state = Weighing(
        None, *(jnp.asarray(x, jnp.int32) for x in (limits, drafted)), jnp.asarray(going),
        jnp.asarray(chances, jnp.float32), jnp.full(B, pays + drafted.sum(), jnp.int32),
    )  # fmt: skip
    policy = drafting.Budget(1)
    found = np.asarray(policy._continuing(state, jnp.asarray(survival, jnp.float32)))
    worth = sorted(
        (
            (survival[b] * chances[b, j], b, j)
            for b, j in itertools.product(range(B), range(G))
            if going[b] and drafted[b] + j < limits[b]
        ),
        reverse=True,
    )
    best = {b for _, b, j in worth[:pays] if j == 0}
    assert set(np.flatnonzero(found)) == best


@pytest.mark.parametrize("rows", [1, 4, 9])
def test_a_budget_is_kept_and_ends_drafts_as_the_batch_grows(rows):
    policy, params = drafting.Budget(9, drafting.ConfidenceEstimate()).bind()
    memory = policy.remember(params, rows, G)
    limits, state = policy.begin(params, memory, jnp.full(rows, G, jnp.int32), G)
    step = quick_jit(policy.step)
    going, total = np.asarray(limits) > 0, 0
    for i in range(G):
        total += going.sum()
        conf = jnp.asarray(distributions(rows))
        stops, state = step(params, state, Drawn(None, conf, conf, None, jnp.int32(i)))
        going = going & ~np.asarray(stops) & (i + 1 < np.asarray(limits))
    assert total == min(9 - rows, rows * G) if rows < 9 else total == 0


COSTS = drafting.Costs((1, 5), (1, 2, 4), (0.02, 0.05), ((1.0, 1.2, 1.3), (1.5, 2.0, 2.6)))
COSTS = COSTS.at_widths((1, 2, 4, 5))  # of a loop that drafts four tokens


@pytest.mark.parametrize("seed", range(20))
def test_the_cost_is_weighed_over_all_lengths(seed):
    rng = np.random.default_rng(seed)
    policy, params = drafting.CostAware(COSTS, drafting.ConfidenceEstimate()).bind()
    fresh = rng.random(B) < 0.3
    seconds, tokens = rng.uniform(0.5, 9.0, B), rng.uniform(1.0, 20.0, B)
    past = policy.remember(params, B, G)
    spent = [jnp.asarray(np.where(fresh, 0.0, x), jnp.float32) for x in (seconds, tokens)]
    past = past._replace(policy=type(past.policy)(*spent))
    limits = jnp.asarray(rng.integers(0, G + 1, B), jnp.int32)
    _, state = policy.begin(params, past, limits, G)
    drafted = int(rng.integers(0, G))
    state = state._replace(going=limits > drafted, lengths=jnp.minimum(limits, drafted))
    survival = rng.random(B)
    found = policy._continuing(state, jnp.asarray(survival, jnp.float32))
    # A pass over n tokens is as wide as 1, 2, 4 or 5, which was not measured.
    widths = [1.5, 2.0, 2.6, 2.6, 2.6 + 0.6 / 2]
    # Rows that draft nothing give nothing; one without a past starts with a token alone.
    serves = np.asarray(limits) > 0
    took = np.where(fresh, widths[0], seconds)[serves].sum()
    gave = np.where(fresh, 1.0, tokens)[serves].sum() * serves.sum()
    per_token = took / gave if serves.any() else 0.0
    expected = False
    for more in range(1, G - drafted + 1):
        ends = np.minimum(more, np.asarray(limits) - drafted)
        gain = sum(survival[b] * 0.85**j for b in range(B) for j in range(1, ends[b] + 1))
        if any(ends >= more):
            cost = 0.05 * more + widths[drafted + more] - widths[drafted]
            expected |= per_token * gain > cost
    np.testing.assert_array_equal(found, np.asarray(state.going) & expected)


def drafted_by_cost(limits, policy=None, rounds=3):
    """How much a policy drafts after some rounds in which all drafted tokens stood."""
    policy, params = (policy or drafting.CostAware(COSTS)).bind()
    limits = jnp.asarray(limits, jnp.int32)
    memory = policy.remember(params, limits.size, G)
    for _ in range(rounds):
        asked, state = policy.begin(params, memory, limits, G)
        memory = policy.learn(memory, state, outcome(asked, asked, [False] * limits.size))
    return np.asarray(policy.begin(params, memory, limits, G)[0])


def test_finished_rows_change_nothing_for_the_last_one():
    alone = drafted_by_cost([G, 0, 0, 0, 0])
    assert alone[0] == G and not alone[1:].any()


def test_what_a_round_took_and_gave_is_remembered():
    policy, params = drafting.CostAware(COSTS, drafting.ConfidenceEstimate()).bind()
    memory = policy.remember(params, 5, G)
    _, state = policy.begin(params, memory, jnp.full(5, G, jnp.int32), G)
    drafted, agreed = jnp.asarray([3, 1, 0, 2, 3]), jnp.asarray([1, 1, 0, 0, 2])
    # A drafter that catches up in its next draft makes no pass more.
    same = policy.learn(memory, state, outcome(drafted, agreed, [1, 0, 0, 1, 1], lags=False))
    np.testing.assert_allclose(same.policy.seconds, 3 * 0.05 + 2.6, rtol=1e-6)
    memory = policy.learn(memory, state, outcome(drafted, agreed, [1, 0, 0, 1, 1]))
    # Three drafts, one more because the block of row 1 stood; a pass over 3 + 1 tokens.
    np.testing.assert_allclose(memory.policy.seconds, 4 * 0.05 + 2.6, rtol=1e-6)
    np.testing.assert_array_equal(memory.policy.tokens, [2, 2, 1, 1, 3])
    np.testing.assert_array_equal(memory.accepted, [1, 1, 0, 0, 2])
    np.testing.assert_array_equal(memory.judged, [2, 1, 0, 1, 3])
    again = policy.learn(memory, state, outcome(drafted, agreed, [1, 0, 0, 1, 1]))
    np.testing.assert_allclose(again.policy.tokens, 1.9 * np.array([2, 2, 1, 1, 3]), rtol=1e-6)
    np.testing.assert_allclose(again.judged, 1.9 * np.array([2, 1, 0, 1, 3]), rtol=1e-6)
    np.testing.assert_allclose(again.policy.seconds, 1.9 * (4 * 0.05 + 2.6), rtol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        drafting.Confidence(0.5),
        drafting.Survival(drafting.ConfidenceEstimate(), 0.5),
        drafting.Budget(5),
        drafting.CostAware(COSTS),
    ],
)
def test_a_policy_of_the_users_own_stays_itself(policy):
    mine = type("Mine", (type(policy),), {})
    own = mine(**{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)})
    assert type(own.bind()[0]) is mine


def test_the_weights_of_a_heads_loss_can_be_taken_out():
    config = HeadConfig(2, 0)
    params = init_head(config, jax.random.key(0))
    head = Head(config, params, "of a test", rejection_weight=6.0)
    hidden = jnp.ones((B, 2), jnp.float32)

    def chance(estimate):
        bound, own = estimate.bind(head)
        feature, _ = bound.feature(own, bound.begin(B), Drawn(None, None, None, hidden, 0))
        return jax.nn.sigmoid(bound.log_odds(own, (), feature))

    learnt = np.asarray(chance(drafting.HeadEstimate()))
    true = np.asarray(chance(drafting.HeadEstimate().as_chance()))
    np.testing.assert_allclose(learnt, true / (true + 6 * (1 - true)), rtol=1e-5)
    for policy in (
        drafting.CostAware(COSTS, drafting.HeadEstimate()),
        drafting.Budget(3, drafting.HeadEstimate()),
    ):
        assert policy.bind(head)[0].estimate.weighted is False
    assert drafting.Survival().bind(head)[0].estimate.weighted is True


def test_the_oracle_drafts_what_agrees():
    agrees = np.array([[1, 1, 0, 1, 1, 1, 0]], bool)
    runs = stopping.agreeing_runs(agrees)
    np.testing.assert_array_equal(runs, [[2, 1, 0, 3, 2, 1, 0, 0]])
    policy, memory = stopping.GreedyOracle(), jnp.zeros(1, jnp.int32)
    taken = []
    while int(memory[0]) < 7:
        limits, state = policy.begin(jnp.asarray(runs), memory, jnp.full(1, G, jnp.int32), G)
        taken.append(int(limits[0]))
        memory = policy.learn(memory, state, outcome(limits, limits, [False]))
    assert taken == [2, 3]  # and each round the verifier adds one token


def test_bounds_hold_for_any_policy():
    model = testing.TabularModel(V, 1)
    table = jnp.asarray(testing.random_table(0, V, 1))
    drafter = drafting.Chain(model, G, drafting.Confidence(1.0), min_draft=3)
    params = drafting.chain.ChainParams(table)
    state = drafter.prefill(
        params, Prompts(jnp.zeros((B, 1), jnp.int32), jnp.ones(B, jnp.int32)), 9
    )
    limits = jnp.asarray([0, 1, 2, 3, 4], jnp.int32)
    settings = jax.tree.map(lambda x: jnp.broadcast_to(x, (B,)), Sampling())
    last, uniforms = jnp.zeros(B, jnp.int32), jnp.full((B, G), 0.5)
    inputs = DraftInputs(last, limits, uniforms, settings, limits > 0)
    drafted = quick_jit(lambda state: drafter.propose(params, state, inputs)[0].num_drafted)
    np.testing.assert_array_equal(drafted(state), [0, 1, 2, 3, 3])


def test_the_first_log_odds_are_of_the_largest_probability():
    np.testing.assert_allclose(
        jax.nn.sigmoid(confidence_log_odds(jnp.asarray(CONF[0]))), CONF[0].max(-1), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drafting.Confidence(1.5), r"Confidence: threshold must lie in \[0, 1\], got 1.5"),
        (lambda: drafting.Entropy(-1), "Entropy: threshold must be .*at least 0, got -1"),
        (lambda: drafting.Survival(threshold=2), r"Survival: threshold must lie in \[0, 1\]"),
        (lambda: drafting.Survival(0.5), "Survival: estimate must be like"),
        (lambda: drafting.OnlineEstimate(prior=0), "OnlineEstimate: prior must be .*above 0"),
        (lambda: drafting.OnlineEstimate(shared=1), "shared must be True or False, got 1"),
        (lambda: drafting.Budget(0), "Budget: tokens must be a whole number of at least 1"),
        (lambda: drafting.CostAware("costs.json"), "CostAware: costs must be like"),
        (lambda: drafting.Survival().bind(), "no acceptance head: train one with"),
        *(
            (policy.bind, "is None: give a number, or pass the parameters that bind")
            for policy in (
                drafting.Confidence(None),
                drafting.Entropy(None),
                drafting.Survival(drafting.ConfidenceEstimate(), None),
                drafting.Survival(drafting.ConfidenceEstimate(None, 0.0), 0.5),
                drafting.Budget(None),
            )
        ),
        (lambda: drafting.Confidence((0.5, 0.6)), "must be a single number, got"),
        (lambda: drafting.Survival(threshold=(0.5, 0.6)), "must be a single number, got"),
        (lambda: drafting.ConfidenceEstimate(slope=(0.5, 0.6)), "must be a single number, got"),
        (lambda: drafting.OnlineEstimate(prior=(0.5, 0.6)), "must be a single number, got"),
        (
            lambda: drafting.Chain(testing.TabularModel(V), 2, min_draft=3),
            "min_draft must be at most max_draft = 2, got 3",
        ),
        (
            lambda: drafting.Chain(testing.TabularModel(V), 2, min_draft=-1),
            "min_draft must be a whole number of at least 0, got -1",
        ),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
