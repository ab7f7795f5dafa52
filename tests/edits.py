"""Plans with a deliberate fault, to test that checks find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvplan import ReadSpec, TransferPlan

Ranges = npt.NDArray[np.uint64]
Edit = Callable[[Ranges, Ranges], tuple[Ranges, Ranges]]
"""A function of local and remote descriptors, (n, 3) each: address, length, device."""


@attrs.frozen(eq=False, repr=False)
class EditedSpec(ReadSpec):
    """A spec whose descriptors are not those of its ids."""

    ranges: tuple[Ranges, Ranges] = attrs.field(kw_only=True)

    def descriptors(self) -> tuple[Ranges, Ranges]:
        """The descriptors as edited."""
        return self.ranges


@attrs.frozen(eq=False, repr=False)
class EditedPlan(TransferPlan):
    """A plan that binds every request to specs made before."""

    specs: tuple[ReadSpec, ...]

    def bind(self, **request: Any) -> tuple[ReadSpec, ...]:
        """The specs, for any request."""
        return self.specs


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}


def edited_specs(plan: TransferPlan, *specs: ReadSpec) -> EditedPlan:
    """``plan``, bound to ``specs``."""
    return EditedPlan(**_fields(plan), specs=specs)


def edited(plan: TransferPlan, edit: Edit, request: Mapping[str, Any], which: int = 0) -> EditedPlan:
    """``plan``, its request bound, and the descriptors of spec number ``which`` edited."""
    specs = list(plan.bind(**request))
    local, remote = (np.array(side) for side in specs[which].descriptors())
    specs[which] = EditedSpec(**_fields(specs[which]), ranges=edit(local, remote))
    return edited_specs(plan, *specs)
