"""What is measured, how sure it is, and what is chosen."""

import numpy as np
import pytest

from specjax.tuning import (
    ALONE,
    Expected,
    Hierarchy,
    Measured,
    choose,
    hierarchies,
    rank_correlation,
    shortlist,
    speedup,
)

ONE = Hierarchy((1,), ((4,),))
TWO = Hierarchy((1, 2), ((2, 2), (0, 0)))


def times(seconds, tokens=10):
    seconds = np.asarray(seconds, float)
    tokens = np.full(seconds.shape, tokens)
    return Measured(seconds, tokens, {"verifier": tokens})


def test_a_speedup_compares_the_same_chunks():
    slow, fast = times([1.0, 2.0, 4.0]), times([0.5, 1.0, 2.0])
    # Chunks differ much, their ratios do not: so the interval is narrow.
    assert speedup(fast, slow) == pytest.approx((2.0, 2.0, 2.0))
    found = speedup(times([0.5, 2.0, 2.0]), slow)
    assert found.value == pytest.approx(7 / 4.5) and found.low < found.value < found.high
    assert found.low == pytest.approx(1.0) and found.high == pytest.approx(2.0)
    # Other texts have other lengths: tokens per second count.
    assert speedup(times([1.0], 30), times([1.0], 10)).value == pytest.approx(3.0)


def test_the_fastest_is_chosen():
    found = {ALONE: times([1.0] * 6), ONE: times([0.6] * 6), TWO: times([0.5] * 6)}
    best, why = choose(found)
    assert best == TWO
    assert why == "it was 2 times as fast as the verifier alone (2 to 2)"


def test_where_drafting_does_not_pay_the_verifier_decodes_alone():
    found = {ALONE: times([1.0] * 6), ONE: times([1.3] * 6)}
    assert choose(found)[0] == ALONE
    assert "do not draft" in choose(found)[1]
    # Faster by chance alone: in one chunk of six.
    found[TWO] = times([0.5] + [1.01] * 5)
    assert speedup(found[TWO], found[ALONE]).value > 1.0
    best, why = choose(found)
    assert best == ALONE and "may be chance: do not draft" in why


def test_the_best_single_drafter_and_the_verifier_are_always_measured():
    weighed = list(hierarchies(2, ("text",), max_draft=4))
    expected = {one: Expected(1.0, 1.0, 1.0 + len(one.lengths)) for one in weighed}
    expected[ONE] = Expected(1.0, 1.0, 1.5)
    ranked, taken = shortlist(expected, 4)
    assert set(ranked) == set(weighed) and len(ranked) == len(weighed)
    single, *rest = taken[1:]
    assert taken[0] == ALONE and single.is_single and len(taken) == 6
    assert all(expected[one].speedup == 3.0 for one in rest)
    kinds = [one.kind for one in rest]
    assert max(kinds.count(kind) for kind in kinds) == 2
    alone, *others = shortlist({ALONE: Expected(1.0, 1.0, 1.0)}, 3)[1]
    assert alone == ALONE and not others


def test_hierarchies_are_each_there_once_and_of_the_sizes_asked_for():
    weighed = list(hierarchies(2, ("text",), max_draft=3, leniences=(1.0, 2.0), levels=3))
    assert len(set(weighed)) == len(weighed)
    assert {one.models for one in weighed} == {(), (1,), (2,), (1, 2)}
    deep = [one for one in weighed if len(one.lengths) == 3]
    assert deep and all(one.copies == "text" and one.models == (1, 2) for one in deep)
    for one in weighed:
        assert max((max(row) for row in one.lengths), default=0) <= 3
        lower = any(map(any, one.lengths[1:]))
        assert one.lenience == 1.0 or lower
    assert not [one for one in hierarchies(2, (), max_draft=3, levels=1) if len(one.lengths) > 1]


def test_ranks_are_compared():
    assert rank_correlation([1.0, 2.0, 3.0], [1.1, 5.0, 9.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert rank_correlation([1.0, 1.0, 1.0], [3.0, 2.0, 1.0]) is None
    assert rank_correlation([1.0, 2.0], [3.0, 2.0]) is None
