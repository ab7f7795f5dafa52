"""Checks of the arguments of planning, made before anything is planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvplan._checks import integer, members, name, wrong_type
from kvplan.describe.views import Region
from kvplan.describe.worker import Worker
from kvplan.errors import KVPlanError

MAX_REPLICAS: Final = 1 << 10
"""The most sources among which a replica set may be divided."""


def checked_workers(what: str, values: Iterable[Worker], *others: Worker) -> tuple[Worker, ...]:
    """``values`` as a tuple of workers. They and ``others`` must all differ."""
    workers = members(Worker, values, what)
    times = Counter(worker.label for worker in (*members(Worker, others, "local"), *workers))
    label, count = max(times.items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise KVPlanError(
            "WORKER", f"plan with {what}", expected="each worker once", got=f"{label} {count} times", worker=label
        )
    return workers


def checked_replicas(value: int) -> int:
    return integer(value, "replicas", low=1, high=MAX_REPLICAS)


def checked_names(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise wrong_type("not_transferred", "a sequence of names", values)
    return members(str, values, "not_transferred")


def checked_staging(local: Worker, value: str) -> Region:
    """The region that a worker has set aside for staging; it must exist, and no view may use its bytes."""
    key, regions = name(value, "staging"), {region.name: region for region in local.regions}
    if key not in regions:
        raise KVPlanError(
            "NAME",
            f"stage in a region of {local.label}",
            expected=f"one of {', '.join(map(repr, regions)) or 'none'}",
            got=f"{key!r}",
            name=key,
        )
    region = regions[key]
    for view in local.views:
        other = regions[view.region]
        apart = (
            other.address + other.size_bytes <= region.address or region.address + region.size_bytes <= other.address
        )
        if not apart and (other.memory, other.device_id) == (region.memory, region.device_id):
            raise KVPlanError(
                "OVERLAP",
                f"stage in region {key!r} of {local.label}",
                expected="memory that no view has",
                got=f"view {view.name!r} in region {other.name!r}",
                region=key,
                view=view.name,
            )
    return region
