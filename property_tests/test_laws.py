"""Laws: relations between plans that hold whatever each plan is.

A request is a mapping from each byte that it writes to the byte that it copies there. Bytes are numbered over all
workers of an engine, and have labels with their meanings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs
import numpy as np
from hypothesis import assume, event, given
from hypothesis import strategies as st

from kvplan import KVPlanError, Region, TransferPlan, Worker, plan_mesh, plan_reads, plan_writes
from property_tests import fewer
from property_tests.grids import APART_KV, BLOCKS, ORDERS, PACKINGS, SPREADS, UP_TO_4
from property_tests.labelled import Engine, Ints, each_byte
from property_tests.worlds import APART, Heads, Side

FEWER = fewer(3)
POSITIONS = 25
EVERYTHING = (0, POSITIONS)
NOTHING: Final = -1


def sides(heads: Heads) -> st.SearchStrategy[Side]:
    """Any side for these tensors."""
    two = len(heads) > 1
    return st.builds(
        Side,
        tp=st.sampled_from(UP_TO_4),
        tokens=st.sampled_from([*BLOCKS, (2, 3), (4, 1)] if two else BLOCKS),
        order=st.sampled_from([*ORDERS, *APART_KV]),
        spread=st.sampled_from(SPREADS),
        packing=st.sampled_from(PACKINGS if two else [APART]),
        first=st.integers(0, int(two)),
    ).filter(lambda side: side.possible(heads))


@st.composite
def engines(draw: st.DrawFn, count: int) -> list[Engine]:
    """Engines that store the same tensors."""
    heads = tuple(draw(st.lists(st.sampled_from(UP_TO_4), min_size=1, max_size=2)))
    return [Engine((f"e{i}", (i + 1) << 32), heads, draw(sides(heads)), POSITIONS) for i in range(count)]


SPANS = st.tuples(st.integers(0, POSITIONS), st.integers(0, POSITIONS)).map(lambda ends: (min(ends), max(ends)))

NUMBERS = st.integers(0, 11)
"""The index of a worker, modulo their number."""


def read(plans: Iterable[TransferPlan], local: Engine, remote: Engine, span: tuple[int, int] = EVERYTHING) -> Ints:
    """For each byte of an engine the byte of the other that read plans copy there, or NOTHING. Checks DISJOINT."""
    found = np.full(local.label.size, NOTHING)
    for plan in plans:
        for spec in plan.bind(local=local.tables(0), remote=remote.tables(0), tokens=span):
            into, source = (
                each_byte(engine.places(ranges, np.full(len(ranges), rank)), ranges)
                for engine, ranges, (_, rank) in zip(
                    (local, remote), spec.descriptors(), (spec.local, spec.remote), strict=True
                )
            )
            assert np.unique(into).size == into.size
            assert (found[into] == NOTHING).all()
            found[into] = source
    return found


def moved(local: Engine, remote: Engine, span: tuple[int, int] = EVERYTHING) -> Ints:
    """The mapping of all reads of one engine from another."""
    return read(plan_mesh(local.workers, remote.workers).plans, local, remote, span)


def meant(engine: Engine, span: tuple[int, int] = EVERYTHING) -> Ints:
    """The label of each byte of an engine, if it is in the span. Replicas have equal labels."""
    inside = (span[0] <= engine.position) & (engine.position < span[1])
    return np.where(inside, engine.label, NOTHING)


def after(moves: Ints, before: Ints) -> Ints:
    """The labels after a mapping, given the labels of its sources."""
    return np.where(moves == NOTHING, NOTHING, before[moves])


def turned(workers: Sequence[Worker]) -> list[Worker]:
    """Workers, and their regions, groups and views, in reverse order."""
    return [
        attrs.evolve(worker, regions=worker.regions[::-1], groups=worker.groups[::-1], views=worker.views[::-1])
        for worker in workers[::-1]
    ]


@FEWER
@given(engines(2), SPANS)
def test_permutation(two: list[Engine], span: tuple[int, int]) -> None:
    """The order of workers, and of what each has, changes nothing but the order of plans, pairs and rows."""
    a, b = two
    plans = plan_mesh(turned(a.workers), turned(b.workers)).plans
    assert [plan.local.rank for plan in plans] == [worker.rank for worker in a.workers[::-1]]
    assert (read(plans, a, b, span) == moved(a, b, span)).all()


WIDER = {2: "bfloat16", 4: "float32", 8: "float64"}


def scaled(worker: Worker, factor: int) -> Worker:
    """A worker whose elements, of one byte, and all numbers of bytes are multiplied by a factor."""
    views = [
        attrs.evolve(
            view,
            dtype=WIDER[factor],
            axes=[attrs.evolve(axis, stride_bytes=axis.stride_bytes * factor) for axis in view.axes],
            block_stride_bytes=view.block_stride_bytes * factor,
            offset_bytes=view.offset_bytes * factor,
        )
        for view in worker.views
    ]
    regions = [attrs.evolve(region, size_bytes=region.size_bytes * factor) for region in worker.regions]
    return attrs.evolve(worker, regions=placed(regions, 7 << 40), views=views)


def placed(regions: Sequence[Region], address: int) -> list[Region]:
    """Regions one after the other, from an address on."""
    starts = itertools.accumulate((region.size_bytes for region in regions), initial=address)
    return [attrs.evolve(region, address=at) for region, at in zip(regions, starts, strict=False)]


def shifted(worker: Worker, address: int) -> Worker:
    """A worker with its memory elsewhere."""
    return attrs.evolve(worker, regions=placed(worker.regions, address))


def same_but_for_addresses(one: TransferPlan, other: TransferPlan, engines: Sequence[Engine], factor: int = 1) -> None:
    """Assert that plans have equal ids, and rows that differ by their regions' addresses and by a factor in bytes."""
    request: dict[str, Any] = {
        "local": engines[0].tables(0),
        "remote": engines[1].tables(0),
        "tokens": (1, POSITIONS - 1),
    }
    for mine, others in zip(one.bind(**request), other.bind(**request), strict=True):
        assert mine.local_ids.tolist() == others.local_ids.tolist()
        assert mine.remote_ids.tolist() == others.remote_ids.tolist()
        for side in ("local_table", "remote_table"):
            table, larger = getattr(mine, side), getattr(others, side)
            begin, larger_begin = (
                np.array([r.address for r in t.regions], np.uint64)[t.region] for t in (table, larger)
            )
            assert table.region.tolist() == larger.region.tolist()
            assert ((table.rows[:, 0] - begin) * factor == larger.rows[:, 0] - larger_begin).all()
            assert (table.rows[:, [1, 3]] * factor == larger.rows[:, [1, 3]]).all()
            assert (table.rows[:, [2, 4]] == larger.rows[:, [2, 4]]).all()


def tables(plan: TransferPlan) -> list[Any]:
    """The rows of each pair, both sides."""
    return [(pair.remote, pair.local_table.rows.tolist(), pair.remote_table.rows.tolist()) for pair in plan.pairs]


@FEWER
@given(engines(2), NUMBERS, st.sampled_from(list(WIDER)))
def test_scaling(two: list[Engine], number: int, factor: int) -> None:
    """Multiplying all numbers of bytes by a factor multiplies those of the rows, and changes nothing else."""
    a, b = two
    worker = a.workers[number % len(a.workers)]
    larger = plan_reads(scaled(worker, factor), [scaled(source, factor) for source in b.workers])
    same_but_for_addresses(plan_reads(worker, b.workers), larger, two, factor)


@FEWER
@given(engines(2), NUMBERS, st.integers(1, 1 << 62))
def test_shifting(two: list[Engine], number: int, address: int) -> None:
    """Moving regions moves rows, and changes nothing else."""
    a, b = two
    worker = a.workers[number % len(a.workers)]
    sources, plan = [shifted(source, address) for source in b.workers], plan_reads(worker, b.workers)
    same_but_for_addresses(plan, plan_reads(shifted(worker, address), sources), two)
    others = [attrs.evolve(source, engine_id="another") for source in sources]
    assert tables(plan.with_remotes(others)) == tables(plan_reads(worker, others))


@FEWER
@given(engines(2), NUMBERS, st.integers(1, 1 << 62))
def test_shifting_of_writes(two: list[Engine], number: int, address: int) -> None:
    """A writer's plan for moved destinations is its plan with their addresses."""
    a, b = two
    (worker, *siblings), others = (b.workers[number:] + b.workers[:number]), a.workers
    plan = plan_writes(worker, others, siblings)
    elsewhere = [attrs.evolve(shifted(other, address), engine_id="another") for other in others]
    assert tables(plan.with_remotes(elsewhere)) == tables(plan_writes(worker, elsewhere, siblings))


@FEWER
@given(engines(2), NUMBERS)
def test_replicas_are_interchangeable(two: list[Engine], lost: int) -> None:
    """Without any one source, the same arrives from the others, if they have it."""
    a, b = two
    assume(len(b.workers) > 1)
    gone = lost % len(b.workers)
    left = b.workers[:gone] + b.workers[gone + 1 :]
    mine = slice(int(b.begin[gone]), int(b.begin[gone + 1]))
    try:
        plans = plan_mesh(a.workers, left).plans
    except KVPlanError as error:
        event("the only one")
        assert error.code == "COVER"
        assert set(b.label[mine]) - set(np.delete(b.label, mine))
        return
    event("one of several")
    assert (after(read(plans, a, b), meant(b)) == after(moved(a, b), meant(b))).all()
