"""Pipelines: staged requests carried out, chunk by chunk (D1 to D6), in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvplan import KVPlanError
from kvplan.executor import FakeNetwork, Notice, Status
from kvplan.plan.mesh import completions
from kvplan.staging.pipeline import FakeCopier, Pipeline, StagedTransfer
from kvplan.staging.plan import Chunk, StagedPlan
from tests.late import broken
from tests.rigs import ONE_BLOCK, OPERATIONS, Rig, differing, network_of, own_blocks, plans, tables
from tests.small import engine
from tests.staged import staged, staged_writes

NOBODY: dict[int, list[str]] = {0: [], 1: []}
"""Who has been told of what, where no peer has."""


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> str:
    """Which way bytes go."""
    return str(request.param)


@pytest.fixture
def rig(operation: str) -> Iterator[Rig]:
    """A pipeline with nothing in it."""
    network = network_of(plan := plans(30, operation))
    with network.memory:
        yield Rig.of(network, plan)


def test_requests_move_as_a_direct_plan_moves_them(operation: str) -> None:
    """Of several requests of several chunks, every byte is right, no other is written, and all peers are told."""
    network = network_of(plan := plans(30, operation))
    requests = {0: (0, 20), 1: (3, 18), 2: (9, 10), 3: (4, 4)}
    with network.memory as memory:
        rig = Rig.of(network, plan)
        local = plan.direct.local
        rig.pipeline = Pipeline(network.executor(local), plan, FakeCopier(memory, local.key))
        for number, tokens in requests.items():
            rig.submit(number, tokens)
        settled: list[StagedTransfer] = []
        for _ in range(20):
            settled += rig.pipeline.poll()
        names = sorted(one.request for one in settled if one.status is Status.DONE)
        assert names == [f"request {at}" for at in range(4)]
        assert not rig.wrong(requests)
        assert {rank: sorted(told) for rank, told in rig.told().items()} == {0: names, 1: names}


def test_a_half_is_filled_while_the_other_one_is_emptied(rig: Rig) -> None:
    """D1: both halves are filled at once, and the first one again when what was there is out of it."""
    transfer = rig.submit(0, (0, 16))
    seen = [rig.under_way]
    for step in "ffef":
        rig.go(step)
        seen.append(rig.under_way)
    assert seen == [(2, 0), (1, 1), (0, 2), (1, 1), (0, 2)]
    assert rig.finish() == [transfer]
    assert not rig.wrong({0: (0, 16)})


def test_halves_are_used_in_turn_by_different_requests(rig: Rig) -> None:
    """D1: of requests of one chunk each, two are under way, and the third has the half of the first."""
    transfers = [rig.submit(number) for number in range(3)]
    assert rig.under_way == (2, 0)
    rig.fill()
    assert rig.pipeline.poll() == ()
    assert rig.under_way == (1, 1)
    rig.empty()
    rig.pipeline.poll()
    assert rig.under_way == (2, 0)
    assert [part.half for part in rig.pipeline._parts if part.half is not None] == [1, 0]
    assert rig.finish() == transfers
    assert not rig.wrong(dict.fromkeys(range(3), (0, 4)))


def test_a_half_waits_until_it_is_empty(rig: Rig) -> None:
    """D2: though the other half's chunk be out of it first."""
    rig.submit(0, (0, 16))
    rig.go("ff")
    rig.empty(1)
    rig.pipeline.poll()
    assert rig.under_way == (0, 1)
    rig.go("e")
    assert rig.under_way == (2, 0)
    rig.finish()
    assert not rig.wrong({0: (0, 16)})


@pytest.mark.parametrize("which", range(2))
def test_a_half_waits_for_each_transfer_from_it(which: int) -> None:
    """D2: it is not filled while one of two destinations is yet to have its part, whichever it is."""
    network = network_of(plan := plans(30, "WRITE"))
    with network.memory:
        rig = Rig.of(network, plan)
        rig.submit(0, (0, 12))
        late = rig.until_transfers()[1 - which]
        rig.executor.end(rig.moving[which])
        for _ in range(3):
            assert rig.pipeline.poll() == ()
            assert rig.under_way[0] == 1
        rig.executor.end(late)
        rig.pipeline.poll()
        assert rig.under_way == (2, 0)
        rig.finish()
        assert not rig.wrong({0: (0, 12)})


def test_a_half_waits_for_what_cannot_be_stopped(rig: Rig) -> None:
    """D2, D5: transfers of a request that was cancelled keep theirs until they end."""
    cancelled, other = rig.submit(0, (0, 8)), rig.submit(1, (0, 8))
    running = list(rig.until_transfers(chunks=2))
    rig.pipeline.cancel(cancelled)
    for transfer in running[1:]:
        rig.executor.end(transfer)
        assert rig.pipeline.poll() == ()
        assert not rig.copier.running
        assert {moving.request for moving in rig.moving} == {"request 0"}
    rig.executor.end(running[0])
    assert rig.pipeline.poll() == (cancelled,)
    assert rig.under_way == (2, 0)
    assert rig.finish() == [other]
    assert rig.wrong({1: (0, 8)}) <= own_blocks(plan=rig.plan, numbers=[0])


def test_many_requests_wait(rig: Rig) -> None:
    """D1: whatever their number, two chunks are on their way, and all requests are done in the end, in order."""
    requests = [rig.pipeline.submit(f"{number}", **tables(number % 6), tokens=(0, 9)) for number in range(40)]
    assert rig.under_way == (2, 0)
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


@pytest.mark.parametrize("operation", ["READ"])
def test_a_chunk_is_put_in_order_when_all_of_it_is_read(rig: Rig) -> None:
    """D3: not when one of two sources is."""
    rig.submit(0)
    rig.executor.end(rig.moving[0])
    rig.pipeline.poll()
    assert rig.copier.running == []
    rig.executor.end(rig.moving[0])
    rig.pipeline.poll()
    assert len(rig.copier.running) == 1


@pytest.mark.parametrize("operation", ["WRITE"])
def test_a_chunk_is_written_when_it_is_in_order(rig: Rig) -> None:
    """D3: to all destinations then, and to none while copies go on."""
    rig.submit(0)
    for _ in range(3):
        rig.pipeline.poll()
        assert rig.executor.running == []
    rig.fill()
    rig.pipeline.poll()
    assert [transfer.spec.remote for transfer in rig.moving] == [("decode", 0), ("decode", 1)]


@pytest.mark.parametrize("operation", ["READ"])
def test_sources_are_told_when_all_chunks_are_read(rig: Rig) -> None:
    """D4: once, also while the last chunk is put in order."""
    transfer = rig.submit(0, (0, 12))
    rig.go("ffee")
    assert rig.told() == NOBODY
    rig.go("f")
    for telling in rig.telling:
        rig.executor.end(telling)
    assert rig.told() == {0: ["request 0"], 1: ["request 0"]}
    assert rig.pipeline.poll() == ()
    rig.empty()
    assert rig.pipeline.poll() == (transfer,)
    assert rig.told() == NOBODY


@pytest.mark.parametrize("operation", ["WRITE"])
def test_destinations_are_told_when_all_chunks_are_written(rig: Rig) -> None:
    """D4: each once; none while another still gets bytes of the last chunk."""
    transfer = rig.submit(0, (0, 12))
    rig.go("ffeef")
    for _ in range(2):
        assert rig.telling == []
        rig.executor.end(rig.moving[0])
        assert rig.pipeline.poll() == ()
    first, second = rig.telling
    assert rig.told() == NOBODY
    rig.executor.end(first)
    assert rig.pipeline.poll() == ()
    assert rig.told() == {0: ["request 0"], 1: []}
    rig.executor.end(second)
    assert rig.pipeline.poll() == (transfer,)
    assert rig.told() == {0: [], 1: ["request 0"]}
    assert not rig.wrong({0: (0, 12)})


def test_a_request_of_no_bytes_is_told_of(rig: Rig) -> None:
    """D4: by transfers of no bytes, which need no half: it may be done before those that were submitted earlier."""
    rig.submit(0, (0, 8))
    nothing = rig.submit(1, (5, 5))
    rig.pipeline.poll()
    assert [transfer.request for transfer in rig.telling] == ["request 1"] * 2
    for transfer in rig.telling:
        rig.executor.end(transfer)
    assert rig.pipeline.poll() == (nothing,)
    assert nothing.status is Status.DONE
    assert rig.told() == {0: ["request 1"], 1: ["request 1"]}


def test_completions_of_the_direct_plan_hold(rig: Rig) -> None:
    """D4: a worker tells those that its direct plan sends to, each once, whatever the request."""
    requests = [rig.submit(0, (0, 20)), rig.submit(1, (7, 7)), rig.submit(2, (2, 9))]
    rig.finish()
    local = rig.plan.direct.local.key
    expected = completions([rig.plan.direct])
    assert len(expected[local].sends) == 2
    for peer in rig.plan.direct.remotes:
        notices = rig.network.executor(peer).notices()
        assert expected[peer.key].awaits == (local,)
        assert sorted(notice.request for notice in notices) == [one.request for one in requests]
        assert {(notice.engine_id, notice.rank) for notice in notices} == {local}


WRITERS = [
    ({"tp": 2}, {}),
    ({"tp": 4}, {"tp": 2}),
    ({"contexts": (2, 1)}, {}),
    ({"tp": 4, "heads": 2}, {"tp": 2, "heads": 2}),
]
"""Sources and destinations: halves of heads; of each one's heads; turns of tokens; and replicas, of which two serve
nobody."""


@pytest.mark.parametrize("ours, theirs", WRITERS)
def test_each_writer_of_a_destination_tells_it(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """D4: a destination that counts what it awaits by direct plans has all bytes then, from all writers."""
    some = staged_writes(
        engine("prefill", blocks=30, **ours), engine("decode", order="NH", blocks=30, **theirs), 8 * ONE_BLOCK
    )
    network, requests = network_of(*some), {0: (0, 20), 1: (3, 18), 2: (4, 4)}
    with network.memory:
        rigs = [Rig.of(network, plan) for plan in some]
        for rig in rigs:
            for number, tokens in requests.items():
                rig.submit(number, tokens)
        for rig in rigs:
            rig.finish()
        assert differing(network, some, requests) == set()
        expected = completions(plan.direct for plan in some)
        for peer in some[0].direct.remotes:
            heard = sorted(
                (notice.request, (notice.engine_id, notice.rank)) for notice in network.executor(peer).notices()
            )
            assert heard == [(f"request {number}", key) for number in requests for key in expected[peer.key].awaits]
            assert heard


def test_a_writer_that_fails_leaves_others_of_its_engine_alone() -> None:
    """D6: the destination hears from the other one, and has its bytes."""
    some = staged_writes(engine("prefill", tp=2, blocks=30), engine("decode", order="NH", blocks=30), 2 * ONE_BLOCK)
    network = network_of(*some)
    with network.memory:
        first, second = (Rig.of(network, plan) for plan in some)
        failed, done = first.submit(0), second.submit(0)
        first.copier.end(first.copier.running[0], broken("copy"))
        assert first.finish() == []
        assert first.pipeline.poll() == (failed,)
        assert second.finish() == [done]
        assert second.told() == {0: ["request 0"]}
        assert (failed.status, done.status) == (Status.FAILED, Status.DONE)
        assert differing(network, some[1:], {0: (0, 4)}) == set()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_peer_of_which_a_chunk_needs_nothing_is_not_asked(operation: str) -> None:
    """A chunk begins transfers with those peers that it has bytes of or for; in the end, all are told."""
    if operation == "READ":
        (local,) = engine("decode", order="NH", blocks=30)
        plan = staged(local, engine("prefill", contexts=(2, 4), blocks=30), 2 * ONE_BLOCK)
    else:
        peers = engine("decode", contexts=(2, 4), order="NH", blocks=30)
        (plan,) = staged_writes(engine("prefill", blocks=30), peers, 2 * ONE_BLOCK)
    network = network_of(plan)
    with network.memory:
        rig = Rig.of(network, plan)
        rig.submit(0, (4, 8))
        if operation == "WRITE":
            rig.go("f")
        assert [transfer.spec.remote for transfer in rig.executor.running] == [plan.direct.remotes[1].key]
        rig.finish()
        assert rig.told() == {0: ["request 0"], 1: ["request 0"]}
        assert not rig.wrong({0: (4, 8)})


@pytest.mark.parametrize("which", range(4))
def test_a_failed_transfer_fails_its_request_alone(rig: Rig, which: int) -> None:
    """D5: the request's other transfers are cancelled and waited for; nothing more of it begins, and nobody is told."""
    failed, other = rig.submit(0, (0, 20)), rig.submit(1, (0, 20))
    running = list(rig.until_transfers(chunks=2))
    copies = len(rig.copier.ended)
    error = broken("move")
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
    assert rig.under_way == (2, 0)
    assert rig.finish() == [other]
    assert (other.status, other.error) == (Status.DONE, None)
    assert len(rig.copier.ended) == copies + 5
    assert rig.told() == {0: ["request 1"], 1: ["request 1"]}
    assert rig.wrong({1: (0, 20)}) <= own_blocks(rig.plan, [0], chunks=0 if rig.reads else 2)


def test_a_failed_request_waits_for_copies_that_have_begun(rig: Rig) -> None:
    """D5: they go on to their end before the request is FAILED, and nothing comes after them."""
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
    assert rig.told() == NOBODY


def test_a_half_is_not_emptied_of_a_request_that_failed_to_fill_another(rig: Rig) -> None:
    """D5: of two chunks that fill halves at one time, neither goes on where the first one has failed."""
    failed = rig.submit(0, (0, 8))
    if rig.reads:
        rig.executor.end(rig.moving[0], broken("read"))
        rig.finish()
    else:
        rig.copier.end(rig.copier.running[0], broken("copy"))
        rig.fill()
        rig.pipeline.poll()
    assert rig.under_way == (0, 0)
    assert (len(rig.executor.ended), len(rig.copier.ended)) == ((4, 0) if rig.reads else (0, 2))
    assert failed.status is Status.FAILED


def test_a_refused_start_fails_the_request(rig: Rig) -> None:
    """D6: of a worker that is gone, the error is the request's, and no exception."""
    rig.executor.refuses = error = broken("start")
    transfer = rig.submit(0)
    if not rig.reads:
        rig.go("f")
    assert rig.pipeline.poll() == (transfer,)
    assert (transfer.status, transfer.error) == (Status.FAILED, error)
    rig.executor.refuses = None
    other = rig.submit(1)
    assert rig.finish() == [other]
    assert other.status is Status.DONE


def test_a_refused_start_waits_for_those_that_were_not(rig: Rig) -> None:
    """D5: where one of two peers is gone, the other one's transfer is cancelled, and keeps the half until it ends."""
    rig.executor.refuses, rig.executor.gone = broken("start"), rig.plan.direct.remotes[1].key
    failed = rig.submit(0)
    if not rig.reads:
        rig.go("f")
    (running,) = rig.executor.running
    assert rig.pipeline.poll() == ()
    assert rig.executor.asked == [running]
    assert len(rig.pipeline._parts) == 1
    rig.executor.end(running)
    assert rig.pipeline.poll() == (failed,)
    assert (failed.status, failed.error) == (Status.FAILED, rig.executor.refuses)
    assert rig.executor.released == [running]
    assert rig.told() == NOBODY


def test_a_peer_that_cannot_be_told_fails_the_request(rig: Rig) -> None:
    """D6: nobody else would know that it has not been told."""
    transfer = rig.submit(0)
    rig.go("fe")
    first, second = rig.telling
    rig.executor.end(first, error := broken("tell"))
    assert rig.pipeline.poll() == ()
    assert rig.executor.asked == [first, second]
    rig.executor.end(second)
    assert rig.pipeline.poll() == (transfer,)
    assert (transfer.status, transfer.error) == (Status.FAILED, error)
    assert rig.told() == NOBODY


def test_copies_that_cannot_begin_fail_the_request(rig: Rig) -> None:
    """D6: and its half is another's at once."""
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
    assert rig.told() == {0: ["request 1"], 1: ["request 1"]}
    assert not rig.wrong({1: (0, 4)})


def test_copies_that_fail_fail_the_request(rig: Rig) -> None:
    """D3, D6: with the error of the copies; of a chunk that was not put in order no transfer begins."""
    failed, other = rig.submit(0), rig.submit(1)
    rig.until_copies()
    rig.copier.end(rig.copier.running[0], error := broken("copy"))
    running = list(rig.executor.running)
    rig.pipeline.poll()
    assert rig.executor.running == running
    rig.finish()
    assert (failed.status, failed.error) == (Status.FAILED, error)
    assert other.status is Status.DONE
    assert rig.told() == {0: ["request 1"], 1: ["request 1"]}
    assert rig.wrong({1: (0, 4)}) <= own_blocks(rig.plan, [0], chunks=1 if rig.reads else 0)


def test_a_transfer_that_is_not_given_back_fails_the_request(rig: Rig) -> None:
    """D6: all others of the request are given back, and nothing comes after it."""
    failed = rig.submit(0)
    running = list(rig.until_transfers())
    rig.executor.keeps = broken("give back")
    for transfer in running:
        rig.executor.end(transfer)
    for _ in range(3):
        rig.pipeline.poll()
    assert (failed.status, failed.error) == (Status.FAILED, rig.executor.keeps)
    assert len(rig.executor.released) == 2
    assert rig.copier.running == []
    assert rig.told() == NOBODY


def test_a_chunk_that_cannot_be_made_fails_the_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """D6: the chunks before it are cancelled."""

    def bind(self: StagedPlan, **given: Any) -> Iterator[Chunk]:
        yield next(bound(self, **given))
        raise error

    bound, error = StagedPlan.bind, broken("make a chunk")
    monkeypatch.setattr(StagedPlan, "bind", bind)
    transfer = rig.submit(0, (0, 20))
    assert rig.under_way == (1, 0)
    assert rig.executor.asked == rig.executor.running
    assert rig.finish() == [transfer]
    assert (transfer.status, transfer.error) == (Status.FAILED, error)
    assert rig.under_way == (0, 0)
    assert rig.told() == NOBODY


@pytest.mark.parametrize("steps", ["", "f", "ff", "ffe", "ffee"])
def test_a_cancelled_request_is_settled_when_nothing_of_it_is_under_way(rig: Rig, steps: str) -> None:
    """D5: in each step of two chunks, nothing more begins, nobody is told, and requests behind it go on."""
    cancelled, other = rig.submit(0, (0, 8)), rig.submit(1, (0, 20))
    rig.go(steps)
    rig.pipeline.cancel(cancelled)
    running = [transfer for transfer in rig.executor.running if transfer.request == "request 0"]
    assert [transfer for transfer in rig.executor.asked if transfer in rig.executor.running] == running
    assert rig.pipeline.poll() == ()
    assert cancelled.status is Status.RUNNING
    started = [transfer for transfer in (*rig.executor.ended, *running) if transfer.request == "request 0"]
    assert rig.finish() == [cancelled, other]
    assert (cancelled.status, cancelled.error) == (Status.CANCELLED, None)
    assert {transfer for transfer in rig.executor.ended if transfer.request == "request 0"} == {*started}
    assert rig.told() == {0: ["request 1"], 1: ["request 1"]}
    assert rig.wrong({1: (0, 20)}) <= own_blocks(rig.plan, [0], chunks=steps.count("f"))


def test_a_request_that_waits_is_cancelled_at_once(rig: Rig) -> None:
    """D5: it has touched nothing; the chunk of it that was made already gives way to the next request's."""
    first, cancelled, last = rig.submit(0, (0, 8)), rig.submit(1, (0, 20)), rig.submit(2)
    rig.pipeline.cancel(cancelled)
    assert rig.pipeline.poll() == (cancelled,)
    assert rig.finish() == [first, last]
    assert not rig.wrong({0: (0, 8), 2: (0, 4)})


def test_what_comes_first_is_how_a_request_ends(rig: Rig) -> None:
    """D5: to cancel a request that has failed, or the other way round, changes nothing any more."""
    failed, cancelled = rig.submit(0), rig.submit(1)
    first, _, third, _ = rig.until_transfers(chunks=2)
    error = broken("move")
    rig.executor.end(first, error)
    rig.pipeline.poll()
    rig.pipeline.cancel(failed)
    rig.pipeline.cancel(cancelled)
    rig.executor.end(third, broken("move"))
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
    for running in tuple(rig.until_transfers()):
        rig.executor.cancel(running)
        rig.executor.end(running)
    assert rig.pipeline.poll() == (transfer,)
    assert transfer.status is Status.CANCELLED


def test_a_bad_request_is_refused_before_anything_is_queued(rig: Rig) -> None:
    """D6 begins when a request is submitted: what is wrong with it from the first is an exception."""
    with pytest.raises(KVPlanError, match="TOKENS"):
        rig.submit(0, (4, 3))
    assert rig.under_way == (0, 0)
    assert repr(rig.pipeline) == f"<Pipeline {rig.plan.direct.local.label}: 0 requests>"


def test_plans_are_prepared_with_the_workers_that_there_are(operation: str) -> None:
    """A peer that the executor does not know is refused when the pipeline is made."""
    plan = plans(10, operation)
    local, known, unknown = plan.direct.local, *plan.direct.remotes
    network = FakeNetwork([local, known])
    with pytest.raises(KVPlanError, match=f"PEER: cannot prepare a plan with remote worker {unknown.label}"):
        Pipeline(network.executor(local), plan, FakeCopier(network.memory, local.key))


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


def test_no_peer_is_told_by_a_chunk(rig: Rig) -> None:
    """D4: transfers that move bytes do not tell, and those that tell move none."""
    rig.submit(0, (0, 20))
    rig.finish()
    assert {(bool(transfer.spec.num_bytes), transfer.notifies) for transfer in rig.executor.ended} == {
        (True, False),
        (False, True),
    }
    local = rig.plan.direct.local
    assert rig.network.executor(rig.plan.direct.remotes[0]).notices() == (Notice(*local.key, "request 0"),)
