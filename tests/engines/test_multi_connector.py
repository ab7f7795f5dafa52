"""The connector in vLLM's own MultiConnector: whoever loads or keeps a request, no claim and no lease is lost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import pytest
import torch
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvplan import KVPlanError, Model, encode
from kvplan.protocol import Handoff, HandshakeResult, PartialRead, Read, ReadResult, Source
from kvplan.protocol.digest_requests import DigestRequest
from kvplan_nixl.serving.host_key import host_key
from kvplan_nixl.vllm import KvplanConnector, register
from kvplan_nixl.vllm.engine_hooks import _with_reports, _wrap
from kvplan_nixl.vllm.metadata import KvplanHandshakeMetadata, KvplanMetadata, KvplanWorkerMetadata
from kvplan_nixl.vllm.metrics import METRICS, KvplanPromMetrics, KvplanStats
from tests.seen_steps import Seen
from tests.simulation.vllm_objects import BlockPool, SingleTypeKVCacheManager

TOKENS = 100
BLOCK = 16
WAIT_S = 30.0
ORDERS = (("own", "other"), ("other", "own"))
ERROR = KVPlanError("LEASE", "read", expected="a lease", got="none")


class OtherConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Says that it has ``num_matched`` tokens of each request; keeps the blocks of those that it ``saves``."""

    num_matched = 0
    saves = False
    offers = False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return self.num_matched, self.num_matched > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.saves, {"saved": True} if self.saves else None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return KVConnectorHandshakeMetadata() if self.offers else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(finished_sending=set(finished_req_ids) if self.saves else set())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return


CONNECTORS = {
    "own": {
        "kv_connector": "KvplanConnector",
        "kv_connector_module_path": "kvplan_nixl.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host": "127.0.0.1", "port": 0, "lease_s": 600},
    },
    "other": {"kv_connector": "OtherConnector", "kv_connector_module_path": __name__, "kv_role": "kv_both"},
}


def config_of(order: tuple[str, ...]) -> VllmConfig:
    """An engine with these connectors, without a model."""
    connectors = [CONNECTORS[name] for name in order]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id="engine",
        kv_connector_extra_config={"connectors": connectors},
    )
    config = VllmConfig()
    config.model_config = SimpleNamespace(get_vocab_size=lambda: 1000, use_mla=False)
    config.kv_transfer_config = transfer
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return config


def cache_of(window: int | None) -> KVCacheConfig:
    """One group of one layer, with a sliding window or without."""
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    spec = FullAttentionSpec(**sizes) if window is None else SlidingWindowSpec(**sizes, sliding_window=window)
    return KVCacheConfig(num_blocks=50, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """These engines have no model whose identity could be read."""
    monkeypatch.setattr("kvplan_nixl.vllm.connector.identity_of", lambda *_: {})


Start = Callable[..., tuple[MultiConnector, KvplanConnector, OtherConnector]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the scheduler's part of an engine's connectors: all of them, kvplan's own, and the other one."""
    started: list[MultiConnector] = []

    def make(order: tuple[str, ...], window: int | None = None, others: tuple[str, ...] = ()) -> Any:
        config = config_of(order)
        multi = MultiConnector(config, KVConnectorRole.SCHEDULER, cache_of(window))
        started.append(multi)
        multi.set_xfer_handshake_metadata_pp_aware({(0, 0): KvplanHandshakeMetadata(b"offer", others)})
        parts = dict(zip(order, multi.sub_connectors, strict=True))
        return multi, parts["own"], parts["other"]

    yield make
    for multi in started:
        multi.shutdown()


def request_of(params: dict[str, Any] | None, name: str = "r") -> Request:
    """A request whose prompt decode or prefill gets."""
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request(name, [*range(TOKENS)], sampling, None)


def blocks_of(first: int = 1, num_null: int = 0) -> KVCacheBlocks:
    """The blocks of a request, of which the first are null."""
    ids = [0] * num_null + [*range(first + num_null, first + -(-TOKENS // BLOCK))]
    return KVCacheBlocks(([KVCacheBlock(block_id) for block_id in ids],))


def handed_over(multi: MultiConnector) -> dict[str, Any]:
    """Computes a request on prefill; returns its parameters for decode."""
    request = request_of({"do_remote_decode": True})
    multi.on_new_request(request)
    multi.update_state_after_alloc(request, blocks_of(), 0)
    request.num_computed_tokens = TOKENS
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    is_kept, params = multi.request_finished_all_groups(request, blocks_of().get_block_ids())
    assert is_kept
    assert params is not None
    return dict(params)


class Manager:
    """What vLLM binds all connectors of an engine to."""

    block_pool = BlockPool()

    def __init__(self) -> None:
        manager = SingleTypeKVCacheManager(BLOCK, self.block_pool)
        self.coordinator = SimpleNamespace(single_type_managers=[manager])


class EndedReads:
    """A worker's reads, of which some have ended, and some have failed while bytes may move."""

    num_held = 0

    def __init__(self, ended: Sequence[ReadResult] = (), late: Mapping[str, KVPlanError] | None = None) -> None:
        self._ended, self._late = ended, late or {}

    def poll(self) -> list[ReadResult]:
        return [*self._ended]

    def late(self) -> dict[str, KVPlanError]:
        return {**self._late}


def step(multi: MultiConnector) -> MultiKVConnectorMetadata:
    """The work of one step, in which nothing is computed."""
    return multi.build_connector_meta(SchedulerOutput.make_empty())


def wait(holds: Callable[[], object]) -> None:
    """Waits until something holds: claims travel on threads."""
    stop = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < stop
        time.sleep(0.002)


def own_of(step_of_all: MultiKVConnectorMetadata, multi: MultiConnector) -> Any:
    (index,) = [n for n, part in enumerate(multi.sub_connectors) if isinstance(part, KvplanConnector)]
    return step_of_all.metadata[index]


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_is_read_and_its_lease_ends(start: Start, order: tuple[str, ...]) -> None:
    """Where the other connector has nothing, kvplan is asked to read, and prefill's blocks are free when it has."""
    prefill, _, _ = start(order)
    decode, _, _ = start(order)
    request = request_of(handed_over(prefill))
    decode.on_new_request(request)
    assert decode.get_num_new_matched_tokens(request, 0) == (TOKENS - 1, True)
    assert decode.get_loaded_kv_cache_group_ids(request) == (0,)
    decode.update_state_after_alloc(request, blocks_of(20), TOKENS - 1)
    (read,) = Seen(own_of(step(decode), decode)).reads
    assert read.tokens == {"group0": (0, TOKENS - 1)}
    # vLLM allocates again when the read has ended.
    decode.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    decode.update_state_after_alloc(request, blocks_of(20), 0)
    assert Seen(own_of(step(decode), decode)).reads == []
    wait(lambda: own_of(step(prefill), prefill).released == {"r"})


@pytest.mark.parametrize("order", ORDERS)
def test_what_another_connector_loads_is_claimed_no_longer(start: Start, order: tuple[str, ...]) -> None:
    """The first one that has tokens loads the request; prefill's lease ends where that is not kvplan."""
    prefill, _, _ = start(order)
    decode, _, other = start(order)
    other.num_matched = 32
    request = request_of(handed_over(prefill))
    decode.on_new_request(request)
    num_tokens, _ = decode.get_num_new_matched_tokens(request, 0)
    decode.update_state_after_alloc(request, blocks_of(20), num_tokens)
    reads = Seen(own_of(step(decode), decode)).reads
    if order[0] == "other":
        assert (num_tokens, reads) == (32, [])
        wait(lambda: own_of(step(prefill), prefill).released == {"r"})
    else:
        assert (num_tokens, len(reads)) == (TOKENS - 1, 1)
        assert own_of(step(prefill), prefill).released == set()


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_that_ends_before_it_is_read_is_claimed_no_longer(start: Start, order: tuple[str, ...]) -> None:
    """An abort while the request waits for blocks ends the claim."""
    prefill, _, _ = start(order)
    decode, _, _ = start(order)
    request = request_of(handed_over(prefill))
    decode.on_new_request(request)
    decode.get_num_new_matched_tokens(request, 0)
    request.status = RequestStatus.FINISHED_ABORTED
    assert decode.request_finished_all_groups(request, ([],)) == (False, None)
    wait(lambda: own_of(step(prefill), prefill).released == {"r"})


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_stay_for_all_that_keep_them(start: Start, order: tuple[str, ...]) -> None:
    """Where the other connector saves a request that kvplan lends, its blocks are free when both are done."""
    prefill, _, other = start(order)
    other.saves = True
    assert handed_over(prefill)["saved"]
    worker = MultiConnector(config_of(order), KVConnectorRole.WORKER, cache_of(None))
    worker.bind_connector_metadata(step(prefill))
    parts = dict(zip(order, worker.sub_connectors, strict=True))
    parts["other"].saves = True
    parts["own"]._worker._reads = EndedReads()
    assert worker.get_transfer_results({"r"}).finished_sending == set()
    parts["own"]._worker._released = {"r"}
    assert worker.get_transfer_results(set()).finished_sending == {"r"}


@pytest.mark.parametrize("order", ORDERS)
def test_what_fails_or_is_late_is_told(order: tuple[str, ...]) -> None:
    """A request that fails is failed at once, and its blocks are free when no byte can move, whoever else there is."""
    worker = MultiConnector(config_of(order), KVConnectorRole.WORKER, cache_of(None))
    own = dict(zip(order, worker.sub_connectors, strict=True))["own"]
    ended = [ReadResult("right"), ReadResult("wrong", ERROR)]
    own._worker._reads = EndedReads(ended, {"late": ERROR})
    results = worker.get_transfer_results(set())
    assert results.finished_recving == {"right", "wrong"}
    assert results.failed_recving == {"wrong", "late"}
    counted = worker.get_kv_connector_stats().data["KvplanConnector"].data
    assert (counted["failed_codes"], counted["num_direct_reads"]) == (["LEASE"], [1])


@pytest.mark.parametrize("order", ORDERS)
def test_digests_reach_the_scheduler(start: Start, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]) -> None:
    """What kvplan's workers tell its scheduler comes back from among what other connectors' workers tell theirs."""
    multi, own, _ = start(order)
    asked = DigestRequest.of("lease", {"group0": (0, 16)})
    taken: list[Any] = []
    monkeypatch.setattr(own._scheduler, "take_digests", taken.append)
    of_ranks = []
    for rank in range(2):
        metadata: list[Any] = [None, None]
        metadata[order.index("own")] = KvplanWorkerMetadata({asked: [{"rank": rank}]})
        of_ranks.append(MultiKVConnectorWorkerMetadata(tuple(metadata)))
    output = KVConnectorOutput(kv_connector_worker_meta=of_ranks[0].aggregate(of_ranks[1]))
    multi.update_connector_output(output)
    assert [metadata.digests for metadata in taken] == [{asked: [{"rank": 0}, {"rank": 1}]}]


@pytest.mark.parametrize("order", [*ORDERS, ("own",)])
def test_a_failure_of_one_worker_is_told_at_once(order: tuple[str, ...]) -> None:
    """Another worker still reads: vLLM's aggregator keeps the failure back, and the blocks until both have ended."""
    workers = [MultiConnector(config_of(order), KVConnectorRole.WORKER, cache_of(None)) for _ in range(2)]
    if order == ("own",):
        workers = [worker.sub_connectors[0] for worker in workers]
    own = [getattr(worker, "sub_connectors", [worker])[order.index("own")] for worker in workers]
    aggregator, seen = KVOutputAggregator(2), []

    class Seeing:
        """A scheduler that notes what it is told of requests."""

        def update_from_output(self, scheduled: Any, output: Any) -> dict[int, Any]:
            reports = output.kv_connector_output
            seen.append(({*reports.failed_recving}, {*(reports.finished_recving or ())}))
            return {}

    _wrap(Seeing, "update_from_output", _with_reports)

    def step(*reads: tuple[list[ReadResult], dict[str, KVPlanError]]) -> None:
        outputs = []
        for worker, part, (ended, late) in zip(workers, own, reads, strict=True):
            part._worker._reads = EndedReads(ended, late)
            results = worker.get_transfer_results(set())
            report = KVConnectorOutput(
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=report))
        Seeing().update_from_output(None, aggregator.aggregate(outputs))

    step(([], {"r": ERROR}), ([], {"s": ERROR}))
    step(([ReadResult("r", ERROR)], {}), ([], {}))
    step(([], {}), ([], {}))
    # vLLM passes on the failure of one request in the step in which another one fails
    step(([], {"t": ERROR}), ([ReadResult("r")], {}))
    assert seen == [({"r", "s"}, set()), ({"r"}, set()), (set(), set()), ({"r", "t"}, {"r"})]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_read_whose_blocks_cannot_be_prepared_fails(is_last: bool) -> None:
    """It is given to the worker's reads all the same, with the error: without it the request would wait for ever."""

    def begin_read(read: Read, groups: Any) -> None:
        raise ERROR

    connector = MultiConnector(config_of(ORDERS[0]), KVConnectorRole.WORKER, cache_of(None))
    worker = connector.sub_connectors[ORDERS[0].index("own")]._worker
    submitted: list[PartialRead] = []
    worker._reads = SimpleNamespace(submit=submitted.append, worker=SimpleNamespace(groups=()))
    worker._host_cache = SimpleNamespace(begin_read=begin_read)
    read = Read(
        request="r", source=Source("prefill", "a1", "10.0.0.1", 5600), lease="l", local={}, remote={}, tokens={}
    )
    worker.start_step(KvplanMetadata([PartialRead("r", read, is_last=is_last)]))
    assert submitted == [PartialRead("r", None, ERROR, is_last)]


def test_workers_name_the_connectors_beside_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a MultiConnector the scheduler's part learns of the others through what its workers send at the start."""
    for order in ORDERS:
        worker = MultiConnector(config_of(order), KVConnectorRole.WORKER, cache_of(None))
        own = worker.sub_connectors[order.index("own")]
        monkeypatch.setattr(own._worker, "envelope", lambda: b"offer")
        own._worker.model = "m"
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
        assert worker.get_handshake_metadata() == KvplanHandshakeMetadata(b"offer", ("OtherConnector",), "m")
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", own)
        assert own.get_handshake_metadata() == KvplanHandshakeMetadata(b"offer", (), "m")


def test_a_prefill_engine_without_offers_stops(start: Start) -> None:
    """MultiConnector passes on what the first connector's workers send: where that is another's, nobody could read."""
    multi = MultiConnector(config_of(ORDERS[1]), KVConnectorRole.SCHEDULER, cache_of(None))
    with pytest.raises(KVPlanError, match=r"WORKER: cannot serve the offers of an engine: expected .* got none"):
        multi.set_xfer_handshake_metadata_pp_aware({(0, 0): KVConnectorHandshakeMetadata()})


@pytest.mark.parametrize("others", [(), ("OtherConnector",)])
def test_no_other_connector_stores_a_block_that_is_read_in_part(start: Start, others: tuple[str, ...]) -> None:
    """Prefill lacks the beginning of the block in which decode's window begins: beside others the request fails."""
    prefill, _, _ = start(ORDERS[0])
    decode, _, _ = start(ORDERS[0], window=40, others=others)
    handoff = Handoff.of_params(handed_over(prefill), host_key())
    # decode's window begins at 60, in the block at 48
    params = attrs.evolve(handoff, kept={"group0": 60}).params(host_key()) | {"do_remote_prefill": True}
    request = request_of(params)
    decode.on_new_request(request)
    num_tokens, _ = decode.get_num_new_matched_tokens(request, 0)
    decode.bind_kv_cache_manager(Manager())
    decode.update_state_after_alloc(request, blocks_of(20, num_null=3), num_tokens)
    work = Seen(own_of(step(decode), decode))
    if others:
        assert "BLOCKS: cannot read request 'r': expected whole blocks of group0, from 64 on, since OtherConnector" in (
            str(work.refused["r"])
        )
    else:
        assert work.reads[0].tokens == {"group0": (60, TOKENS - 1)}


@pytest.mark.parametrize("order", [("own", "store"), ("store", "own")])
def test_a_store_of_kvplan_keeps_what_was_read_of_a_block(
    start: Start, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prefill lacks the beginning of the block in which decode's window begins: the store saves the rest of it."""
    prefill, _, _ = start(ORDERS[0])
    monkeypatch.setattr("kvplan_nixl.vllm.store.identity_of", lambda *_: {})
    monkeypatch.setitem(
        CONNECTORS,
        "store",
        {
            "kv_connector": "KvplanStore",
            "kv_connector_module_path": "kvplan_nixl.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"folder": str(tmp_path), "tokens_per_page": BLOCK},
        },
    )
    decode = MultiConnector(config_of(order), KVConnectorRole.SCHEDULER, cache_of(40))
    parts = dict(zip(order, decode.sub_connectors, strict=True))
    decode.bind_kv_cache_manager(Manager())
    decode.set_xfer_handshake_metadata_pp_aware({(0, 0): KvplanHandshakeMetadata(b"offer", ("KvplanStore",))})
    parts["store"]._scheduler.set_offers([encode(each) for each in Model.shipped("qwen3-0.6b").engine("d")])
    handoff = Handoff.of_params(handed_over(prefill), host_key())
    params = attrs.evolve(handoff, kept={"group0": 60}).params(host_key()) | {"do_remote_prefill": True}
    request = request_of(params)
    decode.on_new_request(request)
    own = parts["own"]
    assert own.get_num_new_matched_tokens(request, 0) == (TOKENS - 1, True)
    own.update_state_after_alloc(request, blocks_of(20, num_null=3), TOKENS - 1)
    (read,) = Seen(own.build_connector_meta(SchedulerOutput.make_empty())).reads
    assert read.tokens == {"group0": (60, TOKENS - 1)}
    request.num_computed_tokens = TOKENS
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert decode.request_finished_all_groups(request, blocks_of(20, num_null=3).get_block_ids())[0]
    (save,) = parts["store"]._scheduler.take_step().saves
    assert save.positions == {"group0": (60, TOKENS // BLOCK * BLOCK)}
    decode.shutdown()


SOURCE = Source("prefill", "1", "127.0.0.1", 1)


def recorded() -> KvplanStats:
    """Statistics with something of each kind."""
    stats = KvplanStats()
    stats.record_read(
        ReadResult("direct", num_bytes=3000, seconds=0.3, post_seconds=0.002, transfer_seconds=0.06, num_descriptors=12)
    )
    stats.record_read(ReadResult("staged", num_bytes=5000, seconds=0.5, transfer_seconds=0.2, is_staged=True))
    stats.record_read(ReadResult("failed", ERROR))
    stats.record_handshake(HandshakeResult(SOURCE, None, 0.5, 0.02))
    stats.record_handshake(HandshakeResult(SOURCE, ERROR, 3.0, 0.0))
    assert [stats.count_total("num_failed_notifications", total) for total in (2, 2, 3)] == [2, 0, 1]
    stats.count("num_claims")
    stats.count("num_claims", 4)
    stats.count("num_kv_expired_reqs", 0)
    return stats


@pytest.mark.parametrize("role", KVConnectorRole)
def test_statistics_go_through_a_multi_connector(role: KVConnectorRole) -> None:
    """vLLM sends them to another process as plain values, and finds their class there by the connector's name."""
    multi = MultiConnector(config_of(ORDERS[0]), role, cache_of(None))
    own, _ = multi.sub_connectors
    part = own._scheduler if role == KVConnectorRole.SCHEDULER else own._worker
    assert multi.get_kv_connector_stats() is None
    part.stats = recorded()
    total = multi.get_kv_connector_stats().aggregate(multi_stats(recorded()))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(total.to_dict()))
    arrived = MultiConnector.build_kv_connector_stats(sent)
    assert arrived.reduce()["KvplanConnector"] == {
        "reads": 4,
        "staged": 2,
        "failed": 2,
        "unanswered": 6,
        "expired": 0,
        "stale": 0,
        "MiB": 0.015,
        "mean ms": 400.0,
        "transfer ms": 130.0,
        "post ms": 1.0,
    }
    assert multi.get_kv_connector_stats() is None


def multi_stats(stats: KvplanStats) -> Any:
    return MultiConnector.build_kv_connector_stats({"KvplanConnector": stats})


def test_what_was_taken_does_not_grow() -> None:
    """Statistics that vLLM has taken stay as they are while more is recorded."""
    stats = recorded()
    taken = stats.take()
    assert taken is not None
    stats.count("num_claims")
    assert sum(taken.data["num_claims"]) == 5
    assert (stats.take() or KvplanStats()).data["num_claims"] == [1]
    assert stats.take() is None


ENGINES: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
TYPES: Any = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}


@pytest.fixture
def registry() -> Iterator[None]:
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def families() -> dict[str, Any]:
    """vLLM's metrics that Prometheus would scrape now, by name."""
    return {family.name: family for family in REGISTRY.collect() if family.name.startswith("vllm:")}


def bounds(family: Any) -> list[str]:
    """The upper bounds of a histogram's buckets."""
    return [
        sample.labels["le"] for sample in family.samples if sample.labels.get("le") and "1" in sample.labels["engine"]
    ]


def test_metrics_are_those_of_nixl_connector_and_more(registry: None) -> None:
    """Whatever NixlConnector exports has the same name, type, labels and buckets here."""
    NixlPromMetrics(config_of(ORDERS[0]), TYPES, ["model_name", "engine"], ENGINES)
    theirs = families()
    assert len(theirs) == 8
    unregister_vllm_metrics()
    KvplanPromMetrics(config_of(ORDERS[0]), TYPES, ["model_name", "engine"], ENGINES)
    ours = families()
    assert {name for name in ours if name.startswith("vllm:nixl")} == theirs.keys()
    assert len(ours) == len(METRICS)
    for name, family in theirs.items():
        assert (ours[name].type, bounds(ours[name])) == (family.type, bounds(family))
        assert {sample.name for sample in ours[name].samples} == {sample.name for sample in family.samples}


@pytest.mark.parametrize("order", ORDERS)
def test_prometheus_scrapes_what_was_recorded(registry: None, order: tuple[str, ...]) -> None:
    """Each figure goes to its own metric and engine. Counters are there before anything happens."""
    labels = ["model_name", "engine"]
    prometheus = MultiConnector.build_prom_metrics(config_of(order), TYPES, labels, ENGINES)
    assert 'vllm:kvplan_num_claims_total{engine="1",model_name="model"} 0.0' in generate_latest().decode()
    prometheus.observe(multi_stats(recorded()).to_dict(), 1)
    scraped = dict(
        line.removeprefix("vllm:").replace('model_name="model"', "").rsplit(" ", 1)
        for line in generate_latest().decode().splitlines()
        if line.startswith("vllm:") and 'engine="1"' in line
    )
    expected = {
        "nixl_xfer_time_seconds_sum": 0.26,
        "nixl_xfer_time_seconds_count": 2,
        "nixl_post_time_seconds_sum": 0.002,
        "nixl_bytes_transferred_sum": 8000,
        "nixl_num_descriptors_sum": 12,
        "nixl_num_failed_transfers_total": 4,
        "nixl_num_failed_notifications_total": 3,
        "nixl_num_kv_expired_reqs_total": 0,
        "nixl_num_notifications_after_expiry_total": 0,
        "kvplan_read_time_seconds_sum": 0.8,
        "kvplan_num_direct_reads_total": 1,
        "kvplan_num_staged_reads_total": 1,
        "kvplan_handshake_time_seconds_sum": 0.5,
        "kvplan_plan_time_seconds_sum": 0.02,
        "kvplan_num_failed_handshakes_total": 1,
        "kvplan_num_claims_total": 5,
        "kvplan_num_refused_claims_total": 0,
    }
    assert {name: float(scraped[f'{name}{{engine="1",}}']) for name in expected} == pytest.approx(expected)
    assert scraped['kvplan_num_failed_reads_total{code="LEASE",engine="1",}'] == "1.0"


def test_the_guide_has_all_metrics() -> None:
    """Its table has each one once, counters with the ending that Prometheus gives them."""
    names = re.findall(r"^\| `(vllm:\S+)` \|", Path("docs/how-to/vllm.md").read_text(), re.MULTILINE)
    assert names == [metric.name + ("" if metric.buckets or metric.is_gauge else "_total") for metric in METRICS]


def test_statistics_have_the_keys_of_nixl_connector() -> None:
    """What means the same has NixlConnector's key."""
    assert NixlKVConnectorStats().data.keys() <= KvplanStats().data.keys()


def test_the_name_is_registered_once_and_lazily() -> None:
    """vLLM calls the plugin in each process, also where the module was loaded by its path before."""
    for _ in range(2):
        register()
    assert KVConnectorFactory.get_connector_class_by_name("KvplanConnector") is KvplanConnector
