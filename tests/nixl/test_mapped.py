"""Executors that map each other's memory: the contract, envelopes, and sources that end under a copy.

The memory is that of :mod:`tests.nixl.shared_memory`, in place of a GPU's. What CUDA does when an allocation is freed
under a kernel, or its process is killed, no test here can see.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Blocks, KVPlanError, PeerError, Region, Status, Transfer, Worker, plan_reads
from kvplan.describe.blocks import Request
from kvplan.plan import ReadSpec
from kvplan.testing.executors import ExecutorContract
from kvplan_nixl import Envelope, NixlExecutor, mapped, settle
from kvplan_nixl.cma import Process
from kvplan_nixl.kernel import Copies, KernelCopies, has_triton
from kvplan_nixl.mapped import MappedExecutor, UnlistedSpec, copies_between, make_executor
from tests.nixl import test_reads
from tests.nixl.shared_memory import (
    HeldCopies,
    MappedCluster,
    MemfdMapper,
    Source,
    array_of,
    filled,
    in_shared_memory,
)
from tests.small import engine

BLOCKS: Request = {"local": {"attn": Blocks([3, 1])}, "remote": {"attn": Blocks([0, 2])}}
KEY = b"a key that all engines share, of 32 bytes"


def by_kernel(regions: Sequence[Region]) -> Copies:
    """Copies by the kernel, in Triton's interpreter."""
    from tests.nixl.interpreted import CheckedCopies

    copies = CheckedCopies()
    copies.regions = [(region.address, region.end) for region in regions]
    return copies


class TestMappedExecutor(ExecutorContract):
    """The contract, by torch's operations."""

    def open_cluster(self, workers: Sequence[Worker]) -> MappedCluster:
        return MappedCluster(workers)


@pytest.mark.skipif(not has_triton, reason="no Triton")
class TestMappedExecutorWithTheKernel(ExecutorContract):
    """The contract, by the kernel."""

    def open_cluster(self, workers: Sequence[Worker]) -> MappedCluster:
        return MappedCluster(workers, by_kernel)


@attrs.define
class Reader:
    """A worker that reads all of two blocks from a source in another process, when a test lets its copies run."""

    source: Source
    worker: Worker
    executor: MappedExecutor
    mapper: MemfdMapper
    held: list[HeldCopies]
    specs: tuple[ReadSpec, ...] = ()

    def begin(self) -> Transfer:
        """Begin to read."""
        remote = self.executor.connect(self.source.ask("envelope"))
        self.source.ask("connect", self.executor.envelope())
        assert self.executor.maps(remote)
        plan = plan_reads(self.worker, [remote])
        self.executor.prepare(plan)
        self.specs = self.executor.bind(plan, **BLOCKS)
        return self.executor.start(self.specs[0], "request")

    def expected(self, seed: int = 1) -> list[Any]:
        """All bytes of the worker after the request, where the source had bytes of a seed."""
        mapper = MemfdMapper()
        there, here = (in_shared_memory(engine(name)[0], mapper) for name in ("prefill", "decode"))
        filled(there, seed)
        with NixlExecutor(there) as source, NixlExecutor(here) as reader:
            plan = plan_reads(here, [reader.connect(source.envelope())])
            reader.prepare(plan)
            (spec,) = plan.bind(**BLOCKS)
            assert settle(reader, [reader.start(spec, "r")], 10)
        return [array_of(region).copy() for region in here.regions]

    def bytes(self) -> list[Any]:
        """All bytes of the worker."""
        return [array_of(region).copy() for region in self.worker.regions]


@pytest.fixture
def reader() -> Iterator[Reader]:
    mapper = MemfdMapper()
    worker = in_shared_memory(engine("decode")[0], mapper)
    held: list[HeldCopies] = []

    def make_copies(regions: Sequence[Region]) -> HeldCopies:
        held.append(HeldCopies(copies_between(regions)))
        return held[-1]

    with Source(engine("prefill")[0]) as source, MappedExecutor(worker, mapper=mapper, make_copies=make_copies) as made:
        yield Reader(source, worker, made, mapper, held)


def test_a_request_lists_no_ids(reader: Reader) -> None:
    """Bytes and figures are as with ids, which are listed when somebody asks for them."""
    transfer = reader.begin()
    (spec,) = reader.specs
    assert isinstance(spec, UnlistedSpec)
    assert reader.executor.poll(transfer) is Status.RUNNING
    reader.held[0].run()
    assert reader.executor.poll(transfer) is Status.DONE
    assert "listed" not in spec.__dict__
    assert np.array_equal(reader.bytes(), reader.expected())
    listed = spec.listed
    assert (spec.num_ids, spec.num_bytes) == (listed.local_ids.size, listed.num_bytes)
    assert np.array_equal(spec.local_ids, listed.local_ids)


def killed(source: Source) -> None:
    source.kill()


def closed(source: Source) -> None:
    source.ask("close")


def freed(source: Source) -> None:
    source.ask("free")


def suspended(source: Source) -> None:
    assert source.process.pid is not None
    os.kill(source.process.pid, signal.SIGSTOP)


@pytest.mark.parametrize("end", [killed, closed, freed, suspended])
def test_a_source_ends_under_a_copy(reader: Reader, end: Callable[[Source], None]) -> None:
    """The copy ends, with the bytes that were there; nothing is mapped afterwards, and no byte comes late."""
    transfer = reader.begin()
    end(reader.source)
    assert reader.executor.poll(transfer) is Status.RUNNING
    with pytest.raises(KVPlanError, match="TRANSFER"):
        reader.executor.release(transfer)
    reader.held[0].run()
    assert settle(reader.executor, [transfer], 30)
    assert transfer.status is Status.DONE
    assert np.array_equal(reader.bytes(), reader.expected())
    reader.executor.release(transfer)
    (peer,) = reader.executor.peers
    reader.executor.disconnect(peer.worker, force=True)
    assert reader.mapper.num_open == 0


def test_blocks_that_are_used_again(reader: Reader) -> None:
    """Once a transfer is done its source may write its blocks, and the reader's bytes stay."""
    transfer = reader.begin()
    reader.held[0].run()
    assert reader.executor.poll(transfer) is Status.DONE
    reader.source.ask("fill", 2)
    time.sleep(0.1)
    assert np.array_equal(reader.bytes(), reader.expected())


def test_a_cancelled_transfer_runs_to_its_end(reader: Reader) -> None:
    """Rule nixl.P1: it is CANCELLED when its copy is over, not before."""
    transfer = reader.begin()
    reader.executor.cancel(transfer)
    assert reader.executor.poll(transfer) is Status.RUNNING
    reader.held[0].run()
    assert reader.executor.poll(transfer) is Status.CANCELLED


def test_memory_stays_mapped_under_a_copy(reader: Reader) -> None:
    """Rule nixl.P2: a peer that is disconnected by force, and replaced, is unmapped after its last copy."""
    transfer = reader.begin()
    (peer,) = reader.executor.peers
    reader.executor.disconnect(peer.worker, force=True)
    assert reader.mapper.num_open == len(peer.worker.regions)
    with Source(engine("prefill")[0]) as again:
        reader.executor.connect(again.ask("envelope"))
        assert reader.mapper.num_open == 2 * len(peer.worker.regions)
        reader.held[0].run()
        assert reader.executor.poll(transfer) is Status.CANCELLED
        reader.executor.release(transfer)
        assert reader.mapper.num_open == len(peer.worker.regions)


def test_closing_waits_for_copies(reader: Reader) -> None:
    """The transfer is CANCELLED, and all its bytes have moved by then."""
    transfer = reader.begin()
    reader.executor.close()
    assert transfer.status is Status.CANCELLED
    assert not reader.held[0].waiting
    assert np.array_equal(reader.bytes(), reader.expected())
    assert reader.mapper.num_open == 0


def test_a_copy_that_fails(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device fails its transfer alone."""
    transfer = reader.begin()
    (spec,) = reader.specs

    def fail(ticket: Any) -> bool:
        raise KVPlanError("MEMORY", "copy", expected="success", got="an error of the device")

    with monkeypatch.context() as patch:
        patch.setattr(reader.held[0], "done", fail)
        assert reader.executor.poll(transfer) is Status.FAILED
    reader.held[0].run()
    again = reader.executor.start(spec, "again")
    reader.held[0].run()
    assert reader.executor.poll(again) is Status.DONE


def test_a_device_that_cannot_run_the_kernel(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows when a plan is prepared, before any request, and bytes move through NIXL."""

    def fail(self: HeldCopies, pair: Any) -> None:
        raise KVPlanError("MEMORY", "compile", expected="success", got="an error of the compiler")

    monkeypatch.setattr(HeldCopies, "prepare", fail)
    transfer = reader.begin()
    assert not reader.held[0].waiting
    assert settle(reader.executor, [transfer], 10)
    assert np.array_equal(reader.bytes(), reader.expected())


def envelope_with(handles: bytes, source: NixlExecutor) -> bytes:
    """The envelope of a source with other handles, signed by the same key."""
    opened = Envelope.unpack(source.envelope(), KEY)
    return attrs.evolve(opened, handles=handles).pack(KEY)


def changed(**values: Any) -> Callable[[bytes], bytes]:
    return lambda handles: json.dumps({**json.loads(handles), **values}).encode()


BAD_HANDLES: dict[str, Callable[[bytes], bytes]] = {
    "no JSON": lambda handles: b"\xff",
    "a list": lambda handles: b"[]",
    "lists of lists": lambda handles: b"[" * 100_000,
    "another kind": changed(kind="cuda-ipc"),
    "a kind of another type": changed(kind=7),
    "no regions": changed(regions=[]),
    "a number in place of regions": changed(regions=5),
    "no base64": changed(regions=["!"]),
    "long handles": changed(regions=[base64.b64encode(bytes(1000)).decode()]),
    "a handle of nothing": changed(regions=[base64.b64encode(b"{}").decode()]),
}


@pytest.mark.parametrize("bad", BAD_HANDLES)
def test_handles_that_cannot_be_mapped(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rule nixl.P3: one line in the log, and bytes move through NIXL."""
    mappers = MemfdMapper(), MemfdMapper()
    there, here = (in_shared_memory(engine(n)[0], m) for n, m in zip(("prefill", "decode"), mappers, strict=True))
    filled(there)
    with (
        MappedExecutor(there, mapper=mappers[0], key=KEY) as source,
        MappedExecutor(here, mapper=mappers[1], key=KEY) as executor,
        caplog.at_level(logging.WARNING),
    ):
        handles = Envelope.unpack(source.envelope(), KEY).handles
        remote = executor.connect(envelope_with(BAD_HANDLES[bad](handles), source))
        assert not executor.maps(remote)
        assert mappers[1].num_open == 0
        assert ["prefill/0 is read through NIXL" in record.message for record in caplog.records] == [True]
        plan = plan_reads(here, [remote])
        executor.prepare(plan)
        (spec,) = executor.bind(plan, **BLOCKS)
        assert not isinstance(spec, UnlistedSpec)
        transfer = executor.start(spec, "request")
        assert settle(executor, [transfer], 10)
        assert transfer.status is Status.DONE


def test_a_peer_without_handles_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A reader that would map says so: its operator may look at this engine's log alone."""
    mapper = MemfdMapper()
    here = in_shared_memory(engine("decode")[0], mapper)
    with (
        NixlExecutor(in_shared_memory(engine("prefill")[0], MemfdMapper()), key=KEY) as source,
        MappedExecutor(here, mapper=mapper, key=KEY) as executor,
        caplog.at_level(logging.INFO),
    ):
        assert not executor.maps(executor.connect(source.envelope()))
        assert ["no handles" in record.message for record in caplog.records] == [True]
        assert caplog.records[0].levelname == "WARNING"


def test_a_peer_of_another_host_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no fault, so it is no warning."""
    mappers = MemfdMapper(), MemfdMapper()
    there, here = (in_shared_memory(engine(n)[0], m) for n, m in zip(("prefill", "decode"), mappers, strict=True))
    monkeypatch.setattr(Process, "shares_host", lambda own, other: False)
    with (
        MappedExecutor(there, mapper=mappers[0], key=KEY) as source,
        MappedExecutor(here, mapper=mappers[1], key=KEY) as executor,
        caplog.at_level(logging.INFO),
    ):
        assert not executor.maps(executor.connect(source.envelope()))
        assert mappers[1].num_open == 0
        assert ["on another host" in record.message for record in caplog.records] == [True]
        assert caplog.records[0].levelname == "INFO"


def test_memory_that_is_too_small() -> None:
    """A handle of less memory than the region has is refused, and nothing stays mapped."""
    mapper = MemfdMapper()
    there, here = (in_shared_memory(engine(name)[0], mapper) for name in ("prefill", "decode"))
    small = mapper.export(Region("small", mapper.allocate(64), 64))
    texts = [base64.b64encode(small).decode() for _ in there.regions]
    handles = json.dumps({"kind": mapper.kind, "regions": texts}).encode()
    with (
        MappedExecutor(there, mapper=mapper, key=KEY) as source,
        MappedExecutor(here, mapper=mapper, key=KEY) as executor,
    ):
        assert not executor.maps(executor.connect(envelope_with(handles, source)))
        assert mapper.num_open == 0


def test_forged_handles() -> None:
    """Handles are signed: an envelope whose handles were changed is refused."""
    mapper = MemfdMapper()
    there = in_shared_memory(engine("prefill")[0], mapper)
    here = in_shared_memory(engine("decode")[0], mapper)
    with (
        MappedExecutor(there, mapper=mapper, key=KEY) as source,
        MappedExecutor(here, mapper=mapper, key=KEY) as reader,
    ):
        envelope = source.envelope()
        with pytest.raises(PeerError, match="key"):
            reader.connect(envelope.replace(b"memfd", b"memfs"))


def test_a_source_that_has_ended_is_not_mapped(reader: Reader) -> None:
    """Its envelope names memory that is gone; connecting is NIXL's business then."""
    envelope = reader.source.ask("envelope")
    reader.source.kill()
    try:
        remote = reader.executor.connect(envelope)
    except KVPlanError as error:
        assert error.code == "PEER"
    else:
        assert not reader.executor.maps(remote)
    assert reader.mapper.num_open == 0


def test_reads_of_a_connector_are_not_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode worker with a staging region maps prefill's memory, lists no ids, and has every value."""
    mapper = MemfdMapper()
    shape = (2, 8, 2, 16, 2, 8)
    size = int(np.prod(shape)) * 4
    memory = array_of(Region("kv", mapper.allocate(size), size)).view(np.float32).reshape(shape)

    def prefill_executor(worker: Worker, **options: Any) -> MappedExecutor:
        return MappedExecutor(worker, mapper=mapper, **options)

    class MappedPrefill(test_reads.Prefill):
        def worker(self, rank: int) -> Worker:
            if self.caches is not memory:
                memory[...] = self.caches
                self.caches = memory
            return super().worker(rank)

    monkeypatch.setattr(test_reads, "NixlExecutor", prefill_executor)
    prefill = MappedPrefill(1)
    decode = test_reads.Decode(1 << 20)
    decode.pipeline = None  # of which the helper expects chunks
    specs: list[Any] = []
    start = decode.executor.start

    def started(spec: ReadSpec, *arguments: Any, **options: Any) -> Transfer:
        specs.append(spec)
        return start(spec, *arguments, **options)

    monkeypatch.setattr(decode.executor, "start", started)
    try:
        result = decode.read(prefill.hand_off("request 1"))
        assert result.error is None
        assert not result.is_staged
        assert [type(spec) for spec in specs if spec.num_ids] == 2 * [UnlistedSpec]
        assert not any("listed" in spec.__dict__ for spec in specs)
        assert all((decode.token(position) == prefill.token(position)).all() for position in range(10, 40))
        assert not any(decode.token(position).any() for position in range(10))
    finally:
        decode.close()
        prefill.close()


@pytest.mark.parametrize("map_memory", [True, False])
def test_private_memory_is_named_at_the_start(
    map_memory: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says which regions peers cannot map, also where nothing is to be mapped, as UCX is slow there."""
    from benchmarks.real_memory import placed

    monkeypatch.setattr(mapped, "cuda_mapper", lambda worker: MemfdMapper())
    worker, _ = placed(engine("prefill")[0])
    with caplog.at_level(logging.WARNING), make_executor(worker, map_memory=map_memory, key=KEY) as executor:
        assert isinstance(executor, MappedExecutor) == map_memory
        assert Envelope.unpack(executor.envelope(), KEY).handles == b""
    (record,) = caplog.records
    assert "private memory" in record.message


def test_mappable_memory_is_not_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = MemfdMapper()
    monkeypatch.setattr(mapped, "cuda_mapper", lambda worker: mapper)
    worker = in_shared_memory(engine("prefill")[0], mapper)
    with caplog.at_level(logging.WARNING), make_executor(worker, key=KEY) as executor:
        assert type(executor) is NixlExecutor
    assert not caplog.records


def test_main_memory_has_no_mapper() -> None:
    """Engines on CPUs move their bytes through NIXL, which copies out of other processes by itself."""
    mapper = MemfdMapper()
    worker = in_shared_memory(engine("prefill")[0], mapper)
    with make_executor(worker, map_memory=True, key=KEY) as executor:
        assert type(executor) is NixlExecutor


def test_no_kernel_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operations copy there."""
    region = Region("kv", 4096, 64, "VRAM", 0)
    monkeypatch.setattr(mapped, "tensor_at", lambda region: __import__("torch").zeros(region.size_bytes))
    monkeypatch.setattr(mapped, "has_triton", False)
    assert not isinstance(copies_between([region]), KernelCopies)
