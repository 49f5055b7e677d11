"""Sweeps: many ways to decode, measured beside the verifier alone; what `specjax sweep` does."""

from specjax.sweeping.grid import Choices, Files, Grid
from specjax.sweeping.measurement import Bench, MakeDecoder, Measured, Measuring, Times, measure
from specjax.sweeping.points import DRAFTER, REFERENCES, VERIFIER, Point
from specjax.sweeping.scores import Scores, over, score
from specjax.sweeping.sweep import Maker, sweep
from specjax.sweeping.tables import best_quality, curves, least_cost, pareto, table_2
from specjax.sweeping.texts import Texts, read_texts

__all__ = [
    "DRAFTER",
    "REFERENCES",
    "VERIFIER",
    "Bench",
    "Choices",
    "Files",
    "Grid",
    "MakeDecoder",
    "Maker",
    "Measured",
    "Measuring",
    "Point",
    "Scores",
    "Texts",
    "Times",
    "best_quality",
    "curves",
    "least_cost",
    "measure",
    "over",
    "pareto",
    "read_texts",
    "score",
    "sweep",
    "table_2",
]
