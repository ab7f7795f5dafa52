"""Copies: what a plan moves, byte by byte, and how two plans of one request compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

from tests.second_opinion.engines import Engine, Ints, Meanings


@attrs.frozen(eq=False)
class Copies:
    """What a plan moves: addresses that are read and written, and lengths in bytes; ``posted`` descriptors say so."""

    reads: Ints
    writes: Ints
    lengths: Ints
    posted: int

    @classmethod
    def of(cls, parts: Iterable[tuple[Any, Any, Any]], posted: int | None = None) -> Copies:
        """Reads, writes and lengths, put together; as many descriptors as there are of them, where not said."""
        empty = np.zeros(0, np.int64)
        columns = zip(*[(empty, empty, empty), *parts], strict=True)
        joined = [np.concatenate([np.asarray(part).astype(np.int64) for part in column]) for column in columns]
        reads, writes, lengths = joined
        return cls(reads, writes, lengths, len(reads) if posted is None else posted)

    @classmethod
    def join(cls, many: Iterable[Copies]) -> Copies:
        """Several plans as one."""
        many = list(many)
        return cls.of([(one.reads, one.writes, one.lengths) for one in many], sum(one.posted for one in many))

    @property
    def by_byte(self) -> tuple[Ints, Ints]:
        """For each byte that is copied its addresses, written and read, in their order."""
        within = np.arange(self.lengths.sum()) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        writes, reads = (np.repeat(side, self.lengths) + within for side in (self.writes, self.reads))
        order = np.lexsort((reads, writes))
        return writes[order], reads[order]


@attrs.frozen
class Finding:
    """What is right or wrong with a plan: numbers of bytes, each kind of its own."""

    wrong: int
    missing: int
    foreign: int
    repeated: int

    @property
    def is_right(self) -> bool:
        """Whether every byte is."""
        return not (self.wrong or self.missing or self.foreign or self.repeated)

    def __str__(self) -> str:
        kinds = {
            "wrong": self.wrong,
            "not written": self.missing,
            "written beyond the request": self.foreign,
            "written again": self.repeated,
        }
        return ", ".join(f"{count} bytes {kind}" for kind, count in kinds.items() if count) or "every byte right"


def judge(copies: Copies, source: Engine, destination: Engine) -> Finding:
    """Each written byte must mean what its source means, and each byte of the request be written once."""
    writes, reads = copies.by_byte
    at_source, at_destination = Meanings(source), Meanings(destination)
    needed = at_destination.needed()
    expected = at_destination.of(writes)
    inside = np.isin(writes, needed)
    return Finding(
        wrong=int((inside & (at_source.of(reads) != expected)).sum()),
        missing=int((~np.isin(needed, writes)).sum()),
        foreign=int((~inside).sum()),
        repeated=len(writes) - len(np.unique(writes)),
    )


def same(one: Copies, other: Copies) -> bool:
    """Whether two plans read the same addresses for the same addresses that they write, each as often."""
    return all(np.array_equal(*pair) for pair in zip(one.by_byte, other.by_byte, strict=True))
