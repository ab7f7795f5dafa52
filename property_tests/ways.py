"""Transfers of parts of requests: bound in any form, copied spec by spec, complete when all notices are in.

Of two values for both sides, the destination's is first.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import attrs

from kvplan import Blocks, MeshPlan, ReadSpec, tails
from kvplan.describe.blocks import Tokens
from kvplan.describe.worker import Key
from kvplan.verification import FakeMemory
from property_tests.allocator import NULL, Allocator
from property_tests.serving import FULL, STATE, Engine, Entry, Spans
from property_tests.shadow import END

NULLS, ORDINALS, RUN, NEEDED = range(4)
"""Forms of a block table. NULLS: all blocks, with null blocks between them. ORDINALS: all blocks by ordinals, in any
order. RUN: the consecutive blocks around the requested ones. NEEDED: the same from the first requested one on."""


def table(blocks: Mapping[int, int], asked: Iterable[int], form: int) -> Blocks:
    """A request's blocks as a table of a form, for the ordinals ``asked``. In a run none may be missing."""
    choice, every = random.Random(len(blocks)), sorted({*blocks, *asked})
    if form == NULLS:
        first = choice.randint(0, min(every, default=0))
        return Blocks([blocks.get(i, NULL) for i in range(first, max(every, default=-1) + 1)], first, NULL)
    if form == ORDINALS:
        some = choice.sample(sorted(blocks), len(blocks))
        return Blocks([blocks[i] for i in some], ordinals=some, listed=(0, max(every, default=-1) + 1))
    first = last = min(asked, default=min(blocks, default=0))
    while form == RUN and first - 1 in blocks:
        first -= 1
    while last in blocks:
        last += 1
    return Blocks([blocks[i] for i in range(first, last)], first)


@attrs.frozen(eq=False)
class Request:
    """A request to a mesh plan: ranges of one text, by role. The destination wants the parts that it has blocks for."""

    mesh: MeshPlan
    engines: tuple[Engine, Engine]
    entries: tuple[Entry, Entry]
    spans: Spans

    @property
    def wanted(self) -> dict[str, set[int]]:
        """The positions that must be in place at the end."""
        ordinal, blocks = self.engines[0].ordinal, self.entries[0].blocks
        return {
            role: {at for at in range(*span) if ordinal[role][at] in blocks[role]} for role, span in self.spans.items()
        }

    def needed(self, side: int, role: str) -> set[int]:
        """The ordinals in a side's block table: those of the range, or at the source those of the wanted positions."""
        return self.engines[side].ordinals(role, self.wanted[role] if side else range(*self.spans[role]))

    @property
    def lacks_blocks(self) -> bool:
        """Whether the source lacks a block for a wanted position."""
        return any(not self.needed(1, role) <= self.entries[1].blocks[role].keys() for role in self.spans)

    @property
    def is_offered(self) -> bool:
        """Whether the source has all wanted positions in place."""
        return all(wanted <= self.entries[1].valid[role] for role, wanted in self.wanted.items())

    def tables(self, side: int, form: int, as_one: bool) -> dict[str, Blocks]:
        """The block tables of a side, by group. Without a range for states, a destination lists the wanted states."""
        found = {}
        for role, name in self.engines[side].names.items():
            blocks = self.entries[side].blocks[role]
            if as_one and role == STATE and side == 0:
                blocks = {at: block for at, block in blocks.items() if at in self.wanted[role]}
            found[name] = table(blocks, self.needed(side, role), form)
        return found

    def bind(self, forms: tuple[int, int], as_one: bool) -> list[ReadSpec]:
        """The specs of all plans, for one range in all token groups or one for each group. Raises what bind raises."""
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
        """Assert that tails are the cells of the destination's blocks after the ranges, each once, and no others."""
        engine, entry, tables = self.engines[0], self.entries[0], self.tables(0, form, False)
        for shadow in engine.shadows:
            groups = {role: name for role, name in engine.names.items() if name in shadow.groups}
            ranges = {name: self.spans[role] for role, name in groups.items()}
            found = tails(shadow.worker, {name: tables[name] for name in ranges}, ranges)
            cells = [cell for of_tensor in found.values() for cell in shadow.cells_of(of_tensor).tolist()]
            behind: list[int] = []
            for role, name in groups.items():
                positions, owners = range(self.spans[role][1], END), entry.text.owners(role)
                behind += shadow.cells(name, entry.blocks[role], owners, positions)[0].tolist()
            assert sorted(cells) == sorted(behind)


class Way:
    """A request under way. Its blocks on both sides are in use until every worker has all notices that it awaits."""

    def __init__(self, request: Request, specs: list[ReadSpec]) -> None:
        self.request, self.specs, self.wanted = request, specs, request.wanted
        self.notices: dict[Key, list[Key]] = {worker: [] for worker in request.mesh.completions}
        self.blocks = {role: dict(blocks) for role, blocks in request.entries[0].blocks.items()}
        self.users: list[tuple[Allocator, int]] = []
        for engine, entry in zip(request.engines, request.entries, strict=True):
            for role, blocks in entry.blocks.items():
                self.users += [(engine.pools[role], engine.pools[role].share(block)) for block in blocks.values()]
        self.shadows = {shadow.worker.key: shadow for shadow in request.engines[0].shadows}
        self.pending: dict[Key, dict[int, int]] = {worker: {} for worker in self.shadows}
        for worker, shadow in self.shadows.items():
            for role, name in request.engines[0].names.items():
                owners = request.entries[0].text.owners(role)
                where, labels = shadow.cells(name, self.blocks[role], owners, self.wanted[role])
                self.pending[worker].update(zip(where.tolist(), labels.tolist(), strict=True))

    def copy(self, memory: FakeMemory, which: int, by_ids: bool) -> None:
        """Execute one spec, which must write wanted cells that no other has written, and notify its remote worker."""
        spec = self.specs.pop(which)
        memory.execute(spec, by_ids=by_ids)
        ours, theirs = spec.descriptors()
        worker, ranges = (spec.local, ours) if spec.operation == "READ" else (spec.remote, theirs)
        for cell in self.shadows[worker].cells_of(ranges).tolist():
            assert cell in self.pending[worker], f"cell {cell} of {worker} written twice, or not wanted"
            self.shadows[worker].expected[cell] = self.pending[worker].pop(cell)
        completions = self.request.mesh.completions
        if spec.remote in completions[spec.local].sends:
            self.notices[spec.remote].append(spec.local)
        else:
            assert not spec.num_bytes, f"{spec} moves bytes, and sends no notice"
        if self.is_notified(spec.remote):
            assert not any(other.num_bytes for other in self.specs if other.remote == spec.remote)

    def is_notified(self, worker: Key) -> bool:
        """Whether a worker has all notices that it awaits."""
        return sorted(self.notices[worker]) == sorted(self.request.mesh.completions[worker].awaits)

    def arrive(self) -> bool:
        """Whether all notices are in. Then everything is in place, and the blocks are freed."""
        if not all(self.is_notified(worker) for worker in self.notices):
            assert self.specs, "a worker still waits after the last spec"
            return False
        assert not any(self.pending.values()), "a wanted cell was never written"
        assert not any(spec.num_bytes for spec in self.specs), "a spec with bytes is left"
        engine, entry = self.request.engines[0], self.request.entries[0]
        for role, wanted in self.wanted.items():
            kept = self.blocks[role].items() & entry.blocks[role].items()
            entry.valid[role] |= {at for ordinal, _ in kept for at in wanted & engine.positions[role][ordinal]}
        entry.inbound -= 1
        engine.settle(entry)
        for pool, block in self.users:
            pool.drop(block)
        return True
