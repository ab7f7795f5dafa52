"""Requests in flight: two engines compute, send, share, evict and reuse blocks, and every byte is as expected.

The oracle's elements give the expected contents of every cell. Copies run late, in any order, mixed with those of other
requests, while blocks that notices have freed are reused.
"""

from __future__ import annotations

import random
from typing import Literal

import attrs
import pytest
from hypothesis import Phase, event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplan import KVPlanError, MeshPlan, plan_mesh
from kvplan.verification import FakeMemory
from property_tests import fewer
from property_tests.allocator import OutOfBlocksError
from property_tests.serving import FULL, SHARED, STATE, WINDOW, Engine, Entry, Text, pairs
from property_tests.shadow import Content
from property_tests.ways import RUN, Request, Way

LONGEST = 40
"""The longest request, in positions."""

Operation = Literal["READ", "WRITE"]
ANY = st.integers(0, 9)
"""An index into what there is, modulo its length."""

COUNTS = st.sampled_from([1, 5, 2, 9, 3, 16, 12, 0])
AHEAD = st.integers(0, 2)
FORMS = st.tuples(st.integers(0, 3), st.integers(0, 3))
FAMILIES = st.integers(0, len(SHARED) - 1)


class Serving(RuleBasedStateMachine):
    """A prefill and a decode engine, their requests, and one memory for all of them."""

    engines: tuple[Engine, ...] = ()

    @initialize(engines=pairs(), arrivals=st.lists(st.tuples(FAMILIES, COUNTS, COUNTS), min_size=2, max_size=4))
    def start(self, engines: tuple[Engine, Engine], arrivals: list[tuple[int, int, int]]) -> None:
        """New engines, and their first requests."""
        self.engines, self.texts, self.ways = engines, list[Text](), list[Way]()
        self.meshes: dict[tuple[Engine, Operation], MeshPlan] = {}
        workers = [worker for engine in engines for worker in engine.workers]
        self.memory = FakeMemory(workers, label_bytes=8, poison=(1 << 64) - 1)
        content = Content()
        for engine in engines:
            engine.start(self.memory, content)
        for arrival in arrivals:
            self.arrive(*arrival)

    def teardown(self) -> None:
        """Complete all transfers."""
        if self.engines:
            while self.ways:
                self.copy(0, 0, False)
            self.memory_holds_what_it_should()
            self.memory.close()

    @rule(family=FAMILIES, count=COUNTS, hit=COUNTS)
    def arrive(self, family: int, count: int, hit: int) -> None:
        """A new request: prefill takes its prefix from the cache, and computes some more positions, perhaps none."""
        text = Text(len(self.texts), family)
        self.texts.append(text)
        try:
            entry = self.engines[0].join(text, hit)
            text.length = entry.reach
            self.engines[0].compute(entry, count)
        except OutOfBlocksError:
            event("out of blocks")

    @rule(which=ANY, count=COUNTS)
    def compute(self, which: int, count: int) -> None:
        """A chunk of prefill, or some steps of decode, at an engine that has all earlier positions."""
        able = [
            (engine, entry)
            for engine in self.engines
            for entry in engine.entries.values()
            if not entry.inbound and entry.reach == entry.text.length <= LONGEST - count
            if entry.valid[WINDOW].issuperset(engine.sight(WINDOW, 0, entry.reach))
        ]
        if able and count:
            engine, entry = able[which % len(able)]
            try:
                engine.compute(entry, count)
            except OutOfBlocksError:
                event("out of blocks")

    @rule(which=ANY, count=COUNTS, ahead=AHEAD, forms=FORMS, as_one=st.booleans())
    def read(self, which: int, count: int, ahead: int, forms: tuple[int, int], as_one: bool) -> None:
        """Bind a read of the next positions of a request by the engine that lacks them. No byte moves yet."""
        self.send("READ", which, count, ahead, forms, as_one)

    @rule(which=ANY, count=COUNTS, ahead=AHEAD, forms=FORMS, as_one=st.booleans())
    def write(self, which: int, count: int, ahead: int, forms: tuple[int, int], as_one: bool) -> None:
        """Bind a write of the next positions by the engine that has them."""
        self.send("WRITE", which, count, ahead, forms, as_one)

    def send(
        self, operation: Operation, which: int, count: int, ahead: int, forms: tuple[int, int], as_one: bool
    ) -> None:
        """Bind the next positions of a request for the engine that lacks them, or none at all."""
        able = [
            ((other, engine), entry)
            for engine, other in (self.engines, self.engines[::-1])
            for number, entry in engine.entries.items()
            if not count or number not in other.entries or other.entries[number].reach < entry.reach
        ]
        if not able:
            return
        engines, theirs = able[which % len(able)]
        try:
            ours = engines[0].entries.get(theirs.text.number) or engines[0].join(
                theirs.text, min(count, theirs.text.length)
            )
            spans = self.spans(engines, (ours, theirs), count)
            engines[0].make_room(ours, spans, ahead)
        except OutOfBlocksError:
            event("out of blocks")
            return
        if (engines[0], operation) not in self.meshes:
            self.meshes[engines[0], operation] = plan_mesh(engines[0].workers, engines[1].workers, operation)
        request = Request(self.meshes[engines[0], operation], engines, (ours, theirs), spans)
        request.check_tails(forms[0] % RUN)
        self.ways.append(self.bound(request, forms, as_one))
        ours.reach, ours.inbound = spans[FULL][1], ours.inbound + 1
        event(f"{operation} {'some positions' if any(request.wanted.values()) else 'nothing'}")

    def bound(self, request: Request, forms: tuple[int, int], as_one: bool) -> Way:
        """The transfer of a request: ranges by group, or one range for all where the source has all its positions."""
        whole = attrs.evolve(request, spans={**request.spans, WINDOW: request.spans[FULL]})
        gaps = forms[0] % RUN, forms[1]
        if as_one and whole.is_offered:
            return Way(whole, whole.bind(gaps, True))
        if as_one and whole.lacks_blocks:
            with pytest.raises(KVPlanError, match="BLOCKS"):
                whole.bind(gaps, True)
            event("refused")
        return Way(request, request.bind(forms, False))

    def spans(
        self, engines: tuple[Engine, Engine], entries: tuple[Entry, Entry], count: int
    ) -> dict[str, tuple[int, int]]:
        """Up to ``count`` positions that the destination lacks. Of a window, those that it still reads and can get."""
        ours, theirs = entries
        start = stop = ours.reach
        while stop < start + count and stop in theirs.valid[FULL]:
            stop += 1
        low = engines[0].sight(WINDOW, start, stop).start
        while not theirs.valid[WINDOW].issuperset(range(low, stop)):
            low += 1
        spans = {FULL: (start, stop), WINDOW: (low, stop)}
        if STATE in engines[0].names:
            new = stop in theirs.valid[STATE] and stop not in ours.blocks[STATE]
            spans[STATE] = (stop, stop + new)
        return spans

    @rule(which=ANY, spec=ANY, by_ids=st.booleans())
    def copy(self, which: int, spec: int, by_ids: bool) -> None:
        """Execute one spec. With the last awaited notice, positions are in place."""
        if self.ways:
            way = self.ways[which % len(self.ways)]
            if way.specs:
                way.copy(self.memory, spec % len(way.specs), by_ids)
            if way.arrive():
                self.ways.remove(way)

    @rule(which=ANY, order=st.randoms(use_true_random=False))
    def copy_all(self, which: int, order: random.Random) -> None:
        """Execute all specs of one transfer, in any order."""
        if self.ways:
            way = self.ways[which % len(self.ways)]
            order.shuffle(way.specs)
            while way in self.ways:
                self.copy(self.ways.index(way), 0, order.random() < 0.5)

    @rule(which=ANY, where=st.integers(0, 1))
    def leave(self, which: int, where: int) -> None:
        """An engine drops a request in any state. Its blocks are free when no transfer uses them."""
        entries = list(self.engines[where].entries.values())
        if entries:
            self.engines[where].leave(entries[which % len(entries)])

    @rule(where=st.integers(0, 1), role=st.sampled_from([FULL, WINDOW]), which=ANY)
    def evict(self, where: int, role: str, which: int) -> None:
        """Free an unused cached block."""
        self.engines[where].pools[role].evict(which)

    @invariant()
    def memory_holds_what_it_should(self) -> None:
        """Check every byte of both engines: requests, caches, free blocks and gaps."""
        for engine in self.engines:
            engine.check()


TestServing = Serving.TestCase
TestServing.settings = fewer(
    3,
    stateful_step_count=40,
    phases=[phase for phase in Phase if phase != Phase.explain],  # shrinking takes minutes as it is
)
