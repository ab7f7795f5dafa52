"""Engines: which layers a stage has, where pools lie in memory, and at which addresses.

Pools either lie apart, or share their memory as hybrid models do: the first layer of each group takes one slot of
memory, the second the next, and so on; a slot's blocks are as large as the largest page, and which group a block
belongs to is up to the engine. So attention layers and states, or layers of different windows, are handed blocks
from one pool. Where a layer of a group has several pages (an indexer's keys, scales of their own), they take slots of
their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from kvplan._checks import integer
from kvplan.describe.views import TOKEN, Region, View
from kvplan.errors import KVPlanError
from kvplan.models.layouts import KV, Layout, Page
from kvplan.models.pools import page_bytes, place

ALIGNMENT_BYTES: Final = 1 << 21
"""Every region starts at a multiple of this, and at least this far behind the one before: 2 MiB, a huge page."""

ENGINE_BYTES: Final = 1 << 46
"""The address space of one engine. There are 65535 of them, from this address up to 2**62."""

MAX_LAYERS: Final = 1 << 14

Pools = Mapping[str, Sequence[Page]]
"""Pages by the name of their pool, one for each layer."""

Placed = tuple[list[View], dict[str, int]]
"""Views, and regions with their sizes in bytes."""


def layout_of(layout: Layout, page: Page) -> Layout:
    """The layout of a page: one without token slots stays in one piece, whatever stands where in the others.

    >>> from kvplan import Axis
    >>> from kvplan.models.layouts import Held
    >>> layout_of(Layout("BHLNC"), Page.of(Held("ssm", "state", "float32", (Axis("head", 0, 8, 8, 0),)))).order
    'BLHNC'
    """
    if any(axis.name == TOKEN for tensor in page.tensors for axis in tensor.axes):
        return layout
    return attrs.evolve(layout, order="LBHNC" if layout.order.startswith("L") else "BLHNC")


def place_apart(layout: Layout, pools: Pools, num_blocks: int) -> Placed:
    """Each pool in regions of its own, each page as large as its data."""
    views: list[View] = []
    sizes: dict[str, int] = {}
    for pool, pages in pools.items():
        placed, regions = place(layout_of(layout, pages[0]), pool, pages, num_blocks)
        views += placed
        sizes |= regions
    return views, sizes


def place_shared(layout: Layout, pools: Pools, num_blocks: int) -> Placed:
    """The pools of each group over those of the others. Raises ``LAYOUT`` where a page is not in one piece."""
    if "H" not in layout.inside or (layout.kernel_tokens is not None and not layout.order.startswith("L")):
        raise KVPlanError(
            "LAYOUT",
            f"lay pools {', '.join(pools)} over each other",
            expected="heads inside layer and block, and kernel blocks inside a layer's block",
            got=f"layout {layout.order}, kernel_tokens {layout.kernel_tokens}",
            layout=layout.order,
        )
    slot_bytes = max(page_bytes(layout_of(layout, pages[0]), pages[0]) for pages in pools.values())
    firsts, slots = _slots(pools)
    views: list[View] = []
    sizes: dict[str, int] = {}
    for pool, pages in pools.items():
        half = ".k" if layout.kv == "split" and not _has_kv(pages[0]) else ""
        named = [attrs.evolve(page, name=f"pool.{slot}{half}") for slot, page in enumerate(pages, firsts[pool])]
        order = layout_of(layout, pages[0])
        placed, regions = place(
            order, f"pool{half}", named, num_blocks, slot_bytes=slot_bytes, slots=slots, first=firsts[pool]
        )
        views += placed
        sizes |= regions
    return views, sizes


def _slots(pools: Pools) -> tuple[dict[str, int], int]:
    """The first slot of each pool, behind those of the pools before it of the same group; and how many there are."""
    used: dict[str, int] = {}
    firsts = {}
    for pool, pages in pools.items():
        group = pages[0].strips[0][0].group
        firsts[pool] = used.get(group, 0)
        used[group] = firsts[pool] + len(pages)
    return firsts, max(used.values())


def _has_kv(page: Page) -> bool:
    return any(axis.name == KV for tensor in page.tensors for axis in tensor.axes)


def stages_of(num_layers: int, pp: int, layers_per_stage: Sequence[int] | None) -> list[range]:
    """The layers of each pipeline stage: those given, or else those of :func:`stages`.

    Raises ``LAYOUT`` where stages have no layer, or don't add up to ``pp`` stages and ``num_layers`` layers.

    >>> stages_of(5, 2, None), stages_of(5, 2, [1, 4])
    ([range(0, 3), range(3, 5)], [range(0, 1), range(1, 5)])
    """
    if layers_per_stage is None:
        if pp > num_layers:
            raise _uneven(f"pp <= {num_layers}, the number of layers", f"{pp}", pp, num_layers)
        return list(stages(num_layers, pp))
    given = [integer(layers, "layers_per_stage", low=1, high=MAX_LAYERS) for layers in layers_per_stage]
    if sum(given) != num_layers or len(given) != pp:
        raise _uneven(f"{num_layers} layers in {pp} stages", f"{sum(given)} in {len(given)}", pp, num_layers)
    return [range(sum(given[:stage]), sum(given[: stage + 1])) for stage in range(pp)]


def _uneven(expected: str, got: str, pp: int, layers: int) -> KVPlanError:
    return KVPlanError("LAYOUT", "divide layers into stages", expected=expected, got=got, pp=pp, layers=layers)


def stages(num_layers: int, pp: int) -> Iterator[range]:
    """The layers of each pipeline stage: equal, and what is left one each to the stages before the last, latest first.

    So does ``get_pp_indices`` of vllm/distributed/utils.py (0.33).

    >>> [len(stage) for stage in stages(94, 4)], [len(stage) for stage in stages(5, 2)]
    ([23, 24, 24, 23], [3, 2])
    """
    share, rest = divmod(num_layers, pp)
    start = 0
    for stage in range(pp):
        stop = start + share + (pp - 1 - rest <= stage < pp - 1)
        yield range(start, stop)
        start = stop


@attrs.define
class Addresses:
    """Hands out the address space of one engine, region after region, with a gap between them."""

    engine_id: str
    memory: str
    used_bytes: int = 0

    def region(self, region: str, size_bytes: int, rank: int) -> Region:
        base = (1 + zlib.crc32(self.engine_id.encode()) % 65535) * ENGINE_BYTES
        address = base + self.used_bytes
        self.used_bytes += (size_bytes // ALIGNMENT_BYTES + 2) * ALIGNMENT_BYTES
        if self.used_bytes > ENGINE_BYTES:
            raise KVPlanError(
                "RANGE",
                f"place engine {self.engine_id!r}",
                expected=f"at most {ENGINE_BYTES} bytes of regions",
                got=f"{self.used_bytes}",
                size_bytes=self.used_bytes,
            )
        return Region(region, address, size_bytes, self.memory, rank if self.memory == "VRAM" else 0)
