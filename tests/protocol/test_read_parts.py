"""Reads in parts: one after the other, reported once, and never while another part may come."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvplan import Blocks, KVPlanError
from kvplan.protocol import Read, ReadResult, Source
from kvplan.protocol.read_parts import ReadParts

ERROR = KVPlanError("TRANSFER", "read", expected="bytes", got="none")
OTHER = KVPlanError("LEASE", "read", expected="a lease", got="none")


@attrs.define(eq=False)
class Noted:
    """Reads that a test ends."""

    begun: list[tuple[str, int]] = attrs.field(factory=list)
    results: list[ReadResult] = attrs.field(factory=list)
    overdue: dict[str, KVPlanError] = attrs.field(factory=dict)
    worker: Any = "worker"

    def begin(self, read: Read) -> None:
        self.begun.append((read.request, read.tokens["attn"][0]))

    def fail(self, request: str, error: KVPlanError) -> None:
        self.results.append(ReadResult(request, error))

    def end(self, request: str, error: KVPlanError | None = None) -> None:
        """End the read of a request."""
        self.results.append(ReadResult(request, error, 10, 1.0, 0.25, 0.5, 3, is_staged=error is None))

    def poll(self) -> list[ReadResult]:
        results, self.results = self.results, []
        return results

    def late(self) -> dict[str, KVPlanError]:
        overdue, self.overdue = self.overdue, {}
        return overdue


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
def parts(noted: Noted) -> ReadParts:
    reads: Any = noted
    return ReadParts(reads)


def read(first: int, request: str = "r") -> Read:
    """A part of a request from a position on."""
    source = Source("prefill", "a1", "10.0.0.1", 5600)
    blocks = {"attn": Blocks([1])}
    return Read(
        request=request, source=source, lease="l", local=blocks, remote=blocks, tokens={"attn": (first, first + 8)}
    )


def test_a_part_begins_when_the_one_before_has_ended(noted: Noted, parts: ReadParts) -> None:
    """Other requests go on meanwhile; the result has the bytes and times of all parts."""
    assert parts.worker is noted.worker
    parts.begin(read(0), is_last=False)
    parts.begin(read(8), is_last=False)
    parts.begin(read(16))
    parts.begin(read(0, "other"))
    assert noted.begun == [("r", 0), ("other", 0)]
    noted.end("r")
    noted.end("other")
    assert [result.request for result in parts.poll()] == ["other"]
    assert noted.begun[2:] == [("r", 8)]
    for first in (16, None):
        assert noted.begun[-1] == ("r", 8 if first else 16)
        noted.end("r")
        results = parts.poll()
    assert results == [ReadResult("r", None, 30, 3.0, 0.75, 1.5, 9, is_staged=True)]
    assert (parts.poll(), parts.late()) == ([], {})


def test_a_request_waits_for_its_last_part(noted: Noted, parts: ReadParts) -> None:
    """Nothing is under way, and still its blocks are not free."""
    parts.begin(read(0), is_last=False)
    noted.end("r")
    assert parts.poll() == []
    parts.begin(read(8))
    noted.end("r")
    assert [result.request for result in parts.poll()] == ["r"]


def test_a_part_that_fails(noted: Noted, parts: ReadParts) -> None:
    """Is said at once, and others of the request are not read; it ends with its last part."""
    parts.begin(read(0), is_last=False)
    parts.begin(read(8), is_last=False)
    noted.end("r", ERROR)
    assert parts.poll() == []
    assert (parts.late(), parts.late()) == ({"r": ERROR}, {})
    parts.begin(read(16), is_last=False)
    assert (parts.poll(), noted.begun) == ([], [("r", 0)])
    parts.begin(read(24))
    (result,) = parts.poll()
    assert (result.request, result.error, noted.begun) == ("r", ERROR, [("r", 0)])
    assert parts.late() == {}


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_request_that_is_given_up(noted: Noted, parts: ReadParts, is_under_way: bool) -> None:
    """Ends when what is under way has, and what waits is not read."""
    parts.begin(read(0), is_last=False)
    parts.begin(read(8), is_last=False)
    if not is_under_way:
        noted.end("r")
        parts.poll()
        noted.end("r")
        parts.poll()
    parts.fail("r", ERROR)
    if is_under_way:
        assert (parts.poll(), parts.late()) == ([], {"r": ERROR})
        noted.end("r", OTHER)
    (result,) = parts.poll()
    assert (result.request, result.error, len(noted.begun)) == ("r", ERROR, 1 if is_under_way else 2)
    assert (parts.poll(), parts.late()) == ([], {})


def test_a_request_that_is_given_up_when_it_has_failed(noted: Noted, parts: ReadParts) -> None:
    """Ends with the first reason, at once."""
    parts.begin(read(0), is_last=False)
    noted.end("r", ERROR)
    parts.poll()
    parts.fail("r", OTHER)
    (result,) = parts.poll()
    assert result.error == ERROR


def test_a_part_that_cannot_be_read(noted: Noted, parts: ReadParts) -> None:
    """Of a request that never was read; others may follow."""
    parts.fail("r", ERROR, is_last=False)
    assert (parts.poll(), parts.late()) == ([], {"r": ERROR})
    parts.begin(read(8))
    assert [result.error for result in parts.poll()] == [ERROR]
    parts.fail("again", OTHER)
    assert [(result.request, result.error) for result in parts.poll()] == [("again", OTHER)]


def test_a_late_part_is_late_once(noted: Noted, parts: ReadParts) -> None:
    parts.begin(read(0), is_last=False)
    noted.overdue["r"] = ERROR
    assert parts.late() == {"r": ERROR}
    noted.end("r", ERROR)
    assert (parts.poll(), parts.late()) == ([], {})
