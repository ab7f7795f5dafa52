"""Budgets: what the descriptions of peers may cost, counted before the work is done.

A small offer can describe much: a message of 1,500 bytes can ask for gigabytes of descriptors. So
each step takes what it will need from a budget before it allocates or loops, and is refused with
``RANGE`` if that is more than is left. What all steps count together bounds memory and time:

- A budget counts bytes of memory, as if nothing that was allocated were ever free again.
- Time counts as the bytes that numpy fills in it: :data:`BYTES_PER_SECOND`. A step that takes time
  without memory, such as a loop of Python, takes as many bytes as it takes time.

``python -m benchmarks.hostile`` measures how true that is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, Final

from kvplan._checks import integer
from kvplan._text import size
from kvplan.errors import KVPlanError

BUDGET_BYTES: Final = 5 << 28
"""The bytes of a budget: what a hybrid of 128 layers needs whose convolutions are reordered."""

BYTES_PER_SECOND: Final = 200_000_000
"""How many bytes count as much as a second of one core."""

UNITS_END: Final = 1 << 2048
"""Counts of units are below this: products of all dimensions of an offer are."""


class Budget:
    """A budget for all that is done inside its ``with`` block, with however many offers and plans.

    Outside of such a block each call of :func:`kvplan.decode`, :func:`kvplan.plan_reads` and so on
    has a budget of its own. Of several blocks inside each other the innermost counts. A larger
    budget is for peers that you trust.

    >>> from kvplan import Budget, Model, plan_reads
    >>> model = Model.shipped("qwen2.5-1.5b")
    >>> (decode,), (prefill,) = (model.engine(name, num_blocks=9) for name in "dp")
    >>> with Budget(4 << 30) as budget:
    ...     plan = plan_reads(decode, [prefill])
    >>> budget
    <Budget of 4 GiB, of which 342.5 KiB are taken>
    >>> with Budget(1000):
    ...     plan_reads(decode, [prefill])
    Traceback (most recent call last):
    kvplan.errors.KVPlanError: RANGE: cannot plan: expected work of at most 1000 bytes,
    got 39.06 KiB with 2 workers
    (if you trust the peers that describe it, do this in a larger kvplan.Budget)

    Raises ``TYPE`` or ``RANGE`` for anything but a number of bytes.
    """

    def __init__(self, num_bytes: int = BUDGET_BYTES) -> None:
        self.num_bytes: int = integer(num_bytes, "bytes of a budget", high=1 << 62)
        self.num_taken: int = 0
        self._tokens: list[Token[Budget | None]] = []

    def __enter__(self) -> Budget:
        self._tokens.append(_CURRENT.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._tokens.pop())

    def take(self, number: int, unit: str, bytes_each: int, action: str, **details: Any) -> None:
        """Take what ``number`` units need, or raise ``RANGE`` if there is not as much left."""
        number = integer(number, "number of units", high=UNITS_END)
        total = self.num_taken + number * integer(bytes_each, "bytes of a unit", high=UNITS_END)
        if total > self.num_bytes:
            raise KVPlanError(
                "RANGE",
                action,
                expected=f"work of at most {size(self.num_bytes)}",
                got=f"{size(total)} with {number} {unit}",
                hint="if you trust the peers that describe it, do this in a larger kvplan.Budget",
                value=number,
                **details,
            )
        self.num_taken = total

    def __repr__(self) -> str:
        return f"<Budget of {size(self.num_bytes)}, of which {size(self.num_taken)} are taken>"


_CURRENT: ContextVar[Budget | None] = ContextVar("kvplan budget", default=None)


def spend(number: int, unit: str, bytes_each: int, action: str, **details: Any) -> None:
    """Take what ``number`` units need from the budget of this block, if there is one."""
    budget = _CURRENT.get()
    if budget is not None:
        budget.take(number, unit, bytes_each, action, **details)


def limited(num_bytes: int = BUDGET_BYTES) -> AbstractContextManager[object]:
    """Return a new budget for a ``with`` block, or nothing where the caller has one already."""
    return Budget(num_bytes) if _CURRENT.get() is None else nullcontext()
