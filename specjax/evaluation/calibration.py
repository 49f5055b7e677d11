"""How well a predictor knows which drafted tokens are accepted.

A label is a probability of acceptance, P in [0, 1], not a yes or no: a position counts as P
accepted and 1 - P rejected tokens. Everything is float64 on the host. Axes: n positions.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from specjax.checks import whole_number

_STEPS = 100


def binary_cross_entropy(labels: ArrayLike, log_odds: ArrayLike, weight: float = 1.0) -> float:
    """The mean of -P log P^ - w (1 - P) log(1 - P^), in nats.

    Args:
      labels: `[n]`, P in [0, 1].
      log_odds: `[n]`, predicted: P^ is their sigmoid. -inf and inf are certain.
      weight: w > 0, how much a rejected token counts.

    Returns:
      The mean; infinite where a prediction is certain and wrong.

    Raises:
      ValueError: there are no labels, or not as many as predictions, or a label is not in [0, 1] or
        a prediction is NaN.

    Source: SpecDec++ (arXiv 2405.19715), section 3.3.
    """
    p, z = _checked(labels, log_odds)
    return float(np.mean(_times(p, -z) + _times(weight * (1 - p), z)))


def binary_kl(labels: ArrayLike, log_odds: ArrayLike) -> float:
    """The mean KL divergence of predicted from true acceptance, in nats; 0 for a perfect predictor.

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
    """The trade-off of a threshold: tokens with a score of at least it are said to be accepted.

    Attributes:
      false_positive: `[m]`, the share of rejected tokens that are said to be accepted, from 0 to 1.
      true_positive: `[m]`, the share of accepted tokens that are.
      thresholds: `[m]`, falling; the first is infinite.
      area: under the curve: the probability that an accepted token has a higher score than a
        rejected one (half of it where they are equal). NaN where all are accepted or rejected.
    """

    false_positive: np.ndarray  # [m]
    true_positive: np.ndarray  # [m]
    thresholds: np.ndarray  # [m]
    area: float


def roc(labels: ArrayLike, scores: ArrayLike) -> Roc:
    """The receiver operating characteristic of scores, with labels that are probabilities.

    Args:
      labels: `[n]`, P in [0, 1].
      scores: `[n]`, higher for what is rather accepted.

    Returns:
      The curve, one point for each distinct score and one before the first.

    Raises:
      ValueError: see `binary_cross_entropy`.
    """
    p, s = _checked(labels, scores)
    order = np.argsort(-s, kind="stable")
    p, s = p[order], s[order]
    last = np.append(np.flatnonzero(s[1:] != s[:-1]), s.size - 1)  # of each run of equal scores
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = [
            np.concatenate([[0.0], np.cumsum(share)[last]]) / share.sum() for share in (1 - p, p)
        ]
    false, true = rates
    area = float(np.sum(np.diff(false) * 0.5 * (true[1:] + true[:-1])))
    return Roc(false, true, np.concatenate([[np.inf], s[last]]), area)


class Reliability(NamedTuple):
    """Predictions against what happened, in bins of equal width of the predicted probability.

    Attributes:
      counts: `[bins]` int64, positions.
      predicted: `[bins]`, the mean prediction; NaN in an empty bin.
      accepted: `[bins]`, the mean label; NaN in an empty bin.
      error: the expected calibration error: the mean over positions of |predicted - accepted| of
        their bins.
    """

    counts: np.ndarray  # [bins]
    predicted: np.ndarray  # [bins]
    accepted: np.ndarray  # [bins]
    error: float


def reliability(labels: ArrayLike, log_odds: ArrayLike, *, bins: int = 15) -> Reliability:
    """The reliability diagram and the expected calibration error (ECE).

    Args:
      labels: `[n]`, P in [0, 1].
      log_odds: `[n]`, predicted.
      bins: of equal width on [0, 1]; the last one includes 1.

    Returns:
      The diagram's figures.

    Raises:
      ValueError: see `binary_cross_entropy`; or `bins` is no whole number of at least 1.

    Source: Naeini et al. 2015; Guo et al. 2017.
    """
    bins = whole_number("bins", bins, low=1)
    p, z = _checked(labels, log_odds)
    predicted = probabilities(z)
    place = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    counts = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        said, was = (np.bincount(place, x, minlength=bins) / counts for x in (predicted, p))
    gaps = np.where(counts > 0, np.abs(said - was), 0.0)
    return Reliability(counts, said, was, float(np.sum(counts * gaps) / counts.sum()))


def probabilities(log_odds: ArrayLike) -> np.ndarray:
    """The sigmoid of log-odds `[n]`, float64."""
    return special.expit(np.asarray(log_odds, np.float64))


def undo_weight(log_odds: ArrayLike, weight: float) -> np.ndarray:
    """Log-odds as a weight of 1 would have given them.

    The best prediction for a weighted loss is P / (P + w (1 - P)), not P; its log-odds are off by
    -log w.

    Args:
      log_odds: `[n]`, of a predictor that was fitted with the weight.
      weight: w > 0, how much a rejected token counts.

    Returns:
      `[n]` float64.
    """
    return np.asarray(log_odds, np.float64) + np.log(weight)


class Calibration(NamedTuple):
    """A predictor from one feature: log-odds = offset + slope * feature.

    Attributes:
      slope: 0 for a constant.
      offset: the log-odds where the feature is 0.
    """

    slope: float
    offset: float

    def __call__(self, feature: ArrayLike) -> np.ndarray:
        """Log-odds `[n]` float64 of a feature `[n]`."""
        return self.offset + self.slope * np.asarray(feature, np.float64)


def best_constant(labels: ArrayLike, weight: float = 1.0) -> Calibration:
    """The one prediction with the lowest weighted cross entropy.

    Args:
      labels: `[n]`, P in [0, 1].
      weight: w > 0, how much a rejected token counts.

    Returns:
      A `Calibration` of slope 0; its offset is infinite where all tokens are accepted or rejected.

    Raises:
      ValueError: see `binary_cross_entropy`.
    """
    p, _ = _checked(labels, np.zeros(np.shape(labels)))
    with np.errstate(divide="ignore"):
        odds = np.log(p.sum()) - np.log(weight * (1 - p).sum())
    return Calibration(0.0, float(odds))


def calibrate(feature: ArrayLike, labels: ArrayLike, weight: float = 1.0) -> Calibration:
    """The logistic fit of one feature with the lowest weighted cross entropy.

    Args:
      feature: `[n]`, finite.
      labels: `[n]`, P in [0, 1].
      weight: w > 0, how much a rejected token counts.

    Returns:
      The fit; that of the best constant where the feature never changes. Where a threshold on the
      feature tells all tokens apart there is none, and it is as steep as 100 steps make it.

    Raises:
      ValueError: see `binary_cross_entropy`; or the feature is not finite.

    Source: Platt 1999, with soft labels; solved by Newton's method with a trust region.
    """
    p, x = _checked(labels, feature)
    if not np.isfinite(x).all():
        raise ValueError("`feature` must be finite: clip it, or leave the positions out")
    constant = best_constant(p, weight)
    if not x.std() or not np.isfinite(constant.offset):
        return constant
    # In units of its own spread the problem is well conditioned.
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
        raise ValueError(
            f"labels and predictions must be two vectors [n] of one length n >= 1, got {p.shape} "
            f"and {v.shape}"
        )
    if not np.all((p >= 0) & (p <= 1)):
        raise ValueError("labels must be probabilities in [0, 1]: one is outside, or NaN")
    if np.isnan(v).any():
        raise ValueError("predictions must be numbers: one is NaN")
    return p, v
