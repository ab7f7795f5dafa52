"""TAIL: the bytes after a range, and block tables with gaps, by their definitions."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from kvplan import Blocks, KVPlanError, Request, TransferPlan, Worker, tails
from kvplan.testing.strategies import Case, cases
from property_tests import fewer
from property_tests.oracle import Meaning, Place, Span, contents, copies_of, problems

Block = tuple[str, int]
"""A block of a request: group and ordinal."""

Bytes = dict[Place, Meaning]


def block_ids(tables: Mapping[str, Blocks]) -> dict[Block, int]:
    """The id of each block of tables without gaps."""
    return {
        (name, at): block for name, table in tables.items() for at, block in enumerate(table.ids.tolist(), table.first)
    }


def by_block(worker: Worker, tables: Mapping[str, Blocks], spans: Mapping[str, Span]) -> dict[Block, Bytes]:
    """The meaning of each byte of a worker's blocks, by block."""
    return {
        (name, at): contents(worker, {name: Blocks([block], at)}, spans)
        for (name, at), block in block_ids(tables).items()
    }


def joined(parts: Mapping[Block, Bytes], blocks: Collection[Block]) -> Bytes:
    """The meaning of each byte of some blocks."""
    return {place: meaning for block in blocks for place, meaning in parts[block].items()}


def some(tables: Mapping[str, Blocks], choice: random.Random) -> set[Block]:
    """About half of the blocks."""
    return {block for block in block_ids(tables) if choice.random() < 0.5}


def serving(offered: Iterable[Mapping[Block, Bytes]], needed: Bytes) -> set[Block]:
    """The blocks of sources that hold needed bytes."""
    wanted = {meaning[:2] for meaning in needed.values()}
    return {
        block
        for parts in offered
        for block, here in parts.items()
        if not wanted.isdisjoint(meaning[:2] for meaning in here.values())
    }


def gapped(name: str, table: Blocks, kept: Collection[Block], form: random.Random) -> Blocks:
    """A table of the ``kept`` blocks alone, by ordinals, or with null blocks in place of the others."""
    every = block_ids({name: table})
    here = {block: every[block] for block in every if block in kept}
    if form.random() < 0.5:
        return Blocks(list(here.values()), ordinals=[at for _, at in here], listed=table.listed)
    null = form.choice([every[block] for block in every if block not in kept] or [table.highest + 1])
    behind = [null] * (table.listed[1] - table.stop)  # gaps that the table lists behind its last block
    return Blocks([*(here.get(block, null) for block in every), *behind], table.first, null)


def with_gaps(
    case: Case, plan: TransferPlan, kept: Collection[Block], left: Collection[Block], form: random.Random
) -> Request:
    """The request of a case with the blocks ``kept`` at the destination and ``left`` at the sources."""
    request = case.request(plan)
    request["local"] = {name: gapped(name, table, kept, form) for name, table in request["local"].items()}
    request["remote"] = {name: gapped(name, table, left, form) for name, table in request["remote"].items()}
    return request


@given(cases())
def test_tails_are_the_bytes_of_listed_blocks_behind_the_range(case: Case) -> None:
    """Tails are each tensor's bytes at positions after its group's range, each once, and no others."""
    for worker in case.destinations:
        groups = {group.name: group for group in worker.groups}
        tokens = case.tokens[0]
        if isinstance(tokens, Mapping):
            ranges = {name: span for name, span in tokens.items() if name in groups}
            tokens = ranges
        else:
            ranges = {name: tokens for name, group in groups.items() if tokens and group.tokens_per_block}
        tables = {name: blocks for name, blocks in case.tables[0].items() if name in groups}
        behind: dict[str, list[Place]] = {view.name: [] for view in worker.views if view.group in ranges}
        stop = {view.name: ranges[view.group][1] for view in worker.views if view.group in ranges}
        for place, (tensor, position, _, _) in contents(worker, tables, dict.fromkeys(behind)).items():
            if position >= stop[tensor]:
                behind[tensor].append(place)
        found = {
            tensor: [(device, at) for start, length, device in rows.tolist() for at in range(start, start + length)]
            for tensor, rows in tails(worker, tables, tokens).items()
        }
        assert {tensor: sorted(places) for tensor, places in found.items()} == {t: sorted(p) for t, p in behind.items()}
        event("has a tail" if any(behind.values()) else "has none")


def requests_with_gaps(
    case: Case, seed: int
) -> Iterator[tuple[TransferPlan, Request, Bytes, dict[tuple[str, int], Bytes]]]:
    """For each destination its plan, a request of some blocks, the bytes that it needs, and those that sources hold."""
    choice, anywhere = random.Random(seed), dict.fromkeys(case.spans[0])
    offered = {source.key: by_block(source, case.tables[1], anywhere) for source in case.sources}
    for plan in map(case.reads, case.destinations):
        kept = some(case.tables[0], choice)
        needed = joined(by_block(plan.local, case.tables[0], case.spans[0]), kept)
        left = some(case.tables[1], choice) | serving(offered.values(), needed)
        held = {source: joined(parts, left) for source, parts in offered.items()}
        yield plan, with_gaps(case, plan, kept, left, choice), needed, held


@given(cases(), st.integers(0, 999))
def test_where_a_table_has_no_block_nothing_is_wanted(case: Case, seed: int) -> None:
    """The blocks of a destination with gaps get their bytes, also from a source that lacks the others."""
    for plan, request, needed, held in requests_with_gaps(case, seed):
        specs = plan.bind(**request)
        assert problems(needed, held, [copy for spec in specs for copy in copies_of(spec)]) == []
        event("moves bytes" if needed else "moves nothing")


@fewer(2)
@given(cases(), st.integers(0, 999))
def test_a_block_that_a_source_lacks_and_a_destination_wants_is_refused(case: Case, seed: int) -> None:
    """A gap in place of any source block with needed bytes is refused."""
    choice, anywhere = random.Random(seed), dict.fromkeys(case.spans[0])
    worker = choice.choice(case.destinations)
    kept = some(case.tables[0], choice)
    needed = joined(by_block(worker, case.tables[0], case.spans[0]), kept)
    serve = sorted(serving([by_block(source, case.tables[1], anywhere) for source in case.sources], needed))
    assume(serve)
    lost = choice.choice(serve)
    plan = case.reads(worker)
    with pytest.raises(KVPlanError) as refused:
        plan.bind(**with_gaps(case, plan, kept, block_ids(case.tables[1]).keys() - {lost}, choice))
    assert refused.value.code == "BLOCKS"
    assert refused.value.details["group"] == lost[0]
