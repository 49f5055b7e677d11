"""Evaluation: text metrics, the efficiency of decoding, and the divergence from the verifier.

Every figure can be resampled: `Bootstrap().interval(figure(METRICS["bleu"], outputs, references))`.
"""

from specjax.evaluation.bootstrap import Bootstrap
from specjax.evaluation.efficiency import divergence, efficiency
from specjax.evaluation.metrics import METRICS, AnswerAfter, AnswerPattern, Metric, figure
from specjax.evaluation.sandbox import PassAt1, Sandbox

__all__ = [
    "METRICS",
    "AnswerAfter",
    "AnswerPattern",
    "Bootstrap",
    "Metric",
    "PassAt1",
    "Sandbox",
    "divergence",
    "efficiency",
    "figure",
]
