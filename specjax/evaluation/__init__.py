"""Evaluation: metrics of texts against references."""

from specjax.evaluation.metrics import METRICS, Metric, bleu, check_metrics, exact_match, rouge_l

__all__ = ["METRICS", "Metric", "bleu", "check_metrics", "exact_match", "rouge_l"]
