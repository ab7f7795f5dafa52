"""Meshes: the plans of whole engines, contacts, and what a lost worker leaves."""

from typing import Any, Literal

import attrs
import pytest

from kvplan import Blocks, KVPlanError, Model, contacts, plan_mesh, plan_writes, verify
from tests.small import engine

MODELS: Any = {
    "llama-3.1-8b": (
        ({"tp": 4}, {"tp": 16}),
        ({"tp": 3, "pp": 2}, {"tp": 2, "pp": 3}),
        ({"tp": 8}, {"tp": 16, "dcp": 2}),
    ),
    "nemotron-h-8b": (({"tp": 16}, {"tp": 4}), ({"tp": 2}, {"tp": 8, "pp": 2})),
    "deepseek-v3": (({"tp": 8}, {"tp": 16}), ({"tp": 8, "dcp": 8}, {"tp": 2, "pp": 4})),
    "gemma-4-31b": (({"tp": 8}, {"tp": 4}),),
}
"""Pairs of destination and source sizes."""

OPERATIONS: tuple[Literal["READ", "WRITE"], ...] = ("READ", "WRITE")


def test_a_mesh_of_reads_has_a_plan_for_each_destination():
    """In the order of the destinations."""
    mesh = plan_mesh(engine("d", tp=2, heads=4), engine("p", tp=4, heads=4))
    assert [plan.local.label for plan in mesh.plans] == ["d/0", "d/1"]
    assert repr(mesh) == "<MeshPlan: 2 plans, 6 workers>"


def test_a_mesh_of_writes_is_the_plans_of_its_workers():
    """Planned together or apart, each source writes the same ids; together they are verified."""
    destinations, sources = engine("d", tp=3, tokens=6), engine("p", tp=4)
    mesh = plan_mesh(destinations, sources, "WRITE")
    request: dict[str, Any] = {"local": {"attn": Blocks([1, 3])}, "remote": {"attn": Blocks([4, 2])}, "tokens": (1, 7)}
    assert verify(mesh, **request).ok
    for i, (worker, together) in enumerate(zip(sources, mesh.plans, strict=True)):
        apart = plan_writes(worker, destinations, sources[:i] + sources[i + 1 :])
        assert together.siblings == apart.siblings
        for one, other in zip(together.bind(**request), apart.bind(**request), strict=True):
            assert one.local_ids.tolist() == other.local_ids.tolist()
            assert one.remote_ids.tolist() == other.remote_ids.tolist()


@pytest.mark.parametrize(("name", "sizes"), [(name, sizes) for name, pairs in MODELS.items() for sizes in pairs])
def test_contacts_from_parallel_sizes_are_those_of_the_full_plan(name, sizes):
    """Engines of one block, in the default layout, tell who needs whom in any layout and with any blocks."""
    model = Model.shipped(name)
    small = [model.engine(label, num_blocks=1, **size) for label, size in zip("dp", sizes, strict=True)]
    found = contacts(*small)
    options: Any = {"layout": "BLHNC", "kv": "split"}, {"layout": "LBNHC", "tokens_per_block": 48}
    real: Any = [
        model.engine(label, num_blocks=7, **size, **option)
        for label, size, option in zip("dp", sizes, options, strict=True)
    ]
    for operation in OPERATIONS:
        met: dict[tuple[str, int], list[tuple[str, int]]] = {key: [] for key in found}
        for plan in plan_mesh(real[0], real[1], operation).plans:
            for pair in plan.pairs:
                if pair.group_pairs:
                    met[plan.local.key].append(pair.remote)
                    met[pair.remote].append(plan.local.key)
        assert {key: sorted(each) for key, each in met.items()} == {key: sorted(each) for key, each in found.items()}


def test_replicas_take_over_from_a_lost_worker():
    """Planned again without the source that serves a destination, another one that holds the same serves it."""
    destinations, sources = engine("d", heads=2), engine("p", tp=4, heads=2)
    before = contacts(destinations, sources)["d", 0]
    left = [worker for worker in sources if ("p", worker.rank) != before[0]]
    after = contacts(destinations, left)["d", 0]
    assert before[0] not in after
    mesh = plan_mesh(destinations, left)
    assert verify(mesh, local={"attn": Blocks([1, 2])}, remote={"attn": Blocks([3, 4])}, tokens=(0, 7)).ok


def test_what_nobody_holds_any_more_is_listed_in_full():
    """Heads of a lost rank, whole layers of a lost stage: one error has them all."""
    (mine,) = engine("d", heads=4, layers=3)
    first, second = engine("p", tp=2, heads=4, layers=2)
    with pytest.raises(KVPlanError) as refused:
        plan_mesh([mine], [second])
    missing = refused.value.details["missing"]
    assert missing == ("layers.0 and 1 like it: head [0, 2) of 4", "layers.2: all of it")
    assert refused.value.code == "TENSOR"
    with pytest.raises(KVPlanError) as refused:
        plan_mesh([mine], [first], not_transferred=["layers.2"])
    assert refused.value.code == "COVER"
    assert refused.value.details["missing"] == ("layers.0 and 1 like it: head [2, 4) of 4",)


@pytest.mark.parametrize("name", ["layer.0", "cache_0"])
def test_a_missing_tensor_is_shown_beside_the_names_of_the_sources(name: str):
    """One letter too few, or another name altogether: the sources' names for that layer, and where both sides are."""
    (mine,) = engine("d")
    mine = attrs.evolve(mine, views=[attrs.evolve(mine.views[0], name=name), *mine.views[1:]])
    with pytest.raises(KVPlanError, match=r"TENSOR: .*\(the sources have 'layers.0': compare shows both sides; name"):
        plan_mesh([mine], engine("p"))


def test_without_sources_everything_is_missing():
    """An engine of which no worker is left is no special case."""
    with pytest.raises(KVPlanError, match=r"TENSOR: .* got layers.0 and 1 like it: all of it"):
        plan_mesh(engine("d"), [])
    assert plan_mesh(engine("d"), [], not_transferred=["layers.0", "layers.1"]).plans[0].pairs == ()


def test_contacts_are_in_order_of_their_names():
    """A destination's sources are in order of their keys, however they are passed."""
    sources = engine("p", tp=8, heads=8, layers=1)
    found = contacts(engine("d", tp=2, heads=8, layers=1), sources[::-1])
    assert found["d", 1] == (("p", 4), ("p", 5), ("p", 6), ("p", 7))


def test_a_name_that_no_worker_has_is_no_tensor_to_leave_out():
    """A misspelt name in not_transferred would leave nothing out."""
    with pytest.raises(KVPlanError, match=r"NAME: cannot leave out a tensor: .* got 'layer.0'"):
        plan_mesh(engine("d"), engine("p"), not_transferred=["layer.0"])
