"""Caches in main memory for devices that NIXL does not reach: which blocks are copied, and when."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvplan import Blocks, Context, Group, KVPlanError
from kvplan.protocol import Read, ReadResult, Source
from kvplan_nixl.vllm import connector as connector_module
from kvplan_nixl.vllm.host_cache import HostCache, check_platform
from tests.engines.test_next_turns import ASKED, PROMPT, blocks_of, request_of, start

__all__ = ["start"]

NUM_BLOCKS = 12
STALE = -1.0  # what main memory has of requests that are over

Tensors = dict[str, torch.Tensor]


def copy_blocks(
    sources: Tensors, destinations: Tensors, source_ids: list[int], destination_ids: list[int], direction: str
) -> None:
    """Stands in for a platform's copies."""
    assert direction in ("h2d", "d2h")
    for layer, source in sources.items():
        destinations[layer][destination_ids] = source[source_ids]


SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


def host_cache_of(tensors: Tensors, groups: list[list[str]]) -> HostCache:
    """The second cache of tensors in groups of layers."""
    made = HostCache(KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(layers, SPEC) for layers in groups]), tensors)
    made.set_copies(copy_blocks)
    for tensor in made.tensors.values():
        tensor.fill_(STALE)
    return made


def random_cache(num_kernel_blocks: int, slots: int) -> torch.Tensor:
    """A cache [kernel block, head, slot, content] whose memory has heads after slots."""
    shape = (NUM_BLOCKS * num_kernel_blocks, slots, 2, 3)
    return torch.rand(shape).transpose(1, 2)


def read_of(tables: dict[str, Blocks], tokens: dict[str, tuple[int, int]]) -> Read:
    source = Source("prefill", "start", "127.0.0.1", 1)
    return Read(request="r", source=source, lease="lease", local=tables, remote=tables, tokens=tokens)


def slot_of(cache: torch.Tensor, table: list[int], position: int, num_kernel_blocks: int) -> torch.Tensor:
    """The values of one position of a request."""
    slots = cache.shape[2]
    block, slot = divmod(position, slots * num_kernel_blocks)
    return cache[table[block] * num_kernel_blocks + slot // slots, :, slot % slots]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("fails", [False, True])
def test_a_read_changes_its_positions_alone(seed: int, fails: bool) -> None:
    """The device keeps whatever else it has, in blocks that are read in part too. A failed read changes nothing."""
    generator = random.Random(seed)
    num_kernel_blocks, slots = generator.choice([1, 2, 4]), generator.choice([1, 2, 8])
    size = num_kernel_blocks * slots
    table = generator.sample(range(1, NUM_BLOCKS), 6)
    start_position = generator.randrange(3 * size)
    stop = generator.randrange(start_position, 6 * size)
    device = random_cache(num_kernel_blocks, slots)
    expected = device.clone()
    host = host_cache_of({"layers.0": device}, [["layers.0"]])
    read = read_of({"group0": Blocks(table)}, {"group0": (start_position, stop)})
    host.begin_read(read, [Group("group0", size)])
    for position in range(start_position, stop):
        for cache in (host.tensors["layers.0"], expected):
            slot_of(cache, table, position, num_kernel_blocks).fill_(position)
    if fails:
        expected = device.clone()
    error = KVPlanError("TRANSFER", "read", expected="bytes", got="none") if fails else None
    host.end_read(ReadResult("r", error))
    assert torch.equal(device, expected)


def test_blocks_of_a_context_are_counted_in_positions_of_all_ranks() -> None:
    """A block of two ranks has twice as many positions as slots."""
    device = torch.ones(NUM_BLOCKS, 1, 4, 1)
    host = host_cache_of({"layers.0": device}, [["layers.0"]])
    read = read_of({"group0": Blocks([5, 6, 7])}, {"group0": (8, 16)})
    host.begin_read(read, [Group("group0", 4, Context(1, 2))])
    host.end_read(ReadResult("r"))
    assert (device == STALE).all(dim=(1, 2, 3)).nonzero().flatten().tolist() == [6]


def test_groups_that_share_memory() -> None:
    """A block has the layers of its own group alone: those of another are the same bytes."""
    memory = torch.rand(NUM_BLOCKS, 24)
    other = torch.rand(NUM_BLOCKS, 1, 8, 3)
    tensors = {"full": memory.view(NUM_BLOCKS, 1, 8, 3), "state": memory.view(NUM_BLOCKS, 24), "other": other}
    host = host_cache_of(tensors, [["full", "other"], ["state"]])
    assert host.tensors["full"].data_ptr() == host.tensors["state"].data_ptr()
    before = memory.clone()
    host.save({"group0": {1, 2}, "group1": {3}})
    saved = host.tensors["state"]
    assert torch.equal(saved[1:4], before[1:4])
    assert (saved[4:] == STALE).all()
    assert (saved[0] == STALE).all()
    read = read_of({"group0": Blocks([7]), "group1": Blocks([8])}, {"group0": (0, 8)})
    host.begin_read(read, [Group("group0", 8), Group("group1")])
    host.end_read(ReadResult("r"))
    assert (memory[7:9] == STALE).all()
    assert (other == STALE).all(dim=(1, 2, 3)).nonzero().flatten().tolist() == [7]
    memory[7:9] = before[7:9]
    assert torch.equal(memory, before)


def test_main_memory_has_the_strides_of_the_device() -> None:
    device = torch.zeros(4 * NUM_BLOCKS, 2, 16, 3).transpose(1, 2)[NUM_BLOCKS : 2 * NUM_BLOCKS]
    host = host_cache_of({"layers.0": device}, [["layers.0"]]).tensors["layers.0"]
    assert (host.shape, host.stride(), host.dtype) == (device.shape, device.stride(), device.dtype)
    assert host.storage_offset() == device.storage_offset()
    assert host.untyped_storage().nbytes() == device.untyped_storage().nbytes()


def test_a_cache_without_blocks_in_its_first_dimension_is_refused() -> None:
    with pytest.raises(KVPlanError, match="got 2") as refusal:
        host_cache_of({"layers.0": torch.zeros(2, NUM_BLOCKS, 16)}, [["layers.0"]])
    assert refusal.value.code == "LAYOUT"


class CopyingPlatform(CpuPlatform):  # type: ignore[misc]
    """Stands in for a platform with the copies of vLLM's CUDA, ROCm and XPU."""

    insert_blocks_to_device = swap_out_blocks_to_host = None


def test_a_platform_that_copies_nothing_is_refused() -> None:
    folder = Path(inspect.getfile(CpuPlatform)).parent
    for device in ("cuda", "rocm", "xpu"):
        text = (folder / f"{device}.py").read_text()
        assert all(f"def {name}(" in text for name in ("insert_blocks_to_device", "swap_out_blocks_to_host"))
    check_platform(CopyingPlatform())
    with pytest.raises(KVPlanError, match="got CpuPlatform, which does not") as refusal:
        check_platform(CpuPlatform())
    assert refusal.value.code == "SETTING"


class Manager(NamedTuple):
    """A manager of a group's blocks."""

    req_to_blocks: dict[str, Any]


def test_the_scheduler_saves_with_a_cache_in_main_memory(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step computes of a request that others may read; tests/simulation has the rules."""
    monkeypatch.setattr(connector_module, "uses_host_cache", lambda transfer: True)
    connector = start("full")
    connector.on_new_request(request_of([*range(PROMPT)], ASKED))
    (table,) = blocks_of(("full",), PROMPT).blocks
    connector._scheduler.set_managers([Manager({"r": table})])
    request = request_of([*range(PROMPT)], ASKED)
    scheduled = SchedulerOutput.make_empty()
    scheduled.num_scheduled_tokens = {"r": PROMPT}
    scheduled.scheduled_new_reqs = [NewRequestData.from_request(request, ([],))]
    assert connector.build_connector_meta(scheduled).saves == {"group0": {*range(1, 8)}}


def test_nothing_is_saved_without_a_cache_in_main_memory(start: Callable[..., Any]) -> None:
    connector = start("full")
    connector.on_new_request(request_of([*range(PROMPT)], ASKED))
    assert connector.build_connector_meta(None).saves == {}
