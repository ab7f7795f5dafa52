"""Workers: the regions, groups and views of one rank, checked as a whole.

Every worker satisfies the rules of validation (V) from its construction on:

- V1: Names of regions and names of groups are unique. Each view names a region and a group of its worker.
- V2: The bytes of each view, in all its blocks, lie inside its region.
- V3: In a token group the ``token`` axis has exactly ``tokens_per_block`` slots. In a state group there is none.
- V4: Views of one group share no byte, neither in one region nor in regions that overlap.
- V5: A group has at most one view of each part of a tensor. Two layers under one name break this rule.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import attrs
import numpy as np

from kvplan._arrays import Ints
from kvplan._checks import at_most, integer, members, name, settle, wrong_type
from kvplan._text import count
from kvplan.describe._overlap import describe_overlap, overlaps
from kvplan.describe.axes import MAX_SEGMENTS, most_segments
from kvplan.describe.views import TOKEN, Geometry, Group, Region, View
from kvplan.errors import KVPlanError


def _regions(values: Iterable[Region]) -> tuple[Region, ...]:
    return members(Region, values, "regions of a worker")


def _groups(values: Iterable[Group]) -> tuple[Group, ...]:
    return members(Group, values, "groups of a worker")


def _views(values: Iterable[View]) -> tuple[View, ...]:
    return members(View, values, "views of a worker")


def _extensions(value: Mapping[str, Any] | str) -> str:
    try:
        given = json.loads(value) if isinstance(value, str) else value
        made = json.dumps(given, sort_keys=True, allow_nan=False, separators=(",", ":"))
        json.dumps(given, ensure_ascii=False).encode()  # an error for half of a surrogate pair
    except (TypeError, ValueError, RecursionError):
        made = ""
    if not made.startswith("{"):
        raise wrong_type("extensions of a worker", "a mapping of JSON values", value)
    return made


def _token_axis(slots: int | None) -> str:
    return "no token axis" if slots is None else f"a token axis of {slots} slots"


_DIGIT: Final = operator.attrgetter("name", "start", "stop", "size", "stride_bytes")
_AXES: Final = operator.attrgetter("axes")
_BESIDES: Final = operator.attrgetter("dtype", "group", "num_blocks", "block_stride_bytes")


Key = tuple[str, int]
"""What identifies a worker: engine id and rank."""


def key_of(worker: Any, what: str) -> Key:
    """The key of a worker, which may itself be given."""
    if isinstance(worker, Worker):
        return worker.key
    if not isinstance(worker, tuple) or len(worker) != 2:
        raise wrong_type(what, "a Worker, or its engine id and rank", worker)
    return name(worker[0], f"engine id of {what}"), integer(worker[1], f"rank of {what}")


def label_of(key: Key) -> str:
    """``engine_id/rank``: how messages name a worker."""
    return f"{key[0]}/{key[1]}"


@attrs.frozen(repr=False)
class Worker:
    """One rank of an engine: the regions it registers, and the views it keeps in them.

    ``rank`` is unique within ``engine_id``. ``model`` is whose cache it is, in any words that engines agree on: a name,
    a revision, and whatever else changes the values in the cache, or a hash of them. Workers of two models are not
    planned together; the empty model is unknown and goes with any. ``extensions`` are your own facts for peers, which
    kvplan only passes on: a mapping of JSON values, read back as JSON text. Equal workers may differ in them. A worker
    never changes: threads may share it.

    Raises a KVPlanError for a worker that breaks one of the rules V1 to V5.

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
    model: str = ""
    extensions: str = attrs.field(default="{}", converter=_extensions, eq=False)

    def __attrs_post_init__(self) -> None:
        settle(self, "a worker", name, "engine_id")
        if not isinstance(self.model, str) or self.model:
            settle(self, "a worker", name, "model")
        settle(self, "a worker", integer, "rank")
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
            slots = view.sizes.get(TOKEN)
            if slots != group.tokens_per_block:
                raise KVPlanError(
                    "SIZE",
                    f"page view {view.name!r} of worker {self.label}",
                    expected=f"{_token_axis(group.tokens_per_block)} for group {group.name!r}",
                    got=_token_axis(slots),
                    tokens_per_block=group.tokens_per_block,
                    token_axis=slots,
                )
        number = sum(most_segments(geometry.axes) for geometry in self.geometries)
        at_most(MAX_SEGMENTS, number, "segments of axes", f"describe worker {self.label}")
        self._check_parts()
        self._check_apart()

    def _by_name(self, what: str, values: tuple[Any, ...]) -> dict[str, Any]:
        by_name: dict[str, Any] = {}
        for value in values:
            if value.name in by_name:
                raise KVPlanError(
                    "NAME",
                    f"describe worker {self.label}",
                    expected=f"each {what} name once",
                    got=f"{value.name!r} twice",
                    name=value.name,
                )
            by_name[value.name] = value
        return by_name

    def _named(self, view: View, what: str, key: str, values: dict[str, Any]) -> Any:
        if key not in values:
            raise KVPlanError(
                "NAME",
                f"place view {view.name!r} of worker {self.label}",
                expected=f"one of the {what}s {', '.join(map(repr, values))}"
                if values
                else f"a {what} of its worker",
                got=f"{key!r}",
                name=key,
            )
        return values[key]

    def _check_parts(self) -> None:
        if len({view.name for view in self.views}) == len(self.views):
            return
        known: dict[Any, View] = {}
        for view in self.views:
            part = frozenset((axis.name, axis.start, axis.stop, axis.size) for axis in view.axes)
            if known.setdefault((view.name, view.group, part), view) is not view:
                raise KVPlanError(
                    "NAME",
                    f"place view {view.name!r} of worker {self.label}",
                    expected=f"each part of a tensor once in group {view.group!r}",
                    got="two views of the same part",
                    hint="does each layer have a name of its own?",
                    name=view.name,
                )

    def _check_apart(self) -> None:
        pools: dict[tuple[str, str], list[View]] = {}
        joined = self._joined_regions()
        for view in self.views:
            pools.setdefault((joined[view.region][0], view.group), []).append(view)
        for first, second in overlaps(
            *pools.values(), apart={region: apart for region, (_, apart) in joined.items()}
        ):
            raise KVPlanError(
                "OVERLAP",
                f"place view {second.view.name!r} of worker {self.label}",
                expected=f"bytes of its own in region {second.view.region!r} for group {second.view.group!r}",
                got=describe_overlap(first, second),
                first=first.view.name,
                second=second.view.name,
                blocks=(first.block, second.block),
                bytes=(first.byte, second.byte),
            )

    def _joined_regions(self) -> dict[str, tuple[str, int]]:
        """For each region, the first region of its chain of overlapping ones, and its distance from that in bytes."""
        joined: dict[str, tuple[str, int]] = {}
        first, end, device = None, 0, ("", 0)
        for region in sorted(
            self.regions, key=lambda region: (region.memory, region.device_id, region.address)
        ):
            if (
                first is None
                or region.address >= end
                or device != (region.memory, region.device_id)
            ):
                first, end, device = region, 0, (region.memory, region.device_id)
            end = max(end, region.end)
            joined[region.name] = (first.name, region.address - first.address)
        return joined

    @cached_property
    def overlaid(self) -> tuple[tuple[str, str], ...]:
        """The pairs of groups with views that share bytes of a block: its id belongs to one of the two at a time.

        Views in blocks of different strides are not compared.
        """
        joined = self._joined_regions()
        apart = {region: distance for region, (_, distance) in joined.items()}
        # Views by what they may share, and by group; views of one group share no byte, rule V4.
        pools: dict[tuple[str, int], dict[str, list[View]]] = {}
        for view in self.views:
            pool = pools.setdefault((joined[view.region][0], view.block_stride_bytes), {})
            pool.setdefault(view.group, []).append(view)
        found: dict[tuple[str, str], None] = {}
        for pool in pools.values():
            for (one, ours), (other, theirs) in itertools.combinations(sorted(pool.items()), 2):
                if (one, other) not in found:
                    blocks = [attrs.evolve(view, num_blocks=1) for view in (*ours, *theirs)]
                    found.update(
                        {(one, other): None} if next(overlaps(blocks, apart=apart), None) else {}
                    )
        return tuple(found)

    @cached_property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """For each tensor name, the indices of its views in ``views``."""
        found: dict[str, list[int]] = {}
        for i, view in enumerate(self.views):
            found.setdefault(view.name, []).append(i)
        return MappingProxyType({key: tuple(indices) for key, indices in found.items()})

    @cached_property
    def _geometry(self) -> tuple[tuple[Geometry, ...], tuple[int, ...]]:
        groups = {group.name: group for group in self.groups}
        keys = list(zip(map(id, map(_AXES, self.views)), map(_BESIDES, self.views), strict=True))
        numbers: dict[Any, int] = {}
        known: dict[Any, int] = {}  # by identity of the axes tuple, which equal layers often share
        made: list[Geometry] = []
        for key, view in dict(zip(keys, self.views, strict=True)).items():
            known[key] = numbers.setdefault((*map(_DIGIT, view.axes), *key[1]), len(made))
            if known[key] == len(made):
                group = groups[view.group]
                made.append(
                    Geometry(view.axes, view.dtype, group, view.num_blocks, view.block_stride_bytes)
                )
        return tuple(made), tuple([known[key] for key in keys])

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """The distinct geometries of the views, in order of first appearance."""
        return self._geometry[0]

    @property
    def geometry_of(self) -> tuple[int, ...]:
        """For each view, the index of its geometry in :attr:`geometries`."""
        return self._geometry[1]

    @cached_property
    def places(self) -> Ints:
        """The place of each view, (views, 2) int64: the index of its region, and its offset there in bytes."""
        regions = {region.name: i for i, region in enumerate(self.regions)}
        region = [regions[view.region] for view in self.views]
        return np.array([region, [view.offset_bytes for view in self.views]], np.int64).T

    @cached_property
    def outline(self) -> tuple[Any, ...]:
        """All views with their places in the regions: equal for workers that differ in name and addresses alone."""
        names = tuple([view.name for view in self.views])
        return (
            self.model,
            self.groups,
            names,
            self.geometry_of,
            self.geometries,
            self.places.tobytes(),
        )

    @property
    def key(self) -> Key:
        """``(engine_id, rank)``: how specs and completions name a worker.

        >>> Worker("decode", 3, (), (), ()).key
        ('decode', 3)
        """
        return self.engine_id, self.rank

    @property
    def label(self) -> str:
        """``engine_id/rank``: how messages name a worker."""
        return label_of(self.key)

    def __str__(self) -> str:
        tensors = count(len({view.name for view in self.views}), "tensor")
        views, regions, groups = len(self.views), len(self.regions), len(self.groups)
        return f"{self.label}: {count(views, 'view')} of {tensors} in {count(regions, 'region')}, {count(groups, 'group')}"

    def __repr__(self) -> str:
        return f"<Worker {self}>"
