"""The cache of a device whose memory NIXL does not reach, a second time in main memory.

Bytes between engines move from and to main memory. vLLM's platform copies blocks between it and the
device: of a request that may be exported, what a step has computed when it ends, and of one that is
read, what has arrived before the engine goes on with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvplan import Group, KVPlanError
from kvplan.protocol import Read, ReadResult
from kvplan_nixl.vllm.description import groups_of

BlockIds = npt.NDArray[np.int32]


def check_platform(platform: Any) -> None:
    """Refuse a platform of vLLM that copies no blocks. Raises ``SETTING``."""
    # vLLM's platforms have None for any other name
    if not hasattr(type(platform), "insert_blocks_to_device"):
        raise KVPlanError(
            "SETTING",
            "set kv_buffer_device",
            expected="a platform of vLLM that copies blocks to and from main memory",
            got=f"{type(platform).__name__}, which does not",
            hint="leave it out: kvplan reads into the cache itself",
        )


class HostCache:
    """The caches of a worker in main memory: ``tensors`` by layer, in the layout of the device.

    Tensors that share memory on the device share it here too. Raises ``LAYOUT`` for a cache whose
    first dimension is not that of blocks.
    """

    def __init__(self, cache: KVCacheConfig, device_tensors: Mapping[str, torch.Tensor]) -> None:
        self._device_tensors = device_tensors
        self.tensors: dict[str, torch.Tensor] = _in_main_memory(device_tensors)
        # by group, and by the number of kernel blocks in a block: the layers
        self._layers: dict[str, dict[int, list[str]]] = {}
        for group, index in groups_of(cache).items():
            layers = self._layers.setdefault(group, {})
            for layer in cache.kv_cache_groups[index].layer_names:
                if layer in device_tensors:
                    num_kernel_blocks = _num_kernel_blocks(layer, device_tensors[layer], cache)
                    layers.setdefault(num_kernel_blocks, []).append(layer)
        self._copy_blocks: CopyBlocksOp | None = None
        # by request and group: the ids of the blocks that a read fills
        self._filled: dict[str, dict[str, BlockIds]] = {}

    def set_copies(self, copy_blocks: CopyBlocksOp) -> None:
        """Take the operation by which the platform copies blocks."""
        self._copy_blocks = copy_blocks

    def save(self, blocks: Mapping[str, Collection[int]]) -> None:
        """Copy blocks of each group from the device."""
        self._copy({group: np.array([*ids], np.int32) for group, ids in blocks.items()}, "d2h")

    def begin_read(self, read: Read, groups: Iterable[Group]) -> None:
        """Prepare for a read into the blocks of a worker's groups.

        The device keeps the positions of a block that are not read, so blocks that
        are read in part are copied from it first.
        """
        filled_ids = dict[str, BlockIds]()
        partial_ids = dict[str, BlockIds]()
        for group in groups:
            blocks = read.local[group.name]
            filled_ids[group.name] = blocks.ids
            if group.tokens_per_block is None or group.name not in read.tokens:
                continue
            start, stop = read.tokens[group.name]
            num_positions = group.tokens_per_block * group.context.size
            # the positions of each block
            starts = blocks.ordinals * num_positions
            stops = starts + num_positions
            is_filled = (starts < stop) & (stops > start)
            is_whole = (starts >= start) & (stops <= stop)
            filled_ids[group.name] = blocks.ids[is_filled]
            partial_ids[group.name] = blocks.ids[is_filled & ~is_whole]
        self._copy(partial_ids, "d2h")
        # in addition to those of the request's earlier partial reads
        earlier = self._filled.setdefault(read.request, {})
        for label, ids in filled_ids.items():
            earlier[label] = np.concatenate([earlier.get(label, ids[:0]), ids])

    def end_read(self, result: ReadResult) -> None:
        """Copy what has arrived to the device, and nothing of a read that has failed."""
        filled_ids = self._filled.pop(result.request, {})
        if result.error is None:
            self._copy(filled_ids, "h2d")

    def _copy(self, ids_by_group: Mapping[str, BlockIds], direction: Literal["h2d", "d2h"]) -> None:
        """Copy blocks to the device or from it. They are copied when this returns."""
        assert self._copy_blocks is not None
        source, destination = self._device_tensors, self.tensors
        if direction == "h2d":
            source, destination = destination, source
        for group, ids in ids_by_group.items():
            # Groups may share memory: a block has the layers of its own group alone.
            for num_kernel_blocks, layers in self._layers[group].items():
                kernel_ids = ids[:, None] * num_kernel_blocks + np.arange(num_kernel_blocks)
                block_ids = kernel_ids.ravel().tolist()
                sources = {layer: source[layer] for layer in layers}
                destinations = {layer: destination[layer] for layer in layers}
                with gpu_sync_allowed():
                    self._copy_blocks(sources, destinations, block_ids, block_ids, direction)


def _in_main_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same shapes and strides in main memory, of zeros."""
    storages = dict[int, torch.UntypedStorage]()
    host_tensors = {}
    for layer, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            memory = torch.zeros(storage.nbytes(), dtype=torch.uint8)
            storages[storage.data_ptr()] = memory.untyped_storage()
        host_tensor = torch.empty(0, dtype=tensor.dtype)
        host_storage = storages[storage.data_ptr()]
        offset = tensor.storage_offset()
        host_tensor.set_(host_storage, offset, tensor.shape, tensor.stride())
        host_tensors[layer] = host_tensor
    return host_tensors


def _num_kernel_blocks(layer: str, tensor: torch.Tensor, cache: KVCacheConfig) -> int:
    """Return how many blocks of a layer's tensor are one block of a request."""
    number, num_left = divmod(len(tensor), int(cache.num_blocks))
    if num_left or not number:
        raise KVPlanError(
            "LAYOUT",
            f"copy the blocks of {layer!r} to main memory",
            expected=f"a first dimension of a multiple of {cache.num_blocks} blocks",
            got=f"{len(tensor)}",
            hint="leave kv_buffer_device out",
        )
    return number
