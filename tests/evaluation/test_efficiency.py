import jax
import numpy as np
import pytest

import specjax
from specjax import decoding, drafting, rules, testing, verification
from specjax.data.examples import Example
from specjax.evaluation import Bootstrap, divergence, efficiency
from specjax.evaluation.efficiency import RowCounts, impossible_share
from specjax.runs.predictions import record_of_row
from specjax.types import Sampling
from tests import tiny_pair
from tests.decoding.helpers import begin, pair

# Two rounds of five drafted tokens: two accepted and one more; five accepted, of which, with the
# next token, two are past the limit of seven.
ROW = {
    "prediction": "x",
    "ended_by": "length",
    "info": {
        "emitted": 7,
        "rounds": 2,
        "drafted": 10,
        "accepted": 7,
        "calls": {"verifier": 2, "drafter": 11},
    },
}
ALONE = {
    "prediction": "y",
    "ended_by": "eos",
    "info": {"emitted": 3, "rounds": 3, "drafted": 0, "accepted": 0, "calls": {"verifier": 3}},
}
FAILED = {"prediction": None, "error": "empty"}


def values(records, **options):
    figures = efficiency(RowCounts.from_records(records), **options)
    return {name: figure.value for name, figure in figures.items()}


def test_figures_of_one_row_are_those_counted_by_hand():
    found = values([ROW, FAILED], costs={"verifier": 10, "drafter": 0.5})
    assert found == {
        "tokens_per_verifier_call": 7 / 2,
        # 7 of 10 accepted, 1 of them past the limit: 6 of 7 were drafted.
        "drafter_share": pytest.approx(6 / 7),
        "rejection_rate": 3 / 10,
        "discard_rate": 4 / 7,
        "output_length": 7,  # of the row that was decoded
        "cut_share": 1,
        "cost_per_token": pytest.approx((20 + 5.5) / 7),
    }


def test_a_verifier_alone_drafts_nothing():
    found = values([ALONE, ALONE])
    for name in ("rejection_rate", "discard_rate", "drafter_share"):
        assert np.isnan(found.pop(name))
    assert found == {
        "tokens_per_verifier_call": 1,
        "output_length": 3,
        "cut_share": 0,
    }


def test_a_cascade_without_blocks_rejects_nothing_and_has_deferrals():
    # A sequence cascade: a response of 5 tokens is deferred, one of 3 is kept.
    texts = [(5, 5, 5), (3, 0, 0)]
    blocks = {"rounds": 8, "drafted": 0, "accepted": 0}
    infos = [
        {"emitted": n, "deferrals": late, "calls": {"verifier": calls, "drafter": 6}, **blocks}
        for n, late, calls in texts
    ]
    found = values([{"ended_by": "eos", "info": info} for info in infos])
    assert np.isnan(found["rejection_rate"]) and np.isnan(found["discard_rate"])
    assert found["deferrals_per_token"] == 5 / 8 and found["drafter_share"] == 3 / 8
    assert "deferrals_per_token" not in values([ROW])  # which says nothing of them


def test_rows_of_a_decoder_count_as_their_records(tmp_path):
    models = specjax.load_pair(**tiny_pair.write_pair(tmp_path))
    decoder = specjax.Decoder(models, max_draft=3, max_new_tokens=8, batch_size=4, buckets=(16,))
    result = decoder(tiny_pair.sentences(6, seed=1), seed=0, progress=False)
    ours = efficiency(RowCounts.from_records(result.to_dicts()))
    examples = [Example(row.index, "") for row in result]
    lines = [record_of_row(example, row) for example, row in zip(examples, result, strict=True)]
    theirs = efficiency(RowCounts.from_records(lines))
    assert {k: f.value for k, f in ours.items()} == {k: f.value for k, f in theirs.items()}
    info = result.info
    assert ours["tokens_per_verifier_call"].value == info.tokens_per_verifier_call
    assert ours["discard_rate"].value == info.discard_rate
    assert ours["rejection_rate"].value == pytest.approx(1 - info.acceptance_rate)


@pytest.mark.parametrize(
    ("costs", "kind", "message"),
    [
        ({"verifier": 1.0}, ValueError, "no cost for drafter"),
        ({"verifier": -1.0, "drafter": 1}, ValueError, "costs: verifier must"),
        ({"verifier": "1"}, ValueError, "costs: verifier must be a number"),
        ([1.0], ValueError, "costs must be a dict such as"),
    ],
)
def test_bad_costs_are_refused(costs, kind, message):
    with pytest.raises(kind, match=message):
        values([ROW], costs=costs)


def test_the_divergence_of_texts_is_estimated_without_bias():
    rng = np.random.default_rng(0)
    # A law of texts of up to 6 tokens over 4 words, of which the first ends a text.
    target, p = rng.dirichlet(np.ones(4), 2), rng.dirichlet(np.ones(4), 2)
    ends = np.asarray([True, False, False, False])

    def expected(length, state):
        """The sums of KL and of tokens that a text is expected to have from here."""
        if not length:
            return np.zeros(2)
        kl = np.sum(target[state] * np.log(target[state] / p[state]))
        rest = sum(target[state][v] * expected(length - 1, v % 2) for v in range(4) if not ends[v])
        return np.asarray([kl, 1.0]) + rest

    rows = np.zeros((4000, 3))
    for row in rows:
        state = 0
        for _ in range(6):
            token = rng.choice(4, p=target[state])
            row += np.log(target[state][token]), np.log(p[state][token]), 1
            if ends[token]:
                break
            state = token % 2
    truth = np.divide(*expected(6, 0))
    found = Bootstrap().interval(divergence(*rows.T))
    assert found.error < 0.05 * truth
    assert abs(found.value - truth) < 3.5 * found.error
    # The control: texts that are scored under another order of the laws.
    assert abs(
        Bootstrap().interval(divergence(rows[:, 1], rows[:, 0], rows[:, 2])).value - truth
    ) > (20 * found.error)


def test_what_the_verifier_could_not_write_is_infinitely_far():
    target, p = [-1.0, 0.0, np.nan], [-1.5, -np.inf, 0.0]
    assert divergence(target, p, [2, 3, 4]).value == np.inf
    assert impossible_share(target, p).value == 1 / 2  # nothing is known of the third
    # A row of which nothing is known is left out with its tokens.
    assert divergence([-1.0, np.nan], [-1.5, 0.0], [2, 4]).value == 0.25
    assert np.isnan(divergence([np.nan], [0.0], [4]).value)


@pytest.mark.parametrize(
    ("rule", "algorithm"),
    [(rules.OPT(0.2), verification.Block()), (rules.Lossy(0.5), verification.Token())],
    ids=["OPT", "Lossy"],
)
def test_the_loop_records_what_the_estimate_needs(rule, algorithm):
    vocab, longest, rows, end = 4, 6, 4096, 0
    model = testing.TabularModel(vocab)
    tables = [testing.random_table(seed, vocab, 1) for seed in (3, 4)]
    method = decoding.Speculative(model, drafting.Chain(model, 3), algorithm, eos_ids=(end,))
    params = pair(*tables, rule)
    inputs = np.full((rows, 1), 1, np.int32)
    state = begin(
        method,
        params,
        inputs,
        np.ones(rows, np.int32),
        max_new=longest,
        ids=np.arange(rows),
        limits=np.full(rows, longest),
        sampling=Sampling(1.0),
    )
    state = method.run(params, state, 100)
    found = Bootstrap().interval(
        divergence(state.info.log_prob.target, state.info.log_prob.processed, state.lengths)
    )

    p, q = (np.asarray(jax.nn.softmax(table, axis=-1), np.float64) for table in tables)
    pairs = np.stack([q, p, q, p], axis=1).astype(np.float32)
    target = np.stack([np.asarray(rule(*four), np.float64) for four in pairs])
    nats = (target * np.log(np.maximum(target, 1e-30) / p)).sum(axis=1)
    truth, alive = np.zeros(2), np.eye(vocab)[1]
    for _ in range(longest):
        truth += alive @ nats[:vocab], alive.sum()
        alive = alive @ target[:vocab]
        alive[end] = 0.0
    exact = truth[0] / truth[1]
    assert exact > 10 * found.error
    assert abs(found.value - exact) < 3.5 * found.error


def test_rows_that_the_verifier_has_not_read_leave_the_divergence_unknown():
    assert np.isnan(divergence([-1.0, -2.0], [-1.5, np.nan], [3, 4]).value)
    # A row of which nothing is known is left out.
    assert divergence([-1.0, np.nan], [-1.5, np.nan], [5, 4]).value == pytest.approx(0.1)


def test_rows_that_the_verifier_has_not_read_leave_the_impossible_share_unknown():
    target, p = [-1.0, -2.0, np.nan], [-np.inf, -2.0, np.nan]
    assert impossible_share(target, p).value == 1 / 2  # of the rows that were decoded
    p[1] = np.nan
    found = Bootstrap(resamples=100).interval(impossible_share(target, p))
    assert np.isnan(found.value) and np.isnan(found.low)
    assert np.isnan(impossible_share([np.nan], [0.0]).value)
