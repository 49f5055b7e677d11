"""Turns: each side does each part as often, and none is always the first."""

import collections

from specjax.study.turns import in_turns, timed


def test_each_side_does_each_part_and_the_order_alternates():
    done = []
    sides = {name: lambda part, name=name: done.append((name, part)) or len(done) for name in "ab"}
    found = list(in_turns(sides, ["x", "y", "z"], 2))
    assert collections.Counter(done) == {(n, p): 2 for n in "ab" for p in "xyz"}
    assert [value for *_, value in found] == list(range(1, 13))
    firsts = [name for name, _ in done[::2]]
    assert firsts.count("a") == firsts.count("b") == 3 and firsts[:4] == ["a", "b", "a", "b"]
    # Parts come one after the other, whoever does them.
    assert [part for _, part in done] == [p for p in "xyzxyz" for _ in "ab"]
    assert [one[:3] for one in found][6:8] == [("b", 1, 0), ("a", 1, 0)]


def test_a_call_is_timed():
    seconds, value = timed(lambda: 3)
    assert value == 3 and 0.0 <= seconds < 1.0
