"""Rates: what a machine needs to move bytes between workers and to put them in order, in seconds.

Time is taken to be proportional: so much for each transfer that is begun, for each of its descriptors and for each
byte; and so much for each copy at home, once for each of its origins, and each byte of it. ``python -m kvplan_nixl
calibrate`` measures all five.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import attrs

from kvplan._checks import name, settle
from kvplan._text import shown
from kvplan.errors import KVPlanError


def _seconds(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise KVPlanError("TYPE", f"read {what}", expected="a number of seconds", got=shown(value))
    if not 0 <= value < math.inf:
        raise KVPlanError("RANGE", f"read {what}", expected="a finite number of seconds, not below 0", got=f"{value}")
    return float(value)


@attrs.frozen
class Rates:
    """Seconds for each transfer, descriptor and byte between workers, and for each copy and byte of it at home.

    ``measured`` says where and how. Raises ``TYPE``, ``RANGE`` or ``NAME``.

    >>> rates = Rates("nowhere", transfer_s=1e-4, descriptor_s=4e-6, byte_s=2.5e-10, copy_s=1e-5, copied_byte_s=1e-10)
    >>> round(rates.seconds(transfers=1, descriptors=1000, num_bytes=4_000_000), 6)
    0.0051
    """

    measured: str
    transfer_s: float
    descriptor_s: float
    byte_s: float
    copy_s: float
    copied_byte_s: float

    def __attrs_post_init__(self) -> None:
        settle(self, "rates", name, "measured")
        settle(self, "rates", _seconds, "transfer_s", "descriptor_s", "byte_s", "copy_s", "copied_byte_s")

    def seconds(
        self, *, transfers: int, descriptors: int, num_bytes: int, copies: int = 0, copied_bytes: int = 0
    ) -> float:
        """How long that takes, one after the other."""
        moved = transfers * self.transfer_s + descriptors * self.descriptor_s + num_bytes * self.byte_s
        return moved + copies * self.copy_s + copied_bytes * self.copied_byte_s

    def save(self, path: Path | str) -> None:
        """Write them to a JSON file."""
        Path(path).write_text(json.dumps(attrs.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Rates:
        """What :meth:`save` wrote. Raises ``MESSAGE`` for a file that is no JSON, ``KEY`` for another object in it."""
        try:
            found = json.loads(Path(path).read_text())
        except ValueError as error:
            raise KVPlanError("MESSAGE", f"read rates from {path}", expected="JSON", got=str(error)) from None
        names = [field.name for field in attrs.fields(cls)]
        if not isinstance(found, dict) or sorted(found) != sorted(names):
            raise KVPlanError(
                "KEY", f"read rates from {path}", expected=f"the keys {', '.join(names)}", got=shown(found)
            )
        return cls(**found)


SHARED_MEMORY: Final = Rates(
    "UCX of NIXL 1.5.1 between two processes, main memory, two cores of a Xeon at 2.5 GHz, 2026-11-22",
    transfer_s=3.1e-3,
    descriptor_s=4.6e-6,
    byte_s=5.7e-10,
    copy_s=2.6e-5,
    copied_byte_s=8.2e-10,
)
"""What :func:`kvplan.staging.choose` goes by where it is given nothing else: medians of nine calibrations.

Torch had one thread. Measure your own: networks and GPUs differ.
"""
