"""The ``kvplan`` command line.

This module works without the ``cli`` extra, and names the package to install.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from kvplan.cli.status import INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; ``--help`` lists them.

    Without ``arguments``, those of this process count.
    """
    if importlib.util.find_spec("click") is None:
        print("kvplan: the command line needs click: pip install click", file=sys.stderr)
        return 2
    # the rest of the command line imports click, which takes long enough for a ^C
    try:
        from kvplan.cli.app import run
    except KeyboardInterrupt:
        return INTERRUPTED

    return run(sys.argv[1:] if arguments is None else list(arguments))
