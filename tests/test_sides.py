"""Sides: what the command line's words mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVPlanError, Model
from kvplan.sides import MAX_TOKENS, Side, token_range


def refusal(read: Callable[[str, str], object], text: str) -> str | None:
    """The code with which a text is refused, or ``None``."""
    try:
        read(text, "--option")
    except KVPlanError as error:
        return error.code
    return None


def test_every_key_is_read() -> None:
    """Each key of a side sets its own value."""
    text = "tp=4,pp=2,dcp=3,pcp=5,interleave=6,block=7,pad=8,blocks=9,layout=BLHNC,kv=axis,conv=SD"
    side = Side.parse(text, "--src")
    assert side == Side(4, 2, 3, 5, 6, 7, "BLHNC", "axis", 8, 9, "SD")


def test_an_empty_side_is_the_default() -> None:
    """What is left out has a plain default."""
    assert Side.parse("", "--src") == Side(tp=1, block=16, layout="LBHNC")


@given(st.builds(Side, tp=st.integers(1, 63), pad=st.integers(0, 9), layout=st.sampled_from(["LBHNC", "BLHNC"])))
def test_text_of_a_side_reads_back(side: Side) -> None:
    """A side's text is a side again, the same."""
    assert Side.parse(str(side), "--src") == side


@given(st.text() | st.from_regex(r"[a-z]+=[\w٣²-]*(,[a-z]+=\w*)*", fullmatch=True))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Whatever the text, a side is read or refused with a code; nothing else is raised."""
    assert refusal(Side.parse, text) in (None, "LAYOUT", "NAME", "TYPE", "RANGE")


@given(st.text(alphabet="0123456789:-٣ "))
def test_any_token_range_is_read_or_refused(text: str) -> None:
    """Whatever the text, a range is read or refused with a code."""
    assert refusal(token_range, text) in (None, "TYPE", "RANGE")


@given(st.integers(0, MAX_TOKENS), st.integers(0, MAX_TOKENS))
def test_a_range_that_is_read_is_in_order(start: int, stop: int) -> None:
    """A range is read exactly where its start is not behind its stop."""
    if start <= stop:
        assert token_range(f"{start}:{stop}", "--tokens") == (start, stop)
    else:
        assert refusal(token_range, f"{start}:{stop}") == "RANGE"


def test_an_empty_range_is_a_range() -> None:
    """A range may hold nothing."""
    assert token_range("5:5", "--tokens") == (5, 5)


@pytest.mark.parametrize("text", ["tp=", "tp=1.5", "tp=1_0", "tp= 4", "tp=+4", "tp=٣"])
def test_only_decimal_digits_are_a_number(text: str) -> None:
    """What Python's int() would forgive is refused."""
    with pytest.raises(KVPlanError, match="TYPE: cannot read tp of --src"):
        Side.parse(text, "--src")


def test_conv_reaches_the_engine() -> None:
    """conv=SD makes the steps of a convolution the slower dimension, and an unknown word is refused."""
    model = Model.shipped("falcon-mamba-7b")
    (worker,) = Side.parse("conv=SD", "--src").engine(model, "e", 2)
    assert {axis.name: axis.stride_bytes for axis in worker.views[0].axes} == {"step": 2 * 8192, "channel": 2}
    with pytest.raises(KVPlanError, match="cannot read conv: expected one of DS, SD, got 'X'"):
        Side.parse("conv=X", "--src").engine(model, "e", 2)
