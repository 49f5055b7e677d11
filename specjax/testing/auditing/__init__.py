"""What distribution does a verifier emit? The audit of `specjax.testing.audit`."""

from specjax.testing.auditing.auditor import DRAFTS, MODES, audit
from specjax.testing.auditing.calling import ARRAYS, DTYPES
from specjax.testing.auditing.hard_cases import HardCase, hard_cases
from specjax.testing.auditing.report import AuditReport, SheetRow, Verdict

__all__ = [
    "ARRAYS",
    "DRAFTS",
    "DTYPES",
    "MODES",
    "AuditReport",
    "HardCase",
    "SheetRow",
    "Verdict",
    "audit",
    "hard_cases",
]
