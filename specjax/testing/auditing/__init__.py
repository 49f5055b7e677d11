"""What distribution does a verifier emit? The audit of `specjax.testing.audit`."""

from specjax.testing.auditing.auditor import audit
from specjax.testing.auditing.report import AuditReport
