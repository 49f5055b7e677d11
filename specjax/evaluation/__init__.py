"""Evaluation: text metrics, the efficiency of decoding, and the divergence from the verifier.

Every figure can be resampled: `Bootstrap().interval(figure(METRICS["bleu"], outputs, references))`.
"""

from specjax.evaluation.answers import AnswerAfter, AnswerPattern
from specjax.evaluation.bootstrap import Bootstrap, Interval, Sums, ratio
from specjax.evaluation.efficiency import RowCounts, divergence, efficiency
from specjax.evaluation.metrics import METRICS, Metric, figure
from specjax.evaluation.programs import PassAt1
from specjax.evaluation.sandbox import Sandbox

__all__ = [
    "METRICS",
    "AnswerAfter",
    "AnswerPattern",
    "Bootstrap",
    "Interval",
    "Metric",
    "PassAt1",
    "RowCounts",
    "Sandbox",
    "Sums",
    "divergence",
    "efficiency",
    "figure",
    "ratio",
]
