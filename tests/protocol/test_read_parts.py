"""Reads in parts: one after the other, reported once, and never while another part may come."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvplan import Blocks, KVPlanError
from kvplan.protocol import PartialRead, Read, ReadResult, Reads, Source
from kvplan.protocol.read_jobs import RequestReads

ERROR = KVPlanError("TRANSFER", "read", expected="bytes", got="none")
OTHER = KVPlanError("LEASE", "read", expected="a lease", got="none")


class Noted(Reads):
    """Reads whose parts a test ends."""

    def __init__(self) -> None:
        self._requests = {}
        self._jobs = {}
        self._pipeline = None
        self._logger = logging.getLogger("test")
        self._system: Any = SimpleNamespace(monotonic=lambda: 0.0)
        self._peers: Any = SimpleNamespace(poll=list, use=lambda source: SimpleNamespace(plan="a plan"))
        self.begun: list[tuple[str, int]] = []

    def add(self, read: Read, *, is_last: bool = True) -> None:
        self.submit(PartialRead(read.request, read, is_last=is_last))

    def fail(self, request: str, error: KVPlanError, *, is_last: bool = True) -> None:
        self.submit(PartialRead(request, None, error, is_last))

    def _start(self, reads: RequestReads, *plan: object, was_connected: bool) -> None:
        first, _ = reads.queue[0].tokens["attn"]
        self.begun.append((reads.request, first))

    def codes(self) -> dict[str, str]:
        """The requests that are late now, with the codes of their errors."""
        return {request: error.code for request, error in self.late().items()}

    def end(self, request: str, error: KVPlanError | None = None) -> None:
        """End the part of a request."""
        result = ReadResult(request, error, 10, 1.0, 0.25, 0.5, 3, is_staged=error is None)
        self._end(self._requests[request], result)


@pytest.fixture
def reads() -> Noted:
    return Noted()


def read(first: int, request: str = "r") -> Read:
    """A part of a request from a position on."""
    source = Source("prefill", "a1", "10.0.0.1", 5600)
    blocks = {"attn": Blocks([1])}
    return Read(
        request=request, source=source, lease="l", local=blocks, remote=blocks, tokens={"attn": (first, first + 8)}
    )


def error_code(result: ReadResult) -> str:
    assert result.error is not None
    return result.error.code


def test_a_part_begins_when_the_one_before_has_ended(reads: Noted) -> None:
    """Other requests go on meanwhile; the result has the bytes and times of all reads."""
    reads.add(read(0), is_last=False)
    reads.add(read(8), is_last=False)
    reads.add(read(16))
    reads.add(read(0, "other"))
    assert reads.begun == [("r", 0), ("other", 0)]
    reads.end("r")
    reads.end("other")
    assert [result.request for result in reads.poll()] == ["other"]
    assert reads.begun[2:] == [("r", 8)]
    for first in (16, None):
        assert reads.begun[-1] == ("r", 8 if first else 16)
        reads.end("r")
        results = reads.poll()
    assert results == [ReadResult("r", None, 30, 3.0, 0.75, 1.5, 9, is_staged=True)]
    assert (reads.poll(), reads.late()) == ([], {})


def test_a_part_without_a_read_or_an_error_is_refused() -> None:
    """Nothing of it would be read, and nothing would say so."""
    with pytest.raises(
        KVPlanError, match="TYPE: cannot read partial read without an error: expected a value of type Read"
    ):
        PartialRead("r", None)


def test_a_read_of_another_request_is_refused() -> None:
    """Its result would be of a request that workers were not told of."""
    with pytest.raises(
        KVPlanError, match="NAME: cannot read request 's': expected a read of the same request, got one of 'r'"
    ):
        PartialRead("s", read(0))


def test_a_request_waits_for_its_last_part(reads: Noted) -> None:
    """Nothing is under way, and still its blocks are not free."""
    reads.add(read(0), is_last=False)
    reads.end("r")
    assert reads.poll() == []
    reads.add(read(8))
    reads.end("r")
    assert [result.request for result in reads.poll()] == ["r"]


def test_a_part_that_fails(reads: Noted) -> None:
    """Is said at once, and others of the request are not read; it ends with its last part."""
    reads.add(read(0), is_last=False)
    reads.add(read(8), is_last=False)
    reads.end("r", ERROR)
    assert reads.poll() == []
    assert (reads.codes(), reads.codes()) == ({"r": "TRANSFER"}, {})
    # its blocks wait for no source
    assert reads.num_held == 0
    reads.add(read(16), is_last=False)
    assert (reads.poll(), reads.begun) == ([], [("r", 0)])
    reads.add(read(24))
    (result,) = reads.poll()
    assert (result.request, result.error, reads.begun) == ("r", ERROR, [("r", 0)])
    assert reads.late() == {}


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_request_that_is_given_up(reads: Noted, caplog: pytest.LogCaptureFixture, is_under_way: bool) -> None:
    """Ends when what is under way has, and what waits is not read."""
    reads.add(read(0), is_last=False)
    reads.add(read(8), is_last=False)
    if not is_under_way:
        reads.end("r")
        reads.poll()
        reads.end("r")
        reads.poll()
    reads.fail("r", ERROR)
    if is_under_way:
        assert (reads.poll(), reads.codes()) == ([], {"r": "TRANSFER"})
        reads.end("r", OTHER)
    (result,) = reads.poll()
    assert result.error is not None
    assert (result.error.code, result.error.details["request"]) == ("TRANSFER", "r")
    assert (result.request, len(reads.begun)) == ("r", 1 if is_under_way else 2)
    assert (reads.poll(), reads.late()) == ([], {})
    # one line, whatever has ended it
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert line.startswith("request 'r': KV read from another engine failed: ")


def test_a_request_that_is_given_up_when_it_has_failed(reads: Noted) -> None:
    """Ends with the first reason, at once."""
    reads.add(read(0), is_last=False)
    reads.end("r", ERROR)
    reads.poll()
    reads.fail("r", OTHER)
    (result,) = reads.poll()
    assert result.error == ERROR


def test_a_part_that_cannot_be_read(reads: Noted) -> None:
    """Of a request that never was read; others may follow."""
    reads.fail("r", ERROR, is_last=False)
    assert (reads.poll(), reads.codes()) == ([], {"r": "TRANSFER"})
    reads.add(read(8))
    assert [error_code(result) for result in reads.poll()] == ["TRANSFER"]
    reads.fail("again", OTHER)
    assert [(result.request, error_code(result)) for result in reads.poll()] == [("again", "LEASE")]
    assert reads.begun == []


def test_a_late_part_is_late_once(reads: Noted) -> None:
    reads.add(read(0), is_last=False)
    reads._requests["r"].error = ERROR
    assert reads.codes() == {"r": "TRANSFER"}
    reads.end("r", ERROR)
    assert (reads.poll(), reads.late()) == ([], {})
