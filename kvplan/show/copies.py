"""Copies: bytes of one box on both sides, and what they are by the views of either side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from kvplan._text import count, size, sizes
from kvplan.describe.axes import Axis
from kvplan.describe.views import TOKEN, Group, View
from kvplan.describe.worker import Worker
from kvplan.plan.align import position_of, slots
from kvplan.show.bands import Box, Step
from kvplan.show.pages import Page

POSITION: Final = "position"
"""The axis of positions, which tokens of both sides have in common."""


@attrs.frozen
class End:
    """One side of a copy: a box of the page that block ``ordinal`` of a request, of id ``block``, has on a worker."""

    worker: Worker = attrs.field(repr=False)
    page: Page = attrs.field(repr=False)
    ordinal: int
    block: int
    box: Box

    @property
    def group(self) -> Group:
        """The group of the page's block table."""
        return next(group for group in self.worker.groups if group.name == self.page.group)

    @property
    def region_offset(self) -> int:
        """Where the copy begins in its region, in bytes, for the first of the page's layers."""
        return self.page.places[0][1] + self.block * self.page.block_stride_bytes + self.box.start

    @property
    def region(self) -> str:
        """The region of the first of the page's layers."""
        return self.worker.regions[self.page.places[0][0]].name

    @property
    def address(self) -> int:
        """Where the copy begins in memory."""
        return self.worker.regions[self.page.places[0][0]].address + self.region_offset

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the box, those along slots told in positions; outer digits of slots left out."""
        slot = [step for step in self.box.steps if step.axis == TOKEN][-1:]
        return tuple(
            self._position(step) if step.axis == TOKEN else step
            for step in self.box.steps
            if step.axis != TOKEN or step in slot
        )

    @property
    def positions(self) -> Step:
        """The positions that the block holds, of a token group."""
        return self._position(Step(TOKEN, 0, slots(self.group)))

    @property
    def coordinates(self) -> str:
        """What the bytes are, in words: tensors of the first of the page's layers, and the interval on each axis."""
        return "; ".join(f"{self.page.tensors[i]}: {self._intervals(self.page.views[i])}" for i in self.box.views)

    def _intervals(self, view: View) -> str:
        held = {step.axis: step for step in self.steps}
        found = []
        for axis, whole in view.sizes.items():
            if axis == TOKEN:
                step = held.get(POSITION) or self.positions
                found.append(f"position {step.name or f'[{step.start}, {step.stop})'}")
                continue
            low, high = interval([part for part in view.axes if part.name == axis])
            if axis in held:
                low, high = held[axis].start, held[axis].stop
            found.append(f"{axis} [{low}, {high}) of {whole}")
        return ", ".join(found)

    def __str__(self) -> str:
        which = f" block {self.ordinal}" if self.group.tokens_per_block is not None else ""
        return f"{self.worker.label}{which}, block id {self.block}, region {self.region} + {self.region_offset}"

    def _position(self, step: Step) -> Step:
        group, first = self.group, self.ordinal * slots(self.group)
        low, high = (position_of(group, first + slot) for slot in (step.start, step.stop - 1))
        apart = high - low > step.stop - 1 - step.start
        return Step(POSITION, low, high + 1, f"{low}..{high}" if apart else "")


@attrs.frozen
class Copy:
    """Bytes that one descriptor moves between two boxes; ``run_bytes`` is how long the whole descriptor is.

    ``remote_index`` says which of the plan's remotes it is.
    """

    local: End
    remote: End
    remote_index: int
    run_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of this copy."""
        return self.local.box.stop - self.local.box.start

    def told(self, operation: str) -> str:
        """Three lines: what the bytes are, from where to where they go, and how long the descriptor is."""
        source, destination = (self.remote, self.local) if operation == "READ" else (self.local, self.remote)
        moved = f"{count(self.num_bytes, 'byte')} from {source}"
        run = f"descriptor of {count(self.run_bytes, 'byte')}"
        return f"{self.local.coordinates}\n{moved}\nto {destination}\n{run}"


def interval(digits: Sequence[Axis]) -> tuple[int, int]:
    """The coordinates from the first to the last that the digits of an axis hold, outer digit first."""
    low = high = 0
    for digit in digits:
        low, high = low * digit.size + digit.start, high * digit.size + digit.stop - 1
    return low, high + 1


@attrs.frozen
class Panel:
    """The copies of equal layers, told for the first: ``tensors`` names all. ``tokens`` are the positions looked at.

    ``sampled`` says that the blocks are those of no request in particular, so that their ids mean nothing.
    """

    tensors: tuple[str, ...]
    num_layers: int
    tokens: tuple[int, int] | None
    copies: tuple[Copy, ...] = attrs.field(repr=False)
    sampled: bool = True

    @property
    def facts(self) -> str:
        """How much moves, in words."""
        lengths = [copy.num_bytes for copy in self.copies]
        copies = count(len(lengths), "copy")
        moved = f"{size(sum(lengths))} in {copies} of {sizes(min(lengths), max(lengths))}"
        where = f"positions [{self.tokens[0]}, {self.tokens[1]})" if self.tokens else "one state"
        layers = f" of one of {self.num_layers} equal layers" if self.num_layers > 1 else ""
        return f"{where}{layers}: {moved}"
