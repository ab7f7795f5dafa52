"""Layouts: the orders in which engines keep a pool of blocks in memory, as strides.

An order names the dimensions of a pool from the slowest to the fastest: ``L`` layer, ``B`` block, ``H`` head,
``N`` token slot, ``C`` content. A tensor without one of them (a latent has no head) leaves the letter out.
Where ``L`` stands first each layer has a region of its own; otherwise one region holds all layers of the pool.

The kv form says where the ``kv`` axis, K before V, goes::

    content   inside C: K and V of a slot side by side             LBHNC  [block, head, token, 2 * dim]
    axis      right inside the later of L and B                    LBHNC  [block, 2, head, token, dim]
    split     K and V in separate regions, one view for each       LBHNC  2 x [block, head, token, dim]

``kernel_tokens`` makes the pool one of kernel blocks: each block is several of them, one after the other, and
the order holds for the kernel blocks. ``pad_bytes`` follow each block, so a block is never contiguous with the
next. All of it is one list of dimensions, with strides counted from the fastest; no order is a special case.

The six orders are those of vLLM's ``KVCacheLayout`` (vllm/v1/kv_cache_layout.py, 0.33).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from kvplan.axes import Axis, integer
from kvplan.errors import KVPlanError
from kvplan.views import ITEMSIZE, TOKEN, View

ORDERS: Final = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The known orders, each from the slowest dimension to the fastest."""

KV_FORMS: Final = ("content", "axis", "split")
"""Where K and V stand in relation to each other."""

LAYER: Final = "layer"
BLOCK: Final = "block"
HEAD: Final = "head"
KV: Final = "kv"

MAX_PAD_BYTES: Final = 1 << 40

Dims = list[tuple[str, Axis]]
"""Dimensions from the slowest to the fastest: the letter each belongs to, and what is held of it."""


def _one_of(known: tuple[str, ...], value: Any, what: str) -> str:
    if not isinstance(value, str) or value not in known:
        expected = f"one of {', '.join(known)}"
        raise KVPlanError("LAYOUT", f"read {what}", expected=expected, got=repr(value), value=value)
    return value


def _order(value: Any) -> str:
    return _one_of(ORDERS, value, "layout")


def _form(value: Any) -> str:
    return _one_of(KV_FORMS, value, "kv")


def _pad(value: Any) -> int:
    return integer(value, "pad", high=MAX_PAD_BYTES)


def _kernel(value: Any) -> int | None:
    return None if value is None else integer(value, "kernel_tokens", low=1, high=1 << 31)


@attrs.frozen
class Layout:
    """How a pool of blocks lies in memory: one of :data:`ORDERS` and of :data:`KV_FORMS`, padding, kernel blocks.

    ``pad_bytes`` is the gap after each block; ``kernel_tokens``, where given, how many slots a kernel block has.
    Raises ``LAYOUT`` for an unknown word, ``TYPE`` or ``RANGE`` for a bad number.

    >>> Layout("LBHNC", kv="interleaved")
    Traceback (most recent call last):
    ...
    kvplan.errors.KVPlanError: LAYOUT: cannot read kv: expected one of content, axis, split, got 'interleaved'
    """

    order: str = attrs.field(default="LBHNC", converter=_order)
    kv: str = attrs.field(default="content", converter=_form)
    pad_bytes: int = attrs.field(default=0, converter=_pad)
    kernel_tokens: int | None = attrs.field(default=None, converter=_kernel)


@attrs.frozen
class Held:
    """What one worker holds of the logical tensor ``name``, before a layout gives it strides.

    ``axes`` say which part of each global size is held; their strides mean nothing. Content axes (any but
    ``kv``, ``head`` and ``token``) stand from the slowest to the fastest.
    """

    name: str
    group: str
    dtype: str
    axes: tuple[Axis, ...]

    def __attrs_post_init__(self) -> None:
        what = f"place tensor {self.name!r}"
        for axis in self.axes:
            if axis.name in (LAYER, BLOCK):
                expected = f"axes other than {LAYER!r} and {BLOCK!r}, which its pool has"
                raise KVPlanError("AXES", what, expected=expected, got=repr(axis.name), axis=axis.name)
        if self.dtype not in ITEMSIZE:
            expected = f"a dtype of {', '.join(ITEMSIZE)}"
            raise KVPlanError("DTYPE", what, expected=expected, got=repr(self.dtype), dtype=self.dtype)


def place(
    layout: Layout, pool: str, tensors: Sequence[Held], num_blocks: int
) -> tuple[tuple[View, ...], dict[str, int]]:
    """Views of the tensors of one pool, all of equal shape, and the size in bytes of each region they lie in.

    Each tensor is one layer of the pool. A region is named after its tensor where ``L`` is the slowest, after
    the ``pool`` otherwise; ``split`` appends ``.k`` and ``.v``. Raises ``LAYOUT`` where tensors differ in shape,
    or where blocks do not divide into kernel blocks.

    >>> axes = (Axis("kv", 0, 2, 2, 0), Axis("head", 4, 8, 8, 0),
    ...         Axis("token", 0, 16, 16, 0), Axis("dim", 0, 128, 128, 0))
    >>> layers = [Held(f"layers.{i}.attn", "attn", "bfloat16", axes) for i in range(2)]
    >>> views, sizes = place(Layout("BLNHC"), "pool", layers, num_blocks=100)
    >>> print(*views[1].axes, sep="; ")
    token [0, 16) of 16 step 2048; head [4, 8) of 8 step 512; kv [0, 2) of 2 step 256; dim [0, 128) of 128 step 2
    >>> views[1].offset_bytes, views[1].block_stride_bytes, sizes
    (32768, 65536, {'pool': 6553600})
    """
    num_blocks = integer(num_blocks, "num_blocks of a pool", low=1, high=1 << 40)
    alone = layout.order.startswith("L")
    members = {tensor.name: [tensor] for tensor in tensors} if alone else {pool: list(tensors)}
    views: list[View] = []
    sizes: dict[str, int] = {}
    for region, layers in members.items():
        _check_equal(region, layers)
        for suffix, parts in _halves(layout, layers[0].axes):
            name = region + suffix
            dims = _dimensions(layout, region, parts, len(layers), num_blocks)
            strides, sizes[name] = _strides(dims, ITEMSIZE[layers[0].dtype], layout.pad_bytes)
            views.extend(_views(name, layers, dims, strides))
    return tuple(views), sizes


def _check_equal(region: str, layers: Sequence[Held]) -> None:
    for layer in layers:
        if (layer.group, layer.dtype, layer.axes) != (layers[0].group, layers[0].dtype, layers[0].axes):
            raise KVPlanError(
                "LAYOUT",
                f"place tensor {layer.name!r} in region {region!r}",
                expected=f"the group, dtype and axes of {layers[0].name!r}",
                got=f"{layer.group!r}, {layer.dtype}, {'; '.join(map(str, layer.axes))}",
                first=layers[0].name,
                second=layer.name,
            )


def _halves(layout: Layout, axes: tuple[Axis, ...]) -> list[tuple[str, tuple[Axis, ...]]]:
    """The axes of each view that a tensor is kept in, with what its region's name ends in."""
    if layout.kv != "split" or all(axis.name != KV for axis in axes):
        return [("", axes)]
    return [
        (suffix, tuple(attrs.evolve(a, start=half, stop=half + 1) if a.name == KV else a for a in axes))
        for half, suffix in enumerate((".k", ".v"))
    ]


def _dimensions(layout: Layout, region: str, axes: Iterable[Axis], num_layers: int, num_blocks: int) -> Dims:
    """Every dimension of a region, from the slowest to the fastest."""
    by_letter: dict[str, list[Axis]] = {
        "L": [Axis(LAYER, 0, num_layers, num_layers, 0)],
        "B": [Axis(BLOCK, 0, num_blocks, num_blocks, 0)],
        "H": [],
        "N": [],
        "C": [],
    }
    inner = max("LB", key=layout.order.index) if layout.kv == "axis" else "C"
    kernel: list[Axis] = []
    for axis in axes:
        if axis.name == TOKEN:
            kernel, by_letter["N"] = _token_digits(layout, region, axis)
        elif axis.name == HEAD:
            by_letter["H"].append(axis)
        elif axis.name != KV:
            by_letter["C"].append(axis)
    # Kernel blocks continue the count of blocks, and K and V are told apart within one of them.
    by_letter["B"] += kernel
    kv = [axis for axis in axes if axis.name == KV]
    by_letter[inner] = kv + by_letter[inner] if inner == "C" else by_letter[inner] + kv
    return [(letter, axis) for letter in layout.order for axis in by_letter[letter]]


def _token_digits(layout: Layout, region: str, token: Axis) -> tuple[list[Axis], list[Axis]]:
    """The token axis as kernel blocks, where there is more than one, and slots."""
    slots = layout.kernel_tokens or token.size
    if token.size % slots:
        raise KVPlanError(
            "LAYOUT",
            f"divide the blocks of region {region!r} into kernel blocks",
            expected=f"kernel_tokens that divides tokens_per_block {token.size}",
            got=f"{slots}",
            tokens_per_block=token.size,
            kernel_tokens=slots,
        )
    count = token.size // slots
    return [Axis(TOKEN, 0, count, count, 0)] if count > 1 else [], [Axis(TOKEN, 0, slots, slots, 0)]


def _strides(dims: Dims, itemsize: int, pad_bytes: int) -> tuple[list[int], int]:
    """The stride of each dimension in bytes, and the bytes that all of them span."""
    strides: list[int] = []
    span = itemsize
    for _, axis in reversed(dims):
        span += pad_bytes if axis.name == BLOCK else 0
        strides.insert(0, span)
        span *= axis.extent
    return strides, span


def _views(region: str, layers: Sequence[Held], dims: Dims, strides: Sequence[int]) -> Iterable[View]:
    step = {axis.name: stride for (_, axis), stride in zip(dims, strides, strict=True)}
    blocks = next(axis.extent for _, axis in dims if axis.name == BLOCK)
    axes = tuple(
        attrs.evolve(axis, stride_bytes=stride)
        for (_, axis), stride in zip(dims, strides, strict=True)
        if axis.name not in (LAYER, BLOCK)
    )
    for index, layer in enumerate(layers):
        yield View(layer.name, layer.group, region, layer.dtype, axes, blocks, step[BLOCK], index * step[LAYER])
