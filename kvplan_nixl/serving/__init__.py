"""Serving: the machine that :mod:`kvplan.protocol` runs on, and who may talk to it.

It needs neither NIXL nor torch. Its names are provisional, as those of the protocol are.
"""

from kvplan_nixl.serving.access import Access, tls_contexts
from kvplan_nixl.serving.driver import Driver
from kvplan_nixl.serving.fingerprint import fingerprint

__all__ = ["Access", "Driver", "fingerprint", "tls_contexts"]
