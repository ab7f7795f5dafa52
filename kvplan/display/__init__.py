"""Any value of kvplan as text, and block layouts and plans as pictures, in text and SVG."""

from kvplan.display.explanation import explain
from kvplan.display.pictures import Picture, show

__all__ = [
    "Picture",
    "explain",
    "show",
]
