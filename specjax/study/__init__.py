"""Compares settings by estimates and measurements: the library of `specjax compare`."""

from specjax.study.comparison import compare
from specjax.study.grid import Grid
from specjax.study.measure import Bench, Measuring, measure, score
from specjax.study.points import read_points
from specjax.study.texts import Texts, read_texts
from specjax.text.setting import Setting

__all__ = [
    "Bench",
    "Grid",
    "Measuring",
    "Setting",
    "Texts",
    "compare",
    "measure",
    "read_points",
    "read_texts",
    "score",
]
