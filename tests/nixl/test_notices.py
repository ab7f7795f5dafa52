"""Notices: whom they come from, and what is kept of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import attrs
import pytest

from benchmarks.real_memory import placed
from kvplan import Blocks, KVPlanError, Notice, Status, TransferPlan, plan_reads
from kvplan_nixl import UCX, Envelope, NixlExecutor, NixlTransfer, settle
from kvplan_nixl.agent import Agent
from kvplan_nixl.executor import MAX_EARLY
from kvplan_nixl.notices import MAX_MESSAGE_BYTES, message, notice_of
from tests.small import engine

TIMEOUT_S = 60.0
MESSAGES = [b'["request 1", 0, "done"]', b'["decode", 0, "request 1"]']
"""A notice as it is now, and as it was when it named its sender."""


@attrs.define
class Pair:
    """A source and a reader of this process. The reader is connected to the source."""

    source: NixlExecutor
    reader: NixlExecutor
    plan: TransferPlan

    def read(self, request: str = "request", attempt: int = 0) -> NixlTransfer:
        """Read some tokens, and release the transfer."""
        blocks = {"attn": Blocks([1, 2])}
        (spec,) = self.plan.bind(local=blocks, remote=blocks, tokens=(0, 6))
        transfer = self.reader.start(spec, request, attempt=attempt)
        while not self.reader.poll(transfer).is_settled:
            time.sleep(0.001)
        self.reader.release(transfer)
        return transfer


def received(executor: NixlExecutor, count: int) -> list[Notice]:
    """The next notices: waits for ``count`` of them, and a little for more."""
    found: list[Notice] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count and time.monotonic() < deadline:
        found += executor.notices()
    time.sleep(0.1)
    return [*found, *executor.notices()]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A source that is connected to nobody, and a reader."""
    (source, _), (local, _) = placed(engine("prefill")[0]), placed(engine("decode")[0])
    with NixlExecutor(source) as theirs, NixlExecutor(local) as ours:
        plan = plan_reads(local, [ours.connect(theirs.envelope())])
        ours.prepare(plan)
        yield Pair(theirs, ours, plan)


def test_agents_that_are_not_connected_forge_no_notice(pair: Pair) -> None:
    """A message counts only from the agent of a connected worker, whatever it says and whatever its agent is called."""
    pair.source.connect(pair.reader.envelope())
    sent = Envelope.unpack(pair.source.envelope())
    stranger = Agent("decode.0.stranger", UCX, progress_thread=True)
    try:
        stranger.load(sent.agent, sent.metadata)
        for data in MESSAGES:
            stranger.notify(sent.agent, data)
        assert received(pair.source, 0) == []
        pair.read("request 2", attempt=3)
        assert received(pair.source, 1) == [Notice("decode", 0, "request 2", 3)]
    finally:
        stranger.close()


def test_a_notice_that_comes_before_its_sender_is_connected(pair: Pair) -> None:
    """It is delivered when the sender is connected, once."""
    pair.read()
    assert received(pair.source, 0) == []
    pair.source.connect(pair.reader.envelope())
    assert received(pair.source, 1) == [Notice("decode", 0, "request")]
    pair.source.disconnect(pair.reader.worker)
    pair.source.connect(pair.reader.envelope())
    assert received(pair.source, 0) == []


def test_what_is_kept_of_strangers_is_bounded(pair: Pair) -> None:
    """The latest short messages of agents that are not connected are kept, and no long ones."""
    sent = Envelope.unpack(pair.source.envelope())
    stranger = Agent("decode.0.stranger", UCX, progress_thread=True)
    try:
        stranger.load(sent.agent, sent.metadata)
        stranger.notify(sent.agent, bytes(1 << 20))
        for i in range(MAX_EARLY + 10):
            stranger.notify(sent.agent, str(i).encode())
        deadline = time.monotonic() + TIMEOUT_S
        while not pair.source._early or pair.source._early[-1][1] != str(MAX_EARLY + 9).encode():
            assert time.monotonic() < deadline
            assert pair.source.notices() == ()
        assert len(pair.source._early) == MAX_EARLY
        assert max(len(data) for _, data in pair.source._early) == 4
    finally:
        stranger.close()


def test_a_reader_that_was_replaced_notifies_nobody(pair: Pair) -> None:
    """A late notice of a process that another one has replaced is that of a stranger."""
    pair.source.connect(pair.reader.envelope())
    pair.source.disconnect(pair.reader.worker)
    with NixlExecutor(pair.reader.worker) as second:
        pair.source.connect(second.envelope())
        pair.read()
        assert received(pair.source, 0) == []
        second.connect(pair.source.envelope())
        second.notify(("prefill", 0), "request", Status.FAILED, attempt=1)
        assert received(pair.source, 1) == [Notice("decode", 0, "request", 1, Status.FAILED)]


def test_a_cancelled_transfer_sends_no_notice(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that is cancelled, and moves all its bytes nevertheless, is not DONE for its source."""
    pair.source.connect(pair.reader.envelope())
    post = pair.reader._agent.post
    monkeypatch.setattr(pair.reader._agent, "post", lambda handle: post(handle) and False)
    blocks = {"attn": Blocks([1, 2])}
    (spec,) = pair.plan.bind(local=blocks, remote=blocks, tokens=(0, 6))
    transfer = pair.reader.start(spec, "request")
    pair.reader.cancel(transfer)
    assert settle(pair.reader, [transfer], TIMEOUT_S)
    assert transfer.status is Status.CANCELLED
    assert received(pair.source, 0) == []


def test_a_worker_of_this_process_gets_no_notice(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would read it. Nor does it send any, though a message may have this agent as its sender."""
    attached = attrs.evolve(pair.source.worker, engine_id="attached")
    pair.reader.attach(attached)
    with pytest.raises(KVPlanError, match="PEER: cannot find worker attached/0"):
        pair.reader.notify(("attached", 0), "request", Status.FAILED)
    monkeypatch.setattr(pair.reader._agent, "messages", lambda: [(pair.reader._agent.name, MESSAGES[0])])
    assert pair.reader.notices() == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"request",
        b"7",
        b'["request", 0]',
        b'["request", 0, "running"]',
        b'["request", 0, "lost"]',
        b'["request", -1, "done"]',
        b'["request", "0", "done"]',
        b'["", 0, "done"]',
        b'[["request"], 0, "done"]',
        b"[" * MAX_MESSAGE_BYTES,
        message(Notice("decode", 0, "request")).replace(b", 0", b"," + b" " * MAX_MESSAGE_BYTES + b"0"),
    ],
)
def test_what_is_no_notice(data: bytes) -> None:
    """Any other message is none."""
    assert notice_of(("decode", 0), data) is None


def test_the_longest_name_fits() -> None:
    """A message has room for any name of a request."""
    notice = Notice("decode", 0, "\N{GRINNING FACE}" * 1024, (1 << 63) - 1, Status.CANCELLED)
    assert notice_of(("decode", 0), message(notice)) == notice
