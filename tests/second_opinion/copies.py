"""What a planner copies, byte by byte: whether it is right, and whether two planners copy the same."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan.testing import conformance
from kvplan.testing.conformance import EngineMemory
from kvplan.verification import Report
from property_tests.oracle import Meaning, Place, contents


@attrs.frozen(eq=False)
class Copies:
    """What a planner copies: addresses read and written, and lengths in bytes, in ``posted`` descriptors."""

    reads: Ints
    writes: Ints
    lengths: Ints
    posted: int

    @classmethod
    def of(cls, parts: Iterable[tuple[Any, Any, Any]], posted: int | None = None) -> Copies:
        """Join parts of reads, writes and lengths. ``posted`` is by default the number of copies."""
        empty = np.zeros(0, np.int64)
        columns = zip(*[(empty, empty, empty), *parts], strict=True)
        reads, writes, lengths = (
            np.concatenate([np.asarray(part).astype(np.int64) for part in column]) for column in columns
        )
        return cls(reads, writes, lengths, len(reads) if posted is None else posted)

    @classmethod
    def join(cls, many: Iterable[Copies]) -> Copies:
        """Several plans as one."""
        many = list(many)
        return cls.of([(one.reads, one.writes, one.lengths) for one in many], sum(one.posted for one in many))

    @property
    def by_byte(self) -> tuple[Ints, Ints]:
        """The addresses written and read of each byte, in order."""
        # each copy repeated for its bytes; within: which byte of its copy each one is
        within = np.arange(self.lengths.sum()) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        writes, reads = (np.repeat(side, self.lengths) + within for side in (self.writes, self.reads))
        order = np.lexsort((reads, writes))
        return writes[order], reads[order]


@attrs.frozen
class Finding:
    """The numbers of bytes that a planner copies wrongly, of each kind."""

    wrong: int
    missing: int
    foreign: int
    repeated: int

    @property
    def is_right(self) -> bool:
        """Whether every byte is right."""
        return not (self.wrong or self.missing or self.foreign or self.repeated)

    def __str__(self) -> str:
        kinds = {
            "wrong": self.wrong,
            "not written": self.missing,
            "written beyond the request": self.foreign,
            "written again": self.repeated,
        }
        return ", ".join(f"{count} bytes {kind}" for kind, count in kinds.items() if count) or "every byte right"


def judge(copies: Copies, source: EngineMemory, destination: EngineMemory, span: tuple[int, int]) -> Finding:
    """Compare copies with the meaning of each byte: each byte of the request must be written once, with its meaning."""
    held, needed = (_meanings(engine, span) for engine in (source, destination))
    writes, reads = (side.tolist() for side in copies.by_byte)
    written = set(writes)
    return Finding(
        wrong=sum(
            held.get((0, read)) != needed[0, write]
            for write, read in zip(writes, reads, strict=True)
            if (0, write) in needed
        ),
        missing=sum(address not in written for _, address in needed),
        foreign=sum((0, write) not in needed for write in writes),
        repeated=len(writes) - len(written),
    )


def _meanings(engine: EngineMemory, span: tuple[int, int]) -> dict[Place, Meaning]:
    """What each byte of the request means, in all workers of an engine: they are arrays of one process."""
    found: dict[Place, Meaning] = {}
    for rank in engine.ranks:
        found |= contents(rank.worker, {"attn": engine.table}, dict.fromkeys(rank.worker.tensors, span))
    return found


def same(one: Copies, other: Copies) -> bool:
    """Whether two planners copy from the same addresses to the same addresses, each equally often."""
    return all(np.array_equal(*pair) for pair in zip(one.by_byte, other.by_byte, strict=True))


def verified(copies: Copies, source: EngineMemory, destination: EngineMemory, span: tuple[int, int]) -> Report:
    """What ``kvplan.verify`` reports of the copies."""
    rows = zip(copies.reads, copies.writes, copies.lengths, strict=True)
    return conformance.verified(source, destination, span, rows)


def first_failure(report: Report) -> str:
    """The first failure of a report in one line, without the addresses, which differ in every process."""
    code, text = report.failures[0]
    text = "; ".join(line.strip() for line in text.splitlines())
    return re.sub(r"(, address| at) 0x\w+", "", f"{code}: {text}")
