"""Figures that depend on sums over examples alone, and bootstrap intervals for them.

A mean is a sum over a count, tokens per call are tokens over calls, BLEU is a function of summed
counts. So a resample of the examples needs their statistics summed again, and nothing scored again.

Axes: n examples, k statistics of an example, R resamples.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.checks import one_number, whole_number

# Numbers that are drawn at once: bounds the memory, not the results.
_AT_ONCE = 1 << 22
Score = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
    """A figure of n examples that is a function of their summed statistics.

    Attributes:
      statistics: `[n, k]` float64, finite.
      score: `[m, k]` sums -> `[m]` float64 figures; NaN where there is none, such as 0 / 0.

    Raises:
      ValueError: the statistics have another shape, no row, or a value that is not finite.
    """

    statistics: np.ndarray  # [n, k]
    score: Score

    def __post_init__(self) -> None:
        array = np.asarray(self.statistics, np.float64)
        if array.ndim != 2 or not array.size:
            raise ValueError(f"`statistics` must be [n, k] with n, k >= 1, got {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(
                "`statistics` must be finite: count what is not in a column of its own"
            )
        object.__setattr__(self, "statistics", array)

    def __len__(self) -> int:
        return len(self.statistics)

    @property
    def value(self) -> float:
        """The figure of all examples."""
        return float(self.score(self.statistics.sum(axis=0, keepdims=True))[0])

    def grouped(self, groups: ArrayLike) -> "Sums":
        """The same figure, with examples that are resampled together.

        Several outputs of one input, such as those of other seeds, are no independent examples.

        Args:
          groups: `[n]` int, the group of each example, from 0; none may be empty.

        Returns:
          A figure whose examples are the groups.

        Raises:
          ValueError: there are not as many groups' numbers as examples, or a group is empty.
        """
        place = np.asarray(groups)
        if place.shape != (len(self),) or place.dtype.kind not in "iu" or place.min() < 0:
            raise ValueError(
                f"`groups` must be [n] = [{len(self)}] whole numbers from 0, got "
                f"{place.dtype}{list(place.shape)}"
            )
        if not np.bincount(place).all():
            empty = int(np.argmin(np.bincount(place)))
            raise ValueError(f"`groups` must leave no group empty, but {empty} is")
        summed = np.zeros((int(place.max()) + 1, self.statistics.shape[1]))
        np.add.at(summed, place, self.statistics)
        return Sums(summed, self.score)


def ratio(above: ArrayLike, below: ArrayLike, scale: float = 1.0) -> Sums:
    """A sum over a sum: `scale * sum(above) / sum(below)`.

    Args:
      above: `[n]`.
      below: `[n]`, or one number for all examples.
      scale: what the ratio is multiplied with.

    Returns:
      The figure; NaN where `below` sums to 0.

    Raises:
      ValueError: see `Sums`.
    """
    top = np.asarray(above, np.float64)
    return Sums(
        np.stack([top, np.broadcast_to(np.asarray(below, np.float64), top.shape)], axis=-1),
        lambda sums: scale * divided(sums[:, 0], sums[:, 1]),
    )


def mean(values: ArrayLike, scale: float = 1.0) -> Sums:
    """The mean of `values` `[n]`, times `scale`."""
    return ratio(values, 1.0, scale)


def divided(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """`above / below` without a warning; NaN for 0 / 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return above / below


class Interval(NamedTuple):
    """A figure with its bootstrap interval.

    Attributes:
      value: of all examples.
      low: the interval's lower end; NaN where no resample has the figure.
      high: its upper end.
      error: the standard error: the standard deviation over resamples; infinite or NaN where some
        of these are not finite.
    """

    value: float
    low: float
    high: float
    error: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Percentile intervals by resampling examples with replacement.

    Figures of the same number of examples are resampled alike: so differences are paired, and the
    order in which figures are asked for does not matter.

    Attributes:
      resamples: R, at least 100.
      level: the share of resamples inside an interval, in (0, 1).
      seed: of the resamples, from 0.

    Raises:
      TypeError: a value is no number.
      ValueError: a value is outside its range.

    Source: Efron 1979; for BLEU Koehn 2004.
    """

    resamples: int = 1000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        settle = object.__setattr__
        settle(self, "resamples", whole_number("Bootstrap: resamples", self.resamples, low=100))
        settle(self, "seed", whole_number("Bootstrap: seed", self.seed, low=0))
        span: dict[str, Any] = {"low": 0.0, "high": 1.0, "open_low": True, "open_high": True}
        level = one_number("Bootstrap: level", self.level, **span, dtype=np.float64)
        settle(self, "level", level)

    def replicates(self, figure: Sums) -> np.ndarray:
        """`[R]` float64, the figure of each resample."""
        sums = [counts @ figure.statistics for counts in self._counts(len(figure))]
        return np.asarray(figure.score(np.concatenate(sums)), np.float64)

    def interval(self, figure: Sums) -> Interval:
        """The figure with its interval.

        Args:
          figure: of n examples; of one example the interval is that point.

        Returns:
          The interval. Resamples that have no figure (0 / 0) are left out.
        """
        return self.summary(figure.value, self.replicates(figure))

    def difference(
        self, figure: Sums, other: Sums, by: Callable[[Any, Any], Any] = np.subtract
    ) -> Interval:
        """`figure - other` with its paired interval: both are resampled alike.

        Args:
          figure: of n examples.
          other: of the same n examples, in the same order.
          by: what compares two figures; `np.divide` gives their ratio.

        Returns:
          The interval of the difference.

        Raises:
          ValueError: they have not as many examples.
        """
        if len(figure) != len(other):
            raise ValueError(
                f"a paired difference needs figures of the same examples, got {len(figure)} and "
                f"{len(other)}"
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(by(np.float64(figure.value), np.float64(other.value)))
            return self.summary(value, by(self.replicates(figure), self.replicates(other)))

    def summary(self, value: float, replicates: np.ndarray) -> Interval:
        """The interval that replicates `[R]` of a figure give."""
        found = replicates[~np.isnan(replicates)]
        if np.isnan(value) or not found.size:
            return Interval(value, np.nan, np.nan, np.nan)
        tail = 0.5 * (1.0 - self.level)
        # Without interpolation, for a resample may be infinite.
        ends = np.quantile(found, (tail, 1.0 - tail), method="inverted_cdf")
        finite = bool(np.isfinite(found).all())
        return Interval(
            value, float(ends[0]), float(ends[1]), float(found.std()) if finite else np.inf
        )

    def _counts(self, n: int) -> Iterator[np.ndarray]:
        """How often each resample has each example, `[r, n]` float64, R rows in all."""
        draws = np.random.default_rng([self.seed, n])
        step = max(1, _AT_ONCE // n)
        for start in range(0, self.resamples, step):
            rows = min(step, self.resamples - start)
            picked = draws.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
            yield (
                np.bincount(picked.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)
            )


def pooled(figures: Sequence[Sums]) -> Sums:
    """One figure of several runs over the same n examples, whose statistics are added.

    Args:
      figures: one for each run, such as those of other seeds; all have the same score.

    Returns:
      The figure of all outputs together; what is resampled are the n examples.

    Raises:
      ValueError: there are none, or their statistics have not the same shape.
    """
    shapes = {figure.statistics.shape for figure in figures}
    if len(shapes) != 1:
        raise ValueError(f"`figures` must have statistics of one shape, got {sorted(shapes)}")
    return Sums(np.sum([figure.statistics for figure in figures], axis=0), figures[0].score)
