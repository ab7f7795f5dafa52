"""Offloading on a CPU, where vLLM 0.32 has none: its own manager, and a worker that keeps blocks in memory.

vLLM's OffloadingConnector loads it by ``spec_module_path``.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class MemoryWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks when it is asked to; ``late``: stores them only when vLLM waits or a step has passed."""

    def __init__(self, caches: CanonicalKVCaches, late: bool) -> None:
        self._caches = caches
        self._late = late
        self._pending: dict[int, tuple[Any, Any]] = {}
        self._stored: dict[int, list[torch.Tensor]] = {}
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._pending[job_id] = (src_spec, dst_spec)
        if not self._late:
            self._store()
        return True

    def _store(self) -> None:
        for job_id, (src_spec, dst_spec) in self._pending.items():
            for rows, chunk in zip(self._rows(src_spec), dst_spec.block_ids, strict=True):
                self._stored[int(chunk)] = [row.clone() for row in rows]
            self._ended.append(TransferResult(job_id, True))
        self._pending.clear()

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for rows, chunk in zip(self._rows(dst_spec), src_spec.block_ids, strict=True):
            for row, stored in zip(rows, self._stored[int(chunk)], strict=True):
                row.copy_(stored)
        self._ended.append(TransferResult(job_id, True))
        return True

    def _rows(self, blocks: Any) -> list[list[torch.Tensor]]:
        """Returns where each block keeps the layers of its group."""
        ids = iter(blocks.block_ids)
        return [
            [self._caches.tensors[ref.tensor_idx].tensor[int(block)] for ref in refs]
            for refs, size in zip(self._caches.group_data_refs, blocks.group_sizes, strict=True)
            for _, block in zip(range(size), ids, strict=False)
        ]

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        self._store()
        return ended

    def wait(self, job_ids: set[int]) -> None:
        self._store()


class MemoryOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's own offloading, but for the worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        self._memory_worker = getattr(self, "_memory_worker", None) or MemoryWorker(
            kv_caches, bool(self.extra_config.get("late"))
        )
        return self._memory_worker
