"""Pipelines: staged requests carried out, chunk by chunk (staging.D1 to staging.D5)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest

from kvplan import Blocks, KVPlanError
from kvplan.executor import Status
from kvplan.staging import Chunk, Pipeline, StagedTransfer
from kvplan.staging.plan import StagedRequest
from kvplan.testing import FakeCopier, FakeNetwork
from tests.small import engine
from tests.staged import (
    NAME,
    ONE_BLOCK,
    Rig,
    broken,
    network_of,
    own_blocks,
    plans_of,
    request_of,
    rig_plan,
    rig_plans,
    rig_request,
)
from tests.staging.test_plan import states


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A pipeline with nothing in it."""
    network = network_of(plan := rig_plan(30))
    with network.memory:
        yield Rig.of(network, plan)


@pytest.fixture
def two() -> Iterator[Rig]:
    """A pipeline of two plans, with nothing in it. Requests of even numbers are the first plan's."""
    network = network_of(*(plans := rig_plans(30)))
    with network.memory:
        yield Rig.of(network, *plans)


def test_requests_move_as_a_direct_plan_moves_them() -> None:
    """Of several requests of several chunks, every byte is right, and no other is written."""
    network = network_of(plan := rig_plan(30))
    requests = {0: (0, 20), 1: (3, 18), 2: (9, 10), 3: (4, 4)}
    with network.memory as memory:
        rig = Rig.of(network, plan)
        local = plan.direct.local
        rig.pipeline = Pipeline(network.executor(local), NAME, FakeCopier(memory, local.key))
        rig.pipeline.prepare(plan)
        for number, tokens in requests.items():
            rig.submit(number, tokens)
        settled: list[StagedTransfer] = []
        for _ in range(20):
            settled += rig.pipeline.poll()
        assert sorted(one.request for one in settled) == [f"request {at}" for at in range(4)]
        assert {one.status for one in settled} == {Status.DONE}
        assert not rig.wrong(requests)


def test_blocks_are_filled_while_others_are_emptied(rig: Rig) -> None:
    """staging.D1: all blocks are filled at once, and the first ones are refilled when they have been emptied."""
    transfer = rig.submit(0, (0, 16))
    seen = [rig.under_way]
    for step in "ffef":
        rig.go(step)
        seen.append(rig.under_way)
    assert seen == [(2, 0), (1, 1), (0, 2), (1, 1), (0, 2)]
    assert rig.finish() == [transfer]
    assert not rig.wrong({0: (0, 16)})


def test_requests_take_blocks_that_others_leave(rig: Rig) -> None:
    """staging.D1: of requests of one chunk each, two are under way, and the third takes the blocks of the first."""
    transfers = [rig.submit(number) for number in range(3)]
    assert rig.under_way == (2, 0)
    rig.fill()
    assert rig.pipeline.poll() == ()
    assert rig.under_way == (1, 1)
    rig.empty()
    assert rig.pipeline.poll() == (transfers[0],)
    assert rig.under_way == (2, 0)
    assert [[ids.tolist() for ids in work.chunk.blocks] for work in rig.pipeline._under_way] == [[[1], [1]], [[0], [0]]]
    assert rig.finish() == transfers[1:]
    assert not rig.wrong(dict.fromkeys(range(3), (0, 4)))


def test_blocks_are_refilled_in_any_order(rig: Rig) -> None:
    """staging.D2: those that are emptied first, while others are not."""
    rig.submit(0, (0, 16))
    rig.go("ff")
    rig.empty(1)
    rig.pipeline.poll()
    assert rig.under_way == (1, 1)
    rig.go("e")
    assert rig.under_way == (2, 0)
    rig.finish()
    assert not rig.wrong({0: (0, 16)})


def test_blocks_wait_for_what_cannot_be_stopped(rig: Rig) -> None:
    """staging.D2, staging.D4: transfers of a cancelled request hold their blocks until they end. Others go on."""
    cancelled, other = rig.submit(0, (0, 4)), rig.submit(1, (0, 8))
    held, gone_on = rig.moving[:2], rig.moving[2:]
    rig.pipeline.cancel(cancelled)
    rig.executor.end(held[1])
    for transfer in gone_on:
        rig.executor.end(transfer)
    assert rig.pipeline.poll() == ()
    rig.empty()
    assert rig.pipeline.poll() == ()
    (second,) = (work for work in rig.pipeline._under_way if work.request.transfer is other)
    assert [ids.tolist() for ids in second.chunk.blocks] == [[1], [1]]
    for transfer in [one for one in rig.moving if one not in held]:
        rig.executor.end(transfer)
    rig.pipeline.poll()
    rig.empty()
    assert rig.pipeline.poll() == (other,)
    rig.executor.end(held[0])
    assert rig.pipeline.poll() == (cancelled,)
    assert rig.wrong({1: (0, 8)}) <= own_blocks(plan=rig.plan, numbers=[0])


def test_as_many_requests_are_under_way_as_fit() -> None:
    """staging.D1: where one chunk could have half of the blocks, 32 short requests have theirs at once."""
    plan = rig_plan(200, staging_bytes=32 * ONE_BLOCK)
    assert plan.num_positions == 4 * 32
    network = network_of(plan)
    with network.memory:
        rig = Rig.of(network, plan)
        requests = [rig.submit(number, (0, 8)) for number in range(33)]
        assert rig.under_way == (32, 0)
        rig.fill(31)
        rig.pipeline.poll()
        rig.empty()
        assert rig.pipeline.poll() == (requests[31],)
        assert rig.under_way == (32, 0)
        assert {*rig.finish()} == {*requests} - {requests[31]}
        assert not rig.wrong(dict.fromkeys(range(33), (0, 8)))


def test_short_requests_have_their_states_at_once() -> None:
    """staging.S7: each takes one, and there are more than the two that a long request needs."""
    (plan,) = plans_of([states("prefill", (0, 4), 60)], [states("decode", (1, 3), 60)], 1 << 19)
    network = network_of(plan)
    with network.memory as memory:
        local = plan.direct.local
        pipeline = Pipeline(network.executor(local), NAME, FakeCopier(memory, local.key))
        pipeline.prepare(plan)
        for number in range(6):
            blocks = {"attn": Blocks([2 * number, 2 * number + 1]), "state": Blocks([number], ordinals=[5])}
            pipeline.submit(
                plan, f"request {number}", local=blocks, remote=blocks, tokens={"attn": (0, 4), "state": (5, 6)}
            )
        assert pipeline.num_chunks == 6


def test_a_long_request_is_not_overtaken() -> None:
    """staging.D1: where a chunk waits for blocks, shorter ones that would fit wait behind it."""
    plan = rig_plan(100, staging_bytes=4 * ONE_BLOCK)
    network = network_of(plan)
    with network.memory:
        rig = Rig.of(network, plan)
        for number, tokens in enumerate([(0, 16), (0, 12), (0, 8), (0, 4)]):
            rig.submit(number, tokens)
        assert [work.request.transfer.request for work in rig.pipeline._under_way] == ["request 0", "request 1"]
        rig.finish()
        assert not rig.wrong({0: (0, 16), 1: (0, 12), 2: (0, 8), 3: (0, 4)})


def test_plans_of_like_engines_share_the_region() -> None:
    """staging.D2: chunks of two plans whose blocks are alike are under way at once."""
    plans = rig_plan(30), rig_plan(30, name="more")
    network = network_of(*plans)
    with network.memory:
        rig = Rig.of(network, *plans)
        requests = [rig.submit(0, (0, 4)), rig.submit(1, (0, 8))]
        assert {work.request.transfer for work in rig.pipeline._under_way} == {*requests}
        rig.fill(1)
        rig.pipeline.poll()
        rig.empty()
        rig.pipeline.poll()
        assert {work.request.transfer for work in rig.pipeline._under_way} == {*requests}
        assert {*rig.finish()} == {*requests}
        assert not rig.wrong({0: (0, 4), 1: (0, 8)})


def test_many_requests_wait(rig: Rig) -> None:
    """staging.D1: of any number of requests two chunks are under way, and all are done in the end, in order."""
    requests = [rig.pipeline.submit(rig.plan, f"{number}", **rig_request(number % 6, (0, 9))) for number in range(40)]
    assert rig.under_way == (2, 0)
    assert rig.finish() == requests
    assert {one.status for one in requests} == {Status.DONE}


def test_requests_of_two_plans_take_turns(two: Rig) -> None:
    """staging.D2: each has its bytes, though the blocks of one plan have bytes of several of the other."""
    requests = {0: (0, 20), 1: (3, 18), 2: (9, 10), 3: (4, 4), 4: (0, 4), 5: (1, 20)}
    submitted = [two.submit(number, tokens) for number, tokens in requests.items()]
    assert sorted(two.finish(), key=submitted.index) == submitted
    assert {one.status for one in submitted} == {Status.DONE}
    assert not two.wrong(requests)


def test_a_chunk_of_another_layout_waits_for_all_blocks(two: Rig) -> None:
    """staging.D2: whichever of them is emptied first; then the first plan waits for the second one."""

    def under_way() -> set[str]:
        return {work.request.transfer.request for work in two.pipeline._under_way}

    transfers = [two.submit(0, (0, 8)), two.submit(1), two.submit(2)]
    two.go("ff")
    two.empty(1)
    two.pipeline.poll()
    assert under_way() == {"request 0"}
    two.empty()
    two.pipeline.poll()
    assert under_way() == {"request 1"}
    assert [one for one in two.finish() if one in transfers[1:]] == transfers[1:]
    assert not two.wrong({0: (0, 8), 1: (0, 4), 2: (0, 4)})


def test_a_plan_waits_for_what_hangs_of_another(two: Rig) -> None:
    """staging.D2, staging.D4: also where that has failed. Who waits has begun nothing, and is cancelled at once."""
    failed, cancelled, other = two.submit(0, (0, 8)), two.submit(1), two.submit(3)
    hangs, *running = list(two.moving)
    for transfer in running:
        two.executor.end(transfer, broken("move"))
    for _ in range(3):
        assert two.pipeline.poll() == ()
        assert two.executor.running == [hangs]
    assert (cancelled.num_bytes, two.pipeline.num_chunks) == (0, 2)
    two.pipeline.cancel(cancelled)
    assert two.pipeline.poll() == (cancelled,)
    two.executor.end(hangs)
    assert two.pipeline.poll() == (failed,)
    assert two.finish() == [other]
    assert (failed.status, cancelled.status, other.status) == (Status.FAILED, Status.CANCELLED, Status.DONE)
    assert two.wrong({3: (0, 4)}) <= own_blocks(two.plan, [0])


def test_chunks_are_made_when_they_begin(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """staging.D1: however many requests wait, no more than there is room for."""
    made: list[Chunk] = []

    def chunk(self: StagedRequest, *given: Any) -> Chunk:
        made.append(make(self, *given))
        return made[-1]

    make = StagedRequest._chunk
    monkeypatch.setattr(StagedRequest, "_chunk", chunk)
    for number in range(3):
        rig.submit(number, (0, 20))
    assert len(made) == 2
    rig.finish()
    assert len(made) == 15


def test_a_chunk_is_copied_when_all_of_it_is_read(rig: Rig) -> None:
    """staging.D3: not when one of two sources is read."""
    rig.submit(0)
    rig.executor.end(rig.moving[0])
    rig.pipeline.poll()
    assert rig.copier.running == []
    rig.executor.end(rig.moving[0])
    rig.pipeline.poll()
    assert len(rig.copier.running) == 1


def test_bytes_are_counted_as_a_direct_plan_moves_them(rig: Rig) -> None:
    """Chunk by chunk as these begin."""
    transfer = rig.submit(0, (3, 18))
    moved = [transfer.num_bytes]
    for step in "ffefefefe":
        rig.go(step)
        moved.append(transfer.num_bytes)
    assert moved == sorted(moved)
    specs = rig.plan.direct.bind(**rig_request(0, (3, 18)))
    assert 0 < moved[0] < moved[-1] == sum(spec.num_bytes for spec in specs)
    assert rig.pipeline.num_chunks == 5


def test_a_peer_without_bytes_of_a_chunk_gets_no_transfer() -> None:
    """A chunk begins transfers with the peers that it reads bytes from."""
    ours = engine("decode", order="NH", blocks=30)
    (plan,) = plans_of(engine("prefill", blocks=30, contexts=(2, 4)), ours, 2 * ONE_BLOCK)
    network = network_of(plan)
    with network.memory:
        rig = Rig.of(network, plan)
        rig.submit(0, (4, 8))
        assert [transfer.spec.remote for transfer in rig.executor.running] == [plan.direct.remotes[1].key]
        rig.finish()
        assert not rig.wrong({0: (4, 8)})


@pytest.mark.parametrize("which", range(4))
def test_a_failed_transfer_fails_its_request_alone(rig: Rig, which: int) -> None:
    """staging.D4: its other transfers are cancelled and waited for; nothing more of it begins."""
    failed, other = rig.submit(0, (0, 20)), rig.submit(1, (0, 20))
    running = list(rig.moving)
    copies = len(rig.copier.ended)
    error = broken("move")
    rig.executor.end(running.pop(which), error)
    assert rig.pipeline.poll() == ()
    assert failed.status is Status.RUNNING
    assert [transfer for transfer in running if transfer in rig.executor.cancelled] == running
    for transfer in running[:2]:
        rig.executor.end(transfer)
        assert rig.pipeline.poll() == ()
    rig.executor.end(running[2])
    assert rig.pipeline.poll() == (failed,)
    assert (failed.status, failed.error) == (Status.FAILED, error)
    assert rig.under_way == (2, 0)
    assert rig.finish() == [other]
    assert (other.status, other.error) == (Status.DONE, None)
    assert len(rig.copier.ended) == copies + 5
    assert rig.wrong({1: (0, 20)}) <= own_blocks(rig.plan, [0], chunks=0)


def test_a_failed_request_waits_for_copies_that_have_begun(rig: Rig) -> None:
    """staging.D4: the request is FAILED when they are done, and nothing follows them."""
    failed = rig.submit(0, (0, 8))
    rig.go("f")
    for transfer in rig.moving:
        rig.executor.end(transfer, broken("move"))
    assert rig.pipeline.poll() == ()
    assert len(rig.copier.running) == 1
    rig.copier.end(rig.copier.running[0])
    assert rig.pipeline.poll() == (failed,)
    assert failed.status is Status.FAILED
    assert not rig.executor.running
    assert not rig.copier.running


def test_no_blocks_of_a_failed_request_are_emptied(rig: Rig) -> None:
    """staging.D4: of two chunks under way, neither goes on when the first one has failed."""
    failed = rig.submit(0, (0, 8))
    rig.executor.end(rig.moving[0], broken("read"))
    rig.finish()
    assert rig.under_way == (0, 0)
    assert (len(rig.executor.ended), len(rig.copier.ended)) == (4, 0)
    assert failed.status is Status.FAILED


def test_a_refused_start_fails_the_request(rig: Rig) -> None:
    """staging.D5: the error of a worker that is gone is the request's, and no exception."""
    rig.executor.refuses = error = broken("start")
    transfer = rig.submit(0)
    assert rig.pipeline.poll() == (transfer,)
    assert (transfer.status, transfer.error) == (Status.FAILED, error)
    rig.executor.refuses = None
    other = rig.submit(1)
    assert rig.finish() == [other]
    assert other.status is Status.DONE


def test_a_refused_start_waits_for_those_that_were_not(rig: Rig) -> None:
    """staging.D4: where one of two peers is gone, the other one's transfer is cancelled, and holds the slot until it
    ends.
    """
    rig.executor.refuses, rig.executor.gone = broken("start"), rig.plan.direct.remotes[1].key
    failed = rig.submit(0)
    (running,) = rig.executor.running
    assert rig.pipeline.poll() == ()
    assert rig.executor.cancelled == [running]
    assert len(rig.pipeline._under_way) == 1
    rig.executor.end(running)
    assert rig.pipeline.poll() == (failed,)
    assert (failed.status, failed.error) == (Status.FAILED, rig.executor.refuses)
    assert rig.executor.released == [running]


def test_copies_that_cannot_begin_fail_the_request(rig: Rig) -> None:
    """staging.D5: the next request takes its blocks at once."""
    rig.copier.refuses = error = broken("copy")
    failed = rig.submit(0, (0, 20))
    for transfer in rig.moving:
        rig.executor.end(transfer)
    assert rig.pipeline.poll() == (failed,)
    assert (failed.status, failed.error) == (Status.FAILED, error)
    rig.copier.refuses = None
    other = rig.submit(1)
    assert rig.under_way == (1, 0)
    assert rig.finish() == [other]
    assert not rig.wrong({1: (0, 4)})


def test_copies_that_fail_fail_the_request(rig: Rig) -> None:
    """staging.D3, staging.D5: with the error of the copies; no transfer of that chunk begins."""
    failed, other = rig.submit(0), rig.submit(1)
    rig.go("f")
    rig.copier.end(rig.copier.running[0], error := broken("copy"))
    running = list(rig.executor.running)
    rig.pipeline.poll()
    assert rig.executor.running == running
    rig.finish()
    assert (failed.status, failed.error) == (Status.FAILED, error)
    assert other.status is Status.DONE
    assert rig.wrong({1: (0, 4)}) <= own_blocks(rig.plan, [0], chunks=1)


def test_a_transfer_that_is_not_released_fails_the_request(rig: Rig) -> None:
    """staging.D5: all others of the request are released, and nothing follows."""
    failed = rig.submit(0)
    running = list(rig.moving)
    rig.executor.not_released = broken("release")
    for transfer in running:
        rig.executor.end(transfer)
    for _ in range(3):
        rig.pipeline.poll()
    assert (failed.status, failed.error) == (Status.FAILED, rig.executor.not_released)
    assert len(rig.executor.released) == 2
    assert rig.copier.running == []


def test_a_chunk_that_cannot_be_made_fails_the_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """staging.D5: the chunks before it are cancelled."""

    def chunk(self: StagedRequest, *given: Any) -> Chunk:
        if len(self.ranges) < 4:
            raise error
        return make(self, *given)

    make, error = StagedRequest._chunk, broken("make a chunk")
    monkeypatch.setattr(StagedRequest, "_chunk", chunk)
    transfer = rig.submit(0, (0, 20))
    assert rig.under_way == (1, 0)
    assert rig.executor.cancelled == rig.executor.running
    assert rig.finish() == [transfer]
    assert (transfer.status, transfer.error) == (Status.FAILED, error)
    assert rig.under_way == (0, 0)


@pytest.mark.parametrize("steps", ["", "f", "ff", "ffe"])
def test_a_cancelled_request_is_settled_when_nothing_of_it_is_under_way(rig: Rig, steps: str) -> None:
    """staging.D4: in each step of two chunks, nothing more begins, and later requests go on."""
    cancelled, other = rig.submit(0, (0, 8)), rig.submit(1, (0, 20))
    rig.go(steps)
    rig.pipeline.cancel(cancelled)
    running = [transfer for transfer in rig.executor.running if transfer.request == "request 0"]
    assert [transfer for transfer in rig.executor.cancelled if transfer in rig.executor.running] == running
    assert rig.pipeline.poll() == ()
    assert cancelled.status is Status.RUNNING
    started = [transfer for transfer in (*rig.executor.ended, *running) if transfer.request == "request 0"]
    assert rig.finish() == [cancelled, other]
    assert (cancelled.status, cancelled.error) == (Status.CANCELLED, None)
    assert {transfer for transfer in rig.executor.ended if transfer.request == "request 0"} == {*started}
    assert rig.wrong({1: (0, 20)}) <= own_blocks(rig.plan, [0], chunks=steps.count("f"))


def test_a_request_that_waits_is_cancelled_at_once(rig: Rig) -> None:
    """staging.D4: it has touched nothing; its chunk that was made ahead gives way to the next request's."""
    first, cancelled, last = rig.submit(0, (0, 8)), rig.submit(1, (0, 20)), rig.submit(2)
    rig.pipeline.cancel(cancelled)
    assert rig.pipeline.poll() == (cancelled,)
    assert rig.finish() == [first, last]
    assert not rig.wrong({0: (0, 8), 2: (0, 4)})


def test_the_first_reason_is_how_a_request_ends(rig: Rig) -> None:
    """staging.D4: a failed request that is cancelled stays failed, a cancelled one that fails stays cancelled."""
    failed, cancelled = rig.submit(0), rig.submit(1)
    first, _, third, _ = rig.moving
    error = broken("move")
    rig.executor.end(first, error)
    rig.pipeline.poll()
    rig.pipeline.cancel(failed)
    rig.pipeline.cancel(cancelled)
    rig.executor.end(third, broken("move"))
    rig.finish()
    assert (failed.status, failed.error) == (Status.FAILED, error)
    assert (cancelled.status, cancelled.error) == (Status.CANCELLED, None)


def test_transfers_that_others_cancel_end_the_request(rig: Rig) -> None:
    """staging.D4: the request is CANCELLED too, as by an executor that is closed."""
    transfer = rig.submit(0)
    for running in tuple(rig.moving):
        rig.executor.cancel(running)
        rig.executor.end(running)
    assert rig.pipeline.poll() == (transfer,)
    assert transfer.status is Status.CANCELLED


def test_a_bad_request_is_refused_before_anything_is_queued(rig: Rig) -> None:
    """A request that is wrong when submitted is an exception."""
    with pytest.raises(KVPlanError, match="TOKENS"):
        rig.submit(0, (4, 3))
    assert rig.under_way == (0, 0)
    assert repr(rig.pipeline) == f"<Pipeline of {NAME!r}: 0 requests>"


def test_plans_are_prepared_with_the_known_workers() -> None:
    """A peer that the executor does not know is refused when a plan is prepared."""
    plan = rig_plan(10)
    local, known, unknown = plan.direct.local, *plan.direct.remotes
    network = FakeNetwork([local, known])
    pipeline = Pipeline(network.executor(local), NAME, FakeCopier(network.memory, local.key))
    with pytest.raises(KVPlanError, match=f"PEER: cannot prepare a plan with remote worker {unknown.label}"):
        pipeline.prepare(plan)


def test_a_staging_region_has_one_pipeline() -> None:
    """A second pipeline of the executor is refused while the first one is there: they would overwrite each other."""
    plan = rig_plan(10)
    network = network_of(plan)
    local = plan.direct.local
    executor, copier = network.executor(local), FakeCopier(network.memory, local.key)
    first = Pipeline(executor, NAME, copier)
    with pytest.raises(
        KVPlanError, match=r"MEMORY: cannot make a pipeline of 'staging': .* a staging region of its own"
    ):
        Pipeline(executor, NAME, copier)
    Pipeline(executor, "another", copier)
    del first
    Pipeline(executor, NAME, copier)


def test_a_plan_of_another_staging_region_is_refused(rig: Rig) -> None:
    """A pipeline keeps requests apart in its own region alone."""
    other = attrs.evolve(rig.plan, staging="another")
    with pytest.raises(
        KVPlanError, match="MEMORY: cannot submit request 'r': expected a plan that stages in 'staging'"
    ):
        rig.pipeline.submit(other, "r", **rig_request(0, (0, 4)))
    assert rig.pipeline.poll() == ()


def test_threads_make_pipelines_of_executors_of_their_own() -> None:
    """Pipelines that other threads make and drop meanwhile do not concern a thread."""
    plan = rig_plan(10)
    network = network_of(plan)
    local = plan.direct.local
    copier = FakeCopier(network.memory, local.key)
    kept = [Pipeline(network.executor(local), NAME, copier) for _ in range(200)]

    def work(_: int) -> None:
        executor = network.executor(local)
        for _ in range(50):
            Pipeline(executor, NAME, copier)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(usual)
    assert len(kept) == 200


def test_a_failed_request_does_not_keep_its_pipeline() -> None:
    """A pipeline that is dropped leaves its staging region, whatever failed requests the caller keeps."""
    plan = rig_plan(10)
    network = network_of(plan)
    local = plan.direct.local
    executor, copier = network.executor(local), FakeCopier(network.memory, local.key)
    pipeline = Pipeline(executor, NAME, copier)
    failed = pipeline.submit(plan, "request", **request_of(Blocks(range(4)), Blocks(range(4)), (0, 4)))
    gc.disable()
    try:
        while not pipeline.poll():
            pass
        assert failed.status is Status.FAILED
        del pipeline
        Pipeline(executor, NAME, copier)
    finally:
        gc.enable()


def test_a_settled_request_stays_settled(rig: Rig) -> None:
    """Only then it may be released, any number of times; cancelling it changes nothing, and it holds no transfer."""
    transfer = rig.submit(0)
    assert repr(transfer) == "<StagedTransfer 'request 0' running>"
    with pytest.raises(KVPlanError, match="TRANSFER: cannot release a staged transfer"):
        rig.pipeline.release(transfer)
    rig.finish()
    rig.pipeline.cancel(transfer)
    assert rig.pipeline.poll() == ()
    for _ in range(2):
        rig.pipeline.release(transfer)
    assert repr(transfer) == "<StagedTransfer 'request 0' done>"
    assert {*rig.executor.released} == {*rig.executor.ended}
