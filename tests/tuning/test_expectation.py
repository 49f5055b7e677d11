"""The expected times against `specjax.theory`, simulations and numbers counted by hand."""

import dataclasses

import numpy as np
import pytest

from specjax import theory
from specjax.tuning import ALONE, Copies, Hierarchy, Law, Screening, expect, hierarchies

# The verifier, a middle model and a small one; a pass takes the same whatever it reads.
COSTS = (1.0, 0.2, 0.03)
RATES = {(0, 1): 0.85, (0, 2): 0.6, (1, 2): 0.7}
# So long that its end does not matter.
LONG = np.asarray([4000])


def screening(rows=1, copies=None, lengths=LONG, costs=COSTS, rates=RATES):
    passes = tuple({2: cost, 16: cost} for cost in costs)
    known = {(r, Law(d), 1.0): rate for (r, d), rate in rates.items()}
    return Screening(rows, costs, passes, known, copies or {}, lengths)


def test_the_verifier_alone_is_the_measure():
    assert expect(ALONE, screening()) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_one_drafter_is_as_the_closed_form_says(count):
    found = expect(Hierarchy((1,), ((count,),)), screening())
    # After a whole block the drafter makes one pass more, which the paper leaves out.
    whole = 0.85**count * COSTS[1]
    want = theory.expected_tokens(0.85, count)
    assert found.tokens == pytest.approx(want, rel=2e-3)
    assert found.seconds == pytest.approx(1 + count * COSTS[1] + whole)


def test_a_horizontal_cascade_is_as_the_closed_form_says():
    found = expect(Hierarchy((1, 2), ((3, 2), (0, 0))), screening())
    want = theory.horizontal_ewif([0.85] * 3 + [0.6] * 2, [0.2] * 3 + [0.03] * 2)
    assert found.speedup == pytest.approx(want, rel=2e-3)


def simulated(rng, rows, count, draft, trials):
    """Rounds of a vertical cascade: the mean tokens of a row, and seconds of the batch."""
    emitted, seconds = 0, 0.0
    for _ in range(trials):
        inner_rounds = 0
        lengths = np.zeros(rows, int)
        while (lengths < count).any():
            stands = np.cumprod(rng.random((rows, draft)) < RATES[1, 2], axis=1).sum(axis=1)
            lengths = np.where(lengths < count, lengths + stands + 1, lengths)
            inner_rounds += 1
        accepted = [np.cumprod(rng.random(n) < RATES[0, 1]).sum() for n in lengths]
        emitted += rows + sum(accepted)
        seconds += 1 + inner_rounds * (COSTS[1] + draft * COSTS[2])
    return emitted / trials / rows, seconds / trials


@pytest.mark.parametrize(("rows", "count", "draft"), [(1, 5, 3), (4, 3, 2)])
def test_a_vertical_cascade_is_as_simulated(rows, count, draft):
    tokens, seconds = simulated(np.random.default_rng(0), rows, count, draft, 20_000)
    found = expect(Hierarchy((1, 2), ((count, 0), (0, draft))), screening(rows))
    assert found.tokens == pytest.approx(tokens, rel=0.01)
    assert found.seconds == pytest.approx(seconds, rel=0.01)


def test_lenience_counts_where_a_drafter_reviews():
    known = screening()
    laws = {(1, Law(2), 2.0): 0.9, (0, Law(1, 2, 2.0), 1.0): 0.75}
    rates = {**known.rates, **laws}
    lenient = Screening(1, known.alone, known.passes, rates, {}, LONG)
    matrix = ((4, 0), (0, 3))
    strict, loose = (expect(Hierarchy((1, 2), matrix, lenience=x), lenient) for x in (1.0, 2.0))
    # Fewer inner rounds, of tokens that stand less often.
    assert loose.seconds < strict.seconds and loose.tokens < strict.tokens
    swapped = {**known.rates, (1, Law(2), 2.0): 0.9, (0, Law(1, 2, 2.0), 1.0): 0.85}
    same = expect(
        Hierarchy((1, 2), matrix, lenience=2.0),
        Screening(1, known.alone, known.passes, swapped, {}, LONG),
    )
    assert same.speedup > max(strict.speedup, loose.speedup)


def copies(matched, drafted, on_text, lengths, rate=0.5):
    many = np.full(5, rate)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rates = {(place, 1.0): many for place in range(3)}
    arrays = (np.asarray(x) for x in (matched, drafted, on_text))
    return Copies(*arrays, offsets, rates)


def test_copies_follow_the_texts():
    # A round at 0 takes one token, at 1 all three copied and one, at 5 one; then the text ends.
    found = copies([0, 4, 4, 0, 0, 0], [0, 3, 2, 0, 0, 0], [0, 3, 2, 0, 0, 0], [6])
    given = screening(copies={"text": found}, lengths=np.asarray([6]))
    alone = expect(Hierarchy((), ((5,),), "text"), given)
    assert alone.tokens == pytest.approx(6 / 3)
    assert alone.speedup == pytest.approx(2.0)
    shorter = expect(Hierarchy((), ((2,),), "text"), given)
    assert shorter.tokens == pytest.approx(6 / 4)  # 0, 1 .. 3, 4, 5
    # With a drafter that is always right, blocks of one token: 0 and 1, 2 .. 4 copied, then 5.
    rates = {**RATES, (0, 1): 1.0}
    given = screening(copies={"text": found}, lengths=np.asarray([6]), rates=rates)
    both = expect(Hierarchy((1,), ((1,),), "text", min_match=4, max_copy=5), given)
    assert both.tokens == pytest.approx(6 / 3)
    never = expect(Hierarchy((1,), ((1,),), "text", min_match=9, max_copy=5), given)
    assert never.tokens == pytest.approx(2.0)


def test_copies_are_a_level_too():
    found = copies([3, 0] * 50, [4, 0] * 50, [2, 0] * 50, [100])
    given = screening(copies={"text": found})
    block = expect(Hierarchy((1,), ((2, 4), (0, 0)), "text"), given)
    survival = sum(0.5**k for k in range(1, 5)) / 2  # in half of the blocks something is copied
    want = 1 + 0.85 + 0.85**2 + 0.85**2 * survival
    assert block.tokens == pytest.approx(want, rel=2e-3)
    reviewed = expect(Hierarchy((1,), ((4, 0), (0, 4)), "text"), given)
    assert reviewed.seconds < 1 + 4 * 0.2  # rounds that copy make fewer passes


def brute(k11, k12, k22):
    """The speed-up of a cascade of two models, by summing over all that may happen."""
    c, b, s = COSTS
    rates = {}  # tokens of the first stage -> probability; and its time

    def fill(have, probability, time):
        if have >= k11:
            rates.setdefault((have, round(time, 9)), 0.0)
            rates[have, round(time, 9)] += probability
            return
        for k in range(k22 + 1):
            stop = RATES[1, 2] ** k * (1.0 if k == k22 else 1 - RATES[1, 2])
            fill(have + k + 1, probability * stop, time + b + k22 * s)

    if k22:
        fill(0, 1.0, 0.0)
    else:
        rates[k11, k11 * b] = 1.0
    tokens = seconds = 0.0
    for (length, time), probability in rates.items():
        ladder = [RATES[0, 1]] * length + [RATES[0, 2]] * k12
        tokens += probability * (1 + float(np.cumprod(ladder).sum()))
        seconds += probability * (c + time + k12 * s)
    return tokens / seconds


def test_the_choice_is_that_of_brute_force():
    weighed = [one for one in hierarchies(2, (), max_draft=8) if len(one.lengths) == 2]
    given = screening()
    found = {one.lengths: expect(one, given).speedup for one in weighed}
    want = {k: brute(k[0][0], k[0][1], k[1][1]) for k in found}
    # 5 counts of each: the first is there, one of the others at least.
    assert len(found) == 5 * (6 * 6 - 1)
    for lengths, speedup in found.items():
        assert speedup == pytest.approx(want[lengths], rel=3e-3), lengths
    assert max(found, key=found.get) == max(want, key=want.get)


def test_where_drafting_never_pays_the_verifier_alone_is_best():
    given = screening(costs=(1.0, 0.9, 0.8), rates=dict.fromkeys(RATES, 0.1))
    found = {one: expect(one, given).speedup for one in hierarchies(2, (), max_draft=4)}
    assert max(found, key=found.get) == ALONE
    assert sorted(found.values())[-2] < 1.0


def test_prompts_take_their_time():
    """Each model with a place in K reads the prompt: what is gained must make up for that."""
    short = dataclasses.replace(screening(lengths=np.asarray([10])), call=4.0)
    free = dataclasses.replace(short, prompts=(9.0, 0.0, 0.0))
    given = dataclasses.replace(short, prompts=(9.0, 3.0, 1.0))
    one, both = Hierarchy((1,), ((4,),)), Hierarchy((1, 2), ((3, 2), (0, 2)))
    assert expect(ALONE, given).speedup == 1.0
    for hierarchy, read in ((one, 3.0), (both, 3.0 + 1.0 + 1.0)):
        found = expect(hierarchy, given)
        rounds = 10 / found.tokens * found.seconds
        assert found.speedup == pytest.approx((4.0 + 10.0) / (4.0 + read + rounds))
        assert found.speedup < expect(hierarchy, free).speedup


def test_wider_passes_cost_what_was_measured():
    passes = ({2: 1.5, 4: 2.0, 8: 3.0}, {2: 0.1})
    given = Screening(1, (1.0, 0.1), passes, {}, {}, LONG)
    widths = (1, 2, 3, 4, 6, 8, 10)
    assert [given.review(0, n) for n in widths] == [1.0, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5]
