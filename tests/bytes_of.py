"""Small random views, and their bytes by the independent oracle."""

from __future__ import annotations

from hypothesis import strategies as st

from kvplan import Axis, KVPlanError, View
from property_tests.oracle import elements


def element_bytes(view: View) -> list[int]:
    """The place in its region of each byte of each element of each block, with repetitions."""
    return [
        block * view.block_stride_bytes + offset + byte
        for block in range(view.num_blocks)
        for _, offset, _ in elements(view)
        for byte in range(view.itemsize)
    ]


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
    """The view with these fields, or the error that it raises."""
    try:
        return View(**fields)  # type: ignore[arg-type]
    except KVPlanError as error:
        return error


def small_views() -> st.SearchStrategy[View]:
    """Small views whose elements share no bytes."""
    return view_fields().map(view_or_refusal).filter(lambda made: isinstance(made, View))  # type: ignore[return-value]
