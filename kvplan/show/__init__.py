"""Any value of kvplan as text, and layouts and plans as pictures."""

from kvplan.show.pictures import Picture, show
from kvplan.show.text import explain

__all__ = [
    "Picture",
    "explain",
    "show",
]
