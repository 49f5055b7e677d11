"""The expected times against `specjax.theory`, simulations and numbers counted by hand."""

import numpy as np
import pytest

from specjax import theory
from specjax.drafting import Costs
from specjax.study.clock import Clock
from specjax.study.drafting_plans import Plan, plans
from specjax.study.known_rates import Copies, KnownRates, Law
from specjax.study.plan_rounds import plan_round
from specjax.text import Lookup
from specjax.text.passes import PassTimes

# A pass takes the same whatever it reads.
COSTS = {"verifier": 1.0, "middle": 0.2, "small": 0.03}
RATES = {("verifier", "middle"): 0.85, ("verifier", "small"): 0.6, ("middle", "small"): 0.7}
COPIED = Lookup()
# So long that its end does not matter.
LONG = np.asarray([4000])


def known(copies=None, lengths=LONG, rates=RATES, further=()):
    found = {(r, Law(d), 1.0): rate for (r, d), rate in rates.items()}
    found |= {(name, COPIED, 1.0): np.full(5, 0.5) for name in COSTS} | dict(further)
    return KnownRates(found, {COPIED: copies}, lengths)


def clock(rows=1, costs=COSTS, call=0.0, prompts=None):
    tables = {}
    for reviewer, own in costs.items():
        for drafter in (*costs, None):
            draft = costs.get(drafter, 0.0)
            tables[reviewer, drafter] = Costs((rows,), (1, 16), (draft,), ((own, own),))
    taken = prompts or dict.fromkeys(costs, 0.0)
    return Clock(PassTimes(rows, costs, taken, call, tables))


def expect(plan, facts=None, times=None):
    return plan_round(plan, facts or known(), times or clock())


@pytest.mark.parametrize("count", [1, 4, 7])
def test_one_drafter_is_as_the_closed_form_says(count):
    found = expect(Plan(("middle",), ((count,),)))
    # After a whole block the drafter makes one pass more, which the paper leaves out.
    whole = 0.85**count * 0.2
    want = theory.expected_tokens(0.85, count)
    assert found.tokens == pytest.approx(want, rel=2e-3)
    assert found.seconds == pytest.approx(1 + count * 0.2 + whole)
    assert found.drafted == pytest.approx(count)
    # A drafter that catches up reads that token with its next one, and none takes time unmeasured.
    free = Clock(clock()._times, owes=False)
    assert expect(Plan(("middle",), ((count,),)), times=free).seconds == pytest.approx(
        found.seconds - whole
    )
    assert expect(Plan(("middle",), ((count,),)), times=Clock(None)).seconds == 0.0


def test_a_horizontal_cascade_is_as_the_closed_form_says():
    found = expect(Plan(("middle", "small"), ((3, 2), (0, 0))))
    want = theory.horizontal_ewif([0.85] * 3 + [0.6] * 2, [0.2] * 3 + [0.03] * 2)
    assert found.tokens / found.seconds == pytest.approx(want, rel=2e-3)


def simulated(rng, rows, count, draft, trials):
    """Rounds of a vertical cascade: the mean tokens of a row, and seconds of the batch."""
    emitted, seconds = 0, 0.0
    for _ in range(trials):
        inner_rounds = 0
        lengths = np.zeros(rows, int)
        while (lengths < count).any():
            right = rng.random((rows, draft)) < RATES["middle", "small"]
            stands = np.cumprod(right, axis=1).sum(axis=1)
            lengths = np.where(lengths < count, lengths + stands + 1, lengths)
            inner_rounds += 1
        accepted = [np.cumprod(rng.random(n) < RATES["verifier", "middle"]).sum() for n in lengths]
        emitted += rows + sum(accepted)
        seconds += 1 + inner_rounds * (COSTS["middle"] + draft * COSTS["small"])
    return emitted / trials / rows, seconds / trials


@pytest.mark.parametrize(("rows", "count", "draft"), [(1, 5, 3), (4, 3, 2)])
def test_a_vertical_cascade_is_as_simulated(rows, count, draft):
    tokens, seconds = simulated(np.random.default_rng(0), rows, count, draft, 20_000)
    plan = Plan(("middle", "small"), ((count, 0), (0, draft)))
    found = expect(plan, times=clock(rows))
    assert found.tokens == pytest.approx(tokens, rel=0.01)
    assert found.seconds == pytest.approx(seconds, rel=0.01)


def test_lenience_counts_where_a_drafter_reviews():
    small, middle = Law("small"), Law("middle", "small", 2.0)
    matrix = ((4, 0), (0, 3))

    def found(lenience, rate):
        laws = {("middle", small, 2.0): 0.9, ("verifier", middle, 1.0): rate}
        plan = Plan(("middle", "small"), matrix, lenience=lenience)
        return expect(plan, known(further=laws))

    strict, loose, same = found(1.0, 0.75), found(2.0, 0.75), found(2.0, 0.85)
    # Fewer inner rounds, of tokens that stand less often.
    assert loose.seconds < strict.seconds and loose.tokens < strict.tokens
    speeds = [one.tokens / one.seconds for one in (strict, loose, same)]
    assert speeds[2] > max(speeds[:2])


def copies(matched, drafted, on_text, lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Copies(*(np.asarray(x) for x in (matched, drafted, on_text)), offsets)


def test_copies_follow_the_texts():
    # A round at 0 takes one token, at 1 all three copied and one, at 5 one; then the text ends.
    found = copies([0, 4, 4, 0, 0, 0], [0, 3, 2, 0, 0, 0], [0, 3, 2, 0, 0, 0], [6])
    given = known(found, np.asarray([6]))
    alone = expect(Plan((), ((5,),), COPIED), given)
    assert alone.tokens == pytest.approx(6 / 3) and alone.seconds == pytest.approx(1.0)
    shorter = expect(Plan((), ((2,),), COPIED), given)
    assert shorter.tokens == pytest.approx(6 / 4)  # 0, 1 .. 3, 4, 5
    # With a drafter that is always right, blocks of one token: 0 and 1, 2 .. 4 copied, then 5.
    given = known(found, np.asarray([6]), {**RATES, ("verifier", "middle"): 1.0})
    both = expect(Plan(("middle",), ((1,),), COPIED, min_match=4, max_copy=5), given)
    assert both.tokens == pytest.approx(6 / 3)
    never = expect(Plan(("middle",), ((1,),), COPIED, min_match=9, max_copy=5), given)
    assert never.tokens == pytest.approx(2.0)


def test_copies_are_a_level_too():
    found = copies([3, 0] * 50, [4, 0] * 50, [2, 0] * 50, [100])
    block = expect(Plan(("middle",), ((2, 4), (0, 0)), COPIED), known(found))
    survival = sum(0.5**k for k in range(1, 5)) / 2  # in half of the blocks something is copied
    want = 1 + 0.85 + 0.85**2 + 0.85**2 * survival
    assert block.tokens == pytest.approx(want, rel=2e-3)
    reviewed = expect(Plan(("middle",), ((4, 0), (0, 4)), COPIED), known(found))
    assert reviewed.seconds < 1 + 4 * 0.2  # rounds that copy make fewer passes


def brute(k11, k12, k22):
    """The speed-up of a cascade of two models, by summing over all that may happen."""
    c, b, s = COSTS.values()
    rates = {}  # tokens of the first stage -> probability; and its time

    def fill(have, probability, time):
        if have >= k11:
            rates.setdefault((have, round(time, 9)), 0.0)
            rates[have, round(time, 9)] += probability
            return
        for k in range(k22 + 1):
            rate = RATES["middle", "small"]
            stop = rate**k * (1.0 if k == k22 else 1 - rate)
            fill(have + k + 1, probability * stop, time + b + k22 * s)

    if k22:
        fill(0, 1.0, 0.0)
    else:
        rates[k11, k11 * b] = 1.0
    tokens = seconds = 0.0
    for (length, time), probability in rates.items():
        ladder = [RATES["verifier", "middle"]] * length + [RATES["verifier", "small"]] * k12
        tokens += probability * (1 + float(np.cumprod(ladder).sum()))
        seconds += probability * (c + time + k12 * s)
    return tokens / seconds


def test_the_choice_is_that_of_brute_force():
    weighed = [Plan.of(one) for one in plans(("middle", "small"), max_draft=8, leniences=(1.0,))]
    weighed = [one for one in weighed if len(one.models) == 2 and not one.copies]
    found = {one.lengths: expect(one) for one in weighed}
    found = {k: one.tokens / one.seconds for k, one in found.items()}
    want = {k: brute(k[0][0], k[0][1], k[1][1]) for k in found}
    # 5 counts of each: the first is there, one of the others at least.
    assert len(found) == 5 * (6 * 6 - 1)
    for lengths, speedup in found.items():
        assert speedup == pytest.approx(want[lengths], rel=3e-3), lengths
    assert max(found, key=found.get) == max(want, key=want.get)


def test_where_drafting_never_pays_all_are_slower():
    slow = clock(costs={"verifier": 1.0, "middle": 0.9, "small": 0.8})
    bad = known(rates=dict.fromkeys(RATES, 0.1))
    weighed = [Plan.of(one) for one in plans(("middle", "small"), max_draft=4)]
    found = [expect(one, bad, slow) for one in weighed if not one.copies and one.lenience == 1.0]
    assert all(one.tokens / one.seconds < 1.0 for one in found) and len(found) > 100


def test_wider_passes_cost_what_was_measured():
    table = Costs((1,), (1, 2, 4, 8), (0.1,), ((1.0, 1.5, 2.0, 3.0),))
    times = Clock(PassTimes(1, {}, {}, 0.0, {("verifier", None): table}))
    widths = (1, 2, 3, 4, 6, 8, 10)
    found = [times.review("verifier", n) for n in widths]
    assert found == pytest.approx([1.0, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5])


def test_a_batch_waits_for_its_longest_row():
    times = clock(rows=3)
    law = np.asarray([0.5, 0.25, 0.25])
    rng = np.random.default_rng(0)
    drawn = rng.choice(3, size=(200_000, 3), p=law)
    assert times.most(law) == pytest.approx(drawn.max(axis=1).mean(), abs=5e-3)
    assert times.any(0.25) == pytest.approx((drawn == 1).any(axis=1).mean(), abs=5e-3)
    table = Costs((3,), (1, 2, 3), (0.1,), ((1.0, 2.0, 4.0),))
    times = Clock(PassTimes(3, {}, {}, 0.0, {("verifier", None): table}))
    want = np.asarray([1.0, 2.0, 4.0])[drawn.max(axis=1)].mean()
    assert times.longest_review("verifier", (1, 2, 3), law) == pytest.approx(want, abs=1e-2)
