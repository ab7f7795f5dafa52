"""The door of the command line: says what is missing where the ``cli`` extra is not installed.

The commands themselves are in :mod:`kvplan.cli.commands`, which needs that extra.
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

    The statuses are those that ``kvplan --help`` tells; where the ``cli`` extra is missing, 2.
    """
    for package in EXTRA:
        if importlib.util.find_spec(package) is None:
            print(f"kvplan: the command line needs {package}: pip install 'kvplan[cli]'", file=sys.stderr)
            return 2
    from kvplan.cli.commands import run

    return run(sys.argv[1:] if arguments is None else list(arguments))
