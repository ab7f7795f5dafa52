"""region_of and view_of, against the indexing of the tensors themselves."""

from __future__ import annotations

import copy
import ctypes
import itertools
import math
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Group, KVPlanError, Region, View, Worker, region_of, view_of
from kvplan.describe.tensors import check_memory
from kvplan.describe.views import ITEMSIZE
from tests.bytes_of import element_bytes
from tests.stand_in import StandIn

SIZES = {"block": 3, "kv": 2, "head": 3, "token": 4, "dim": 5}
ORDERS = [
    "block kv head token dim",
    "block token kv head dim",
    "kv block head token dim",
    "head block kv token dim",
    "block head token kv dim",
    "block kv head dim token",
    "dim token head kv block",
]


def whole(array: np.ndarray[Any, Any]) -> Region:
    """The region of the memory that an array of its own has."""
    return Region("kv", array.__array_interface__["data"][0], array.nbytes)


def elements(view: View, pattern: str) -> list[tuple[int, ...]]:
    """The index of each element in a tensor of these dimensions, in the order of ``element_bytes``."""
    at = pattern.split().index("block")
    spans = [range(view.num_blocks), *(range(axis.extent) for axis in view.axes)]
    return [(*rest[:at], block, *rest[at:]) for block, *rest in itertools.product(*spans)]


def check_bytes(array: np.ndarray[Any, Any], memory: np.ndarray[Any, Any], view: View, pattern: str) -> None:
    """Writing element by element at the view's bytes of ``memory`` is writing to the array by index."""
    item = view.itemsize
    addresses = np.array(element_bytes(view)).reshape(-1, item)
    raw = memory.reshape(-1).view(np.uint8)
    indices = elements(view, pattern)
    assert len(indices) == len(addresses) == array.size
    for number, (index, address) in enumerate(zip(indices, addresses, strict=True), 1):
        value = np.array([number], array.dtype)
        raw[address] = value.view(np.uint8)
        assert array[index] == value[0], index


@pytest.mark.parametrize("pattern", ORDERS)
def test_an_array_in_any_order(pattern: str) -> None:
    """A dense array: each byte that the view names is the one that indexing reaches."""
    array = np.zeros([SIZES[name] for name in pattern.split()], np.float32)
    view = view_of(array, pattern, name="v", group="g", region=whole(array))
    check_bytes(array, array, view, pattern)


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::7])
def test_a_transposed_array(order: tuple[int, ...]) -> None:
    """A transposed array has its dimensions in one order and its memory in another."""
    memory = np.zeros([SIZES[name] for name in ORDERS[0].split()], np.int16)
    pattern = " ".join(ORDERS[0].split()[i] for i in order)
    array = memory.transpose(order)
    check_bytes(array, memory, view_of(array, pattern, name="v", group="g", region=whole(memory)), pattern)


@pytest.mark.parametrize(
    "part",
    [
        (slice(1, 3), slice(None), slice(None), slice(None), slice(None)),
        (slice(None), slice(1, 2), slice(1, 3), slice(None), slice(0, 5, 2)),
        (slice(None, None, 2), slice(None), slice(2, 3), slice(1, 4), slice(3, 4)),
    ],
)
def test_a_slice_of_an_array(part: tuple[slice, ...]) -> None:
    """A slice starts at an offset, and its neighbours may be several elements apart."""
    memory = np.zeros([SIZES[name] for name in ORDERS[0].split()], np.uint64)
    array = memory[part]
    check_bytes(array, memory, view_of(array, ORDERS[0], name="v", group="g", region=whole(memory)), ORDERS[0])


def test_padded_pages() -> None:
    """Pages with bytes between them, as ``as_strided`` makes them, keep their stride."""
    memory = np.zeros(200, np.uint8)
    array = np.lib.stride_tricks.as_strided(memory, (3, 4, 5), (60, 13, 2))
    view = view_of(array, "block token dim", name="v", group="g", region=whole(memory))
    assert (view.block_stride_bytes, [axis.stride_bytes for axis in view.axes]) == (60, [13, 2])
    check_bytes(array, memory, view, "block token dim")


def test_kernel_blocks_are_two_digits() -> None:
    """A name given twice is two digits, the outer one first."""
    array = np.zeros((3, 2, 4, 5), np.float64)
    view = view_of(array, "block token token dim", name="v", group="g", region=whole(array))
    assert [(axis.name, axis.extent) for axis in view.axes] == [("token", 2), ("token", 4), ("dim", 5)]
    assert view.sizes == {"token": 8, "dim": 5}
    check_bytes(array, array, view, "block token token dim")


def test_shards_say_which_coordinates_a_tensor_holds() -> None:
    """A shard gives start, stop and size; what is not named is whole."""
    array = np.zeros((3, 4, 2, 5), np.float16)
    view = view_of(array, "block token head dim", name="v", group="g", region=whole(array), shards={"head": (4, 6, 8)})
    assert [(axis.start, axis.stop, axis.size) for axis in view.axes] == [(0, 4, 4), (4, 6, 8), (0, 5, 5)]
    check_bytes(array, array, view, "block token head dim")


def test_what_view_of_says_is_what_a_worker_checks() -> None:
    """The view goes with its group and region into a worker as it is."""
    array = np.zeros((3, 4, 5), np.float16)
    group, region = Group("attn", 4), whole(array)
    view = view_of(array, "block token dim", name="layers.0", group=group, region=region)
    worker = Worker("e", 0, [region], [group], [view])
    assert (worker.views[0].group, worker.views[0].region, view.end_bytes) == ("attn", "kv", array.nbytes)


def test_a_tensor_that_starts_inside_a_larger_region() -> None:
    """Offsets count from the region, which may hold other tensors before this one."""
    memory = np.zeros(256, np.uint8)
    array = memory[64:184].view(np.float16).reshape(3, 4, 5)
    view = view_of(array, "block token dim", name="v", group="g", region=whole(memory))
    assert view.offset_bytes == 64
    check_bytes(array, memory, view, "block token dim")


def test_a_reversed_axis_is_refused() -> None:
    """A negative stride is refused, and the axis is named."""
    array = np.zeros((3, 4, 5))[:, ::-1]
    with pytest.raises(KVPlanError, match=r"^STRIDE: .* expected strides >= 0, got -40 on 'token'"):
        view_of(array, "block token dim", name="v", group="g", region=Region("kv", 0, 1 << 62))


def test_a_reversed_axis_of_one_coordinate_is_none() -> None:
    """Where a dimension has one coordinate, its stride has no meaning, whatever its sign."""
    memory = np.zeros((3, 1, 5))
    array = memory[:, ::-1]
    assert array.strides[1] < 0
    view = view_of(array, "block token dim", name="v", group="g", region=whole(memory))
    assert view == view_of(memory, "block token dim", name="v", group="g", region=whole(memory))
    one = memory[:1][::-1]
    assert view_of(one, "block token dim", name="v", group="g", region=whole(memory)).num_blocks == 1


def test_a_broadcast_axis_is_refused() -> None:
    """Elements that share their bytes are not a cache."""
    array = np.broadcast_to(np.zeros((3, 1, 5)), (3, 4, 5))
    with pytest.raises(KVPlanError, match=r"^STRIDE: .*'token' .* got stride 0"):
        view_of(array, "block token dim", name="v", group="g", region=Region("kv", 0, 1 << 62))


@pytest.mark.parametrize("dtype", [">f4", "complex64", "S4", "object", "datetime64[s]", [("a", "i4"), ("b", "i4")]])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    """A byte order that is not the machine's, and types that no engine exchanges, have no name here."""
    array = np.zeros((3, 4, 5), np.dtype(dtype))
    with pytest.raises(KVPlanError, match=r"^DTYPE: cannot read a tensor"):
        view_of(array, "block token dim", name="v", group="g", region=Region("kv", 0, 1 << 62))


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_strides_of_torch_count_elements(dtype: str) -> None:
    """A tensor with ``data_ptr`` and ``stride`` is read as PyTorch's: strides in elements, dtype with its prefix."""
    item = ITEMSIZE[dtype]
    tensor = StandIn((10, 4, 8), (64, 16, 2), f"torch.{dtype}", address=4096 + 6)
    view = view_of(tensor, "block token dim", name="v", group="g", region=Region("kv", 4096, 1 << 20))
    assert (view.dtype, view.offset_bytes, view.block_stride_bytes) == (dtype, 6, 64 * item)
    assert [axis.stride_bytes for axis in view.axes] == [16 * item, 2 * item]


def test_strides_that_are_numpy_integers_do_not_wrap() -> None:
    """A stride of 2**61 elements is 2**62 bytes, exactly; of eight bytes each it is too long, and refused."""
    region = Region("kv", 4096, (1 << 63) - 1)
    tensor = StandIn((2, 4, 8), (np.int64(1 << 61), 8, 1))  # type: ignore[arg-type]
    view = view_of(tensor, "block token dim", name="v", group="g", region=region)
    assert (view.block_stride_bytes, type(view.block_stride_bytes)) == (1 << 62, int)
    with pytest.raises(KVPlanError, match=r"^RANGE: .*block_stride_bytes .* got 18446744073709551616"):
        view_of(attrs.evolve(tensor, dtype="torch.int64"), "block token dim", name="v", group="g", region=region)


def test_nothing_is_copied_or_kept() -> None:
    """The view has numbers and names alone; the tensor is neither read nor held."""
    tensor = StandIn((10, 4, 8), address=1 << 50)
    view = view_of(tensor, "block token dim", name="v", group="g", region=Region("kv", 1 << 50, 1 << 20))
    assert not any(value is tensor for value in attrs.astuple(view))


def test_a_real_tensor_of_torch() -> None:
    """A slice of a transposed bfloat16 tensor, and its stand-in, are the same view; bytes are where torch has them."""
    torch = pytest.importorskip("torch")
    memory = torch.zeros(3, 2, 6, 4, 5, dtype=torch.bfloat16)
    tensor = memory.permute(0, 1, 3, 2, 4)[:, :, :, 2:5]
    region = Region("kv", memory.data_ptr(), memory.numel() * 2)
    pattern = "block kv token head dim"
    view = view_of(tensor, pattern, name="v", group="g", region=region, shards={"head": (2, 5, 6)})
    twin = StandIn(tuple(tensor.shape), tensor.stride(), "torch.bfloat16", tensor.data_ptr())
    assert view == view_of(twin, pattern, name="v", group="g", region=region, shards={"head": (2, 5, 6)})
    raw = memory.view(torch.uint8).reshape(-1)
    for index, address in zip(elements(view, pattern), np.array(element_bytes(view)).reshape(-1, 2), strict=True):
        raw[torch.from_numpy(address)] = torch.tensor([0x80, 0x3F], dtype=torch.uint8)
        assert tensor[index] == 1.0
    assert int(memory.sum()) == tensor.numel()


def test_the_region_of_an_array() -> None:
    """A dense array's region is its bytes, named as asked."""
    array = np.zeros((3, 4, 5), np.float16)
    assert region_of(array) == whole(array)
    assert region_of(array, "layers.7").name == "layers.7"


@pytest.mark.parametrize(
    "part",
    [
        (slice(1, 3), slice(None), slice(2, 4)),
        (slice(None, None, 2), slice(1, 2), slice(None)),
        (slice(None, None, -1), slice(None), slice(None, None, -2)),
    ],
)
def test_the_region_of_a_slice_is_what_it_spans(part: tuple[slice, ...]) -> None:
    """From the lowest byte that indexing reaches to the end of the highest, also where strides are negative."""
    memory = np.zeros((5, 4, 6), np.float32)
    array = memory[part]
    region = region_of(array)
    elements = [array[tuple(slice(i, i + 1) for i in index)] for index in np.ndindex(array.shape)]
    reached = [element.__array_interface__["data"][0] for element in elements]
    assert (region.address, region.address + region.size_bytes) == (min(reached), max(reached) + 4)


def test_a_worker_of_regions_and_views_of_its_tensors() -> None:
    """A region of a tensor holds the view of it, so that the two make a worker."""
    array = np.zeros((6, 4, 5), np.float16)[1::2]
    region = region_of(array)
    view = view_of(array, "block token dim", name="layers.0", group="attn", region=region)
    assert Worker("e", 0, [region], [Group("attn", 4)], [view]).views[0].offset_bytes == 0
    assert view.end_bytes == region.size_bytes


@pytest.mark.parametrize(
    "device, expected", [("cpu", ("DRAM", 0)), ("cuda:3", ("VRAM", 3)), ("cuda", ("VRAM", 0)), ("xpu:1", ("VRAM", 1))]
)
def test_the_device_of_a_region_is_its_tensor_s(device: str, expected: tuple[str, int]) -> None:
    """A tensor on a device is in that device's memory, and what it spans is read as ever."""
    region = region_of(StandIn((10, 4, 8), address=1 << 40, device=device))
    assert (region.memory, region.device_id) == expected
    assert (region.address, region.size_bytes) == (1 << 40, 10 * 4 * 8 * 2)


@pytest.mark.parametrize(
    "device, memory, number, got",
    [
        ("cuda:1", "DRAM", 0, "expected a tensor in DRAM 0, as region 'kv', got one in VRAM 1"),
        ("cuda:1", "VRAM", 0, "expected a tensor in VRAM 0, as region 'kv', got one in VRAM 1"),
        ("cpu", "VRAM", 1, "expected a tensor in VRAM 1, as region 'kv', got one in DRAM 0"),
        ("cpu", "FILE", 0, "expected a tensor in FILE 0, as region 'kv', got one in DRAM 0"),
    ],
)
def test_a_region_in_other_memory_is_refused(device: str, memory: str, number: int, got: str) -> None:
    """A view is not made in a region that would be registered as other memory than its tensor is in."""
    tensor, region = StandIn((10, 4, 8), device=device), Region("kv", 4096, 1 << 20, memory, number)
    with pytest.raises(KVPlanError) as refused:
        view_of(tensor, "block token dim", name="v", group="g", region=region)
    assert refused.value.code == "BOUNDS"
    assert got in str(refused.value)


def test_any_host_memory_will_do_for_a_tensor_in_host_memory() -> None:
    """A tensor does not tell which node its memory is on, so a region may."""
    tensor, region = StandIn((10, 4, 8)), Region("kv", 4096, 1 << 20, "DRAM", 1)
    assert view_of(tensor, "block token dim", name="v", group="g", region=region).offset_bytes == 0


@attrs.frozen
class InStorage(StandIn):
    """A stand-in that tells its storage, as PyTorch does: two dense tensors, of which it is the second."""

    def untyped_storage(self) -> Any:
        """The storage, with the two attributes that are read."""
        half = math.prod(self.shape) * 2
        return SimpleNamespace(data_ptr=lambda: self.address - half, nbytes=lambda: 2 * half)


def test_a_storage_that_is_told_is_the_region() -> None:
    """Where a tensor tells its storage, the region is all of it, on the tensor's device."""
    tensor = InStorage((10, 4, 8), address=4096 + 640, device="cuda:2")
    assert region_of(tensor, "pool") == Region("pool", 4096, 1280, "VRAM", 2)


def test_the_region_of_a_real_tensor_is_its_storage() -> None:
    """Tensors that PyTorch keeps in one storage have one region, all of it; a tensor on the CPU is in DRAM."""
    torch = pytest.importorskip("torch")
    storage = torch.zeros(2, 10, 4, 8, dtype=torch.bfloat16)
    region = region_of(storage)
    assert region == Region("kv", storage.data_ptr(), 2 * 10 * 4 * 8 * 2, "DRAM", 0)
    assert [region_of(half) for half in storage] == [region, region]
    view = view_of(storage[1].transpose(1, 2), "block dim token", name="v", group="g", region=region)
    assert (view.offset_bytes, view.end_bytes) == (10 * 4 * 8 * 2, region.size_bytes)


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_tensors_without_memory_of_their_own_are_refused(kind: str) -> None:
    """A meta tensor has no address, and a sparse one no strides: neither is a region at address 0."""
    torch = pytest.importorskip("torch")
    tensor = torch.empty((4, 2), device="meta") if kind == "meta" else torch.ones((4, 2)).to_sparse()
    with pytest.raises(KVPlanError, match="TYPE: cannot read a tensor: expected a dense tensor with memory"):
        region_of(tensor)


def test_a_region_keeps_the_memory_of_its_tensor() -> None:
    """A worker is of memory that lives, whatever becomes of the array that it was described by."""
    array = np.zeros((6, 4, 5), np.float16)
    is_alive = weakref.ref(array)
    worker = Worker("e", 0, [region_of(array[2:])], [], [])
    del array
    assert is_alive() is not None
    del worker
    assert is_alive() is None


def test_a_region_keeps_the_storage_of_a_real_tensor() -> None:
    """Its storage stays where it is when the tensor takes another one, and when the tensor is gone."""
    torch = pytest.importorskip("torch")
    tensor = torch.full((4, 8), 7, dtype=torch.uint8)
    region = region_of(tensor)
    tensor.data = torch.zeros(4, 8, dtype=torch.uint8)
    assert region.owners[0].is_in_place
    assert (ctypes.c_uint8 * 32).from_address(region.address)[31] == 7


def test_memory_that_its_owner_gives_up_is_found() -> None:
    """Resizing an array or a storage in place is all that ends memory under a region."""
    torch = pytest.importorskip("torch")
    array, tensor = np.zeros(64, np.uint8), torch.zeros(64, dtype=torch.uint8)
    for memory, resize in (
        (array, lambda size: array.resize(size, refcheck=False)),
        (tensor, lambda size: tensor.untyped_storage().resize_(size)),
    ):
        for size in (32, 0):
            regions = [region_of(memory, "cache")]
            check_memory(regions, "register the memory of d/0")
            resize(size)
            with pytest.raises(KVPlanError, match=r"MEMORY: cannot register the memory of d/0: .* 'cache' .* resized"):
                check_memory(regions, "register the memory of d/0")


def test_owners_are_no_part_of_a_region() -> None:
    """They count for no comparison, are not pickled with all that they own, and a copy in this process keeps them."""
    array = np.zeros(1 << 20, np.uint8)
    region = region_of(array)
    plain = Region(region.name, region.address, region.size_bytes)
    assert (region == plain, hash(region) == hash(plain), repr(region) == repr(plain)) == (True, True, True)
    assert len(pickle.dumps(region)) < 1 << 10
    assert pickle.loads(pickle.dumps(region)) == region
    renamed = attrs.evolve(region, name="other")
    for other in (copy.copy(region), copy.deepcopy(region), renamed, copy.deepcopy(Worker("d", 0, [region], [], []))):
        kept = other.regions[0] if isinstance(other, Worker) else other
        assert kept.owners == region.owners
    assert Region("kv", 4096, 64, owners=[array]).owners == (array,)
