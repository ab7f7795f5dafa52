"""The command ``kvplan``: a module of its own, so that a ^C is no traceback while kvplan's packages are imported."""

from __future__ import annotations


def main() -> int:
    """Run the command line and return its exit status: 130 if it was interrupted, as early as that may be."""
    try:
        from kvplan.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130
