"""Small worlds: a fixed part of them is right, they cover all pairs of features, and faults are found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvplan import MeshPlan, ReadSpec, TransferPlan, Worker, plan_mesh
from kvplan.staging import StagedPlan
from property_tests import labelled
from property_tests.exhaustive import Job, all_worlds, do_world, main
from property_tests.grids import BLOCKS, GRIDS, LAYOUTS, PACKINGS, SPREADS, UP_TO_4, Grid
from property_tests.labelled import Tally
from property_tests.staged import CHECKS
from property_tests.worlds import APART, WITHIN, Heads, Request, Side, World, workers

PART_OF_GRID = 60

KINDS: Mapping[str, tuple[Any, ...]] = {
    "tp": UP_TO_4,
    "tokens": BLOCKS,
    "order": LAYOUTS,
    "spread": SPREADS,
    "packing": PACKINGS,
    "heads": UP_TO_4,
    "tensors": (1, 2),
}
"""The features of worlds. The last two are of both sides together."""

Feature = tuple[str, str, Any]
"""The side, or both; the kind; the value."""


def numbers_of(grid: Grid) -> range:
    """The numbers of a grid's worlds."""
    worlds = all_worlds()
    own = [i for i, sheet in enumerate(worlds.sheets) if sheet.grid is grid]
    return range(worlds.first[own[0]], worlds.first[own[-1] + 1])


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name.replace(" ", "-"))
def test_a_part_of_each_grid_is_right(grid: Grid) -> None:
    """Worlds from all parts of a grid are planned, certified and moved byte for byte."""
    numbers = numbers_of(grid)
    count = PART_OF_GRID // 10 if grid.every_start else PART_OF_GRID
    tally = Tally()
    for turn in range(count):
        number = numbers[turn * len(numbers) // count + turn % 7]
        assert do_world(number, Job(certify_every=2), tally) is None, number
    assert tally.worlds == count
    assert tally.certificates
    assert tally.num_bytes


def test_equal_layouts_in_two_regions_are_right() -> None:
    """Runs of equal offsets in different regions stay apart: heads of one tensor do not continue those of another."""
    side = Side(1, (2,), "bhtkd")
    requests = [Request(0, 25, by_ids=True), Request(3, 20, by_ids=False)]
    labelled.check(World((2, 2), side, side, 25), requests, True, Tally())


@pytest.mark.parametrize("strategy", CHECKS)
def test_some_worlds_are_right_in_two_steps(strategy: str) -> None:
    """Some worlds are right by each strategy, with several requests of each."""
    tally, total = Tally(), len(all_worlds())
    for number in range(0, total, total // 12):
        assert do_world(number, Job(strategy), tally) is None, number
    assert tally.requests > tally.worlds > 12


def test_there_are_more_than_a_million_worlds() -> None:
    """The grids have more than 1,000,000 worlds."""
    assert len(all_worlds()) > 1_000_000


def test_no_world_has_two_numbers() -> None:
    """No pair of sides is in two sheets of the same tensors, or twice in one."""
    sheets = [sheet for sheet in all_worlds().sheets if sheet.heads == (2,)]
    pairs = {
        (destination, source)
        for sheet in sheets
        for destination, row in zip(sheet.destinations, sheet.rows, strict=True)
        for source in row
    }
    assert len(sheets) > 3
    assert len(pairs) == sum(map(len, sheets))


@pytest.mark.parametrize("heads", [(1,), (3,), (1, 2), (2, 3)])
def test_different_sides_make_different_workers(heads: Heads) -> None:
    """Two different sides of a sheet make different workers."""
    sides = {side for sheet in all_worlds().sheets if sheet.heads == heads for side in sheet.destinations}
    assert len({workers("engine", 0, heads, side, 3) for side in sides}) == len(sides) > 10


def test_a_side_represents_all_with_the_same_bytes() -> None:
    """All orders of axes that make the same workers are one side."""
    heads, sides = (2, 1), [Side(2, (1, 3), "".join(order)) for order in itertools.permutations("bhtkd")]
    settled = {side.settled(heads) for side in sides}
    made = {workers("engine", 0, heads, side, 3) for side in settled}
    assert {workers("engine", 0, heads, side, 3) for side in sides} == made
    assert len(made) == len(settled) < len(sides)


def features(where: str, side: Side) -> set[Feature]:
    """The features of a side."""
    alone = {(where, kind, getattr(side, kind)) for kind in ("tp", "order", "spread", "packing")}
    return alone | {(where, "tokens", (tokens,)) for tokens in side.tokens}


def features_together() -> set[tuple[Feature, Feature]]:
    """All pairs of features of any world."""
    met: set[tuple[Feature, Feature]] = set()
    for grid, heads in [(each, heads) for each in GRIDS for heads in each.heads]:
        common = {("both", "tensors", len(heads)), *(("both", "heads", count) for count in heads)}
        met |= set(itertools.product(common, common))
        of_side: dict[str, set[Feature]] = {}
        for where, choices in (("to", grid.destination), ("from", grid.source)):
            every = (Side(**dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values()))
            made = [features(where, side) for side in every if side.possible(heads)]
            met |= {pair for side in made for pair in itertools.product(side, side | common)}
            of_side[where] = set().union(*made)
        met |= set(itertools.product(of_side["to"], of_side["from"]))
    return met


def impossible(one: Feature, other: Feature) -> bool:
    """Whether a side cannot have both features: packing needs two tensors, one view of K and V, outermost blocks."""
    values = {one[1]: one[2], other[1]: other[2]}
    packing = values.get("packing", APART)
    if values.get("tensors") == 1 or "order" not in values:
        return packing != APART and values.get("tensors") == 1
    return one[0] == other[0] and (
        (packing != APART and "k" not in values["order"]) or (packing == WITHIN and values["order"][0] != "b")
    )


def test_any_two_choices_meet() -> None:
    """For any two features that a world can have, on the same side or not, there is a world with both."""
    every: list[Feature] = [
        (where, kind, value)
        for kind, values in KINDS.items()
        for where in (("both",) if kind in ("heads", "tensors") else ("to", "from"))
        for value in values
    ]
    met = features_together()
    left = [
        pair
        for pair in itertools.combinations(every, 2)
        if pair[0][:2] != pair[1][:2] and pair not in met and pair[::-1] not in met
    ]
    assert all(impossible(*pair) for pair in left), [pair for pair in left if not impossible(*pair)]
    assert len(met) > 10_000


def first_of(grid: str) -> int:
    """The first world of a grid with several source workers."""
    numbers = numbers_of(next(each for each in GRIDS if each.name == grid))
    worlds = all_worlds()
    return next(n for n in numbers if worlds[n].source.tp > 1 and worlds[n].destination.tp == 1 < min(worlds[n].heads))


def without_the_last(spec: ReadSpec) -> ReadSpec:
    """The ids without the last."""
    return attrs.evolve(spec, local_ids=spec.local_ids[:-1], remote_ids=spec.remote_ids[:-1])


def in_reverse(spec: ReadSpec) -> ReadSpec:
    """The ids of one side in reverse order."""
    return attrs.evolve(spec, remote_ids=spec.remote_ids[::-1])


def twice(spec: ReadSpec) -> ReadSpec:
    """The ids with one of them repeated."""
    return attrs.evolve(
        spec,
        **{side: getattr(spec, side)[[*range(len(getattr(spec, side))), 0]] for side in ("local_ids", "remote_ids")},
    )


@pytest.mark.parametrize(
    "fault, reason",
    [(without_the_last, "bytes, the first at"), (in_reverse, "bytes, the first at"), (twice, "bytes are moved where")],
)
def test_a_wrong_plan_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[ReadSpec], ReadSpec], reason: str
) -> None:
    """Specs with a descriptor too few, too many or in another place are found, by ids and by ranges."""

    class Faulty:
        def __init__(self, plan: TransferPlan) -> None:
            self.plan, self.local = plan, plan.local

        def bind(self, **request: Any) -> tuple[ReadSpec, ...]:
            specs = self.plan.bind(**request)
            return (fault(specs[0]), *specs[1:]) if specs[0].local_ids.size > 1 else specs

    def faulty(destinations: Sequence[Worker], sources: Sequence[Worker]) -> Any:
        return SimpleNamespace(plans=[Faulty(plan) for plan in plan_mesh(destinations, sources).plans])

    monkeypatch.setattr(labelled, "plan_mesh", faulty)
    number = first_of("sharding, blocks and layouts")
    assert reason in (do_world(number + number % 2, Job(certify_every=10**9), Tally()) or "")
    monkeypatch.undo()
    assert do_world(number + number % 2, Job(certify_every=1), Tally()) is None


def of_the_first_source(destinations: Sequence[Worker], sources: Sequence[Worker]) -> MeshPlan:
    """Plans with the first source alone."""
    return plan_mesh(destinations, sources[:1])


def test_a_source_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world that is not planned is a fault."""
    monkeypatch.setattr(labelled, "plan_mesh", of_the_first_source)
    why = do_world(first_of("two tensors, sharded"), Job(certify_every=1), Tally())
    assert why
    assert why.startswith("FaultError: plan: KVPlanError: COVER: cannot plan for decode/0: ")


def test_a_wrong_chunk_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Transfers in two steps are checked as well."""
    argument = ["--strategy", "receive-staged", "--world", str(first_of("any strides"))]
    assert main(argument) == 0
    bind = StagedPlan.bind
    monkeypatch.setattr(StagedPlan, "bind", lambda plan, **request: list(bind(plan, **request))[:-1])
    assert main(argument) == 1
    assert "FaultError: " in capsys.readouterr().out


def test_a_run_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run checks what the first has not, its sums include both, and a third has nothing left."""
    state = ["--processes", "1", "--slice", "2/3000", "--state", str(tmp_path / "state.json")]
    for limit, worlds in ((100, "100 worlds"), (200, "200 worlds"), (200, "200 worlds")):
        assert main([*state, "--limit", str(limit)]) == 0
        assert capsys.readouterr().out.startswith(worlds)
    with pytest.raises(SystemExit, match="is of another run"):
        main([*state[:3], "3/3000", *state[4:], "--limit", "100"])


def test_a_wrong_world_is_printed_with_its_definition(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output has the world's number, its definition and its fault, and the exit status is 1."""
    number = first_of("any strides")
    assert main(["--world", str(number)]) == 0
    monkeypatch.setattr(labelled, "plan_mesh", of_the_first_source)
    assert main(["--world", str(number)]) == 1
    right, wrong = capsys.readouterr().out.split(f"world {number}: ")[1:]
    assert right.split("\n") == [repr(all_worlds()[number]), "  right", ""]
    assert "COVER" in wrong
