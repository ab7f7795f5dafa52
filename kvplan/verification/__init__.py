"""Check plans: carry them out in fake memory, or prove them from their tables.

Nothing here shares code with the planner.
"""

from kvplan.verification.certificate import Certificate, certify
from kvplan.verification.memory import FakeMemory
from kvplan.verification.report import PROMISES, Report, Tail
from kvplan.verification.verifier import verify, verify_together

__all__ = [
    "PROMISES",
    "Certificate",
    "FakeMemory",
    "Report",
    "Tail",
    "certify",
    "verify",
    "verify_together",
]
