"""Stands in for a device whose memory NIXL does not reach, on a CPU: vLLM copies its blocks to main memory and back."""

from __future__ import annotations

from collections.abc import Collection

import torch
from vllm.config import KVTransferConfig
from vllm.platforms.cpu import CpuPlatform


def install(directions: Collection[str]) -> None:
    """Gives vLLM's platform the copies of XPU in some ``directions``, ``d2h`` and ``h2d``, and none in others.

    That platform's own setting of ``kv_buffer_device`` is not ``cpu`` any more.
    """

    def copies(direction: str) -> classmethod[type, ..., None]:
        def copy(
            cls: type, source: torch.Tensor, destination: torch.Tensor, ids: torch.Tensor, to_ids: torch.Tensor
        ) -> None:
            if direction in directions:
                destination[to_ids] = source[ids]

        return classmethod(copy)

    CpuPlatform.swap_out_blocks_to_host = copies("d2h")
    CpuPlatform.insert_blocks_to_device = copies("h2d")
    KVTransferConfig.__dataclass_fields__["kv_buffer_device"].default_factory = lambda: "device"
