"""Evaluation: texts against references, what decoding took, and how well acceptance is predicted.

Every figure can be resampled: `Bootstrap().interval(figure(METRICS["bleu"], outputs, references))`.
"""

from specjax.evaluation.acceptance import (
    Calibration,
    ClassWeights,
    Reliability,
    Roc,
    best_constant,
    binary_cross_entropy,
    binary_kl,
    calibrate,
    probabilities,
    reliability,
    roc,
    undo_weights,
)
from specjax.evaluation.answers import (
    AnswerAfter,
    AnswerPattern,
    answer_number,
    normalized,
    token_f1,
)
from specjax.evaluation.bootstrap import Bootstrap, Interval, Sums, mean, pooled, ratio
from specjax.evaluation.efficiency import RowCounts, divergence, efficiency, impossible_share
from specjax.evaluation.metrics import (
    METRICS,
    Metric,
    bleu,
    check_metrics,
    check_references,
    exact_match,
    figure,
    rouge_l,
)
from specjax.evaluation.programs import PassAt1, Problem, program, read_problems
from specjax.evaluation.sandbox import Outcome, Sandbox

__all__ = [
    "METRICS",
    "AnswerAfter",
    "AnswerPattern",
    "Bootstrap",
    "Calibration",
    "ClassWeights",
    "Interval",
    "Metric",
    "Outcome",
    "PassAt1",
    "Problem",
    "Reliability",
    "Roc",
    "RowCounts",
    "Sandbox",
    "Sums",
    "answer_number",
    "best_constant",
    "binary_cross_entropy",
    "binary_kl",
    "bleu",
    "calibrate",
    "check_metrics",
    "check_references",
    "divergence",
    "efficiency",
    "exact_match",
    "figure",
    "impossible_share",
    "mean",
    "normalized",
    "pooled",
    "probabilities",
    "program",
    "ratio",
    "read_problems",
    "reliability",
    "roc",
    "rouge_l",
    "token_f1",
    "undo_weights",
]
