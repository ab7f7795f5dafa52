"""Budgets: what plans with peers may cost, estimated before the work is done.

A small offer can describe a large plan: a message of 1,500 bytes can ask for gigabytes of
descriptors. Reading an offer is bounded by the limits of its format. Planning is not, so its cost
is estimated from counts before anything of that size is listed, and a plan that would cost more
than is left of its budget is refused with ``RANGE``:

- An estimate counts all bytes that are allocated, also those that are freed in between.
- Time counts as bytes too, 200 MB for a second, which is how fast numpy fills memory.

``python -m benchmarks.hostile`` measures how true that is.
"""

from __future__ import annotations

from typing import Any, Final

from kvplan._checks import integer
from kvplan._text import size
from kvplan.errors import KVPlanError

MESSAGE_BYTES: Final = 200
"""The cost of reading a byte of an offer, whatever it says."""

UNITS_END: Final = 1 << 2048
"""Counts of units are below this: products of all dimensions of an offer are."""


class Budget:
    """The estimated cost that all plans may have together to which it is passed.

    A plan without one has the default. Pass a larger budget for peers that you trust.

    >>> from kvplan import Budget, Model, plan_reads
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (decode,), (prefill,) = (model.engine(name, num_blocks=9) for name in "dp")
    >>> budget = Budget(4 << 30)
    >>> plan = plan_reads(decode, [prefill], budget=budget)
    >>> budget
    <Budget of 4 GiB, 406.1 KiB spent>
    >>> plan_reads(decode, [prefill], budget=Budget(1000))
    Traceback (most recent call last):
    kvplan.errors.KVPlanError: RANGE: cannot plan: expected work of at most 1000 bytes,
    got an estimate of 39.06 KiB with 2 workers
    (if you trust the peers that describe it, pass a larger kvplan.Budget)

    Raises ``TYPE`` or ``RANGE`` for anything but a number of bytes.
    """

    DEFAULT_BYTES: Final = 5 << 28
    """Enough for a hybrid of 128 layers whose convolutions are reordered."""

    def __init__(self, num_bytes: int = DEFAULT_BYTES) -> None:
        self.num_bytes: int = integer(num_bytes, "bytes of a budget", high=1 << 62)
        self.num_spent: int = 0

    def spend(self, number: int, unit: str, bytes_each: int, action: str, **details: Any) -> None:
        """Spend what ``number`` units cost, or raise ``RANGE`` if less is left."""
        number = integer(number, "number of units", high=UNITS_END)
        total = self.num_spent + number * integer(bytes_each, "bytes of a unit", high=UNITS_END)
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
        self.num_spent = total

    def __repr__(self) -> str:
        return f"<Budget of {size(self.num_bytes)}, {size(self.num_spent)} spent>"
