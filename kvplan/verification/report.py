"""Reports: what a verification found, promise by promise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from kvplan._text import count

PROMISES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "VALUE": "every written byte is the one that the destination's view calls for",
        "COVER": "every byte that the request needs is written",
        "DISJOINT": "no byte is written twice",
        "BOUNDS": "every range lies in one region of its worker",
        "OWN": "nothing but the request's bytes is written",
        "IDS": "descriptor ids and coalesced descriptors name the same bytes",
    }
)
"""The promises that :func:`verify` checks, by code."""


@attrs.frozen
class Tail:
    """Slots of a request's blocks at one worker that were not written: local slots ``[start, stop)`` of a group.

    Local slot ``s`` is slot ``s % tokens_per_block`` of block ordinal ``s // tokens_per_block``; in a state group
    it is a block ordinal.

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
    """What :func:`verify` found. True where every promise that could be checked holds.

    ``failures`` are pairs of code and text; ``checked`` the codes of :data:`PROMISES` that were checked, ``COVER``
    not among them where only some of the sources' plans were given; ``tails`` the slots left alone.
    """

    num_bytes: int
    num_descriptors: int
    num_workers: int
    checked: tuple[str, ...]
    failures: tuple[tuple[str, str], ...] = attrs.field(default=())
    tails: tuple[Tail, ...] = attrs.field(default=(), repr=False)

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Report:
        """The reports of some destination workers as one. What was not checked of one of them was not checked.

        >>> print(Report.of([Report(4, 1, 1, ("VALUE",)), Report(8, 2, 1, ("VALUE", "OWN"))]))
        verified: 12 bytes in 3 descriptors to 2 workers, 0 slots left alone; VALUE hold
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
        """Each checked promise, and whether it holds."""
        broken = {code for code, _ in self.failures}
        return {code: code not in broken for code in self.checked}

    @property
    def num_tail_slots(self) -> int:
        """How many slots of the destinations' blocks were not written, over all workers."""
        return sum(tail.stop - tail.start for tail in self.tails)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        moved = f"{count(self.num_bytes, 'byte')} in {count(self.num_descriptors, 'descriptor')}"
        where = f"to {count(self.num_workers, 'worker')}"
        if self.ok:
            tails = f"{count(self.num_tail_slots, 'slot')} left alone"
            return f"verified: {moved} {where}, {tails}; {', '.join(self.checked)} hold"
        return "\n".join([f"not verified: {moved} {where}", *(f"{code}: {text}" for code, text in self.failures)])
