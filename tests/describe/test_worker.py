"""Workers (V): what is checked of a worker as a whole."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import attrs
import pytest
from attrs.exceptions import FrozenInstanceError
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Axis, Group, KVPlanError, Region, View, Worker
from kvplan.describe.views import Geometry
from tests.bytes_of import element_bytes, small_views
from tests.small import engine

TOKEN, DIM = Axis("token", 0, 4, 4, 16), Axis("dim", 0, 8, 8, 2)
VIEW = View("layers.0", "attn", "kv", "bfloat16", (TOKEN, DIM), 10, 64)
STATE = View("ssm.0", "ssm", "kv", "float32", (Axis("state", 0, 4, 4, 4),), 40, 16)
FIELDS: dict[str, Any] = {
    "engine_id": "prefill",
    "rank": 3,
    "regions": (Region("kv", 4096, 640),),
    "groups": (Group("attn", 4), Group("ssm")),
    "views": (VIEW, STATE),
}


def worker_error(**changes: Any) -> KVPlanError:
    """The error that a worker with these fields ends in."""
    with pytest.raises(KVPlanError) as caught:
        Worker(**{**FIELDS, **changes})
    return caught.value


def test_a_worker_is_one_short_line() -> None:
    """At a prompt, an engine is readable: its workers don't list their regions, of which models have many."""
    assert repr(Worker(**FIELDS)) == "<Worker prefill/3: 2 views of 2 tensors in 1 region, 2 groups>"


def test_a_worker_is_made_of_any_sequences() -> None:
    """Lists and iterators become tuples, so that equal workers are equal and hash alike."""
    lists: dict[str, Any] = {key: list(FIELDS[key]) for key in ("regions", "groups")}
    made = Worker(**{**FIELDS, **lists, "views": iter(FIELDS["views"])})
    assert made == Worker(*FIELDS.values())
    assert hash(made) == hash(Worker(**FIELDS))
    assert (made.regions, made.groups, made.views) == (FIELDS["regions"], FIELDS["groups"], FIELDS["views"])


def two_views(**second: Any) -> list[View]:
    """A view of each half of a pool, the second with other values."""
    return [attrs.evolve(VIEW, num_blocks=5), attrs.evolve(VIEW, num_blocks=5, offset_bytes=320, **second)]


@pytest.mark.parametrize(
    "second",
    [
        {"name": "layers.1"},
        {"axes": (TOKEN, Axis("dim", 8, 16, 16, 2))},
        {"axes": (TOKEN, Axis("dim", 0, 4, 8, 2))},
        {"group": "other"},
    ],
)
def test_v5_tensors_may_have_several_views(second: dict[str, Any]) -> None:
    """describe.V5: two views of one name are two boxes of one tensor, or a box of each group."""
    groups = (*FIELDS["groups"], Group("other", 4))
    assert len(Worker(**{**FIELDS, "groups": groups, "views": two_views(**second)}).views) == 2


def test_v5_a_shard_of_a_tensor_is_kept_once() -> None:
    """describe.V5: a layer with the name of another would take that one's bytes, and its own would not move."""
    error = worker_error(views=two_views())
    assert (error.code, error.details["name"]) == ("NAME", "layers.0")
    turned = two_views(axes=(Axis("dim", 0, 8, 8, 8), Axis("token", 0, 4, 4, 2)))
    assert worker_error(views=turned).code == "NAME"


@given(small_views(), st.integers(-1, 1))
def test_v2_bytes_lie_inside_the_region(view: View, more: int) -> None:
    """describe.V2: a view fits a region that reaches to its last byte, and none that is shorter."""
    size = max(element_bytes(view)) + 1 + more
    fields = ("e", 0, (Region("r", 0, size),), (Group("g"),), (view,)) if size else None
    if more >= 0:
        assert fields is not None
        assert Worker(*fields).views == (view,)
    elif fields is not None:
        with pytest.raises(KVPlanError, match=r"^BOUNDS"):
            Worker(*fields)


def test_v3_the_digits_of_the_token_axis_multiply() -> None:
    """describe.V3: two kernel blocks of four slots fill a block of eight."""
    view = attrs.evolve(VIEW, axes=(Axis("token", 0, 2, 2, 64), TOKEN, DIM), num_blocks=5, block_stride_bytes=128)
    worker = Worker(**{**FIELDS, "groups": (Group("attn", 8),), "views": (view,)})
    assert worker.views[0].sizes["token"] == 8


@given(st.lists(small_views(), min_size=2, max_size=3))
def test_v4_views_of_a_group_share_no_byte(views: list[View]) -> None:
    """describe.V4: views that share a byte are refused; others only if their blocks lie between each other unlike."""
    named = [attrs.evolve(view, name=f"v{i}") for i, view in enumerate(views)]
    held = [set(element_bytes(view)) for view in named]
    fields = ("e", 0, (Region("r", 0, 1 << 20),), (Group("g"),), named)
    if any(a & b for a, b in itertools.combinations(held, 2)):
        with pytest.raises(KVPlanError, match=r"^OVERLAP"):
            Worker(*fields)
    else:
        try:
            assert Worker(*fields).views == tuple(named)
        except KVPlanError as error:
            strides = {view.block_stride_bytes for view in named if view.num_blocks > 1}
            assert error.code == "OVERLAP"
            assert len(strides) > 1


def test_v4_groups_may_share_bytes() -> None:
    """describe.V4 is about one group: attention and state blocks of a hybrid pool lie over one another."""
    assert Worker(**FIELDS).views == (VIEW, STATE)
    error = worker_error(views=(VIEW, attrs.evolve(VIEW, name="layers.1")))
    assert (error.code, error.details["first"], error.details["second"]) == ("OVERLAP", "layers.0", "layers.1")
    assert (error.details["blocks"], error.details["bytes"]) == ((0, 0), (0, 0))


def test_v4_regions_are_apart() -> None:
    """describe.V4 compares offsets within one region: the same offsets in another are other bytes."""
    views = (VIEW, attrs.evolve(VIEW, name="layers.1", region="kv.1"))
    regions = (Region("kv", 4096, 640), Region("kv.1", 8192, 640))
    assert Worker(**{**FIELDS, "regions": regions, "views": views}).views == views


def test_equal_layers_share_a_geometry() -> None:
    """Layers that differ by name and offset alone have one geometry."""
    (worker,) = engine(layers=5)
    group = worker.groups[0]
    assert worker.geometries == (
        Geometry(
            worker.views[0].axes, "bfloat16", group, worker.views[0].num_blocks, worker.views[0].block_stride_bytes
        ),
    )


def test_unlike_layers_have_geometries_of_their_own() -> None:
    """A geometry for each difference in axes, dtype, group, blocks or block stride, in order of appearance."""
    base = attrs.evolve(VIEW, num_blocks=2)
    views = [
        base,
        attrs.evolve(base, dtype="float16"),
        attrs.evolve(base, axes=(TOKEN, attrs.evolve(DIM, name="width"))),
        attrs.evolve(base, block_stride_bytes=80),
        attrs.evolve(base, num_blocks=3),
        attrs.evolve(base, group="other"),
        base,
    ]
    placed = [attrs.evolve(view, name=f"v{i}", offset_bytes=i << 10) for i, view in enumerate(views)]
    groups = (Group("attn", 4), Group("other", 4))
    worker = Worker("e", 0, (Region("kv", 0, 1 << 20),), groups, placed)
    made = [
        Geometry(view.axes, view.dtype, groups[view.group == "other"], view.num_blocks, view.block_stride_bytes)
        for view in views[:6]
    ]
    assert worker.geometries == tuple(made)


def test_tensors_and_offsets_follow_the_views() -> None:
    """A tensor knows its views, a view its region and its offset there, and its geometry."""
    lower, upper = (
        attrs.evolve(VIEW, axes=(TOKEN, Axis("dim", start, start + 8, 16, 2)), num_blocks=5) for start in (0, 8)
    )
    upper = attrs.evolve(upper, offset_bytes=320, region="kv.1")
    other = attrs.evolve(VIEW, name="layers.1", region="kv.1", num_blocks=4)
    regions = (Region("kv", 4096, 640), Region("kv.1", 8192, 640))
    worker = Worker(**{**FIELDS, "regions": regions, "views": (lower, other, upper)})
    assert dict(worker.tensors) == {"layers.0": (0, 2), "layers.1": (1,)}
    assert worker.region_offsets.tolist() == [[0, 0], [1, 0], [1, 320]]
    assert worker.geometry_of == (0, 1, 2)


def test_a_worker_pickles() -> None:
    """A worker that was planned with survives pickling, and is equal afterwards."""
    (worker,) = engine(contexts=(1, 1))
    assert worker.geometries
    copy = pickle.loads(pickle.dumps(worker))
    assert copy == worker
    assert copy.geometries == worker.geometries


def test_a_worker_is_frozen() -> None:
    """Nobody changes a worker; evolving it checks it again."""
    worker = Worker(**FIELDS)
    with pytest.raises(FrozenInstanceError):
        worker.rank = 4  # type: ignore[misc]
    assert attrs.evolve(worker, rank=4).label == "prefill/4"
    with pytest.raises(KVPlanError, match=r"^BOUNDS"):
        attrs.evolve(worker, regions=(Region("kv", 4096, 639),))


@pytest.mark.parametrize("apart", [0, 160, 639])
def test_views_of_one_group_share_no_byte_across_regions_that_overlap(apart: int) -> None:
    """describe.V4: what counts is the memory, not under which region's name it is described."""
    regions = [Region("kv", 4096, 640), Region("again", 4096 + apart, 640)]
    views = [VIEW, attrs.evolve(VIEW, name="layers.1", region="again")]
    with pytest.raises(KVPlanError, match=r"^OVERLAP: cannot place view 'layers\.1'"):
        Worker("engine", 0, regions, [Group("attn", 4)], views)


def test_views_stand_in_regions_that_overlap_where_they_do_not() -> None:
    """describe.V4: views of two groups may share memory, and so may regions that touch, or lie on different devices."""
    groups = [Group("attn", 4), Group("swa", 4)]
    other = attrs.evolve(VIEW, name="layers.1", region="again")
    for region, view in (
        (Region("again", 4096, 640), attrs.evolve(other, group="swa")),
        (Region("again", 4096 + 640, 640), other),
        (Region("again", 4096, 640, "VRAM", 1), other),
    ):
        assert len(Worker("engine", 0, [Region("kv", 4096, 640), region], groups, [VIEW, view]).views) == 2


def test_extensions_have_one_form() -> None:
    """Extensions are kept as JSON text, sorted, and workers that differ in them are equal."""
    worker = Worker("e", 0, (), (), (), extensions={"b": [1.5, None], "a": {"d": "é", "c": True}})
    assert worker.extensions == '{"a":{"c":true,"d":"\\u00e9"},"b":[1.5,null]}'
    assert attrs.evolve(worker, rank=1).extensions == worker.extensions
    assert pickle.loads(pickle.dumps(worker)).extensions == worker.extensions
    plain = Worker("e", 0, (), (), ())
    assert (plain, plain.extensions) == (worker, "{}")


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize(
    "value",
    [
        "[]",
        "{",
        {"a": b""},
        {"a": float("nan")},
        {"a": "\ud800"},
        {1: 0, "b": 0},
        {"a": nested(99999)},
    ],
    ids=lambda value: str(type(value)),
)
def test_extensions_are_json(value: Any) -> None:
    """Anything but a mapping of JSON values is refused."""
    with pytest.raises(
        KVPlanError, match=r"^TYPE: cannot read extensions of a worker: expected a mapping of JSON values"
    ):
        Worker("e", 0, (), (), (), extensions=value)


def test_a_model_is_a_name_or_empty() -> None:
    """The model is text of printable characters; the empty one is unknown."""
    assert Worker("e", 0, (), (), ()).model == ""
    with pytest.raises(KVPlanError, match=r"^NAME: cannot read model of a worker"):
        Worker("e", 0, (), (), (), "a\nb")
    with pytest.raises(KVPlanError, match=r"^TYPE: cannot read model of a worker"):
        Worker("e", 0, (), (), (), None)  # type: ignore[arg-type]


def test_a_mistyped_region_lists_names_in_brief() -> None:
    """Of 80 layers the message has their numbers, and the name that is close."""
    (worker,) = engine("decode", layers=80)
    views = [attrs.evolve(worker.views[0], region="kv.O"), *worker.views[1:]]
    with pytest.raises(KVPlanError) as caught:
        attrs.evolve(worker, views=views)
    assert "expected one of the regions kv.0-79, got 'kv.O' (did you mean 'kv." in str(caught.value)
    assert len(str(caught.value)) < 200
