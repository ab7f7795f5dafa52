"""Regions, contexts, groups and views, against enumeration."""

from __future__ import annotations

import math
import pickle

import attrs
import numpy as np
import pytest
from attrs.exceptions import FrozenInstanceError
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplan import Axis, Context, Group, KVPlanError, Region, View
from kvplan.describe.views import _WITHOUT_ADDRESS, ITEMSIZE, Geometry
from tests.bytes_of import element_bytes, small_views, view_fields, view_or_refusal

TOKEN, DIM = Axis("token", 0, 16, 16, 256), Axis("dim", 0, 128, 128, 2)
VIEW = View("layers.0.attn", "attn", "kv.0", "bfloat16", (TOKEN, DIM), 100, 4096, 512)
VALUES = (
    DIM,
    Region("kv", (1 << 64) - 8, 8, "VRAM", 3),
    Context(1, 4, 16),
    Group("attn", 16, Context(1, 4, 16)),
    Group("ssm"),
    VIEW,
)


@given(view_fields())
def test_elements_that_share_bytes_are_refused(fields: dict[str, object]) -> None:
    """No view is accepted of which two elements share a byte."""
    made = view_or_refusal(fields)
    assume(isinstance(made, View))
    assert isinstance(made, View)
    found = element_bytes(made)
    assert len(set(found)) == len(found)


@given(view_fields())
def test_elements_are_refused_for_sharing_bytes_alone(fields: dict[str, object]) -> None:
    """A refusal is STRIDE, and some step is shorter than what the finer steps span."""
    made = view_or_refusal(fields)
    assume(isinstance(made, KVPlanError))
    assert isinstance(made, KVPlanError)
    assert made.code == "STRIDE"
    assert made.details["stride_bytes"] < made.details["span_bytes"]


@given(st.permutations(["kv", "head", "token", "dim"]), st.integers(0, 3), st.integers(0, 64))
def test_nested_layouts_are_accepted(order: list[str], block_at: int, gap: int) -> None:
    """Any order of axes from slow to fast, with the block anywhere among them and gaps anywhere, is a view."""
    step, axes, block_stride = 2, [], 0
    for i, name in enumerate(reversed(order)):
        if i == block_at:
            block_stride, step = step, step * 5 + gap
        axes.append(Axis(name, 0, 3, 3, step))
        step = step * 3 + gap
    view = View("v", "g", "r", "bfloat16", axes, 5, block_stride)
    assert len(set(element_bytes(view))) == 2 * 3**4 * 5


@given(small_views())
def test_block_bytes_counts_the_data(view: View) -> None:
    """``block_bytes`` times the number of blocks is the number of bytes that elements have."""
    assert view.block_bytes * view.num_blocks == len(element_bytes(view))


@given(small_views())
def test_end_bytes_is_past_the_last_byte(view: View) -> None:
    """``end_bytes`` is one more than the largest offset of a byte, and ``offset_bytes`` the smallest."""
    found = element_bytes(view)
    assert (view.offset_bytes, view.end_bytes) == (min(found), max(found) + 1)


@given(small_views())
def test_a_geometry_says_the_same_as_its_view(view: View) -> None:
    """A geometry has the itemsize, sizes and segments of the views that it is shared by, but for axes of size 1."""
    made = Geometry(view.axes, view.dtype, Group("g"), view.num_blocks, view.block_stride_bytes)
    sizes = {name: size for name, size in view.sizes.items() if size > 1}
    assert (made.itemsize, dict(made.sizes)) == (view.itemsize, sizes)
    for axis in (axis for axis in view.axes if axis.name in sizes):
        found = made.segments[axis.name]
        steps = [(c - axis.start) * axis.stride_bytes for c in range(axis.start, axis.stop)]
        assert found.at(np.arange(axis.start, axis.stop)).tolist() == steps
    assert made.segments["token"].covered == ((0, 1),)


def test_a_pool_of_one_block_has_no_block_stride_to_check() -> None:
    """With one block any block stride will do, with two it has to clear the block."""
    assert attrs.evolve(VIEW, num_blocks=1, block_stride_bytes=0).block_bytes == 4096
    with pytest.raises(KVPlanError, match=r"^STRIDE: .*'block' to step over the 4096 bytes"):
        attrs.evolve(VIEW, num_blocks=2, block_stride_bytes=4095)


def test_a_token_axis_in_digits_is_whole() -> None:
    """Kernel blocks are a token axis of two digits; each of them has to be whole."""
    kernel = (Axis("token", 0, 33, 33, 8192), Axis("token", 0, 16, 16, 256))
    assert attrs.evolve(VIEW, axes=(*kernel, DIM), num_blocks=1).sizes == {"token": 528, "dim": 128}
    with pytest.raises(KVPlanError, match=r"^SIZE: .* expected all 33 slots of the token axis, got \[0, 32\)"):
        attrs.evolve(VIEW, axes=(Axis("token", 0, 32, 33, 8192), kernel[1], DIM), num_blocks=1)


def test_digits_may_not_make_a_size_that_overflows() -> None:
    """The product of the digits of a name has to fit 63 bits, as every size does."""
    half = Axis("dim", 0, 1, 1 << 31, 0)
    assert attrs.evolve(VIEW, axes=(half, half)).sizes == {"dim": 1 << 62}
    with pytest.raises(KVPlanError, match=r"^RANGE: .*the global size of axis 'dim'"):
        attrs.evolve(VIEW, axes=(half, half, Axis("dim", 0, 1, 2, 0)))


def test_a_view_takes_its_group_and_region_by_name_or_as_they_are() -> None:
    """A Group and a Region stand for their names."""
    named = attrs.evolve(VIEW, group=Group("attn", 16), region=Region("kv.0", 0, 1 << 20))
    assert named == VIEW
    assert (named.group, named.region) == ("attn", "kv.0")


def test_axes_may_come_as_any_iterable() -> None:
    """Axes are stored as a tuple, so a view is hashable whatever it was made from."""
    assert attrs.evolve(VIEW, axes=iter([TOKEN, DIM])) == attrs.evolve(VIEW, axes=[TOKEN, DIM]) == VIEW
    assert len({VIEW, attrs.evolve(VIEW, axes=[TOKEN, DIM])}) == 1


@pytest.mark.parametrize("value", [value for value in VALUES if value != VIEW], ids=lambda value: type(value).__name__)
def test_repr_evaluates_back(value: object) -> None:
    """The repr of a value is an expression for it, but that of a view, which says how many axes it has."""
    assert eval(repr(value)) == value


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen_hashable_and_pickle(value: object) -> None:
    """A value can be a key, travels between processes, and cannot be changed."""
    assert {pickle.loads(pickle.dumps(value)): 1} == {value: 1}
    with pytest.raises(FrozenInstanceError):
        value.name = "x"  # type: ignore[attr-defined]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 200))
def test_each_position_is_held_by_one_context(size: int, interleave: int, position: int) -> None:
    """Of the contexts of one size and interleave, exactly the one whose turn it is has a position."""
    holders = [rank for rank in range(size) if position in Context(rank, size, interleave)]
    assert holders == [position // interleave % size]


def test_one_context_has_no_interleave() -> None:
    """A context of one worker is the same whatever its interleave."""
    assert Context(0, 1, 16) == Context()


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_item_sizes_are_those_of_numpy(dtype: str) -> None:
    """Every dtype that numpy knows by the same name has the same bytes per element; the rest say so in bits."""
    sizes = {"bfloat16": 2, **{name: 1 for name in ITEMSIZE if name.startswith("float8")}}
    expected = sizes[dtype] if dtype in sizes else np.dtype(dtype).itemsize
    assert ITEMSIZE[dtype] == expected
    assert attrs.evolve(VIEW, dtype=dtype, axes=(), num_blocks=1).block_bytes == expected


def test_a_view_without_axes_is_one_element_a_block() -> None:
    """A scalar a block, like the length of a state, needs no axis."""
    view = View("v", "g", "r", "int64", (), 10, 8)
    assert (view.block_bytes, view.end_bytes, view.sizes) == (8, 80, {})
    assert math.prod(view.sizes.values()) == 1


@pytest.mark.parametrize(
    ("name", "offset", "text"), [("", 0, "NAME: cannot read name of"), ("a", -1, "RANGE: cannot read")]
)
def test_a_view_at_another_place_is_checked_there(name: str, offset: int, text: str) -> None:
    """A new name and offset have the rules of any others, and the same messages."""
    view, region = View("a", "g", "r", "int8", (), 1, 8), Region("r.1", 64, 64)
    for make in (lambda: view.at(name, region, offset), lambda: attrs.evolve(view, name=name, offset_bytes=offset)):
        with pytest.raises(KVPlanError) as caught:
            make()
        assert str(caught.value).startswith(text)
    assert view.at("b", region, 8) == attrs.evolve(view, name="b", region="r.1", offset_bytes=8)
    assert {field.name for field in attrs.fields(View)} == {*_WITHOUT_ADDRESS, "name", "region", "offset_bytes"}
