"""Workers: the regions, groups and views of one rank, checked as a whole.

Plans believe what workers say. So all that can be checked without the other side is checked when a
worker is made, whether it describes memory of this process or comes from a peer's offer. Every
worker satisfies these rules of validation (V):

- describe.V1: Names of regions and names of groups are unique. Each view names a region and a group
  of its worker.
- describe.V2: The bytes of each view, in all its blocks, lie inside its region.
- describe.V3: In a token group the ``token`` axis has exactly the slots of a block; it may be left
  out where that is one slot of several tokens. In a state group there is none.
- describe.V4: Views of one group share no byte, neither in one region nor in regions that overlap.
  Where blocks of one view lie between those of another, both have one stride.
- describe.V5: A group has at most one view of each shard of a tensor. Two layers under one name
  break this rule.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import at_most, check_fields, integer, members, name, wrong_type
from kvplan._text import count, fold, meant, shown
from kvplan.describe._overlap import describe_overlap, groups_sharing, overlaps
from kvplan.describe.axes import MAX_SEGMENTS, most_segments
from kvplan.describe.model import json_text, model_text
from kvplan.describe.views import TOKEN, Geometry, Group, Region, View
from kvplan.errors import KVPlanError


def _regions(values: Iterable[Region]) -> tuple[Region, ...]:
    return members(Region, values, "regions of a worker")


def _groups(values: Iterable[Group]) -> tuple[Group, ...]:
    return members(Group, values, "groups of a worker")


def _views(values: Iterable[View]) -> tuple[View, ...]:
    return members(View, values, "views of a worker")


def _extensions(extensions: Mapping[str, Any] | str) -> str:
    value: Any = extensions
    if isinstance(extensions, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(extensions)
    return json_text(value, "extensions of a worker")


def _token_axis(num_slots: int | None) -> str:
    return "no token axis" if num_slots is None else f"a token axis of {num_slots} slots"


# functions that read fields of an axis, of a view and of a region
_AXIS_FIELDS: Final = operator.attrgetter("name", "start", "stop", "size", "stride_bytes")
_AXES: Final = operator.attrgetter("axes")
_PAGE_FIELDS: Final = operator.attrgetter("dtype", "group", "num_blocks", "block_stride_bytes")
_DEVICE_AND_ADDRESS: Final = operator.attrgetter("memory", "device_id", "address")

Key = tuple[str, int]
"""The engine id and the rank, which identify a worker."""


def key_of(worker: Any, subject: str) -> Key:
    """Return the key of a worker, which may also be given instead."""
    if isinstance(worker, Worker):
        return worker.key
    if not isinstance(worker, tuple) or len(worker) != 2:
        raise wrong_type(subject, "a Worker, or its engine id and rank", worker)
    engine_id, rank = worker
    return name(engine_id, f"engine id of {subject}"), integer(rank, f"rank of {subject}")


def label_of(key: Key) -> str:
    """Return ``engine_id/rank``, by which messages name a worker."""
    engine_id, rank = key
    return f"{engine_id}/{rank}"


class _RegionOffset(NamedTuple):
    """The first region of a chain of overlapping ones, and the bytes from it to a region."""

    first: str
    distance_bytes: int


class _Geometries(NamedTuple):
    """The distinct geometries of some views, and the index of each view's geometry."""

    distinct: tuple[Geometry, ...]
    indices: tuple[int, ...]


@attrs.frozen(repr=False)
class Worker:
    """One rank of an engine: the regions it registers, and the views it keeps in them.

    ``rank`` is unique within ``engine_id``. ``model`` is whose cache it is: a name in any words
    that engines agree on, or a mapping of facts, each of which changes the values in the cache,
    kept as JSON text. Workers of two models are not planned together, and the error names the facts
    that differ; the empty model is unknown and goes with any. ``extensions`` are your own facts for
    peers, which kvplan only passes on: a mapping of JSON values, read back as JSON text. Equal
    workers may differ in them. A worker never changes: threads may share it.

    Raises a KVPlanError for a worker that breaks one of the rules describe.V1 to describe.V5.

    >>> from kvplan import Axis, Group, Region, View, Worker
    >>> axes = (Axis("token", 0, 16, 16, 1152), Axis("dim", 0, 576, 576, 2))
    >>> print(Worker("decode", 0, (Region("kv", 1 << 44, 100 * 18432),), (Group("mla", 16),),
    ...              (View("layers.0.mla", "mla", "kv", "bfloat16", axes, 100, 18432),)))
    decode/0: 1 view of 1 tensor in 1 region, 1 group
    """

    engine_id: str
    rank: int
    regions: tuple[Region, ...] = attrs.field(converter=_regions)
    groups: tuple[Group, ...] = attrs.field(converter=_groups)
    views: tuple[View, ...] = attrs.field(converter=_views)
    model: str = attrs.field(default="", converter=model_text)
    extensions: str = attrs.field(default="{}", converter=_extensions, eq=False)

    def __attrs_post_init__(self) -> None:
        check_fields(self, "a worker", name, "engine_id")
        check_fields(self, "a worker", integer, "rank")
        self._check_views()
        number = sum(most_segments(geometry.axes) for geometry in self.geometries)
        at_most(MAX_SEGMENTS, number, "segments of axes", f"describe worker {self.label}")
        self._check_shards()
        self._check_apart()

    def _check_views(self) -> None:
        """Check the rules describe.V1 to describe.V3."""
        regions = self._by_name("region", self.regions)
        groups = self._by_name("group", self.groups)
        for view in self.views:
            region = self._named(view, "region", view.region, regions)
            group = self._named(view, "group", view.group, groups)
            if view.end_bytes > region.size_bytes:
                raise KVPlanError(
                    "BOUNDS",
                    f"place view {view.name!r} of worker {self.label}",
                    expected=f"bytes within [0, {region.size_bytes}) of region {region.name!r}",
                    got=f"[{view.offset_bytes}, {view.end_bytes})",
                    size_bytes=region.size_bytes,
                    end_bytes=view.end_bytes,
                )
            needed_slots = None if group.is_state else group.num_slots
            num_slots = view.sizes.get(TOKEN, 1 if group.tokens_per_slot > 1 else None)
            if num_slots != needed_slots:
                raise KVPlanError(
                    "SIZE",
                    f"page view {view.name!r} of worker {self.label}",
                    expected=f"{_token_axis(needed_slots)} for group {group.name!r}",
                    got=_token_axis(num_slots),
                    tokens_per_block=group.tokens_per_block,
                    token_axis=num_slots,
                )

    def _by_name(self, kind: str, values: tuple[Any, ...]) -> dict[str, Any]:
        by_name: dict[str, Any] = {}
        for value in values:
            if value.name in by_name:
                raise KVPlanError(
                    "NAME",
                    f"describe worker {self.label}",
                    expected=f"each {kind} name once",
                    got=f"{value.name!r} twice",
                    name=value.name,
                )
            by_name[value.name] = value
        return by_name

    def _named(self, view: View, kind: str, key: str, values: dict[str, Any]) -> Any:
        """Return the region or group that a view names."""
        if key not in values:
            names = fold(values)
            raise KVPlanError(
                "NAME",
                f"place view {view.name!r} of worker {self.label}",
                expected=f"one of the {kind}s {names}" if values else f"a {kind} of its worker",
                got=f"{key!r}",
                hint=meant(key, values),
                name=key,
            )
        return values[key]

    def _check_shards(self) -> None:
        """Check rule describe.V5."""
        # most workers have one view of each tensor, and need no look at their axes
        if len({view.name for view in self.views}) == len(self.views):
            return
        view_of_shard: dict[Any, View] = {}
        for view in self.views:
            shard = frozenset((axis.name, axis.start, axis.stop, axis.size) for axis in view.axes)
            if view_of_shard.setdefault((view.name, view.group, shard), view) is not view:
                raise KVPlanError(
                    "NAME",
                    f"place view {view.name!r} of worker {self.label}",
                    expected=f"each shard of a tensor once in group {view.group!r}",
                    got="two views of the same shard",
                    hint="does each layer have a different name?",
                    name=view.name,
                )

    def _check_apart(self) -> None:
        """Check rule describe.V4."""
        # views of one group may share bytes only within one chain of overlapping regions
        joined = self._joined_regions()
        pools: dict[tuple[str, str], list[View]] = {}
        for view in self.views:
            pools.setdefault((joined[view.region].first, view.group), []).append(view)
        for first, second in overlaps(*pools.values(), apart=_distances(joined)):
            in_region = f"in region {second.view.region!r} for group {second.view.group!r}"
            raise KVPlanError(
                "OVERLAP",
                f"place view {second.view.name!r} of worker {self.label}",
                expected=f"bytes of its own {in_region}",
                got=describe_overlap(first, second),
                first=first.view.name,
                second=second.view.name,
                blocks=(first.block, second.block),
                bytes=(first.byte, second.byte),
            )

    def _joined_regions(self) -> dict[str, _RegionOffset]:
        """Return the offset of each region in its chain of overlapping regions."""
        joined: dict[str, _RegionOffset] = {}
        first: Region | None = None
        end = 0
        # on each device, by ascending address
        for region in sorted(self.regions, key=_DEVICE_AND_ADDRESS):
            # a chain ends where a region begins behind the end of all regions before it
            if first is None or region.address >= end or _device(region) != _device(first):
                first = region
                end = 0
            end = max(end, region.end)
            joined[region.name] = _RegionOffset(first.name, region.address - first.address)
        return joined

    @cached_property
    def overlaid(self) -> tuple[tuple[str, str], ...]:
        """The pairs of groups with views that share bytes of a block.

        The block's id belongs to one of the two at a time. Views in blocks of different strides are
        not compared.
        """
        joined = self._joined_regions()
        pools: dict[tuple[str, int], list[View]] = {}
        for view in self.views:
            pools.setdefault((joined[view.region].first, view.block_stride_bytes), []).append(view)
        overlaid: set[tuple[str, str]] = set()
        for views in pools.values():
            # with equal strides, blocks of all ids share what block 0 does
            if len({view.group for view in views}) > 1:
                overlaid |= groups_sharing(views, _distances(joined))
        return tuple(sorted(overlaid))

    @cached_property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """For each tensor name, the indices of its views in ``views``."""
        indices_of: dict[str, list[int]] = {}
        for index, view in enumerate(self.views):
            indices_of.setdefault(view.name, []).append(index)
        return MappingProxyType({name: tuple(indices) for name, indices in indices_of.items()})

    @cached_property
    def _geometries(self) -> _Geometries:
        groups = {group.name: group for group in self.groups}
        # equal layers often share a tuple of axes, so a view's key has its identity instead
        axes_ids = map(id, map(_AXES, self.views))
        keys = list(zip(axes_ids, map(_PAGE_FIELDS, self.views), strict=True))
        index_of_key: dict[Any, int] = {}
        index_of_fields: dict[Any, int] = {}
        geometries: list[Geometry] = []
        for key, view in dict(zip(keys, self.views, strict=True)).items():
            # other layers have tuples of their own with equal axes
            _, page_fields = key
            fields = (*map(_AXIS_FIELDS, view.axes), *page_fields)
            index = index_of_fields.setdefault(fields, len(geometries))
            index_of_key[key] = index
            if index == len(geometries):
                group = groups[view.group]
                geometries.append(
                    Geometry(view.axes, view.dtype, group, view.num_blocks, view.block_stride_bytes)
                )
        return _Geometries(tuple(geometries), tuple([index_of_key[key] for key in keys]))

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """The distinct geometries of the views, in order of first appearance."""
        return self._geometries.distinct

    @property
    def geometry_of(self) -> tuple[int, ...]:
        """For each view, the index of its geometry in :attr:`geometries`."""
        return self._geometries.indices

    @cached_property
    def region_offsets(self) -> Ints:
        """For each view its region's index, and its offset there in bytes: (views, 2) int64."""
        index_of = {region.name: index for index, region in enumerate(self.regions)}
        region_indices = [index_of[view.region] for view in self.views]
        offsets = [view.offset_bytes for view in self.views]
        return np.array([region_indices, offsets], np.int64).T

    @cached_property
    def outline(self) -> tuple[Any, ...]:
        """All views with their offsets in the regions.

        It is equal for workers that differ in name and addresses alone.
        """
        names = tuple([view.name for view in self.views])
        return (
            self.model,
            self.groups,
            names,
            self.geometry_of,
            self.geometries,
            self.region_offsets.tobytes(),
        )

    @property
    def key(self) -> Key:
        """``(engine_id, rank)``, by which specs name a worker.

        >>> Worker("decode", 3, (), (), ()).key
        ('decode', 3)
        """
        return self.engine_id, self.rank

    @property
    def label(self) -> str:
        """``engine_id/rank``, by which messages name a worker."""
        return label_of(self.key)

    def __str__(self) -> str:
        views = count(len(self.views), "view")
        tensors = count(len({view.name for view in self.views}), "tensor")
        regions = count(len(self.regions), "region")
        groups = count(len(self.groups), "group")
        return f"{self.label}: {views} of {tensors} in {regions}, {groups}"

    def __repr__(self) -> str:
        return f"<Worker {self}>"


def _device(region: Region) -> tuple[str, int]:
    return region.memory, region.device_id


def _distances(joined: Mapping[str, _RegionOffset]) -> dict[str, int]:
    """Return the distance of each region from the first one of its chain."""
    return {region: offset.distance_bytes for region, offset in joined.items()}


def checked_names(values: Iterable[str], *workers: Worker) -> tuple[str, ...]:
    """Return the names of tensors that are not transferred.

    Each must be the name of a tensor of some of ``workers``: others would be left out by mistake,
    or are misspelled. Raises ``NAME``.
    """
    names = members(str, values, "not_transferred")
    tensors = itertools.chain.from_iterable(worker.tensors for worker in workers)
    known_names = dict.fromkeys(tensors)
    for label in names:
        if label not in known_names:
            stages = "a rank without the tensor, as of another stage, need not leave it out"
            raise KVPlanError(
                "NAME",
                "leave out a tensor",
                expected="the name of a tensor of some worker in not_transferred",
                got=shown(label),
                hint=meant(label, known_names) or stages,
                name=label,
            )
    return names
