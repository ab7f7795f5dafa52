"""view_of: a view from a real tensor, whatever framework made it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvplan.axes import Axis
from kvplan.errors import KVPlanError
from kvplan.reading import integer, shown, wrong_type
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
    for what, value, kind in (("name", name, str), ("region", region, Region), ("pattern", pattern, str)):
        if not isinstance(value, kind):
            raise wrong_type(f"the {what} of a tensor's view", f"a value of type {kind.__name__}", value)
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
    if address < region.address:
        raise KVPlanError(
            "BOUNDS",
            f"read a tensor as view {name!r}",
            expected=f"an address in region {region.name!r} from {region.address:#x} on",
            got=f"{address:#x}",
            address=address,
        )
    steps = [max(stride, 0) for stride in strides]  # below 0 only where a dimension has one coordinate
    held = _parts(name, dict(zip(names, shape, strict=True)), names, {} if parts is None else parts)
    block = names.index(BLOCK)
    axes = [
        Axis(key, *held.get(key, (0, length, length)), step)
        for key, length, step in zip(names, shape, steps, strict=True)
        if key != BLOCK
    ]
    return View(name, group, region, dtype, axes, shape[block], steps[block], address - region.address)


def _parts(view: str, lengths: Mapping[str, int], names: Sequence[str], parts: Any) -> dict[str, tuple[int, int, int]]:
    """``parts`` as exact ints, each of an axis that stands once and as long as its dimension."""
    if not isinstance(parts, Mapping):
        raise wrong_type(f"the parts of view {view!r}", "a mapping of axis names", parts)
    held = {}
    for key, part in parts.items():
        if names.count(key) != 1 or key == BLOCK:
            raise KVPlanError(
                "AXES",
                f"read the parts of view {view!r}",
                expected=f"axes that stand once in {' '.join(names)!r}",
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
            "DTYPE", "read a tensor", expected=f"a dtype of {', '.join(ITEMSIZE)}", got=shown(dtype), dtype=dtype
        )
    shape = tuple(integer(n, "a dimension of a tensor") for n in tensor.shape)
    if not math.prod(shape):
        raise KVPlanError("SIZE", "read a tensor", expected="at least one element", got=f"shape {shape}", shape=shape)
    if is_torch:
        return shape, tuple(int(s) * ITEMSIZE[dtype] for s in tensor.stride()), dtype, int(tensor.data_ptr())
    return shape, tuple(tensor.strides), dtype, int(tensor.__array_interface__["data"][0])
