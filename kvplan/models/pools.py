"""Pools: the pages of one or more layers in a layout, as views with strides, and the addresses of their regions.

A pool is an array. Its dimensions are those around a page (layers, blocks, and heads or slots if they are outside) and
those of each section inside the page. Strides are computed from the fastest dimension outwards: first through each
section, then through the page, then through the dimensions around it.

Pools lie apart, or they share memory as in hybrid models. If they share, the memory is divided into numbered pages for
each block: the first layer of each group takes page 0, the second page 1, and so on. All pages are as large as the
largest one, so any group can use any block; the engine decides which. This is how attention layers and states, or
layers of different windows, get their blocks from one pool. If a layer of a group has several pages (the keys of an
indexer, scales in a region of their own), each takes a numbered page.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from kvplan._checks import integer
from kvplan.describe.axes import Axis
from kvplan.describe.views import ITEMSIZE, TOKEN, Region, View
from kvplan.errors import KVPlanError
from kvplan.models.layouts import BLOCK, HEAD, KV, LAYER, STEP, Layout, LocalTensor, Page

ALIGNMENT_BYTES: Final = 1 << 21
"""Every region starts at a multiple of this, and at least this far behind the one before: 2 MiB, a huge page."""

ENGINE_BYTES: Final = 1 << 46
"""The address space of one engine. There are 65535 of them, from this address up to 2**62."""


def place_pools(
    layout: Layout, pools: Mapping[str, Sequence[Page]], num_blocks: int, *, shared: bool = False
) -> tuple[list[View], dict[str, int]]:
    """The views of all pools, and the size of each region in bytes. A pool has a page for each of its layers.

    ``shared`` pools use the same memory. Raises ``LAYOUT`` if their pages are not contiguous.
    """
    layouts = {pool: _layout_of(layout, pages[0]) for pool, pages in pools.items()}
    page_bytes, first_page, used = 0, dict.fromkeys(pools, 0), {"": 0}
    if shared and pools:
        if "H" not in layout.inside or (layout.kernel_tokens is not None and not layout.order.startswith("L")):
            what = f"place pools {', '.join(pools)} in the same memory"
            expected = "heads inside layer and block, and kernel blocks inside a layer's block"
            got = f"layout {layout.order}, kernel_tokens {layout.kernel_tokens}"
            raise KVPlanError("LAYOUT", what, expected=expected, got=got, layout=layout.order)
        page_bytes = max(size_of(layouts[pool], pages[0]) for pool, pages in pools.items())
        for pool, pages in pools.items():  # the pools of one group take consecutive pages, each group from page 0 on
            group = next(pages[0].tensors).group
            first_page[pool] = used.get(group, 0)
            used[group] = first_page[pool] + len(pages)
    views: list[View] = []
    sizes: dict[str, int] = {}
    for pool, pages in pools.items():
        region, first = pool, first_page[pool]
        if shared:  # a page without K and V shares the memory of K alone if they are split
            suffix = ".k" if layout.kv == "split" and not pages[0].has(KV) else ""
            region = f"pool{suffix}"
            pages = [attrs.evolve(page, name=f"pool.{n}{suffix}") for n, page in enumerate(pages, first)]
        room = {"page_bytes": page_bytes, "num_pages": max(used.values()), "first_page": first}
        placed, regions = place(layouts[pool], region, pages, num_blocks, **room)
        views += placed
        sizes |= regions
    return views, sizes


def _layout_of(layout: Layout, page: Page) -> Layout:
    """The layout of a page. A page without token slots stays contiguous in every layout."""
    if page.has(TOKEN):
        return layout
    return attrs.evolve(layout, order="LBHNC" if layout.order.startswith("L") else "BLHNC")


def place(
    layout: Layout,
    pool: str,
    pages: Sequence[Page],
    num_blocks: int,
    *,
    page_bytes: int = 0,
    num_pages: int = 0,
    first_page: int = 0,
) -> tuple[tuple[View, ...], dict[str, int]]:
    """The views of the tensors of one pool, all pages of equal shape, and the size in bytes of each region.

    Each page is one layer of the pool. A region is named after its page if ``L`` is the slowest dimension, else after
    the ``pool``; ``split`` appends ``.k`` and ``.v``. So that pools of unequal pages can share their memory, a page
    takes at least ``page_bytes``, a block has at least ``num_pages`` pages, and these layers are the pages from
    ``first_page`` on. Raises ``LAYOUT`` if the pages differ in shape, if tensors of a section differ in heads or slots,
    or if blocks do not divide into kernel blocks.

    >>> axes = (Axis("kv", 0, 2, 2, 0), Axis("head", 4, 8, 8, 0),
    ...         Axis("token", 0, 16, 16, 0), Axis("dim", 0, 128, 128, 0))
    >>> layers = [Page.of(LocalTensor(f"layers.{i}.attn", "attn", "bfloat16", axes)) for i in range(2)]
    >>> views, sizes = place(Layout("BLNHC"), "pool", layers, num_blocks=100)
    >>> print(*views[1].axes, sep="; ")
    token [0, 16) of 16 stride 2048; head [4, 8) of 8 stride 512; kv [0, 2) of 2 stride 256;
    dim [0, 128) of 128 stride 2
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
        first, room = (0, 1) if alone else (first_page, max(num_pages, first_page + len(layers)))
        for suffix, page in _kv_parts(layout, layers[0]):
            outer = _outer(layout, region, page, room, num_blocks)
            inner, span = _inner(layout, region, page)
            around, steps, sizes[region + suffix] = _around(layout, outer, span, page_bytes)
            for index, layer in enumerate(layers, first):
                for tensor, (offset, axes) in zip(layer.tensors, inner, strict=True):
                    placed = tensor.dtype, (*around, *axes), num_blocks, steps[BLOCK], index * steps[LAYER] + offset
                    views.append(View(tensor.name, tensor.group, region + suffix, *placed))
    return tuple(views), sizes


def size_of(layout: Layout, page: Page) -> int:
    """Bytes between consecutive pages of a pool without the pad of a block; of K or V alone if they are split.

    >>> axes = (Axis("head", 0, 4, 8, 0), Axis("state", 0, 128, 128, 0))
    >>> size_of(Layout(), Page.of(LocalTensor("layers.0.ssm", "state", "float32", axes)))
    2048
    """
    spans = []
    for _, part in _kv_parts(layout, page):
        _, span = _inner(layout, page.name, part)
        spans.append(span * math.prod(axis.extent for axis in _outer(layout, page.name, part, 1, 1)))
    return max(spans)


def _check_equal(region: str, layers: Sequence[Page]) -> None:
    first = layers[0]
    for page in layers[1:]:
        for ours, theirs in zip(first.tensors, page.tensors, strict=False):
            if (theirs.group, theirs.dtype, theirs.axes) != (ours.group, ours.dtype, ours.axes):
                what = f"place tensor {theirs.name!r} in region {region!r}"
                expected = f"the group, dtype and axes of {ours.name!r}"
                got = f"{theirs.group!r}, {theirs.dtype}, {'; '.join(map(str, theirs.axes))}"
                raise KVPlanError("LAYOUT", what, expected=expected, got=got, first=ours.name, second=theirs.name)
        counts, found = ([*map(len, one.sections)] for one in (first, page))
        if counts != found:
            what = f"place page {page.name!r} in region {region!r}"
            expected = f"the sections of {first.name!r}, which hold {sum(counts)} tensors"
            got = f"{sum(found)} tensors in {len(found)} sections"
            raise KVPlanError("LAYOUT", what, expected=expected, got=got, first=first.name, second=page.name)


def _kv_parts(layout: Layout, page: Page) -> list[tuple[str, Page]]:
    """The page, or its K and its V if they are split, each with the suffix of its region."""
    for tensor in page.tensors if layout.kv != "content" and page.has(TOKEN) and page.has(HEAD) else ():
        if all(axis.name != KV for axis in tensor.axes):
            what, expected = f"split page {page.name!r} into K and V", f"a {KV!r} axis in each of its tensors"
            hint = "K and V of unequal sizes are beside each other: kv=content"
            got = f"none in {tensor.name!r}"
            raise KVPlanError("LAYOUT", what, expected=expected, got=got, hint=hint, tensor=tensor.name)
    if layout.kv != "split" or not page.has(KV):
        return [("", page)]
    return [
        (suffix, attrs.evolve(page, sections=tuple(tuple(k_or_v(t, index) for t in part) for part in page.sections)))
        for index, suffix in enumerate((".k", ".v"))
    ]


def k_or_v(tensor: LocalTensor, index: int) -> LocalTensor:
    """K (0) or V (1) of a tensor."""
    axes = (attrs.evolve(a, start=index, stop=index + 1) if a.name == KV else a for a in tensor.axes)
    return attrs.evolve(tensor, axes=tuple(axes))


def _outer(layout: Layout, region: str, page: Page, num_layers: int, num_blocks: int) -> list[Axis]:
    """The dimensions around a page, from the slowest to the fastest. All of its tensors must have the same."""
    around = [letter for letter in layout.order if letter not in layout.inside]
    found: list[list[Axis]] = []
    for tensor in page.tensors:
        axes = _by_letter(layout, region, tensor)
        axes["L"] = [Axis(LAYER, 0, num_layers, num_layers, 0)]
        axes["B"].insert(0, Axis(BLOCK, 0, num_blocks, num_blocks, 0))
        found.append([axis for letter in around for axis in axes[letter]])
        found[-1] += [axis for axis in tensor.axes if axis.name == KV and layout.kv == "axis"]
        _check_common(region, tensor, found[0], found[-1])
    return found[0]


def _inner(layout: Layout, region: str, page: Page) -> tuple[list[tuple[int, list[Axis]]], int]:
    """Each tensor's offset in the page and its axes there with their strides, and the size of the page in bytes."""
    placed: list[tuple[int, list[Axis]]] = []
    start = 0
    for section in page.sections:
        shared: list[list[Axis]] = []
        contents: list[tuple[list[Axis], int]] = []
        for tensor in section:
            axes = _by_letter(layout, region, tensor)
            shared.append([axis for letter in layout.inside[:-1] for axis in axes[letter]])
            contents.append(_dense(axes["C"], ITEMSIZE[tensor.dtype]))
            _check_common(region, tensor, shared[0], shared[-1])
        common, size = _dense(shared[0], sum(slot_bytes for _, slot_bytes in contents))
        offset = start
        for content, slot_bytes in contents:
            placed.append((offset, common + content))
            offset += slot_bytes
        start += size
    return placed, start


def _check_common(region: str, tensor: LocalTensor, first: list[Axis], other: list[Axis]) -> None:
    if first != other:
        what = f"place tensor {tensor.name!r} in region {region!r}"
        expected, got = ("; ".join(map(str, axes)) or "neither heads nor slots" for axes in (first, other))
        hint = "heads and slots inside a page are the same for all tensors of a section, those around it for the page"
        raise KVPlanError("LAYOUT", what, expected=expected, got=got, hint=hint, tensor=tensor.name)


def _by_letter(layout: Layout, region: str, tensor: LocalTensor) -> dict[str, list[Axis]]:
    """A tensor's axes by letter. The count of kernel blocks in a block belongs to ``B``."""
    axes: dict[str, list[Axis]] = {letter: [] for letter in "LBHNC"}
    for axis in tensor.axes:
        if axis.name == TOKEN:
            axes["B"], axes["N"] = _kernel_blocks(layout, region, axis.size)
        elif axis.name == HEAD:
            axes["H"].append(axis)
        elif axis.name == STEP and layout.conv == "SD":
            axes["N"].append(axis)
        elif axis.name != KV:
            axes["C"].append(axis)
        elif layout.kv != "axis":
            axes["C"].insert(0, axis)
    return axes


def _kernel_blocks(layout: Layout, region: str, tokens: int) -> tuple[list[Axis], list[Axis]]:
    """The token axis of a block as kernel blocks, if there are several, and their slots."""
    slots = layout.kernel_tokens or tokens
    if tokens % slots:
        what = f"divide the blocks of region {region!r} into kernel blocks"
        expected, got = f"kernel_tokens that divides tokens_per_block {tokens}", f"{slots}"
        raise KVPlanError("LAYOUT", what, expected=expected, got=got, tokens_per_block=tokens, kernel_tokens=slots)
    count = tokens // slots
    return [Axis(TOKEN, 0, count, count, 0)] if count > 1 else [], [Axis(TOKEN, 0, slots, slots, 0)]


def _dense(axes: Sequence[Axis], span: int) -> tuple[list[Axis], int]:
    """The axes with strides that leave no gap around ``span`` bytes, and the bytes that they span."""
    placed: list[Axis] = []
    for axis in reversed(axes):
        placed.insert(0, attrs.evolve(axis, stride_bytes=span))
        span *= axis.extent
    return placed, span


def _around(layout: Layout, outer: list[Axis], span: int, page_bytes: int) -> tuple[list[Axis], dict[str, int], int]:
    """Around a page of ``span`` bytes: the axes of a tensor, the strides of layers and blocks, and the bytes of all."""
    fastest = LAYER if layout.order.index("L") > layout.order.index("B") else BLOCK
    axes: list[Axis] = []
    steps: dict[str, int] = {}
    for axis in reversed(outer):
        span = max(span, page_bytes) if axis.name == fastest else span
        span += layout.pad_bytes if axis.name == BLOCK else 0
        if axis.name in (LAYER, BLOCK):
            steps[axis.name] = span
        else:
            axes.insert(0, attrs.evolve(axis, stride_bytes=span))
        span *= axis.extent
    return axes, steps, span


@attrs.define
class Addresses:
    """Assigns the address space of one engine, region after region, with a gap between them."""

    engine_id: str
    memory: str
    used_bytes: int = 0

    def region(self, region: str, size_bytes: int, rank: int) -> Region:
        """The next region."""
        base = (1 + zlib.crc32(self.engine_id.encode()) % 65535) * ENGINE_BYTES
        address = base + self.used_bytes
        self.used_bytes += (size_bytes // ALIGNMENT_BYTES + 2) * ALIGNMENT_BYTES
        if self.used_bytes > ENGINE_BYTES:
            what, expected = f"place engine {self.engine_id!r}", f"at most {ENGINE_BYTES} bytes of regions"
            raise KVPlanError("RANGE", what, expected=expected, got=f"{self.used_bytes}", size_bytes=self.used_bytes)
        return Region(region, address, size_bytes, self.memory, rank if self.memory == "VRAM" else 0)
