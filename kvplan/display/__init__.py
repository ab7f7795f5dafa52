"""Any value of kvplan as text; layouts and plans as pictures."""

from kvplan.display.explanation import explain
from kvplan.display.pictures import Picture, show

__all__ = [
    "Picture",
    "explain",
    "show",
]
