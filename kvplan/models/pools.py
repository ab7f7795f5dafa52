"""Pools: pages of tensors in a layout, as views.

A pool is dimensions around pages, and strips of tensors inside them. Strides are counted from the fastest dimension,
first through each strip, then through the page, then through what is around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from kvplan._checks import integer
from kvplan.describe.axes import Axis
from kvplan.describe.views import ITEMSIZE, TOKEN, View
from kvplan.errors import KVPlanError
from kvplan.models.layouts import BLOCK, HEAD, KV, LAYER, STEP, Held, Layout, Page

Dims = list[tuple[str, Axis]]
"""Dimensions from the slowest to the fastest: the letter each belongs to, and what is held of it."""


def place(
    layout: Layout,
    pool: str,
    pages: Sequence[Page],
    num_blocks: int,
    *,
    slot_bytes: int = 0,
    slots: int = 0,
    first: int = 0,
) -> tuple[tuple[View, ...], dict[str, int]]:
    """Views of the tensors of one pool, all pages of equal shape, and the size in bytes of each region they lie in.

    Each page is one layer of the pool. A region is named after its page where ``L`` is the slowest, after the
    ``pool`` otherwise; ``split`` appends ``.k`` and ``.v``. So that pools of unequal pages may lie over each other, a
    page takes at least ``slot_bytes``, and these layers are those from ``first`` on of at least ``slots``. Raises
    ``LAYOUT`` where pages differ in shape, tensors of a strip in heads or slots, or where blocks do not divide into
    kernel blocks.

    >>> axes = (Axis("kv", 0, 2, 2, 0), Axis("head", 4, 8, 8, 0),
    ...         Axis("token", 0, 16, 16, 0), Axis("dim", 0, 128, 128, 0))
    >>> layers = [Page.of(Held(f"layers.{i}.attn", "attn", "bfloat16", axes)) for i in range(2)]
    >>> views, sizes = place(Layout("BLNHC"), "pool", layers, num_blocks=100)
    >>> print(*views[1].axes, sep="; ")
    token [0, 16) of 16 step 2048; head [4, 8) of 8 step 512; kv [0, 2) of 2 step 256; dim [0, 128) of 128 step 2
    >>> views[1].offset_bytes, views[1].block_stride_bytes, sizes
    (32768, 65536, {'pool': 6553600})
    """
    num_blocks = integer(num_blocks, "num_blocks of a pool", low=1, high=1 << 40)
    alone = layout.order.startswith("L")
    members = {page.name: [page] for page in pages} if alone else {pool: list(pages)}
    views: list[View] = []
    sizes: dict[str, int] = {}
    for region, layers in members.items():
        _check_equal(region, layers)
        at, room = (0, 1) if alone else (first, max(slots, first + len(layers)))
        for suffix, part in _halves(layout, layers[0]):
            outer = _outer(layout, region, part, room, num_blocks)
            inner, span = _inner(layout, region, part)
            strides, sizes[region + suffix] = _around(layout, outer, span, slot_bytes)
            views.extend(_views(region + suffix, layers, at, outer, strides, inner))
    return tuple(views), sizes


def page_bytes(layout: Layout, page: Page) -> int:
    """Bytes between neighbouring pages of a pool, the pad of a block not counted; the larger half where split.

    >>> state = Held("layers.0.ssm", "state", "float32", (Axis("head", 0, 4, 8, 0), Axis("state", 0, 128, 128, 0)))
    >>> page_bytes(Layout(), Page.of(state))
    2048
    """
    spans = []
    for _, part in _halves(layout, page):
        _, span = _inner(layout, page.name, part)
        for _, axis in _outer(layout, page.name, part, 1, 1):
            span *= axis.extent
        spans.append(span)
    return max(spans)


def _check_equal(region: str, layers: Sequence[Page]) -> None:
    first = list(layers[0].tensors)
    for layer in layers[1:]:
        tensors = list(layer.tensors)
        for ours, theirs in zip(first, tensors, strict=False):
            if (theirs.group, theirs.dtype, theirs.axes) != (ours.group, ours.dtype, ours.axes):
                raise KVPlanError(
                    "LAYOUT",
                    f"place tensor {theirs.name!r} in region {region!r}",
                    expected=f"the group, dtype and axes of {ours.name!r}",
                    got=f"{theirs.group!r}, {theirs.dtype}, {'; '.join(map(str, theirs.axes))}",
                    first=ours.name,
                    second=theirs.name,
                )
        if [*map(len, layer.strips)] != [*map(len, layers[0].strips)]:
            raise KVPlanError(
                "LAYOUT",
                f"place page {layer.name!r} in region {region!r}",
                expected=f"the strips of {layers[0].name!r}, which hold {len(first)} tensors",
                got=f"{len(tensors)} tensors in {len(layer.strips)} strips",
                first=layers[0].name,
                second=layer.name,
            )


def _halves(layout: Layout, page: Page) -> list[tuple[str, Page]]:
    """The page of each view that a tensor is kept in, with what its region's name ends in."""
    tensors = list(page.tensors)
    has_kv = [any(axis.name == KV for axis in tensor.axes) for tensor in tensors]
    if layout.kv != "split" or not any(has_kv):
        return [("", page)]
    if not all(has_kv):
        raise KVPlanError(
            "LAYOUT",
            f"split page {page.name!r} into K and V",
            expected=f"a {KV!r} axis in each of its tensors",
            got=f"none in {tensors[has_kv.index(False)].name!r}",
            tensor=tensors[has_kv.index(False)].name,
        )
    return [(suffix, _half(page, index)) for index, suffix in enumerate((".k", ".v"))]


def _half(page: Page, half: int) -> Page:
    def cut(tensor: Held) -> Held:
        axes = (attrs.evolve(a, start=half, stop=half + 1) if a.name == KV else a for a in tensor.axes)
        return attrs.evolve(tensor, axes=tuple(axes))

    return attrs.evolve(page, strips=tuple(tuple(map(cut, strip)) for strip in page.strips))


def _outer(layout: Layout, region: str, page: Page, num_layers: int, num_blocks: int) -> Dims:
    """The dimensions around a page, from the slowest to the fastest: equal for all its tensors."""
    around = [letter for letter in layout.order if letter not in layout.inside]
    found: list[Dims] = []
    for tensor in page.tensors:
        digits = _by_letter(layout, region, tensor)
        digits["L"] = [Axis(LAYER, 0, num_layers, num_layers, 0)]
        digits["B"].insert(0, Axis(BLOCK, 0, num_blocks, num_blocks, 0))
        found.append([(letter, axis) for letter in around for axis in digits[letter]])
        found[-1] += [(KV, axis) for axis in tensor.axes if axis.name == KV and layout.kv == "axis"]
        _check_common(region, tensor, found[0], found[-1])
    return found[0]


def _inner(layout: Layout, region: str, page: Page) -> tuple[list[tuple[int, list[Axis]]], int]:
    """Each tensor's offset in the page and its axes there with their strides, and the bytes of the page."""
    placed: list[tuple[int, list[Axis]]] = []
    start = 0
    for strip in page.strips:
        shared: list[Dims] = []
        contents: list[list[Axis]] = []
        for tensor in strip:
            digits = _by_letter(layout, region, tensor)
            shared.append([(letter, axis) for letter in layout.inside[:-1] for axis in digits[letter]])
            contents.append(digits["C"])
            _check_common(region, tensor, shared[0], shared[-1])
        spans = [_packed(content, ITEMSIZE[tensor.dtype]) for tensor, content in zip(strip, contents, strict=True)]
        common, size = _packed([axis for _, axis in shared[0]], sum(span for _, span in spans))
        for content, span in spans:
            placed.append((start, common + content))
            start += span
        start += size - sum(span for _, span in spans)
    return placed, start


def _check_common(region: str, tensor: Held, first: Dims, other: Dims) -> None:
    if first != other:
        raise KVPlanError(
            "LAYOUT",
            f"place tensor {tensor.name!r} in region {region!r}",
            expected="; ".join(str(axis) for _, axis in first) or "neither heads nor slots",
            got="; ".join(str(axis) for _, axis in other) or "neither heads nor slots",
            hint="a page has one set of heads and slots around it, and each of its strips one inside it",
            tensor=tensor.name,
        )


def _by_letter(layout: Layout, region: str, tensor: Held) -> dict[str, list[Axis]]:
    """A tensor's axes by letter. Kernel blocks continue the count of blocks."""
    digits: dict[str, list[Axis]] = {letter: [] for letter in "LBHNC"}
    for axis in tensor.axes:
        if axis.name == TOKEN:
            digits["B"], digits["N"] = _token_digits(layout, region, axis)
        elif axis.name == HEAD:
            digits["H"].append(axis)
        elif axis.name == STEP and layout.conv == "SD":
            digits["N"].append(axis)
        elif axis.name != KV:
            digits["C"].append(axis)
        elif layout.kv != "axis":
            digits["C"].insert(0, axis)
    return digits


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


def _packed(axes: Sequence[Axis], span: int) -> tuple[list[Axis], int]:
    """The axes with strides that leave no gap around ``span`` bytes, and the bytes that they span."""
    placed: list[Axis] = []
    for axis in reversed(axes):
        placed.insert(0, attrs.evolve(axis, stride_bytes=span))
        span *= axis.extent
    return placed, span


def _around(layout: Layout, outer: Dims, span: int, slot_bytes: int) -> tuple[list[int], int]:
    """The stride of each dimension around a page of ``span`` bytes, and the bytes that all of them span."""
    last = max("LB", key=layout.order.index)
    strides: list[int] = []
    for letter, axis in reversed(outer):
        if letter == last and axis.name in (LAYER, BLOCK):
            span = max(span, slot_bytes)
        span += layout.pad_bytes if axis.name == BLOCK else 0
        strides.insert(0, span)
        span *= axis.extent
    return strides, span


def _views(
    region: str,
    layers: Sequence[Page],
    first: int,
    outer: Dims,
    strides: Sequence[int],
    inner: Sequence[tuple[int, list[Axis]]],
) -> Iterator[View]:
    step = {axis.name: stride for (_, axis), stride in zip(outer, strides, strict=True)}
    blocks = next(axis.extent for _, axis in outer if axis.name == BLOCK)
    around = tuple(
        attrs.evolve(axis, stride_bytes=stride)
        for (_, axis), stride in zip(outer, strides, strict=True)
        if axis.name not in (LAYER, BLOCK)
    )
    axes = [around + tuple(inside) for _, inside in inner]
    for index, layer in enumerate(layers, first):
        for tensor, held, (offset, _) in zip(layer.tensors, axes, inner, strict=True):
            at = index * step[LAYER] + offset
            yield View(tensor.name, tensor.group, region, tensor.dtype, held, blocks, step[BLOCK], at)
