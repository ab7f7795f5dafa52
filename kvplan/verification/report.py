"""The report of a verification: which promises hold, how others break, and what is unused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from kvplan._checks import members
from kvplan._text import MAX_REPR, brief_repr, count
from kvplan.describe.worker import Key
from kvplan.verification.patterns import Pattern, joined_patterns, lines_of, names_of

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
    """Unused slots: local slots ``[start, stop)`` of a request's blocks that were not written.

    Local slot ``s`` is slot ``s % num_slots`` of block ordinal ``s // num_slots`` of the group. In
    a state group, a slot is a block ordinal.

    >>> print(Tail("decode/0", "attn", 1000, 1008))
    decode/0 attn [1000, 1008)
    """

    worker: str
    group: str
    start: int
    stop: int

    __repr__ = brief_repr

    def __str__(self) -> str:
        return f"{self.worker} {self.group} [{self.start}, {self.stop})"


@attrs.frozen(eq=False)
class Failure:
    """A promise that some destination workers find broken.

    ``first`` is the first of ``num_bytes`` bytes, in words. ``patterns`` describe them.
    """

    code: str
    text: str
    workers: tuple[Key, ...]
    num_bytes: int = 0
    first: str = ""
    patterns: tuple[Pattern, ...] = ()

    def join(self, other: Failure) -> Failure:
        """Return the failure of the workers of both; the first byte is that of this one."""
        return attrs.evolve(
            self,
            workers=(*self.workers, *other.workers),
            num_bytes=self.num_bytes + other.num_bytes,
            patterns=(*self.patterns, *other.patterns),
        )

    def __str__(self) -> str:
        heading = f"{count(self.num_bytes, 'byte')} {self.text}" if self.num_bytes else self.text
        heading = f"at {names_of(self.workers)}: {heading}"
        patterns = joined_patterns(self.patterns, by_worker=True)
        lines = lines_of(patterns, self.num_bytes, self.workers)
        if not lines:
            return f"{heading}, first: {self.first}" if self.first else heading
        # One pattern of all bytes is on the line of their number.
        between = ": " if len(lines) == 1 else "\n  "
        return "\n  ".join([between.join([heading, lines[0]]), *lines[1:], f"first: {self.first}"])


def failures_in_words(failures: Iterable[Failure]) -> tuple[tuple[str, str], ...]:
    """Return code and text of each failure; those that differ in their workers are one."""
    by_text: dict[tuple[str, str], Failure] = {}
    for failure in failures:
        key = failure.code, failure.text
        by_text[key] = by_text[key].join(failure) if key in by_text else failure
    return tuple((failure.code, str(failure)) for failure in by_text.values())


@attrs.frozen
class Report:
    """The result of :func:`verify`, which is true if every promise that was checked holds.

    ``failures`` are pairs of code and text: one for all workers at which the same is wrong, with a
    line for each pattern of the bytes. ``checked`` has the codes of :data:`PROMISES` that were
    checked: without ``COVER`` if the plans of some writers were not given, without ``IDS`` if the
    copies were. ``tails`` are the unused slots.
    """

    num_bytes: int
    num_descriptors: int
    num_workers: int
    checked: tuple[str, ...]
    failures: tuple[tuple[str, str], ...] = attrs.field(default=())
    tails: tuple[Tail, ...] = attrs.field(default=(), repr=False)

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Report:
        """Return the reports of several destination workers in one.

        A promise counts as checked if it was for all of them.

        >>> print(Report.of([Report(4, 1, 1, ("VALUE",)), Report(8, 2, 1, ("VALUE", "OWN"))]))
        verified: 12 bytes in 3 descriptors to 2 workers, 0 unused slots; 1 check passed, \
COVER, DISJOINT, BOUNDS, OWN, IDS not checked
        """
        reports = members(Report, reports, "reports")
        checked_by_all = set(PROMISES).intersection(*(report.checked for report in reports))
        failures: list[tuple[str, str]] = []
        tails: list[Tail] = []
        for report in reports:
            failures += report.failures
            tails += report.tails
        return cls(
            num_bytes=sum(report.num_bytes for report in reports),
            num_descriptors=sum(report.num_descriptors for report in reports),
            num_workers=sum(report.num_workers for report in reports),
            checked=tuple(code for code in PROMISES if code in checked_by_all),
            failures=tuple(failures),
            tails=tuple(tails),
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
        num_bytes = count(self.num_bytes, "byte")
        num_descriptors = count(self.num_descriptors, "descriptor")
        copied = f"{num_bytes} in {num_descriptors} to {count(self.num_workers, 'worker')}"
        if not self.ok:
            failures = [f"{code}: {text}" for code, text in self.failures]
            return "\n".join([f"not verified: {copied}", *failures])
        unused = count(self.num_tail_slots, "unused slot")
        passed = f"all {len(PROMISES)} checks passed"
        if skipped := [code for code in PROMISES if code not in self.checked]:
            passed = f"{count(len(self.checked), 'check')} passed, {', '.join(skipped)} not checked"
        return f"verified: {copied}, {unused}; {passed}"

    def __repr__(self) -> str:
        # The first lines of all failures: pytest shows the repr of what is not true.
        lines = [line for line in str(self).splitlines() if not line.startswith(" ")]
        text = f"<Report {'; '.join(lines)}>"
        return text if len(text) <= MAX_REPR else f"{text[: MAX_REPR - 4]}...>"
