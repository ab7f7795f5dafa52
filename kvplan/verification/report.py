"""Reports: what verify found, promise by promise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from kvplan._text import count

PROMISES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "VALUE": "every byte that is written has the value that the destination's view needs there",
        "COVER": "every byte that the request needs is written",
        "DISJOINT": "no byte is written twice",
        "BOUNDS": "every range lies inside one region of its worker",
        "OWN": "no byte outside the request is written",
        "IDS": "descriptor ids name the same bytes as the coalesced descriptors",
    }
)
"""The promises that :func:`verify` checks, by code."""


@attrs.frozen
class Tail:
    """Unused slots: local slots ``[start, stop)`` of a group that are in a request's blocks but were not written.

    Local slot ``s`` is slot ``s % tokens_per_block`` of block ordinal ``s // tokens_per_block``. In a state group, a
    slot is a block ordinal.

    >>> print(Tail("decode/0", "attn", 1000, 1008))
    decode/0 attn [1000, 1008)
    """

    worker: str
    group: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.worker} {self.group} [{self.start}, {self.stop})"


@attrs.frozen
class Report:
    """What :func:`verify` found. A report is true if every promise that was checked holds.

    ``failures`` are pairs of code and text. ``checked`` has the codes of :data:`PROMISES` that were checked: without
    ``COVER`` if the plans of some writers were not given, without ``IDS`` if the copies were. ``tails`` are the unused
    slots.
    """

    num_bytes: int
    num_descriptors: int
    num_workers: int
    checked: tuple[str, ...]
    failures: tuple[tuple[str, str], ...] = attrs.field(default=())
    tails: tuple[Tail, ...] = attrs.field(default=(), repr=False)

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Report:
        """The reports of several destination workers in one. A promise counts as checked if it was for all of them.

        >>> print(Report.of([Report(4, 1, 1, ("VALUE",)), Report(8, 2, 1, ("VALUE", "OWN"))]))
        verified: 12 bytes in 3 descriptors to 2 workers, 0 unused slots; VALUE hold
        """
        every = tuple(reports)
        return cls(
            num_bytes=sum(report.num_bytes for report in every),
            num_descriptors=sum(report.num_descriptors for report in every),
            num_workers=sum(report.num_workers for report in every),
            checked=tuple(code for code in PROMISES if all(code in report.checked for report in every)),
            failures=tuple(failure for report in every for failure in report.failures),
            tails=tuple(tail for report in every for tail in report.tails),
        )

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def promises(self) -> dict[str, bool]:
        """Each promise that was checked, and whether it holds."""
        broken = {code for code, _ in self.failures}
        return {code: code not in broken for code in self.checked}

    @property
    def num_tail_slots(self) -> int:
        """The number of unused slots in the destinations' blocks, over all workers."""
        return sum(tail.stop - tail.start for tail in self.tails)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        moved = f"{count(self.num_bytes, 'byte')} in {count(self.num_descriptors, 'descriptor')}"
        moved += f" to {count(self.num_workers, 'worker')}"
        if not self.ok:
            return "\n".join([f"not verified: {moved}", *(f"{code}: {text}" for code, text in self.failures)])
        unused = count(self.num_tail_slots, "unused slot")
        return f"verified: {moved}, {unused}; {', '.join(self.checked)} hold"
