"""region_of and view_of: regions and views from the tensors of any framework.

A tensor is any object with ``data_ptr()``, ``stride()``, ``shape`` and ``dtype`` (PyTorch) or with
``__array_interface__`` (numpy). This module reads these attributes and imports no framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvplan._checks import integer, wrong_type
from kvplan._text import shown
from kvplan.describe.axes import Axis
from kvplan.describe.views import ITEMSIZE, Group, Region, View
from kvplan.errors import KVPlanError

BLOCK = "block"

Device = tuple[str, int]
"""Memory kind and device id."""


def device_of(tensor: Any) -> Device:
    """The memory kind and device of a tensor: DRAM for ``cpu`` or no device at all, else VRAM of its device.

    >>> import numpy as np
    >>> device_of(np.zeros(4))
    ('DRAM', 0)
    """
    kind, _, number = str(getattr(tensor, "device", "cpu")).partition(":")
    return ("DRAM", 0) if kind == "cpu" else ("VRAM", int(number or 0))


def region_of(tensor: Any, name: str = "kv") -> Region:
    """The memory region of ``tensor``: its address, size in bytes, memory kind and device.

    For PyTorch the region is the tensor's whole storage, so tensors that share a storage share a region. For other
    frameworks it is the range that the tensor's elements span. The caller keeps the memory allocated.

    Raises ``TYPE`` for a value that is not a tensor, ``DTYPE`` for an element type that no engine exchanges, and
    ``SIZE`` for an empty tensor.

    >>> import numpy as np
    >>> from kvplan import region_of
    >>> cache = np.zeros((100, 2, 4, 16, 128), np.float16)
    >>> region = region_of(cache, "layers.0")
    >>> region.address == cache.ctypes.data, region.size_bytes == cache.nbytes, region.memory, region.device_id
    (True, True, 'DRAM', 0)
    """
    shape, strides, dtype, address = _read(tensor)
    if hasattr(tensor, "untyped_storage"):
        storage = tensor.untyped_storage()
        return Region(name, int(storage.data_ptr()), int(storage.nbytes()), *device_of(tensor))
    reaches = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    before = sum(reach for reach in reaches if reach < 0)
    size_bytes = sum(map(abs, reaches)) + ITEMSIZE[dtype]
    return Region(name, address + before, size_bytes, *device_of(tensor))


def view_of(
    tensor: Any,
    pattern: str,
    *,
    name: str,
    group: Group | str,
    region: Region,
    parts: Mapping[str, tuple[int, int, int]] | None = None,
) -> View:
    """The view that describes ``tensor``: its shape, strides, dtype and address. Nothing is copied.

    ``pattern`` names the dimensions in order. One of them is ``block``; a name may appear twice, outer digit first.
    ``parts`` gives ``(start, stop, size)`` for each axis of which the tensor holds only a part. ``region`` is the
    memory that holds the tensor, as returned by :func:`region_of`.

    Raises ``AXES`` where pattern and shape disagree, ``SIZE`` where a part and its dimension differ in length,
    ``STRIDE`` for a negative stride, and ``BOUNDS`` where the tensor starts before its region or lies in memory of
    another kind or device.

    >>> import numpy as np
    >>> from kvplan import region_of, view_of
    >>> cache = np.zeros((100, 2, 4, 16, 128), np.float16)          # block, K and V, heads 4-7 of 8, slot, dim
    >>> view = view_of(cache, "block kv head token dim", name="layers.0.attn", group="attn",
    ...                region=region_of(cache), parts={"head": (4, 8, 8)})
    >>> print(*view.axes, sep="; ")
    kv [0, 2) of 2 stride 16384; head [4, 8) of 8 stride 4096; token [0, 16) of 16 stride 256;
    dim [0, 128) of 128 stride 2
    """
    for what, value, kind in (
        ("name", name, str),
        ("region", region, Region),
        ("pattern", pattern, str),
    ):
        if not isinstance(value, kind):
            raise wrong_type(
                f"the {what} of a tensor's view", f"a value of type {kind.__name__}", value
            )
    shape, strides, dtype, address = _read(tensor)
    names = pattern.split()
    if len(names) != len(shape) or names.count(BLOCK) != 1:
        raise KVPlanError(
            "AXES",
            f"read a tensor as view {name!r}",
            expected=f"one name for each of its {len(shape)} dimensions, 'block' once",
            got=shown(pattern),
            shape=shape,
            pattern=" ".join(names),
        )
    for key, length, stride in zip(names, shape, strides, strict=True):
        if stride < 0 and length > 1:
            raise KVPlanError(
                "STRIDE",
                f"read a tensor as view {name!r}",
                expected="strides >= 0",
                got=f"{stride} on {key!r}",
                axis=key,
                stride_bytes=stride,
            )
    _check_memory(name, device_of(tensor), region)
    if address < region.address:
        raise KVPlanError(
            "BOUNDS",
            f"read a tensor as view {name!r}",
            expected=f"an address in region {region.name!r} from {region.address:#x} on",
            got=f"{address:#x}",
            address=address,
        )
    steps = [
        max(stride, 0) for stride in strides
    ]  # a negative one is left only on a dimension of length 1
    held = _parts(name, dict(zip(names, shape, strict=True)), names, {} if parts is None else parts)
    block = names.index(BLOCK)
    axes = [
        Axis(key, *held.get(key, (0, length, length)), step)
        for key, length, step in zip(names, shape, steps, strict=True)
        if key != BLOCK
    ]
    return View(
        name, group, region, dtype, axes, shape[block], steps[block], address - region.address
    )


def _check_memory(view: str, device: Device, region: Region) -> None:
    """Refuse a region in other memory than the tensor's. DRAM device ids are not compared: no tensor knows its own."""
    memory, number = device
    if region.memory != memory or (memory == "VRAM" and region.device_id != number):
        raise KVPlanError(
            "BOUNDS",
            f"read a tensor as view {view!r}",
            expected=f"a tensor in {region.memory} {region.device_id}, as region {region.name!r}",
            got=f"one in {memory} {number}",
            hint="region_of(tensor) reads its device",
            region=(region.memory, region.device_id),
            tensor=device,
        )


def _parts(
    view: str, lengths: Mapping[str, int], names: Sequence[str], parts: Any
) -> dict[str, tuple[int, int, int]]:
    """``parts`` with exact integers. Each axis must appear once in the pattern and match its dimension's length."""
    if not isinstance(parts, Mapping):
        raise wrong_type(f"the parts of view {view!r}", "a mapping of axis names", parts)
    held = {}
    for key, part in parts.items():
        if names.count(key) != 1 or key == BLOCK:
            raise KVPlanError(
                "AXES",
                f"read the parts of view {view!r}",
                expected=f"axes that appear once in {' '.join(names)!r}",
                got=shown(key),
                axis=shown(key),
            )
        what = f"the part of axis {key!r} of view {view!r}"
        if not isinstance(part, Sequence) or len(part) != 3:
            raise wrong_type(what, "(start, stop, size)", part)
        start, stop, size = (integer(bound, what) for bound in part)
        if stop - start != lengths[key]:
            raise KVPlanError(
                "SIZE",
                f"read {what}",
                expected=f"{lengths[key]} coordinates, as the tensor has",
                got=f"[{start}, {stop}) of {size}",
                axis=key,
                length=lengths[key],
            )
        held[key] = (start, stop, size)
    return held


def _read(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    """Shape, strides in bytes, dtype name and address."""
    is_torch = hasattr(tensor, "data_ptr") and hasattr(tensor, "stride")
    if not (is_torch or hasattr(tensor, "__array_interface__")) or not hasattr(tensor, "dtype"):
        raise wrong_type("a tensor", "data_ptr() and stride(), or __array_interface__", tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise KVPlanError(
            "DTYPE",
            "read a tensor",
            expected=f"a dtype of {', '.join(ITEMSIZE)}",
            got=shown(dtype),
            dtype=dtype,
        )
    shape = tuple(integer(n, "a dimension of a tensor") for n in tensor.shape)
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
            return shape, tuple(tensor.strides), dtype, int(tensor.__array_interface__["data"][0])
        strides, address = (
            tuple(int(s) * ITEMSIZE[dtype] for s in tensor.stride()),
            int(tensor.data_ptr()),
        )
    except RuntimeError:  # of a sparse tensor, in words of the framework's own
        address = 0
    if not address:
        raise wrong_type("a tensor", "a dense tensor with memory", tensor)
    return shape, strides, dtype, address
