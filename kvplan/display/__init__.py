"""Any value of kvplan as text; layouts and plans drawn in text."""

from kvplan.display.explanation import explain
from kvplan.display.pictures import show

__all__ = [
    "explain",
    "show",
]
