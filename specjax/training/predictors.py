"""Compares an acceptance head with simpler predictors."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.acceptance_head import apply_head, confidence_features, log_odds
from specjax.compilation import jit
from specjax.evaluation.calibration import (
    best_constant,
    binary_cross_entropy,
    binary_kl,
    calibrate,
    reliability,
    roc,
    undo_weight,
)
from specjax.training.head_data import HeadData, HeadTask
from specjax.types import Params


def compare_predictors(
    task: HeadTask, params: Params, data: dict[str, HeadData]
) -> tuple[list[dict[str, Any]], dict[str, Any], float]:
    """Compares a head with simpler predictors, each fitted to the training data.

    They are the best constant, and logistic fits of the drafter's largest confidence, of the
    entropy of its confidences, and of its confidence of the drafted token itself.

    Args:
      task: the head's task; its weight is also the weight of the fits.
      params: its parameters.
      data: "training" and "validation".

    Returns:
      For each predictor, the head first, its `loss` (weighted), `kl` (binary, in nats), `auc`,
      `ece`, and `kl_even` and `ece_even`, the same after `undo_weight`; for each its curves; and
      the head's `kl` on the training data.
    """
    weight = task.rejection_weight
    labels = data["validation"].column("labels")
    predictions = {"head": _predict(task, params, data["validation"]).astype(np.float64)}
    learnt = data["training"].column("labels")
    predictions["constant"] = best_constant(learnt, weight)(np.zeros(labels.size))
    for name, (column, feature) in _FEATURES.items():
        fit = calibrate(feature(data["training"].column(column)), learnt, weight)
        predictions[name] = fit(feature(data["validation"].column(column)))
    rows, curves = [], {}
    for name, predicted in predictions.items():
        even = undo_weight(predicted, weight)
        curve, diagram = roc(labels, predicted), reliability(labels, predicted)
        figures = {
            "loss": binary_cross_entropy(labels, predicted, weight),
            "kl": binary_kl(labels, predicted),
            "auc": curve.area,
            "ece": diagram.error,
            "kl_even": binary_kl(labels, even),
            "ece_even": reliability(labels, even).error,
        }
        rows.append({"predictor": name, **{k: _finite(v) for k, v in figures.items()}})
        some = np.unique(np.linspace(0, curve.thresholds.size - 1, 200).astype(int))
        curves[name] = {
            "roc": [[_finite(x) for x in rate[some]] for rate in curve[:2]],
            "reliability": [[_finite(x) for x in part] for part in diagram[:3]],
        }
    return rows, curves, binary_kl(learnt, _predict(task, params, data["training"]))


def _log_odds(confidences: np.ndarray) -> np.ndarray:
    """As the head reads them."""
    return np.asarray(log_odds(jnp.asarray(confidences)), np.float64)


_FEATURES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "largest confidence": ("top", _log_odds),
    "entropy": ("entropy", lambda x: np.asarray(x, np.float64)),
    "token's confidence": ("drawn", _log_odds),
}


def _predict(task: HeadTask, params: Params, data: HeadData, size: int = 2**14) -> np.ndarray:
    """The head's log-odds `[n]` float32 of all positions, `size` at a time."""

    @jit
    def of_block(hidden: Any, *seen: Any) -> Any:
        return apply_head(task.head, params, hidden, confidence_features(*seen))

    out = []
    for shard in data.shards:
        for start in range(0, len(shard.labels), size):
            columns = (shard.hidden, shard.top, shard.entropy, shard.drawn)
            block = [column[start : start + size] for column in columns]
            short = size - len(block[0])
            padded = [np.pad(x, ((0, short), *((0, 0),) * (x.ndim - 1))) for x in block]
            out.append(np.asarray(of_block(*padded))[: len(block[0])])
    return np.concatenate(out)


def _finite(value: Any) -> float | None:
    """A number that JSON supports, or None."""
    return float(value) if np.isfinite(value) else None
