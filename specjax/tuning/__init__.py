"""Tuning: how to draft for a verifier, from one look at the models and a few measured runs."""

from specjax.tuning.expectation import Expected, expect
from specjax.tuning.gin_file import gin_bindings, gin_text
from specjax.tuning.hierarchies import ALONE, Hierarchy, hierarchies
from specjax.tuning.measurement import Measured, SpeedUp, choose, measure, speedup
from specjax.tuning.screening import Copies, Law, Screening
from specjax.tuning.settings import Setting, Tuning
from specjax.tuning.tuner import rank_correlation, shortlist, tune_drafts

__all__ = [
    "ALONE",
    "Copies",
    "Expected",
    "Hierarchy",
    "Law",
    "Measured",
    "Screening",
    "Setting",
    "SpeedUp",
    "Tuning",
    "choose",
    "expect",
    "gin_bindings",
    "gin_text",
    "hierarchies",
    "measure",
    "rank_correlation",
    "shortlist",
    "speedup",
    "tune_drafts",
]
