"""SGLang's plugin in a simulation: the ranks of prefill or decode, with stand-ins for SGLang's scheduler.

The stand-in calls senders and receivers as SGLang 0.5.23 does (``disaggregation/prefill.py`` and ``decode.py``): it
takes the worst state of all ranks, clears no sender that has failed, and keeps the pages of a failed request until no
byte can land in them. Pages of a window and the slot of a state are sent with the last chunk. Each pipeline stage of
prefill has pages of its own, and sends them when it comes to them. Updates of weights call the hooks as
``managers/scheduler_components/weight_updater.py`` calls the functions that they wrap; ``Scheduler.flush_cache`` is
refused until the engine is idle.
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import attrs
import numpy as np

from kvplan.bridges import RankInfo
from kvplan.describe import Worker
from kvplan.errors import KVPlanError
from kvplan.protocol import Claims, Reads
from kvplan.protocol.exporter import PINNED
from kvplan.protocol.leases import LEASE_S
from kvplan.protocol.rooms import Rooms
from kvplan.testing.simulation import (
    MODELS,
    BrokenRuleError,
    EngineRequest,
    Feature,
    GroupShape,
    Promises,
    Simulation,
    Site,
    StepReport,
)
from kvplan.testing.simulation.engine import Phase
from kvplan.testing.simulation.scenario import CONTENT, FIRST_WEIGHTS, IN_PART, Call, CallKind
from tests.simulation.stand_in import check_server, stand_in

LOGGER = logging.getLogger(__name__)
ROOMS_PORT = 8998
ROOM_STEP = 10_000
PREFILL_STEPS_S = (0.004, 0.2, 1.0)
NUM_ROWS = 128
ROW_LENGTH = 4


class KVPoll(enum.IntEnum):
    """SGLang's states of a request, of which the least one is that of all ranks."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


VALUES = {
    "KVPoll": KVPoll,
    "KVTransferDestination": SimpleNamespace(DEVICE="device"),
    "get_serving": lambda: SimpleNamespace(host="127.0.0.1", weight_version="default"),
}

PREFILL, DECODE, MANAGER, BOOTSTRAP, SETTINGS, CHANGES = stand_in(
    "sglang", ("prefill", "decode", "manager", "bootstrap", "settings", "changes"), VALUES
)
SGLANG_FEATURES = ~(Feature.PREEMPTION | Feature.UPDATES | Feature.SIBLINGS | Feature.LONG_PREFILLS | Feature.RESHAPES)
"""SGLang's prefill preempts no request and generates one token; the plugin hears of no reset and no sibling."""
SGLANG_MODELS = {name: model for name, model in MODELS.items() if name != "drafts"}
"""The models that the stand-in of SGLang serves: it has no drafts."""
ASK_S = 0.2
"""Seconds between two questions about rooms, which are most of what happens while requests wait."""


def make_params(host: str, draw: random.Random) -> dict[str, Any]:
    """The parameters that a proxy gives to both engines: a room of few, so that some are used again.

    No two hosts have the same rooms.
    """
    room = ROOM_STEP * draw.randrange(60) + sum(host.encode())
    return {"bootstrap_addr": f"{host}:{ROOMS_PORT}", "bootstrap_room": room}


def break_params(params: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
    """Parameters with a server that is no prefill engine's, and with a room that no other request has."""
    address = draw.choice((f"prefill-9:{ROOMS_PORT}", f"prefill-0:{ROOMS_PORT + 1}"))
    return {**params, "bootstrap_addr": address, "bootstrap_room": draw.randrange(1 << 40, 1 << 60)}


def sglang_fleets(resend_s: float = math.inf) -> Simulation:
    """A simulation of SGLang's fleets, where many prompts are read while they are computed."""
    make_connector = partial(SglangConnector, attempts={})
    return Simulation(
        make_connector,
        make_params,
        prefill_steps_s=PREFILL_STEPS_S,
        resend_s=resend_s,
        break_params=break_params,
        check_server=partial(check_server, port=ROOMS_PORT),
    )


@attrs.define(eq=False)
class Served:
    """A request of an engine: the sender or the receiver of each rank, and its row of metadata.

    The first stage of prefill has sent the first ``num_sent`` pages, and ``unsent`` has the chunks that each later one
    has still to send: a call for each of its ranks.
    """

    request: EngineRequest
    parts: list[Any]
    row: int = -1
    num_sent: int = 0
    unsent: dict[int, list[list[Callable[[], None]]]] = attrs.field(factory=dict)
    is_computed: bool = False
    is_found: bool = False
    is_begun: bool = False
    is_deferred: bool = False

    def poll(self) -> KVPoll:
        """The state of all ranks."""
        return KVPoll(min(part.poll() for part in self.parts))

    def error(self) -> KVPlanError:
        """The reason of the rank that has failed."""
        errors = []
        for part in self.parts:
            try:
                part.failure_exception()
            except Exception as error:
                errors.append(error)
        # a rank that has not failed has no better reason than that it was aborted
        found = [error for error in errors if isinstance(error, KVPlanError)]
        return found[0] if found else KVPlanError("TRANSFER", "serve", expected="a result", got=f"{errors[0]}")

    def clear(self) -> None:
        """Let all ranks forget the request."""
        for part in self.parts:
            part.clear()


@attrs.define(eq=False)
class Process:
    """What ``changes.py`` has in the process of an engine's scheduler, where all engines of a fleet share the module.

    ``token`` is a name of this start of the engine alone, which its private names begin with.
    """

    serving: Any
    token: str = ""
    weights: Any = attrs.field(factory=CHANGES.Weights)
    adapters: Any = attrs.field(factory=CHANGES.Adapters)
    numbers: Iterator[int] = attrs.field(factory=itertools.count)

    def enter(self) -> None:
        """Let the module have what this process has, until another one is entered."""
        uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{self.token} {next(self.numbers)}"))
        own = {"WEIGHTS": self.weights, "ADAPTERS": self.adapters, "get_serving": lambda: self.serving, "uuid": uuid}
        vars(CHANGES).update(own)
        vars(PREFILL)["WEIGHTS"] = vars(DECODE)["WEIGHTS"] = self.weights

    def weights_version(self, ask: Callable[[], str]) -> str:
        """Ask for the version of the weights, as a coroutine of this process does too."""
        self.enter()
        return ask()


class SglangConnector:
    """``kvplan_nixl.sglang``'s ranks as a connector of the simulation.

    ``attempts`` has the request, and how often that has come, of the lease of each stage, in all engines.
    """

    resets_when_idle = True
    loads_when_unused = True

    def __init__(self, site: Site, attempts: dict[str, str]) -> None:
        self._host = site.host
        self._attempts = attempts
        self._num_attempts = 0
        self._groups = {group.name: group for group in site.groups}
        self._page_size = site.groups[0].tokens_per_block
        self._is_prefill = site.host.name.startswith("prefill")
        self._settings = SETTINGS.Settings(
            host=site.host.name, port=5600, key=b"the key of all engines", early_tokens=1, bootstrap_servers=("*",)
        )
        self._rows = np.zeros((len(site.workers), NUM_ROWS, ROW_LENGTH), np.int64)
        self._free_rows = [*range(NUM_ROWS)]
        self._firsts: dict[str, Any] = {}
        # the stages differ in their groups' names
        self._stages = list(dict.fromkeys(group_names(worker) for worker in site.workers))
        self._folder = site.folder
        # an adapter of --lora-paths keeps its id when the engine starts again, and one that others load in SGLang's
        # process under ids of their own; ``load_lora_adapter`` makes a new one
        self.renames_adapters = crc32(f"{site.host.name} {site.host.offset_s}".encode()) % 2 == 1
        self._lora_ids: dict[str, str] = {}
        self._num_loads = 0
        self._process = Process(SimpleNamespace(host="127.0.0.1", weight_version=site.weights() or FIRST_WEIGHTS))
        # those that were aborted before all of them was sent
        self._withdrawn: set[str] = set()
        self._is_updating = False
        self._process.enter()
        self._managers = [self._manager(site, rank) for rank in range(len(site.workers))]
        rank = self._managers[0].rank
        self._process.token = rank.owner if self._is_prefill else rank.importer._reader
        if self._is_prefill:
            # no part of the connector: it forgets old entries when somebody asks for one
            server = BOOTSTRAP.BootstrapServer(site.host.name, ROOMS_PORT, system=site.host)
            site.host.witnesses.append(partial(check_rooms, server))
        site.host.hearers.append(self._hear_rooms)
        # requests that wait or are read, those that are lent, and those that ended while bytes may land
        self._served: dict[str, Served] = {}
        self._failed: dict[str, KVPlanError] = {}
        listener = self._managers[0].rank.listener if self._is_prefill else None
        self._promises = Promises(site.host, "" if listener is None else listener.source.start)
        self._record_event = site.record_event
        self._executors = site.executors
        self._open_rooms: list[str] = []

    def _manager(self, site: Site, rank: int) -> Any:
        """SGLang's manager of a rank, without the pool that it would be made of."""
        worker = site.workers[rank]
        stage = group_names(worker)
        token_group, *state_groups = (self._groups[name] for name in stage)
        windows = [group for group in state_groups if not group.is_state]
        tp_size = len(site.workers) // len(self._stages)
        rows = self._rows[rank]
        args = SimpleNamespace(
            page_size=self._page_size,
            state_types=[SimpleNamespace(value="mamba" if group.is_state else "swa") for group in state_groups],
            aux_data_ptrs=[rows.ctypes.data],
            aux_item_lens=[rows[0].nbytes],
        )
        memory = DECODE.RankMemory(
            args=args,
            info=RankInfo(worker.engine_id, rank, rank % tp_size, tp_size),
            stage=self._stages.index(stage),
            num_stages=len(self._stages),
            cp_rank=0,
            windows={group.name: group.window for group in (token_group, *windows)},
            executor=SimpleNamespace(
                worker=worker,
                envelope=partial(lambda offer: offer, site.offers[rank]),
                discard_messages=lambda: None,
            ),
            key=self._settings.access().key,
        )
        manager = MANAGER.Manager.__new__(MANAGER.Manager)
        if self._is_prefill:
            gathered = iter([[*site.offers], [], []])
            gather = partial(self._gather, gathered)
            manager.rank = PREFILL.PrefillRank(memory, gather, self._settings, site.host)
            return manager
        scheduler = SimpleNamespace(forward_stream=SimpleNamespace(record_event=site.record_event))
        queue = SimpleNamespace(metadata_buffers=None, scheduler=scheduler, transfer_queue=SimpleNamespace())
        names = DECODE.DecodeRank.__init__.__globals__
        names["Rooms"] = partial(Rooms, ask_s=ASK_S)
        names["make_reads"] = partial(self._make_reads, site, rank)
        manager.rank = DECODE.DecodeRank(memory, queue, None, self._settings, site.room_timeout_s, site.host)
        importer = manager.rank.importer
        importer._weights = partial(self._process.weights_version, importer._weights)
        return manager

    def _gather(self, gathered: Any, value: Any) -> list[Any]:
        """What all ranks say, of which the first one counts: each is made alone here, the first one first."""
        values = next(gathered)
        if not values:
            kind = type(value).__name__ if value is not None else "Source"
            values = [self._firsts.setdefault(kind, value)]
        return [*values]

    def _make_reads(self, site: Site, rank: int, _: Any, claims: Claims, logger: logging.Logger, **__: Any) -> Reads:
        """The reads of a rank, over the fabric."""
        executor = site.executors[rank]
        return Reads(
            site.workers[rank],
            executor,
            logger,
            connections=site.connections(executor),
            claims=claims,
            system=site.host,
            max_transfer_ids=site.max_transfer_ids,
        )

    def add(self, request: EngineRequest) -> None:
        """Take a request: SGLang makes a sender or a receiver in each rank."""
        params = request.params
        assert params is not None
        place = params["bootstrap_addr"], params["bootstrap_room"]
        kind = PREFILL.Sender if self._is_prefill else DECODE.Receiver
        # SGLang takes the whole tail of a window anew
        request.reads_windows = not self._is_prefill
        # the batch under way has the request that the last one has ended
        request.frees_at_once = not self._is_prefill
        served = Served(request, [kind(manager, *place) for manager in self._managers])
        self._served[request.name] = served
        self._num_attempts += 1
        attempt = f"{crc32(request.name.encode())} of {self._host.name}, {self._num_attempts}"
        if request.adapter and request.adapter not in self._lora_ids:
            self.load_adapters({request.adapter: self._folder(request.adapter)}, ())
        for part in served.parts:
            part.req = _seen(request, self._lora_ids.get(request.adapter))
            if self._is_prefill:
                part._publish = partial(self._publish, served, part, part._publish, attempt)
            else:
                part.init(0)

    def load_adapters(self, loaded: Mapping[str, str], dropped: Collection[str]) -> tuple[str, ...]:
        """Note the content of adapters, each under its id. No request fails for that."""
        self._process.enter()
        for name, content in loaded.items():
            self._num_loads += 1
            self._lora_ids[name] = f"{name}, load {self._num_loads}" if self.renames_adapters else name
            self._process.adapters.note(self._lora_ids[name], content)
        return ()

    def count_readable(self, request: EngineRequest, num_cached: int) -> int | None:
        """Wait until prefill has computed a request; then all of its prompt is read that is not cached."""
        served = self._served.get(request.name)
        if served is None or served.is_begun:
            return 0
        state = served.poll()
        if state is not KVPoll.WaitingForInput:
            return None
        return 0 if self._is_prefill else request.num_prompt - num_cached

    def begin_read(self, request: EngineRequest, num_tokens: int) -> None:
        """Give the ranks a row of metadata, and those of decode the pages to read into."""
        served = self._served.get(request.name)
        if served is None or served.is_begun:
            return
        self._process.enter()
        # a request that waits for pages again keeps its row
        if served.row < 0:
            served.row = self._free_rows.pop(0)
        self._rows[:, served.row] = 0
        page_size = self._page_size
        if self._is_prefill:
            for part in served.parts:
                part.init(-(-request.num_prompt // page_size), served.row)
            self._send_found(served)
            return
        served.is_begun = True
        num_cached = request.num_computed - num_tokens
        for part in served.parts:
            token_group, *state_groups = self._groups_of(part)
            pages = np.array(request.blocks[token_group.name][num_cached // page_size :])
            states = [self._state_indices(request, group) for group in state_groups]
            part.send_metadata(pages, served.row, states, num_cached)
        # nobody finds what is read of windows: it may begin within a page
        windows = [group.name for group in self._groups.values() if group.window and not group.is_state]
        request.num_partial = {name: len(request.blocks[name]) for name in windows}

    def step(self) -> StepReport:
        """Poll all requests, as SGLang's queues do."""
        self._process.enter()
        report = self._step_prefill() if self._is_prefill else self._step_decode()
        # rooms are numbers; so that the simulation sees them, they are names of requests too, as leases are
        ranks = [manager.rank for manager in self._managers]
        if self._is_prefill:
            self._open_rooms = [f"request-{name}" for rank in ranks for name in rank.exporter._requests]
            self._open_rooms += [f"request-{lease}" for lease in ranks[0].exporter.leases._leases]
            self._open_rooms += [f"request-{room}" for rank in ranks for room in rank.exporter._rooms]
        else:
            self._open_rooms = [f"request-{name}" for rank in ranks for name in rank.importer._requests]
            self._open_rooms += [f"request-{room}" for rank in ranks for room in rank._open_rooms]
            self._open_rooms += [f"request-{name}" for rank in ranks for name in (*rank.reads._requests, *rank.ended)]
        return report

    def _step_prefill(self) -> StepReport:
        released, failed = [], {}
        for name, served in [*self._served.items()]:
            self._send_late(served)
            # as each chunk before, one step after it is computed
            if served.is_computed and not served.is_begun:
                self._lend(served)
            state = served.poll()
            if not served.is_begun:
                if state is KVPoll.Failed:
                    failed[name] = served.error()
                    self._drop(name)
                elif served.row >= 0:
                    self._send_chunk(served)
                continue
            if state is KVPoll.Success:
                served.clear()
            elif state is KVPoll.Failed:
                served.error()
            else:
                continue
            self._drop(name)
            released.append(name)
        return StepReport(failed=failed, released=released)

    def _step_decode(self) -> StepReport:
        received, failed = [], {}
        for name, served in [*self._served.items()]:
            if served.is_deferred:
                if self._is_drained(served):
                    received.append(name)
                    self._forget(name)
                continue
            state = served.poll()
            if state is KVPoll.Failed:
                failed[name] = served.error()
                if not served.is_begun:
                    self._forget(name)
                elif any(part.abort_notified for part in served.parts):
                    served.is_deferred = True
                else:
                    received.append(name)
                    self._forget(name)
            elif state is KVPoll.Success:
                self._check_first_token(served)
                received.append(name)
                self._forget(name)
        return StepReport(received, failed)

    def _is_drained(self, served: Served) -> bool:
        """Whether no byte of a request can land any more, in any rank."""
        assert served.request.params is not None
        room = served.request.params["bootstrap_room"]
        # each rank looks, whatever the others say
        answers = [manager.is_abort_release_safe(room, 0) for manager in self._managers]
        return all(answers)

    def _forget(self, name: str) -> None:
        self._served[name].clear()
        self._drop(name)

    def _drop(self, name: str) -> None:
        served = self._served.pop(name)
        if served.row >= 0:
            self._free_rows.append(served.row)

    def _check_first_token(self, served: Served) -> None:
        """The first token of the answer comes with the pages, in each rank."""
        request = served.request
        if request.is_aborted:
            return
        assert request.params is not None
        expected = [request.params["bootstrap_room"], request.first_answer]
        for rank, rows in enumerate(self._rows):
            if rows[served.row, :2].tolist() != expected:
                got = rows[served.row, :2].tolist()
                raise BrokenRuleError("OWN", f"{request.name} has the metadata {got} in rank {rank}, not {expected}")

    def finish(self, request: EngineRequest) -> Mapping[str, Any] | None:
        """Lend the pages of a request that prefill has computed; give up one that is aborted."""
        served = self._served.get(request.name)
        if served is None:
            return None
        if not self._is_prefill:
            if request.is_aborted:
                for part in served.parts:
                    part.abort()
                # one that waits fails at the next look, and nobody is told
                if not served.is_begun:
                    self._forget(request.name)
            return None
        if request.is_aborted or served.is_begun:
            for part in served.parts:
                part.abort()
            # what was lent of it is not promised any more
            if served.num_sent:
                self._promises.take(request.name)
            self._drop(request.name)
            return None
        served.is_computed = True
        return {}

    def abort_lent(self, name: str) -> None:
        """Abort a request that is computed, and maybe read: what was sent whole goes on, and nothing else."""
        self._process.enter()
        parts = self._served[name].parts
        if not all(part._is_sent for part in parts):
            self._withdrawn.add(name)
        for part in parts:
            part.abort()

    def _groups_of(self, part: Any) -> list[GroupShape]:
        """The cache groups of a sender's or receiver's rank: that of all positions, and those of windows and states."""
        return [self._groups[name] for name in group_names(part.kv_mgr.rank.memory.executor.worker)]

    def _state_indices(self, request: EngineRequest, group: GroupShape) -> Any:
        """The pages of a request's window, or the slot of its state, as SGLang lists them."""
        table = request.blocks[group.name]
        if group.is_state:
            return [np.array(table[-1])]
        return np.array(table[group.first_needed(request.num_computed) // self._page_size :])

    def _send_found(self, served: Served) -> None:
        """Send the pages of the prefix cache at once: steps under way may compute them for another request."""
        num_found = served.request.num_found
        if num_found == 0:
            return
        event = self._record_event()
        for part in served.parts:
            part._early_send_wait_event = event
        served.is_found = True
        self._send(served, num_found // self._page_size, num_found, is_last=False)

    async def _publish(
        self, served: Served, part: Any, publish: Callable[[Any], Any], attempt: str, entry: Any
    ) -> bool:
        """Publish an entry, and refuse it if what was found is not computed, or the request is over."""
        if self._served.get(served.request.name) is not served:
            raise BrokenRuleError("REPORT", f"{served.request.name} is published, and nobody can read it any more")
        self._attempts[entry["handoff"]["remote_lease"]] = attempt
        if served.is_found:
            self._check_found(served, part, entry["handoff"]["remote_num_tokens"])
        is_published: bool = await publish(entry)
        return is_published

    def _check_found(self, served: Served, part: Any, num_tokens: int) -> None:
        """Refuse to publish positions of the prefix cache that another request still computes."""
        request = served.request
        token_group = self._groups_of(part)[0]
        for manager, executor in zip(self._managers, self._executors, strict=True):
            if request.phase is not Phase.RUNNING or manager.rank.memory.stage != part.kv_mgr.rank.memory.stage:
                continue
            table = request.blocks[token_group.name]
            memory = executor.port.memory
            wrong = memory.wrong_position(token_group.name, table, request.labels, 0, num_tokens)
            if wrong is not None:
                message = f"{request.name} is published up to {num_tokens}, of which {wrong[0]} is not computed"
                raise BrokenRuleError("OWN", message)

    def _send_chunk(self, served: Served) -> None:
        """Send the full pages that are computed since the last chunk."""
        num_full = served.request.num_settled // self._page_size
        self._send(served, num_full, num_full * self._page_size, is_last=False)

    def _lend(self, served: Served) -> None:
        """Send the last pages of all ranks, and the first token."""
        request = served.request
        assert request.params is not None
        served.is_begun = True
        self._rows[:, served.row, :2] = request.params["bootstrap_room"], request.first_answer
        num_pages = -(-request.num_computed // self._page_size)
        self._send(served, num_pages, request.num_computed, is_last=True)

    def _send(self, served: Served, num_pages: int, num_tokens: int, *, is_last: bool) -> None:
        """Send pages up to the ``num_pages``-th, which hold the first ``num_tokens`` positions."""
        if num_pages <= served.num_sent:
            return
        request = served.request
        chunks = dict[int, list[Callable[[], None]]]()
        for part in served.parts:
            token_group, *state_groups = self._groups_of(part)
            pages = np.array(request.blocks[token_group.name][served.num_sent : num_pages])
            states = [self._state_indices(request, group) for group in state_groups] if is_last else None
            send = partial(part.send, pages, states, num_tokens - served.num_sent * self._page_size)
            chunks.setdefault(part.kv_mgr.rank.memory.stage, []).append(send)
        # the first stage at once
        for stage, chunk in chunks.items():
            served.unsent.setdefault(stage, []).append(chunk)
        self._send_first(served.unsent[0])
        first = served.parts[0]
        export = first._rank.exporter._requests.get(first._name)
        # as long as it is computed; its readers may be done before all is
        if export is not None and (served.num_sent == 0 or export.state is PINNED):
            self._promises.grant(export.lease, served.request.name, LEASE_S if is_last else math.inf)
        served.num_sent = num_pages

    def _send_late(self, served: Served) -> None:
        """Let later stages send a chunk, or be late for another step."""
        for chunks in served.unsent.values():
            if chunks and self._host.random.random() < 0.5:
                self._send_first(chunks)

    @staticmethod
    def _send_first(chunks: list[list[Callable[[], None]]]) -> None:
        """Send the first one of chunks, in all ranks."""
        for send in chunks.pop(0):
            send()

    def _hear_rooms(self, path: str, sent: bytes, answer: bytes) -> None:
        """Refuse what a room has of several attempts to compute a request, one stage from each."""
        if not path.startswith("/ask/"):
            return
        try:
            rooms = json.loads(answer)["rooms"].items()
            leases = {
                room: [json.loads(text)["handoff"]["remote_lease"] for text in texts] for room, (_, texts) in rooms
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # somebody has garbled it
            return
        for room, others in leases.items():
            attempts = {self._attempts.get(lease, "") for lease in others if isinstance(lease, str)} - {""}
            if len(attempts) > 1:
                raise BrokenRuleError("OWN", f"room {room} has stages of {sorted(attempts)}")

    def hear(self, call: Call, is_done: bool) -> None:
        """Let the hooks hear what an operator's call does in SGLang, and whether it has succeeded.

        The version decides of which kind an update is: from a disk; in a session, each part of which names the
        version; or in a session that loads nothing, since others write the weights.
        """
        self._process.enter()
        if call.kind in (CallKind.CHANGE, CallKind.FAILED_CHANGE):
            self._update(call.text.removesuffix(IN_PART), is_part=call.text.endswith(IN_PART), is_done=is_done)
        elif call.kind is CallKind.NAME:
            self._name(call.text)
        else:
            CHANGES._flush(is_done, None)
            CHANGES._flush_after((is_done, ""), None, SimpleNamespace(flush_cache=True))

    def _update(self, version: str, *, is_part: bool, is_done: bool) -> None:
        """Update the weights, or a part of them, and flush nothing."""
        kind = crc32(version.encode()) % 3
        # from a disk, in a session, in one that loads nothing
        if kind and not self._is_updating:
            self._is_updating = True
            CHANGES._begin(None)
        if kind < 2:
            CHANGES._change(None, version)
        if is_done:
            if kind == 1:
                self._name(version.partition(CONTENT)[0])
            CHANGES._flush_after((True, ""), None, SimpleNamespace(flush_cache=False))
        if self._is_updating and not is_part:
            self._is_updating = False
            CHANGES._end(None, None, run_post_load=kind == 2)

    def _name(self, version: str) -> None:
        """Record a version, as ``Scheduler.record_weight_version_change`` does."""
        self._process.serving.weight_version = version
        CHANGES._name(None, None, version)

    def reset(self) -> None:
        """No fleet of SGLang resets a cache but by calls."""

    def has_sent(self, request: str) -> bool:
        """Whether all stages have sent a request that is computed."""
        served = self._served.get(request)
        return served is None or (served.is_begun and not any(served.unsent.values()))

    def is_promised(self, request: str) -> bool:
        if request not in self._withdrawn:
            return self._promises.take(request)
        self._withdrawn.remove(request)
        if request in self._promises._lease_of:
            self._promises.take(request)
        return False


def check_rooms(server: Any, path: str, sent: bytes, answer: bytes) -> None:
    """Refuse a server that counts other bytes than it keeps, or keeps a room behind one that ends later.

    It answers with the newest attempt of a room that has all stages.
    """
    rooms = [*server._rooms.values()]
    times = [room.expires_at for room in rooms]
    if server._num_bytes != sum(room.num_bytes for room in rooms) or times != sorted(times):
        raise BrokenRuleError("REPORT", f"a server counts {server._num_bytes} bytes of rooms that end at {times}")
    answered = json.loads(answer)["rooms"] if path.startswith("/ask/") and answer[:1] == b"{" else {}
    for number, (_, texts) in answered.items():
        attempts = server._rooms[int(number)].attempts.values()
        whole = [
            sorted(entries.values()) for entries in attempts if {stage.number for stage in entries} == {len(entries)}
        ]
        if [sorted(texts)] != whole[-1:]:
            raise BrokenRuleError("REPORT", f"a server does not answer with the newest request in room {number}")


def group_names(worker: Worker) -> tuple[str, ...]:
    """The names of a worker's cache groups."""
    return tuple(group.name for group in worker.groups)


def _seen(request: EngineRequest, lora_id: str | None) -> Any:
    """A request as SGLang shows it, with an adapter of some id.

    In half of the rooms all requests have one name, as a request that SGLang computes again.
    """
    assert request.params is not None
    room = request.params["bootstrap_room"]
    facts: Sequence[str] = ("input_embeds", "token_type_ids", "positional_embed_overrides")
    given = {text.partition(" ")[0]: (position, text) for position, text in request.facts}
    token_ids = request.tokens[: request.num_prompt]
    if "image" in given:
        # SGLang has the hash of an image in place of its tokens
        position, text = given["image"]
        token_ids[position : position + 1] = [crc32(text.encode())] * len(token_ids[position : position + 1])
    return SimpleNamespace(
        rid=request.name.partition("/")[0] if room // ROOM_STEP % 2 else f"of room {room}",
        origin_input_ids=token_ids,
        lora_id=lora_id,
        cache_salt=given.get("salt", (0, None))[1],
        **dict.fromkeys(facts),
    )
