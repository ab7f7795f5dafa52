"""The door of the command line: says what is missing where the ``cli`` extra is not installed.

The commands themselves are in :mod:`kvplan.commands`, which needs that extra.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Final

EXTRA: Final = ("click", "rich")
"""What the ``cli`` extra brings."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``None``: the process's own arguments) and return its exit status.

    0: done, and verified where that was asked; 1: bytes differ; 2: refused, with one line on stderr.
    """
    for package in EXTRA:
        if importlib.util.find_spec(package) is None:
            print(f"kvplan: the command line needs {package}: pip install 'kvplan[cli]'", file=sys.stderr)
            return 2
    from kvplan.commands import run

    return run(sys.argv[1:] if arguments is None else list(arguments))
