"""Prepared rows: the two descriptor tables of a pair as NIXL has them."""

from __future__ import annotations

import attrs

from kvplan import KVPlanError
from kvplan.plan import Table
from kvplan_nixl.agent import Handle


@attrs.frozen(eq=False)
class PreparedRows:
    """The rows of both tables of a pair, ``local`` and ``remote``, as NIXL has them."""

    local_table: Table
    local: Handle
    remote: Handle


def memory_kind_of(table: Table) -> str:
    """Return the kind of memory of all rows of a table. Raises ``MEMORY`` if there are several."""
    # one element for each row: the index of its region
    region_indices = set(table.region.tolist())
    kinds: list[str] = sorted({table.regions[index].memory for index in region_indices})
    if len(kinds) > 1:
        raise KVPlanError(
            "MEMORY",
            "prepare a plan",
            expected="one kind of memory on each side of a pair",
            got=" and ".join(kinds),
            hint="make one plan for each kind, with not_transferred",
            kinds=tuple(kinds),
        )
    return kinds[0]
