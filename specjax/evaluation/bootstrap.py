"""Figures that depend only on sums over examples, and their bootstrap intervals.

A mean is a sum over a count, tokens per call are tokens over calls, BLEU is a function of summed
counts. So a resample of the examples only sums their statistics again, without scoring.

Axes: n examples, k statistics of an example, R resamples.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from specjax.checks import one_number, whole_fields

# The most numbers drawn at once, which limits the memory.
_AT_ONCE = 1 << 22
Score = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
    """A figure of n examples that is a function of their summed statistics.

    Attributes:
      statistics: finite numbers.
      score: `[m, k]` sums -> `[m]` float64 figures; NaN if undefined, such as 0 / 0.
    """

    statistics: Float64[np.ndarray, "n k"]
    score: Score

    def __post_init__(self) -> None:
        array = np.asarray(self.statistics, np.float64)
        assert array.ndim == 2 and array.size, f"statistics must be [n, k], got {array.shape}"
        assert np.isfinite(array).all(), "count infinite values in a separate column"
        object.__setattr__(self, "statistics", array)

    def __len__(self) -> int:
        return len(self.statistics)

    @property
    def value(self) -> float:
        """The figure of all examples."""
        return float(self.score(self.statistics.sum(axis=0, keepdims=True))[0])


def ratio(above: ArrayLike, below: ArrayLike, scale: float = 1.0) -> Sums:
    """Returns `scale * sum(above) / sum(below)` of vectors `[n]`; NaN if `below` sums to 0."""
    top = np.asarray(above, np.float64)
    return Sums(
        np.stack([top, np.broadcast_to(np.asarray(below, np.float64), top.shape)], axis=-1),
        lambda sums: scale * divided(sums[:, 0], sums[:, 1]),
    )


def mean(values: ArrayLike, scale: float = 1.0) -> Sums:
    """Returns the mean of `values` `[n]`, times `scale`."""
    return ratio(values, 1.0, scale)


def divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Returns `above / below` without a warning; NaN for 0 / 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return above / below


class Interval(NamedTuple):
    """A figure with its bootstrap interval.

    Attributes:
      value: the figure of all examples.
      low: the lower end; NaN if the figure is undefined in all resamples.
      error: the standard deviation over resamples; infinite or NaN if some are not finite.
    """

    value: float
    low: float
    high: float
    error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Percentile intervals by resampling examples with replacement.

    Figures of the same number of examples share their resamples, so differences are paired, and
    the order of the calls does not matter.

    Attributes:
      resamples: R, at least 100.
      level: the share of resamples inside an interval, in (0, 1).
      seed: the seed of the resamples, from 0.

    Source: Efron 1979; for BLEU Koehn 2004.
    """

    resamples: int = 1000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        whole_fields(self, "Bootstrap: ", resamples=100, seed=0)
        span: dict[str, Any] = {"low": 0.0, "high": 1.0, "open_low": True, "open_high": True}
        level = one_number("Bootstrap: level", self.level, **span, dtype=np.float64)
        object.__setattr__(self, "level", level)

    def replicates(self, figure: Sums) -> np.ndarray:
        """Returns `[R]` float64, the figure of each resample."""
        n, sums = len(figure), []
        draws, step = np.random.default_rng([self.seed, n]), max(1, _AT_ONCE // n)
        for start in range(0, self.resamples, step):
            rows = min(step, self.resamples - start)
            picked = draws.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
            counts = np.bincount(picked.ravel(), minlength=rows * n).reshape(rows, n)
            sums.append(counts.astype(np.float64) @ figure.statistics)
        return np.asarray(figure.score(np.concatenate(sums)), np.float64)

    def interval(self, figure: Sums) -> Interval:
        """Returns the figure with its interval; undefined resamples (0 / 0) are left out."""
        return self.summary(figure.value, self.replicates(figure))

    def difference(
        self, figure: Sums, other: Sums, by: Callable[[Any, Any], Any] = np.subtract
    ) -> Interval:
        """Returns `figure - other` of the same examples with its paired interval.

        `by` compares two figures; `np.divide` gives their ratio.
        """
        assert len(figure) == len(other), "a paired difference needs figures of the same examples"
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(by(np.float64(figure.value), np.float64(other.value)))
            return self.summary(value, by(self.replicates(figure), self.replicates(other)))

    def summary(self, value: float, replicates: np.ndarray) -> Interval:
        """Returns the interval of a figure from its replicates `[R]`."""
        defined = replicates[~np.isnan(replicates)]
        if np.isnan(value) or not defined.size:
            return Interval(value, np.nan, np.nan, np.nan)
        tail = 0.5 * (1.0 - self.level)
        # No interpolation, because a resample may be infinite.
        ends = np.quantile(defined, (tail, 1.0 - tail), method="inverted_cdf")
        finite = bool(np.isfinite(defined).all())
        return Interval(
            value, float(ends[0]), float(ends[1]), float(defined.std()) if finite else np.inf
        )


def pooled(figures: Sequence[Sums]) -> Sums:
    """Pools a figure over several runs on the same n examples by adding the statistics.

    Several outputs of the same input, such as those of different seeds, are not independent; so
    they are resampled together.
    """
    assert len({figure.statistics.shape for figure in figures}) == 1, "statistics of one shape"
    return Sums(np.sum([figure.statistics for figure in figures], axis=0), figures[0].score)
