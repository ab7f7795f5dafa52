"""A worker's reads: right bytes, one result each, and what fails takes nothing else with it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan import Blocks, KVPlanError, Status, Transfer, Worker, decode, encode, plan_reads
from kvplan.protocol import (
    Claims,
    Connections,
    HandshakeResult,
    Handshakes,
    PartialRead,
    Read,
    ReadResult,
    Reads,
    Source,
)
from kvplan.protocol.digest_requests import DigestRequest
from kvplan.protocol.listener import Offers
from kvplan.protocol.read import cut
from kvplan.protocol.read_jobs import ASK_S, LeaseCheck
from kvplan.protocol.reads import POST_S
from kvplan.protocol.system import Background, Pending
from kvplan.staging import Pipeline, Rates
from kvplan.testing import FakeCopier, FakeExecutor, FakeNetwork
from kvplan_nixl.serving import Driver
from tests.blocking import error_of, unblocked, wait_until, waited
from tests.small import engine
from tests.staged import NAME, with_staging

LOGGER = logging.getLogger("test")


def source_of(name: str = "prefill", start: str = "1") -> Source:
    return Source(name, start, f"{name}.{start}", 1)


class HeldExecutor(FakeExecutor):
    """Moves no byte of a transfer until it is let go, and fails those with workers in ``broken``.

    It also fails those of requests in ``failing``; of those in ``copying`` bytes may move afterwards. Engines in
    ``silent`` hang.
    """

    def __init__(self, network: FakeNetwork, worker: Worker) -> None:
        super().__init__(network, worker)
        self.held = False
        self.silent: set[str] = set()
        self.at_once = False  # moves all bytes when a transfer starts
        self.broken: set[tuple[str, int]] = set()
        self.failing: set[str] = set()
        self.copying: set[str] = set()
        self.lost: set[tuple[str, int]] = set()
        self.code = "TRANSFER"
        self.released: list[Transfer] = []
        self.started: list[Transfer] = []

    def start(self, *given: Any, **options: Any) -> Transfer:
        transfer = super().start(*given, **options)
        self.started.append(transfer)
        while self.at_once and not transfer.status.is_settled:
            super().poll(transfer)
        return transfer

    def poll(self, transfer: Transfer) -> Status:
        if transfer.spec.remote in self.broken or transfer.request in self.failing:
            transfer.status = Status.FAILED
            transfer.error = KVPlanError(self.code, "move bytes", expected="a peer", got="none")
            self.lost |= {transfer.spec.remote} if self.code == "PEER" else set()
        elif transfer.request in self.copying:
            transfer.error = KVPlanError(self.code, "move bytes", expected="a peer", got="none")
        return transfer.status if self.hangs(transfer) else super().poll(transfer)

    def hangs(self, transfer: Transfer) -> bool:
        is_held = self.held or transfer.request in self.copying
        return is_held or transfer.spec.remote[0] in self.silent

    def cancel(self, transfer: Transfer) -> None:
        if not self.hangs(transfer):
            super().cancel(transfer)

    def release(self, transfer: Transfer) -> None:
        super().release(transfer)
        self.released.append(transfer)


class Sources:
    """Stands in for claims: what sources say of leases. Those in ``over`` are; while ``silent``, nobody answers."""

    def __init__(self) -> None:
        self.over: set[str] = set()
        self.silent = False
        self.asked: list[str] = []

    def ask(self, source: Source, lease: str) -> Pending[None]:
        self.asked.append(lease)
        answer = Pending[None]()
        if self.silent:
            answer.fail(KVPlanError("PEER", "reach", expected="an answer", got="none"))
        elif lease in self.over:
            answer.fail(KVPlanError("LEASE", "read", expected="a valid lease", got="one that has ended"))
        else:
            answer.resolve(None)
        return answer


class Watch(Driver):
    """The system of a world: its clock is the last one of ``clocks``, and its functions answer for other engines."""

    def __init__(self, offers: Callable[[Source], Offers], digests: Callable[[Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self.offers = offers
        self.digests = digests
        self.clocks: list[Callable[[], float]] = [time.monotonic]

    def monotonic(self) -> float:
        return self.clocks[-1]()

    async def exchange(self, peer: str, address: str, path: str, timeout_s: float, sent: bytes | None = None) -> bytes:
        if sent is not None:
            digests = await asyncio.to_thread(self.digests, json.loads(sent))
            return json.dumps({"digests": digests}).encode()
        name, _, start = address.rpartition(":")[0].rpartition(".")
        return (await asyncio.to_thread(self.offers, source_of(name, start))).encode()


class World:
    """One decode worker that reads from prefill engines in fake memory, staged if it has a staging region."""

    def __init__(
        self,
        local: Worker,
        *engines: Sequence[Worker],
        timeout_s: float = 30.0,
        digest: Any = None,
        rates: Rates | None = None,
    ) -> None:
        self.engines = {workers[0].engine_id: workers for workers in engines}
        self.network = FakeNetwork([local, *(worker for workers in engines for worker in workers)])
        self.local = local
        self.executor = HeldExecutor(self.network, local)
        self.gone: set[str] = set()  # starts that do not answer any more
        self.sources = Sources()
        self.fetched: list[Source] = []
        self.computed = threading.Event()  # digests
        self.digested: list[DigestRequest] = []
        self.watch = Watch(self.fetch, self.fetch_digests)
        self.handshakes: list[HandshakeResult] = []
        self.connected: list[str] = []
        self.answer: Callable[[Source], object] = lambda source: None
        self.known: dict[tuple[str, int], bytes] = {}
        copier = FakeCopier(self.network.memory, local.key)
        is_staged = NAME in [region.name for region in local.regions]
        self.pipeline = Pipeline(self.executor, NAME, copier, rates) if is_staged else None
        self.reads = Reads(
            local,
            self.executor,
            LOGGER,
            connections=Connections(
                open_offer=decode,
                connect=self.connect,
                disconnect=self.disconnect,
                handshakes=Handshakes(timeout_s, report=self.handshakes.append),
            ),
            claims=cast(Claims, self.sources),
            pipeline=self.pipeline,
            digest=digest,
            system=self.watch,
        )

    def submit(self, read: Read) -> None:
        self.reads.submit(PartialRead(read.request, read))

    def fail(self, request: str, error: KVPlanError) -> None:
        self.reads.submit(PartialRead(request, None, error))

    def poll_until(self, condition: Callable[[], object]) -> list[ReadResult]:
        """The results until a condition holds."""
        results: list[ReadResult] = []

        def is_met() -> object:
            met = condition()
            results.extend([] if met else self.reads.poll())
            return met

        wait_until(is_met)
        return results

    def connect(self, offer: bytes) -> None:
        worker = decode(offer)
        if self.known.get(worker.key) != offer or worker.key in self.executor.lost:
            self.connected.append(worker.label)
            self.known[worker.key] = offer
            self.executor.lost.discard(worker.key)

    def disconnect(self, worker: Worker) -> None:
        self.connected.append(f"not {worker.label}")
        del self.known[worker.key]

    def fetch(self, source: Source) -> Offers:
        self.fetched.append(source)
        self.answer(source)
        if source.start in self.gone:
            raise KVPlanError("PEER", "reach", expected="an answer", got="none")
        workers = tuple(map(encode, self.engines[source.engine_id]))
        return Offers(source.engine_id, source.start, workers)

    def fetch_digests(self, asked: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        self.computed.wait(10)
        self.digested.append(DigestRequest.of(asked["lease"], asked["tokens"]))
        if asked["lease"] == "lease of gone":
            raise KVPlanError("MESSAGE", "check", expected="digests", got="none")
        return [{"attn": (0, 10)}]

    def read(self, request: str = "r", source: Source | None = None, **changes: Any) -> Read:
        """A request of 10 positions in blocks 7, 3, 5 of the source and 2, 8, 4 of the destination."""
        read = Read(
            request=request,
            source=source or source_of(),
            lease=f"lease of {request}",
            local={"attn": Blocks([2, 8, 4])},
            remote={"attn": Blocks([7, 3, 5])},
            tokens={"attn": (0, 10)},
        )
        return attrs.evolve(read, **changes)

    def restart(self, prefill: Sequence[Worker]) -> None:
        """Let the prefill engine start again with other workers."""
        self.engines["prefill"] = prefill
        self.gone = {"1"}
        self.network = self.executor.network = FakeNetwork([self.local, *prefill])
        if self.pipeline is not None:
            self.pipeline._copier = FakeCopier(self.network.memory, self.local.key)

    def until(self, count: int) -> dict[str, ReadResult]:
        """The next ``count`` results."""
        found: dict[str, ReadResult] = {}
        deadline = time.monotonic() + 60
        while len(found) < count:
            assert time.monotonic() < deadline, found
            for result in self.reads.poll():
                assert found.setdefault(result.request, result) is result
            time.sleep(0.001)
        return found

    def fill(self) -> None:
        """Sources hold their rank plus one everywhere, the destination zeros."""
        for workers in self.engines.values():
            for worker in workers:
                for view in worker.views:
                    self.network.memory.array(worker, view)[...] = worker.rank + 1
        for view in self.local.views:
            self.network.memory.array(self.local, view)[...] = 0

    def cache(self) -> np.ndarray:
        """The destination's first layer."""
        return self.network.memory.array(self.local, self.local.views[0])


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step posts all transfers of a read, also on a machine that does something else between two of them."""
    monkeypatch.setattr("kvplan.protocol.reads.POST_S", 3600.0)


@pytest.fixture(params=["directly", "staged"])
def one(request: pytest.FixtureRequest) -> Callable[..., World]:
    """Makes the world of one prefill engine with two workers, which is read from directly or staged."""

    def make(**options: Any) -> World:
        (local,) = engine("decode", order="NH")
        world = World(with_staging(local) if request.param == "staged" else local, engine("prefill", tp=2), **options)
        world.fill()
        return world

    return make


def test_a_request_is_read_from_every_worker_that_has_a_part(one: Callable[..., World]) -> None:
    """Heads come from both sources, into the positions of the range and no others; workers are connected once."""
    world = one()
    world.submit(world.read(tokens={"attn": (0, 10)}))
    assert world.until(1)["r"].error is None
    heads = np.moveaxis(world.cache()[[2, 8, 4]], 2, 0)  # block, kv, head, token, dim -> by head
    for head, rank in enumerate([0, 0, 1, 1]):
        tokens = np.moveaxis(heads[head], 2, 1).reshape(12, -1)
        assert (tokens[:10] == rank + 1).all()
        assert (tokens[10:] == 0).all()
    world.submit(world.read("again"))
    world.until(1)
    assert world.connected == ["prefill/0", "prefill/1"]
    assert len(world.fetched) == 1
    assert world.pipeline is None or world.pipeline.num_chunks == 2


def test_a_result_has_the_figures_of_a_read(one: Callable[..., World]) -> None:
    """What has moved, how, and when: posted first, then transferred, then known to be right."""
    world = one()
    world.submit(world.read("first"))
    world.until(1)
    seconds = itertools.count(1.0)  # each look at the clock takes one
    world.watch.clocks.append(seconds.__next__)
    world.submit(world.read())
    began = next(seconds)
    result = world.until(1)["r"]
    assert 0 < result.post_seconds < result.transfer_seconds < result.seconds <= next(seconds)
    assert result.post_seconds <= began + 1  # for a look at the clock in the step that posts the rest
    assert result.is_staged == (world.pipeline is not None)
    started = world.executor.started[len(world.executor.started) // 2 :]
    assert result.num_descriptors == sum(transfer.spec.num_descriptors for transfer in started) > 0
    assert result.num_bytes == 10 * 4 * 16 * 2
    world.submit(world.read("bad", remote={"attn": Blocks([7, 3, 99])}))
    failed = world.until(1)["bad"]
    assert (failed.num_bytes, failed.num_descriptors, failed.is_staged) == (0, 0, False)


def test_an_error_says_what_was_to_be_read(one: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    """Whatever fails, and wherever, has the request and its source in the log and in the error's details."""
    world = one()
    world.submit(world.read("bind", remote={"attn": Blocks([7, 3, 99])}))
    world.fail("refused", KVPlanError("BLOCKS", "read", expected="blocks", got="none", group="attn"))
    # an error of a plan has a source of its own: the value of the source's side
    dtypes = {"destination": "bfloat16", "source": "float8_e4m3fn"}
    world.answer = raising(KVPlanError("DTYPE", "pair", expected="an answer", got="none", **dtypes))
    world.submit(world.read("shake", source_of("other")))
    errors = {name: result.error for name, result in world.until(3).items()}
    for name, engine_id in (("bind", "prefill"), ("shake", "other")):
        error = errors[name]
        assert error is not None
        expected = {"request": name, "read_from": source_of(engine_id), "lease": f"lease of {name}"}
        assert {key: error.details[key] for key in expected} == expected
        assert f"request {name!r}: KV read from {engine_id} at {engine_id}.1:1 failed: {error}" in caplog.text
    assert errors["refused"] is not None
    assert errors["refused"].details == {"group": "attn", "request": "refused"}


def test_handshakes_are_told(one: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    """Each has one result, with the time that it took; a fault in one has its traceback in the log."""
    world = one()
    world.answer = raising(ZeroDivisionError("odd"))
    world.submit(world.read("a"))
    error = world.until(1)["a"].error
    assert error is not None
    assert error.details["read_from"] == source_of()
    assert error.details["error"] == "ZeroDivisionError"
    wait_until(lambda: "Traceback" in caplog.text)
    assert "in answer" in caplog.text
    caplog.clear()
    world.answer = raising(KVPlanError("PEER", "reach", expected="an answer", got="none"))
    world.submit(world.read("b"))
    world.until(1)
    assert "Traceback" not in caplog.text
    world.answer = lambda source: None
    for name in "cd":
        world.submit(world.read(name))
    world.until(2)
    fault, silent, right = world.handshakes
    assert (str(fault.error), fault.source, fault.plan_seconds) == (str(error), source_of(), 0.0)
    assert silent.error is not None
    assert right.error is None
    assert 0 < right.plan_seconds < right.seconds


def test_nothing_waits() -> None:
    """While an engine does not answer, submit and poll return, and another engine's request is read."""
    (local,) = engine("decode")
    world = World(local, engine("slow"), engine("prefill"))
    held = threading.Event()
    world.answer = lambda source: held.wait(60) if source.engine_id == "slow" else None
    world.submit(world.read("slow", source_of("slow")))
    world.submit(world.read("quick"))
    assert {*world.until(1)} == {"quick"}
    held.set()
    assert world.until(1)["slow"].error is None


def test_an_engine_that_never_answers_fails_its_requests(one: Callable[..., World]) -> None:
    """After the time that is given, all requests that wait for it fail, and a later one tries again."""
    world, held = one(timeout_s=0.05), threading.Event()
    world.answer = lambda source: held.wait(60)
    for name in "ab":
        world.submit(world.read(name))
    failed = world.until(2)
    assert {*failed} == {"a", "b"}
    assert "PEER: cannot shake hands with prefill" in str(failed["a"].error)
    held.set()
    world.reads._peers._handshake = attrs.evolve(world.reads._peers._handshake, timeout_s=30)
    world.submit(world.read("c"))
    assert world.until(1)["c"].error is None


def test_what_has_failed_is_not_planned(one: Callable[..., World]) -> None:
    """It waited for other plans for so long; those that come after it would wait for it, and fail too."""
    world, opened, now = one(timeout_s=30.0), list[bytes](), [0.0]
    submitted = threading.Event()
    # the request has come before the time is over
    world.answer = lambda source: submitted.wait(60)
    world.watch.clocks.append(lambda: now[0])
    work = world.watch.work

    def open_offer(offer: bytes) -> Worker:
        opened.append(offer)
        return decode(offer)

    async def work_later(function: Callable[[], Any]) -> Any:
        now[0] = 30.1
        return await work(function)

    peers: Any = world.reads._peers
    peers._connections = attrs.evolve(peers._connections, open_offer=open_offer)
    world.watch.work = work_later  # type: ignore[method-assign]
    world.submit(world.read("a"))
    submitted.set()
    assert "expected an answer within 30 s, got none" in str(world.until(1)["a"].error)
    wait_until(lambda: all(handshake.done for handshake in peers._handshakes))
    assert opened == []


def test_a_request_does_not_fail_with_an_old_handshake(one: Callable[..., World]) -> None:
    """The network has healed since: one that came when the handshake had begun shakes hands again, and once."""
    world, held = one(timeout_s=30.0), threading.Event()
    now = [0.0]
    world.watch.clocks.append(lambda: now[0])
    world.answer = lambda source: held.wait(60)
    came_at = {"first": 0.0, "at once": 0.9, "later": 29.0}
    for name, seconds in came_at.items():
        now[0] = seconds
        world.submit(world.read(name))
    now[0] = 30.1
    failed = world.until(2)
    assert {*failed} == {"first", "at once"}
    assert all(result.error is not None for result in failed.values())
    # one that finds no engine again fails
    world.submit(world.read("last"))
    now[0] = 62.0
    assert {name: result.error is not None for name, result in world.until(2).items()} == {"later": True, "last": True}
    world.submit(world.read("again"))
    now[0] = 70.0
    world.submit(world.read("right"))
    world.answer = lambda source: None
    now[0] = 92.1
    failed = world.until(2)
    assert [name for name, result in failed.items() if result.error is None] == ["right"]
    held.set()


def raising(error: Exception) -> Callable[[Source], object]:
    def answer(source: Source) -> None:
        raise error

    return answer


@pytest.mark.parametrize("error", [KVPlanError("PEER", "reach", expected="an answer", got="none"), ValueError("odd")])
def test_a_failed_handshake_is_tried_again(one: Callable[..., World], error: Exception) -> None:
    """Whatever goes wrong fails the requests that wait, with a code; the next request shakes hands again."""
    world = one()
    world.answer = raising(error)
    world.submit(world.read("a"))
    result = world.until(1)["a"]
    assert result.error is not None
    assert result.error.code == "PEER"
    world.answer = lambda source: None
    world.submit(world.read("b"))
    assert world.until(1)["b"].error is None


def test_an_engine_of_another_model_is_refused() -> None:
    """What can't be planned fails as planning refuses it."""
    (local,) = engine("decode")
    world = World(local, engine("prefill", layers=1))
    world.submit(world.read())
    error = world.until(1)["r"].error
    assert error is not None
    assert error.code == "TENSOR"


def test_a_request_that_cannot_be_bound_fails_alone(one: Callable[..., World]) -> None:
    """Blocks outside the source's pool fail one request; the next one is read."""
    world = one()
    world.submit(world.read("a", remote={"attn": Blocks([7, 3, 99])}))
    world.submit(world.read("b"))
    results = world.until(2)
    assert "BLOCKS" in str(results["a"].error)
    assert results["b"].error is None
    assert results["b"].num_bytes == 10 * 4 * 16 * 2


def test_groups_of_other_workers_are_ignored(one: Callable[..., World]) -> None:
    """A table of a group that this pipeline stage, or the source, does not have changes nothing."""
    world = one()
    other = {"of another stage": Blocks([1])}
    read = world.read()
    world.submit(
        attrs.evolve(
            read,
            local={**read.local, **other},
            remote={**read.remote, **other},
            tokens={**read.tokens, "of another stage": (0, 4)},
        )
    )
    assert world.until(1)["r"].error is None


def ticking(seconds: float) -> Callable[[], float]:
    """A clock on which this time passes between any two looks."""
    times = itertools.count()
    return lambda: next(times) * seconds


def slow_posts(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world that has met its engine, whose reads are cut into transfers of 4 ids, each of which takes a step."""
    monkeypatch.setattr("kvplan.protocol.read.MAX_TRANSFER_IDS", 4)
    monkeypatch.setattr("kvplan.protocol.reads.POST_S", POST_S)
    (local,) = engine("decode", order="NH")
    world = World(local, engine("prefill", tp=2))
    world.fill()
    world.submit(world.read("first"))
    world.until(1)
    for transfers in (world.executor.started, world.executor.released):
        transfers.clear()
    world.watch.clocks.append(ticking(2 * POST_S))
    return world


def test_what_fits_a_transfer_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its shapes; of more, each part has the largest size but the last."""
    (local,) = engine("decode", order="NH")
    (remote,) = engine("prefill")
    tables = {"attn": Blocks([1, 2])}
    (spec,) = plan_reads(local, [remote]).bind(local=tables, remote=tables, tokens={"attn": (0, 7)})
    monkeypatch.setattr("kvplan.protocol.read.MAX_TRANSFER_IDS", spec.local_ids.size)
    (whole,) = cut(spec)
    assert whole is spec
    monkeypatch.setattr("kvplan.protocol.read.MAX_TRANSFER_IDS", spec.local_ids.size - 1)
    assert [part.local_ids.size for part in cut(spec)] == [spec.local_ids.size - 1, 1]
    monkeypatch.setattr("kvplan.protocol.read.MAX_TRANSFER_IDS", spec.local_ids.size)
    monkeypatch.setattr("kvplan.protocol.read.MAX_TRANSFER_BYTES", spec.num_bytes)
    assert [*cut(spec)] == [spec]
    monkeypatch.setattr("kvplan.protocol.read.MAX_TRANSFER_BYTES", spec.num_bytes - 1)
    parts = [*cut(spec)]
    assert {part.num_bytes < spec.num_bytes for part in parts} == {True}
    assert np.concatenate([part.remote_ids for part in parts]).tolist() == spec.remote_ids.tolist()
    # what is longer than a transfer may be is one by itself
    monkeypatch.setattr("kvplan.protocol.read.MAX_TRANSFER_BYTES", 1)
    assert [part.local_ids.size for part in cut(spec)] == [1] * spec.local_ids.size


@pytest.mark.parametrize("at_once", [False, True])
def test_a_step_hands_over_some_of_a_large_read(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    """Each poll hands over one transfer more, and the request is right when the last one has ended."""
    world = slow_posts(monkeypatch)
    world.fill()
    world.executor.at_once = at_once
    # the read begins with a transfer, and each poll has one more
    world.submit(world.read())
    numbers = [len(world.executor.started)]
    while not (results := world.reads.poll()):
        numbers.append(len(world.executor.started))
    assert results[0].error is None
    assert numbers[:19] == [*range(1, 20)]
    assert set(numbers[19:]) == {20}
    assert all(1 <= transfer.spec.local_ids.size <= 4 for transfer in world.executor.started)
    assert sorted(np.unique(world.cache()[[2, 8]])) == [1, 2]
    assert results[0].post_seconds > results[0].transfer_seconds / 2


def test_reads_that_begin_in_one_step_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second read hands over its first transfer when the first one has handed over all."""
    world = slow_posts(monkeypatch)
    for name in ("a", "b"):
        world.submit(world.read(name))
    results = world.until(2)
    assert [result.error for result in results.values()] == [None, None]
    requests = [transfer.request for transfer in world.executor.started]
    assert requests == sorted(requests)


@pytest.mark.parametrize("reason", ["transfer", "lease", "start"])
def test_a_read_that_has_failed_hands_over_no_more(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Whatever it has failed for, it ends when what was handed over has ended."""

    def refuse(*_: object, **__: object) -> Transfer:
        raise KVPlanError("PEER", "start", expected="a connection", got="none")

    world = slow_posts(monkeypatch)
    world.submit(world.read())
    assert world.reads.poll() == []
    if reason == "transfer":
        world.executor.broken = {("prefill", 0), ("prefill", 1)}
    elif reason == "lease":
        world.sources.over.add("lease of r")
        world.watch.clocks.append(ticking(ASK_S))
    else:
        monkeypatch.setattr(world.executor, "start", refuse)
    (result,) = world.until(1).values()
    assert result.error is not None
    assert result.error.code == {"transfer": "TRANSFER", "lease": "LEASE", "start": "PEER"}[reason]
    assert 2 <= len(world.executor.started) < 20
    assert world.executor.released == world.executor.started


@pytest.mark.parametrize("code", ["TRANSFER", "PEER"])
def test_a_failed_request_ends_when_no_byte_can_move(one: Callable[..., World], code: str) -> None:
    """Where one transfer fails and the other runs, the request stays open; then it fails, and is released."""
    world = one()
    world.submit(world.read("first"))
    world.until(1)
    world.executor.broken, world.executor.code, world.executor.held = {("prefill", 0)}, code, True
    world.submit(world.read())
    for _ in range(20):
        assert world.reads.poll() == []
    world.executor.held = False
    result = world.until(1)["r"]
    assert result.error is not None
    assert result.error.code == code
    assert len(world.executor.released) == len(world.executor.started)
    num_handshakes = len(world.fetched)
    world.executor.broken = set()
    world.submit(world.read("next"))
    assert world.until(1)["next"].error is None
    assert len(world.fetched) == num_handshakes + 1


def test_a_lost_worker_is_connected_again(one: Callable[..., World]) -> None:
    """After a peer is lost, its worker is connected again, and the others stay as they are."""
    world = one()
    world.executor.broken, world.executor.code = {("prefill", 1)}, "PEER"
    world.submit(world.read("a"))
    world.until(1)
    world.executor.broken = set()
    world.submit(world.read("b"))
    assert world.until(1)["b"].error is None
    assert world.connected == ["prefill/0", "prefill/1", "prefill/1"]


def test_a_late_failure_forgets_the_connection_that_is_lost() -> None:
    """Of two requests that lose an engine, the second may know when it is ready again, by the connection that is lost.

    A third one shakes hands again, and does not fail for it.
    """
    (local,) = engine("decode")
    world = World(local, engine("prefill"))
    world.submit(world.read("first"))
    world.until(1)
    world.executor.code, world.executor.held = "PEER", True
    for name in ("early", "late"):
        world.submit(world.read(name))
    world.executor.failing = {"early"}
    world.until(1)
    world.submit(world.read("ready"))
    assert world.poll_until(lambda: world.reads._peers.use(source_of()).plan) == []
    world.executor.failing = {"late"}
    assert {*world.until(1)} == {"late"}
    assert world.executor.lost == {("prefill", 0)}
    world.submit(world.read("next"))
    world.executor.held = False
    assert world.until(2)["next"].error is None
    assert not world.executor.lost


def test_a_restarted_engine_takes_the_place_of_the_old_one(one: Callable[..., World]) -> None:
    """Another start of an engine is another peer: new offers, new connections, and nothing of the old ones."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    moved_to = [
        attrs.evolve(worker, regions=[attrs.evolve(r, address=r.address + (1 << 40)) for r in worker.regions])
        for worker in world.engines["prefill"]
    ]
    world.engines["prefill"] = tuple(moved_to)
    world.network.workers.update({worker.key: worker for worker in moved_to})
    world.gone = {"1"}
    world.submit(world.read("b", source_of(start="2")))
    world.until(1)
    assert world.connected == ["prefill/0", "prefill/1", "not prefill/0", "not prefill/1", "prefill/0", "prefill/1"]


def test_nobody_takes_the_name_of_an_engine_that_answers(one: Callable[..., World]) -> None:
    """A handoff of another source under the name of a live engine is refused, and the engine is read from as before."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    world.submit(world.read("forged", attrs.evolve(source_of(start="forged"), port=666)))
    error = str(world.until(1)["forged"].error)
    assert "expected an engine with a name of its own, got that of prefill at prefill.1:1, which still answers" in error
    world.submit(world.read("b"))
    assert world.until(1)["b"].error is None
    assert world.connected == ["prefill/0", "prefill/1"]


def test_a_peer_keeps_the_offers_of_workers_that_bytes_come_from() -> None:
    """With the keys to memory, offers are most of what a peer takes, and a fleet has hundreds of peers."""
    local, _ = engine("decode", tp=2)
    world = World(local, engine("prefill", tp=2))
    world.fill()
    world.submit(world.read("a"))
    assert world.until(1)["a"].error is None
    (peer,) = world.reads._peers._peers.values()
    assert peer.plan is not None
    assert ([*peer.plan.offers], peer.waiting) == ([("prefill", 0)], [])


def test_an_engine_offers_its_own_workers_alone(one: Callable[..., World]) -> None:
    """An engine that offers workers under the name of another one is refused, and the other is read from as before."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    world.engines["forged"] = world.engines["prefill"]
    world.submit(world.read("forged", source_of("forged")))
    assert "PEER: cannot shake hands with forged" in str(world.until(1)["forged"].error)
    world.submit(world.read("b"))
    assert world.until(1)["b"].error is None
    assert world.connected == ["prefill/0", "prefill/1"]


def test_of_two_starts_that_answer_the_first_is_read() -> None:
    """Two sources under one name shake hands side by side; the second asks the first, and is refused."""
    (local,) = engine("decode")
    world, held = World(local, engine("prefill")), threading.Event()
    world.answer = lambda source: held.wait(60)
    world.submit(world.read("a"))
    world.submit(world.read("b", source_of(start="2")))
    assert world.poll_until(lambda: len(world.fetched) >= 2) == []
    assert {source.start for source in world.fetched} == {"1", "2"}
    held.set()
    results = world.until(2)
    assert results["a"].error is None
    assert "which still answers" in str(results["b"].error)
    assert world.connected == ["prefill/0"]


def test_a_start_does_not_wait_for_the_handshake_with_an_earlier_one(one: Callable[..., World]) -> None:
    """Where that hangs, requests of the new start are read, and those of the earlier one fail, answer or not."""
    world, held = one(), threading.Event()
    world.answer = lambda source: held.wait(60) if [*world.fetched].count(source) == 1 and source.start == "1" else None
    world.submit(world.read("old"))
    assert world.poll_until(lambda: world.fetched) == []
    world.gone = {"1"}
    world.submit(world.read("new", source_of(start="2")))
    results = world.until(2)
    assert results["new"].error is None
    assert "expected an answer before another start of the engine is ready, got none" in str(results["old"].error)
    world.gone = set()
    held.set()
    world.submit(world.read("newer", source_of(start="2")))
    assert world.until(1)["newer"].error is None
    assert world.connected == ["prefill/0", "prefill/1"]
    assert [(result.source.start, result.error is None) for result in world.handshakes] == [("2", True), ("1", False)]


def test_a_late_answer_of_an_earlier_start_does_not_fail_the_next_one(one: Callable[..., World]) -> None:
    """It was sent before the engine died: the next start, which shakes hands meanwhile, asks whether it lives."""
    world, held, checked = one(), threading.Event(), threading.Event()
    num_asked = {"1": 0, "2": 0}

    def answer(source: Source) -> None:
        num_asked[source.start] += 1
        if (source.start, num_asked["1"]) == ("1", 1):
            held.wait(60)
        elif source.start == "1":
            checked.wait(60)
            raise KVPlanError("PEER", "reach", expected="an answer", got="none")

    world.answer = answer
    for name, start in (("old", "1"), ("new", "2")):
        world.submit(world.read(name, source_of(start=start)))
    assert world.poll_until(lambda: num_asked["1"] >= 2) == []
    held.set()
    assert world.until(1)["old"].error is None
    checked.set()
    assert world.until(1)["new"].error is None


def test_an_answer_that_comes_when_the_next_start_is_ready_is_too_late(one: Callable[..., World]) -> None:
    """The earlier start was sent for before, and does not take the place of the next one, which is read on."""
    world, held = one(), threading.Event()
    world.answer = lambda source: len(world.fetched) == 1 and held.wait(60)
    world.submit(world.read("old"))
    assert world.poll_until(lambda: world.fetched) == []
    world.gone = {"1"}
    world.submit(world.read("new", source_of(start="2")))
    old, new = (world.reads._peers.use(source_of(start=start)) for start in "12")
    world.poll_until(lambda: new.plan)
    world.gone = set()
    held.set()
    handshake = old.handshake
    assert handshake is not None
    wait_until(lambda: handshake.done)
    world.reads.poll()
    assert "expected an answer before another start of the engine is ready" in str(old.error)
    assert world.connected == ["prefill/0", "prefill/1"]


def test_earlier_starts_that_hang_leave_time_for_a_handshake(
    one: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that are gone answer nothing: to ask them all takes half of the time that the next start has."""
    world, held = one(timeout_s=2.0), threading.Event()
    world.watch.clocks.append(lambda: 0.0)
    exchange = world.watch.exchange
    waits: dict[str, list[float]] = {start: [] for start in "123"}

    async def asked(peer: str, address: str, path: str, timeout_s: float, sent: bytes | None = None) -> bytes:
        waits[address.rpartition(":")[0].rpartition(".")[2]].append(timeout_s)
        return await exchange(peer, address, path, timeout_s, sent)

    monkeypatch.setattr(world.watch, "exchange", asked)
    world.answer = lambda source: source.start != "3" and len(waits[source.start]) == 1 and held.wait(60)
    world.gone = {"1", "2"}
    for start in "12":
        world.submit(world.read(start, source_of(start=start)))
    assert world.poll_until(lambda: len(world.fetched) >= 2) == []
    world.submit(world.read("new", source_of(start="3")))
    assert world.until(3)["new"].error is None
    held.set()
    assert waits == {"1": [2.0, 0.5], "2": [2.0, 0.5], "3": [2.0]}


def test_few_handshakes_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """More engines than shake hands at a time wait for those before them."""
    monkeypatch.setattr("kvplan.protocol.peer_engines.MAX_HANDSHAKES", 2)
    (local,) = engine("decode")
    names = [f"prefill-{number}" for number in range(6)]
    world, held = World(local, *map(engine, names)), threading.Event()
    world.answer = lambda source: held.wait(60)
    for name in names:
        world.submit(world.read(name, source_of(name)))
    assert world.poll_until(lambda: len(world.fetched) >= 2) == []
    for _ in range(50):
        assert world.reads.poll() == []
    assert len(world.fetched) == 2
    held.set()
    assert all(result.error is None for result in world.until(6).values())


def test_a_rack_of_engines_that_hang_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their handshakes are under way, and the next engine's is, too."""
    (local,) = engine("decode")
    names = [f"prefill-{number}" for number in range(33)]
    world = World(local, *map(engine, names))
    exchange = world.watch.exchange

    async def hang(peer: str, address: str, *asked: Any) -> bytes:
        if not address.startswith(names[-1]):
            await asyncio.sleep(60)
        return await exchange(peer, address, *asked)

    monkeypatch.setattr(world.watch, "exchange", hang)
    for name in names:
        world.submit(world.read(name, source_of(name)))
    assert [result.error for result in world.until(1).values()] == [None]


def test_one_engine_is_planned_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshakes fetch offers side by side, but no two open or plan them at once."""
    (local,) = engine("decode")
    names = ["prefill-0", "prefill-1"]
    world, both_fetched, meeting = World(local, *map(engine, names)), threading.Barrier(2), threading.Barrier(2)
    world.answer = lambda source: both_fetched.wait(60)

    def meet(offer: bytes) -> Worker:
        # nobody else comes as long as this one is here
        with pytest.raises(threading.BrokenBarrierError):
            meeting.wait(0.2)
        return decode(offer)

    world.reads._peers._connections = attrs.evolve(world.reads._peers._connections, open_offer=meet)
    for name in names:
        world.submit(world.read(name, source_of(name)))
    assert [result.error for result in world.until(2).values()] == [None, None]


def test_an_engine_is_planned_within_a_budget() -> None:
    """All workers of an answer count together; a reader who trusts them has a larger budget."""
    (local,) = engine("decode")
    world = World(local, engine("prefill", tp=2))
    few_bytes = len(encode(engine("prefill", tp=2)[0])) * 300
    world.reads._peers._handshake = Handshakes(budget_bytes=few_bytes)
    world.submit(world.read())
    error = world.until(1)["r"].error
    assert error is not None
    assert error.code == "RANGE"
    assert error.action.startswith("open the offers of prefill")


def test_a_request_that_finds_its_connection_lost_shakes_hands_again(one: Callable[..., World]) -> None:
    """If somebody else has taken a worker's connection, the next request makes another one, and is right."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    world.executor._prepared.clear()
    world.submit(world.read("b"))
    assert world.until(1)["b"].error is None
    assert len(world.fetched) == 2


@pytest.mark.parametrize("code", ["TRANSFER", "PEER"])
def test_a_request_whose_connection_is_lost_is_read_again(one: Callable[..., World], code: str) -> None:
    """A connection that was lost while nothing was read shows it only when bytes are to move."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    world.executor.failing, world.executor.code = {"b"}, code
    world.answer = lambda source: world.executor.failing.clear()
    world.cache()[...] = 0
    world.submit(world.read("b"))
    assert world.until(1)["b"].error is None
    assert len(world.fetched) == 2
    assert np.count_nonzero(world.cache()[2]) > 0


def test_a_request_that_was_given_up_is_not_read_again(one: Callable[..., World]) -> None:
    """Its connection is lost when it has been given up: nothing of it is needed, and its blocks are free."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    world.executor.held = True
    read = world.read("b")
    world.reads.submit(PartialRead("b", read, is_last=False))
    world.reads.poll()
    world.fail("b", KVPlanError("TRANSFER", "read", expected="one that goes on", got="none"))
    world.executor.failing, world.executor.held = {"b"}, False
    error = world.until(1)["b"].error
    assert error is not None
    assert error.expected == "one that goes on"
    assert (len(world.fetched), world.reads.is_moving("b")) == (1, False)


def test_a_request_that_was_given_up_is_not_read_after_the_handshake(one: Callable[..., World]) -> None:
    world, is_answering = one(), threading.Event()
    world.answer = lambda source: is_answering.wait(10)
    world.reads.submit(PartialRead("a", world.read("a"), is_last=False))
    world.submit(world.read("b", local={"attn": Blocks([1, 3, 5])}))
    world.fail("a", KVPlanError("TRANSFER", "read", expected="one that goes on", got="none"))
    assert world.reads.is_moving("a")
    is_answering.set()
    ended = world.until(2)
    assert ended["b"].error is None
    assert ended["a"].error is not None
    assert {transfer.request for transfer in world.executor.started} == {"b"}


def test_a_request_that_was_given_up_is_late_once(one: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it loses its lease while its bytes may still move."""
    world = one()
    world.executor.held = True
    world.reads.submit(PartialRead("r", world.read(), is_last=False))
    world.poll_until(lambda: world.executor.started)
    world.fail("r", KVPlanError("TRANSFER", "read", expected="one that goes on", got="none"))
    assert [*world.reads.late()] == ["r"]
    monkeypatch.setattr("kvplan.protocol.read_jobs.ASK_S", 0.0)
    world.sources.over = {"lease of r"}
    for _ in range(3):
        assert world.reads.poll() == []
    assert (world.reads.late(), world.reads.num_held) == ({}, 1)
    world.executor.held = False
    error = world.until(1)["r"].error
    assert error is not None
    assert error.expected == "one that goes on"


def test_a_read_of_which_a_part_is_done_is_repeated_as_a_whole(one: Callable[..., World]) -> None:
    """Of several workers only one may have lost its connection."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    world.executor.broken = {("prefill", 1)}
    world.answer = lambda source: world.executor.broken.clear()
    world.submit(world.read("b"))
    assert world.until(1)["b"].error is None
    assert len(world.fetched) == 2


def test_a_read_that_has_lost_its_lease_is_not_read_again(one: Callable[..., World]) -> None:
    """Its blocks may have another request's bytes at the source."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    world.executor.held = True
    world.sources.over.add("lease of b")
    world.submit(world.read("b"))
    clock = world.watch.clocks[-1]
    world.watch.clocks.append(lambda: clock() + ASK_S)
    for _ in range(3):
        world.reads.poll()
    assert "b" in world.reads.late()
    world.executor.failing, world.executor.held = {"b"}, False
    error = world.until(1)["b"].error
    assert error is not None
    assert error.code == "LEASE"
    assert len(world.fetched) == 1


def test_a_request_has_failed_while_its_bytes_may_move(one: Callable[..., World]) -> None:
    """It is late at once, though its lease stands. The next one shakes hands again, and is read meanwhile.

    It is not read again, since its client was told, and it keeps its blocks until no byte can move.
    """
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    world.executor.copying, world.executor.code = {"b"}, "PEER"
    world.submit(world.read("b"))

    def late_reads() -> Mapping[str, KVPlanError]:
        assert world.reads.poll() == []
        return world.reads.late()

    late = wait_until(late_reads)
    assert (late["b"].code, world.reads.late()) == ("PEER", {})
    world.submit(world.read("c", local={"attn": Blocks([1, 3, 5])}))
    assert world.until(1)["c"].error is None
    assert len(world.fetched) == 2
    assert not world.executor.released[-1].error
    world.executor.copying.clear()
    world.executor.failing = {"b"}
    ended = world.until(1)["b"]
    assert ended.error is not None
    assert ended.error.code == "PEER"
    assert len(world.fetched) == 2


def test_a_request_shakes_hands_again_only_once(one: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is lost as soon as it is connected is not asked for ever: the request fails."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)

    def start(*_: object, **__: object) -> NoReturn:
        raise KVPlanError("PEER", "start", expected="a connected worker", got="none")

    monkeypatch.setattr(world.executor, "start", start)
    world.submit(world.read("b"))
    error = world.until(1)["b"].error
    assert error is not None
    assert error.code == "PEER"
    assert len(world.fetched) == 2


def test_only_workers_with_a_part_are_connected() -> None:
    """A worker whose heads are all on one source connects to that source alone."""
    _, local = engine("decode", tp=2)
    world = World(local, engine("prefill", tp=2))
    world.submit(world.read())
    assert world.until(1)["r"].error is None
    assert world.connected == ["prefill/1"]


def test_a_restart_with_fewer_workers(one: Callable[..., World]) -> None:
    """An engine that restarts with one worker in place of two leaves no connection to the second behind."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    world.restart(engine("prefill", tp=1))
    world.submit(world.read("b", source_of(start="2")))
    assert world.until(1)["b"].error is None
    assert world.connected[2:] == ["not prefill/0", "not prefill/1", "prefill/0"]


def test_a_restart_with_fewer_workers_of_an_engine_that_was_lost(one: Callable[..., World]) -> None:
    """What was read from it last has failed, so that it was forgotten, and its connections were not."""
    world = one()
    world.submit(world.read("a"))
    world.until(1)
    world.executor.failing = {"b"}
    world.submit(world.read("b"))
    assert world.until(1)["b"].error is not None
    world.restart(engine("prefill", tp=1))
    world.submit(world.read("c", source_of(start="2")))
    assert world.until(1)["c"].error is None
    assert world.connected[-3:] == ["not prefill/0", "not prefill/1", "prefill/0"]
    assert [*world.known] == [("prefill", 0)]


def test_an_engine_that_is_not_read_from_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was not read from for an hour is disconnected when another one comes, and can come again."""
    (local,) = engine("decode")
    world = World(local, engine("prefill"), engine("other"))
    world.submit(world.read("a"))
    world.until(1)
    monkeypatch.setattr("kvplan.protocol.peer_engines.MAX_AGE_S", -1.0)
    world.submit(world.read("b", source_of("other")))
    world.until(1)
    monkeypatch.undo()
    assert world.connected == ["prefill/0", "not prefill/0", "other/0"]
    world.submit(world.read("c"))
    assert world.until(1)["c"].error is None
    assert world.connected == ["prefill/0", "not prefill/0", "other/0", "prefill/0"]


def test_a_request_of_an_earlier_start_fails_alone(one: Callable[..., World]) -> None:
    """A handoff that comes late, of an engine that has restarted, fails; requests of the new start are read."""
    world = one()
    gone = KVPlanError("PEER", "shake hands", expected="start 1", got="start 2")
    world.answer = lambda source: raising(gone)(source) if source.start == "1" else None
    for name, start in (("new", "2"), ("old", "1"), ("newer", "2")):
        world.submit(world.read(name, source_of(start=start)))
    results = world.until(3)
    assert [name for name, result in results.items() if result.error] == ["old"]
    assert [source.start for source in world.fetched].count("2") == 1


def test_a_request_whose_lease_is_over_has_failed(one: Callable[..., World]) -> None:
    """What arrived may be another request's bytes, however well the transfer went: the source is asked afterwards."""
    world = one()
    world.sources.over = {"lease of r"}
    world.submit(world.read())
    assert "LEASE: cannot read: expected a valid lease" in str(world.until(1)["r"].error)
    assert world.sources.asked == ["lease of r"]


def test_the_source_is_asked_after_the_last_byte(one: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer from before the last byte says nothing about what came after it."""
    world = one()
    world.submit(world.read("first"))
    world.until(1)
    world.sources.asked.clear()
    monkeypatch.setattr("kvplan.protocol.read_jobs.ASK_S", 0.0)
    world.executor.held = True
    world.submit(world.read())
    for _ in range(5):
        assert world.reads.poll() == []
    assert len(world.sources.asked) >= 4
    world.sources.over = {"lease of r"}
    monkeypatch.setattr("kvplan.protocol.read_jobs.ASK_S", 1000.0)
    world.reads.poll()
    assert world.reads.late() == {} or world.reads.poll() == []
    world.executor.held = False
    assert "LEASE" in str(world.until(1)["r"].error)


def test_a_request_that_loses_its_lease_is_late(one: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is late once, as soon as it has failed, and reported when no byte of it can move. Others go on."""
    world = one()
    world.submit(world.read("first"))
    world.until(1)
    world.executor.held = True
    world.submit(world.read("hangs"))
    world.submit(world.read("waits"))
    assert (world.reads.poll(), world.reads.late()) == ([], {})
    monkeypatch.setattr("kvplan.protocol.read_jobs.ASK_S", 0.0)
    world.sources.over = {"lease of hangs"}
    for _ in range(3):
        assert world.reads.poll() == []
    assert ([*world.reads.late()], world.reads.late()) == (["hangs"], {})
    world.executor.held = False
    ended = world.until(2)
    assert "LEASE" in str(ended["hangs"].error)
    assert ended["waits"].error is None


def test_a_silent_source_is_asked_again(one: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is no refusal: the request waits for one, and is right when it comes."""
    world = one()
    monkeypatch.setattr("kvplan.protocol.read_jobs.RETRY_S", 0.0)
    world.sources.silent = True
    world.submit(world.read())
    assert world.poll_until(lambda: len(world.sources.asked) >= 3) == []
    world.sources.silent = False
    assert world.until(1)["r"].error is None


def test_a_step_continues_what_has_changed(one: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a read to which nothing has happened since the last step, its transfers are looked at, and nothing else."""
    world = one()
    world.submit(world.read("first"))
    world.until(1)
    now = time.monotonic()
    world.watch.clocks.append(lambda: now)
    world.executor.held = True
    for number in range(5):
        world.submit(world.read(f"r{number}"))
    continued: list[str] = []
    poll_job = world.reads._poll_job

    def counted(job: Any) -> None:
        continued.append(job.read.request)
        poll_job(job)

    monkeypatch.setattr(world.reads, "_poll_job", counted)
    for _ in range(3):
        assert world.reads.poll() == []
    assert sorted(continued) == [f"r{number}" for number in range(5)]
    continued.clear()
    for _ in range(3):
        assert world.reads.poll() == []
    assert continued == []
    world.executor.copying, world.executor.held = {"r3"}, False
    assert {*world.until(4)} == {"r0", "r1", "r2", "r4"}
    assert [*world.reads.late()] == ["r3"]
    world.executor.copying = set()
    assert {*world.until(1)} == {"r3"}


def test_an_answer_to_a_question_before_the_last_byte_confirms_nothing(one: Callable[..., World]) -> None:
    """The source may have given the blocks to another request between the question and the byte."""
    world = one()
    answers: list[Pending[None]] = []

    def ask(source: Source, lease: str) -> Pending[None]:
        answers.append(Pending[None]())
        return answers[-1]

    claims = cast(Claims, SimpleNamespace(ask=ask))
    check = LeaseCheck(world.read(), claims, LOGGER, world.watch, asked_at=-ASK_S, confirmed_at=0.0)
    check.poll()
    check.begin_last()
    answers[0].resolve(None)
    check.poll()
    assert (check.is_confirmed, len(answers)) == (False, 2)
    answers[1].resolve(None)
    check.poll()
    assert check.is_confirmed


def test_silence_counts_from_the_last_answer(one: Callable[..., World]) -> None:
    """A source that was heard of a while ago is not gone as soon as one question has no answer."""
    world, now = one(), [0.0]
    world.watch.clocks.append(lambda: now[0])
    world.submit(world.read("first"))
    world.until(1)
    world.executor.held = True
    world.submit(world.read())
    for now[0] in (0.0, 6.0, 12.0, 18.0):
        world.reads.poll()
    world.sources.silent = True
    for now[0] in (24.0, 30.0, 36.0, 42.0):
        world.reads.poll()
        assert world.reads.late() == {}
    for now[0] in (48.0, 54.0):
        world.reads.poll()
    assert world.reads.num_held == 0
    assert [*world.reads.late()] == ["r"]
    assert world.reads.num_held == 1
    world.executor.held = False
    assert world.until(1)["r"].error is not None


@pytest.mark.parametrize("held", [False, True])
def test_a_source_that_stays_silent_is_gone(
    one: Callable[..., World], monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """After a while its requests fail, also those whose bytes have all come; where bytes may move, they are late."""
    world = one()
    world.submit(world.read("first"))
    world.until(1)
    world.executor.held = held
    world.sources.silent = True
    world.submit(world.read())
    world.reads.poll()
    later = time.monotonic() + 100
    world.watch.clocks.append(lambda: later)
    if held:
        for _ in range(3):
            assert world.reads.poll() == []
        late = world.reads.late()
        assert [*late] == ["r"]
        # operators see which engine it was
        assert late["r"].details["read_from"] == source_of("prefill")
        world.executor.held = False
    monkeypatch.setattr("kvplan.protocol.read_jobs.RETRY_S", 0.0)
    assert "PEER: cannot reach" in str(world.until(1)["r"].error)


def test_a_range_of_which_no_digest_can_be_asked_fails_its_request() -> None:
    """With ``digest``, a request whose range cannot be asked for fails, before and after the handshake."""
    (local,) = engine("decode")
    world = World(local, engine("prefill", tp=2), digest=lambda arrived: arrived["tokens"])
    world.computed.set()
    for request in ("before", "after"):
        world.submit(world.read(request, tokens={"attn": (0, 1 << 60)}))
        assert "RANGE: cannot" in str(world.until(1)[request].error)


def test_an_engine_that_gives_no_digests_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few digests are fetched at a time from one engine; those of requests of other engines do not wait for them."""
    monkeypatch.setattr("kvplan.protocol.reads.MAX_FETCHES", 1)
    monkeypatch.setattr("kvplan.protocol.reads.mismatch", lambda *given: None)
    (local,) = engine("decode")
    world = World(local, engine("silent"), engine("prefill"), digest=lambda arrived: {})
    held = threading.Event()

    def answer(asked: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if asked["lease"] == "lease of quick":
            return [{}]
        held.wait(60)
        return [{}]

    world.watch.digests = answer
    for name in "ab":
        world.submit(world.read(name, source_of("silent")))
    world.submit(world.read("quick"))
    assert {*world.until(1)} == {"quick"}
    held.set()
    assert {*world.until(2)} == {"a", "b"}
    # of engines of which nothing is fetched, nothing is kept
    wait_until(lambda: not world.reads._fetches)


def test_what_has_arrived_is_compared(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With ``digest``, a request is right when what has arrived is what the source has; the range ends where asked."""
    (local,) = engine("decode")
    world = World(local, engine("prefill", tp=2), digest=lambda arrived: arrived["tokens"])

    def compare(expected: Any, actual: Any) -> KVPlanError | None:
        return (
            None
            if expected == [{"attn": [*actual[0]["attn"]]}]
            else KVPlanError("TRANSFER", "use", expected="equal digests", got="others")
        )

    monkeypatch.setattr("kvplan.protocol.reads.mismatch", compare)
    world.submit(world.read(to_block_end=True))
    for _ in range(50):
        assert world.reads.poll() == []
    world.computed.set()
    assert world.until(1)["r"].error is None
    assert [(request.lease, request.tokens) for request in world.digested] == [("lease of r", (("attn", (0, 10)),))]
    world.submit(world.read("spoilt", tokens={"attn": (0, 9)}))
    assert "expected equal digests, got others" in str(world.until(1)["spoilt"].error)
    monkeypatch.setattr("kvplan.protocol.reads.mismatch", lambda *_: KVPlanError("COVER", "", expected="", got=""))
    world.submit(world.read("elsewhere"))
    assert world.until(1)["elsewhere"].error is None
    assert "request 'elsewhere': digests are not compared: COVER" in caplog.text
    world.submit(world.read("gone"))
    assert "MESSAGE: cannot check" in str(world.until(1)["gone"].error)


@pytest.mark.parametrize(("ours", "theirs"), [(4, 4), (8, 4), (4, 8), (6, 4)])
def test_a_last_block_moves_whole_where_it_may(ours: int, theirs: int) -> None:
    """Up to where a block of either side ends, it takes as few ids as a range that ends there."""
    (local,) = engine("decode", tokens=ours)
    world = World(local, engine("prefill", tokens=theirs))
    end = min(-(-10 // size) * size for size in (ours, theirs))
    for stop, to_block_end in ((10, True), (end, False), (10, False)):
        world.submit(world.read(tokens={"attn": (0, stop)}, to_block_end=to_block_end))
        assert world.until(1)["r"].error is None
    whole, same, exact = (transfer.spec.local_ids.size for transfer in world.executor.released)
    assert whole == same < exact


def two_engines() -> World:
    """A destination that reads from two engines through one staging region, whose buffers differ."""
    (local,) = engine("decode", order="NH")
    world = World(with_staging(local), engine("prefill", tp=2), engine("other", tp=4))
    world.fill()
    return world


def test_engines_share_a_staging_region() -> None:
    """Requests of both are staged, and each block has the bytes of its engine."""
    world = two_engines()
    assert world.pipeline is not None
    for number, name in enumerate(("prefill", "other") * 2):
        local = {"attn": Blocks([number])}
        world.submit(world.read(f"{number}", source_of(name), local=local, tokens={"attn": (0, 4)}))
    ended = world.until(4)
    assert {result.error for result in ended.values()} == {None}
    assert {result.num_bytes for result in ended.values()} == {4 * 4 * 16 * 2}
    assert world.pipeline.num_chunks == 4
    by_head = np.moveaxis(world.cache()[:4], 2, 0)  # block, kv, head, token, dim -> by head
    for head, ranks in enumerate([(0, 0), (0, 1), (1, 2), (1, 3)]):
        for number in range(4):
            assert (by_head[head, number] == ranks[number % 2] + 1).all()


def test_a_staged_read_that_has_lost_its_lease_begins_no_further_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way lands; the rest of the read would only keep its blocks and the region longer."""
    (local,) = engine("decode", order="HN")
    rates = Rates("here", 0.0, 1e-3, 0.0, 0.0, 0.0)
    world = World(with_staging(local, 1 << 10), engine("prefill", order="NH"), rates=rates)
    assert world.pipeline is not None
    world.executor.held = True
    world.submit(world.read())
    assert world.poll_until(lambda: world.executor.started) == []
    num_chunks = world.pipeline.num_chunks
    world.sources.over = {"lease of r"}
    monkeypatch.setattr("kvplan.protocol.read_jobs.ASK_S", 0.0)
    for _ in range(3):
        assert world.reads.poll() == []
    assert world.reads.late().keys() == {"r"}
    world.executor.held = False
    assert "LEASE" in str(world.until(1)["r"].error)
    assert world.pipeline.num_chunks == num_chunks


def test_what_hangs_in_the_staging_region_holds_up_no_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine's requests are read directly; when the region is free again, they are staged."""
    world = two_engines()
    assert world.pipeline is not None
    for name in ("prefill", "other"):
        world.submit(world.read(name, source_of(name)))
        world.until(1)
    world.executor.silent = {"prefill"}
    world.submit(world.read("hangs"))
    world.submit(world.read("other", source_of("other"), local={"attn": Blocks([1, 3, 6])}))
    for _ in range(20):
        assert world.reads.poll() == []
    monkeypatch.setattr("kvplan.protocol.reads.STALL_S", 0.01)
    assert world.until(1)["other"].error is None
    assert (np.moveaxis(world.cache()[[1, 3]], 2, 0).reshape(4, -1) == np.arange(1, 5)[:, None]).all()
    world.sources.over = {"lease of expired"}
    world.submit(world.read("expired", source_of("other")))
    assert "LEASE" in str(world.until(1)["expired"].error)
    assert world.pipeline.num_chunks == 3
    world.executor.silent = set()
    assert world.until(1)["hangs"].error is None
    world.submit(world.read("staged", source_of("other")))
    assert world.until(1)["staged"].error is None
    assert world.pipeline.num_chunks == 4


def test_a_direct_plan_is_taken_where_it_is_faster() -> None:
    """Engines of one layout leave the staging region alone, and so do plans too large to count."""
    (local,) = engine("decode")
    world = World(with_staging(local), engine("prefill"))
    world.submit(world.read())
    assert world.until(1)["r"].error is None
    assert world.pipeline is not None
    assert world.pipeline.num_chunks == 0


def test_a_staging_region_that_is_too_small_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Operators learn what direct reads cost, and how large the region would have to be."""
    (local,) = engine("decode", order="HN")
    caplog.set_level("INFO")
    for size, is_told in [(1, True), (1 << 20, False)]:
        caplog.clear()
        rates = Rates("here", 0.0, 1e-3, 0.0, 0.0, 0.0)
        world = World(with_staging(local, size), engine("prefill", order="NH"), rates=rates)
        world.submit(world.read())
        assert world.until(1)["r"].error is None
        assert ("is not staged: direct: " in caplog.text) == is_told
        assert ("expected a staging region of at least" in caplog.text) == is_told


def test_what_is_read_beyond_need_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Operators learn that whole blocks bring heads of other ranks, of which another layout would bring none."""
    caplog.set_level("INFO")
    rates = Rates("here", 0.0, 1e-3, 0.0, 0.0, 0.0)
    for tp, told in [(1, ""), (2, "2"), (4, "4")]:
        caplog.clear()
        world = World(with_staging(engine("decode", tp=tp, order="NH")[0]), engine("prefill", order="NH"), rates=rates)
        world.submit(world.read())
        assert world.until(1)["r"].error is None
        assert ("is read in whole blocks" in caplog.text) == bool(told)
        assert not told or f"is read in whole blocks, {told} bytes for each byte needed" in caplog.text


@pytest.mark.parametrize(("copy_s", "num_chunks"), [(0.0, 1), (9.0, 0)])
def test_measured_rates_decide_what_is_staged(copy_s: float, num_chunks: int) -> None:
    """Where a copy takes long, the same engines are read directly."""
    (local,) = engine("decode", order="HN")
    rates = Rates("here", 0.0, 1e-3, 0.0, copy_s, 0.0)
    world = World(with_staging(local), engine("prefill", order="NH"), rates=rates)
    world.submit(world.read())
    assert world.until(1)["r"].error is None
    assert world.pipeline is not None
    assert world.pipeline.num_chunks == num_chunks


@pytest.mark.parametrize(("code", "expected"), [("RANGE", None), ("LAYOUT", "LAYOUT")])
def test_a_plan_that_is_too_large_to_compare(monkeypatch: pytest.MonkeyPatch, code: str, expected: str | None) -> None:
    """It is read directly. Other errors fail the request."""

    def refuse(*_: Any, **__: Any) -> None:
        raise KVPlanError(code, "choose", expected="less", got="more")

    monkeypatch.setattr("kvplan.protocol.peer_engines.choice_of", refuse)
    world = two_engines()
    world.submit(world.read())
    error = world.until(1)["r"].error
    assert (None if error is None else error.code) == expected


def test_a_request_whose_transfers_were_cancelled_has_failed(one: Callable[..., World]) -> None:
    """As by an executor that is closed, or an engine that is disconnected: bytes may be missing."""
    world = one()
    world.submit(world.read("first"))
    world.until(1)
    world.executor.held = True
    world.submit(world.read())
    assert world.reads.poll() == []
    for transfer in world.executor.started[-2:]:
        transfer.status = Status.CANCELLED
    assert "expected all its bytes, got a cancelled transfer" in str(world.until(1)["r"].error)


def test_a_connection_is_lost_by_a_transfer_that_fails_without_an_error(one: Callable[..., World]) -> None:
    """An executor has to say why; where it does not, the next request still makes another connection."""
    world = one()
    world.executor.held = True
    world.submit(world.read())
    assert world.poll_until(lambda: len(world.executor.started) >= 2) == []
    for transfer in world.executor.started:
        transfer.status = Status.FAILED
    assert "expected all its bytes, got a failed transfer" in str(world.until(1)["r"].error)
    world.executor.held = False
    world.submit(world.read("next"))
    assert world.until(1)["next"].error is None
    assert len(world.fetched) == 2


def test_a_request_that_was_refused_is_reported(one: Callable[..., World]) -> None:
    """A request that can't be read, for a reason of the caller, is reported like any other."""
    world = one()
    world.fail("r", KVPlanError("TOKENS", "read", expected="10", got="9"))
    assert world.until(1)["r"].error is not None


@settings(max_examples=40)
@given(
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)]),
    st.sampled_from([4, 6, 8]),
    st.sampled_from([4, 6, 8]),
    st.integers(0, 20),
    st.integers(1, 20),
    st.one_of(st.none(), st.integers(1, 12)),
    st.booleans(),
    st.booleans(),
)
def test_exactly_the_positions_of_the_range_arrive(
    tps: tuple[int, int],
    ours: int,
    theirs: int,
    start: int,
    length: int,
    window: int | None,
    to_block_end: bool,
    staged: bool,
) -> None:
    """For unequal TP, blocks and windows with null blocks on both sides, each position that moves has its own value.

    Other positions of the request stay zero, and so do those of its last block, unless they may be written.
    """
    stop = start + length
    sources, locals_ = (
        engine("prefill", tp=tps[0], tokens=theirs, blocks=12),
        engine("decode", tps[1], tokens=ours, blocks=12, order="NH"),
    )
    low = start if window is None else min(max(start, stop - window + 1), stop)
    tables = {side: [*range(11, 11 - -(-stop // side), -1)] for side in {ours, theirs}}
    gone = {side: [block if (i + 1) * side > low else 0 for i, block in enumerate(ids)] for side, ids in tables.items()}
    for local in locals_:
        world = World(with_staging(local) if staged else local, sources)
        for worker in sources:
            for view in worker.views:
                memory = world.network.memory.array(worker, view)
                for position in range(stop):
                    memory[tables[theirs][position // theirs], :, :, position % theirs] = position + 1
        for view in local.views:
            world.network.memory.array(world.local, view)[...] = 0
        read = world.read(
            local={"attn": Blocks(gone[ours], null=0)},
            remote={"attn": Blocks(gone[theirs], null=0)},
            tokens={"attn": (low, stop)},
            to_block_end=to_block_end,
        )
        world.submit(read)
        assert world.until(1)["r"].error is None
        for view in local.views:
            memory = world.network.memory.array(world.local, view)
            for position in range(stop if to_block_end else -(-stop // ours) * ours):
                expected = position + 1 if low <= position < stop else 0
                assert (memory[tables[ours][position // ours], :, :, position % ours] == expected).all()


def test_work_in_the_background_comes_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """At most so many at a time; an error is its own work's, and its traceback is in the log."""
    begun, held = list[int](), threading.Event()
    background = Background("test", 2, Driver())

    def run(number: int) -> float:
        begun.append(number)
        held.wait(10)
        return 6 / number

    results = [background.submit(unblocked(partial(run, number))) for number in (3, 2, 0, 1)]
    wait_until(lambda: len(begun) >= 2)
    assert sorted(begun) == [2, 3]
    held.set()
    error = error_of(results[2])
    assert error is not None
    assert error.details["error"] == "ZeroDivisionError"
    assert [waited(results[index]) for index in (0, 1, 3)] == [2, 3, 6]
    assert sorted(begun[2:]) == [0, 1]
    wait_until(lambda: "ZeroDivisionError: division by zero\ncannot test" in caplog.text)
    assert waited(background.submit(unblocked(partial(run, 6)))) == 1
