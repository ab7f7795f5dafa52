"""Hypothesis strategies of engines and requests; ``pip install 'kvplan[testing]'`` brings what they need."""

from importlib.util import find_spec

if find_spec("hypothesis") is None:
    raise ImportError("kvplan.testing.strategies needs hypothesis: pip install 'kvplan[testing]'")

from kvplan.testing.cases import Case, cases
from kvplan.testing.requests import Request, requests

__all__ = ["Case", "Request", "cases", "requests"]
