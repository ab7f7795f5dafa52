"""The bytes of a view, one element at a time: the formula of a view and nothing else."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from kvplan import Axis, KVPlanError, View


def element_bytes(view: View) -> list[int]:
    """Where in its region each byte of each element of each block stands, repeats included."""
    spans = [range(axis.start, axis.stop) for axis in view.axes]
    found: list[int] = []
    for block in range(view.num_blocks):
        for coordinates in itertools.product(*spans):
            offset = view.offset_bytes + block * view.block_stride_bytes
            offset += sum((c - axis.start) * axis.stride_bytes for axis, c in zip(view.axes, coordinates, strict=True))
            found += range(offset, offset + view.itemsize)
    return found


@st.composite
def view_fields(draw: st.DrawFn) -> dict[str, object]:
    """The fields of a small view; its elements may share bytes."""
    axes = []
    for name in draw(st.sampled_from(["", "a", "ab", "abc"])):
        start, extent, rest = draw(st.integers(0, 2)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
        axes.append(Axis(name, start, start + extent, start + extent + rest, draw(st.integers(0, 24))))
    return {
        "name": "v",
        "group": "g",
        "region": "r",
        "dtype": draw(st.sampled_from(["uint8", "bfloat16", "float32"])),
        "axes": tuple(axes),
        "num_blocks": draw(st.integers(1, 4)),
        "block_stride_bytes": draw(st.integers(0, 60)),
        "offset_bytes": draw(st.integers(0, 40)),
    }


def view_or_refusal(fields: dict[str, object]) -> View | KVPlanError:
    """The view with these fields, or the error that it ends in."""
    try:
        return View(**fields)  # type: ignore[arg-type]
    except KVPlanError as error:
        return error


def small_views() -> st.SearchStrategy[View]:
    """Small views whose elements have bytes of their own."""
    return view_fields().map(view_or_refusal).filter(lambda made: isinstance(made, View))  # type: ignore[return-value]
