"""Parts of requests on their way: asked of plans in any form, copied spec by spec, complete when all workers say so.

Of two values for both sides, the destination's is first.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import attrs

from kvplan import Blocks, FakeMemory, MeshPlan, ReadSpec, tails
from kvplan.describe.blocks import Tokens
from kvplan.describe.worker import Key
from property_tests.allocator import NULL, Allocator
from property_tests.serving import FULL, STATE, Engine, Seat, Spans
from property_tests.shadow import END

NULLS, ORDINALS, RUN, NEEDED = range(4)
"""Forms of a block table: all blocks, between null blocks or by ordinals in any order; or the run of blocks that holds
those asked for, all of it or from the first of those on."""


def table(blocks: Mapping[int, int], asked: Iterable[int], form: int) -> Blocks:
    """A request's blocks as a table that speaks of those ``asked`` for, by ordinal; in a run none may be missing."""
    choice, every = random.Random(len(blocks)), sorted({*blocks, *asked})
    if form == NULLS:
        first = choice.randint(0, min(every, default=0))
        return Blocks([blocks.get(i, NULL) for i in range(first, max(every, default=-1) + 1)], first, NULL)
    if form == ORDINALS:
        some = choice.sample(sorted(blocks), len(blocks))
        return Blocks([blocks[i] for i in some], ordinals=some)
    first = last = min(asked, default=min(blocks, default=0))
    while form == RUN and first - 1 in blocks:
        first -= 1
    while last in blocks:
        last += 1
    return Blocks([blocks[i] for i in range(first, last)], first)


@attrs.frozen(eq=False)
class Request:
    """What is asked of a mesh: ranges of one text, by role. The destination wants those that it has blocks for."""

    mesh: MeshPlan
    engines: tuple[Engine, Engine]
    seats: tuple[Seat, Seat]
    spans: Spans

    @property
    def wanted(self) -> dict[str, set[int]]:
        """The positions that must be in place in the end."""
        ordinal, blocks = self.engines[0].ordinal, self.seats[0].blocks
        return {
            role: {at for at in range(*span) if ordinal[role][at] in blocks[role]} for role, span in self.spans.items()
        }

    def needed(self, side: int, role: str) -> set[int]:
        """The ordinals that a side's block table speaks of: of the whole range, or at the source of what is wanted."""
        return self.engines[side].ordinals(role, self.wanted[role] if side else range(*self.spans[role]))

    @property
    def lacks_blocks(self) -> bool:
        """Whether the source has no block for some of what is wanted."""
        return any(not self.needed(1, role) <= self.seats[1].blocks[role].keys() for role in self.spans)

    @property
    def is_offered(self) -> bool:
        """Whether the source has all that is wanted in place."""
        return all(wanted <= self.seats[1].valid[role] for role, wanted in self.wanted.items())

    def tables(self, side: int, form: int, as_one: bool) -> dict[str, Blocks]:
        """The block tables of a side, by group. Where states are asked for by no range, a destination lists those."""
        found = {}
        for role, name in self.engines[side].names.items():
            blocks = self.seats[side].blocks[role]
            if as_one and role == STATE and side == 0:
                blocks = {at: block for at, block in blocks.items() if at in self.wanted[role]}
            found[name] = table(blocks, self.needed(side, role), form)
        return found

    def bind(self, forms: tuple[int, int], as_one: bool) -> list[ReadSpec]:
        """The specs of all plans, asked for one range in all token groups or by group. Raises what bind raises."""
        tables = [self.tables(side, form, as_one) for side, form in enumerate(forms)]
        specs: list[ReadSpec] = []
        for plan in self.mesh.plans:
            near = 0 if plan.operation == "READ" else 1
            own, theirs = (
                {group.name for worker in some for group in worker.groups} for some in ([plan.local], plan.remotes)
            )
            tokens: Tokens = {name: self.spans[role] for role, name in self.engines[near].names.items() if name in own}
            specs += plan.bind(
                local={name: blocks for name, blocks in tables[near].items() if name in own},
                remote={name: blocks for name, blocks in tables[1 - near].items() if name in theirs},
                tokens=self.spans[FULL] if as_one else tokens,
            )
        return specs

    def check_tails(self, form: int) -> None:
        """Tails are the cells of all blocks of the destination behind the ranges, each once, and no others."""
        engine, seat, tables = self.engines[0], self.seats[0], self.tables(0, form, False)
        for shadow in engine.shadows:
            groups = {role: name for role, name in engine.names.items() if name in shadow.groups}
            ranges = {name: self.spans[role] for role, name in groups.items()}
            found = tails(shadow.worker, {name: tables[name] for name in ranges}, ranges)
            cells = [cell for of_tensor in found.values() for cell in shadow.cells_of(of_tensor).tolist()]
            behind: list[int] = []
            for role, name in groups.items():
                positions, owners = range(self.spans[role][1], END), seat.text.owners(role)
                behind += shadow.cells(name, seat.blocks[role], owners, positions)[0].tolist()
            assert sorted(cells) == sorted(behind)


class Way:
    """A request on its way. Blocks of both sides are in use until every worker has heard all that it awaits."""

    def __init__(self, request: Request, specs: list[ReadSpec]) -> None:
        self.request, self.specs, self.wanted = request, specs, request.wanted
        self.heard: dict[Key, list[Key]] = {worker: [] for worker in request.mesh.completions}
        self.blocks = {role: dict(blocks) for role, blocks in request.seats[0].blocks.items()}
        self.users: list[tuple[Allocator, int]] = []
        for engine, seat in zip(request.engines, request.seats, strict=True):
            for role, blocks in seat.blocks.items():
                self.users += [(engine.pools[role], engine.pools[role].share(block)) for block in blocks.values()]
        self.shadows = {shadow.worker.key: shadow for shadow in request.engines[0].shadows}
        self.pending: dict[Key, dict[int, int]] = {worker: {} for worker in self.shadows}
        for worker, shadow in self.shadows.items():
            for role, name in request.engines[0].names.items():
                owners = request.seats[0].text.owners(role)
                where, labels = shadow.cells(name, self.blocks[role], owners, self.wanted[role])
                self.pending[worker].update(zip(where.tolist(), labels.tolist(), strict=True))

    def copy(self, memory: FakeMemory, which: int, by_ids: bool) -> None:
        """Carry out one spec. It writes cells that are wanted and that none has written before; then it is told."""
        spec = self.specs.pop(which)
        memory.execute(spec, by_ids=by_ids)
        ours, theirs = spec.descriptors()
        worker, ranges = (spec.local, ours) if spec.operation == "READ" else (spec.remote, theirs)
        for cell in self.shadows[worker].cells_of(ranges).tolist():
            assert cell in self.pending[worker], f"cell {cell} of {worker} written twice, or not wanted"
            self.shadows[worker].expected[cell] = self.pending[worker].pop(cell)
        completions = self.request.mesh.completions
        if spec.remote in completions[spec.local].sends:
            self.heard[spec.remote].append(spec.local)
        else:
            assert not spec.num_bytes, f"{spec} moves bytes, and nobody is told"
        if self.knows(spec.remote):
            assert not any(other.num_bytes for other in self.specs if other.remote == spec.remote)

    def knows(self, worker: Key) -> bool:
        """Whether a worker has heard all that it awaits."""
        return sorted(self.heard[worker]) == sorted(self.request.mesh.completions[worker].awaits)

    def arrive(self) -> bool:
        """Whether all workers have heard; then everything is there, and the blocks may be given back."""
        if not all(self.knows(worker) for worker in self.heard):
            assert self.specs, "somebody still waits, though all is done"
            return False
        assert not any(self.pending.values()), "something was never written"
        assert not any(spec.num_bytes for spec in self.specs), "something would be written yet"
        engine, seat = self.request.engines[0], self.request.seats[0]
        for role, wanted in self.wanted.items():
            kept = self.blocks[role].items() & seat.blocks[role].items()
            seat.valid[role] |= {at for ordinal, _ in kept for at in wanted & engine.positions[role][ordinal]}
        seat.inbound -= 1
        engine.settle(seat)
        for pool, block in self.users:
            pool.drop(block)
        return True
