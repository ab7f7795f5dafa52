"""Read specs: descriptors of ids, however these came about."""

from typing import Any

import attrs
import numpy as np
import pytest

from kvplan import Axis, Blocks, Group, Region, View, Worker, plan_reads
from tests.small import engine

PAIRS = {
    "heads of a page": (engine("d", tp=2)[1], engine("p")),
    "tokens one by one": (engine("d", order="NH")[0], engine("p", tp=2)),
    "unequal blocks": (engine("d", tokens=6)[0], engine("p", tokens=4)),
}


def specs(name, **evolved):
    plan = plan_reads(*PAIRS[name])
    ours, theirs = {"attn": Blocks([3, 0, 5])}, {"attn": Blocks([6, 7, 1, 4])}
    return [attrs.evolve(spec, **evolved) for spec in plan.bind(local=ours, remote=theirs, tokens=(1, 11))]


def one_by_one(spec):
    """The bytes of every id on both sides, joined where they go on in one region, in plain Python."""
    found = []
    for pair in zip(spec.local_ids.tolist(), spec.remote_ids.tolist(), strict=True):
        sides = []
        for table, number in zip((spec.local_table, spec.remote_table), pair, strict=True):
            row = max(i for i, first in enumerate(table.first.tolist()) if first <= number)
            address, length, device, stride, count = table.rows[row].tolist()
            assert number - table.first[row] < count
            sides.append((int(table.region[row]), address + (number - int(table.first[row])) * stride, length, device))
        found.append(sides)
    joined: list[list[tuple[int, ...]]] = []
    for ours, theirs in sorted(found):
        before = joined[-1] if joined else None
        if before and all(
            (was[0], was[1] + was[2]) == now[:2] for was, now in zip(before, (ours, theirs), strict=True)
        ):
            joined[-1] = [(*was[:2], was[2] + now[2], was[3]) for was, now in zip(before, (ours, theirs), strict=True)]
        else:
            joined.append([ours, theirs])
    return [[side[1:] for side in (pair[i] for pair in joined)] for i in (0, 1)]


def descriptors(spec):
    return [[tuple(row) for row in side.tolist()] for side in spec.descriptors()]


@pytest.mark.parametrize("name", PAIRS)
def test_ids_are_what_counts(name):
    """Two ids of a strand are exchanged on one side: shapes that do not hold are not used."""
    for spec in specs(name):
        ids = spec.remote_ids.copy()
        ids[[0, 1]] = ids[[1, 0]]
        changed = attrs.evolve(spec, remote_ids=ids)
        assert descriptors(changed) == one_by_one(changed) != descriptors(spec)


@pytest.mark.parametrize("shapes", [((2, 3), (1, 4)), ((0, 5),), ((5, 2),)])
def test_shapes_of_other_ids_are_left_alone(shapes):
    """Shapes that have too many or too few ids, or as many and otherwise made up."""
    for spec in specs("heads of a page", shapes=shapes):
        assert descriptors(spec) == one_by_one(spec)


@pytest.mark.parametrize("name", PAIRS)
def test_ids_that_are_known_to_be_sums_are_not_taken_apart(name):
    """Each sum is as many strands as its shape says, in order of local ids: work does not grow with ids."""
    for spec in specs(name):
        sums = list(spec._sums())
        assert [(ours[0].size, ours[1].size) for ours, _ in sums] == list(spec.shapes)
        assert all((np.diff(ours[1]) > 0).all() for ours, _ in sums)
        assert sum(len(first) * along.size for (first, along), _ in sums) == spec.local_ids.size


def test_a_spec_says_which_way_bytes_go():
    """To the local worker of a read, from that of a write."""
    (spec,) = specs("heads of a page")
    assert repr(spec) == f"<ReadSpec d/1 <- p/0: {spec.local_ids.size} ids>"
    assert repr(attrs.evolve(spec, operation="WRITE")) == f"<ReadSpec d/1 -> p/0: {spec.local_ids.size} ids>"


@pytest.mark.parametrize("unused", [0, 1])
def test_regions_are_never_joined(unused):
    """The last byte that is used of one region and the first byte of the next are two descriptors."""
    axes = (Axis("dim", 0, 1, 1, 1),)
    views = [View(name, "g", name, "uint8", axes, 10, 1) for name in "ab"]
    regions = [Region(name, (i + 1) << 40, 10 + unused) for i, name in enumerate("ab")]
    ours, theirs = (Worker(name, 0, regions, [Group("g")], views) for name in "dp")
    tables = {"g": Blocks([9, 0])}
    (spec,) = plan_reads(ours, [theirs]).bind(local=tables, remote=tables)
    assert spec.num_descriptors == 4


@pytest.mark.parametrize("start", [2, 3])
@pytest.mark.parametrize(("local", "remote"), [([3, 4], [6, 7]), ([6, 7], [3, 4])])
def test_runs_join_the_tokens_before_them(local, remote, start):
    """Of neighbouring blocks, some tokens and the whole block behind them are one descriptor."""
    (ours,), (theirs,) = (engine(name, order="NH", layers=1) for name in "dp")
    (spec,) = plan_reads(ours, [theirs]).bind(
        local={"attn": Blocks(local)}, remote={"attn": Blocks(remote)}, tokens=(start, 8)
    )
    assert spec.num_descriptors == 1


def test_blocks_that_are_read_twice_join_each_time():
    """Neighbouring blocks of the source, listed twice, are one descriptor for each two of the destination."""
    (ours,), (theirs,) = (engine(name, order="NH", layers=1) for name in "dp")
    (spec,) = plan_reads(ours, [theirs]).bind(
        local={"attn": Blocks([4, 5, 8, 9])}, remote={"attn": Blocks([3, 4, 3, 4])}, tokens=(1, 16)
    )
    assert spec.num_descriptors == 2


@pytest.mark.parametrize("tokens", [(0, 7), (0, 4)])
def test_descriptors_are_in_order_of_local_address(tokens):
    """Regions that a worker lists from high to low addresses give descriptors from low to high."""
    (mine,), (other,) = engine("d"), engine("p")
    turned = attrs.evolve(mine, regions=mine.regions[::-1])
    plans = [plan_reads(local, [other]) for local in (mine, turned)]
    tables: Any = {"local": {"attn": Blocks([3, 1])}, "remote": {"attn": Blocks([2, 5])}, "tokens": tokens}
    ours, theirs = ([side.tolist() for side in plan.bind(**tables)[0].descriptors()] for plan in plans)
    assert ours[0] == theirs[0] == sorted(ours[0])
    assert ours == theirs
