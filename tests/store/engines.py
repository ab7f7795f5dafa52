"""Engines whose caches are real memory: a small model with a window and states, in any parallel sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Blocks, KVPlanError, Model, Worker
from kvplan_nixl.serving.store import Backend, StoreClient, find

PAGE = 16
NUM_BLOCKS = 40
PROMPT = range(100, 200)
BLOCKS = {"attn": Blocks([3, 9, 5, 1, 7, 30])}
QWEN = Model.from_config(
    {
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "a small model, weights 1",
)


@attrs.frozen
class CacheOfWorker:
    """A worker, the memory of its regions, and its client of a store."""

    worker: Worker
    memory: Mapping[str, np.ndarray[Any, Any]]
    client: StoreClient

    def contents(self, ids: Sequence[int]) -> dict[str, bytes]:
        """The bytes of some blocks, by tensor: the whole block of each view, in the view's own order."""
        found: dict[str, bytes] = {}
        for view in self.worker.views:
            strides = [view.block_stride_bytes, *(axis.stride_bytes for axis in view.axes), 1]
            shape = [view.num_blocks, *(axis.extent for axis in view.axes), view.itemsize]
            memory = self.memory[view.region][view.offset_bytes :]
            cells = np.lib.stride_tricks.as_strided(memory, shape, strides)
            found[view.name] = found.get(view.name, b"") + cells[list(ids)].tobytes()
        return found


@attrs.frozen
class EngineWithStore:
    """All workers of an engine, with a store."""

    caches: tuple[CacheOfWorker, ...]

    @classmethod
    def of(cls, model: Model, backend: Backend, seed: int = 0, **sizes: Any) -> EngineWithStore:
        """An engine whose memory is random, or zero for seed 0."""
        caches = []
        for worker in model.engine("e", num_blocks=NUM_BLOCKS, **sizes):
            memory = {region.name: np.zeros(region.size_bytes, np.uint8) for region in worker.regions}
            if seed:
                for array in memory.values():
                    array[:] = np.random.default_rng(seed).integers(1, 256, array.size)
            regions = [attrs.evolve(region, address=memory[region.name].ctypes.data) for region in worker.regions]
            real = attrs.evolve(worker, regions=regions)
            client = StoreClient(backend, real, tokens_per_page=PAGE, buffer_bytes=1 << 22)
            caches.append(CacheOfWorker(real, memory, client))
        return cls(tuple(caches))

    def save(self, tokens: Sequence[int], tables: Mapping[str, Blocks], stop: int) -> int:
        """Save a prefix in all workers; return the pages that are new."""
        num_saved = 0
        for cache in self.caches:
            client = cache.client
            num_saved += client.save(client.chain(tokens), tables, client.needs(0, stop))
        return num_saved

    def find(self, tokens: Sequence[int], **options: int) -> int:
        """The longest prefix that is stored."""
        clients = [cache.client for cache in self.caches]
        return find(clients, clients[0].chain(tokens), **options)

    def load(self, tokens: Sequence[int], tables: Mapping[str, Blocks], stop: int) -> None:
        """Load a prefix in all workers."""
        for cache in self.caches:
            client = cache.client
            client.load(client.chain(tokens), tables, client.needs(0, stop))


def saved(backend: Any) -> EngineWithStore:
    """An engine that has saved six pages."""
    writer = EngineWithStore.of(QWEN, backend, seed=5)
    writer.save(PROMPT, BLOCKS, 96)
    return writer


def check_third_page_fails(reader: EngineWithStore) -> None:
    """No byte arrives of a third page that is damaged."""
    assert reader.find(PROMPT) == 96  # nothing is read yet
    with pytest.raises(KVPlanError, match=r"^PAGE: cannot read page"):
        reader.load(PROMPT, BLOCKS, 96)
    assert not any(byte for data in reader.caches[0].contents([5]).values() for byte in data)
    assert dict(reader.caches[0].client.faults) == {"PAGE": 1}


def check_third_page_is_saved_again(reader: EngineWithStore, writer: EngineWithStore) -> None:
    """A third page that is missed is saved by the next engine, and then loaded."""
    assert reader.find(PROMPT) == 32
    assert writer.save(PROMPT, BLOCKS, 96) == 1
    reader.load(PROMPT, BLOCKS, reader.find(PROMPT))
    ids = BLOCKS["attn"].ids.tolist()
    assert reader.caches[0].contents(ids) == writer.caches[0].contents(ids)
