"""region_of and view_of: regions and views from the tensors of any framework.

A tensor is any object with ``data_ptr()``, ``stride()``, ``shape`` and ``dtype`` (PyTorch) or with
``__array_interface__`` (numpy). This module reads these attributes and imports no framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from kvplan._checks import integer, members, wrong_type
from kvplan._text import shown
from kvplan.describe.axes import Axis
from kvplan.describe.views import ITEMSIZE, Group, Region, View, dtype_name
from kvplan.errors import KVPlanError

BLOCK_NAME: Final = "block"
"""The name that a pattern gives to the dimension of blocks."""

Device = tuple[str, int]
"""Memory kind and device id."""


@attrs.frozen
class _TensorMemory:
    """The elements of a tensor: their type, the address of the first one, and their strides."""

    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    address: int


def device_of(tensor: Any) -> Device:
    """Return the memory kind and device of a tensor.

    They are DRAM for ``cpu`` or no device at all, else VRAM of its device.

    >>> import numpy as np
    >>> device_of(np.zeros(4))
    ('DRAM', 0)
    """
    kind, _, number = str(getattr(tensor, "device", "cpu")).partition(":")
    return ("DRAM", 0) if kind == "cpu" else ("VRAM", int(number or 0))


def region_of(tensor: Any, name: str = "kv") -> Region:
    """Return the memory region of ``tensor``: its address, size in bytes, memory kind and device.

    For PyTorch the region is the tensor's whole storage, so tensors that share a storage share a
    region. For other frameworks it is the range that the tensor's elements span. The region keeps
    the memory allocated, also where the tensor itself is gone.

    Raises ``TYPE`` for a value that is not a tensor, ``DTYPE`` for an element type that no engine
    exchanges, and ``SIZE`` for an empty tensor.

    >>> import numpy as np
    >>> from kvplan import region_of
    >>> cache = np.zeros((100, 2, 4, 16, 128), np.float16)
    >>> region = region_of(cache, "layers.0")
    >>> region.address == cache.ctypes.data, region.size_bytes == cache.nbytes
    (True, True)
    >>> region.memory, region.device_id
    ('DRAM', 0)
    """
    owner = MemoryOwner.of(tensor)
    memory, device_id = device_of(tensor)
    return Region(name, owner.address, owner.size_bytes, memory, device_id, owners=(owner,))


@attrs.frozen(eq=False, repr=False)
class MemoryOwner:
    """A storage of PyTorch, or another tensor, with the memory that it had when it was described.

    The object is kept, so its memory stays allocated. It may still give the memory up itself, as
    ``resize_`` of a storage and ``resize`` of an array do.
    """

    memory: Any
    address: int
    size_bytes: int

    @classmethod
    def of(cls, tensor: Any) -> MemoryOwner:
        """Return the owner of a tensor's memory. Raises as :func:`region_of` does."""
        elements = _read_tensor(tensor)
        # a torch tensor may be a view of an allocation, of which all views share one region
        if hasattr(tensor, "untyped_storage"):
            storage = tensor.untyped_storage()
            return cls(storage, *_storage_range(storage))
        return cls(tensor, *_spanned_range(elements))

    @property
    def is_in_place(self) -> bool:
        """Whether the memory is where it was, with as many bytes."""
        # storages count their bytes by a function, tensors and arrays do not
        if hasattr(self.memory, "nbytes") and callable(self.memory.nbytes):
            present = _storage_range(self.memory)
        else:
            try:
                present = _spanned_range(_read_tensor(self.memory))
            except KVPlanError:  # it has no elements any more
                return False
        return present == (self.address, self.size_bytes)


def _storage_range(storage: Any) -> tuple[int, int]:
    """Return the address of a storage, and how many bytes it has."""
    return int(storage.data_ptr()), int(storage.nbytes())


def _spanned_range(elements: _TensorMemory) -> tuple[int, int]:
    """Return the lowest address of a tensor's elements, and how many bytes they span."""
    # one number for each dimension: the bytes from its first element to its last one, which lies
    # before the first one where the stride is negative
    dimensions = zip(elements.shape, elements.strides_bytes, strict=True)
    reaches = [(length - 1) * stride for length, stride in dimensions]
    bytes_before = sum(reach for reach in reaches if reach < 0)
    size_bytes = sum(map(abs, reaches)) + ITEMSIZE[elements.dtype]
    return elements.address + bytes_before, size_bytes


def check_memory(regions: Iterable[Region], action: str) -> None:
    """Refuse regions whose owners have given their memory up, or moved it. Raises ``MEMORY``."""
    for region in members(Region, regions, "regions"):
        # a caller may give any object as an owner, of which nothing can be checked
        for owner in region.owners:
            if isinstance(owner, MemoryOwner) and not owner.is_in_place:
                raise KVPlanError(
                    "MEMORY",
                    action,
                    expected=f"region {region.name!r} in memory that does not move",
                    got="a tensor that was resized since it was described",
                    region=region.name,
                )


def view_of(
    tensor: Any,
    pattern: str,
    *,
    name: str,
    group: Group | str,
    region: Region,
    shards: Mapping[str, tuple[int, int, int]] | None = None,
) -> View:
    """Return the view that describes ``tensor``: its shape, strides, dtype and address.

    Nothing is copied. ``pattern`` names the dimensions in order. One of them is ``block``; a name
    may appear twice, outer digit first. ``shards`` gives ``(start, stop, size)`` for each axis
    of which the tensor holds only a shard. ``region`` is the memory that holds the tensor, as
    returned by :func:`region_of`.

    Raises ``AXES`` where pattern and shape disagree, ``SIZE`` where a shard and its dimension
    differ in length, ``STRIDE`` for a negative stride, and ``BOUNDS`` where the tensor starts
    before its region or lies in memory of another kind or device.

    >>> import numpy as np
    >>> from kvplan import region_of, view_of
    >>> cache = np.zeros((100, 2, 4, 16, 128), np.float16)  # block, K and V, heads 4-7, slot, dim
    >>> view = view_of(cache, "block kv head token dim", name="layers.0.attn", group="attn",
    ...                region=region_of(cache), shards={"head": (4, 8, 8)})
    >>> print(*view.axes, sep="; ")
    kv [0, 2) of 2 stride 16384; head [4, 8) of 8 stride 4096; token [0, 16) of 16 stride 256;
    dim [0, 128) of 128 stride 2
    """
    arguments = (("name", name, str), ("region", region, Region), ("pattern", pattern, str))
    for parameter, value, kind in arguments:
        if not isinstance(value, kind):
            subject = f"the {parameter} of a tensor's view"
            raise wrong_type(subject, f"a value of type {kind.__name__}", value)
    elements = _read_tensor(tensor)
    axis_names = pattern.split()
    _check_dimensions(name, axis_names, elements, shown(pattern))
    _check_memory(name, device_of(tensor), region)
    if elements.address < region.address:
        raise _mismatch(
            "BOUNDS",
            name,
            f"an address in region {region.name!r} from {region.address:#x} on",
            f"{elements.address:#x}",
            address=elements.address,
        )
    lengths = dict(zip(axis_names, elements.shape, strict=True))
    held_shards = _held_shards(name, lengths, axis_names, {} if shards is None else shards)
    block_stride_bytes = 0
    axes = list[Axis]()
    for axis_name, length, stride_bytes in zip(
        axis_names, elements.shape, elements.strides_bytes, strict=True
    ):
        # a negative stride is left only on a dimension of length 1, where it says nothing
        stride_bytes = max(stride_bytes, 0)
        if axis_name == BLOCK_NAME:
            block_stride_bytes = stride_bytes
        else:
            shard = held_shards.get(axis_name, (0, length, length))
            axes.append(Axis(axis_name, *shard, stride_bytes))
    # the tensor's first element, from the start of its region
    offset_bytes = elements.address - region.address
    num_blocks = lengths[BLOCK_NAME]
    return View(
        name, group, region, elements.dtype, axes, num_blocks, block_stride_bytes, offset_bytes
    )


def _mismatch(code: str, view: str, expected: str, got: str, **details: Any) -> KVPlanError:
    """Return the error for a tensor that is not as its view has to be."""
    action = f"read a tensor as view {view!r}"
    return KVPlanError(code, action, expected=expected, got=got, **details)


def _check_dimensions(
    view: str, axis_names: Sequence[str], elements: _TensorMemory, pattern: str
) -> None:
    """Check that a pattern names each dimension of a tensor, and that none has negative strides."""
    shape = elements.shape
    if len(axis_names) != len(shape) or axis_names.count(BLOCK_NAME) != 1:
        expected = f"one name for each of its {len(shape)} dimensions, {BLOCK_NAME!r} once"
        details: dict[str, Any] = {"shape": shape, "pattern": " ".join(axis_names)}
        raise _mismatch("AXES", view, expected, pattern, **details)
    for axis_name, length, stride in zip(axis_names, shape, elements.strides_bytes, strict=True):
        if stride < 0 and length > 1:
            details = {"axis": axis_name, "stride_bytes": stride}
            got = f"{stride} on {axis_name!r}"
            raise _mismatch("STRIDE", view, "strides >= 0", got, **details)


def _check_memory(view: str, device: Device, region: Region) -> None:
    """Refuse a region in other memory than the tensor's.

    DRAM device ids are not compared: no tensor knows its own.
    """
    memory, number = device
    if region.memory != memory or (memory == "VRAM" and region.device_id != number):
        raise _mismatch(
            "BOUNDS",
            view,
            f"a tensor in {region.memory} {region.device_id}, as region {region.name!r}",
            f"one in {memory} {number}",
            hint="region_of(tensor) reads its device",
            region=(region.memory, region.device_id),
            tensor=device,
        )


def _held_shards(
    view: str, lengths: Mapping[str, int], axis_names: Sequence[str], shards: Any
) -> dict[str, tuple[int, int, int]]:
    """Return ``shards`` with exact integers.

    Each axis must appear once in the pattern, and its shard match its dimension's length.
    """
    if not isinstance(shards, Mapping):
        raise wrong_type(f"the shards of view {view!r}", "a mapping of axis names", shards)
    held_shards = {}
    for axis_name, shard in shards.items():
        if axis_names.count(axis_name) != 1 or axis_name == BLOCK_NAME:
            raise KVPlanError(
                "AXES",
                f"read the shards of view {view!r}",
                expected=f"axes that appear once in {' '.join(axis_names)!r}",
                got=shown(axis_name),
                axis=shown(axis_name),
            )
        subject = f"the shard of axis {axis_name!r} of view {view!r}"
        if not isinstance(shard, Sequence) or len(shard) != 3:
            raise wrong_type(subject, "(start, stop, size)", shard)
        start, stop, size = (integer(bound, subject) for bound in shard)
        if stop - start != lengths[axis_name]:
            raise KVPlanError(
                "SIZE",
                f"read {subject}",
                expected=f"{lengths[axis_name]} coordinates, as the tensor has",
                got=f"[{start}, {stop}) of {size}",
                axis=axis_name,
                length=lengths[axis_name],
            )
        held_shards[axis_name] = (start, stop, size)
    return held_shards


def _read_tensor(tensor: Any) -> _TensorMemory:
    """Return the elements of a tensor, which must be dense and not empty."""
    is_torch = hasattr(tensor, "data_ptr") and hasattr(tensor, "stride")
    if not (is_torch or hasattr(tensor, "__array_interface__")) or not hasattr(tensor, "dtype"):
        raise wrong_type("a tensor", "data_ptr() and stride(), or __array_interface__", tensor)
    dtype = dtype_name(tensor.dtype)
    if dtype not in ITEMSIZE:
        expected = f"a dtype of {', '.join(ITEMSIZE)}"
        raise KVPlanError(
            "DTYPE", "read a tensor", expected=expected, got=shown(dtype), dtype=dtype
        )
    shape = tuple(integer(length, "a dimension of a tensor") for length in tensor.shape)
    if not math.prod(shape):
        raise KVPlanError(
            "SIZE",
            "read a tensor",
            expected="at least one element",
            got=f"shape {shape}",
            shape=shape,
        )
    try:
        if not is_torch:
            address = int(tensor.__array_interface__["data"][0])
            return _TensorMemory(shape, tuple(tensor.strides), dtype, address)
        strides_bytes = tuple(int(stride) * ITEMSIZE[dtype] for stride in tensor.stride())
        address = int(tensor.data_ptr())
    except RuntimeError:  # of a sparse tensor, in the framework's words
        address = 0
    if not address:
        raise wrong_type("a tensor", "a dense tensor with memory", tensor)
    return _TensorMemory(shape, strides_bytes, dtype, address)
