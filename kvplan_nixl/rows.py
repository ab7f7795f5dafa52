"""Rows: what NIXL has of a pair of tables."""

from __future__ import annotations

import attrs

from kvplan.errors import KVPlanError
from kvplan.plan.rows import Table
from kvplan_nixl.agent import Prepared


@attrs.frozen(eq=False)
class Rows:
    """The prepared rows of a pair of tables."""

    local_table: Table
    local: Prepared
    remote: Prepared


def kind_of(table: Table) -> str:
    """The memory kind that all rows of a table are in. Raises ``MEMORY`` where they are in several."""
    kinds: list[str] = sorted({table.regions[i].memory for i in set(table.region.tolist())})
    if len(kinds) > 1:
        raise KVPlanError(
            "MEMORY",
            "prepare a plan",
            expected="one kind of memory on each side of a pair",
            got=" and ".join(kinds),
            hint="plan the tensors of each kind apart, with not_transferred",
            kinds=tuple(kinds),
        )
    return kinds[0]
