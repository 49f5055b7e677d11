"""How replicas share the points of a sweep."""

import pytest

from specjax.runs.processes import Part
from specjax.sweeping import Point, parts

T = (0.0, 1.0)
POINTS = [
    point
    for t in T
    for point in (
        Point(method="verifier_alone", temperature=t),
        Point(method="drafter_alone", temperature=t),
        *(Point(method="opt", strength=s, temperature=t) for s in (0.1, 0.2, 0.3)),
    )
]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_all_points_and_come_back_in_order(count):
    shares = [parts.share(POINTS, Part(i, count)) for i in range(count)]
    others = [point for own in shares for point in own if point.method != "verifier_alone"]
    assert sorted(others, key=POINTS.index) == [
        point for point in POINTS if point.method != "verifier_alone"
    ]
    for own in shares:
        assert own == sorted(own, key=POINTS.index)
        alone = {point.temperature for point in own if point.method == "verifier_alone"}
        assert alone == {point.temperature for point in own}
    assert parts._order(shares) == POINTS


def test_a_part_twice_and_too_many_parts_are_refused():
    share = parts.share(POINTS, Part(0, 2))
    with pytest.raises(ValueError, match="the point drafter_alone T=0 is in two parts"):
        parts._order([share, share])
    with pytest.raises(ValueError, match="process_count must be at most 8, the points of the grid"):
        parts.share(POINTS, Part(0, 9))
    with pytest.raises(ValueError, match="are replicas, each with a machine of its own"):
        parts.share(POINTS, Part(0, 2, together=True))
