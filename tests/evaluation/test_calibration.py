import math

import numpy as np
import pytest
from scipy import optimize, stats

from specjax.evaluation.calibration import (
    best_constant,
    binary_cross_entropy,
    binary_kl,
    calibrate,
    probabilities,
    reliability,
    roc,
    undo_weight,
)

RNG = np.random.default_rng(0)
WEIGHT = 6.0


def logit(p):
    return np.log(p) - np.log1p(-np.asarray(p))


def test_the_weighted_cross_entropy_is_the_formula():
    labels, predicted = np.asarray([1.0, 0.0, 0.25]), np.asarray([0.5, 0.2, 0.9])
    expected = (
        -math.log(0.5) - 6 * math.log(0.8) - 0.25 * math.log(0.9) - 6 * 0.75 * math.log(0.1)
    ) / 3
    assert binary_cross_entropy(labels, logit(predicted), WEIGHT) == pytest.approx(expected)


def test_the_divergence_is_that_of_two_coins():
    labels, predicted = np.asarray([0.3, 0.0, 1.0]), np.asarray([0.6, 0.25, 0.5])
    expected = (stats.entropy([0.3, 0.7], [0.6, 0.4]) - math.log(0.75) - math.log(0.5)) / 3
    assert binary_kl(labels, logit(predicted)) == pytest.approx(expected)
    assert binary_kl(predicted, logit(predicted)) == pytest.approx(0.0, abs=1e-12)


def test_certain_predictions_cost_nothing_or_all():
    assert binary_kl([0.0, 1.0], [-np.inf, np.inf]) == 0.0
    assert binary_kl([0.0, 0.5], [-np.inf, np.inf]) == np.inf


def test_the_curve_of_hard_labels_by_hand():
    curve = roc([1, 0, 1, 1, 0], [0.9, 0.8, 0.8, 0.3, 0.1])
    np.testing.assert_allclose(curve.true_positive, [0, 1 / 3, 2 / 3, 1, 1])
    np.testing.assert_allclose(curve.false_positive, [0, 0, 1 / 2, 1 / 2, 1])
    np.testing.assert_array_equal(curve.thresholds, [np.inf, 0.9, 0.8, 0.3, 0.1])
    # Of six pairs: 0.9 beats both, 0.8 ties one and beats one, 0.3 beats one.
    assert curve.area == pytest.approx((2 + 1.5 + 1) / 6)


def test_a_soft_label_is_so_many_hard_ones():
    labels, scores = np.asarray([0.75, 0.25, 0.5]), np.asarray([0.9, 0.9, 0.2])
    hard = [1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0]
    soft, split = roc(labels, scores), roc(hard, np.repeat(scores, 4))
    for ours, theirs in zip(soft, split, strict=True):
        np.testing.assert_allclose(ours, theirs)
    found, expected = (
        reliability(a, logit(b)) for a, b in ((labels, scores), (hard, scores.repeat(4)))
    )
    np.testing.assert_allclose(found.accepted, expected.accepted)
    np.testing.assert_array_equal(4 * found.counts, expected.counts)


def test_the_area_is_that_of_the_rank_test():
    labels, scores = RNG.random(200) < 0.4, np.round(RNG.normal(size=200), 1)
    statistic = stats.mannwhitneyu(scores[labels], scores[~labels]).statistic
    area = statistic / (labels.sum() * (~labels).sum())
    assert roc(labels, scores).area == pytest.approx(area)
    assert math.isnan(roc([1.0, 1.0], [0.1, 0.2]).area)


def test_the_calibration_error_by_hand():
    predicted = np.asarray([0.05, 0.15, 0.95, 1.0, 0.55])
    labels = np.asarray([0.1, 0.3, 0.5, 1.0, 0.55])
    found = reliability(labels, np.append(logit(predicted[:3]), [np.inf, logit(0.55)]), bins=5)
    np.testing.assert_array_equal(found.counts, [2, 0, 1, 0, 2])
    np.testing.assert_allclose(found.predicted, [0.1, np.nan, 0.55, np.nan, 0.975])
    np.testing.assert_allclose(found.accepted, [0.2, np.nan, 0.55, np.nan, 0.75])
    assert found.error == pytest.approx((2 * 0.1 + 2 * 0.225) / 5)


@pytest.mark.parametrize("weight", [1.0, WEIGHT])
def test_fits_have_the_lowest_loss(weight):
    feature = 3.0 + 20.0 * RNG.normal(size=300)
    labels = probabilities(0.1 * feature + RNG.normal(size=300))

    def loss(fit):
        return binary_cross_entropy(labels, fit[0] * feature + fit[1], weight)

    best = optimize.minimize(loss, [0.0, 0.0], method="BFGS", options={"gtol": 1e-9}).x
    fit = calibrate(feature, labels, weight)
    np.testing.assert_allclose([fit.slope, fit.offset], best, rtol=1e-4)
    np.testing.assert_allclose(fit([0.0, 1.0]), [fit.offset, fit.offset + fit.slope])
    constant = best_constant(labels, weight)
    alone = optimize.minimize_scalar(lambda z: loss([0.0, z]), bounds=(-9, 9), method="bounded").x
    assert constant.offset == pytest.approx(alone, abs=1e-4)
    assert calibrate(np.ones(300), labels, weight) == constant


def test_labels_that_a_feature_tells_apart_end_the_fit():
    fit = calibrate([0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 1.0, 1.0])
    assert binary_kl([0.0, 0.0, 1.0, 1.0], fit([0.0, 1.0, 2.0, 3.0])) < 1e-3
    assert best_constant([1.0, 1.0]).offset == np.inf
    assert calibrate([0.0, 1.0], [1.0, 1.0]).offset == np.inf


def test_weights_are_undone():
    labels = RNG.random(50)
    weighted = best_constant(labels, WEIGHT)
    assert undo_weight(weighted.offset, WEIGHT) == pytest.approx(best_constant(labels).offset)


@pytest.mark.parametrize(
    ("labels", "values", "message"),
    [
        ([], [], "equal length n >= 1, got"),
        ([0.5], [0.1, 0.2], r"got \(1,\) and \(2,\)"),
        ([1.1], [0.0], r"labels must be in \[0, 1\]"),
        ([np.nan], [0.0], r"labels must be in \[0, 1\]"),
        ([0.5], [np.nan], "predictions must not be NaN"),
    ],
)
def test_what_is_no_label_or_prediction_is_refused(labels, values, message):
    for function in (binary_cross_entropy, binary_kl, roc, reliability):
        with pytest.raises(ValueError, match=message):
            function(labels, values)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="bins must be a whole number of at least 1, got 0"):
        reliability([0.5], [0.0], bins=0)
    with pytest.raises(ValueError, match="`feature` must be finite"):
        calibrate([np.inf, 0.0], [0.5, 0.5])
