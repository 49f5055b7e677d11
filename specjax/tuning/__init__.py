"""Tuning: how to draft for a verifier, from one look at the models and a few measured runs."""

from specjax.tuning.demand import Clause, Demand, Slack
from specjax.tuning.evidence import Evidence
from specjax.tuning.expectation import Expected, expect
from specjax.tuning.gin_file import gin_bindings, gin_text, setting_bindings, setting_text
from specjax.tuning.grid import DEFAULT_RULES, ScreenGrid
from specjax.tuning.halving import MeasuringError, Round, halve, promising
from specjax.tuning.hierarchies import ALONE, Hierarchy, hierarchies
from specjax.tuning.judging import DO_NOT_DRAFT, DRAFT, NOT_MET, Choice, Judge, Judged, verdict
from specjax.tuning.measurement import Measured, SpeedUp, choose, measure, speedup
from specjax.tuning.screen import Screened, check_settings, screen
from specjax.tuning.screener import screen_settings
from specjax.tuning.screening import Copies, Law, Screening
from specjax.tuning.settings import RULES, STOPPING, VERIFICATIONS, Setting, Tuning
from specjax.tuning.texts import Texts, verifier_texts
from specjax.tuning.times import Times, measure_times
from specjax.tuning.tune import Search, tune
from specjax.tuning.tuner import (
    rank_correlation,
    screening_of,
    shortlist,
    tables_of_copies,
    tune_drafts,
)
from specjax.tuning.walking import Walk, walk

__all__ = [
    "ALONE",
    "DEFAULT_RULES",
    "DO_NOT_DRAFT",
    "DRAFT",
    "NOT_MET",
    "RULES",
    "STOPPING",
    "VERIFICATIONS",
    "Choice",
    "Clause",
    "Copies",
    "Demand",
    "Evidence",
    "Expected",
    "Hierarchy",
    "Judge",
    "Judged",
    "Law",
    "Measured",
    "MeasuringError",
    "Round",
    "ScreenGrid",
    "Screened",
    "Screening",
    "Search",
    "Setting",
    "Slack",
    "SpeedUp",
    "Texts",
    "Times",
    "Tuning",
    "Walk",
    "check_settings",
    "choose",
    "expect",
    "gin_bindings",
    "gin_text",
    "halve",
    "hierarchies",
    "measure",
    "measure_times",
    "promising",
    "rank_correlation",
    "screen",
    "screen_settings",
    "screening_of",
    "setting_bindings",
    "setting_text",
    "shortlist",
    "speedup",
    "tables_of_copies",
    "tune",
    "tune_drafts",
    "verdict",
    "verifier_texts",
    "walk",
]
