"""The quality of predictors of acceptance.

A label is a probability of acceptance, P in [0, 1]: a position counts as P accepted and 1 - P
rejected tokens. Everything is float64 on the host. Axes: n positions.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from specjax.checks import whole_number
from specjax.errors import UserError

_STEPS = 100


def binary_cross_entropy(labels: ArrayLike, log_odds: ArrayLike, weight: float = 1.0) -> float:
    """Returns the mean of -P log P^ - w (1 - P) log(1 - P^), in nats.

    Args:
      labels: `[n]`, P in [0, 1].
      log_odds: `[n]`, predicted: P^ is their sigmoid. -inf and inf are certain predictions.
      weight: w > 0, the weight of a rejected token.

    Returns:
      The mean; infinite if a certain prediction is wrong.

    Raises:
      ValueError: the arrays are empty or differ in length, a label is not in [0, 1], or a
        prediction is NaN.

    Source: SpecDec++ (arXiv 2405.19715), section 3.3.
    """
    p, z = _checked(labels, log_odds)
    return float(np.mean(_times(p, -z) + _times(weight * (1 - p), z)))


def binary_kl(labels: ArrayLike, log_odds: ArrayLike) -> float:
    """Returns the mean KL divergence of predicted from true acceptance, in nats; 0 if perfect.

    Args:
      labels: `[n]`, P in [0, 1].
      log_odds: `[n]`, predicted.

    Returns:
      The mean of P log(P / P^) + (1 - P) log((1 - P) / (1 - P^)).

    Raises:
      ValueError: see `binary_cross_entropy`.

    Source: SpecDec++ (arXiv 2405.19715), appendix C.3.
    """
    cross = binary_cross_entropy(labels, log_odds)
    p = np.asarray(labels, np.float64)
    return cross - float(np.mean(special.entr(p) + special.entr(1 - p)))


class Roc(NamedTuple):
    """The trade-off of a threshold: tokens with at least this score are predicted as accepted.

    Attributes:
      false_positive: `[m]`, the share of rejected tokens predicted as accepted, from 0 to 1.
      true_positive: `[m]`, the share of accepted tokens predicted as accepted.
      thresholds: `[m]`, decreasing; the first is infinite.
      area: the area under the curve: the probability that an accepted token has a higher score than
        a rejected token (equal scores count half). NaN if all are accepted or all rejected.
    """

    false_positive: np.ndarray  # [m]
    true_positive: np.ndarray  # [m]
    thresholds: np.ndarray  # [m]
    area: float


def roc(labels: ArrayLike, scores: ArrayLike) -> Roc:
    """Returns the receiver operating characteristic of scores, for labels that are probabilities.

    Args:
      labels: `[n]`, P in [0, 1].
      scores: `[n]`, higher for tokens more likely to be accepted.

    Returns:
      The curve: a first point at an infinite threshold, then a point for each distinct score.

    Raises:
      ValueError: see `binary_cross_entropy`.
    """
    p, s = _checked(labels, scores)
    order = np.argsort(-s, kind="stable")
    p, s = p[order], s[order]
    last = np.append(np.flatnonzero(s[1:] != s[:-1]), s.size - 1)  # in each run of equal scores
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = [
            np.concatenate([[0.0], np.cumsum(share)[last]]) / share.sum() for share in (1 - p, p)
        ]
    false, true = rates
    area = float(np.sum(np.diff(false) * 0.5 * (true[1:] + true[:-1])))
    return Roc(false, true, np.concatenate([[np.inf], s[last]]), area)


class Reliability(NamedTuple):
    """Predictions and labels, in bins of equal width of the predicted probability.

    Attributes:
      counts: `[bins]` int64, positions.
      predicted: `[bins]`, the mean prediction; NaN in an empty bin.
      accepted: `[bins]`, the mean label; NaN in an empty bin.
      error: the expected calibration error: the mean over positions of |predicted - accepted| in
        their bins.
    """

    counts: np.ndarray  # [bins]
    predicted: np.ndarray  # [bins]
    accepted: np.ndarray  # [bins]
    error: float


def reliability(labels: ArrayLike, log_odds: ArrayLike, *, bins: int = 15) -> Reliability:
    """Returns the reliability diagram and the expected calibration error (ECE).

    Args:
      labels: `[n]`, P in [0, 1].
      log_odds: `[n]`, predicted.
      bins: the number of bins of equal width on [0, 1]; the last bin includes 1.

    Raises:
      ValueError: see `binary_cross_entropy`; or `bins` is not a whole number of at least 1.

    Source: Naeini et al. 2015; Guo et al. 2017.
    """
    bins = whole_number("bins", bins, low=1)
    p, z = _checked(labels, log_odds)
    predicted = probabilities(z)
    place = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    counts = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        forecast, seen = (np.bincount(place, x, minlength=bins) / counts for x in (predicted, p))
    gaps = np.where(counts > 0, np.abs(forecast - seen), 0.0)
    return Reliability(counts, forecast, seen, float(np.sum(counts * gaps) / counts.sum()))


def probabilities(log_odds: ArrayLike) -> np.ndarray:
    """Returns the sigmoid of log-odds `[n]`, float64."""
    return special.expit(np.asarray(log_odds, np.float64))


def undo_weight(log_odds: ArrayLike, weight: float) -> np.ndarray:
    """Corrects log-odds that were fitted with a weight.

    The best prediction for a weighted loss is P / (P + w (1 - P)), not P; its log-odds are shifted
    by -log w.

    Args:
      log_odds: `[n]`, of a predictor that was fitted with the weight.
      weight: w > 0, the weight of a rejected token.
    """
    return np.asarray(log_odds, np.float64) + np.log(weight)


class Calibration(NamedTuple):
    """A predictor from a single feature: log-odds = offset + slope * feature.

    Attributes:
      slope: 0 for a constant.
      offset: the log-odds for a feature of 0.
    """

    slope: float
    offset: float

    def __call__(self, feature: ArrayLike) -> np.ndarray:
        return self.offset + self.slope * np.asarray(feature, np.float64)


def best_constant(labels: ArrayLike, weight: float = 1.0) -> Calibration:
    """Returns the constant prediction with the lowest weighted cross entropy.

    Args:
      labels: `[n]`, P in [0, 1].
      weight: w > 0, the weight of a rejected token.

    Returns:
      A `Calibration` of slope 0; the offset is infinite if all tokens are accepted or all rejected.

    Raises:
      ValueError: see `binary_cross_entropy`.
    """
    p, _ = _checked(labels, np.zeros(np.shape(labels)))
    with np.errstate(divide="ignore"):
        odds = np.log(p.sum()) - np.log(weight * (1 - p).sum())
    return Calibration(0.0, float(odds))


def calibrate(feature: ArrayLike, labels: ArrayLike, weight: float = 1.0) -> Calibration:
    """Fits a logistic function of a feature, with the lowest weighted cross entropy.

    Args:
      feature: `[n]`, finite.
      labels: `[n]`, P in [0, 1].
      weight: w > 0, the weight of a rejected token.

    Returns:
      The fit; the best constant for a constant feature. If a threshold on the feature separates all
      accepted from all rejected tokens, no optimum exists, and the fit ends after 100 steps.

    Raises:
      ValueError: see `binary_cross_entropy`; or the feature is not finite.

    Source: Platt 1999, with soft labels; solved by Newton's method with a trust region.
    """
    p, x = _checked(labels, feature)
    if not np.isfinite(x).all():
        raise UserError("`feature` must be finite: clip it, or leave out these positions")
    constant = best_constant(p, weight)
    if not x.std() or not np.isfinite(constant.offset):
        return constant
    # A standardised feature makes the problem well conditioned.
    mean, spread = float(x.mean()), float(x.std())
    columns = np.stack([np.ones_like(x), (x - mean) / spread])
    rejected, accepted = weight * (1 - p), p

    def loss(fit: np.ndarray) -> float:
        z = fit @ columns
        return float(np.sum(accepted * np.logaddexp(0.0, -z) + rejected * np.logaddexp(0.0, z)))

    def gradient(fit: np.ndarray) -> np.ndarray:
        return columns @ ((accepted + rejected) * probabilities(fit @ columns) - accepted)

    def curvature(fit: np.ndarray) -> np.ndarray:
        predicted = probabilities(fit @ columns)
        return (columns * ((accepted + rejected) * predicted * (1 - predicted))) @ columns.T

    fit = optimize.minimize(
        loss,
        [constant.offset, 0.0],
        jac=gradient,
        hess=curvature,
        method="trust-exact",
        options={"maxiter": _STEPS, "gtol": 1e-9 * p.size},
    ).x
    return Calibration(float(fit[1] / spread), float(fit[0] - fit[1] * mean / spread))


def _times(share: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Share * log(1 + e^z), where 0 * inf is 0."""
    with np.errstate(invalid="ignore"):
        return np.where(share > 0, share * np.logaddexp(0.0, z), 0.0)


def _checked(labels: ArrayLike, values: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    p, v = np.asarray(labels, np.float64), np.asarray(values, np.float64)
    if p.ndim != 1 or p.shape != v.shape or not p.size:
        raise UserError(
            f"labels and predictions must be two vectors [n] of equal length n >= 1, got {p.shape} "
            f"and {v.shape}"
        )
    if not np.all((p >= 0) & (p <= 1)):
        raise UserError(f"labels must be in [0, 1], got values from {p.min():g} to {p.max():g}")
    if np.isnan(v).any():
        raise UserError(f"predictions must not be NaN, but {np.isnan(v).sum()} are")
    return p, v
