"""Exit statuses of commands that a signal or a closed pipe ends; this module needs no package."""

from __future__ import annotations

from typing import Final

INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141
