"""Any value of kvplan as text, layouts and plans as pictures, and a request in time as a trace."""

from kvplan.display.explanation import explain
from kvplan.display.pictures import Picture, show
from kvplan.display.trace import Trace

__all__ = [
    "Picture",
    "Trace",
    "explain",
    "show",
]
