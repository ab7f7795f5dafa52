"""Any value of kvplan as text, and block layouts and plans as pictures, in text and SVG."""

from kvplan.show.explanation import explain
from kvplan.show.pictures import Picture, show

__all__ = [
    "Picture",
    "explain",
    "show",
]
