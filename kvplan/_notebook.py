"""What notebooks ask values for. :mod:`kvplan.display` answers, and loads when it is first asked.

A class takes one of the two as its ``_repr_svg_`` or ``_repr_html_``, and imports no display.
"""

from __future__ import annotations

import importlib
from html import escape
from typing import Final

from kvplan.errors import KVPlanError

STYLE: Final = "font-family: monospace; white-space: pre; overflow-x: auto"


def svg(value: object) -> str | None:
    """Return the picture of a worker or a plan, None of one that cannot be drawn.

    Then a notebook shows its text.
    """
    try:
        picture: str = importlib.import_module("kvplan.display").show(value).svg
    except KVPlanError:
        return None
    return picture


def html(value: object) -> str:
    """Return what :func:`kvplan.explain` says of a value, as HTML."""
    explanation: str = importlib.import_module("kvplan.display").explain(value)
    # Notebooks would show it in the letters of their texts, and break the rows of a table.
    return f'<pre style="{STYLE}">{escape(explanation)}</pre>'
