"""The connector to a store, without an engine: what it refuses, and what it finds, loads and saves of requests."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvplan import Blocks, KVPlanError, Model, Worker, encode
from kvplan_nixl.serving.store import FileBackend, Limits, MemoryBackend, StoreClient
from kvplan_nixl.vllm import KvplanStore
from kvplan_nixl.vllm.store_scheduler import KvplanStoreWorkerMetadata
from tests.store.engines import QWEN, EngineWithStore

SIZES = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL, WINDOW = FullAttentionSpec(**SIZES), SlidingWindowSpec(**SIZES, sliding_window=48)
STATES = MambaSpec(block_size=512, shapes=((3, 8),), dtypes=(torch.float32,), mamba_type="mamba2")
CROSS = CrossAttentionSpec(**SIZES)
PROMPT = [*range(100, 300)]
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has no model, so it says none of its facts."""
    monkeypatch.setattr("kvplan_nixl.vllm.store.identity_of", lambda *_: {})


def connector(
    folder: Path, spec: Any = FULL, speculative: Any = None, mode: str = "none", **transfer: Any
) -> KvplanStore:
    """The scheduler's part of an engine."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(use_mla=False)
    config.speculative_config = speculative
    config.cache_config.mamba_cache_mode = mode
    extra = {"folder": str(folder), **transfer.pop("extra", {})}
    settings = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **transfer}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KvplanStore",
        kv_connector_module_path="kvplan_nixl.vllm",
        kv_connector_extra_config=extra,
        **settings,
    )
    cache = KVCacheConfig(num_blocks=50, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)])
    return KvplanStore(config, KVConnectorRole.SCHEDULER, cache)


def worker_of(model: Model = QWEN) -> Worker:
    """A worker whose group is named as the connector names it."""
    (worker,) = model.engine("e", num_blocks=50)
    groups = [attrs.evolve(group, name="group0") for group in worker.groups]
    return attrs.evolve(worker, groups=groups, views=[attrs.evolve(view, group="group0") for view in worker.views])


def blocks_of(ids: Iterable[int], num_cached: int = 0) -> KVCacheBlocks:
    """A request's blocks, one after each of the ids; the null block is after -1. Some are of the prefix cache."""
    blocks = []
    for place, number in enumerate(ids):
        blocks.append(KVCacheBlock(number + 1, is_null=number < 0))
        if place < num_cached:
            blocks[-1]._block_hash = b"cached"
    return KVCacheBlocks((blocks,))


def request_of(tokens: list[int], **options: Any) -> Request:
    """A request for some tokens."""
    return Request(f"r{next(NUMBERS)}", [*tokens], SamplingParams(max_tokens=9), None, **options)


def found_of(made: KvplanStore, request: Request, num_cached: int = 0) -> tuple[int | None, bool]:
    """What is found of a request, which is asked for until the store has been searched, as vLLM does."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = made.get_num_new_matched_tokens(request, num_cached)
        if answer[0] is not None:
            return answer
        time.sleep(0.001)
    raise TimeoutError(f"no answer for {request.request_id}")


def test_limits_are_kept_beside_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings say them; without one nothing is evicted."""
    limits = {"max_bytes": 10**9, "max_model_bytes": 10**8, "max_age_s": 3600}
    made = connector(tmp_path / "kv", extra=limits)
    eviction = made._scheduler._eviction
    assert eviction is not None
    assert eviction._limits == Limits(9 * 10**8, 9 * 10**7, 3600.0)
    assert not eviction._is_closed.is_set()
    made.shutdown()
    assert eviction._is_closed.is_set()
    assert connector(tmp_path / "kv")._scheduler._eviction is None
    with pytest.raises(KVPlanError, match="RANGE: cannot read max_bytes in kv_connector_extra_config"):
        connector(tmp_path / "kv", extra={"max_bytes": -1})


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with the first 192 tokens of the prompt."""
    cache = EngineWithStore.of(QWEN, FileBackend(tmp_path / "other"), seed=5).caches[0]
    client = StoreClient(FileBackend(tmp_path / "kv"), cache.worker)
    client.save(client.chain(PROMPT), {"attn": Blocks(range(13))}, {"attn": (0, 192)})
    return tmp_path / "kv"


def ready(folder: Path, **options: Any) -> KvplanStore:
    """A connector that knows its worker."""
    made = connector(folder, **options)
    first, second = (KvplanStoreWorkerMetadata([encode(worker_of())]) for _ in range(2))
    made.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=first.aggregate(second)))
    return made


def test_requests_wait_until_workers_have_said_what_they_load(stored: Path) -> None:
    """Workers say it in their first step, which the first request would miss."""
    made = connector(stored)
    assert made.get_num_new_matched_tokens(request_of(PROMPT), 0) == (None, False)
    made.update_connector_output(KVConnectorOutput())
    assert made.get_num_new_matched_tokens(request_of(PROMPT), 0) == (None, False)
    saving = connector(stored, kv_role="kv_producer")
    assert saving.get_num_new_matched_tokens(request_of(PROMPT), 0) == (0, False)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"extra": {"folder": ""}}, "NAME: cannot read folder in kv_connector_extra_config"),
        (
            {"kv_load_failure_policy": "fail"},
            "SETTING: cannot set kv_load_failure_policy of a store: expected recompute",
        ),
        ({"spec": STATES, "mode": "align"}, "SETTING: cannot set mamba_cache_mode of a store: expected none"),
        ({"spec": STATES, "speculative": SimpleNamespace(method="ngram")}, "SETTING: cannot set speculative_config"),
        ({"spec": CROSS}, "LAYOUT: cannot transfer a cache of vLLM: .* got CrossAttentionSpec"),
        ({"speculative": SimpleNamespace(method="eagle")}, "SETTING: cannot set speculative_config of a store"),
        ({"extra": {"port": 7}}, "SETTING: cannot read kv_connector_extra_config: expected known names, got 'port'"),
        ({"kv_port": 5}, "SETTING: cannot set kv_port"),
    ],
)
def test_what_has_no_effect_or_a_wrong_one_is_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    """An engine that the connector would not store rightly does not start."""
    with pytest.raises(KVPlanError, match=text):
        connector(tmp_path, **options)


def test_a_stored_prefix_is_a_hit(stored: Path) -> None:
    """A request loads what is stored after what the engine has cached; the last token is always computed."""
    found = ready(stored)
    assert found_of(found, request_of(PROMPT), 0) == (192, True)
    assert found_of(found, request_of(PROMPT), 64) == (128, True)
    assert found_of(found, request_of(PROMPT[:128]), 0) == (127, True)
    assert found_of(found, request_of(PROMPT, cache_salt="blue"), 0) == (0, False)
    assert found_of(found, request_of([7, *PROMPT]), 0) == (0, False)


def test_a_request_is_loaded_once(stored: Path) -> None:
    """A load that has failed is not tried again: the request is computed."""
    found, request = ready(stored), request_of(PROMPT)
    assert found_of(found, request, 64) == (128, True)
    blocks = blocks_of(range(13), num_cached=4)
    found.update_state_after_alloc(request, blocks, 128)
    step = found.build_connector_meta(None)
    (load,) = step.loads
    assert load.tables["group0"].ids.tolist() == [*range(1, 14)]
    assert (load.positions, load.stop) == ({"group0": (64, 192)}, 192)
    assert found_of(found, request, 0) == (0, False)
    assert found.build_connector_meta(None).loads == []


def test_a_group_may_have_cached_less(stored: Path) -> None:
    """What a group has not cached is loaded too, although the engine counts it as cached."""
    found, request = ready(stored), request_of(PROMPT)
    found_of(found, request, 64)
    found.update_state_after_alloc(request, blocks_of(range(13), num_cached=2), 128)
    (load,) = found.build_connector_meta(None).loads
    assert load.positions == {"group0": (32, 192)}


def test_a_store_that_is_gone_is_a_miss(stored: Path) -> None:
    """Requests go on without the store."""
    found = ready(stored)
    stored.rename(stored.with_name("elsewhere"))
    assert found_of(found, request_of(PROMPT), 0) == (0, False)


@pytest.mark.parametrize("role, status, is_saved", [
    ("kv_both", RequestStatus.FINISHED_STOPPED, True),
    ("kv_both", RequestStatus.FINISHED_ABORTED, False),
    ("kv_consumer", RequestStatus.FINISHED_STOPPED, False),
])  # fmt: skip
def test_a_finished_request_is_saved(role: str, status: Any, is_saved: bool, tmp_path: Path) -> None:
    """Its blocks stay, and its answer is saved too, without the last token, which no cache has."""
    made, request = ready(tmp_path / "kv", kv_role=role), request_of(PROMPT[:120])
    request.append_output_token_ids(PROMPT[120:130])
    request.num_computed_tokens, request.status = 129, status
    assert made.request_finished(request, [*range(1, 10)]) == (is_saved, None)
    saves = made.build_connector_meta(None).saves
    assert [job.positions for job in saves] == ([{"group0": (0, 128)}] if is_saved else [])


@pytest.mark.parametrize("limit", [0, 1 << 30])
@pytest.mark.parametrize(
    ("params", "is_pinned", "owner"),
    [
        (None, None, ""),
        ({}, None, ""),
        ({"kvplan_pin": "a secret"}, True, "a secret"),
        ({"kvplan_unpin": "a secret"}, False, "a secret"),
        ({"kvplan_pin": True}, None, ""),
        ({"kvplan_pin": ""}, None, ""),
        ({"kvplan_pin": ["x"]}, None, ""),
    ],
)
def test_a_request_says_that_its_prompt_stays(
    params: Any, is_pinned: bool | None, owner: str, limit: int, tmp_path: Path
) -> None:
    """The prompt's whole pages, not those of the answer, where the operator lets requests do so."""
    made, request = ready(tmp_path / "kv", extra={"max_pinned_bytes": limit}), request_of(PROMPT)
    if not limit:
        is_pinned, owner = None, ""
    request.kv_transfer_params = params
    request.append_output_token_ids([*range(80)])
    request.num_computed_tokens, request.status = 279, RequestStatus.FINISHED_LENGTH_CAPPED
    assert made.request_finished(request, [*range(18)]) == (True, None)
    (job,) = made.build_connector_meta(None).saves
    assert (job.is_pinned, job.pin_owner, job.pin_stop, job.stop) == (is_pinned, owner, 200, 256)


def test_a_window_has_its_last_blocks(tmp_path: Path) -> None:
    """Of a window of 48 the store gets what vLLM has kept, and a request needs the blocks that it attends to."""
    made, request = ready(tmp_path / "kv", spec=WINDOW), request_of(PROMPT[:190])
    request.append_output_token_ids(PROMPT[190:200])
    request.num_computed_tokens, request.status = 199, RequestStatus.FINISHED_STOPPED
    assert made.request_finished(request, [0] * 7 + [*range(7, 13)]) == (True, None)
    (save,) = made.build_connector_meta(None).saves
    assert (save.positions, save.stop) == ({"group0": (112, 192)}, 192)
    # the page from 128 on is whole; it is all that positions after 192 attend to
    cache = EngineWithStore.of(QWEN, FileBackend(tmp_path / "other"), seed=5).caches[0]
    client = StoreClient(FileBackend(tmp_path / "kv"), cache.worker)
    client.save(client.chain(PROMPT), {"attn": Blocks(range(13))}, {"attn": (112, 192)})
    assert found_of(made, request_of(PROMPT), 0) == (192, True)
    assert found_of(made, request_of(PROMPT[:192]), 0) == (0, False)
    again = request_of(PROMPT)
    found_of(made, again, 0)
    made.update_state_after_alloc(again, blocks_of([-1] * 9 + [9, 10, 11, 12]), 192)
    (load,) = made.build_connector_meta(None).loads
    assert load.positions == {"group0": (144, 192)}


@pytest.mark.parametrize("num_computed, num_in_flight, is_saved", [(128, 0, True), (130, 0, False), (129, 1, False)])
def test_a_state_is_saved_where_a_page_ends(
    num_computed: int, num_in_flight: int, is_saved: bool, tmp_path: Path
) -> None:
    """A state that other tokens have gone into is that of no prompt."""
    made, request = ready(tmp_path / "kv", spec=STATES), request_of(PROMPT[:120])
    request.append_output_token_ids(PROMPT[120:131])
    request.num_computed_tokens, request.status = num_computed, RequestStatus.FINISHED_STOPPED
    request.num_in_flight_tokens = num_in_flight
    made.request_finished(request, [5])
    saves = made.build_connector_meta(None).saves
    assert [job.positions for job in saves if job.positions] == ([{"group0": (128, 128)}] if is_saved else [])


class SlowBackend(MemoryBackend):
    """A store that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_answering = threading.Event()

    def files(self, page: str) -> tuple[str, ...]:
        self.is_answering.wait(60)
        return super().files(page)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowBackend:
    """A store that has the first 192 tokens of the prompt, and does not answer."""
    backend = SlowBackend()
    backend.is_answering.set()
    cache = EngineWithStore.of(QWEN, backend, seed=5).caches[0]
    client = StoreClient(backend, cache.worker)
    client.save(client.chain(PROMPT), {"attn": Blocks(range(13))}, {"attn": (0, 192)})
    backend.is_answering.clear()
    monkeypatch.setattr("kvplan_nixl.vllm.store_scheduler.open_backend", lambda folder: backend)
    return backend


def test_the_scheduler_never_waits_for_a_store(slow: SlowBackend, tmp_path: Path) -> None:
    """vLLM asks again while a store is searched, and other requests are answered."""
    made, request = ready(tmp_path), request_of(PROMPT)
    assert [made.get_num_new_matched_tokens(request, 0) for _ in range(3)] == [(None, False)] * 3
    slow.is_answering.set()
    assert found_of(made, request, 0) == (192, True)
    # positions that the engine had, and has no more, were not looked for
    other = request_of(PROMPT)
    assert found_of(made, other, 128) == (64, True)
    assert found_of(made, other, 64) == (128, True)
    assert found_of(made, other, 160) == (32, True)


def test_a_request_goes_on_without_a_slow_store(slow: SlowBackend, tmp_path: Path) -> None:
    """After a while it is computed, and an aborted one is forgotten."""
    made, request = ready(tmp_path, extra={"search_timeout_s": 0.2}), request_of(PROMPT)
    began_s = time.monotonic()
    assert found_of(made, request, 0) == (0, False)
    assert 0.2 < time.monotonic() - began_s < 5
    request.status = RequestStatus.FINISHED_ABORTED
    assert made.request_finished(request, []) == (False, None)
    searches = made._scheduler._searches
    assert searches is not None
    assert not searches._searches
    # for a while no other request waits
    assert made.get_num_new_matched_tokens(request_of(PROMPT), 0) == (0, False)
    slow.is_answering.set()
    made.shutdown()
