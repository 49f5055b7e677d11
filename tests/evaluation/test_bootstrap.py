import numpy as np
import pytest
import scipy.stats

from specjax.evaluation import Bootstrap
from specjax.evaluation.bootstrap import Sums, mean, pooled, ratio

DRAWS = np.random.default_rng(0)


def covered(trials, make, truth, **options):
    """In how many of many samples the interval holds the truth."""
    inside = 0
    for trial in range(trials):
        found = make(np.random.default_rng(trial), Bootstrap(seed=trial, resamples=300, **options))
        inside += found.low <= truth <= found.high
    return inside


def test_intervals_hold_the_truth_as_often_as_they_say():
    def of_ratio(rng, bootstrap):
        below = rng.poisson(20, 80) + 1
        above = rng.binomial(below, 0.3)  # tokens of a text, and those that were accepted
        return bootstrap.interval(ratio(above, below))

    trials = 400
    assert 0.91 * trials < covered(trials, of_ratio, 0.3) < 0.985 * trials
    assert 0.74 * trials < covered(trials, of_ratio, 0.3, level=0.8) < 0.86 * trials


def test_outputs_of_one_input_are_resampled_together():
    seeds = 8

    def sample(rng):
        # Inputs differ from one another more than the outputs of one do.
        values = rng.normal(0, 1, (40, 1)) + rng.normal(0, 0.1, (40, seeds))
        return values

    def together(rng, bootstrap):
        return bootstrap.interval(pooled([mean(values) for values in sample(rng).T]))

    def as_if_independent(rng, bootstrap):
        return bootstrap.interval(mean(sample(rng).ravel()))

    assert covered(200, together, 0.0) > 0.89 * 200
    # The control: of 320 texts 40 are independent, so these are too narrow.
    assert covered(200, as_if_independent, 0.0) < 0.7 * 200


def test_a_difference_is_paired():
    def sample(rng, gain):
        hard = rng.normal(50, 20, 100)  # inputs are easy or hard for both
        return mean(hard + rng.normal(gain, 1, 100)), mean(hard + rng.normal(0, 1, 100))

    ours, theirs = sample(DRAWS, 1.0)
    bootstrap = Bootstrap()
    found = bootstrap.difference(ours, theirs)
    assert found.value == pytest.approx(ours.value - theirs.value)
    assert 0.3 < found.low < found.value < found.high < 1.7
    # The control: as two samples they cannot be told apart.
    apart = np.hypot(bootstrap.interval(ours).error, bootstrap.interval(theirs).error)
    assert apart > 10 * found.error
    inside = covered(300, lambda rng, b: b.difference(*sample(rng, 0.0)), 0.0)
    assert 0.9 * 300 < inside < 0.99 * 300
    relative = bootstrap.difference(ours, theirs, by=np.divide)
    assert relative.value == pytest.approx(ours.value / theirs.value)


def test_intervals_are_those_of_scipy():
    values = DRAWS.exponential(size=50)
    ours = Bootstrap(resamples=4000).interval(mean(values))
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=4000, method="percentile", rng=np.random.default_rng(1)
    )
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.02)
    assert ours.error == pytest.approx(theirs.standard_error, rel=0.05)


def test_the_seed_decides_and_pieces_do_not(monkeypatch):
    figure = mean(DRAWS.normal(size=30))
    first = Bootstrap(seed=3).replicates(figure)
    assert np.array_equal(first, Bootstrap(seed=3).replicates(figure))
    assert not np.array_equal(first, Bootstrap(seed=4).replicates(figure))
    monkeypatch.setattr("specjax.evaluation.bootstrap._AT_ONCE", 100)
    np.testing.assert_allclose(Bootstrap(seed=3).replicates(figure), first, rtol=0, atol=1e-12)


def test_figures_without_a_value_have_no_interval():
    bootstrap = Bootstrap()
    nothing = bootstrap.interval(ratio([0, 0], [0, 0]))
    assert np.isnan([*nothing]).all()
    endless = bootstrap.interval(
        Sums(np.asarray([[0.0], [1.0]]), lambda sums: np.where(sums[:, 0] > 0, np.inf, 1.0))
    )
    assert (endless.value, endless.low, endless.high, endless.error) == (np.inf, 1, np.inf, np.inf)
    # Half of the resamples of two rows have the row that counts at least once; the others are 0/0.
    assert bootstrap.interval(ratio([0, 3], [0, 2])).low == 1.5


def test_runs_of_several_seeds_are_pooled_input_by_input():
    one, other = ratio([1, 2], [2, 2]), ratio([0, 1], [4, 2])
    made = pooled([one, other])
    assert made.value == 4 / 10 and len(made) == 2
    np.testing.assert_array_equal(made.statistics, [[1, 6], [3, 4]])
