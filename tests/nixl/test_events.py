"""Events: one for each settled transfer, in the log, and none where that is above DEBUG."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from benchmarks.real_memory import placed
from kvplan import Blocks, KVPlanError, Model, Status, Transfer, Workspace, plan_reads
from kvplan_nixl import NixlExecutor, TransferEvent, settle
from kvplan_nixl.events import LOGGER, Watch
from tests.small import engine

TIMEOUT_S = 60.0


class Reader:
    """A worker that reads from other workers of this process."""

    def __init__(self, tp: int = 1) -> None:
        self.sources = [placed(worker)[0] for worker in engine("prefill", tp=tp)]
        self.local, self.memory = placed(engine("decode", tokens=6, tp=2 if tp == 2 else 1)[0])
        self.executor = NixlExecutor(self.local)
        for source in self.sources:
            self.executor.attach(source)
        self.plan = plan_reads(self.local, self.sources)
        self.executor.prepare(self.plan)

    def start(self, request: str = "request", tokens: tuple[int, int] = (0, 6)) -> Transfer:
        """Start to read from the last of the sources."""
        near, far = {"attn": Blocks([1])}, {"attn": Blocks([2, 3])}
        return self.executor.start(self.plan.bind(local=near, remote=far, tokens=tokens)[-1], request)

    def read(self, request: str = "request", tokens: tuple[int, int] = (0, 6)) -> Transfer:
        """Read to the end."""
        transfer = self.start(request, tokens)
        assert settle(self.executor, [transfer], TIMEOUT_S)
        return transfer


class Events(logging.Handler):
    """A handler, and the list of events that it has got."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[TransferEvent] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(vars(record)["event"])


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Iterator[list[TransferEvent]]:
    """The events of a test, whose log is at DEBUG."""
    caplog.set_level(logging.DEBUG, "kvplan_nixl")
    handler = Events()
    LOGGER.addHandler(handler)
    yield handler.events
    LOGGER.removeHandler(handler)


@pytest.fixture
def reader() -> Iterator[Reader]:
    """A reader of one source."""
    reader = Reader()
    with reader.executor:
        yield reader


def refuse(*_: object) -> bool:
    raise KVPlanError("TRANSFER", "begin a transfer", expected="success", got="none")


def untimed(event: TransferEvent) -> TransferEvent:
    return attrs.evolve(event, make_us=0.0, post_us=0.0, transfer_us=0.0)


READ = TransferEvent(
    request="request",
    operation="READ",
    local=("decode", 0),
    remote=("prefill", 0),
    num_bytes=6 * 2 * 64,
    num_ids=4 * 2 * 2,
    make_us=0.0,
    post_us=0.0,
    transfer_us=0.0,
    status=Status.DONE,
)
"""Six tokens of two layers, 64 bytes each: ranges of four heads, from two blocks in each layer."""


def test_a_transfer_has_one_event(reader: Reader, events: list[TransferEvent]) -> None:
    """A transfer that is done has one event, however often it is polled, and also when the executor is closed."""
    transfer = reader.read()
    reader.executor.poll(transfer)
    reader.executor.close()
    assert [untimed(event) for event in events] == [READ]


def test_stages_are_timed(reader: Reader, events: list[TransferEvent]) -> None:
    """Each stage takes some time, and their sum is the total."""
    reader.read()
    (event,) = events
    assert min(event.make_us, event.post_us) > 0
    assert event.transfer_us >= 0
    assert event.total_us == event.make_us + event.post_us + event.transfer_us < TIMEOUT_S * 1e6


def test_nixl_counts_descriptors(reader: Reader) -> None:
    """It tells them only of agents that capture telemetry; engines' metrics have them."""
    transfer = reader.read()
    assert 0 < transfer.num_descriptors <= READ.num_ids


def test_a_transfer_without_bytes(reader: Reader, events: list[TransferEvent]) -> None:
    """A pair that moves no byte of a request has an event of no bytes."""
    reader.read(tokens=(0, 0))
    assert [untimed(event) for event in events] == [attrs.evolve(READ, num_bytes=0, num_ids=0)]


def test_a_pair_without_rows(events: list[TransferEvent]) -> None:
    """A pair whose tables are empty has an event of no bytes."""
    reader = Reader(tp=2)
    with reader.executor:
        assert not len(reader.plan.pairs[1].local_table.rows)
        reader.read()
    expected = attrs.evolve(READ, remote=("prefill", 1), num_bytes=0, num_ids=0)
    assert [untimed(event) for event in events] == [expected]


@pytest.mark.parametrize("stage", ["make", "post"])
def test_a_failed_transfer(
    reader: Reader,
    events: list[TransferEvent],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stage: str,
) -> None:
    """A transfer that NIXL refuses has an event with the error's code and the stages before it, and logs a warning."""
    monkeypatch.setattr(reader.executor._agent, stage, refuse)
    reader.start()
    (event,) = events
    assert untimed(event) == attrs.evolve(READ, status=Status.FAILED, code="TRANSFER")
    assert (event.make_us > 0, event.post_us > 0, event.transfer_us) == (True, stage == "post", 0.0)
    (record,) = caplog.records
    assert (record.name, record.levelname, vars(record)["event"]) == ("kvplan_nixl", "WARNING", event)
    assert "failed with TRANSFER" in record.getMessage()


def test_a_transfer_that_is_closed_under(
    reader: Reader, events: list[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that runs when its executor is closed has a CANCELLED event."""
    monkeypatch.setattr(reader.executor._agent, "post", lambda handle: False)
    reader.start()
    assert events == []
    reader.executor.close()
    assert [untimed(event) for event in events] == [attrs.evolve(READ, status=Status.CANCELLED)]


class Full(logging.Handler):
    """A handler that cannot take any record."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no space left")


@pytest.mark.parametrize("level", [logging.DEBUG, logging.WARNING])
def test_a_handler_that_raises_holds_up_no_transfer(
    reader: Reader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    level: int,
) -> None:
    """Its caller has others to look after, and would not get this one from ``start``."""
    caplog.set_level(level, "kvplan_nixl")
    full = Full()
    LOGGER.addHandler(full)
    try:
        done = reader.read()
        monkeypatch.setattr(reader.executor._agent, "post", refuse)
        failed = reader.start()
    finally:
        LOGGER.removeHandler(full)
    assert (done.status, failed.status) == (Status.DONE, Status.FAILED)
    for transfer in (done, failed):
        reader.executor.release(transfer)
    # as Python's own handlers do
    assert capsys.readouterr().err.count("OSError: no space left") == (2 if level == logging.DEBUG else 1)


def test_above_debug_nothing_is_measured(reader: Reader, caplog: pytest.LogCaptureFixture) -> None:
    """With the logger at INFO, a transfer is neither measured nor logged."""
    caplog.set_level(logging.INFO, "kvplan_nixl")
    transfer = reader.read()
    assert transfer.watch._marks == []  # type: ignore[attr-defined]
    assert caplog.records == []


def test_a_failure_above_debug(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed transfer logs a warning with its error, without an event."""
    monkeypatch.setattr(reader.executor._agent, "post", refuse)
    transfer = reader.start()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kvplan_nixl", "WARNING")
    assert record.getMessage() == f"<Transfer 'request' failed: {transfer.spec!r}>: {transfer.error}"


def test_the_lines_of_the_log(reader: Reader, events: list[TransferEvent], caplog: pytest.LogCaptureFixture) -> None:
    """At level DEBUG there is a line for each transfer."""
    reader.read("one")
    reader.read("two")
    assert [untimed(event) for event in events] == [attrs.evolve(READ, request=name) for name in ("one", "two")]
    assert [record.getMessage() for record in caplog.records] == [str(event) for event in events]
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


def test_bytes_are_counted_before_ids_are_used_again(events: list[TransferEvent]) -> None:
    """A running transfer's ids may be in a workspace that the next request reuses. Its event counts its own bytes."""
    (source,), (local,) = (Model.shipped("llama-3.2-1b").engine(name, num_blocks=50) for name in ("a", "b"))
    plan, workspace = plan_reads(local, [source]), Workspace()
    blocks = {"attn": Blocks([3, 7, 5])}
    for tokens in ((0, 1), (0, 32)):  # the workspace grows to the first request, and holds the second
        (spec,) = plan.bind(local=blocks, remote=blocks, tokens=tokens, workspace=workspace)
    transfer, watch = Transfer(spec, "request"), Watch()
    watch.made()
    watch.posted(transfer)
    expected = spec.num_bytes
    plan.bind(local=blocks, remote=blocks, tokens=(0, 1), workspace=workspace)
    assert spec.num_bytes != expected
    transfer.status = Status.DONE
    watch.settled(transfer)
    assert [event.num_bytes for event in events] == [expected]


def test_telemetry_of_nixl_has_a_file_for_each_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL writes it to a folder, whatever the engine is called, and what it cannot write to is an error."""
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "1")
    monkeypatch.setenv("NIXL_TELEMETRY_DIR", str(tmp_path))
    there, _ = placed(attrs.evolve(engine("decode")[0], engine_id="a/b"))
    with NixlExecutor(there):
        assert [path.name[:6] for path in tmp_path.iterdir()] == ["a.b.0."]
    monkeypatch.setenv("NIXL_TELEMETRY_DIR", str(tmp_path / "none"))
    with pytest.raises(KVPlanError, match="BACKEND: cannot make a NIXL agent: expected no error, got NIXL: Failed"):
        NixlExecutor(there)
