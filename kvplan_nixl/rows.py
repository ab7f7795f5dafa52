"""Prepared rows: the two descriptor tables of a pair as NIXL has them."""

from __future__ import annotations

import attrs

from kvplan import KVPlanError
from kvplan.plan import Table
from kvplan_nixl.agent import Handle


@attrs.frozen(eq=False)
class Rows:
    """The prepared rows of both tables of a pair."""

    local_table: Table
    local: Handle
    remote: Handle


def kind_of(table: Table) -> str:
    """The kind of memory of all rows of a table. Raises ``MEMORY`` where there are several."""
    kinds: list[str] = sorted({table.regions[i].memory for i in set(table.region.tolist())})
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
