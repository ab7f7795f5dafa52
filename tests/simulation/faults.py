"""Faults that are planted in the connector, in an executor or in an engine, for a simulation to find.

Each is a change of a few characters in a function. ``rule`` is the one that it breaks, and ``seed`` that of the
first scenario that shows it: ``python -m tests.simulation`` finds them anew.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from kvplan.protocol import (
    Handoff,
    Leases,
    Listener,
    claims,
    exporter,
    handoff,
    importer,
    leases,
    listener,
    page_keys,
    peer_engines,
    prefix_search,
    reads,
    room_contents,
    rooms,
)
from kvplan.protocol.digest_requests import DigestRequests
from kvplan.protocol.exporter import Exporter
from kvplan.protocol.importer import Importer
from kvplan.protocol.page_keys import Chain
from kvplan.protocol.page_reads import PageReads
from kvplan.protocol.prefix_search import _Windows
from kvplan.protocol.read_jobs import LeaseCheck
from kvplan.protocol.system import LongPolls
from kvplan.staging import Pipeline
from kvplan.staging.plan import FreeBlocks
from kvplan.testing.simulation import MODELS, Feature, Scenario, Stages, engine, fabric
from kvplan.testing.simulation.catalog import NO_STAGES
from kvplan.testing.simulation.features import NO_FEATURES
from kvplan.testing.simulation.leases import LeaseConnector
from kvplan_nixl.serving.store import StoreClient, StoreReader, eviction, page_files, stalls
from tests.simulation.sglang_connector import BOOTSTRAP, CHANGES, DECODE, MANAGER, PREFILL
from tests.simulation.vllm_connector import (
    DESCRIPTION,
    ENGINE_HOOKS,
    ENGINE_STATE,
    HOST_CACHE,
    SCHEDULER,
    STORE_SCHEDULER,
    STORE_SEARCHES,
    STORE_WORKER,
    TABLES,
    WORKER,
)


@attrs.frozen
class Fault:
    """A change of a function: ``old`` text becomes ``new``.

    ``model`` names that of the fleets that show it, ``stages`` are those of their prefill, and ``features`` theirs.
    """

    name: str
    owner: Any
    function: str
    old: str
    new: str
    seed: int = -1
    rule: str = ""
    model: str = "attention"
    stages: Stages = NO_STAGES
    features: Feature = NO_FEATURES

    @property
    def scenario(self) -> Scenario:
        """The first scenario that shows the fault."""
        return Scenario.of(self.seed, MODELS[self.model], self.stages, features=self.features)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the fault for a while."""
        original = inspect.getattr_static(self.owner, self.function)
        function = getattr(self.owner, self.function)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.name}: {source}"
        text = source.replace(self.old, self.new)
        code = compile(text, f"<{self.name}>", "exec", __future__.annotations.compiler_flag)
        namespace: dict[str, Any] = {}
        exec(code, inspect.unwrap(function).__globals__, namespace)
        setattr(self.owner, self.function, namespace[self.function])
        try:
            yield
        finally:
            setattr(self.owner, self.function, original)


FAULTS = [
    # Leases
    Fault("a reaper frees what a claim holds", Leases, "take_ended", "if lease.over_at <= now:", "if lease.ends_at <= now:", seed=0, rule="CLAIM"),
    Fault("a claim brings a lease back", Leases, "claim", "return False", "self._leases[lease] = _Lease(lease.split()[0], 0.0, 0.0, math.inf)", seed=0, rule="CLAIM"),
    Fault("an ended lease is valid", Leases, "is_valid", "not self._is_refused(lease)", "True", seed=1, rule="CLAIM"),
    Fault("a lease ends by a clock that is twice as fast", Leases, "claim", "now + self.lease_s", "now + self.lease_s / 2", seed=14, rule="CLAIM"),
    Fault("the first lease ends by a clock that began elsewhere", Leases, "_grant", "now + duration_s", "duration_s", seed=0, rule="CLAIM"),
    Fault("done of one reader ends all claims", Leases, "release", "claims_end_at.pop(reader, None)", "claims_end_at.clear()", seed=3, rule="CLAIM"),
    Fault("done is believed twice", Leases, "release", "self._drop(lease)", "pass", seed=0, rule="GROW"),
    Fault("a reader that is done is told that an ended lease was valid", Leases, "release", "return False", "return True", seed=3, rule="CLAIM"),
    Fault("done does not end the first lease", Leases, "release", "ending.ends_at = now", "pass", seed=0, rule="LINGER"),
    Fault("a claim ends with a later message", claims.SourceClaims, "next_due", "if self._done or self._unsent:", "if self._unsent:", seed=0, rule="LINGER"),
    Fault("an unclaimed lease never ends", Leases, "take_ended", "ended.append(lease)", "pass", seed=0, rule="END"),
    Fault("a lease is looked at once", Leases, "take_ended", "lease.due = math.inf\n                self._look_later(key)", "pass", seed=14, rule="END"),
    # Claims
    Fault("a claim without an answer is not sent again", claims.SourceClaims, "take_failure", "self._due_at[claim] = now + RETRY_S", "del self._due_at[claim]"),
    Fault("claims are not renewed", claims.SourceClaims, "take_answer", "self._due_at[claim] = now + RENEW_S", "del self._due_at[claim]", seed=0, rule="AGAIN"),
    Fault("a claim is renewed when it has ended", claims.SourceClaims, "take_answer", "now + RENEW_S", "now + 6.5 * RENEW_S", seed=0, rule="AGAIN"),
    Fault("questions without an answer are forgotten", claims.SourceClaims, "take_failure", "self._resolve(lease, error)", "self._sent.pop(lease)", seed=0, rule="LINGER"),
    Fault("silence ends the coroutine of an engine", claims.Claims, "_run", "continue", "return", seed=0, rule="LINGER"),
    Fault("refused claims are kept for ever", claims.SourceClaims, "release", "self.refusals.pop(claim, None)", "self.refusals.get(claim)", seed=0, rule="GROW"),
    Fault("a claim that was refused is sent again", claims.SourceClaims, "take_answer", "            del self._due_at[claim]\n            self.refusals", "            self.refusals", seed=0, rule="ASK"),
    Fault("claims of another start are taken", listener, "answer_claims", "message.start != start", "False"),
    # Reads
    Fault("no last question is asked", LeaseCheck, "begin_last", "self.has_last_byte = True", "self.has_last_byte = self.is_confirmed = True", seed=1, rule="ASK"),
    Fault("the last question is asked before the last byte", LeaseCheck, "_take", "self.is_confirmed = self.has_last_byte", "self.is_confirmed = True", seed=48, rule="OWN"),
    Fault("an answer to an earlier question counts", LeaseCheck, "begin_last", "self.answer = None", "pass", seed=27, rule="ASK", features=Feature.LOST_ENGINES),
    Fault("silence counts as yes", LeaseCheck, "_take", "elif error.code == ", "elif error.code == 'PEER':\n        self.is_confirmed = self.has_last_byte\n    elif error.code == ", seed=14, rule="ASK"),
    Fault("a read fails for one lost answer", LeaseCheck, "_take", "now - self.confirmed_at > SILENCE_S", "True", seed=14, rule="RIGHT"),
    Fault("when a lease was asked for is not noted", LeaseCheck, "poll", "self.asked_at = now", "pass", seed=7, rule="ASK"),
    Fault("a failed read ends while bytes may land", reads.Reads, "_poll_job", "if job.is_settled and (job.error is not None or is_right)", "if job.error is not None or (job.is_settled and is_right)", seed=0, rule="GIVEN"),
    Fault("transfers that have ended are not released", reads.Reads, "_settle_transfers", "self._executor.release(transfer)", "pass", seed=0, rule="GROW"),
    Fault("the error of a transfer is not seen", reads.Reads, "_settle_transfers", "job.error = job.error or error", "pass", seed=90, rule="OWN"),
    Fault("an engine that is gone is not forgotten", reads.Reads, "_discard_lost", '("PEER", "TRANSFER")', "()", seed=90, rule="AGAIN"),
    Fault("the end of a transfer is not noticed", reads.Reads, "_has_changed", "Status.RUNNING:\n            num_changes += 1", "Status.RUNNING:\n            pass", seed=1, rule="AGAIN"),
    Fault("one of two transfers is awaited", reads.Reads, "_poll_job", "is_posted and all(transfer", "is_posted and any(transfer", seed=1, rule="CRASH"),
    Fault("a request fails with a connection that was lost", reads.Reads, "_poll_job", "if job.may_repeat:", "if False:", seed=2431, rule="AGAIN"),
    # Handshakes
    Fault("a failed handshake is kept", peer_engines.PeerEngines, "_advance", "del self._peers[peer.source]\n        ", "", seed=12, rule="LINGER"),
    Fault("the workers of a restarted engine stay connected", peer_engines.PeerEngines, "_disconnect", "self._connections.disconnect(self._connected[key].worker)", "pass", seed=34, rule="AGAIN"),
    Fault("a request fails with an old handshake", reads.Reads, "poll", "reads.came_at - peer.began_at > RETRY_S", "False", seed=19, rule="AGAIN"),
    Fault("the start of an offer is not compared", peer_engines, "fetch", "(offers.engine_id, offers.start) != (source.engine_id, source.start)", "offers.engine_id != source.engine_id", seed=34, rule="AGAIN"),
    # Handoffs
    Fault("a handoff serves any prompt", Handoff, "count_shared", "if digest == self.prompt:", "if True:", seed=1, rule="OWN"),
    Fault("a table of blocks loses its first one", handoff, "_read_table", "Blocks(ids, first)", "Blocks(ids[1:], first) if len(ids) > 3 else Blocks(ids, first)", seed=1, rule="RIGHT"),
    # the engine's side
    Fault("positions are off by one", Importer, "_read_whole", "(whole.start, whole.stop)", "(whole.start + 1, whole.stop)", seed=0, rule="OWN"),
    Fault("a block is cached that was read in part", Importer, "_read", "tokens=tokens,\n        to_block_end=to_block_end", "tokens={name: (start, stop - 1) for name, (start, stop) in tokens.items()},\n        to_block_end=False", seed=0, rule="OWN"),
    Fault("a request is received when one worker has read it", LeaseConnector, "step", "if not self._unreported[result.request]:\n                del self._unreported[result.request]", "if self._unreported[result.request] == len(self._reads) - 1:\n                pass", seed=0, rule="GIVEN"),
    Fault("a request that failed is freed at once", engine.Engine, "_end", "is_landing = request.phase is Phase.READING", "is_landing = False", seed=0, rule="REPORT"),
    Fault("a block is cached before it is received", engine.Engine, "_give_blocks", "request.phase = Phase.READING", "request.phase = Phase.READING; request.num_computed += num_read; self._register(request, 0, request.num_computed); request.num_computed -= num_read", seed=8, rule="OWN"),
    # Executors
    Fault("bytes land after an error was reported", fabric.VirtualExecutor, "poll", "flight.num_parts == 0", "(flight.num_parts == 0 or flight.error is not None)", seed=174, rule="GIVEN"),
    Fault("a transfer is done before its last part", fabric.VirtualExecutor, "poll", "flight.num_parts == 0", "flight.num_parts <= 1", seed=0, rule="GIVEN"),
    Fault("a transfer writes one cell more", fabric.VirtualExecutor, "_land", "self.port.memory.land(cells, labels)", "self.port.memory.land(cells, labels); self.port.memory.landed[cells[-1:] + 1] = 7", seed=0, rule="OWN"),
    Fault("a transfer that has failed is done", fabric.VirtualExecutor, "poll", "transfer.status = Status.FAILED\n            transfer.error = flight.error", "transfer.status = Status.DONE", seed=90, rule="OWN"),
    Fault("a transfer fails without an error", fabric.VirtualExecutor, "poll", "Status.FAILED\n            transfer.error = flight.error", "Status.FAILED"),
    Fault("a transfer writes in another order than it reads", fabric.VirtualExecutor, "_post", "self.port.memory.cells_of(local)", "self.port.memory.cells_of(local[::-1])", seed=0, rule="OWN"),
    Fault("a new connection counts as one of before", reads.Reads, "poll", "was_connected=False", "was_connected=True", seed=90, rule="END"),
]  # fmt: skip

Scheduler = SCHEDULER.Scheduler
VLLM_FAULTS = [
    Fault("claims of requests that are read never end", Scheduler, "end_reads", "self._importer.end(name)", "pass", seed=0, rule="END"),
    Fault("a prompt is not compared", Importer, "claim", "handoff.count_shared(prompt)", "handoff.num_tokens", seed=1, rule="OWN"),
    Fault("the claim of a request that waits is not ended", Importer, "finish", "else:\n        self.end(request)", "", seed=0, rule="FREE"),
    Fault("requests that failed are reported while bytes may land", WORKER.Worker, "results", "finished_recving={result.request for result in results}", "finished_recving={result.request for result in results} | failed", seed=0, rule="GIVEN"),
]  # fmt: skip

VLLM_ROOM_FAULTS = [
    # requests that come to both engines at once
    Fault("a block that is computed in part is read too", Importer, "_read_more", "handoff.num_tokens // size * size", "-(-handoff.num_tokens // size) * size", seed=47, rule="OWN"),
    Fault("a part counts as the whole prompt", Importer, "_next", "if found.is_whole:", "if True:", seed=2, rule="OWN"),
    Fault("parts begin where others have not ended", Importer, "_read_more", "record.starts[group] = stop", "record.starts[group] = stop + size", seed=1, rule="OWN"),
    Fault("a room serves any prompt", Importer, "_check_entry", "handoff.check_prompt(record.prompt(num_shared))", "pass"),
    Fault("a refused claim is not seen while a request has blocks", Importer, "_check", "if refusal is not None:", "if False:"),
    Fault("the entry of an aborted request stays", Exporter, "abort", "self._withdraw(export.room, export.lease)", "pass", seed=2, rule="GROW"),
    Fault("a room is kept", Exporter, "_forget", "self._rooms.discard(export.room)", "pass", seed=0, rule="GROW"),
    Fault("a whole room serves any prompt", Importer, "_check_entry", "num_shared = handoff.count_shared(record.prompt)", "num_shared = handoff.num_tokens", seed=3, rule="OWN"),
    Fault("decode claims no lease of a room", Importer, "_hold", "self._claims.claim(handoff.source, handoff.lease, self._name_of(request))", "pass", seed=26, rule="RIGHT"),
    Fault("decode waits for prefill for ever", rooms.Rooms, "silence", "self._system.monotonic() <= subscription.until", "True", seed=0, rule="END"),
    Fault("a request that was given up takes entries", Importer, "end", "self._rooms.unsubscribe(reader)", "pass", seed=0, rule="GROW"),
    Fault("a request that was aborted is read on", Importer, "finish", "self.give_up(request)", "pass"),
    Fault("a request that is given up keeps its blocks lent", Exporter, "abort", "self.leases.revoke(export.lease)", "pass", seed=2, rule="GROW"),
    Fault("a request that is computed is released", Exporter, "step", "is FREE:", "in (FREE, LOST):", seed=0, rule="REPORT"),
    Fault("a room that was read stays open", Exporter, "step", "self._forget(request)", "pass", seed=0, rule="REPORT"),
    Fault("an entry outlives its lease", Listener, "withdraw", "self.rooms.withdraw(room)", "pass", seed=0, rule="GROW"),
    Fault("blocks are lent before they are computed", Scheduler, "_publish_early", "num_tokens = request.num_computed_tokens - request.num_in_flight_tokens", "num_tokens = min(request.num_computed_tokens + 8, request.num_prompt_tokens - 1)", seed=4, rule="OWN"),
    Fault("the whole has a lease of its own", Exporter, "finish", "if not export.lease:", "if True:", seed=0, rule="RIGHT"),
    Fault("a request is reported while a part is read", reads.Reads, "poll", "reads.has_last and not reads.is_moving", "reads.has_last", seed=0, rule="OWN"),
    Fault("the error of a part is forgotten", reads.Reads, "_end", "reads.error = reads.error or result.error", "reads.error = result.error"),
    Fault("all servers of rooms are refused", rooms.Rooms, "subscribe", 'name(address, "address of a server")', 'name("address of a server", address)', seed=1, rule="RIGHT"),
    Fault("what is lost is finished", Exporter, "finish", "export.state is LOST or is_over", "is_over", seed=0, rule="CRASH"),
]  # fmt: skip

HYBRID_FAULTS = [
    # windows
    Fault("a freed block is one of the request's", LeaseConnector, "_tables", ", null=NULL_BLOCK", "", seed=1, rule="OWN", model="windows"),
    Fault("a block is cached of which a window has a part", LeaseConnector, "_start_reads", "whole.first_whole // self._tokens_per_block", "0", seed=1, rule="OWN", model="windows"),
    Fault("a block whose beginning is missing counts as whole", importer, "whole_blocks", "-(-start // size) * size", "start // size * size", seed=125, rule="OWN", model="windows"),
    Fault("all positions before a window are kept", Exporter, "_handoff", "max(first_listed(export.blocks[group], size), read_from.get(group, 0))", "0", seed=5, rule="RIGHT", model="windows"),
    Fault("a window is one position longer than prefill keeps it", importer, "whole_blocks", "max(first, attended)", "max(first, attended - 1)", seed=5, rule="RIGHT", model="windows"),
    Fault("a window is read from one position too late", importer, "whole_blocks", "max(first_wanted, kept)", "max(first_wanted, kept + (kept > 0))", seed=1, rule="OWN", model="windows"),
    Fault("a block that was read in part is not said to be", Importer, "_read_whole", "partial[group] = whole", "pass", seed=1, rule="OWN", model="windows"),
    Fault("a group is read from where others have cached less", Importer, "read", "min(first, starts.get(group, first))", "first", seed=22, rule="OWN", model="hybrid"),
    # states
    Fault("a state is read from another request's slot", LeaseConnector, "_tables", "ids[-1:]", "[max(1, ids[-1] - 1)]", seed=0, rule="OWN", model="states"),
    Fault("prefill computes the last token too", LeaseConnector, "add", "request.is_for_another and is_passing", "False", seed=0, rule="RIGHT", model="states"),
]  # fmt: skip

HYBRID_VLLM_FAULTS = [
    Fault("no request with a state is handed over", Scheduler, "_finish", "num_tokens < request.num_computed_tokens", "num_tokens <= request.num_computed_tokens", seed=0, rule="RIGHT", model="states"),
    Fault("the first block of a state counts", TABLES.BlockTables, "of_ids", "ids[index][-1:]", "ids[index][:1]", seed=0, rule="OWN", model="states"),
    Fault("a prompt with a state does not stop short", Scheduler, "add", "if is_short and", "if False and", seed=0, rule="RIGHT", model="states"),
    Fault("a window begins one position too early", DESCRIPTION, "_first_attended", " + 1)", ")", seed=5, rule="RIGHT", model="windows"),
    Fault("vLLM caches blocks that were read in part", TABLES.BlockTables, "leave_uncached", "max(num_cached, num_blocks)", "num_cached", seed=1, rule="OWN", model="windows"),
    Fault("a window keeps what it has freed", exporter, "first_listed", "return first * tokens", "return 0 * tokens", seed=5, rule="RIGHT", model="windows"),
    Fault("what each group has cached is not told", Scheduler, "begin_read", "for group in self._tables.positioned", "for group in ()", seed=12, rule="OWN", model="hybrid"),
    Fault("all groups have what the first one has", TABLES.BlockTables, "first_uncached", "blocks.blocks[self.indices[group]]", "blocks.blocks[0]", seed=12, rule="OWN", model="hybrid"),
    Fault("one block more counts as cached", TABLES.BlockTables, "first_uncached", "len([*cached])", "(len([*cached]) + 1)", seed=12, rule="OWN", model="hybrid"),
    Fault("a window is read from where others have cached", Importer, "_read_whole", "(first, record.tokens[1]), listed", "(record.tokens[0], record.tokens[1]), listed", seed=12, rule="OWN", model="hybrid"),
]  # fmt: skip

STAGING_FAULTS = [
    Fault("staging blocks are filled again while they are copied", FreeBlocks, "take", "is_free[ids] = False", "is_free[ids] = True", seed=1, rule="OWN"),
    Fault("two layouts share a staging region", Pipeline, "_begin_chunk", "if self._under_way:", "if False:", seed=1, rule="CRASH"),
    Fault("copies are not awaited", Pipeline, "_steps", "not self._copier.done(ticket)", "False and (yield)", seed=1, rule="OWN"),
    Fault("what is staged is read directly too", reads.Reads, "_poll_pipeline", "transfer.num_bytes > 0 or ", "", seed=71, rule="GROW"),
    Fault("a region that stalls is waited for", reads.Reads, "_poll_pipeline", "if now - self._last_chunk_at < STALL_S", "if True", seed=47, rule="AGAIN"),
    Fault("a staged transfer that fails goes on", Pipeline, "_poll_transfers", "status is not Status.DONE", "False", seed=90, rule="OWN"),
]  # fmt: skip

DIGEST_FAULTS = [
    Fault("digests of a lease that has ended are kept", DigestRequests, "drop", "del self._answers[request]", "pass", seed=0, rule="GROW"),
    Fault("digests are not compared", reads.Reads, "_poll_job", "job.error = self._mismatch(job, job.digests)", "self._mismatch(job, job.digests)", seed=3, rule="OWN", features=Feature.WRONG_BYTES),
    Fault("other bytes count as other elements", reads.Reads, "_mismatch", 'error is not None and error.code == "COVER"', "error is not None", seed=3, rule="DIGEST", features=Feature.WRONG_BYTES),
    Fault("one range of a lease is digested for all", DigestRequests, "ask", "if request not in self._answers:", "request = next((each for each in self._answers if each.lease == request.lease), request)\n        if request not in self._answers:", seed=3, rule="DIGEST", features=Feature.WRONG_BYTES),
]  # fmt: skip
VLLM_DIGEST_FAULTS = [
    Fault("digests are asked of ended leases alone", Scheduler, "take_step", "if blocks is not None:", "if blocks is None:", seed=0, rule="AGAIN"),
    Fault("digests of workers are dropped", Scheduler, "take_digests", "self._listener.digests.put(digest_request, [joined(digests)])", "pass", seed=0, rule="AGAIN"),
    Fault("digests of the last worker count", WORKER.KvplanWorkerMetadata, "aggregate", "self.digests.setdefault(request, []).extend(digests)", "self.digests[request] = digests", seed=0, rule="DIGEST"),
    Fault("one request of a step is digested", WORKER.Worker, "start_step", "self._digests[request] = [self._digest_pinned(request, blocks)]", "self._digests = {request: [self._digest_pinned(request, blocks)]}", seed=1, rule="AGAIN"),
    Fault("all positions are digested", WORKER.Worker, "_digest_pinned", "tokens[group] for group in groups - states", "(0, tokens[group][1]) for group in groups - states", seed=3, rule="DIGEST"),
    Fault("states are not digested", WORKER.Worker, "_digest_pinned", "groups - states}", "groups - states}; tables = {group: tables[group] for group in ranges}", seed=0, rule="DIGEST", model="states"),
]  # fmt: skip
VLLM_ROOM_DIGEST_FAULTS = [
    Fault("what comes with the last part is digested before", reads.Reads, "_mismatch", "if blocks.ids.size", "if True", seed=1, rule="DIGEST", model="windows"),
]  # fmt: skip
VLLM_LATE_DIGEST_FAULTS = [
    Fault("digests are kept whose lease has ended meanwhile", DigestRequests, "put", "if request in self._answers:", "if True:", seed=2, rule="GROW", features=Feature.WRONG_BYTES | Feature.of(2)),
]  # fmt: skip
CHOICE_FAULTS = [
    Fault("the first worker is chosen for", peer_engines.PeerEngines, "_fastest_plan", "DirectReads.of(self._worker, workers, ", "DirectReads.of(self._worker, workers[:1], ", seed=0, rule="RIGHT"),
]  # fmt: skip

Receiver, Sender = DECODE.Receiver, PREFILL.Sender
SGLANG_FAULTS = [
    Fault("pages that another request computes are published", PREFILL.Sender, "_publish_early", "if wait_event is not None:", "if False:", seed=1, rule="OWN", features=Feature.ASYNC_STEPS | Feature.BURSTS | Feature.NEAR_PROMPTS),
    Fault("a read does not wait for the batch under way", DECODE.Receiver, "_begin_read", "event is None or event.query()", "True", seed=42, rule="GIVEN", features=Feature.ASYNC_STEPS),
    # as in SGLang's own backends: sglang#24527, #17430, #30233, #26486
    Fault("pages of an aborted request are freed while bytes may land", MANAGER.Manager, "is_abort_release_safe", "not self.rank.is_written(room)", "True", seed=8, rule="GIVEN"),
    Fault("the first token is another request's", Receiver, "_write_metadata", "ctypes.memmove(row.address, content, row.num_bytes)", "pass", seed=0, rule="OWN"),
    Fault("prefill frees pages when they are published", Sender, "poll", "KVPoll.Transferring if self._is_sent", "KVPoll.Success if self._is_sent", seed=0, rule="CLAIM"),
    Fault("a room is opened twice", DECODE.DecodeRank, "open_room", "room in self._open_rooms", "False"),
    Fault("a room is read with another prompt", Importer, "_check_entry", "num_shared = handoff.count_shared(record.prompt)", "num_shared = handoff.num_tokens", seed=3, rule="OWN"),
    # rooms
    Fault("a room that failed stays open", Sender, "failure_exception", "self.clear()", "pass", seed=0, rule="GROW"),
    Fault("a room that was aborted stays open", Sender, "abort", "self.clear()", "pass", seed=0, rule="GROW"),
    Fault("an aborted request takes its room's entry", rooms.Rooms, "unsubscribe", "readers.pop(reader, None) is not None", "False", seed=0, rule="FREE"),
    Fault("a server that gave no answer is not asked again", rooms.Rooms, "_run", "await self._system.sleep(RETRY_S)", "return", seed=3, rule="AGAIN"),
    Fault("a request is published once", Sender, "_publish_until", "await system.sleep(RETRY_S)", "return", seed=18, rule="RIGHT", features=Feature.LOST_ENTRIES),
    Fault("an entry that was not published counts as published", Sender, "_publish", "return False", "return True", seed=18, rule="RIGHT", features=Feature.LOST_ENTRIES),
    # long polls
    Fault("one reader of a room hears", LongPolls, "wake", "self._waiting.pop(key, ())", "[*self._waiting.pop(key, ())][:1]", seed=6, rule="AGAIN", features=Feature.CROWDS),
    Fault("a question that was answered takes others with it", LongPolls, "hold", "if not signals:", "if True:", seed=61, rule="AGAIN", features=Feature.BURSTS),
    Fault("a reader joins the question after the one under way", rooms.Rooms, "subscribe", "self._changes[address].set()", "pass", seed=10, rule="AGAIN"),
    Fault("a room wakes nobody", BOOTSTRAP.BootstrapServer, "_publish", "self._polls.note_change(f\"{stage.room}\")", "pass", seed=1, rule="AGAIN"),
    Fault("decode waits for ever", rooms.Rooms, "silence", "self._system.monotonic() <= subscription.until", "True", seed=0, rule="END"),
    Fault("a room stays in use", Exporter, "_forget", "self._rooms.discard(export.room)", "pass", seed=0, rule="GROW"),
    # leases
    Fault("decode claims no lease", Importer, "_hold", "self._claims.claim(handoff.source, handoff.lease, self._name_of(request))", "pass", seed=26, rule="RIGHT"),
    Fault("decode ends no claim", Importer, "end", "self._claims.release(record.found.handoff.source, record.found.handoff.lease, reader)", "pass", seed=0, rule="END"),
    Fault("prefill keeps what nobody reads", PREFILL.PrefillRank, "_note_ended", "for request in ended.released:", "for request in ():", seed=0, rule="END"),
    Fault("the end of a read is not noted", DECODE.DecodeRank, "_note_ended", "self.ended[name] = error", "pass", seed=0, rule="END"),
    # chunks
    Fault("a page that is computed in part is read", Importer, "_read_more", "handoff.num_tokens // size * size", "-(-handoff.num_tokens // size) * size", seed=5, rule="RIGHT"),
    Fault("a chunk counts as the whole prompt", Importer, "_next", "if found.is_whole:", "if True:", seed=1, rule="RIGHT"),
    Fault("a chunk is read while another one is", reads.Reads, "submit", "if not reads.is_moving:\n            self._begin(reads)", "self._begin(reads)", seed=6, rule="OWN"),
    Fault("a request that is given up keeps its lease", Exporter, "abort", "self.leases.revoke(export.lease)", "pass", seed=38, rule="CLAIM"),
    Fault("a lease that begins early never ends", Leases, "begin_first", "now = self._system.monotonic()", "now = math.inf", seed=0, rule="END"),
    # pages
    Fault("positions of the last chunk alone are counted", Sender, "send", "self._num_tokens += num_kv_tokens", "self._num_tokens = num_kv_tokens", seed=1, rule="RIGHT"),
    Fault("pages after a cached prefix count from the first", Receiver, "send_metadata", "rank.memory.block_tables(kv_indices.tolist(), first, ", "rank.memory.block_tables(kv_indices.tolist(), 0, ", seed=1, rule="AGAIN"),
    Fault("a cached prefix counts as read", Importer, "_read_whole", "(first, record.tokens[1])", "(record.tokens[1], record.tokens[1])", seed=0, rule="OWN"),
]  # fmt: skip

HYBRID_SGLANG_FAULTS = [
    Fault("a window counts as read with the chunks before it", Importer, "_read_more", "record.starts[group] = stop", "record.starts = dict.fromkeys(record.starts, stop)", seed=2, rule="OWN", model="windows"),
    Fault("pages of a window end with those after a cached prefix", DECODE.RankMemory, "block_tables", "-(-num_tokens // self.args.page_size)", "len(pages)", seed=16, rule="RIGHT", model="windows"),
    Fault("pages of a window begin with the prompt", DECODE.RankMemory, "block_tables", "num_pages - len(ids) if", "0 if", seed=1, rule="RIGHT", model="windows"),
    Fault("a state counts as read with the chunks before it", Importer, "_read", "local=local,", "local={group: blocks if group in tokens else Blocks([]) for group, blocks in local.items()},", seed=1, rule="OWN", model="states"),
    Fault("a state is read before the last chunk", Importer, "_read_more", "local = {group: Blocks([]) for group in record.local}", "local = {group: Blocks([]) if self._groups[group].tokens_per_block else record.local[group] for group in record.local}", seed=1, rule="RIGHT", model="states"),
]  # fmt: skip

RESEND_S = 0.5
"""Seconds after which a proxy sends a request again that prefill did not compute."""

SENT_AGAIN_FAULTS = [
    Fault("answers are taken for others' claims", claims.SourceClaims, "take_answer", "answer.asks, strict=True", "answer.asks[::-1], strict=True", seed=299, rule="RIGHT"),
]  # fmt: skip
SENT_AGAIN_ROOM_FAULTS = [
    Fault("parts of another attempt count", room_contents.Published, "of_entry", "earlier.leases != leases", "False", seed=7, rule="GROW"),
    Fault("a request that failed is reported while parts come", reads.Reads, "poll", "reads.has_last and not", "(reads.has_last or reads.error) and not", seed=5, rule="REPORT"),
]  # fmt: skip
TWO_STAGES = Stages(2, has_own_tables=True)
LOST_STAGES: dict[str, Any] = {"features": Feature.LOST_ENTRIES, "stages": TWO_STAGES}
SENT_AGAIN_SGLANG_FAULTS = [
    Fault("chunks of another attempt count", room_contents.Published, "of_entry", "earlier.leases != leases", "False", seed=38, rule="GROW"),
    Fault("a request that comes again is the same attempt", PREFILL.PrefillRank, "next_attempt", "self._num_attempts.pop(room, 0) + 1", "1", seed=4, rule="OWN", **LOST_STAGES),
    Fault("the attempt is that of the room", Sender, "_entry", '"attempt": self._attempt', '"attempt": f"{self._room}"', seed=4, rule="OWN", **LOST_STAGES),
]  # fmt: skip

STAGE_FAULTS = [
    Fault("the lease of the first stage alone is compared", room_contents.Published, "of_entry", "(handoff.lease, *(name(lease, \"lease of a room\") for lease in others))", "(handoff.lease,)", stages=TWO_STAGES),
    Fault("one stage counts as all", BOOTSTRAP._Room, "newest", "{stage.number for stage in stages} == {len(stages)}", "stages", seed=0, rule="REPORT", stages=TWO_STAGES),
    Fault("a question wakes at one change alone", LongPolls, "hold", "self._waiting.setdefault(key, {})[signal] = None", "if 'answer' not in locals():\n                            self._waiting.setdefault(key, {})[signal] = None", seed=4, rule="AGAIN", stages=TWO_STAGES),
    Fault("what the fastest stage has computed counts", room_contents, "_merged", "progress.index(min(progress))", "progress.index(max(progress))", seed=1, rule="RIGHT", stages=TWO_STAGES),
    Fault("the lease of the slowest stage is claimed", room_contents, "_merged", "lease=handoffs[0].lease", "lease=handoffs[slowest].lease", seed=1, rule="RIGHT", stages=TWO_STAGES),
    Fault("the first stage has the pages of all", room_contents, "_merged", "blocks.update(handoff.blocks)", "blocks.update(handoff.blocks)\n        blocks = {group: [*blocks.values()][0] for group in blocks}", seed=0, rule="OWN", stages=TWO_STAGES),
    Fault("a group of a stage keeps its window from the first page", Handoff, "first_kept", "group in self.blocks", "True", seed=1, rule="RIGHT", model="windows", stages=TWO_STAGES),
]  # fmt: skip

BURSTS, PREEMPTION, ASYNC_STEPS, TURNS = Feature.BURSTS, Feature.PREEMPTION, Feature.ASYNC_STEPS, Feature.TURNS
FEATURE_FAULTS = [
    Fault("silence counts from when a read began", LeaseCheck, "_take", "self.confirmed_at = self.asked_at", "pass", seed=20, rule="RIGHT", features=Feature.LOST_ENGINES),
    Fault("a digest is of the first token alone", engine, "prompt_digest", "ids.astype", "ids[:1].astype", seed=2, rule="OWN", features=Feature.NEAR_PROMPTS),
    Fault("a digest leaves out the first token", engine, "prompt_digest", "ids.astype", "ids[1:].astype", seed=1, rule="OWN", features=Feature.NEAR_PROMPTS),
    Fault("a request waits though its transfer has failed", reads.Reads, "_poll_job", "job.held_error or job.lease_check.error", "job.lease_check.error", seed=0, rule="END", features=Feature.HELD_TRANSFERS),
    Fault("a digest leaves out the facts", engine, "prompt_digest", 'members(str, facts, "facts of a prompt")', "()", seed=1, rule="OWN", features=Feature.FACTS),
    Fault("the last slice is lost", reads.Reads, "_bind", "job.unposted.extend(cut(spec, self._max_transfer_ids))", "slices = [*cut(spec, self._max_transfer_ids)]\n        job.unposted.extend(slices[:-1] if len(slices) > 1 else slices)", seed=0, rule="OWN", features=Feature.SLICES),
    Fault("a slice that cannot be posted is not seen", reads.Reads, "_post", "self._fail(job, error)", "pass", seed=1, rule="OWN", features=Feature.SLICES),
    Fault("a first slice that cannot be posted is not seen", reads.Reads, "_post", "self._fail(job, error)", "job.transfers and self._fail(job, error)", seed=18, rule="OWN", features=Feature.SLICES),
    Fault("a lost lease is not seen while bytes move", LeaseCheck, "poll", "if self.answer is None and not is_over", "if self.has_last_byte and self.answer is None and not is_over", seed=20, rule="END", features=Feature.LOST_ENGINES),
    Fault("a claim that is renewed keeps its place before later ones", leases._Lease, "claim", "claims.pop(reader, None)", "pass", seed=6, rule="CLAIM", features=Feature.LOST_ENGINES),
    Fault("a request waits though its lease has ended", reads.Reads, "_poll_job", "job.held_error or job.lease_check.error", "job.held_error", seed=20, rule="END", features=Feature.LOST_ENGINES),
    Fault("a silent source never counts as gone", LeaseCheck, "_take", "> SILENCE_S", "> 1e9", seed=0, rule="LINGER", features=Feature.LOST_ENGINES),
    Fault("a read ends when its first slices have", reads.Reads, "_poll_job", "is_posted = not job.unposted", "is_posted = True", seed=0, rule="OWN", features=Feature.SLICES),
    Fault("malformed answers end the coroutine of claims", claims.Claims, "_run", "except KVPlanError as error:", "except KVPlanError as error:\n            if error.code == 'MESSAGE':\n                raise", seed=5, rule="CRASH", features=Feature.GARBLED_MESSAGES),
    Fault("too few answers are taken", claims.ClaimAnswer, "of_fields", "if numbers != ", "if False and numbers != ", seed=5, rule="CRASH", features=Feature.GARBLED_MESSAGES),
    Fault("an error of a server that parses is raised", claims.ClaimMessage, "of_fields", 'instance(Mapping, fields, "a message of claims")', "fields", seed=0, rule="CRASH", features=Feature.GARBLED_MESSAGES),
    Fault("the signature of a handoff is not checked", Handoff, "of_params", '_check_signature(params, instance(SharedKey, key, "key of a handoff"))', "pass", seed=57, rule="OWN", features=Feature.GARBLED_MESSAGES),
    Fault("a claim stays whose blocks are needed back", Importer, "_do_without", "(ASKING, CLAIMED)", "(ASKING,)", seed=31, rule="ASK", features=Feature.BURSTS | Feature.TURNS),
    Fault("a claim of a request that waits behind others stays", Importer, "_do_without", "(ASKING, CLAIMED)", "(CLAIMED,)", seed=211, rule="ASK", features=Feature.BURSTS | Feature.TURNS),
    Fault("a read that has failed asks its source no more", reads.Reads, "_poll_job", "if job.error is None or not job.is_settled:", "if job.error is None:", seed=1, rule="END", features=Feature.LOST_ENGINES | Feature.SLICES | Feature.HELD_TRANSFERS | Feature.RESTARTS),
    Fault("a question joins one under way", claims.SourceClaims, "ask", "self._unsent.setdefault(lease, [])", "(self._sent if lease in self._sent else self._unsent).setdefault(lease, [])", seed=15, rule="ASK", features=Feature.LATE_MESSAGES),
]  # fmt: skip
FEATURE_FAULTS += [
    Fault("kept answers do not give way", Exporter, "give_way", "if not export.gives_way:", "if True:", seed=1, rule="END", features=TURNS),
    Fault("answers are kept as if requests had come for them", Exporter, "finish", "export.gives_way = first_s is not None", "export.gives_way = False", seed=1, rule="END", features=TURNS),
    Fault("an answer gives way that a reader claims", Leases, "end_unclaimed", "found is None or any(end > now for end in found.claims_end_at.values())", "found is None", seed=13, rule="CLAIM", features=TURNS),
    Fault("a claimed answer never gives way", Exporter, "give_way", "wanted.add(lease)", "pass", seed=31, rule="END", features=BURSTS | PREEMPTION | TURNS),
    Fault("a rewritten answer is read", Handoff, "count_shared", "return num_tokens\n    raise", "return self.num_tokens\n    raise", seed=4, rule="OWN", features=TURNS),
    Fault("a lease is named as its request", Leases, "_grant", 'f"{request} {self._system.token_hex(LEASE_TOKEN_BYTES)}"', 'f"{request} 7"', seed=34, rule="CLAIM", features=Feature.REPEATS),
    Fault("a lease is named by the number of leases", Leases, "_grant", "{self._system.token_hex(LEASE_TOKEN_BYTES)}", "{len(self._leases)}", seed=47, rule="CLAIM", features=Feature.REPEATS),
    Fault("a handoff of other weights is read", Handoff, "check_weights", "version != self.weights_version", "False", seed=1, rule="OWN", features=Feature.UPDATES),
    Fault("leases stay valid when a cache is reset", Leases, "end_all", "self._leases.clear()", "pass", seed=0, rule="CLAIM", features=Feature.UPDATES),
    Fault("a table with gaps is read as one without", handoff, "_read_table", "if GAP not in ids:", "if GAP in ids:", seed=1, rule="RIGHT", model="windows", features=Feature.SINKS),
    Fault("gaps of a table move to its end", handoff, "_table_values", "blocks.ordinals - blocks.first", "range(len(blocks.ids))", seed=1, rule="RIGHT", model="windows", features=Feature.SINKS),
]  # fmt: skip
FEATURE_FAULTS += [
    Fault("one of two that ask hears", claims.SourceClaims, "_resolve", "self._sent.pop(lease)", "self._sent.pop(lease)[:1]", seed=7, rule="LINGER", features=Feature.CROWDS),
    Fault("a question takes the place of another one", claims.SourceClaims, "ask", "self._unsent.setdefault(lease, []).append(answer)", "self._unsent[lease] = [answer]", seed=0, rule="LINGER", features=Feature.CROWDS),
    Fault("the last reader that is done ends a lease", Leases, "release", "if ending.over_at <= now:", "if reader == [*ending.claims_end_at, reader][-1]:", seed=2, rule="CLAIM", features=Feature.CROWDS),
    Fault("a reader that is done ends the lease of others", Leases, "release", "if ending.over_at <= now:", "if ending.ends_at <= now:", seed=2, rule="CLAIM", features=Feature.CROWDS),
    Fault("a claim that is renewed ends when it would have", leases._Lease, "claim", "claims.pop(reader, None)", "if reader in claims:\n        return True", seed=2, rule="CLAIM", features=Feature.CROWDS),
    Fault("claims end with the first of them", leases._Lease, "claim", "claims[reader] = end", "claims[reader] = end\n    self.ends_at = min(self.ends_at, end)\n    claims.move_to_end(next(iter(claims)))", seed=11, rule="CLAIM", features=Feature.CROWDS),
]  # fmt: skip
FEATURE_FAULTS += [
    Fault("names may be of any length", claims, "_checked_claim", 'at_most(MAX_NAME_BYTES, num_bytes, f"bytes of a {subject}", "claim a lease")', "pass", seed=3, rule="REFUSE", features=Feature.BAD_FIELDS),
    Fault("the longest name is refused", claims, "_checked_claim", "at_most(MAX_NAME_BYTES,", "at_most(MAX_NAME_BYTES - 1,", seed=0, rule="REFUSE", features=Feature.BAD_FIELDS),
    Fault("names of rooms may be of any length", room_contents, "_read_question", 'at_most(MAX_ROOM_CHARACTERS, len(room), "characters of a room\'s name", action)', "pass", seed=5, rule="REFUSE", features=Feature.BAD_FIELDS),
    Fault("a handoff has any number of prefixes", handoff, "_read_prefixes", "len(pairs) > MAX_PREFIXES", "False", seed=12, rule="REFUSE", features=Feature.BAD_FIELDS),
    Fault("a handoff keeps positions of a group that it lacks", Handoff, "__attrs_post_init__", "if group not in tables:", "if False:", seed=41, rule="REFUSE", features=Feature.BAD_FIELDS),
    Fault("a second start is read while the first one answers", peer_engines.PeerEngines, "_plan", "await self._refuse_beside(source, start, min(ANSWER_S, timeout_s / 2 / len(earlier)))", "pass", seed=3, rule="START", features=Feature.RIVALS),
    Fault("workers of an earlier start stay connected", peer_engines.PeerEngines, "_disconnect_others", "key[0] == engine_id", "key in plan.offers", seed=11, rule="GROW", features=Feature.RESTARTS | Feature.RESHAPES),
    Fault("a block is read in part that another connector stores", Importer, "_check_siblings", "if self.siblings:", "if False:", seed=1, rule="OWN", model="windows", features=Feature.SIBLINGS),
]  # fmt: skip
FEATURE_FAULTS += [
    Fault("a request that has just got its blocks gives way", Importer, "_do_without", "record.state in (ASKING, CLAIMED)", "record.state is not ENDING", seed=3, rule="END", features=TURNS | Feature.INTERLEAVED),
    Fault("an answer brings back a claim that has ended meanwhile", claims.SourceClaims, "take_answer", "if claim not in self._due_at:", "if False:", seed=4, rule="GROW", features=TURNS | Feature.INTERLEAVED),
    Fault("a claim without an answer is sent again when it has ended", claims.SourceClaims, "take_failure", "if claim in self._due_at:", "if True:", seed=6, rule="GROW", features=TURNS | Feature.INTERLEAVED),
]  # fmt: skip
LIMIT_FAULTS = [
    Fault("ends of claims that do not fit a message are lost", claims.SourceClaims, "take_message", "for claim in message.done:\n        del self._done[claim]", "self._done.clear()", seed=1, rule="LINGER", features=BURSTS | Feature.CHILDREN),
    Fault("rooms that do not fit a question are not asked for", rooms.Rooms, "_run", "range(0, len(asked), MAX_ASKED)", "range(0, 1, MAX_ASKED)", seed=13, rule="AGAIN"),
    Fault("a handshake that has to wait never begins", peer_engines.PeerEngines, "_advance", "self._begin_handshake(peer)", "pass", seed=41, rule="END"),
]  # fmt: skip
LIMIT_LEASE_FAULTS = [
    Fault("a renewal counts as one more reader", leases._Lease, "claim", "    claims.pop(reader, None)\n", "    before = len(claims)\n    if before >= MAX_READERS and next(iter(claims.values())) > now:\n        return False\n    claims.pop(reader, None)\n", seed=1, rule="CLAIM", features=Feature.CROWDS),
    Fault("readers whose claims have ended count", leases._Lease, "claim", "while claims and", "while False and", seed=40, rule="CLAIM", features=Feature.CROWDS),
    Fault("a lease has one reader more", leases._Lease, "claim", "len(claims) >= MAX_READERS", "len(claims) > MAX_READERS", seed=0, rule="CLAIM", features=Feature.CROWDS),
    Fault("a lease has one reader less", leases._Lease, "claim", "len(claims) >= MAX_READERS", "len(claims) + 1 >= MAX_READERS", seed=0, rule="CLAIM", features=Feature.CROWDS),
]  # fmt: skip
"""Faults that fleets with :func:`~tests.simulation.limits.small_limits` find: of vLLM's rooms, and of leases."""
RESTART_FAULT = Fault(
    *("a question waits where the server has restarted", room_contents.RoomPolls, "answer"),
    *('start not in ("", self._start)', "False"),
    seed=917,
    rule="END",
)
"""A fault that SGLang's fleets find with these limits: of two ranks one hears of the restart, and asks often."""

HostCache = HOST_CACHE.HostCache
FEATURE_VLLM_FAULTS = [
    Fault("failed reads of other ranks are told when all have received", WORKER.KvplanWorkerMetadata, "aggregate", "self.failed |= other.failed", "pass", seed=147, rule="END", features=Feature.HELD_TRANSFERS),
    Fault("prefill goes on after a prompt that was shortened", Scheduler, "_stop_short", "request.max_tokens = 1", "pass", seed=1, rule="RIGHT", model="states", features=Feature.LONG_PREFILLS),
    Fault("a prompt with an answer has no digest of its own", Scheduler, "_finish", "prefixes[num_prompt] = self._state.prompt_of(request, num_prompt)", "pass", seed=1, rule="RIGHT", features=Feature.LONG_PREFILLS),
    Fault("the importer hears of no sibling", Scheduler, "set_siblings", "self._importer.siblings = siblings", "pass", seed=1, rule="OWN", model="windows", features=Feature.SIBLINGS),
    Fault("answers are lent as prompts are", Scheduler, "_finish", "first_s=None if is_computed(request) else ttl_s", "first_s=None", seed=0, rule="END", features=TURNS),
    Fault("no answer gives way", Scheduler, "_give_way", "given = exporter.give_way(num_blocks)", "given = ()", seed=0, rule="END", features=TURNS),
    Fault("answers give way once", Scheduler, "end_exports", "self._giving_way.difference_update(requests)", "pass", seed=0, rule="END", features=TURNS),
    Fault("what a step has computed before is not copied", Scheduler, "save", "max(0, num_computed - self._drafts_know_next)", "stop", seed=1, rule="OWN", features=Feature.HOST_COPIES),
    Fault("a block that is not full is not copied", TABLES.BlockTables, "within", "blocks.ordinals * size < stop", "(blocks.ordinals + 1) * size < stop", seed=0, rule="OWN", features=Feature.HOST_COPIES),
    Fault("the block in which a step begins is not copied", TABLES.BlockTables, "within", "blocks.ordinals >= first // size", "blocks.ordinals > first // size", seed=0, rule="OWN", features=Feature.HOST_COPIES),
    Fault("workers are not told what to copy", Scheduler, "take_step", "KvplanMetadata(self._importer.step(), self._saves)", "KvplanMetadata(self._importer.step(), {})", seed=0, rule="OWN", features=Feature.HOST_COPIES),
    Fault("workers do not copy what a step has computed", WORKER.Worker, "save", "self._host_cache.save(step.saves)", "pass", seed=0, rule="OWN", features=Feature.HOST_COPIES),
    Fault("what was read is not copied to the device", WORKER.Worker, "results", "self._host_cache.end_read(result)", "pass", seed=0, rule="OWN", features=Feature.HOST_COPIES),
    Fault("blocks that are read in part are not copied from the device first", HostCache, "begin_read", 'self._copy(partial_ids, "d2h")', "pass", seed=12, rule="OWN", features=Feature.HOST_COPIES),
    Fault("blocks that are read in part are not copied to the device", HostCache, "begin_read", "blocks.ids[is_filled]", "blocks.ids[is_whole]", seed=0, rule="OWN", features=Feature.HOST_COPIES),
    Fault("a state is not copied to the device", HostCache, "begin_read", "filled_ids[group.name] = blocks.ids\n", "filled_ids[group.name] = blocks.ids[:0]\n", seed=0, rule="OWN", model="states", features=Feature.HOST_COPIES),
    Fault("what has come of a failed read is copied to the device", HostCache, "end_read", "if result.error is None:", "if True:", seed=61, rule="OWN", features=Feature.HOST_COPIES),
    Fault("the blocks of a request that was read are remembered", HostCache, "end_read", "self._filled.pop(result.request, {})", "self._filled.get(result.request, {})", seed=0, rule="GROW", features=Feature.HOST_COPIES),
    Fault("a request is copied to the device that has failed while bytes may land", WORKER.Worker, "results", "failed.update(self._reads.late())", "late = self._reads.late()\n    failed.update(late)\n    for name in late if self._host_cache is not None else ():\n        self._host_cache._copy(self._host_cache._filled.pop(name, {}), 'h2d')", seed=0, rule="GIVEN", features=Feature.HOST_COPIES),
    Fault("an answer is handed over with the position of a step under way", Scheduler, "_finish", "num_computed_tokens - num_in_flight,", "num_computed_tokens,", seed=0, rule="OWN", features=ASYNC_STEPS | TURNS),
    Fault("a state that has passed the answer is handed over", Scheduler, "_finish", "self._tables.states and num_tokens < request.num_computed_tokens", "False", seed=1, rule="OWN", model="states", features=ASYNC_STEPS | TURNS),
    Fault("weights that change while a request waits for blocks are not compared", Importer, "_check", "handoff.check_weights(self._weights())", "pass", seed=56, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("a request of old and new weights is handed over", SCHEDULER.Scheduler, "hand_over", "handoff = self._finish(request, ids)\n    self._state.forget(name)", "self._state.forget(name)\n    handoff = self._finish(request, ids)", seed=5, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("changed weights have the first name", ENGINE_STATE.EngineState, "weights_named", "elif not self._has_changed:", "else:", seed=2, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("blocks of old weights count as new ones", ENGINE_STATE.EngineState, "note_origin", "is_old = self._has_old_weights or (", "is_old = (", seed=5, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("a reset of vLLM's cache frees nothing", Scheduler, "reset", "self._exporter.reset()", "pass", seed=0, rule="LINGER", features=Feature.UPDATES),
    # adapters
    Fault("an adapter that was overwritten since the claim is not noticed", Scheduler, "begin_read", "request.lora_request is not None", "False", seed=100, rule="OWN", features=Feature.ADAPTERS),
    Fault("requests whose adapter was overwritten go on", ENGINE_HOOKS, "_fail_outdated", "any(state.is_loaded_wrongly(request) for state in states)", "False", seed=1, rule="OWN", features=Feature.ADAPTERS),
    Fault("a request of two adapters is handed over", Scheduler, "_finish", "not self._state.is_current(request)", "False", seed=54, rule="OWN", features=Feature.ADAPTERS),
    Fault("an adapter's content is that of its folder now", ENGINE_STATE.EngineState, "adapter_of", "loaded is None", "True", seed=2, rule="OWN", features=Feature.ADAPTERS),
    Fault("an adapter that was dropped counts as loaded", ENGINE_STATE.EngineState, "adapters_changed", "self._adapters.pop(adapter_id, None)", "pass", seed=24, rule="OWN", features=Feature.ADAPTERS),
    Fault("an adapter that is loaded again keeps its content", ENGINE_STATE.EngineState, "_load", "self._adapters[adapter.adapter_id] = adapter", "self._adapters.setdefault(adapter.adapter_id, adapter)", seed=132, rule="OWN", features=Feature.ADAPTERS),
    Fault("an adapter is compared with one of its id", ENGINE_STATE.EngineState, "_load", "self._contents.get(adapter.name, adapter.content)", "self._adapters.get(adapter.adapter_id, adapter).content", seed=8, rule="OWN", features=Feature.ADAPTERS | Feature.NAMED_AGAIN),
    Fault("blocks of an adapter's old content count as new ones", ENGINE_STATE.EngineState, "_load", "self._old_names.add(adapter.name)", "pass", seed=5, rule="OWN", features=Feature.ADAPTERS),
    Fault("a call that failed has changed no weights", ENGINE_HOOKS, "_with_calls", "finally:", "except TimeoutError:\n        raise\n    else:", seed=1, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("a reset of vLLM's cache that was refused counts as done", ENGINE_HOOKS, "_with_resets", "if results[0]:", "if results:", seed=5, rule="OWN", features=Feature.LIVE_UPDATES),
    # drafts
    Fault("what drafts cache of another token is read", Importer, "count", "record.num_shared - record.num_stale", "record.num_shared", seed=2, rule="OWN", model="drafts", features=TURNS),
    Fault("what drafts cache of another token is decode's alone", Scheduler, "_import", "self._drafts_know_next and is_optional", "self._drafts_know_next and not is_optional", seed=2, rule="OWN", model="drafts", features=TURNS),
    Fault("positions of drafts are not copied", Scheduler, "save", "stop = request.num_computed_tokens + scheduled.num_scheduled_tokens[name]", "stop = min(request.num_tokens, request.num_computed_tokens + scheduled.num_scheduled_tokens[name])", seed=18, rule="OWN", model="drafts", features=Feature.HOST_COPIES | TURNS),
    Fault("a question joins one under way", claims.SourceClaims, "ask", "self._unsent.setdefault(lease, [])", "(self._sent if lease in self._sent else self._unsent).setdefault(lease, [])", seed=1, rule="ASK", features=Feature.LATE_MESSAGES),
]  # fmt: skip
NAMED_AGAIN = Feature.LIVE_UPDATES | Feature.NAMED_AGAIN
FEATURE_SGLANG_FAULTS = [
    Fault("a request may name any server", rooms.Rooms, "subscribe", 'self._system.check_server(name(address, "address of a server"))', 'name(address, "address of a server")', seed=0, rule="REFUSE", features=Feature.BAD_FIELDS),
    # weights that change while requests run
    Fault("a flush that was refused counts as done", CHANGES, "_flush", "if is_flushed:", "if True:", seed=1, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("a flush that was refused after an update counts as done", CHANGES, "_flush_after", "is_right and request.flush_cache", "request.flush_cache", seed=1, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("an update that flushes nothing counts as a flush", CHANGES, "_flush_after", "is_right and request.flush_cache", "is_right", seed=3, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("an update leaves the prefix cache as it is", CHANGES.Weights, "change", "self.is_flushed = False", "pass", seed=1, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("weights without a name are those of all engines", CHANGES.Weights, "change", "self.token = uuid.uuid4().hex", 'self.token = "new"', seed=1, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("changed weights have the name of the first ones", CHANGES.Weights, "name", "(\"\", FIRST_WEIGHTS, self.before)", "(self.before,)", seed=16, rule="OWN", features=NAMED_AGAIN),
    Fault("the oldest attempt is served", BOOTSTRAP._Room, "newest", "reversed(self.attempts.values())", "self.attempts.values()", seed=31, rule="REPORT", features=Feature.LOST_ENTRIES | Feature.REPEATS),
    Fault("a request that is over is published again", Sender, "_publish_until", "not self._has_room or ", "", seed=36, rule="REPORT", features=Feature.LOST_ENTRIES),
    Fault("a request that was sent ends when it is aborted", Sender, "abort", "        self.clear()", "    self.clear()", seed=0, rule="END", features=Feature.HANGUPS),
    Fault("changed weights that had a name get that of the first ones", CHANGES.Weights, "name", "self.is_named = version", "self.is_named = self.is_named or version", seed=2, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("a part of weights counts as all", CHANGES.Weights, "begin", "self.is_changing = True", "pass", seed=57, rule="AGAIN", features=Feature.LIVE_UPDATES),
    Fault("a prompt is handed over as one of the first weights", Sender, "send", "weights_version=WEIGHTS.version", 'weights_version=""', seed=0, rule="AGAIN", features=Feature.LIVE_UPDATES),
    Fault("a chunk is published as one of the first weights", Sender, "_publish_early", "weights_version=WEIGHTS.version", 'weights_version=""', seed=49, rule="RIGHT", features=Feature.LIVE_UPDATES),
    Fault("other weights keep a name that was there before", CHANGES.Weights, "name", '("", FIRST_WEIGHTS, self.before)', '("", FIRST_WEIGHTS)', seed=4, rule="OWN", features=NAMED_AGAIN),
    Fault("a name that was never flushed may come again", CHANGES.Weights, "change", "self.is_named and not self.is_changing", "self.is_known", seed=37, rule="OWN", features=NAMED_AGAIN),
    Fault("weights that change keep their name", CHANGES.Weights, "change", "self.is_named = False", "pass", seed=27, rule="OWN", features=NAMED_AGAIN),
    # adapters
    Fault("an adapter that is loaded anew under its id keeps its content", CHANGES.Adapters, "note", "self.contents[lora_id] = uuid.uuid4().hex", "pass", seed=5, rule="OWN", features=Feature.ADAPTERS),
    Fault("an adapter that is loaded anew under its id has pages of its new content alone", CHANGES.Adapters, "note", "self.contents[lora_id] = uuid.uuid4().hex", "self.contents[lora_id] = content", seed=4, rule="OWN", features=Feature.ADAPTERS | Feature.NAMED_AGAIN),
    Fault("an adapter's content is its name", CHANGES.Adapters, "content_of", "self.contents.setdefault(lora_id, uuid.uuid4().hex)", 'lora_id.partition(",")[0]', seed=2, rule="OWN", features=Feature.ADAPTERS),
    Fault("weights are compared when a request is claimed alone", Importer, "_check", "handoff.check_weights(self._weights())", "pass", seed=13, rule="OWN", features=Feature.LIVE_UPDATES),
    Fault("prefill has one timeout for all entries", rooms.Rooms, "_deliver", "subscription.until = self._system.monotonic() + self._timeout_s", "pass", seed=1, rule="RIGHT", features=Feature.SHORT_WAITS),
]  # fmt: skip
FEATURE_ROOM_FAULTS = [
    Fault("the last part of a request alone is copied to the device", HostCache, "begin_read", "np.concatenate([earlier.get(label, ids[:0]), ids])", "ids", seed=2, rule="OWN", features=Feature.HOST_COPIES),
    Fault("blocks that another part fills are copied from the device", HostCache, "begin_read", "blocks.ids[is_filled & ~is_whole]", "blocks.ids[~is_whole]", seed=0, rule="GIVEN", features=Feature.HOST_COPIES),
    Fault("a request waits though its claim was refused", Importer, "_check", "if refusal is not None:", "if False:", seed=5, rule="END", features=BURSTS | PREEMPTION),
    Fault("a child takes the room of another one", Exporter, "open", "if room in self._rooms:", "if False:", seed=2, rule="LINGER", features=Feature.CHILDREN),
    Fault("what another request computes is published of one that is resumed", SCHEDULER, "_begun", "resumed.union(request.req_id for request in scheduled.scheduled_new_reqs)", "{request.req_id for request in scheduled.scheduled_new_reqs}", seed=9, rule="OWN", features=BURSTS | PREEMPTION | ASYNC_STEPS),
    Fault("the lease of a preempted request stays valid", Scheduler, "publish", "self._exporter.revoke(name)", "pass", seed=4, rule="CLAIM", features=BURSTS | PREEMPTION),
    Fault("a lease is revoked when its request comes back", Scheduler, "publish", "self._rooms.keys() & (scheduled.preempted_req_ids or ())", "self._rooms.keys() & scheduled.scheduled_cached_reqs.resumed_req_ids", seed=0, rule="CLAIM", features=BURSTS | PREEMPTION),
    Fault("a revoked lease stays valid", Exporter, "revoke", "is_claimed = self.leases.revoke(export.lease)", "is_claimed = True", seed=0, rule="GROW", features=BURSTS | PREEMPTION),
    Fault("the entry of a preempted request stays", Exporter, "revoke", "self._withdraw(export.room, export.lease)", "pass", seed=0, rule="GROW", features=BURSTS | PREEMPTION),
    Fault("the blocks of a preempted request are counted", Exporter, "revoke", "self._keep(export, 0, {})", "pass", seed=0, rule="REPORT", features=BURSTS | PREEMPTION),
    Fault("what was found is published alone", Exporter, "publish", "num_tokens <= export.num_found", "num_tokens < export.num_found", seed=1, rule="OWN", features=BURSTS | ASYNC_STEPS | Feature.NEAR_PROMPTS),
    Fault("a preempted request whose reader has a part is published again", Exporter, "revoke", "ExportEvent.LOSE if is_claimed else ExportEvent.REVOKE", "ExportEvent.REVOKE", seed=4, rule="AGAIN", features=BURSTS | PREEMPTION),
    Fault("what a step under way writes is published", Scheduler, "_publish_early", "num_tokens = request.num_computed_tokens - request.num_in_flight_tokens", "num_tokens = request.num_computed_tokens", seed=0, rule="OWN", features=ASYNC_STEPS),
    Fault("a prefix that another request computes is published", Exporter, "publish", "num_tokens <= export.num_found or ", "", seed=11, rule="OWN", features=BURSTS | ASYNC_STEPS | Feature.NEAR_PROMPTS),
    Fault("a request begins after no prefix", Scheduler, "publish", "self._exporter.note_found(name, request.num_computed_tokens)", "pass", seed=11, rule="OWN", features=BURSTS | ASYNC_STEPS | Feature.NEAR_PROMPTS),
    Fault("a digest leaves out the salt", ENGINE_STATE.EngineState, "facts_of", 'facts.append((0, f"salt {request.cache_salt}"))', "pass", seed=4, rule="OWN", features=Feature.FACTS),
    Fault("a digest leaves out the adapter", ENGINE_STATE.EngineState, "facts_of", 'facts.append((0, f"adapter {self.adapter_of(request)}"))', "pass", seed=2, rule="OWN", features=Feature.FACTS),
    Fault("a digest leaves out images", ENGINE_STATE.EngineState, "facts_of", "facts.append((int(span.offset), text))", "pass", seed=1, rule="OWN", features=Feature.FACTS),
    Fault("a digest leaves out where an image is", ENGINE_STATE.EngineState, "facts_of", " at {span.offset}", "", seed=22, rule="OWN", features=Feature.FACTS),
    Fault("a salt counts after the first token", ENGINE_STATE.EngineState, "prompt_of", "or not position", "and position", seed=2, rule="OWN", features=Feature.FACTS),
    Fault("malformed answers of rooms end their coroutine", rooms.Rooms, "_run", "except KVPlanError as error:", "except KVPlanError as error:\n            if error.code == 'MESSAGE':\n                raise", seed=1, rule="CRASH", features=Feature.GARBLED_MESSAGES),
    Fault("a restarted server of rooms is not noticed", rooms.Rooms, "_deliver", "subscription.start or answer.start", "subscription.start and answer.start", seed=1, rule="END", features=BURSTS | Feature.RESTARTS),
    Fault("a lease ends of a request that is gone", Exporter, "step", "export is None or ", "", seed=24, rule="CRASH", features=Feature.HANGUPS),
    Fault("a request that is given up is reported while a part is read", reads.Reads, "submit", "reads.error = partial_read.error.with_details(request=request)", "reads.error = partial_read.error.with_details(request=request); reads.is_moving = False", seed=47, rule="GIVEN", features=Feature.HANGUPS),
    Fault("what drafts cache later is published", Scheduler, "_publish_early", "num_tokens - self._drafts_know_next,", "num_tokens,", seed=0, rule="OWN", model="drafts"),
    Fault("what drafts cache later is not copied", Scheduler, "save", "num_computed - self._drafts_know_next", "num_computed", seed=0, rule="OWN", model="drafts", features=Feature.HOST_COPIES),
    Fault("a request may name any server", rooms.Rooms, "subscribe", 'self._system.check_server(name(address, "address of a server"))', 'name(address, "address of a server")', seed=0, rule="REFUSE", features=Feature.BAD_FIELDS),
    Fault("prefill has one timeout for all entries", rooms.Rooms, "_deliver", "subscription.until = self._system.monotonic() + self._timeout_s", "pass", seed=1, rule="RIGHT", features=Feature.SHORT_WAITS),
    Fault("a request with a wrong address waits", Importer, "refuse", "record.refusal or error", "record.refusal", seed=0, rule="END", features=Feature.BAD_FIELDS),
]  # fmt: skip

STORE, SHARED, ROUGH, POPULAR = Feature.STORE, Feature.SHARED_STORE, Feature.ROUGH_STORE, Feature.POPULAR_PROMPTS
STORE_FAULTS = [
    # keys
    Fault("a key leaves out the facts", ENGINE_STATE.EngineState, "store_facts_of", "[*first, *self.facts_of(request)]", "first", seed=0, rule="OWN", features=STORE | Feature.FACTS),
    Fault("a key leaves out the version of the weights", ENGINE_STATE.EngineState, "store_facts_of", "if version", "if False", seed=2, rule="STORE", features=STORE | Feature.UPDATES),
    Fault("a fact counts from the next page on", page_keys, "_texts_by_page", "texts[position // tokens_per_page]", "texts[position // tokens_per_page + 1]", seed=0, rule="OWN", features=STORE | Feature.FACTS),
    Fault("a key is of one page alone", Chain, "of", "hashlib.sha256(digest)", "hashlib.sha256(b'')", seed=16, rule="OWN", features=STORE),
    Fault("a key leaves out the last token of a page", Chain, "of", "8 * (page + 1) * size]", "8 * (page + 1) * size - 8]", seed=0, rule="OWN", features=STORE | Feature.NEAR_PROMPTS),
    # pages and shards
    Fault("a file gets the shard of another rank", StoreClient, "_files", "page_plan.offsets, strict", "page_plan.offsets[::-1], strict", seed=0, rule="OWN", features=STORE),
    Fault("the last blocks of a window alone are loaded", STORE_SCHEDULER.StoreScheduler, "begin_load", "self._attended[group](stop)", "self._attended[group](stop) + self._tables.block_sizes[group]", seed=0, rule="OWN", model="windows", features=STORE),
    Fault("a state inside a page has the key of its end", STORE_SCHEDULER.StoreScheduler, "begin_save", "if request.num_computed_tokens == chain.num_tokens == num_tokens:", "num_tokens = chain.num_tokens\n    if True:", seed=0, rule="STORE", model="states", features=STORE),
    # loads and saves
    Fault("a page that was evicted after the search is left out", StoreClient, "_runs", "if page_plan is None:\n", "if page_plan is None:\n            start += 1\n            continue\n", seed=3, rule="OWN", features=STORE),
    Fault("a file that was evicted before the read is left out", StoreClient, "_read_file", "self.backend.delete(file.name)\n        raise", "self.backend.delete(file.name)\n        return", seed=16, rule="OWN", features=STORE),
    Fault("a file's digest is not compared", page_files, "read_page", "if digest.hexdigest() != header.digest:", "if False:", seed=16, rule="OWN", features=STORE),
    Fault("a load that has failed by an error of its own is told as done", STORE_WORKER.StoreWorker, "_load", 'failed", job.request)\n        has_failed = True', 'failed", job.request)', seed=2, rule="OWN", features=STORE),
    Fault("a load that has failed is told as done", STORE_WORKER.StoreWorker, "_load", "self._results.failed_recving.add(job.request)", "pass", seed=1, rule="OWN", features=STORE),
    Fault("a store saves what was not read", STORE_SCHEDULER.StoreScheduler, "begin_save", "max(first, read_from.get(group, 0))", "first", seed=228, rule="OWN", model="windows", features=STORE),
    Fault("a store is not told what was not read", Scheduler, "take_step", "store.leave_out(partial_read.request, group, whole.start)", "pass", seed=228, rule="OWN", model="windows", features=STORE),
    Fault("what a store leaves out is remembered", STORE_SCHEDULER.StoreScheduler, "begin_save", "self._read_from.pop(request.request_id, {})", "self._read_from.get(request.request_id, {})", seed=1, rule="GROW", model="windows", features=STORE),
    Fault("a save is told before its bytes are read", STORE_SCHEDULER.StoreScheduler, "begin_save", "    return True", "    return False", seed=0, rule="STORE", features=STORE),
    Fault("a client that was given up moves its bytes", stalls.StallGuard, "call", "client.abandon()", "pass", seed=1, rule="STORE", features=STORE),
    Fault("the last token of a prompt is loaded", STORE_SCHEDULER.StoreScheduler, "count_tokens_to_load", "min(stop, num_tokens - 1)", "min(stop, num_tokens)", seed=0, rule="CRASH", features=STORE),
    Fault("a load ends with its first run of pages", StoreClient, "load", "for page_plan, pages, shard_span in self._runs(chain, group, span):", "for page_plan, pages, shard_span in [*self._runs(chain, group, span)][:1]:", seed=14, rule="OWN", features=STORE),
    Fault("all files of a run get its first page", StoreClient, "_files", "offset + slot * shard.num_bytes", "offset", seed=0, rule="OWN", features=STORE),
    Fault("a request that was loaded is remembered", STORE_SCHEDULER.StoreScheduler, "begin_save", "self._begun.discard(request.request_id)", "pass", seed=0, rule="GROW", features=STORE),
    Fault("nothing is saved", STORE_SCHEDULER.StoreScheduler, "begin_save", "if chain is None or not chain.keys:", "if chain is not None:", seed=0, rule="STORE", features=STORE),
    Fault("no shard of a page is read", PageReads, "_plan", "by_size.setdefault(size, []).append(shard)", "pass", seed=0, rule="STORE", features=STORE),
    Fault("a save ends with its first run of pages", StoreClient, "_save", "if None in outcomes:", "if None not in outcomes:", seed=5, rule="STORE", features=STORE),
    Fault("a check of a file has no memory for its bytes", page_files, "read_page", 'b"" if memory is not None', 'b"" if memory is None', seed=0, rule="STORE", features=STORE),
    Fault("what is saved is not written", StoreClient, "_write_file", "return self.backend.put(file.name, chunks)", "return None", seed=0, rule="STORE", features=STORE),
    Fault("a file of the right digest is refused", page_files, "read_page", "if digest.hexdigest() != header.digest:", "if digest.hexdigest() == header.digest:", seed=0, rule="STORE", features=STORE),
    Fault("pages that were chosen to leave stay", eviction, "evict", "in_parallel(partial(_delete, backend), chosen, backend.at_once)", "in_parallel(chosen, partial(_delete, backend), backend.at_once)", seed=0, rule="STORE", features=STORE),
    Fault("a search is kept when its request has blocks", STORE_SEARCHES.StoreSearches, "forget", "self._searches.pop(request, None)", "self._searches.get(request)", seed=0, rule="GROW", features=STORE),
    Fault("a request of old weights is saved", STORE_SCHEDULER.StoreScheduler, "begin_save", "if not self._state.is_current(request):", "if False:", seed=1, rule="STORE", features=STORE | Feature.UPDATES),
    Fault("an engine that saves alone does not note the weights", STORE_SCHEDULER.StoreScheduler, "count_tokens_to_load", "    self._state.note_origin(request, num_cached)\n    if not self._loads or request.request_id in self._begun:\n        return 0\n", "    if not self._loads or request.request_id in self._begun:\n        return 0\n    self._state.note_origin(request, num_cached)\n", seed=4, rule="STORE", features=STORE | Feature.UPDATES),
    Fault("an engine that loads alone saves", STORE_SCHEDULER.StoreScheduler, "begin_save", "self._saves and is_done", "is_done", seed=1, rule="STORE", features=STORE),
    Fault("an engine that saves alone loads", STORE_SCHEDULER.StoreScheduler, "count_tokens_to_load", "not self._loads or ", "", seed=1, rule="STORE", features=STORE),
    Fault("a client is given up while it moves bytes", StoreClient, "_move", "        self._mover.move(specs)\n    self.num_steps", "    self._mover.move(specs)\n    self.num_steps", seed=14, rule="STORE", features=STORE),
    Fault("a page counts as pinned since its last owner pinned it", eviction._Page, "__init__", "min(pins", "max(pins", seed=1, rule="STORE", features=STORE),
    Fault("pages that were used first are pinned first", eviction, "_oldest_first", "[(page.pinned_s, page.name", "[(page.used_s, page.name", seed=1, rule="STORE", features=STORE),
    Fault("a page beyond the limit of pins counts", eviction, "_oldest_first", "        kept.add(name)\n            pinned_bytes += page.num_bytes", "        kept.add(name)\n        pinned_bytes += page.num_bytes", seed=2, rule="STORE", features=STORE),
    Fault("a page with a pin leaves", eviction, "_oldest_first", "            kept.add(name)\n", "", seed=0, rule="STORE", features=STORE),
    Fault("a state is looked for where the prompt ends", STORE_SCHEDULER.StoreScheduler, "count_tokens_to_load", "num_tokens - self._frees_blocks", "num_tokens", seed=38, rule="CRASH", model="states", features=STORE),
    Fault("a state that a step under way has passed is saved", STORE_SCHEDULER.StoreScheduler, "begin_save", "request.num_computed_tokens == chain", "num_computed == chain", seed=5, rule="STORE", model="states", features=STORE | ASYNC_STEPS),
    # calls that fail
    Fault("a save goes on after a file that was not written", StoreClient, "_save", "break", "pass", seed=5, rule="STORE", features=STORE),
    Fault("a page counts as saved of which a file was not written", StoreClient, "_save", "True in written and None not in written", "True in written", seed=4, rule="STORE", features=STORE),
    Fault("a file that was not written counts as written", StoreClient, "_write_file", "return None", "return True", seed=4, rule="STORE", features=STORE),
    Fault("what a call has raised is forgotten", stalls.StallGuard, "call", "if call.error is not None:", "if False:", seed=1, rule="OWN", features=STORE),
    Fault("a file whose header cannot be read now is deleted", StoreReader, "_shard", 'if error.code == "BACKEND":', "if False:", seed=68, rule="STORE", features=STORE),
    Fault("a client is used again that was given up", stalls.StallGuard, "call", "self._client = None", "pass", seed=0, rule="STORE", features=STORE),
    Fault("a call that has made a step is never given up", stalls.StallGuard, "call", "is_going_on = client.num_steps != num_steps", "is_going_on = client.num_steps > 0", seed=1, rule="STORE", features=STORE),
    Fault("a store that hangs is called again at once", stalls.StallGuard, "call", "self._paused_until_s = time.monotonic() + self._pause_s", "pass", seed=13, rule="STORE", features=STORE),
    Fault("a scheduler waits for no search", STORE_SEARCHES.StoreSearches, "_look", "wait([stop], AT_HAND_S)", "wait(AT_HAND_S, [stop])", seed=0, rule="CRASH", features=STORE),
    # which pages stay
    Fault("pages that were used last leave first", eviction, "_oldest_first", "key=lambda page: page.used_s)", "key=lambda page: -page.used_s)", seed=4, rule="STORE", features=STORE),
    Fault("an answer is pinned with its prompt", STORE_SCHEDULER.StoreScheduler, "begin_save", "min(request.num_prompt_tokens, chain.num_tokens)", "chain.num_tokens", seed=2, rule="STORE", features=STORE),
    Fault("an unpin takes away the pins of others", StoreClient, "unpin", 'self.backend.delete(f"{page}/{pin}")', '[self.backend.delete(f"{page}/{file}") for file in self.backend.files(page) if is_pin(file)]', seed=0, rule="STORE", features=STORE),
    # windows, of which pages have a part
    Fault("a window is saved where its blocks are free", STORE_SCHEDULER.StoreScheduler, "begin_save", "max(first, read_from.get(group, 0))", "read_from.get(group, 0)", seed=0, rule="STORE", model="windows", features=STORE),
    Fault("a page is saved of which a window has the end alone", StoreClient, "_whole_pages", "-(-(start + num_last) // size) - 1", "(start + num_last) // size - 1", seed=0, rule="CRASH", model="windows", features=STORE),
    Fault("a search asks for the page before a window", _Windows, "serve", "while self._whole.start > first:", "while self._whole.start >= first:", seed=0, rule="CRASH", model="windows", features=STORE),
    Fault("a search takes its first page for granted", prefix_search, "_first_gap", "range(start // tokens_per_page,", "range(start // tokens_per_page + 1,", seed=5, rule="STORE", features=STORE),
    Fault("the end of a page lacks a position that a window reaches", PageReads, "last_needed", "stop - attended(stop), 0", "stop - attended(stop) - 1, 0", seed=30, rule="STORE", model="windows", features=STORE),
    # what a store is for that others use too
    Fault("a second reset ends no keys", ENGINE_STATE.EngineState, "store_reset", "self._explains_reset = False", "pass", seed=1, rule="STORE", features=STORE | SHARED),
    Fault("a pin without an owner is that of the operator", STORE_SCHEDULER, "_pin_of", "not isinstance(owner, str) or not owner", "not isinstance(owner, str)", seed=3, rule="STORE", features=STORE | SHARED),
    Fault("an owner of a pin may be a number", STORE_SCHEDULER, "_pin_of", "not isinstance(owner, str) or not owner", "not owner", seed=0, rule="CRASH", features=STORE | SHARED),
    Fault("a page that cannot be deleted does not count as left", eviction, "evict", "            left_bytes += page.num_bytes", "            pass", seed=1, rule="STORE", features=STORE | SHARED),
    Fault("an eviction ends with what cannot be deleted", eviction, "evict", "staying if chosen else []", "[]", seed=1, rule="STORE", features=STORE | SHARED),
    Fault("a page of which a file cannot be deleted counts as deleted", eviction, "_delete", "fault = error", "pass", seed=1, rule="STORE", features=STORE | SHARED),
    Fault("nobody hears of what cannot be deleted", eviction, "evict", 'note(faults, f"{fault}")', "pass", seed=1, rule="STORE", features=STORE | SHARED),
    Fault("all pages of a model that is too large leave", eviction, "evict", "            of_model[page.space] -= page.num_bytes\n", "", seed=3, rule="STORE", features=STORE | SHARED),
    # lists that hold few, and files that have lost their bytes
    Fault("each batch of pages counts as the first one of its prompt", StoreClient, "use", "used_s, first_page)", "used_s)", seed=0, rule="STORE", features=STORE | ROUGH),
    Fault("a page has owners without end", StoreClient, "pin", "if sum(map(is_pin, self.backend.files(page))) < MAX_PINS:", "if True:", seed=0, rule="STORE", features=STORE | ROUGH),
    Fault("any number of calls may hang", stalls.StallGuard, "call", "if len(self._hanging) >= MAX_HANGING:", "if False:", seed=50, rule="STORE", features=STORE | ROUGH),
    Fault("a shard is of no use whose first file was damaged", StoreReader, "_shard", "return None\n", "self._shards[name] = None\n            return None\n", seed=17, rule="STORE", features=STORE | ROUGH),
    Fault("an owner takes away pins of the operator alone", StoreClient, "unpin", "pin_name(owner)", 'pin_name("")', seed=1, rule="STORE", features=STORE | POPULAR),
    Fault("calls that have hung count for ever", stalls.StallGuard, "call", "[call for call in self._hanging if call.thread.is_alive()]", "[*self._hanging]", seed=0, rule="STORE", features=STORE | ROUGH),
]  # fmt: skip
