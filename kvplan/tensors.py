"""view_of: a view from a real tensor, whatever framework made it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvplan.axes import Axis, integer
from kvplan.errors import KVPlanError
from kvplan.views import ITEMSIZE, Group, Region, View

BLOCK = "block"


def view_of(
    tensor: Any,
    pattern: str,
    *,
    name: str,
    group: Group | str,
    region: Region,
    parts: Mapping[str, tuple[int, int, int]] | None = None,
) -> View:
    """The view that ``tensor`` is: shape, strides, dtype and address read from it, nothing copied.

    ``tensor`` is anything with ``data_ptr()``, ``stride()``, ``shape`` and ``dtype`` (PyTorch) or with
    ``__array_interface__`` (numpy). ``pattern`` names its dimensions in order; one of them is ``block``, and
    a name may stand twice, outer digit first. ``parts`` gives ``(start, stop, size)`` for an axis of which
    the tensor holds a part; every other axis is whole.

    Raises ``AXES`` where pattern and shape disagree, ``SIZE`` where a part is not as long as its dimension,
    ``STRIDE`` for a stride that is negative, ``BOUNDS`` where the tensor starts before its region.

    >>> import numpy as np
    >>> from kvplan import Region, view_of
    >>> cache = np.zeros((100, 2, 4, 16, 128), np.float16)          # block, K and V, heads 4-7 of 8, slot, dim
    >>> region = Region("kv", cache.__array_interface__["data"][0], cache.nbytes)
    >>> view = view_of(cache, "block kv head token dim", name="layers.0.attn", group="attn", region=region,
    ...                parts={"head": (4, 8, 8)})
    >>> print(*view.axes, sep="; ")
    kv [0, 2) of 2 step 16384; head [4, 8) of 8 step 4096; token [0, 16) of 16 step 256; dim [0, 128) of 128 step 2
    """
    shape, strides, dtype, address = _read(tensor)
    names = pattern.split()
    if len(names) != len(shape) or names.count(BLOCK) != 1:
        raise KVPlanError(
            "AXES",
            f"read a tensor as view {name!r}",
            expected=f"one name for each of its {len(shape)} dimensions, 'block' once",
            got=f"{pattern!r}",
            shape=shape,
            pattern=pattern,
        )
    parts = dict(parts or {})
    for key in parts:
        if names.count(key) != 1 or key == BLOCK:
            raise KVPlanError(
                "AXES",
                f"read a tensor as view {name!r}",
                expected=f"parts of axes that stand once in {pattern!r}",
                got=f"{key!r}",
                axis=key,
            )
    axes = []
    for key, length, stride in zip(names, shape, strides, strict=True):
        if stride < 0:
            raise KVPlanError(
                "STRIDE", f"read a tensor as view {name!r}", expected="strides >= 0", got=f"{stride} on {key!r}", axis=key
            )
        if key == BLOCK:
            num_blocks, block_stride_bytes = length, stride
            continue
        start, stop, size = parts.get(key, (0, length, length))
        if stop - start != length:
            raise KVPlanError(
                "SIZE",
                f"read a tensor as view {name!r}",
                expected=f"a part of {length} coordinates on axis {key!r}",
                got=f"[{start}, {stop}) of {size}",
                axis=key,
                length=length,
            )
        axes.append(Axis(key, start, stop, size, stride))
    if address < region.address:
        raise KVPlanError(
            "BOUNDS",
            f"read a tensor as view {name!r}",
            expected=f"an address in region {region.name!r} from {region.address:#x} on",
            got=f"{address:#x}",
            address=address,
        )
    return View(name, group, region, dtype, axes, num_blocks, block_stride_bytes, address - region.address)


def _read(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    """Shape, strides in bytes, dtype name and address."""
    dtype = str(getattr(tensor, "dtype", None)).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise KVPlanError("DTYPE", "read a tensor", expected=f"a dtype of {', '.join(ITEMSIZE)}", got=dtype, dtype=dtype)
    shape = tuple(integer(n, "a dimension of a tensor") for n in tensor.shape)
    if not math.prod(shape):
        raise KVPlanError("SIZE", "read a tensor", expected="at least one element", got=f"shape {shape}", shape=shape)
    if hasattr(tensor, "data_ptr"):
        return shape, tuple(s * ITEMSIZE[dtype] for s in tensor.stride()), dtype, int(tensor.data_ptr())
    if hasattr(tensor, "__array_interface__"):
        return shape, tuple(tensor.strides), dtype, int(tensor.__array_interface__["data"][0])
    raise KVPlanError(
        "TYPE", "read a tensor", expected="data_ptr() and stride(), or __array_interface__", got=type(tensor).__name__
    )
