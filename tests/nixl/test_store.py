"""A store's client whose pages NIXL copies, as it would to and from a GPU."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from benchmarks.real_memory import placed, synchronized
from kvplan import Blocks, KVPlanError, Status, Worker
from kvplan_nixl import NixlExecutor
from kvplan_nixl.mover import NixlMover
from kvplan_nixl.serving.store import Backend, MemoryBackend, StoreClient
from tests.store.engines import PAGE, PROMPT, QWEN, EngineWithStore

BLOCKS = {"attn": Blocks([3, 9, 5, 1, 7, 30])}


def with_nixl(worker: Worker, backend: Backend, stack: ExitStack) -> tuple[StoreClient, NixlExecutor]:
    """A client of a worker that has an executor, which ends with the stack."""
    executor = stack.enter_context(NixlExecutor(worker))
    return StoreClient(backend, worker, mover=NixlMover(executor), tokens_per_page=PAGE), executor


def test_nixl_saves_and_loads_pages(device: str) -> None:
    """What NIXL has saved and loaded is what was in the cache, on a GPU where there is one."""
    backend = MemoryBackend()
    with ExitStack() as stack:
        (written,) = EngineWithStore.of(QWEN, backend, seed=5).caches
        there, memory = placed(written.worker, device)
        for name, tensor in memory.items():
            tensor.copy_(torch.from_numpy(written.memory[name]))
        synchronized(device)
        client, _ = with_nixl(there, backend, stack)
        assert client.save(client.chain(PROMPT), BLOCKS, {"attn": (0, 96)}) == 6
        (read,) = EngineWithStore.of(QWEN, backend, layout="LBHNC").caches
        there, memory = placed(read.worker, device)
        client, _ = with_nixl(there, backend, stack)
        stop = client.find(client.chain(PROMPT))
        client.load(client.chain(PROMPT), {"attn": Blocks([8, 0, 4, 6, 11, 12])}, {"attn": (0, stop)})
        synchronized(device)
        for name, tensor in memory.items():
            read.memory[name][:] = tensor.cpu().numpy()
    assert read.contents([8, 0, 4, 6, 11, 12]) == written.contents(BLOCKS["attn"].ids.tolist())


def test_a_failed_copy_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a transfer is that of the load, and a transfer that never ends makes the mover useless."""
    backend = MemoryBackend()
    with ExitStack() as stack:
        (cache,) = EngineWithStore.of(QWEN, backend, seed=5).caches
        cache.client.save(cache.client.chain(PROMPT), BLOCKS, {"attn": (0, 96)})
        client, _ = with_nixl(cache.worker, backend, stack)
        monkeypatch.setattr("kvplan_nixl.mover.TIMEOUT_S", 0.0)
        with monkeypatch.context() as frozen:
            frozen.setattr(NixlExecutor, "poll", lambda *arguments: Status.RUNNING)
            with pytest.raises(KVPlanError, match=r"^TRANSFER: cannot move pages of a store"):
                client.load(client.chain(PROMPT), BLOCKS, {"attn": (0, 96)})
        with pytest.raises(KVPlanError, match=r"^TRANSFER: cannot move pages of a store"):
            client.load(client.chain(PROMPT), BLOCKS, {"attn": (0, 96)})
