"""Placement: which layers a pipeline stage has, which layers share memory, and the addresses of regions.

Pools lie apart, or they share memory as in hybrid models. If they share, the memory is divided into numbered pages for
each block: the first layer of each group takes page 0, the second page 1, and so on. All pages are as large as the
largest one, so any group can use any block; the engine decides which. This is how attention layers and states, or
layers of different windows, get their blocks from one pool. If a layer of a group has several pages (the keys of an
indexer, scales in a region of their own), each takes a numbered page.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from kvplan._checks import integer
from kvplan.describe.views import TOKEN, Region, View
from kvplan.errors import KVPlanError
from kvplan.models.config import MAX_LAYERS
from kvplan.models.layouts import KV, Layout, Page
from kvplan.models.pools import place, size_of
from kvplan.models.tensors import Layers

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


def stages_of(num_layers: int, pp: int, layers_per_stage: Sequence[int] | None = None) -> list[range]:
    """The layers of each pipeline stage: as many as given, or equally many.

    The remainder of equal stages goes to the stages before the last, one layer each, the latest first
    (``get_pp_indices`` of vllm/distributed/utils.py, 0.33). Raises ``LAYOUT`` if a stage has no layers, or if the
    stages do not add up to ``pp`` stages and ``num_layers`` layers.

    >>> stages_of(5, 2), stages_of(5, 2, [1, 4])
    ([range(0, 3), range(3, 5)], [range(0, 1), range(1, 5)])
    """
    if layers_per_stage is None:
        if pp > num_layers:
            raise _uneven(f"pp <= {num_layers}, the number of layers", f"{pp}", pp, num_layers)
        each, rest = divmod(num_layers, pp)
        given = [each + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp)]
    else:
        given = [integer(layers, "layers_per_stage", low=1, high=MAX_LAYERS) for layers in layers_per_stage]
    if sum(given) != num_layers or len(given) != pp:
        raise _uneven(f"{num_layers} layers in {pp} stages", f"{sum(given)} in {len(given)}", pp, num_layers)
    return [range(sum(given[:stage]), sum(given[: stage + 1])) for stage in range(pp)]


def _uneven(expected: str, got: str, pp: int, layers: int) -> KVPlanError:
    return KVPlanError("LAYOUT", "divide layers into stages", expected=expected, got=got, pp=pp, layers=layers)


def grouped(*parts: Layers) -> list[Layers]:
    """``parts`` of a model's layers, with each group divided so that all groups have about the same number of layers.

    That number is the size of the smallest group, or of the largest if that is less than one and a half times as
    large. If a group is divided into ``n``, its i-th layer goes to number ``i % n``, so each pipeline stage has layers
    of all (``_get_kv_cache_groups_uniform_page_size`` of vllm/v1/core/kv_cache_planning.py, 0.33). The first keeps the
    name, the others append their number.

    >>> from kvplan.models.tensors import attention
    >>> swa, full = attention(8, 64, "swa", 128), attention(8, 64)
    >>> (layers,) = grouped((swa, swa, full, swa))
    >>> [tensor.group for (tensor,) in layers]
    ['swa', 'swa.1', 'attn', 'swa.2']
    """
    flat = [layer for part in parts for layer in part]
    members: dict[str, list[int]] = {}
    for i, layer in enumerate(flat):
        for group in dict.fromkeys(tensor.group for tensor in layer):
            members.setdefault(group, []).append(i)
    sizes = [len(found) for found in members.values()] or [1]
    size = max(sizes) if 2 * max(sizes) < 3 * min(sizes) else min(sizes)
    names = {}
    for group, found in members.items():
        parts_of_group = -(-len(found) // size)
        for place_in_group, i in enumerate(found):
            number = place_in_group % parts_of_group
            names[group, i] = f"{group}.{number}" if number else group
    made = iter([tuple(attrs.evolve(t, group=names[t.group, i]) for t in layer) for i, layer in enumerate(flat)])
    return [tuple(next(made) for _ in part) for part in parts]


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
