"""Models with known distributions, and the exact law of the tokens that decoding emits."""

from specjax.rules import check_rule
from specjax.testing.auditing import AuditReport, audit
from specjax.testing.auditing.report import SheetRow, Verdict
from specjax.testing.enumeration import (
    Stop,
    emitted_law,
    fixed_length,
    prefix_distributions,
    target_law,
    total_variation,
)
from specjax.testing.tabular import TabularModel, random_table

__all__ = [
    "AuditReport",
    "SheetRow",
    "Stop",
    "TabularModel",
    "Verdict",
    "audit",
    "check_rule",
    "emitted_law",
    "fixed_length",
    "prefix_distributions",
    "random_table",
    "target_law",
    "total_variation",
]
