"""Caches at rest: any engine saves a prompt's cache, any other loads what it shares, and every byte is the right one.

The workers' memory is a mapping of addresses, which are anywhere. A byte's meaning is that of the oracle, as a number
of two bytes: a run moves one of the two, so two runs move the numbers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from kvplan import Blocks, Group, ReadSpec, TransferPlan, Worker
from kvplan.testing import designs
from kvplan.testing.designs import EngineDesign
from kvplan.testing.strategies import Case
from kvplan_nixl.serving.store import Backend, StoreClient, find
from property_tests.oracle import Meaning, Place, contents

NUM_PASSES: Final = 2
MODEL: Final = "a model"
SOURCE_STATE, DESTINATION_STATE = 1, 3
"""The ordinals of the one state of a request, which need not be equal."""


class FakeMover:
    """Moves bytes between the memory of an engine and a buffer, and notes where it has written."""

    def __init__(self) -> None:
        self.cells: dict[Place, int] = {}
        self.written: list[Place] = []

    def prepare(self, plan: TransferPlan) -> None:
        """Prepare nothing."""

    def move(self, specs: Sequence[ReadSpec]) -> None:
        """Move range by range. Bytes that nobody has written are 0."""
        for spec in specs:
            for local, remote in zip(*(side.tolist() for side in spec.descriptors()), strict=True):
                address, num_bytes, device = local
                places = [(device, address + byte) for byte in range(num_bytes)]
                if spec.operation == "WRITE":
                    data = bytes(self.cells.get(place, 0) for place in places)
                    ctypes.memmove(remote[0], data, num_bytes)
                else:
                    data = ctypes.string_at(remote[0], num_bytes)
                    self.cells.update(zip(places, data, strict=True))
                    self.written += places


def page_tokens(case: Case, times: int) -> int:
    """Tokens per page that the contexts of both engines divide."""
    groups = [group for worker in (*case.destinations, *case.sources) for group in worker.groups]
    return times * math.lcm(*(group.context.size * group.context.interleave_tokens for group in groups))


def full_tables(design: EngineDesign, num_tokens: int, state: int) -> dict[str, Blocks]:
    """The blocks of all positions of a prompt, scattered; one state in each state group."""
    tables, first_id = {}, 0
    for name, group in design.groups.items():
        number = 1
        if group.tokens_per_block:
            number = len(designs.ordinals_of(designs.on_ranks(group), 0, num_tokens))
        ids = [first_id + (3 * i + 1) % (3 * number + 1) for i in range(number)]
        tables[name] = Blocks(ids, first=0 if group.tokens_per_block else state)
        first_id += 3 * number + 1
    return tables


@attrs.frozen
class StoredWorker:
    """A worker with a prompt, its client of a store, and its memory."""

    worker: Worker
    tables: Mapping[str, Blocks]
    client: StoreClient
    mover: FakeMover

    def meanings(self, stop: int) -> dict[Place, Meaning]:
        """What the bytes of the first ``stop`` positions mean; a state is of no position."""
        groups = {group.name: group for group in self.worker.groups}
        spans = {view.name: span_of(groups[view.group], stop) for view in self.worker.views}
        states = {view.name for view in self.worker.views if groups[view.group].is_state}
        found = contents(self.worker, {name: self.tables[name] for name in groups}, spans)
        return {place: (m[0], -1 if m[0] in states else m[1], *m[2:]) for place, m in found.items()}

    def own_tables(self) -> dict[str, Blocks]:
        """The block tables of the worker's groups."""
        return {group.name: self.tables[group.name] for group in self.client.groups}

    def wrong(self, stop: int, labels: Labels, byte: int) -> Iterator[str]:
        """The bytes that are not the right ones, and those written that nobody asked for."""
        needed = self.meanings(stop) if stop else {}
        for place, meaning in needed.items():
            if self.mover.cells.get(place) != labels.number(meaning, byte):
                yield f"{place} is not {meaning}"
        if sorted(self.mover.written) != sorted(needed):
            yield "bytes are written twice, or not asked for"


@attrs.frozen
class StoredEngine:
    """The workers of an engine with a prompt of some positions."""

    workers: tuple[StoredWorker, ...]

    @classmethod
    def of(cls, design: EngineDesign, num_tokens: int, state: int, backend: Backend, page: int) -> StoredEngine:
        """An engine of a design, with empty memory."""
        tables = full_tables(design, num_tokens, state)
        stored = []
        for worker in designs.workers(design, tables):
            named, mover = attrs.evolve(worker, model=MODEL), FakeMover()
            client = StoreClient(backend, named, mover=mover, tokens_per_page=page, buffer_bytes=1 << 16)
            stored.append(StoredWorker(named, tables, client, mover))
        return cls(tuple(stored))

    def save(self, tokens: Sequence[int], stop: int, labels: Labels, byte: int) -> None:
        """Fill the memory with one byte of each label, and save the first ``stop`` positions."""
        for worker in self.workers:
            cells = {place: labels.number(meaning, byte) for place, meaning in worker.meanings(stop).items()}
            worker.mover.cells.update(cells)
            client = worker.client
            client.save(client.chain(tokens), worker.own_tables(), client.needs(0, stop))

    def load(self, tokens: Sequence[int], step: int) -> int:
        """Load the longest prefix that is stored, and return its length."""
        clients = [worker.client for worker in self.workers]
        chain = clients[0].chain(tokens)
        stop = find(clients, chain, step=step)
        for worker in self.workers if stop else ():
            worker.client.load(chain, worker.own_tables(), worker.client.needs(0, stop))
        return stop


def span_of(group: Group, stop: int) -> tuple[int, int] | None:
    """The positions of a prefix in a group; ``None``, all that are listed, of states."""
    return (0, stop) if group.tokens_per_block else None


class Labels:
    """A number of two bytes for each meaning, none of them 0, which is what empty memory has."""

    def __init__(self) -> None:
        self._numbers: dict[Meaning, int] = {}

    def number(self, meaning: Meaning, byte: int) -> int:
        """One byte of the number of a meaning, the same every time."""
        number = self._numbers.setdefault(meaning, len(self._numbers))
        return 1 + number // (1, 255)[byte] % 255
