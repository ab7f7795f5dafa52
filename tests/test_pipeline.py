"""Pipelines: staged requests carried out, chunk by chunk (D1 to D6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Blocks, FakeMemory, KVPlanError, Worker
from kvplan.executor import FakeNetwork, Notice, Status
from kvplan.pipeline import FakeCopier, Pipeline, StagedTransfer
from kvplan.staging import Chunk, StagedPlan
from tests.late import LateCopier, LateExecutor, broken
from tests.small import engine
from tests.staged import NAME, cells, labelled, staged

ONE_BLOCK = 2 * 2 * 256
"""Both halves of one block of 4 tokens and 4 heads, of both layers: a staging region of chunks of 4 positions."""


@attrs.define
class Rig:
    """A worker that reads heads of two sources through a region of two halves of a block each."""

    plan: StagedPlan
    sources: tuple[Worker, ...]
    network: FakeNetwork
    executor: LateExecutor
    copier: LateCopier
    pipeline: Pipeline

    def submit(self, number: int, tokens: tuple[int, int] = (0, 4)) -> StagedTransfer:
        """A request of blocks of its own, chunks of 4 positions."""
        return self.pipeline.submit(f"request {number}", **tables(number), tokens=tokens)

    def read(self, count: int = 1) -> None:
        """End as many transfers, the first to have begun."""
        for _ in range(count):
            self.executor.end(self.executor.running[0])

    def put(self) -> None:
        """End the copies that have begun first."""
        self.copier.end(self.copier.running[0])

    def finish(self) -> list[StagedTransfer]:
        """Let everything go on to its end."""
        settled: list[StagedTransfer] = []
        while self.executor.running or self.copier.running:
            self.read(len(self.executor.running))
            while self.copier.running:
                self.put()
            settled += self.pipeline.poll()
        return settled

    def told(self) -> dict[int, list[str]]:
        """By rank of a source, the requests that it has been told of since the last call."""
        return {
            source.rank: [notice.request for notice in self.network.executor(source).notices()]
            for source in self.sources
        }

    @property
    def reading(self) -> list[str]:
        """The requests of the transfers that run."""
        return [transfer.request for transfer in self.executor.running]


def tables(number: int) -> dict[str, Any]:
    """Block tables of a request, in no order, which no other request has."""
    ours, theirs = ([5 * number + at for at in order] for order in ([3, 0, 4, 1, 2], [2, 4, 0, 1, 3]))
    return {"local": {"attn": Blocks(ours)}, "remote": {"attn": Blocks(theirs)}}


def opened(memory: FakeMemory, network: FakeNetwork, plan: StagedPlan, sources: tuple[Worker, ...]) -> Rig:
    """Everything, with memory of the sources filled."""
    labelled(memory, sources)
    local = plan.direct.local
    executor, copier = LateExecutor(network.executor(local)), LateCopier(memory, local.key)
    return Rig(plan, sources, network, executor, copier, Pipeline(executor, plan, copier))


def workers(blocks: int) -> tuple[StagedPlan, tuple[Worker, ...]]:
    """The plan of a worker that has what two sources have half of each."""
    sources = engine("prefill", tp=2, blocks=blocks)
    (local,) = engine("decode", order="NH", blocks=blocks)
    return staged(local, sources, ONE_BLOCK), sources


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A pipeline with nothing in it."""
    plan, sources = workers(30)
    network = FakeNetwork([plan.direct.local, *sources])
    with network.memory as memory:
        yield opened(memory, network, plan, sources)


def wrong(rig: Rig, requests: dict[int, tuple[int, int]]) -> int:
    """How many bytes of the destination differ from what direct plans write of some requests."""
    local = rig.plan.direct.local
    with FakeMemory([local, *rig.sources]) as memory:
        labelled(memory, rig.sources)
        for number, tokens in requests.items():
            for spec in rig.plan.direct.bind(**tables(number), tokens=tokens):
                memory.execute(spec)
        wanted, found = cells(memory, local), cells(rig.network.memory, local)
        return sum(int(np.count_nonzero(wanted[name] != found[name])) for name in wanted if name != NAME)


def test_requests_move_as_a_direct_plan_moves_them() -> None:
    """Of several requests of several chunks, every byte is right, no other is written, and all sources are told."""
    plan, sources = workers(30)
    network = FakeNetwork([plan.direct.local, *sources])
    requests = {0: (0, 20), 1: (3, 18), 2: (9, 10), 3: (4, 4)}
    with network.memory as memory:
        rig = opened(memory, network, plan, sources)
        local = plan.direct.local
        pipeline = Pipeline(network.executor(local), plan, FakeCopier(memory, local.key))
        for number, tokens in requests.items():
            pipeline.submit(f"request {number}", **tables(number), tokens=tokens)
        settled: list[StagedTransfer] = []
        for _ in range(20):
            settled += pipeline.poll()
        names = sorted(one.request for one in settled if one.status is Status.DONE)
        assert names == [f"request {at}" for at in range(4)]
        assert wrong(rig, requests) == 0
        assert {rank: sorted(told) for rank, told in rig.told().items()} == {0: names, 1: names}


def test_a_chunk_is_read_while_the_one_before_is_put_in_order(rig: Rig) -> None:
    """D1: both halves are read into at once, and the first again when what was there is in order."""
    transfer = rig.submit(0, (0, 16))
    assert rig.reading == ["request 0"] * 4
    rig.read(2)
    rig.pipeline.poll()
    assert (len(rig.executor.running), len(rig.copier.running)) == (2, 1)
    rig.read(2)
    rig.pipeline.poll()
    assert (len(rig.executor.running), len(rig.copier.running)) == (0, 2)
    rig.put()
    rig.pipeline.poll()
    assert (len(rig.executor.running), len(rig.copier.running)) == (2, 1)
    assert rig.finish() == [transfer]
    assert wrong(rig, {0: (0, 16)}) == 0


def test_halves_are_used_in_turn_by_different_requests(rig: Rig) -> None:
    """D1: requests of one chunk each are read two at a time."""
    transfers = [rig.submit(number) for number in range(3)]
    assert rig.reading == ["request 0", "request 0", "request 1", "request 1"]
    rig.read(2)
    assert rig.pipeline.poll() == ()
    assert rig.reading == ["request 1", "request 1", "request 0", "request 0"]  # the last two tell
    rig.put()
    rig.pipeline.poll()
    assert rig.reading[-2:] == ["request 2", "request 2"]
    assert rig.finish() == transfers
    assert wrong(rig, dict.fromkeys(range(3), (0, 4))) == 0


def test_a_half_waits_until_its_copies_are_done(rig: Rig) -> None:
    """D2: though the other half's chunk be in order first."""
    rig.submit(0, (0, 16))
    rig.read(4)
    rig.pipeline.poll()
    rig.copier.end(rig.copier.running[1])
    rig.pipeline.poll()
    assert rig.reading == []
    rig.put()
    rig.pipeline.poll()
    assert len(rig.reading) == 4
    rig.finish()
    assert wrong(rig, {0: (0, 16)}) == 0


def test_many_requests_wait(rig: Rig) -> None:
    """D1: whatever their number, two chunks are on their way, and all requests are done in the end, in order."""
    requests = [rig.pipeline.submit(f"{number}", **tables(number % 6), tokens=(0, 9)) for number in range(40)]
    assert len(rig.executor.running) == 4
    assert rig.finish() == requests
    assert {one.status for one in requests} == {Status.DONE}


def test_chunks_are_made_when_their_turn_comes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: one more than the two that are under way, whatever waits behind them."""
    made: list[Chunk] = []

    def bind(self: StagedPlan, **given: Any) -> Iterator[Chunk]:
        for chunk in bound(self, **given):
            made.append(chunk)
            yield chunk

    bound = StagedPlan.bind
    monkeypatch.setattr(StagedPlan, "bind", bind)
    for number in range(3):
        rig.submit(number, (0, 20))
    assert len(made) == 3
    rig.finish()
    assert len(made) == 15


def test_a_chunk_is_put_in_order_when_all_of_it_is_read(rig: Rig) -> None:
    """D3: not when one of two sources is."""
    rig.submit(0)
    rig.read()
    rig.pipeline.poll()
    assert rig.copier.running == []
    rig.read()
    rig.pipeline.poll()
    assert len(rig.copier.running) == 1


def test_sources_are_told_when_all_chunks_are_read(rig: Rig) -> None:
    """D4: once, also while the last chunk is put in order."""
    transfer = rig.submit(0, (0, 12))
    rig.read(4)
    rig.pipeline.poll()
    rig.put()
    rig.put()
    rig.pipeline.poll()
    assert rig.told() == {0: [], 1: []}
    rig.read(2)
    rig.pipeline.poll()
    rig.read(2)
    assert rig.told() == {0: ["request 0"], 1: ["request 0"]}
    assert rig.pipeline.poll() == ()
    rig.put()
    assert rig.pipeline.poll() == (transfer,)
    assert rig.told() == {0: [], 1: []}


def test_a_request_of_no_bytes_is_told_of(rig: Rig) -> None:
    """D4: by transfers of no bytes, which need no half: it may be done before those that were submitted earlier."""
    rig.submit(0, (0, 8))
    nothing = rig.submit(1, (5, 5))
    rig.pipeline.poll()
    assert rig.reading[4:] == ["request 1"] * 2
    for transfer in rig.executor.running[4:]:
        assert transfer.spec.num_bytes == 0
        rig.executor.end(transfer)
    assert rig.pipeline.poll() == (nothing,)
    assert nothing.status is Status.DONE


def test_a_source_of_which_a_chunk_needs_nothing_is_not_asked() -> None:
    """A chunk begins transfers with those sources that it has bytes of; in the end, all are told."""
    sources = engine("prefill", contexts=(2, 4), blocks=30)
    (local,) = engine("decode", order="NH", blocks=30)
    plan = staged(local, sources, 2 * ONE_BLOCK)
    network = FakeNetwork([plan.direct.local, *sources])
    with network.memory as memory:
        rig = opened(memory, network, plan, sources)
        rig.submit(0, (4, 8))
        assert [transfer.spec.remote for transfer in rig.executor.running] == [("prefill", 1)]
        rig.finish()
        assert rig.told() == {0: ["request 0"], 1: ["request 0"]}
        assert wrong(rig, {0: (4, 8)}) == 0


@pytest.mark.parametrize("which", range(4))
def test_a_failed_transfer_fails_its_request_alone(rig: Rig, which: int) -> None:
    """D5: the request's other transfers are cancelled and waited for; nothing is put in order, and nobody told."""
    failed, other = rig.submit(0, (0, 20)), rig.submit(1, (0, 20))
    running = list(rig.executor.running)
    error = broken("read")
    rig.executor.end(running.pop(which), error)
    assert rig.pipeline.poll() == ()
    assert failed.status is Status.RUNNING
    assert [transfer for transfer in running if transfer in rig.executor.asked] == running
    for transfer in running[:2]:
        rig.executor.end(transfer)
        assert rig.pipeline.poll() == ()
    rig.executor.end(running[2])
    assert rig.pipeline.poll() == (failed,)
    assert (failed.status, failed.error) == (Status.FAILED, error)
    assert rig.copier.running == []
    assert rig.finish() == [other]
    assert (other.status, other.error) == (Status.DONE, None)
    assert rig.told() == {0: ["request 1"], 1: ["request 1"]}
    assert wrong(rig, {1: (0, 20)}) == 0


def test_a_failed_request_waits_for_copies_that_have_begun(rig: Rig) -> None:
    """D5: what is being put in order goes on to its end before the request is FAILED."""
    failed = rig.submit(0, (0, 8))
    rig.read(2)
    rig.pipeline.poll()
    for transfer in tuple(rig.executor.running):
        rig.executor.end(transfer, broken("read"))
    assert rig.pipeline.poll() == ()
    assert len(rig.copier.running) == 1
    rig.put()
    assert rig.pipeline.poll() == (failed,)
    assert failed.status is Status.FAILED


def test_a_request_that_is_read_and_then_fails_is_not_put_in_order(rig: Rig) -> None:
    """D5: of two chunks that are read at one time, the copies of neither begin where one has failed."""
    rig.submit(0, (0, 8))
    rig.executor.end(rig.executor.running[0], broken("read"))
    rig.read(3)
    rig.pipeline.poll()
    assert rig.copier.running == rig.copier.ended == []


def test_a_refused_start_fails_the_request(rig: Rig) -> None:
    """D6: of a worker that is gone, the error is the request's, and no exception."""
    rig.executor.refuses = broken("start")
    transfer = rig.submit(0)
    assert rig.pipeline.poll() == (transfer,)
    assert (transfer.status, transfer.error) == (Status.FAILED, rig.executor.refuses)
    rig.executor.refuses = None
    other = rig.submit(1)
    assert rig.finish() == [other]
    assert other.status is Status.DONE


def test_a_source_that_cannot_be_told_fails_the_request(rig: Rig) -> None:
    """D6: nobody else would know that it has not been told."""
    transfer = rig.submit(0)
    rig.read(2)
    rig.pipeline.poll()
    rig.read()
    rig.executor.end(rig.executor.running[0], error := broken("tell"))
    rig.pipeline.poll()
    rig.put()
    assert rig.pipeline.poll() == (transfer,)
    assert (transfer.status, transfer.error) == (Status.FAILED, error)


def test_copies_that_cannot_begin_fail_the_request(rig: Rig) -> None:
    """D6: and its half is another's at once."""
    failed, other = rig.submit(0, (0, 20)), rig.submit(1)
    rig.copier.refuses = broken("copy")
    rig.read(4)
    assert rig.pipeline.poll() == (failed,)
    assert (failed.status, failed.error) == (Status.FAILED, rig.copier.refuses)
    rig.copier.refuses = None
    assert rig.finish() == [other]
    assert wrong(rig, {1: (0, 4)}) == 0


def test_copies_that_fail_fail_the_request(rig: Rig) -> None:
    """D6: with the error of the copies."""
    failed, other = rig.submit(0), rig.submit(1)
    rig.read(2)
    rig.pipeline.poll()
    rig.copier.end(rig.copier.running[0], error := broken("copy"))
    assert failed not in rig.finish()[1:]
    assert (failed.status, failed.error) == (Status.FAILED, error)
    assert other.status is Status.DONE


def test_a_transfer_that_is_not_given_back_fails_the_request(rig: Rig) -> None:
    """D6: all others of the request are given back, and its chunk is not put in order."""
    failed = rig.submit(0)
    rig.executor.keeps = broken("give back")
    rig.read(2)
    for _ in range(3):
        rig.pipeline.poll()
    assert (failed.status, failed.error) == (Status.FAILED, rig.executor.keeps)
    assert len(rig.executor.released) == 2
    assert rig.copier.running == []


def test_a_chunk_that_cannot_be_made_fails_the_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """D6: the chunks before it are cancelled."""

    def bind(self: StagedPlan, **given: Any) -> Iterator[Chunk]:
        yield next(bound(self, **given))
        raise error

    bound, error = StagedPlan.bind, broken("make a chunk")
    monkeypatch.setattr(StagedPlan, "bind", bind)
    transfer = rig.submit(0, (0, 20))
    assert rig.executor.asked == rig.executor.running
    assert rig.finish() == [transfer]
    assert (transfer.status, transfer.error) == (Status.FAILED, error)


def test_a_cancelled_request_is_settled_when_its_transfers_are(rig: Rig) -> None:
    """D5: nothing more of it begins, nobody is told, and requests behind it go on."""
    cancelled, other = rig.submit(0, (0, 20)), rig.submit(1, (0, 20))
    rig.pipeline.cancel(cancelled)
    assert rig.executor.asked == rig.executor.running
    assert rig.pipeline.poll() == ()
    assert cancelled.status is Status.RUNNING
    assert rig.finish() == [cancelled, other]
    assert (cancelled.status, cancelled.error) == (Status.CANCELLED, None)
    assert rig.told() == {0: ["request 1"], 1: ["request 1"]}
    assert wrong(rig, {1: (0, 20)}) == 0


def test_a_request_that_waits_is_cancelled_at_once(rig: Rig) -> None:
    """D5: it has touched nothing; the chunk of it that was made already gives way to the next request's."""
    first, cancelled, last = rig.submit(0, (0, 8)), rig.submit(1), rig.submit(2)
    rig.pipeline.cancel(cancelled)
    assert rig.pipeline.poll() == (cancelled,)
    assert rig.finish() == [first, last]
    assert wrong(rig, {0: (0, 8), 2: (0, 4)}) == 0


def test_what_comes_first_is_how_a_request_ends(rig: Rig) -> None:
    """D5: to cancel a request that has failed, or the other way round, changes nothing any more."""
    failed, cancelled = rig.submit(0), rig.submit(1)
    error = broken("read")
    rig.executor.end(rig.executor.running[0], error)
    rig.pipeline.poll()
    rig.pipeline.cancel(failed)
    rig.pipeline.cancel(cancelled)
    rig.executor.end(rig.executor.running[1], broken("read"))
    rig.finish()
    assert (failed.status, failed.error) == (Status.FAILED, error)
    assert (cancelled.status, cancelled.error) == (Status.CANCELLED, None)


def test_a_settled_request_stays_settled(rig: Rig) -> None:
    """To cancel a request that is done changes nothing; every transfer of it was given back."""
    transfer = rig.submit(0)
    rig.finish()
    rig.pipeline.cancel(transfer)
    assert rig.pipeline.poll() == ()
    assert transfer.status is Status.DONE
    assert {*rig.executor.released} == {*rig.executor.ended}


def test_transfers_that_others_cancel_end_the_request(rig: Rig) -> None:
    """D5: as an executor does that is closed: the request is CANCELLED too."""
    transfer = rig.submit(0)
    for running in tuple(rig.executor.running):
        rig.executor.cancel(running)
        rig.executor.end(running)
    assert rig.pipeline.poll() == (transfer,)
    assert transfer.status is Status.CANCELLED


def test_a_bad_request_is_refused_before_anything_is_queued(rig: Rig) -> None:
    """D6 begins when a request is submitted: what is wrong with it from the first is an exception."""
    with pytest.raises(KVPlanError, match="TOKENS"):
        rig.submit(0, (4, 3))
    assert rig.executor.running == []
    assert repr(rig.pipeline) == "<Pipeline decode/0: 0 requests>"


def test_plans_are_prepared_with_the_workers_that_there_are() -> None:
    """A source that the executor does not know is refused when the pipeline is made."""
    plan, sources = workers(10)
    network = FakeNetwork([plan.direct.local, sources[0]])
    with pytest.raises(KVPlanError, match="PEER: cannot prepare a plan with remote worker prefill/1"):
        Pipeline(network.executor(plan.direct.local), plan, FakeCopier(network.memory, plan.direct.local.key))


def test_a_running_request_is_not_released(rig: Rig) -> None:
    """It is, as often as one likes, when it is settled."""
    transfer = rig.submit(0)
    assert repr(transfer) == "<StagedTransfer 'request 0' running>"
    with pytest.raises(KVPlanError, match="TRANSFER: cannot release a staged transfer"):
        rig.pipeline.release(transfer)
    rig.finish()
    for _ in range(2):
        rig.pipeline.release(transfer)
    assert repr(transfer) == "<StagedTransfer 'request 0' done>"


def test_no_source_is_told_by_a_chunk(rig: Rig) -> None:
    """D4: transfers that move bytes do not tell, and those that tell move none."""
    rig.submit(0, (0, 20))
    rig.finish()
    assert {(bool(transfer.spec.num_bytes), transfer.tells) for transfer in rig.executor.ended} == {
        (True, False),
        (False, True),
    }
    assert rig.network.executor(rig.sources[0]).notices() == (Notice("decode", 0, "request 0"),)
