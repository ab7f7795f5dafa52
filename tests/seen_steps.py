"""What vLLM's connector tells workers in a step, so that tests can compare it."""

from __future__ import annotations

from typing import Any


class Seen:
    """The work of a step: reads of parts that others follow, reads of the last ones, and the requests that fail."""

    def __init__(self, step: Any) -> None:
        parts = [part for part in step.partial_reads if part.read is not None]
        self.parts = [part.read for part in parts if not part.is_last]
        self.reads = [part.read for part in parts if part.is_last]
        self.refused = {part.request: part.error for part in step.partial_reads if part.read is None}
        self.saves, self.digests, self.released = step.saves, step.digests, step.released
