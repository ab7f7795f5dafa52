"""Budgets: what the descriptions of peers may cost, estimated before the work is done.

A small offer can describe much: a message of 1,500 bytes can ask for gigabytes of descriptors.
Reading one is bounded by the limits of its format. Planning is not, so a plan is estimated from
counts before anything of that size is listed, and refused with ``RANGE`` if it would cost more than
is left of its budget:

- An estimate counts bytes of memory, as if nothing that was allocated were ever free again.
- Time counts as the bytes that numpy fills in it, 200 MB in a second. A step that takes time
  without memory, such as a loop of Python, counts as many bytes as it takes time.

``python -m benchmarks.hostile`` measures how true that is.
"""

from __future__ import annotations

from typing import Any, Final

from kvplan._checks import integer
from kvplan._text import size
from kvplan.errors import KVPlanError

MESSAGE_BYTES: Final = 200
"""What it takes to read a byte of an offer, whatever it says."""

UNITS_END: Final = 1 << 2048
"""Counts of units are below this: products of all dimensions of an offer are."""


class Budget:
    """What all plans that are given it may cost together.

    A plan that is given none has one of its own. A larger budget is for peers that you trust.

    >>> from kvplan import Budget, Model, plan_reads
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (decode,), (prefill,) = (model.engine(name, num_blocks=9) for name in "dp")
    >>> budget = Budget(4 << 30)
    >>> plan = plan_reads(decode, [prefill], budget=budget)
    >>> budget
    <Budget of 4 GiB, of which 406.1 KiB are taken>
    >>> plan_reads(decode, [prefill], budget=Budget(1000))
    Traceback (most recent call last):
    kvplan.errors.KVPlanError: RANGE: cannot plan: expected work of at most 1000 bytes,
    got an estimate of 39.06 KiB with 2 workers
    (if you trust the peers that describe it, pass a larger kvplan.Budget)

    Raises ``TYPE`` or ``RANGE`` for anything but a number of bytes.
    """

    DEFAULT_BYTES: Final = 5 << 28
    """What a hybrid of 128 layers needs whose convolutions are reordered."""

    def __init__(self, num_bytes: int = DEFAULT_BYTES) -> None:
        self.num_bytes: int = integer(num_bytes, "bytes of a budget", high=1 << 62)
        self.num_taken: int = 0

    def take(self, number: int, unit: str, bytes_each: int, action: str, **details: Any) -> None:
        """Take what ``number`` units need, or raise ``RANGE`` if there is not as much left."""
        number = integer(number, "number of units", high=UNITS_END)
        total = self.num_taken + number * integer(bytes_each, "bytes of a unit", high=UNITS_END)
        if total > self.num_bytes:
            raise KVPlanError(
                "RANGE",
                action,
                expected=f"work of at most {size(self.num_bytes)}",
                got=f"an estimate of {size(total)} with {number} {unit}",
                hint="if you trust the peers that describe it, pass a larger kvplan.Budget",
                value=number,
                **details,
            )
        self.num_taken = total

    def __repr__(self) -> str:
        return f"<Budget of {size(self.num_bytes)}, of which {size(self.num_taken)} are taken>"
