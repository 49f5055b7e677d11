"""The law of a rule held to a divergence budget, through the real loop, and each text's bill."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax import decoding, drafting, rules
from specjax.decoding import speculative as rounds
from tests import laws
from tests.decoding.helpers import AfterTokenOne
from tests.laws import EOS, MODEL, V
from tests.tables import VERIFICATIONS
from tests.variants import variants

RULE = rules.Diff(0.5)
ROWS = [laws.Row((0,), 4), laws.Row((1, 0), 4, 1, 0.7), laws.Row((0, 1, 1), 4, 2, 1.3)]
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


def continuations(row):
    """(target, p) after each beginning of up to 3 tokens of a text."""
    target = laws.target(RULE, ROWS[row]).astype(np.float64)
    p = laws.after(laws.P, ROWS[row]).astype(np.float64)
    texts = itertools.chain(*(itertools.product(range(V), repeat=n) for n in range(4)))
    return dict(zip(texts, zip(target, p, strict=True), strict=True))


def law_of(row, budget, *, forgets=False):
    """Text -> (its chance, its bill, the logarithms of its pi)."""
    found, todo, after = {}, [((), 1.0, 0.0, ())], continuations(row)
    while todo:
        text, chance, bill, logs = todo.pop()
        if len(text) == ROWS[row].limit or text[-1:] == (EOS,):
            found[text] = chance, bill, logs
            continue
        credit = 0.0 if forgets else budget * len(text) - bill
        pi, cost = afforded(*after[text], budget + credit)
        todo += [
            ((*text, v), chance * pi[v], bill + cost, (*logs, math.log(pi[v])))
            for v in range(V)
            if pi[v] > 0.0
        ]
    return found


def chances(row, budget, **kind):
    return {text: chance for text, (chance, _, _) in law_of(row, budget, **kind).items()}


def enumerated(verification="Block", policy=None):
    """The laws of the rows, and for each text the state in which it ended."""
    drafter = drafting.Chain(MODEL, 2, *([] if policy is None else [policy]))
    loop = decoding.Speculative(MODEL, drafter, VERIFICATIONS[verification], eos_ids=(EOS,))
    texts = laws.Texts(loop, log_probs=True)
    rule = rules.Budgeted(RULE, np.float32(BUDGETS))
    of_loop = [row if loop.min_draft == 0 else row._replace(draft_limit=None) for row in ROWS]
    given = decoding.MethodParams(laws.P, drafting.chain.ChainParams(laws.A), rule)
    return texts(given, of_loop), texts.ends


def apart(found, row, budget=None, **kind):
    wanted = chances(row, BUDGETS[row] if budget is None else budget, **kind)
    return laws.distance(found[row], wanted)


CASES = [("Block", None), ("Token", AfterTokenOne()), ("GreedyBlock", None)]


@pytest.mark.parametrize("case", variants(CASES, *CASES[:2]), ids=str)
def test_the_law_with_a_budget_of_each_row(case):
    found, ends = enumerated(*case)
    for row, budget in enumerate(BUDGETS):
        law, spent, length = law_of(row, budget), 0.0, 0.0
        assert apart(found, row) < 1e-5
        for text, (chance, bill, logs) in law.items():
            assert bill <= budget * len(text) + 1e-12
            if text not in ends[row]:
                assert chance < 1e-6
                continue
            # Nothing of the log-probabilities depends on where rounds began and how they ended.
            info = ends[row][text].info
            np.testing.assert_allclose(info.log_probs.target[0, : len(text)], logs, atol=2e-4)
            spent += chance * (info.log_prob.target[0] - info.log_prob.processed[0])
            length += chance * len(text)
        assert spent <= budget * length + 1e-4
    # The controls: a credit that is forgotten at each token, and the rule without a budget.
    assert apart(found, 1, forgets=True) > 0.005
    assert apart(found, 0, math.inf) > 0.005
    free = law_of(0, math.inf).items()
    spent = sum(chance * bill for _, (chance, bill, _) in free)
    assert spent > 1.2 * BUDGETS[0] * sum(chance * len(text) for text, (chance, _, _) in free)


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
    found, _ = enumerated()
    assert max(apart(found, row) for row in (0, 1)) > 0.005


def test_sequential_cascades_and_nested_rounds_refuse_a_budget():
    held = rules.Budgeted(RULE, 0.1)
    for kind in (decoding.TokenCascade, decoding.OracleCascade, decoding.SequenceCascade):
        with pytest.raises(ValueError, match="rule must be like rules") as told:
            kind(verifier=MODEL, drafter=MODEL).check_rule(held)
        assert "\n" not in str(told.value)
    nested = decoding.Round(MODEL, drafting.Chain(MODEL, 2), VERIFICATIONS["Block"], nested=True)
    with pytest.raises(ValueError, match="rule must not have a carry in a round inside a cascade"):
        nested.check_rule(held)
