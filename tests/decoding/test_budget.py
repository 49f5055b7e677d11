"""The law of a rule held to a divergence budget, through the real loop, and each row's bill."""

import collections
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax import decoding, drafting, rules, sampling
from specjax.decoding import speculative as rounds
from specjax.types import PromptBatch
from tests.decoding import test_exact_law as plain
from tests.decoding.helpers import pair
from tests.decoding.policies import AfterTokenOne
from tests.tables import VERIFICATIONS, p_value

V, EOS, MODEL, PARAMS = plain.V, plain.EOS, plain.MODEL, plain.PARAMS
LIMITS, RULE, COPIES = [4, 4, 4], rules.Diff(0.5), 7000
# One for each prompt; the last one is lossless.
BUDGETS = (0.2, 0.3, 0.0)


def kl(pi, p):
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.sum(np.where(pi > 0.0, pi * np.log(pi / p), 0.0)))


def afforded(target, p, budget):
    """pi and its price at one position, in float64, from the definition alone."""
    target = np.where(p > 0.0, target, 0.0)
    target = target / target.sum() if target.sum() else p
    whole = kl(target, p)
    if whole <= budget:
        return target, whole
    square = np.sum((target - p)[p > 0.0] ** 2 / p[p > 0.0])
    share = min(1.0, max(budget / whole, math.sqrt(math.expm1(budget) / square)))
    held = share * target + (1.0 - share) * p
    return held, kl(held, p)


@functools.cache
def continuations(row):
    """(target, p) after each beginning of up to 3 tokens of a text."""
    q, p, q_conf, p_conf = plain.tables(row)
    target = np.asarray(plain.apply(RULE, q, p, q_conf, p_conf), np.float64)
    texts = itertools.chain(*(itertools.product(range(V), repeat=n) for n in range(4)))
    return dict(zip(texts, zip(target, p.astype(np.float64), strict=True), strict=True))


def law_of(row, budget, *, forgets=False):
    """Text -> (its chance, its bill, the logarithms of its pi)."""
    found, todo = {}, [((), 1.0, 0.0, ())]
    while todo:
        text, chance, bill, logs = todo.pop()
        if len(text) == LIMITS[row] or text[-1:] == (EOS,):
            found[text] = chance, bill, logs
            continue
        credit = 0.0 if forgets else budget * len(text) - bill
        pi, cost = afforded(*continuations(row)[text], budget + credit)
        todo += [
            ((*text, v), chance * pi[v], bill + cost, (*logs, math.log(pi[v])))
            for v in range(V)
            if pi[v] > 0.0
        ]
    return found


def chances(row, budget, **kind):
    return {text: chance for text, (chance, _, _) in law_of(row, budget, **kind).items()}


def decoded(loop, budgets=BUDGETS, stopping=()):
    rows = 3 * COPIES
    rule = rules.Budgeted(RULE, np.tile(np.float32(budgets), COPIES))
    params = pair(*PARAMS, rule, stopping)
    prompts = PromptBatch(
        np.tile(plain.PROMPTS, (COPIES, 1)),
        np.tile(plain.LENGTHS, COPIES),
        ids=np.arange(rows),
        limits=np.tile(LIMITS, COPIES),
        sampling=sampling.Sampling(np.tile(plain.TEMPERATURES, COPIES)),
    )
    state = loop.init(params, prompts, max_new=4, max_length=16, log_probs=True)
    return loop.run(params, state, 100)


def speculative(verification="Block", policy=None, kind=decoding.Speculative):
    drafter = drafting.NeuralDrafter(MODEL, 2, *([] if policy is None else [policy]))
    return kind(MODEL, drafter, VERIFICATIONS[verification], eos_ids=(EOS,))


def agreement(state, row, budget=None, **kind):
    seen = collections.Counter(plain.outputs(state)[row::3])
    law = chances(row, BUDGETS[row] if budget is None else budget, **kind)
    # A wrong law may lack what was seen.
    return p_value(seen, dict.fromkeys(seen, 1e-9) | law, COPIES)


@pytest.mark.parametrize(
    ("verification", "policy"),
    [
        ("Block", None),
        ("Token", AfterTokenOne()),
        pytest.param("GreedyBlock", None, marks=pytest.mark.exhaustive),
    ],
)
def test_the_law_with_a_budget_of_each_row(verification, policy):
    state = decoded(speculative(verification, policy))
    texts = plain.outputs(state)
    for row, budget in enumerate(BUDGETS):
        law = law_of(row, budget)
        assert agreement(state, row) > 1e-5
        for text, (_, bill, _) in law.items():
            assert bill <= budget * len(text) + 1e-12
        # Every text has the log-probabilities that the definition says: nothing of them depends on
        # where rounds began and how they ended.
        places = {text: i for i, text in reversed(list(enumerate(texts))) if i % 3 == row}
        assert len(places) > 15
        for text, place in places.items():
            got = np.asarray(state.info.log_probs.target)[place, : len(text)]
            np.testing.assert_allclose(got, law[text][2], atol=2e-4)
    # The controls: a credit that is forgotten at each token, and the rule without a budget.
    assert agreement(state, 1, forgets=True) < 1e-5
    assert agreement(state, 0, math.inf) < 1e-5


def test_the_mean_bill_is_within_the_budget():
    state = decoded(speculative())
    apart = np.asarray(state.info.log_prob.target) - np.asarray(state.info.log_prob.processed)
    lengths = np.asarray(state.lengths)
    for row, budget in enumerate(BUDGETS):
        nats = apart[row::3] - budget * lengths[row::3]
        assert nats.mean() < 3.0 * nats.std() / math.sqrt(COPIES) + 1e-6
        law = law_of(row, budget).values()
        mean = sum(chance * bill for chance, bill, _ in law)
        error = apart[row::3].std() / math.sqrt(COPIES)
        assert abs(apart[row::3].mean() - mean) < 5.0 * error + 1e-5
    # The control: the rule itself pays more.
    free = law_of(0, math.inf)
    spent = sum(chance * bill for chance, bill, _ in free.values())
    assert spent > 1.2 * BUDGETS[0] * sum(
        chance * len(text) for text, (chance, _, _) in free.items()
    )


def test_a_controller_that_looks_at_the_drafted_token_is_found(monkeypatch):
    """The control: it charges what the drafted token takes, before that token is accepted."""
    drafted = []
    propose, targets_of = rounds.propose_block, rounds.block_targets

    def remembered(*args, **options):
        block, state = propose(*args, **options)
        drafted.append(block.tokens)
        return block, state

    def peeking(rule, credit, q, p, q_conf, p_conf):
        if q.shape[1] == 1:  # after a whole block
            return targets_of(rule, credit, q, p, q_conf, p_conf)
        tokens = jnp.pad(drafted[-1], ((0, 0), (0, q.shape[1] - drafted[-1].shape[1])))

        def row(rule, credit, tokens, q, p, q_conf, p_conf):
            def spend(credit, at):
                target, p, token = at
                held, left = rule.spend(target, p, credit)
                dear = jnp.log(held[token]) - jnp.log(p[token]) > credit + rule.nats_per_token
                return jnp.where(dear, credit, left), (jnp.where(dear, p, held), left)

            wanted = jax.vmap(rule.rule)(q, p, q_conf, p_conf)
            _, (held, left) = lax.scan(spend, credit, (wanted, p, tokens))
            return held, jnp.concatenate([credit[None], left])

        return jax.vmap(row)(rule, credit, tokens, q, p, q_conf, p_conf)

    monkeypatch.setattr(rounds, "propose_block", remembered)
    monkeypatch.setattr(rounds, "block_targets", peeking)
    # A class of its own, for which nothing is compiled.
    kind = type("Peeking", (decoding.Speculative,), {})
    state = decoded(speculative(kind=kind))
    assert min(agreement(state, row) for row in (0, 1)) < 1e-5


def test_sequential_cascades_and_nested_rounds_refuse_a_budget():
    held = rules.Budgeted(RULE, 0.1)
    for kind in (decoding.TokenCascade, decoding.OracleCascade, decoding.SequenceCascade):
        with pytest.raises(ValueError, match="rule must be like rules") as told:
            kind(verifier=MODEL, drafter=MODEL).check_rule(held)
        assert "\n" not in str(told.value)
    nested = decoding.Round(
        MODEL, drafting.NeuralDrafter(MODEL, 2), VERIFICATIONS["Block"], nested=True
    )
    with pytest.raises(ValueError, match="rule must not have a budget in a round inside a cascade"):
        nested.check_rule(held)
