"""Traces: what executors and copiers do, in time, as a file for Perfetto and Chrome.

A :class:`Trace` lends executors and copiers that do what others do, and note when. Each worker is a
process of the trace. Its transfers with a remote worker, and its copies, are threads: as many as
are under way at a time.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvplan._checks import having, instance, wrong_type
from kvplan.describe.worker import Key, Worker, label_of
from kvplan.errors import KVPlanError
from kvplan.executor import Executor, Notice, Status, Transfer
from kvplan.plan import ReadSpec, TransferPlan
from kvplan.staging import Copier, Copy


@attrs.define(eq=False)
class TraceEvent:
    """Something that a worker has done from ``start`` to ``stop``, None while it goes on.

    ``called`` is when the call that began it returned, None for what began without one.
    """

    worker: str
    track: str
    label: str
    start: float
    details: dict[str, Any]
    called: float | None = None
    stop: float | None = None


class Trace:
    """The events of executors and copiers. ``clock`` returns seconds, as ``time.perf_counter``.

    An event ends when the caller sees it: a transfer when a poll finds it settled. A trace keeps
    all events, so make one for a few requests.

    >>> from itertools import count
    >>> from kvplan import Blocks, Model, plan_reads
    >>> from kvplan.testing import FakeNetwork
    >>> model = Model.shipped("llama-3.2-1b")
    >>> (source,), (local,) = (model.engine(name, num_blocks=10) for name in ("prefill", "decode"))
    >>> network, trace = FakeNetwork([source, local]), Trace(count().__next__)
    >>> executor = trace.executor(local, network.executor(local))
    >>> plan = plan_reads(local, [source])
    >>> executor.prepare(plan)
    >>> tables = {"local": {"attn": Blocks([7])}, "remote": {"attn": Blocks([3])}}
    >>> (spec,) = plan.bind(**tables, tokens=(0, 16))
    >>> executor.poll(executor.start(spec, "request 1"))
    <Status.DONE: 'done'>
    >>> for event in trace.events:
    ...     print(event.worker, event.track, event.label, event.start, event.stop)
    decode/0 calls prepare 0 1
    decode/0 reads from prefill/0 request 1 2 4
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock: Callable[[], float] = having("__call__", clock, "clock", "a function")
        self.events: list[TraceEvent] = []

    def executor(self, worker: Worker, executor: Executor) -> TracedExecutor:
        """Return an executor of a worker that does what ``executor`` does, and notes it."""
        having("prepare", executor, "executor", "an Executor")
        return TracedExecutor(self, instance(Worker, worker, "worker").label, executor)

    def copier(self, worker: Worker, copier: Copier) -> TracedCopier:
        """Return a copier of a worker that does what ``copier`` does, and notes it."""
        having("begin", copier, "copier", "a Copier")
        return TracedCopier(self, instance(Worker, worker, "worker").label, copier)

    def begin(self, worker: str, track: str, label: str, **details: Any) -> TraceEvent:
        """Note that something begins."""
        event = TraceEvent(worker, track, label, self.clock(), details)
        self.events.append(event)
        return event

    def note(self, worker: str, label: str, **details: Any) -> None:
        """Note something that takes no time."""
        event = self.begin(worker, "notices", label, **details)
        event.stop = event.start

    def to_json(self) -> dict[str, Any]:
        """Return the trace in Chrome's format, in microseconds since the first event.

        What still goes on ends with the last event, and says so.
        """
        times = [event.start for event in self.events]
        times += [event.stop for event in self.events if event.stop is not None]
        origin = min(times, default=0.0)
        rows = list[dict[str, Any]]()
        # viewers know processes and threads by number, and show the names that rows give them
        workers = dict.fromkeys(event.worker for event in self.events)
        for process, worker in enumerate(workers, start=1):
            rows.append(_named("process_name", worker, process))
            lanes = _lanes([event for event in self.events if event.worker == worker])
            for thread, events in enumerate(lanes, start=1):
                rows.append(_named("thread_name", events[0].track, process, thread))
                for event in events:
                    place = {"pid": process, "tid": thread}
                    rows += [row | place for row in _rows(event, origin, max(times))]
        return {"displayTimeUnit": "ms", "traceEvents": rows}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, which ui.perfetto.dev and chrome://tracing open.

        Raises ``NAME`` where it cannot be written.
        """
        try:
            file = Path(path)
        except TypeError:
            raise wrong_type("path of a trace", "a path", path) from None
        try:
            file.write_text(json.dumps(self.to_json()), encoding="utf-8")
        except (OSError, ValueError) as error:
            got = f"{os.fspath(path)!r}: {getattr(error, 'strerror', None) or str(error)}"
        else:
            return
        expected = "a path that can be written to"
        raise KVPlanError("NAME", "save a trace", expected=expected, got=got)


class TracedExecutor:
    """An :class:`~kvplan.Executor` that does what another one does, and notes it in a trace.

    It has the other one's further attributes too.
    """

    def __init__(self, trace: Trace, worker: str, executor: Executor) -> None:
        self._trace = trace
        self._worker = worker
        self._executor = executor
        self._running: dict[Transfer, TraceEvent] = {}

    def __getattr__(self, name: str) -> Any:
        # such as NixlExecutor's peers and envelope
        return getattr(self._executor, name)

    def prepare(self, plan: TransferPlan) -> None:
        """Prepare for the specs of a plan."""
        event = self._trace.begin(self._worker, "calls", "prepare", plan=f"{plan!r}")
        try:
            self._executor.prepare(plan)
        finally:
            event.stop = self._trace.clock()

    def start(
        self, spec: ReadSpec, request: str, *, attempt: int = 0, notify: bool = True
    ) -> Transfer:
        """Start to move the bytes of a spec."""
        verb = "reads from" if spec.operation == "READ" else "writes to"
        track = f"{verb} {label_of(spec.remote)}"
        size = {"bytes": spec.num_bytes, "descriptors": spec.num_descriptors}
        event = self._trace.begin(self._worker, track, f"{request}", **size)
        try:
            transfer = self._executor.start(spec, request, attempt=attempt, notify=notify)
        except KVPlanError as error:
            event.stop = self._trace.clock()
            event.details["error"] = f"{error}"
            raise
        event.called = self._trace.clock()
        self._running[transfer] = event
        # a transfer may be done, or have failed, at once
        self._see(transfer, event.called)
        return transfer

    def poll(self, transfer: Transfer) -> Status:
        """Update and return the status of a transfer."""
        status = self._executor.poll(transfer)
        # polls of a settled transfer tell nothing new
        if transfer in self._running:
            self._see(transfer, self._trace.clock())
        return status

    def cancel(self, transfer: Transfer) -> None:
        """Ask a running transfer to stop."""
        self._trace.note(self._worker, f"cancel {transfer.request}")
        self._executor.cancel(transfer)

    def release(self, transfer: Transfer) -> None:
        """Free what a settled transfer holds."""
        self._executor.release(transfer)

    def notify(self, worker: Key, request: str, status: Status, *, attempt: int = 0) -> None:
        """Send a worker a notice that this one gives a request up."""
        self._trace.note(self._worker, f"{request} {status.value}", to=label_of(worker))
        self._executor.notify(worker, request, status, attempt=attempt)

    def notices(self) -> tuple[Notice, ...]:
        """Return the notices that have arrived."""
        notices = self._executor.notices()
        for notice in notices:
            sender = label_of((notice.engine_id, notice.rank))
            label = f"{notice.request} {notice.status.value}"
            self._trace.note(self._worker, label, by=sender, attempt=notice.attempt)
        return notices

    def _see(self, transfer: Transfer, now: float) -> None:
        """End the event of a transfer that is settled."""
        if transfer.status.is_settled:
            event = self._running.pop(transfer)
            event.stop = now
            event.details["status"] = transfer.status.value
            if transfer.error is not None:
                event.details["error"] = f"{transfer.error}"


class TracedCopier:
    """A :class:`~kvplan.staging.Copier` that does what another one does, and notes it."""

    def __init__(self, trace: Trace, worker: str, copier: Copier) -> None:
        self._trace = trace
        self._worker = worker
        self._copier = copier

    def begin(self, copies: Sequence[Copy]) -> Any:
        """Begin copies, and return a ticket."""
        num_bytes = sum(copy.num_bytes for copy in copies)
        size = {"bytes": num_bytes, "copies": len(copies)}
        event = self._trace.begin(self._worker, "copies", "copy", **size)
        try:
            ticket = self._copier.begin(copies)
        except KVPlanError as error:
            self._end(event, error)
            raise
        event.called = self._trace.clock()
        return ticket, event

    def done(self, ticket: Any) -> bool:
        """Return whether copies are done."""
        copied, event = ticket
        try:
            is_done = self._copier.done(copied)
        except KVPlanError as error:
            self._end(event, error)
            raise
        # a caller may ask again
        if is_done and event.stop is None:
            self._end(event)
        return is_done

    def _end(self, event: TraceEvent, error: KVPlanError | None = None) -> None:
        event.stop = self._trace.clock()
        if error is not None:
            event.details["error"] = f"{error}"


def _lanes(events: Iterable[TraceEvent]) -> list[list[TraceEvent]]:
    """Divide events into threads: those of one track, of which no two overlap."""
    lanes = dict[str, list[list[TraceEvent]]]()
    for event in sorted(events, key=lambda event: event.start):
        of_track = lanes.setdefault(event.track, [])
        for lane in of_track:
            stop = lane[-1].stop
            # what goes on leaves its thread to no other event
            if stop is not None and stop <= event.start:
                lane.append(event)
                break
        else:
            of_track.append([event])
    return list(itertools.chain.from_iterable(lanes.values()))


def _rows(event: TraceEvent, origin: float, end: float) -> list[dict[str, Any]]:
    """Return the rows of an event: one, or also one of the call that began it."""
    at = {"name": event.label, "ts": _microseconds(event.start - origin)}
    if event.start == event.stop:
        return [{**at, "ph": "i", "s": "t", "args": event.details}]
    stop = end if event.stop is None else event.stop
    details = event.details if event.stop is not None else {**event.details, "status": "running"}
    duration = _microseconds(stop - event.start)
    rows = [{**at, "ph": "X", "dur": duration, "args": details}]
    # drawn within the event, whose beginning it has
    if event.called is not None:
        duration = _microseconds(event.called - event.start)
        rows.append({**at, "name": "call", "ph": "X", "dur": duration, "args": {}})
    return rows


def _microseconds(duration_s: float) -> float:
    return round(duration_s * 1e6, 3)


def _named(kind: str, label: str, process: int, thread: int = 0) -> dict[str, Any]:
    """Return the row that names a process or a thread."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": label}}
