"""Workers: one rank's regions, groups and views, checked as a whole.

Validate (V), on construction of each worker:

- V1: names of regions and of groups are unique; a view names a region and a group of its worker.
- V2: each view's bytes, over all its blocks, lie inside its region.
- V3: in a token group the ``token`` axis counts exactly ``tokens_per_block``; in a state group there is none.
- V4: views of one group share no byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

from kvplan.axes import integer, name
from kvplan.errors import KVPlanError
from kvplan.overlap import overlaps
from kvplan.views import TOKEN, Geometry, Group, Region, View


def _tuple_of(kind: type) -> Any:
    def convert(values: Iterable[Any]) -> tuple[Any, ...]:
        items = tuple(values)
        for item in items:
            if not isinstance(item, kind):
                raise KVPlanError(
                    "TYPE", "describe a worker", expected=f"a {kind.__name__}", got=repr(item), value=item
                )
        return items

    return convert


class Place(NamedTuple):
    """Where a view stands: indices into its worker's geometries and regions, and the offset in the region."""

    geometry: int
    region: int
    offset_bytes: int


@attrs.frozen
class Worker:
    """One rank's process of an engine: what it registers and what it keeps there.

    ``rank`` is unique within ``engine_id``. Raises a KVPlanError where V1 to V4 do not hold.

    >>> from kvplan import Axis, Group, Region, View, Worker
    >>> axes = (Axis("token", 0, 16, 16, 1152), Axis("dim", 0, 576, 576, 2))
    >>> print(Worker("decode", 0, (Region("kv", 1 << 44, 100 * 18432),), (Group("mla", 16),),
    ...              (View("layers.0.mla", "mla", "kv", "bfloat16", axes, 100, 18432),)))
    decode/0: 1 view of 1 tensor in 1 region, 1 group
    """

    engine_id: str = attrs.field(converter=lambda v: name(v, "engine_id of a worker"))
    rank: int = attrs.field(converter=lambda v: integer(v, "rank of a worker"))
    regions: tuple[Region, ...] = attrs.field(converter=_tuple_of(Region))
    groups: tuple[Group, ...] = attrs.field(converter=_tuple_of(Group))
    views: tuple[View, ...] = attrs.field(converter=_tuple_of(View), repr=False)

    def __attrs_post_init__(self) -> None:
        regions = self._by_name("region", self.regions)
        groups = self._by_name("group", self.groups)
        for view in self.views:
            region = self._named(view, "region", view.region, regions)
            group = self._named(view, "group", view.group, groups)
            if view.end_bytes > region.size_bytes:
                raise KVPlanError(
                    "BOUNDS",
                    f"place view {view.name!r} of {self}",
                    expected=f"bytes within [0, {region.size_bytes}) of region {region.name!r}",
                    got=f"[{view.offset_bytes}, {view.end_bytes})",
                    size_bytes=region.size_bytes,
                    end_bytes=view.end_bytes,
                )
            slots = view.sizes.get(TOKEN)
            if slots != group.tokens_per_block:
                raise KVPlanError(
                    "SIZE",
                    f"page view {view.name!r} of {self}",
                    expected=f"a token axis of {group.tokens_per_block} slots, as group {group.name!r} has",
                    got=f"{slots}",
                    tokens_per_block=group.tokens_per_block,
                    token_axis=slots,
                )
        self._check_apart()

    def _by_name(self, what: str, values: tuple[Any, ...]) -> dict[str, Any]:
        by_name = {value.name: value for value in values}
        for value in values:
            if by_name[value.name] is not value:
                raise KVPlanError(
                    "NAME",
                    f"describe worker {self.engine_id}/{self.rank}",
                    expected=f"each {what} name once",
                    got=f"{value.name!r} twice",
                    name=value.name,
                )
        return by_name

    def _named(self, view: View, what: str, key: str, values: dict[str, Any]) -> Any:
        if key not in values:
            raise KVPlanError(
                "NAME",
                f"place view {view.name!r} of worker {self.engine_id}/{self.rank}",
                expected=f"a {what} of {', '.join(map(repr, values)) or 'an empty list'}",
                got=f"{key!r}",
                name=key,
            )
        return values[key]

    def _check_apart(self) -> None:
        shared: dict[tuple[str, str], list[View]] = {}
        for view in self.views:
            shared.setdefault((view.region, view.group), []).append(view)
        for (region, group), views in shared.items():
            for first, second in overlaps(views):
                raise KVPlanError(
                    "OVERLAP",
                    f"place view {second.name!r} of {self}",
                    expected=f"bytes of its own in region {region!r} for group {group!r}",
                    got=f"bytes of view {first.name!r}",
                    first=first.name,
                    second=second.name,
                )

    @cached_property
    def _placed(self) -> tuple[tuple[Geometry, ...], Mapping[str, tuple[Place, ...]]]:
        groups = {group.name: group for group in self.groups}
        regions = {region.name: i for i, region in enumerate(self.regions)}
        geometries: dict[Geometry, int] = {}
        known: dict[tuple[int, str, str, int, int], int] = {}  # by identity of the axes, which equal layers often share
        places: dict[str, tuple[Place, ...]] = {}
        for view in self.views:
            key = (id(view.axes), view.dtype, view.group, view.num_blocks, view.block_stride_bytes)
            index = known.get(key)
            if index is None:
                what = Geometry(view.axes, view.dtype, groups[view.group], view.num_blocks, view.block_stride_bytes)
                index = known[key] = geometries.setdefault(what, len(geometries))
            place = Place(index, regions[view.region], view.offset_bytes)
            places[view.name] = (*places.get(view.name, ()), place)
        return tuple(geometries), MappingProxyType(places)

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """The different geometries among the views, in order of first appearance."""
        return self._placed[0]

    @property
    def places(self) -> Mapping[str, tuple[Place, ...]]:
        """Each tensor's views, by name, in order."""
        return self._placed[1]

    @property
    def label(self) -> str:
        """``engine_id/rank``, the way messages name a worker."""
        return f"{self.engine_id}/{self.rank}"

    def __str__(self) -> str:
        def count(number: int, what: str) -> str:
            return f"{number} {what}" + ("" if number == 1 else "s")

        tensors = count(len({view.name for view in self.views}), "tensor")
        views, regions, groups = len(self.views), len(self.regions), len(self.groups)
        return f"{self.label}: {count(views, 'view')} of {tensors} in {count(regions, 'region')}, {count(groups, 'group')}"
