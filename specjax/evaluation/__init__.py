"""Evaluation: metrics of texts against references, and of predicted acceptance."""

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
from specjax.evaluation.metrics import METRICS, Metric, bleu, check_metrics, exact_match, rouge_l

__all__ = [
    "METRICS",
    "Calibration",
    "ClassWeights",
    "Metric",
    "Reliability",
    "Roc",
    "best_constant",
    "binary_cross_entropy",
    "binary_kl",
    "bleu",
    "calibrate",
    "check_metrics",
    "exact_match",
    "probabilities",
    "reliability",
    "roc",
    "rouge_l",
    "undo_weights",
]
