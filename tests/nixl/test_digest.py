"""Digests of a cache are equal for equal contents in any layout, and for no others."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan import (
    Blocks,
    Context,
    Group,
    KVPlanError,
    Model,
    Worker,
    plan_mesh,
    region_of,
    view_of,
)
from kvplan.describe.blocks import Range, Tokens
from kvplan.plan.bind import range_of
from kvplan.protocol import digest as definition
from kvplan.protocol.digest import DIVIDED, BlockPositions, keys, mismatch
from kvplan.testing.strategies import Case, cases
from kvplan.verification import FakeMemory
from kvplan.verification.labels import locate
from kvplan_nixl import digest as computation
from kvplan_nixl.digest import WorkerDigests
from kvplan_nixl.rearrange import Memory, memories_of
from property_tests.oracle import contents, elements, held_positions

ALL_AXES = ("dim", "head", "kv")
Ints = npt.NDArray[np.int64]


@attrs.frozen
class TorchWorker:
    """A worker at the addresses of its fake memory, and that memory as torch has it."""

    worker: Worker
    memories: tuple[Memory, ...]

    @classmethod
    def of(cls, memory: FakeMemory, worker: Worker) -> TorchWorker:
        """The worker's regions, as far as views are in them."""
        cells = {view.region: memory.region(worker, view) for view in worker.views}
        tensors = {region: torch.from_numpy(values) for region, values in cells.items()}
        regions = [
            attrs.evolve(region, address=tensors[region.name].data_ptr())
            for region in worker.regions
            if region.name in tensors
        ]
        return cls(attrs.evolve(worker, regions=regions), memories_of(tensors.values()))

    def digests(
        self,
        tensors: Iterable[str],
        blocks: Mapping[str, Blocks],
        tokens: Tokens,
        divided: Sequence[str] = DIVIDED,
        within: Context | None = None,
    ) -> dict[str, Any]:
        """The digests of some tensors."""
        names = {*tensors}
        views = [view for view in self.worker.views if view.name in names]
        groups = {view.group for view in views}
        worker = attrs.evolve(self.worker, views=views)
        tables = {group: blocks[group] for group in groups}
        spans = {group: tokens[group] for group in groups if group in tokens} if isinstance(tokens, Mapping) else tokens
        return WorkerDigests(worker, self.memories, divided=divided).of(tables, spans, within=within)


@attrs.frozen
class GroupDigests:
    """The digests of all sources, of the tensors in one group of a destination."""

    tensors: set[str]
    digests: list[dict[str, Any]]


@attrs.frozen
class Transfer:
    """A request from sources to one destination, both with their block tables."""

    destination: TorchWorker
    sources: tuple[TorchWorker, ...]
    tables: tuple[Mapping[str, Blocks], Mapping[str, Blocks]]
    tokens: Tokens
    divided: Sequence[str]

    def offered(self, moved: Iterable[str]) -> list[GroupDigests]:
        """The digests of the sources for each group of the destination, of tensors that move."""
        worker = self.destination.worker
        names = {*moved}
        of_groups = []
        for group in worker.groups:
            tensors = {view.name for view in worker.views if view.group == group.name} & names
            span = range_of(self.tokens, group)
            table = self.tables[0][group.name]
            positions = BlockPositions.of(group, table, span, Context()).positions.listed
            if tensors and positions.size:
                asked = (int(positions[0]), int(positions[-1]) + 1)
                digests = []
                for source in self.sources:
                    spans = {held.name: asked for held in source.worker.groups}
                    arguments = (self.tables[1], spans, self.divided, group.context)
                    digests.append(source.digests(tensors, *arguments))
                of_groups.append(GroupDigests(tensors, digests))
        return of_groups

    def error(self, offered: Iterable[GroupDigests], changed: str | None = None) -> KVPlanError | None:
        """The first mismatch with what was offered, in any tensor or in one."""
        for group in offered:
            if changed is None or changed in group.tensors:
                tensors = group.tensors if changed is None else {changed}
                received = self.destination.digests(tensors, self.tables[0], self.tokens, self.divided)
                error = mismatch(group.digests, [received])
                if error is not None:
                    return error
        return None


@cache
def key(axis: str, coordinate: int) -> int:
    """One key as an integer."""
    return int(keys(axis, np.array([coordinate]))[0])


def slow_digests(
    memory: FakeMemory,
    worker: Worker,
    tables: Mapping[str, Blocks],
    tokens: Tokens,
    divided: Sequence[str],
) -> dict[tuple[str, str, int], list[int]]:
    """Coverage and digest by tensor, group and part, element by element from the rules."""
    sums: dict[tuple[str, str, int], list[int]] = {}
    for view in worker.views:
        group = next(group for group in worker.groups if group.name == view.group)
        span = range_of(tokens, group)
        table = tables[view.group]
        slots = group.tokens_per_block or 1
        numbers = held_positions(group)
        positions = [next(numbers) for _ in range(table.stop * slots)]
        cells = memory.region(worker, view)
        sizes = {axis: size for axis, size in view.sizes.items() if size > 1 and axis != "token"}
        whole = [(size, axis) for axis, size in sizes.items() if axis not in divided]
        packed = max(whole)[1] if whole else None
        for slot, offset, coordinates in elements(view):
            part, factor, shift, coverage = 0, 1, 0, 1
            for axis, at in coordinates:
                coverage *= key(axis, at)
                if axis == packed:
                    factor *= key(axis, at * view.itemsize // 8)
                    shift = 8 * (at * view.itemsize % 8)
                else:
                    factor *= key(axis, at)
                if axis in divided:
                    part = part * sizes[axis] + at  # sizes are small: each coordinate is a part
            entry = sums.setdefault((view.name, view.group, part), [0, 0])
            if slot == 0:
                entry[0] += coverage
            for ordinal, block in zip(table.ordinals.tolist(), table.ids.tolist(), strict=True):
                position = positions[ordinal * slots + slot]
                if span is None or span[0] <= position < span[1]:
                    first = offset + block * view.block_stride_bytes
                    value = int.from_bytes(cells[first : first + view.itemsize].tobytes(), "little")
                    entry[1] += (value << shift) * factor * key("token", position)
    return {place: [number % (1 << 64) for number in entry] for place, entry in sums.items()}


def noise(memory: FakeMemory, workers: Iterable[Worker], seed: int) -> None:
    """Random bytes in all regions."""
    rng = np.random.default_rng(seed)
    for worker in workers:
        for region in worker.regions:
            values = rng.integers(0, 256, region.size_bytes, np.uint8)
            memory.write(worker, region.address, values, region.device_id)


def fill(memory: FakeMemory, case: Case) -> None:
    """A byte for each meaning in all that the sources may be asked for."""
    for source in case.sources:
        tables = {group.name: case.tables[1][group.name] for group in source.groups}
        for (device, address), meaning in contents(source, tables, case.spans[1]).items():
            memory.write(source, address, [zlib.crc32(repr(meaning).encode()) & 255], device)


@given(cases(), st.sampled_from([ALL_AXES, DIVIDED, ()]))
def test_a_digest_is_the_sum_that_the_rules_say(case: Case, divided: tuple[str, ...]) -> None:
    """Whatever the strides, digits, contexts and alignment, digests are sums by rules digest.D1 to digest.D5."""
    workers = case.destinations
    with FakeMemory(workers) as memory:
        noise(memory, workers, 1)
        for worker in workers:
            tables = {group.name: case.tables[0][group.name] for group in worker.groups}
            tokens = case.tokens[0]
            if isinstance(tokens, Mapping):
                tokens = {name: span for name, span in tokens.items() if name in tables}
            expected = slow_digests(memory, worker, tables, tokens, divided)
            held = TorchWorker.of(memory, worker)
            names = {view.name for view in worker.views}
            found = {}
            for digests in definition.of_json(held.digests(names, tables, tokens, divided)):
                (group,) = {view.group for view in worker.views if view.name == digests.name}
                for row, part in enumerate(digests.parts.tolist()):
                    place = (digests.name, group, part)
                    found[place] = [int(digests.coverage[row]), int(digests.digests[row])]
            assert found == expected


NUM_FLIPS = 4
"""Bits that a test of random engines flips in what was moved, and as many elsewhere."""


def flip(memory: FakeMemory, worker: Worker, place: tuple[int, int], bit: int) -> None:
    """Flip a bit of the byte at a device and an address; a second time restores it."""
    device, address = place
    value = int(memory.read(worker, address, 1, device)[0])
    memory.write(worker, address, [value ^ (1 << bit)], device)


@given(cases(), st.integers(0, 1 << 32))
def test_any_two_engines(case: Case, seed: int) -> None:
    """Digests are equal after a transfer; a flipped bit is found if it was moved, and only then."""
    with FakeMemory([*case.destinations, *case.sources]) as memory:
        noise(memory, [*case.destinations, *case.sources], seed)
        fill(memory, case)
        for plan in map(case.reads, case.destinations):
            for spec in plan.bind(**case.request(plan)):
                memory.execute(spec)
        sources = tuple(TorchWorker.of(memory, source) for source in case.sources)
        chosen = random.Random(seed)
        for worker in case.destinations:
            transfer = Transfer(TorchWorker.of(memory, worker), sources, case.tables, case.tokens[0], ALL_AXES)
            offered = transfer.offered(case.spans[0])
            assert transfer.error(offered) is None
            tables = {group.name: case.tables[0][group.name] for group in worker.groups}
            places = contents(worker, tables, case.spans[0])
            # Bytes that nothing moved to: gaps, slots outside the range, other blocks and tensors.
            beside = [
                (region.device_id, region.address + offset)
                for region in worker.regions
                for offset in range(0, region.size_bytes, max(1, region.size_bytes // 64))
                if (region.device_id, region.address + offset) not in places
            ]
            for place in chosen.sample([*places], min(NUM_FLIPS, len(places))):
                bit = chosen.randrange(8)
                flip(memory, worker, place, bit)
                error = transfer.error(offered, places[place][0])
                assert error is not None
                assert (error.code, error.details["tensor"]) == ("TRANSFER", places[place][0])
                flip(memory, worker, place, bit)
            for place in chosen.sample(beside, min(NUM_FLIPS, len(beside))):
                flip(memory, worker, place, chosen.randrange(8))
            assert transfer.error(offered) is None


def short(model: Model) -> Model:
    """The model with its first layer of each kind, and its first layer again."""
    return attrs.evolve(model, layers=(*dict.fromkeys(model.layers), model.layers[0]))


MODELS = {
    **{
        name: short(Model.shipped(name))
        for name in (
            *(
                "qwen3-0.6b",
                "phi-4",
                "granite-4.0-h-tiny",
                "nemotron-h-8b",
                "jamba-v0.1",
                "qwen3-next-80b",
            ),
            *("deepseek-v3", "deepseek-v3.2", "gpt-oss-20b", "gemma-4-31b"),
        )
    },
    "qwen3-0.6b fp8": short(Model.shipped("qwen3-0.6b")).quantized(),
}

NUM_BLOCKS = 24


def engines(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of ``Model.engine``, some of which a model refuses."""
    return st.fixed_dictionaries(
        {
            "tp": st.sampled_from([1, 2, 3, 4, 8]),
            "layout": st.sampled_from(["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]),
            "tokens_per_block": st.sampled_from([16, 32, 48]),
        },
        optional={
            "dcp": st.sampled_from([2, 4]),
            "interleave": st.sampled_from([1, 16]),
            "pp": st.just(2),
            "kv": st.just("split"),
            "kernel_tokens": st.just(16),
            "conv_order": st.just("SD"),
            "shared": st.just(True),
        },
    ).map(lambda arguments: {"engine_id": name, "num_blocks": NUM_BLOCKS, **arguments})


def possible(model: Model, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, without some of the optional ones where the model refuses them all."""
    optional = ("dcp", "interleave", "shared", "kernel_tokens", "kv", "pp", "conv_order")
    for number in range(len(optional) + 1):
        fewer = {key: arguments[key] for key in arguments if key not in optional[:number]}
        try:
            model.engine(**fewer)
        except KVPlanError as refusal:
            assert refusal.code in ("LAYOUT", "SIZE")
        else:
            return fewer
    raise AssertionError(arguments)


def mixed(numbers: Any) -> Any:
    """A byte for each integer, without a pattern."""
    numbers = (numbers ^ (numbers >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return ((numbers ^ (numbers >> np.uint64(29))) >> np.uint64(13)).astype(np.uint8)


def write_blocks(memory: FakeMemory, worker: Worker, tables: Mapping[str, Blocks]) -> None:
    """A byte for each tensor, position and coordinate, in all slots of a request's blocks."""
    groups = {group.name: group for group in worker.groups}
    for view in worker.views:
        group, table = groups[view.group], tables[view.group]
        if not table.ids.size:
            continue
        slots = group.tokens_per_block or 1
        numbers = held_positions(group)
        position = np.array([next(numbers) for _ in range(table.stop * slots)]).reshape(-1, slots)
        dims = len(view.axes) + 2
        number = np.zeros((1,) * dims, np.uint64) + np.uint64(zlib.crc32(view.name.encode()))
        slot, finer = np.zeros((1,) * (dims - 2), np.int64), dict.fromkeys(view.sizes, 1)
        for i in reversed(range(len(view.axes))):
            axis = view.axes[i]
            at = np.arange(axis.start, axis.stop).reshape([-1 if dim == i else 1 for dim in range(dims - 2)])
            at = at * finer[axis.name]
            finer[axis.name] *= axis.size
            if axis.name == "token":
                slot = slot + at
            elif view.sizes[axis.name] > 1:
                odd = np.uint64(2 * zlib.crc32(axis.name.encode()) + 1)
                number = number + at.astype(np.uint64)[None, ..., None] * odd
        of_slot = position[table.ordinals].reshape(table.ids.size, -1)[:, slot]
        number = number + of_slot.astype(np.uint64)[..., None] * np.uint64(0x9E3779B97F4A7C15)
        number = number + np.arange(view.itemsize, dtype=np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        memory.array(worker, view)[table.ids] = mixed(number)


def tables_of(worker: Worker, positions: int, state: int, rng: np.random.Generator) -> dict[str, Blocks]:
    """The blocks of a request, scattered over a pool that groups may share."""
    ids = iter(rng.permutation(NUM_BLOCKS).tolist())
    tables = {}
    for group in worker.groups:
        if group.tokens_per_block is None:
            tables[group.name] = Blocks([next(ids)], ordinals=[state])
        else:
            count = -(-positions // (group.tokens_per_block * group.context.size))
            if group.context.interleave_tokens > 1:
                count += 1
            tables[group.name] = Blocks([next(ids) for _ in range(count)])
    return tables


@attrs.frozen
class ModelCase:
    """A request between two engines of a model."""

    model: Model
    destinations: tuple[Worker, ...]
    sources: tuple[Worker, ...]
    tables: tuple[Mapping[str, Blocks], Mapping[str, Blocks]]
    span: Range

    @classmethod
    def of(
        cls,
        model: Model,
        destination: Mapping[str, Any],
        source: Mapping[str, Any],
        span: Range,
        seed: int,
    ) -> ModelCase:
        """The case with these arguments of ``Model.engine``."""
        rng = np.random.default_rng(seed)
        engines = [model.engine(**arguments) for arguments in (destination, source)]
        near, far = (tables_of(workers[0], span[1], 7, rng) for workers in engines)
        return cls(model, engines[0], engines[1], (near, far), span)

    def move(self, memory: FakeMemory) -> list[Any]:
        """Fill the sources and carry out all reads; the specs."""
        for source in self.sources:
            write_blocks(memory, source, self.tables[1])
        specs: list[Any] = []
        for plan in plan_mesh(self.destinations, self.sources).plans:
            tokens = self.model.tokens(*self.span, plan.local)
            specs += plan.bind(local=self.tables[0], remote=self.tables[1], tokens=tokens)
        for spec in specs:
            memory.execute(spec)
        return specs

    def transfer(self, memory: FakeMemory, destination: Worker) -> Transfer:
        """What is compared for one destination."""
        tokens = self.model.tokens(*self.span, destination)
        sources = tuple(TorchWorker.of(memory, source) for source in self.sources)
        return Transfer(TorchWorker.of(memory, destination), sources, self.tables, tokens, DIVIDED)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=settings.default.max_examples // 10)  # type: ignore[union-attr]
@given(st.data())
def test_any_two_engines_of_a_model(name: str, data: st.DataObject) -> None:
    """Engines of any parallel sizes, layouts and block sizes have equal digests."""
    span = data.draw(st.tuples(st.integers(0, 60), st.integers(61, 190)))
    model = MODELS[name]
    arguments = [possible(model, data.draw(engines(engine_id))) for engine_id in ("d", "p")]
    case = ModelCase.of(model, arguments[0], arguments[1], span, data.draw(st.integers(0, 99)))
    with FakeMemory([*case.destinations, *case.sources]) as memory:
        case.move(memory)
        for destination in case.destinations:
            transfer = case.transfer(memory, destination)
            offered = transfer.offered(view.name for view in destination.views)
            error = transfer.error(offered)
            # Three ranks do not divide all axes equally: a part is then on two of them.
            is_uneven = 3 in (arguments[0]["tp"], arguments[1]["tp"])
            assert error is None or (is_uneven and error.code == "COVER")


FLIPS = min(4 * settings.default.max_examples, 2000)  # type: ignore[union-attr]
"""Bits that are flipped in each of five cases: 10,000 in all by the profile ``long``."""

PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "heads and blocks": (
        "qwen3-0.6b",
        {"tp": 2, "layout": "LBHNC", "tokens_per_block": 48},
        {"tp": 4, "layout": "BLNHC"},
    ),
    "latents over contexts": ("deepseek-v3", {"tp": 4, "dcp": 4}, {"tp": 2, "dcp": 2}),
    "states": ("granite-4.0-h-tiny", {"tp": 4}, {"tp": 1, "layout": "LBNHC"}),
    "a window": ("gpt-oss-20b", {"layout": "LBNHC"}, {"tp": 2, "tokens_per_block": 32}),
    "scales": ("qwen3-0.6b fp8", {"tp": 1}, {"tp": 8, "layout": "BHLNC"}),
}


def pair(name: str) -> ModelCase:
    """A request of 37 to 149 positions, none of which is on a block's boundary."""
    model, destination, source = PAIRS[name]
    pool = {"num_blocks": NUM_BLOCKS}
    engines = ({"engine_id": "d", **pool, **destination}, {"engine_id": "p", **pool, **source})
    return ModelCase.of(MODELS[model], *engines, (37, 149), seed=5)


@pytest.mark.parametrize("name", PAIRS)
def test_each_of_many_flipped_bits_is_found(name: str) -> None:
    """A single flipped bit of any byte that was moved is found, always."""
    case = pair(name)
    chosen = random.Random(name)
    with FakeMemory([*case.destinations, *case.sources]) as memory:
        written = [(spec.local, spec.descriptors()[0]) for spec in case.move(memory)]
        destinations = {worker.key: worker for worker in case.destinations}
        transfers = {key: case.transfer(memory, worker) for key, worker in destinations.items()}
        offered = {}
        for key, transfer in transfers.items():
            tensors = {view.name for view in destinations[key].views}
            offered[key] = transfer.offered(tensors)
            assert transfer.error(offered[key]) is None
        sizes = [int(rows[:, 1].sum()) for _, rows in written]
        for key, rows in chosen.choices(written, sizes, k=FLIPS):
            address, length, device = chosen.choice(rows.tolist())
            place = (device, address + chosen.randrange(length))
            bit = chosen.randrange(8)
            view = locate(destinations[key], place[1], device).view
            assert view is not None
            flip(memory, destinations[key], place, bit)
            error = transfers[key].error(offered[key], view.name)
            assert error is not None
            assert error.code == "TRANSFER"
            flip(memory, destinations[key], place, bit)
        for key, transfer in transfers.items():
            assert transfer.error(offered[key]) is None


def exchanged(cells: Any, axis: int, first: int, second: int) -> None:
    """Exchange two coordinates of an axis."""
    order = [*range(cells.shape[axis])]
    order[first], order[second] = second, first
    cells[:] = np.take(cells, order, axis)


@pytest.mark.parametrize("fault", ["blocks", "head", "kv", "dim", "token", "off by one"])
def test_what_is_in_a_wrong_place_is_found(fault: str) -> None:
    """Exchanged blocks, heads, K and V, elements or tokens, and tokens off by one, are found."""
    case = pair("heads and blocks")
    with FakeMemory([*case.destinations, *case.sources]) as memory:
        case.move(memory)
        destination = case.destinations[1]
        transfer = case.transfer(memory, destination)
        view = destination.views[1]
        offered = transfer.offered([view.name])
        assert transfer.error(offered) is None
        cells = memory.array(destination, view)
        block = case.tables[0]["attn"].ids[1]  # all of its positions are moved
        names = [axis.name for axis in view.axes]
        if fault == "blocks":
            exchanged(cells, 0, block, case.tables[0]["attn"].ids[2])
        elif fault == "off by one":
            cells[block] = np.roll(cells[block], 1, names.index("token"))
        else:
            exchanged(cells[block], names.index(fault), 0, 1)
        error = transfer.error(offered)
        assert error is not None
        assert error.code == "TRANSFER"


@pytest.mark.parametrize("kind, axis", [("conv.x", "channel"), ("conv.B", "step"), ("ssm", "head")])
def test_a_state_in_a_wrong_order_is_found(kind: str, axis: str) -> None:
    """Exchanged channels, steps and heads of a state are found."""
    case = pair("states")
    with FakeMemory([*case.destinations, *case.sources]) as memory:
        case.move(memory)
        destination = case.destinations[0]
        transfer = case.transfer(memory, destination)
        (view,) = (view for view in destination.views[:5] if view.name == f"layers.0.{kind}")
        offered = transfer.offered([view.name])
        assert transfer.error(offered) is None
        (block,) = case.tables[0]["state"].ids
        names = [axis.name for axis in view.axes]
        exchanged(memory.array(destination, view)[block], names.index(axis), 0, 1)
        error = transfer.error(offered)
        assert error is not None
        assert error.code == "TRANSFER"


def test_destinations_with_some_positions_are_compared_together() -> None:
    """A source that holds all positions has digests of all: of two contexts, both are compared."""
    model = MODELS["deepseek-v3"]
    pool = {"num_blocks": NUM_BLOCKS}
    destination, source = {"tp": 2, "dcp": 2}, {"tp": 1}
    engines = ({"engine_id": "d", **pool, **destination}, {"engine_id": "p", **pool, **source})
    case = ModelCase.of(model, *engines, (5, 77), seed=1)
    names = {view.name for view in case.sources[0].views}
    with FakeMemory([*case.destinations, *case.sources]) as memory:
        case.move(memory)
        held = TorchWorker.of(memory, case.sources[0])
        whole = held.digests(names, case.tables[1], case.span)
        received = []
        for worker in case.destinations:
            held_there = TorchWorker.of(memory, worker)
            received.append(held_there.digests(names, case.tables[0], case.span))
        assert mismatch([whole], received) is None
        alone = mismatch([whole], received[:1])
        assert alone is not None
        assert alone.code == "COVER"
        # Two ranges of the source, and positions that a destination does not have.
        ranges = [held.digests(names, case.tables[1], span) for span in ((0, 5), (5, 40), (40, 77))]
        assert mismatch(ranges, received) is None


def test_memory_of_no_tensor_is_refused() -> None:
    """A region in none of the memories is MEMORY."""
    case = pair("scales")
    (worker,) = case.destinations
    with pytest.raises(KVPlanError, match=r"^MEMORY: cannot digest region "):
        WorkerDigests(worker, []).of(case.tables[0], case.span)


def test_a_range_without_blocks_is_refused() -> None:
    """A source whose table ends before the range has no digest of it."""
    case = pair("scales")
    (worker,) = case.destinations
    tables = {"attn": Blocks([1, 2])}
    with pytest.raises(KVPlanError, match=r"^BLOCKS: cannot bind group 'attn': expected blocks "):
        WorkerDigests(worker, []).of(tables, (0, 33))


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_prepared_once_serves_every_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of other blocks, ranges and groups have the digests of a worker that is prepared for each of them."""
    case = pair(name)
    for worker in case.destinations:
        with FakeMemory([*case.destinations, *case.sources]) as memory:
            case.move(memory)
            held = TorchWorker.of(memory, worker)
            tables = dict(case.tables[0])
            swapped = {group: Blocks(table.ids[::-1], ordinals=table.ordinals) for group, table in tables.items()}
            requests: list[tuple[Mapping[str, Blocks], Tokens]] = [(tables, case.span), (swapped, (40, 77))]
            requests += [({group: table}, case.span) for group, table in tables.items()]
            expected = [WorkerDigests(held.worker, held.memories).of(*request) for request in requests]
            prepared = WorkerDigests(held.worker, held.memories)
            assert prepared.of(*requests[0]) == expected[0]
            with monkeypatch.context() as patched:
                for function in ("_address", "_word_bytes", "_coordinates"):
                    patched.setattr(computation, function, None)
                assert [prepared.of(*request) for request in requests] == expected


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 14, 1 << 30])
def test_chunks_do_not_matter(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are added up a few at a time."""
    case = pair("scales")
    (worker,) = case.destinations
    names = {view.name for view in worker.views}
    with FakeMemory([*case.destinations, *case.sources]) as memory:
        case.move(memory)
        held = TorchWorker.of(memory, worker)
        expected = held.digests(names, case.tables[0], case.span)
        monkeypatch.setattr(computation, "CHUNK_BYTES", {"cpu": chunk_bytes})
        assert held.digests(names, case.tables[0], case.span) == expected


def test_a_gpu_computes_what_a_processor_does(device: str) -> None:
    """Digests of the same bytes are equal on all devices."""
    rng = np.random.default_rng(3)
    values = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, (9, 2, 16, 4, 64), np.int16))
    records = []
    for tensor in (values, values.to(device)):
        region = region_of(tensor)
        axes = "block kv token head dim"
        view = view_of(tensor, axes, name="layers.0", group="attn", region=region)
        worker = Worker("engine", 0, [region], [Group("attn", 16)], [view])
        tables = {"attn": Blocks([5, 2, 8])}
        records.append(WorkerDigests(worker, memories_of([tensor])).of(tables, (3, 41)))
    assert records[0] == records[1]
