"""Pools: the pages of layers in a layout, as views with strides, and the addresses of regions.

A pool is an array. Its dimensions are those around a page (layers, blocks, and heads or slots if
they are outside) and those of each section inside the page. Strides are computed from the fastest
dimension outwards: first through each section, then through the page, then through the dimensions
around it.

Pools lie apart, or they share memory as in hybrid models. If they share, the memory is divided into
numbered pages for each block: the first layer of each group takes page 0, the second page 1, and so
on. All pages are as large as the largest one, so any group can use any block; the engine decides
which. This is how attention layers and states, or layers of different windows, get their blocks
from one pool. If a layer of a group has several pages (the keys of an indexer, scales in a region
of their own), each takes a numbered page.

If heads are outside layers, a block has no pages: each head has the rows of all layers of its
group. Then groups share a block only if their layers are of one shape.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import attrs

from kvplan._checks import integer
from kvplan.describe.axes import Axis
from kvplan.describe.views import ITEMSIZE, TOKEN, Region, View
from kvplan.errors import KVPlanError
from kvplan.models.layouts import (
    BLOCK,
    HEAD,
    KV,
    LAYER,
    STEP,
    Layout,
    LocalTensor,
    Page,
    layout_error,
)

ALIGNMENT_BYTES: Final = 1 << 21
"""Regions start at multiples of this, and at least this far apart: 2 MiB, a huge page."""

ENGINE_BYTES: Final = 1 << 46
"""The address space of one engine; 65535 of them lie between this address and 2**62."""


def place_pools(
    layout: Layout,
    pools: Mapping[str, Sequence[Page]],
    num_blocks: int,
    *,
    shared: bool = False,
) -> tuple[list[View], dict[str, int]]:
    """Return the views of all pools, and the size of each region in bytes.

    A pool has a page for each of its layers. ``shared`` pools use the same memory. Raises
    ``LAYOUT`` if their pages are neither contiguous nor of one shape.
    """
    layouts = {pool: _layout_of(layout, pages[0]) for pool, pages in pools.items()}
    page_bytes = 0
    block_bytes = 0
    first_page = dict.fromkeys(pools, 0)
    if shared and pools:
        _check_shareable(layout, pools)
        # All pages are as large as the largest, so that any pool can use them.
        page_bytes = max(page_stride(layouts[pool], pages[0]) for pool, pages in pools.items())
        first_page, num_pages = _number_pages(pools)
        block_bytes = num_pages * page_bytes
        if "H" not in layout.inside:  # the layers of a head side by side, without gaps
            page_bytes = 0
    views: list[View] = []
    sizes: dict[str, int] = {}
    for pool, pages in pools.items():
        region = pool
        if shared:
            # All pools use the same regions. If K and V are split, other pages share that of K.
            suffix = ".k" if layout.kv == "split" and not pages[0].has(KV) else ""
            region = f"pool{suffix}"
            numbered = enumerate(pages, first_page[pool])
            pages = [attrs.evolve(page, name=f"pool.{number}{suffix}") for number, page in numbered]
        pool_views, pool_sizes = place_pool(
            layouts[pool],
            region,
            pages,
            num_blocks,
            page_bytes=page_bytes,
            block_bytes=block_bytes,
            first_page=first_page[pool],
        )
        views += pool_views
        sizes |= pool_sizes
    return views, sizes


def _layout_of(layout: Layout, page: Page) -> Layout:
    """Return the layout of a page. A page without token slots stays contiguous in every layout."""
    if page.has(TOKEN):
        return layout
    return attrs.evolve(layout, order="LBHNC" if layout.order.startswith("L") else "BLHNC")


def _check_shareable(layout: Layout, pools: Mapping[str, Sequence[Page]]) -> None:
    """Raise ``LAYOUT`` if a page is not contiguous, so that no other pool can use its memory.

    Pools of one shape can use it all the same, if each group has one pool.
    """
    shapes = {
        tuple((tensor.dtype, tensor.axes) for tensor in pages[0].tensors)
        for pages in pools.values()
    }
    groups = {next(pages[0].tensors).group for pages in pools.values()}
    are_alike = len(shapes) == 1 and len(groups) == len(pools)
    has_loose_kernel_blocks = layout.kernel_tokens is not None and not layout.order.startswith("L")
    if ("H" not in layout.inside and not are_alike) or has_loose_kernel_blocks:
        action = f"place pools {', '.join(pools)} in the same memory"
        expected = (
            "heads inside layer and block, or groups of one shape; and kernel blocks inside a "
            "layer's block"
        )
        got = f"layout {layout.order}, kernel_tokens {layout.kernel_tokens}"
        raise layout_error(action, expected, got, layout=layout.order)


def _number_pages(pools: Mapping[str, Sequence[Page]]) -> tuple[dict[str, int], int]:
    """Return the number of each pool's first page, and how many pages a block has.

    The pools of one group take consecutive pages, each group from page 0 on.
    """
    # Pages that the pools so far take, by group.
    first_page: dict[str, int] = {}
    num_pages_of: dict[str, int] = {}
    for pool, pages in pools.items():
        group = next(pages[0].tensors).group
        first_page[pool] = num_pages_of.get(group, 0)
        num_pages_of[group] = first_page[pool] + len(pages)
    return first_page, max(num_pages_of.values())


def place_pool(
    layout: Layout,
    pool: str,
    pages: Sequence[Page],
    num_blocks: int,
    *,
    page_bytes: int = 0,
    block_bytes: int = 0,
    first_page: int = 0,
) -> tuple[tuple[View, ...], dict[str, int]]:
    """Return the views of the tensors of one pool, and the size in bytes of each region.

    Each page is one layer of the pool, and all have equal shapes. A region is named after its page
    if ``L`` is the slowest dimension, else after the ``pool``; ``split`` appends ``.k`` and ``.v``.
    So that pools of unequal pages can share their memory, a page takes at least ``page_bytes``, a
    block of all layers at least ``block_bytes``, and these layers are the pages from ``first_page``
    on.
    Raises ``LAYOUT`` if the pages differ in shape, if tensors of a section differ in heads or
    slots, or if blocks do not divide into kernel blocks.

    >>> axes = (Axis("kv", 0, 2, 2, 0), Axis("head", 4, 8, 8, 0),
    ...         Axis("token", 0, 16, 16, 0), Axis("dim", 0, 128, 128, 0))
    >>> names = ["layers.0.attn", "layers.1.attn"]
    >>> layers = [Page.of(LocalTensor(name, "attn", "bfloat16", axes)) for name in names]
    >>> views, sizes = place_pool(Layout("BLNHC"), "pool", layers, num_blocks=100)
    >>> print(*views[1].axes, sep="; ")
    token [0, 16) of 16 stride 2048; head [4, 8) of 8 stride 512; kv [0, 2) of 2 stride 256;
    dim [0, 128) of 128 stride 2
    >>> views[1].offset_bytes, views[1].block_stride_bytes, sizes
    (32768, 65536, {'pool': 6553600})
    """
    num_blocks = integer(num_blocks, "num_blocks of a pool", low=1, high=1 << 40)
    pages_of_region = {pool: list(pages)}
    if layout.order.startswith("L"):
        # Each page is the only one of its region.
        pages_of_region = {page.name: [page] for page in pages}
        first_page = 0
        block_bytes = 0
    views: list[View] = []
    sizes: dict[str, int] = {}
    for region, region_pages in pages_of_region.items():
        _check_equal(region, region_pages)
        num_layers = first_page + len(region_pages)
        for suffix, page in _kv_parts(layout, region_pages[0]):
            outer_axes = _outer(layout, region, page, num_layers, num_blocks)
            placed_page = _inner(layout, region, page)
            around = _around(layout, outer_axes, placed_page.size_bytes, page_bytes, block_bytes)
            sizes[region + suffix] = around.size_bytes
            # All layers have the axes of the first one, at offsets of their own.
            for layer, layer_page in enumerate(region_pages, first_page):
                page_offset = layer * around.layer_stride_bytes
                tensors = zip(layer_page.tensors, placed_page.tensors, strict=True)
                for tensor, (offset, inner_axes) in tensors:
                    view = View(
                        tensor.name,
                        tensor.group,
                        region + suffix,
                        tensor.dtype,
                        (*around.axes, *inner_axes),
                        num_blocks,
                        around.block_stride_bytes,
                        page_offset + offset,
                    )
                    views.append(view)
    return tuple(views), sizes


def page_stride(layout: Layout, page: Page) -> int:
    """Return the bytes between consecutive pages of a pool without the pad of a block.

    If K and V are split, they are those of K or V alone.

    >>> axes = (Axis("head", 0, 4, 8, 0), Axis("state", 0, 128, 128, 0))
    >>> page_stride(Layout(), Page.of(LocalTensor("layers.0.ssm", "state", "float32", axes)))
    2048
    """
    # A page in a pool of one layer and one block, with the heads and slots around it.
    sizes = []
    for _, part in _kv_parts(layout, page):
        size_bytes = _inner(layout, page.name, part).size_bytes
        outer_axes = _outer(layout, page.name, part, 1, 1)
        sizes.append(size_bytes * math.prod(axis.extent for axis in outer_axes))
    return max(sizes)


def _check_equal(region: str, pages: Sequence[Page]) -> None:
    """Raise ``LAYOUT`` if pages of one region differ in their tensors or sections."""
    first_page = pages[0]
    lengths = [*map(len, first_page.sections)]
    for page in pages[1:]:
        for first, second in zip(first_page.tensors, page.tensors, strict=False):
            if second != attrs.evolve(first, name=second.name):
                action = f"place tensor {second.name!r} in region {region!r}"
                expected = f"the group, dtype and axes of {first.name!r}"
                axes = "; ".join(map(str, second.axes))
                got = f"{second.group!r}, {second.dtype}, {axes}"
                raise layout_error(action, expected, got, first=first.name, second=second.name)
        page_lengths = [*map(len, page.sections)]
        if page_lengths != lengths:
            action = f"place page {page.name!r} in region {region!r}"
            expected = f"the sections of {first_page.name!r}, which hold {sum(lengths)} tensors"
            got = f"{sum(page_lengths)} tensors in {len(page_lengths)} sections"
            raise layout_error(action, expected, got, first=first_page.name, second=page.name)


def _kv_parts(layout: Layout, page: Page) -> list[tuple[str, Page]]:
    """Return the page, or its K and its V if they are split, with the suffix of each one's region.

    Raises ``LAYOUT`` if a page with heads cannot be divided into K and V.
    """
    if layout.kv != "content" and page.has(TOKEN) and page.has(HEAD):
        _check_has_kv(page)
    if layout.kv != "split" or not page.has(KV):
        return [("", page)]
    return [(".k", _part_of_page(page, 0)), (".v", _part_of_page(page, 1))]


def _check_has_kv(page: Page) -> None:
    for tensor in page.tensors:
        if not tensor.has(KV):
            action = f"split page {page.name!r} into K and V"
            expected = f"a {KV!r} axis in each of its tensors"
            got = f"none in {tensor.name!r}"
            hint = "K and V of unequal sizes are next to each other: kv=content"
            raise layout_error(action, expected, got, hint, tensor=tensor.name)


def _part_of_page(page: Page, index: int) -> Page:
    """Return K (0) or V (1) of a page."""
    sections = [tuple(k_or_v(tensor, index) for tensor in section) for section in page.sections]
    return attrs.evolve(page, sections=tuple(sections))


def k_or_v(tensor: LocalTensor, index: int) -> LocalTensor:
    """Return K (0) or V (1) of a tensor."""
    axes = [
        attrs.evolve(axis, start=index, stop=index + 1) if axis.name == KV else axis
        for axis in tensor.axes
    ]
    return attrs.evolve(tensor, axes=tuple(axes))


def _outer(
    layout: Layout,
    region: str,
    page: Page,
    num_layers: int,
    num_blocks: int,
) -> list[Axis]:
    """Return the dimensions around a page, from the slowest to the fastest.

    All of its tensors must have the same.
    """
    letters_around = layout.order.removesuffix(layout.inside)
    # Each tensor has a list of axes around the page; all lists must be equal.
    axes_by_tensor = []
    for tensor in page.tensors:
        axes = _by_letter(layout, region, tensor)
        axes["L"] = [Axis(LAYER, 0, num_layers, num_layers, 0)]
        axes["B"].insert(0, Axis(BLOCK, 0, num_blocks, num_blocks, 0))
        outer_axes = _chained(axes, letters_around)
        if layout.kv == "axis":
            outer_axes += [axis for axis in tensor.axes if axis.name == KV]
        axes_by_tensor.append(outer_axes)
    return _common_axes(region, page.tensors, axes_by_tensor)


def _chained(axes: Mapping[str, list[Axis]], letters: Iterable[str]) -> list[Axis]:
    return list(itertools.chain.from_iterable(axes[letter] for letter in letters))


@attrs.frozen
class _PlacedPage:
    """A page with strides: each tensor's offset in it and its axes there, and how large it is."""

    tensors: Sequence[tuple[int, list[Axis]]]
    size_bytes: int


def _inner(layout: Layout, region: str, page: Page) -> _PlacedPage:
    """Return a page with the strides of its tensors: section after section."""
    placed_tensors: list[tuple[int, list[Axis]]] = []
    section_offset = 0
    for section in page.sections:
        # Of each tensor: its heads and slots inside the page, and its content with its bytes.
        axes_by_tensor = []
        contents = []
        for tensor in section:
            axes = _by_letter(layout, region, tensor)
            axes_by_tensor.append(_chained(axes, layout.inside[:-1]))
            contents.append(_dense(axes["C"], ITEMSIZE[tensor.dtype]))
        common_axes = _common_axes(region, section, axes_by_tensor)
        # A slot of the section has the contents of all its tensors, side by side.
        slot_bytes = sum(content_bytes for _, content_bytes in contents)
        slot_axes, section_bytes = _dense(common_axes, slot_bytes)
        offset = section_offset
        for content_axes, content_bytes in contents:
            placed_tensors.append((offset, slot_axes + content_axes))
            offset += content_bytes
        section_offset += section_bytes
    return _PlacedPage(placed_tensors, section_offset)


def _common_axes(
    region: str,
    tensors: Iterable[LocalTensor],
    axes_by_tensor: Sequence[list[Axis]],
) -> list[Axis]:
    """Return the axes that all tensors have. Raises ``LAYOUT`` if they differ."""
    common_axes = axes_by_tensor[0]
    for tensor, axes in zip(tensors, axes_by_tensor, strict=True):
        if axes != common_axes:
            action = f"place tensor {tensor.name!r} in region {region!r}"
            neither = "neither heads nor slots"
            expected = "; ".join(map(str, common_axes)) or neither
            got = "; ".join(map(str, axes)) or neither
            inside = "heads and slots inside a page are the same for all tensors of a section"
            hint = f"{inside}, those around it for the page"
            raise layout_error(action, expected, got, hint, tensor=tensor.name)
    return common_axes


def _by_letter(layout: Layout, region: str, tensor: LocalTensor) -> dict[str, list[Axis]]:
    """Return a tensor's axes by letter. The count of kernel blocks in a block belongs to ``B``."""
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
    """Return the token axis of a block as kernel blocks, if there are several, and their slots."""
    slots = layout.kernel_tokens or tokens
    if tokens % slots:
        action = f"divide the blocks of region {region!r} into kernel blocks"
        expected = f"kernel_tokens that divides tokens_per_block {tokens}"
        raise layout_error(
            action, expected, f"{slots}", tokens_per_block=tokens, kernel_tokens=slots
        )
    num_kernel_blocks = tokens // slots
    block_axes = [Axis(TOKEN, 0, num_kernel_blocks, num_kernel_blocks, 0)]
    return block_axes if num_kernel_blocks > 1 else [], [Axis(TOKEN, 0, slots, slots, 0)]


def _dense(axes: Sequence[Axis], size_bytes: int) -> tuple[list[Axis], int]:
    """Return the axes around elements of ``size_bytes``, without gaps, and the bytes they span."""
    # From the fastest axis outwards, each steps over all that lies inside it.
    placed_axes: list[Axis] = []
    for axis in reversed(axes):
        placed_axes.insert(0, attrs.evolve(axis, stride_bytes=size_bytes))
        size_bytes *= axis.extent
    return placed_axes, size_bytes


@attrs.frozen
class _PoolAxes:
    """The dimensions around the pages of a pool, with strides.

    ``axes`` are those of a tensor: any but layers and blocks, which have strides of their own.
    """

    axes: list[Axis]
    layer_stride_bytes: int
    block_stride_bytes: int
    size_bytes: int


def _around(
    layout: Layout, outer: list[Axis], size_bytes: int, page_bytes: int, block_bytes: int
) -> _PoolAxes:
    """Return the dimensions around a page.

    A page takes at least ``page_bytes``, and a block of all layers ``block_bytes``.
    """
    order = layout.order
    fastest = LAYER if order.index("L") > order.index("B") else BLOCK
    axes: list[Axis] = []
    strides: dict[str, int] = {}
    for axis in reversed(outer):
        # Heads and slots outside the page belong to it: all of them together fill its bytes.
        if axis.name == fastest:
            size_bytes = max(size_bytes, page_bytes)
        if axis.name == BLOCK:
            size_bytes = max(size_bytes, block_bytes) + layout.pad_bytes
        if axis.name in (LAYER, BLOCK):
            strides[axis.name] = size_bytes
        else:
            axes.insert(0, attrs.evolve(axis, stride_bytes=size_bytes))
        size_bytes *= axis.extent
    return _PoolAxes(axes, strides[LAYER], strides[BLOCK], size_bytes)


@attrs.define
class Addresses:
    """Assigns the address space of one engine, region after region, with a gap between them."""

    engine_id: str
    memory: str
    used_bytes: int = 0

    def region(self, region: str, size_bytes: int, rank: int) -> Region:
        """Return the next region."""
        base = (1 + zlib.crc32(self.engine_id.encode()) % 65535) * ENGINE_BYTES
        address = base + self.used_bytes
        # The region, up to the next multiple of the alignment, and a gap.
        self.used_bytes += (size_bytes // ALIGNMENT_BYTES + 2) * ALIGNMENT_BYTES
        if self.used_bytes > ENGINE_BYTES:
            action = f"place engine {self.engine_id!r}"
            expected = f"at most {ENGINE_BYTES} bytes of regions"
            used = self.used_bytes
            raise KVPlanError("RANGE", action, expected=expected, got=f"{used}", size_bytes=used)
        device_id = rank if self.memory == "VRAM" else 0
        return Region(region, address, size_bytes, self.memory, device_id)
