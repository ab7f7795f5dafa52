"""Two engines that serve requests: what each keeps of a request, and which blocks it takes, shares and gives back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import numpy as np
from hypothesis import strategies as st

from kvplan import Blocks, Context, FakeMemory, Group
from kvplan.testing.engines import BOTH, POOL, Kept, Logical, Side, held, workers
from property_tests.allocator import Allocator, OutOfBlocksError
from property_tests.shadow import END, Content, Shadow

FULL, WINDOW, STATE = "full", "window", "state"
SHAPES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (2, 2, 1), (1, 3, 1), (2, 1, 2), (1, 1, 3))
"""Tensor, context and pipeline parallel sizes."""

Spans = Mapping[str, tuple[int, int]]
"""Ranges by the role of a group."""

SHARED = (0, 8, 18)
"""How many positions the requests of each family begin with together."""


@attrs.define(eq=False)
class Text:
    """A request: its number, its family, and how many positions it has so far."""

    number: int
    family: int
    length: int = 0

    @property
    def shared(self) -> int:
        """How many positions it may have in common with its family."""
        return SHARED[self.family]

    def owners(self, role: str) -> list[int]:
        """Whose text each position is: the family's, or the request's own; states are its own."""
        shared = 0 if role == STATE else self.shared
        return [self.family] * shared + [len(SHARED) + self.number] * (END - shared)


@attrs.define(eq=False)
class Seat:
    """What an engine keeps of a request: by role of the group, blocks by ordinal and the positions that are in place.

    Positions below ``reach`` are in place or on their way, on ``inbound`` ways.
    """

    text: Text
    blocks: dict[str, dict[int, int]]
    valid: dict[str, set[int]]
    reach: int = 0
    inbound: int = 0


class Engine:
    """One engine: its workers, what their memory should hold, and the seats of its requests.

    Groups are named by their roles here; a sliding window reaches back ``window`` positions.
    """

    def __init__(self, side: Side, names: Mapping[str, str], window: int, num_blocks: int, seed: int) -> None:
        self.workers = workers(side, {name: Blocks(range(num_blocks)) for name in names.values()})
        self.names, self.window, self.shadows = dict(names), window, list[Shadow]()
        one = Allocator(num_blocks, seed)
        self.pools = {
            role: one if side.packing == POOL else Allocator(num_blocks, seed + i) for i, role in enumerate(names)
        }
        self.positions: dict[str, list[set[int]]] = {}
        self.ordinal: dict[str, dict[int, int]] = {}
        for role, name in names.items():
            slots = side.groups[name].tokens_per_block or 1
            ranks = held(side.groups[name], END)
            self.positions[role] = [
                {at for positions in ranks for at in positions[low : low + slots]} for low in range(0, END, slots)
            ]
            self.ordinal[role] = {at: i for i, positions in enumerate(self.positions[role]) for at in positions}
        self.seats: dict[int, Seat] = {}

    def start(self, memory: FakeMemory, content: Content) -> None:
        """Take the memory of the workers."""
        self.shadows = [Shadow(worker, memory, content) for worker in self.workers]

    def ordinals(self, role: str, positions: Iterable[int]) -> set[int]:
        """The ordinals of the blocks that have some positions."""
        return {self.ordinal[role][at] for at in positions}

    def sight(self, role: str, start: int, stop: int) -> range:
        """Which of the positions ``[start, stop)`` are still of use when the next one is ``stop``."""
        if role == STATE:
            return range(stop, stop + 1)
        return range(max(start, stop - self.window) if role == WINDOW else start, stop)

    def join(self, text: Text, hit: int) -> Seat:
        """A seat with up to ``hit`` positions of the family from the cache. Raises OutOfBlocksError.

        Whole blocks are shared, a part of a block is copied into one of its own.
        """
        seat = Seat(text, {role: {} for role in self.names}, {role: set() for role in self.names})
        cached = [role for role in self.names if role != STATE]
        hit = min(hit, text.shared)
        while any((role, text.family, i) not in self.pools[role].blocks for role, i in self._seen(cached, hit)):
            hit -= 1
        try:
            for role, ordinal in self._seen(cached, hit):
                pool = self.pools[role]
                if self.positions[role][ordinal] <= set(range(hit)):
                    seat.blocks[role][ordinal] = pool.share(pool.blocks[role, text.family, ordinal])
            for role in cached:
                self.reserve(seat, role, self.ordinals(role, self.sight(role, 0, hit)))
                self.put(seat, role, range(hit))
        except OutOfBlocksError:
            self.leave(seat)
            raise
        seat.reach = hit
        self.seats[text.number] = seat
        return seat

    def _seen(self, roles: Iterable[str], hit: int) -> list[tuple[str, int]]:
        """The blocks that a prefix of ``hit`` positions needs."""
        return [(role, i) for role in roles for i in self.ordinals(role, self.sight(role, 0, hit))]

    def reserve(self, seat: Seat, role: str, ordinals: Iterable[int]) -> None:
        """Blocks of one's own at some ordinals, where there are none. Raises OutOfBlocksError; some may be there."""
        for ordinal in sorted(ordinals):
            if ordinal not in seat.blocks[role]:
                seat.blocks[role][ordinal] = self.pools[role].take()

    def make_room(self, seat: Seat, spans: Spans, ahead: int) -> None:
        """Blocks for ranges by role, and ``ahead`` more than that of tokens. Raises OutOfBlocksError like reserve."""
        for role, span in spans.items():
            self.reserve(seat, role, self.ordinals(role, range(*span)))
            if role != STATE and seat.blocks[role]:
                last = max(seat.blocks[role])
                self.reserve(seat, role, range(last + 1, last + 1 + ahead))

    def put(self, seat: Seat, role: str, positions: Iterable[int]) -> None:
        """Let the engine itself fill in positions that it has blocks for."""
        new = {at for at in positions if self.ordinal[role][at] in seat.blocks[role]} - seat.valid[role]
        shared = {i for i, block in seat.blocks[role].items() if block in self.pools[role].keys}
        for shadow in self.shadows:
            own = {i: block for i, block in seat.blocks[role].items() if i not in shared}
            shadow.fill(*shadow.cells(self.names[role], own, seat.text.owners(role), new))
        seat.valid[role] |= new

    def compute(self, seat: Seat, count: int) -> None:
        """Add positions to a request. Raises OutOfBlocksError, and then adds none."""
        old, new = seat.text.length, seat.text.length + count
        for role in self.names:
            self.reserve(seat, role, self.ordinals(role, self.sight(role, old, new)))
        for role in self.names:
            self.put(seat, role, self.sight(role, 0, new) if role == STATE else range(old, new))
        seat.text.length = seat.reach = new
        self.settle(seat)

    def settle(self, seat: Seat) -> None:
        """Let whole blocks of the family's text be found, and drop what a window has passed, and older states."""
        for role, blocks in seat.blocks.items():
            passed = []
            for ordinal, block in sorted(blocks.items()):
                here = self.positions[role][ordinal]
                if role != STATE and max(here) < seat.text.shared and here <= seat.valid[role]:
                    self.pools[role].cache((role, seat.text.family, ordinal), block)
                if role == WINDOW and max(here) < seat.reach - self.window:
                    passed.append(ordinal)
            for ordinal in passed if role == WINDOW else sorted(blocks)[:-2] if role == STATE else ():
                self.pools[role].drop(blocks.pop(ordinal))
                seat.valid[role] -= self.positions[role][ordinal]

    def leave(self, seat: Seat) -> None:
        """Give all blocks of a seat back."""
        for role, blocks in seat.blocks.items():
            for block in blocks.values():
                self.pools[role].drop(block)
            blocks.clear()
            seat.valid[role].clear()
        if self.seats.get(seat.text.number) is seat:
            del self.seats[seat.text.number]

    def check(self) -> None:
        """Memory holds what it should, and all that is in place of every request is there."""
        for shadow in self.shadows:
            shadow.check()
            for seat in self.seats.values():
                for role, name in self.names.items():
                    where, labels = shadow.cells(name, seat.blocks[role], seat.text.owners(role), seat.valid[role])
                    assert np.array_equal(shadow.expected[where], labels), f"{seat.text} lost some of {role}"


def _choices(*radices: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*(st.integers(0, radix - 1) for radix in radices))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Engine, Engine]:
    """A prefill and a decode engine for one small model, with a full, a sliding and perhaps a state group.

    Half of them have blocks of one dense layout, tokens outermost or innermost, which move in runs; others have any.
    """
    dense, states, window, kv, heads = draw(_choices(4, 2, 7, 2, 4))
    shapes = {"dim": 2, **({"kv": 2} if kv else {}), "head": heads + 1}
    turn = (0, len(shapes), None, None)[dense]
    tensors = [
        Logical("layers.0", True, shapes, "uint8", 0, BOTH),
        Logical("layers.1", True, shapes, "bfloat16", 1, BOTH),
    ]
    tensors += [Logical("layers.2", False, {"dim": 3}, "bfloat16", 2, BOTH)][:states]
    prefill, decode = (draw(_engine(name, tensors, window + 1, turn)) for name in ("prefill", "decode"))
    return prefill, decode


@st.composite
def _engine(draw: st.DrawFn, engine_id: str, tensors: list[Logical], window: int, dense: int | None) -> Engine:
    shape, packing, digits, gap, base, devices = draw(_choices(len(SHAPES), 4, 2, 2, 4, 2))
    renamed, more, seed = draw(_choices(2, 3, 99))
    tp, cp, pp = SHAPES[shape]
    roles = (FULL, WINDOW, STATE)[: len(tensors)]
    names = {role: f"{engine_id}.{role}" if renamed else role for role in roles}
    kept = []
    for role, tensor in zip(roles, tensors, strict=True):
        slots, interleave, alone, stage, turn, order, pads, split = draw(_choices(6, 3, 4, pp, 4, 720, 81, 4))
        context = Context(0, cp, interleave + 1) if alone < 3 and tensor.paged else Context()
        if dense is not None:
            slots, turn, order, pads, split = slots % 2, dense, 0, 0, 0
        group = Group(names[role], (4, 2, 4, 3, 1, 5)[slots] if tensor.paged else None, context)
        kept.append(Kept(tensor, group, stage, turn, order, pads, ("", "kv", "head", "dim")[split], ""))
    side = Side(engine_id, tp, cp, pp, tuple(kept), packing, bool(digits), gap, base, devices, 0)
    return Engine(side, names, window, (24, 60, 120)[more], seed)
