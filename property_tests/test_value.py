"""VALUE, COVER, DISJOINT, BOUNDS, OWN: reads put every byte where it belongs, and no other byte anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any, Final

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvplan import Group, Region, Worker, certify, plan_mesh, verify
from kvplan.testing.strategies import Case, cases
from property_tests import fewer
from property_tests.mutants import faults, requests
from property_tests.oracle import contents, copies_of, problems
from property_tests.worlds import Side, workers

NUM_REQUESTS: Final = 8
"""Enough that some have whole blocks, which move by long runs."""


@given(cases())
def test_both_oracles_find_reads_right(case: Case) -> None:
    """The independent oracle and kvplan.verify both find every byte of the reads right.

    Planned together or alone, each destination has the same plan.
    """
    held = {source.key: contents(source, case.tables[1], dict.fromkeys(case.spans[0])) for source in case.sources}
    mesh = plan_mesh(case.destinations, case.sources, not_transferred=case.not_transferred)
    total = 0
    for worker, plan in zip(case.destinations, mesh.plans, strict=True):
        specs = plan.bind(**case.request(plan))
        for spec, alone in zip(specs, case.reads(worker).bind(**case.request(plan)), strict=True):
            assert np.array_equal(spec.local_ids, alone.local_ids)
            assert np.array_equal(spec.remote_ids, alone.remote_ids)
            assert np.array_equal(spec.local_table.rows, alone.local_table.rows)
            assert np.array_equal(spec.remote_table.rows, alone.remote_table.rows)
        needed = contents(worker, case.tables[0], case.spans[0])
        assert problems(needed, held, [copy for spec in specs for copy in copies_of(spec)]) == []
        total += len(needed)
    event("moves bytes" if total else "moves nothing")
    report = verify(mesh, local=case.tables[0], remote=case.tables[1], tokens=case.tokens[0])
    assert report.ok, str(report)
    assert report.num_bytes == total


def halved(workers: Iterable[Worker], are_apart: bool) -> tuple[Worker, ...]:
    """The workers with K and V of each view as a view each, where they were; if apart, in regions of their own.

    Each region begins where the view's region did, so that V begins in one where K ends in the other.
    """
    changed = []
    for worker in workers:
        views = []
        for view in worker.views:
            (kv,) = (axis for axis in view.axes if axis.name == "kv")
            for half in range(kv.start, kv.stop):
                axes = [attrs.evolve(axis, start=half, stop=half + 1) if axis is kv else axis for axis in view.axes]
                offset = view.offset_bytes + (half - kv.start) * kv.stride_bytes
                views.append(attrs.evolve(view, axes=axes, offset_bytes=offset))
        if are_apart:
            views = [attrs.evolve(view, region=f"{number}") for number, view in enumerate(views)]
            regions = []
            address = 1 << 32
            for view in views:
                regions.append(Region(view.region, address, view.end_bytes))
                address += view.end_bytes
            worker = attrs.evolve(worker, regions=regions, views=views)
        changed.append(attrs.evolve(worker, views=views))
    return tuple(changed)


@pytest.mark.parametrize("apart", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("order", ["btkhd", "bkthd", "bhktd", "bthkd"])
def test_nothing_joins_across_regions(order: str, apart: tuple[bool, bool]) -> None:
    """K and V that follow each other, in a token or after a block's tokens, in regions that touch stay two runs."""
    random = Random(0)
    for tokens in ((2, 2), (4, 2), (2, 3)):
        engines = []
        for name, per_block, are_apart in zip("dp", tokens, apart, strict=True):
            made = workers(name, 1 << 32, (2,), Side(1, (per_block,), order), 12)
            engines.append(halved(made, are_apart))
        destinations, sources = engines
        plans = plan_mesh(destinations, sources).plans
        for request, spans in itertools.islice(requests((destinations, sources), "READ", random), NUM_REQUESTS):
            assert faults(plans, request, spans, complete=True) == []


def with_slots_of(workers: Iterable[Worker], size: int) -> tuple[Worker, ...]:
    """The workers with ``size`` tokens in each slot of their token groups, and as many times more in turns."""
    changed = []
    for worker in workers:
        groups = []
        for group in worker.groups:
            if group.tokens_per_block is not None:
                interleave = group.context.interleave_tokens * size
                context = attrs.evolve(group.context, interleave_tokens=interleave)
                group = Group(group.name, group.tokens_per_block * size, context, size)
            groups.append(group)
        changed.append(attrs.evolve(worker, groups=groups))
    return tuple(changed)


@fewer(3)
@given(cases(), st.sampled_from([2, 3, 16]), st.integers(0, 15))
def test_a_slot_of_several_tokens_moves_as_one(case: Case, size: int, short: int) -> None:
    """As many tokens more, in slots of as many tokens, are the same rows and ids; a last slot may not be full."""
    scaled = attrs.evolve(
        case,
        destinations=with_slots_of(case.destinations, size),
        sources=with_slots_of(case.sources, size),
    )
    paged = {group.name for worker in case.destinations for group in worker.groups if group.tokens_per_block}

    def in_tokens(span: Any, name: str | None = None) -> Any:
        """The range in tokens, the last slot of which lacks some."""
        if span is None or (name is not None and name not in paged):
            return span
        start, stop = span[0] * size, span[1] * size
        return start, max(start, stop - short % size) if stop > start else stop

    tokens = case.tokens[0]
    if isinstance(tokens, Mapping):
        tokens = {name: in_tokens(span, name) for name, span in tokens.items()}
    else:
        tokens = in_tokens(tokens)
    skipped = case.not_transferred
    meshes = [plan_mesh(sides.destinations, sides.sources, not_transferred=skipped) for sides in (case, scaled)]
    for plan, larger in zip(meshes[0].plans, meshes[1].plans, strict=True):
        request: dict[str, Any] = {**case.request(plan)}
        names = {group.name for group in plan.local.groups}
        chosen = {name: tokens[name] for name in names & tokens.keys()} if isinstance(tokens, Mapping) else tokens
        specs = plan.bind(**request), larger.bind(**{**request, "tokens": chosen})
        for spec, same in zip(*specs, strict=True):
            assert np.array_equal(spec.local_ids, same.local_ids)
            assert np.array_equal(spec.remote_ids, same.remote_ids)
            assert np.array_equal(spec.local_table.rows, same.local_table.rows)
            assert np.array_equal(spec.remote_table.rows, same.remote_table.rows)
    report = verify(meshes[1], local=case.tables[0], remote=case.tables[1], tokens=tokens)
    assert report.ok, str(report)
    assert certify(meshes[1]) == certify(meshes[0])
