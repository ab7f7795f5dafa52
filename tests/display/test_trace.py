"""Traces: executors that note what they do keep the contract, and the file says what happened, and when."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvplan import Blocks, KVPlanError, Notice, Region, Status, Transfer, Worker, plan_reads
from kvplan.display import Trace
from kvplan.executor import Executor
from kvplan.staging import Copy
from kvplan.testing import FakeNetwork
from kvplan.testing.executors import ExecutorContract
from tests.small import engine


class FakeCluster:
    """Workers of a fake network, whose executors are traced."""

    def __init__(self, workers: Sequence[Worker], network: FakeNetwork, trace: Trace) -> None:
        self.workers = workers
        self.executors = {worker.key: trace.executor(worker, network.executor(worker)) for worker in workers}
        self.memory = network.memory

    def read(self, worker: Worker, region: Region) -> Any:
        return self.memory.read(worker, region.address, region.size_bytes, region.device_id)

    def write(self, worker: Worker, region: Region, values: Any) -> None:
        self.memory.write(worker, region.address, values, region.device_id)


class TestTracedExecutor(ExecutorContract):
    """A traced executor is an executor like any other one."""

    @contextmanager
    def open_cluster(self, workers: Sequence[Worker]) -> Iterator[FakeCluster]:
        trace = Trace(itertools.count().__next__)
        network = FakeNetwork(workers)
        with network.memory:
            yield FakeCluster(workers, network, trace)
        # a transfer has a status, and one that was refused an error alone
        assert all({"status", "error"} & row["args"].keys() for row in moved(check(trace)))


def check(trace: Trace) -> list[dict[str, Any]]:
    """The rows of a trace, which viewers can draw: on a thread, an event is in another one or beside it."""
    rows: list[dict[str, Any]] = json.loads(json.dumps(trace.to_json()))["traceEvents"]
    names = [(row["pid"], row["tid"]) for row in rows if row["name"] == "thread_name"]
    assert len(names) == len({*names})
    ends: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        assert row["ph"] in ("M", "X", "i")
        if row["ph"] != "M":
            assert row["ts"] >= 0
            stack = ends.setdefault((row["pid"], row["tid"]), [])
            while stack and stack[-1] <= row["ts"]:
                stack.pop()
            end = row["ts"] + row.get("dur", 0)
            assert not stack or end <= stack[-1]
            stack.append(end)
    assert {*ends} <= {*names}
    return rows


def moved(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "descriptors" in row.get("args", {})]


class Scripted:
    """An executor whose transfers settle when a test says so."""

    def __init__(self) -> None:
        self.worker = "an attribute of its own"
        self.error: KVPlanError | None = None
        self.inbox: tuple[Notice, ...] = ()

    def prepare(self, plan: Any) -> None:
        if self.error is not None:
            raise self.error

    def start(self, spec: Any, request: str, *, attempt: int = 0, notify: bool = True) -> Transfer:
        if self.error is not None:
            raise self.error
        return Transfer(spec, request, notifies=notify, attempt=attempt)

    def poll(self, transfer: Transfer) -> Status:
        return transfer.status

    def cancel(self, transfer: Transfer) -> None:
        transfer.status = Status.CANCELLED

    def release(self, transfer: Transfer) -> None: ...

    def notify(self, worker: Any, request: str, status: Status, *, attempt: int = 0) -> None: ...

    def notices(self) -> tuple[Notice, ...]:
        return self.inbox

    def begin(self, copies: Sequence[Copy]) -> Any:
        if self.error is not None:
            raise self.error
        return "ticket"

    def done(self, ticket: Any) -> bool:
        assert ticket == "ticket"
        if self.error is not None:
            raise self.error
        return True


ERROR = KVPlanError("PEER", "move", expected="a peer", got="none")
(LOCAL,) = engine("decode", tokens=6)
(REMOTE,) = engine("prefill")
PLAN = plan_reads(LOCAL, [REMOTE])


def traced() -> tuple[Trace, Scripted, Any]:
    trace, scripted = Trace(itertools.count().__next__), Scripted()
    executor: Executor = scripted
    return trace, scripted, trace.executor(LOCAL, executor)


def spec() -> Any:
    (only,) = PLAN.bind(local={"attn": Blocks([0])}, remote={"attn": Blocks([0, 1])}, tokens=(0, 6))
    return only


def test_what_overlaps_has_threads_of_its_own() -> None:
    """Two transfers with one worker at a time are two threads, a later one takes the first that is free."""
    trace, _, executor = traced()
    transfers = [executor.start(spec(), f"request {number}") for number in (1, 2)]
    for transfer in transfers:
        transfer.status = Status.DONE
        executor.poll(transfer)
    transfers.append(executor.start(spec(), "request 3"))
    rows = check(trace)
    threads = {row["name"]: row["tid"] for row in moved(rows)}
    assert threads == {"request 1": 1, "request 2": 2, "request 3": 1}
    assert [row["args"]["status"] for row in moved(rows)] == ["done", "running", "done"]
    (size,) = {row["args"]["bytes"] for row in moved(rows)}
    assert size == spec().num_bytes > 0
    names = [row["args"]["name"] for row in rows if row["ph"] == "M"]
    assert names == ["decode/0", "reads from prefill/0", "reads from prefill/0"]


def test_times_are_microseconds_since_the_first_event() -> None:
    """An event begins before its call, and ends with the poll that finds it settled."""
    times = iter([5.0, 5.5, 7.0])
    trace = Trace(lambda: next(times))
    executor = trace.executor(LOCAL, Scripted())
    transfer = executor.start(spec(), "request")
    transfer.status = Status.DONE
    executor.poll(transfer)
    executor.poll(transfer)  # looks at no clock: the event has ended
    whole, call = [row for row in check(trace) if row["ph"] == "X"]
    assert (whole["ts"], whole["dur"]) == (0, 2_000_000)
    assert (call["name"], call["ts"], call["dur"]) == ("call", 0, 500_000)


def test_errors_are_told() -> None:
    """A call that raises ends its event with the error, and raises it still."""
    trace, scripted, executor = traced()
    copier = trace.copier(LOCAL, scripted)
    ticket = copier.begin([])
    transfer = executor.start(spec(), "request 1")
    transfer.status, transfer.error = Status.FAILED, ERROR
    executor.poll(transfer)
    scripted.error = ERROR
    for call in (
        lambda: executor.prepare(PLAN),
        lambda: executor.start(spec(), "request 2"),
        lambda: copier.begin([]),
        lambda: copier.done(ticket),
    ):
        with pytest.raises(KVPlanError, match=r"^PEER"):
            call()
    assert [row["args"].get("error") for row in check(trace) if row["name"].startswith("re")] == [str(ERROR)] * 2
    assert [row["args"].get("error") for row in check(trace) if row["name"] == "copy"] == [str(ERROR)] * 2


def test_what_takes_no_time_is_an_instant() -> None:
    """Notices that come, those that give a request up, and cancellations."""
    trace, scripted, executor = traced()
    scripted.inbox = (Notice("prefill", 3, "request 1", 2),)
    assert executor.notices() == scripted.inbox
    executor.cancel(executor.start(spec(), "request 1"))
    executor.notify(("prefill", 3), "request 1", Status.FAILED)
    instants = [(row["name"], row["args"]) for row in check(trace) if row["ph"] == "i"]
    assert instants == [
        ("request 1 done", {"by": "prefill/3", "attempt": 2}),
        ("cancel request 1", {}),
        ("request 1 failed", {"to": "prefill/3"}),
    ]


def test_copies_end_when_they_are_done() -> None:
    """Once, however often the caller asks."""
    trace, scripted, _ = traced()
    copier = trace.copier(LOCAL, scripted)
    ticket = copier.begin([])
    assert copier.done(ticket)
    assert copier.done(ticket)
    copy, call = [row for row in check(trace) if row["ph"] == "X"]
    assert (copy["name"], copy["dur"], copy["args"]) == ("copy", 2_000_000, {"bytes": 0, "copies": 0})
    assert call["dur"] == 1_000_000


def test_other_attributes_are_those_of_the_executor() -> None:
    """Such as those that a library's executor has beside the protocol."""
    _, scripted, executor = traced()
    assert executor.worker == scripted.worker
    with pytest.raises(AttributeError, match="nothing"):
        _ = executor.nothing


def test_an_empty_trace_is_one() -> None:
    """It has no events."""
    assert Trace(itertools.count().__next__).to_json() == {"displayTimeUnit": "ms", "traceEvents": []}


@pytest.mark.parametrize("make", [lambda trace: trace.executor(LOCAL, 5), lambda trace: trace.copier(LOCAL, 5)])
def test_wrong_types(make: Any) -> None:
    """Each argument is checked when a trace takes it."""
    with pytest.raises(KVPlanError, match=r"^TYPE"):
        make(Trace(itertools.count().__next__))
    with pytest.raises(KVPlanError, match=r"^TYPE"):
        Trace(5)  # type: ignore[arg-type]


def test_a_trace_is_saved(tmp_path: Path) -> None:
    """As JSON; a path that cannot be written is refused."""
    trace, _, executor = traced()
    executor.prepare(PLAN)
    trace.save(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace.to_json()
    with pytest.raises(KVPlanError, match=r"^NAME: cannot save a trace: expected a path that can be written to"):
        trace.save(tmp_path)
