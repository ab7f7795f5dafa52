"""Two engines that serve requests: the positions and blocks of each request, and how blocks are shared and freed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import numpy as np
from hypothesis import strategies as st

from kvplan import Blocks, Context, Group
from kvplan.testing.engines import BOTH, POOL, EngineDesign, LogicalTensor, StoredTensor, on_ranks, workers
from kvplan.verification import FakeMemory
from property_tests.allocator import Allocator, OutOfBlocksError
from property_tests.oracle import positions_of
from property_tests.shadow import END, Content, Shadow

FULL, WINDOW, STATE = "full", "window", "state"
SHAPES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (2, 2, 1), (1, 3, 1), (2, 1, 2), (1, 1, 3))
"""Tensor, context and pipeline parallel sizes."""

Spans = Mapping[str, tuple[int, int]]
"""Ranges by the role of a group."""

SHARED = (0, 8, 18)
"""The length of the common prefix of each family of requests."""


@attrs.define(eq=False)
class Text:
    """A request: its number, its family, and its length so far."""

    number: int
    family: int
    length: int = 0

    @property
    def shared(self) -> int:
        """The length of the prefix that its family shares."""
        return SHARED[self.family]

    def owners(self, role: str) -> list[int]:
        """The owner of each position's text: the family, or the request, which also owns all states."""
        shared = 0 if role == STATE else self.shared
        return [self.family] * shared + [len(SHARED) + self.number] * (END - shared)


@attrs.define(eq=False)
class Entry:
    """What an engine has of a request, by role of the group: blocks by ordinal, and the positions that are in place.

    Positions below ``reach`` are in place, or in one of the ``inbound`` transfers.
    """

    text: Text
    blocks: dict[str, dict[int, int]]
    valid: dict[str, set[int]]
    reach: int = 0
    inbound: int = 0


class Engine:
    """One engine: its workers, the expected contents of their memory, and the entries of its requests.

    Roles name groups here. A sliding window has ``window`` positions.
    """

    def __init__(self, design: EngineDesign, names: Mapping[str, str], window: int, num_blocks: int, seed: int) -> None:
        self.workers = workers(design, {name: Blocks(range(num_blocks)) for name in names.values()})
        self.names, self.window, self.shadows = dict(names), window, list[Shadow]()
        one = Allocator(num_blocks, seed)
        self.pools = {
            role: one if design.packing == POOL else Allocator(num_blocks, seed + i) for i, role in enumerate(names)
        }
        self.positions: dict[str, list[set[int]]] = {}
        self.num_whole: dict[str, int] = {}  # blocks whose positions are all below END
        self.ordinal: dict[str, dict[int, int]] = {}
        for role, name in names.items():
            slots = design.groups[name].tokens_per_block or 1
            ranks = [positions_of(group, END) for group in on_ranks(design.groups[name])]
            self.positions[role] = [
                {at for positions in ranks for at in positions[low : low + slots]} for low in range(0, END, slots)
            ]
            self.num_whole[role] = min(map(len, ranks)) // slots
            self.ordinal[role] = {at: i for i, positions in enumerate(self.positions[role]) for at in positions}
        self.entries: dict[int, Entry] = {}

    def start(self, memory: FakeMemory, content: Content) -> None:
        """Attach the memory of the workers."""
        self.shadows = [Shadow(worker, memory, content) for worker in self.workers]

    def ordinals(self, role: str, positions: Iterable[int]) -> set[int]:
        """The ordinals of the blocks that hold some positions."""
        return {self.ordinal[role][at] for at in positions}

    def sight(self, role: str, start: int, stop: int) -> range:
        """The positions in ``[start, stop)`` that the position ``stop`` still reads."""
        if role == STATE:
            return range(stop, stop + 1)
        return range(max(start, stop - self.window) if role == WINDOW else start, stop)

    def join(self, text: Text, hit: int) -> Entry:
        """An entry with up to ``hit`` positions of the family from the cache. Raises OutOfBlocksError.

        It shares whole blocks, and copies a part of a block into one of its own.
        """
        entry = Entry(text, {role: {} for role in self.names}, {role: set() for role in self.names})
        cached = [role for role in self.names if role != STATE]
        hit = min(hit, text.shared)
        while any((role, text.family, i) not in self.pools[role].blocks for role, i in self._seen(cached, hit)):
            hit -= 1
        try:
            for role, ordinal in self._seen(cached, hit):
                pool = self.pools[role]
                if self.positions[role][ordinal] <= set(range(hit)):
                    entry.blocks[role][ordinal] = pool.share(pool.blocks[role, text.family, ordinal])
            for role in cached:
                self.reserve(entry, role, self.ordinals(role, self.sight(role, 0, hit)))
                self.put(entry, role, range(hit))
        except OutOfBlocksError:
            self.leave(entry)
            raise
        entry.reach = hit
        self.entries[text.number] = entry
        return entry

    def _seen(self, roles: Iterable[str], hit: int) -> list[tuple[str, int]]:
        """The blocks that a prefix of ``hit`` positions needs."""
        return [(role, i) for role in roles for i in self.ordinals(role, self.sight(role, 0, hit))]

    def reserve(self, entry: Entry, role: str, ordinals: Iterable[int]) -> None:
        """Take blocks at the ordinals that have none. Raises OutOfBlocksError, after taking some of them perhaps."""
        for ordinal in sorted(ordinals):
            if ordinal not in entry.blocks[role]:
                entry.blocks[role][ordinal] = self.pools[role].take()

    def make_room(self, entry: Entry, spans: Spans, ahead: int) -> None:
        """Take blocks for ranges by role, and ``ahead`` more of tokens. Raises OutOfBlocksError, as reserve does."""
        for role, span in spans.items():
            self.reserve(entry, role, self.ordinals(role, range(*span)))
            if role != STATE and entry.blocks[role]:
                last = max(entry.blocks[role])
                self.reserve(entry, role, range(last + 1, min(last + 1 + ahead, self.num_whole[role])))

    def put(self, entry: Entry, role: str, positions: Iterable[int]) -> None:
        """Let the engine itself write positions that it has blocks for."""
        new = {at for at in positions if self.ordinal[role][at] in entry.blocks[role]} - entry.valid[role]
        shared = {i for i, block in entry.blocks[role].items() if block in self.pools[role].keys}
        for shadow in self.shadows:
            own = {i: block for i, block in entry.blocks[role].items() if i not in shared}
            shadow.fill(*shadow.cells(self.names[role], own, entry.text.owners(role), new))
        entry.valid[role] |= new

    def compute(self, entry: Entry, count: int) -> None:
        """Compute more positions of a request. Raises OutOfBlocksError, and then computes none."""
        old, new = entry.text.length, entry.text.length + count
        for role in self.names:
            self.reserve(entry, role, self.ordinals(role, self.sight(role, old, new)))
        for role in self.names:
            self.put(entry, role, self.sight(role, 0, new) if role == STATE else range(old, new))
        entry.text.length = entry.reach = new
        self.settle(entry)

    def settle(self, entry: Entry) -> None:
        """Cache whole blocks of the family's text. Drop blocks that a window has passed, and older states."""
        for role, blocks in entry.blocks.items():
            passed = []
            for ordinal, block in sorted(blocks.items()):
                here = self.positions[role][ordinal]
                if role != STATE and max(here) < entry.text.shared and here <= entry.valid[role]:
                    self.pools[role].cache((role, entry.text.family, ordinal), block)
                if role == WINDOW and max(here) < entry.reach - self.window:
                    passed.append(ordinal)
            for ordinal in passed if role == WINDOW else sorted(blocks)[:-2] if role == STATE else ():
                self.pools[role].drop(blocks.pop(ordinal))
                entry.valid[role] -= self.positions[role][ordinal]

    def leave(self, entry: Entry) -> None:
        """Free all blocks of an entry."""
        for role, blocks in entry.blocks.items():
            for block in blocks.values():
                self.pools[role].drop(block)
            blocks.clear()
            entry.valid[role].clear()
        if self.entries.get(entry.text.number) is entry:
            del self.entries[entry.text.number]

    def check(self) -> None:
        """Assert that memory is as expected, with all positions of every entry that are in place."""
        for shadow in self.shadows:
            shadow.check()
            for entry in self.entries.values():
                for role, name in self.names.items():
                    where, labels = shadow.cells(name, entry.blocks[role], entry.text.owners(role), entry.valid[role])
                    assert np.array_equal(shadow.expected[where], labels), f"{entry.text} lost some of {role}"


def _choices(*radices: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*(st.integers(0, radix - 1) for radix in radices))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Engine, Engine]:
    """A prefill and a decode engine of one small model with a full, a sliding and perhaps a state group.

    Half of them have one dense layout with tokens outermost or innermost, which moves in long runs. Others have any.
    """
    dense, states, window, kv, heads = draw(_choices(4, 2, 7, 2, 4))
    shapes = {"dim": 2, **({"kv": 2} if kv else {}), "head": heads + 1}
    turn = (0, len(shapes), None, None)[dense]
    tensors = [
        LogicalTensor("layers.0", True, shapes, "uint8", 0, BOTH),
        LogicalTensor("layers.1", True, shapes, "bfloat16", 1, BOTH),
    ]
    tensors += [LogicalTensor("layers.2", False, {"dim": 3}, "bfloat16", 2, BOTH)][:states]
    prefill, decode = (draw(_engine(name, tensors, window + 1, turn)) for name in ("prefill", "decode"))
    return prefill, decode


@st.composite
def _engine(draw: st.DrawFn, engine_id: str, tensors: list[LogicalTensor], window: int, dense: int | None) -> Engine:
    shape, packing, digits, gap, base, devices = draw(_choices(len(SHAPES), 4, 2, 2, 4, 2))
    renamed, more, seed = draw(_choices(2, 3, 99))
    tp, cp, pp = SHAPES[shape]
    roles = (FULL, WINDOW, STATE)[: len(tensors)]
    names = {role: f"{engine_id}.{role}" if renamed else role for role in roles}
    stored = []
    for role, tensor in zip(roles, tensors, strict=True):
        slots, interleave, alone, stage, turn, order, pads, split = draw(_choices(6, 3, 4, pp, 4, 720, 81, 4))
        context = Context(0, cp, interleave + 1) if alone < 3 and tensor.paged else Context()
        if dense is not None:
            slots, turn, order, pads, split = slots % 2, dense, 0, 0, 0
        group = Group(names[role], (4, 2, 4, 3, 1, 5)[slots] if tensor.paged else None, context)
        stored.append(StoredTensor(tensor, group, stage, turn, order, pads, ("", "kv", "head", "dim")[split], ""))
    design = EngineDesign(engine_id, tp, cp, pp, tuple(stored), packing, bool(digits), gap, base, devices, 0)
    return Engine(design, names, window, (24, 60, 120)[more], seed)
