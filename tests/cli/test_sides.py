"""Sides: what the command line's words mean."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVPlanError, Model
from kvplan.cli.sides import MAX_TOKENS, Side, in_bits, load, token_range


def refusal(read: Callable[[str, str], object], text: str) -> str | None:
    """The code with which a text is refused, or ``None``."""
    try:
        read(text, "--option")
    except KVPlanError as error:
        return error.code
    return None


TEXT = (
    "tp=4,pp=2,dcp=3,pcp=5,interleave=6,block=7,layout=BLHNC,kv=axis,pad=8,blocks=9,conv=SD,stages=10+22,kernel=11,"
    "shared=1,scales=page,spread=1,draft=qwen3-0.6b"
)


def test_every_key_is_read() -> None:
    """Each key of a side sets its own value, and there are no others."""
    expected = (4, 2, 3, 5, 6, 7, "BLHNC", "axis", 8, 9, "SD", (10, 22), 11, True, "page", True, "qwen3-0.6b")
    assert Side.parse(TEXT, "--src") == Side(*expected)
    assert [item.partition("=")[0] for item in TEXT.split(",")] == [field.name for field in attrs.fields(Side)]


def test_every_key_is_written() -> None:
    """A side's text has each key that is not left out, in their order."""
    assert str(Side.parse(TEXT, "--src")) == TEXT


def test_an_empty_side_is_the_default() -> None:
    """What is left out has a plain default."""
    assert Side.parse("", "--src") == Side(tp=1, block=16, layout="LBHNC")


@given(
    st.builds(
        Side,
        tp=st.integers(1, 63),
        pad=st.integers(0, 9),
        layout=st.sampled_from(["LBHNC", "BLHNC"]),
        block=st.none() | st.integers(1, 99),
        stages=st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
        shared=st.booleans(),
        draft=st.none() | st.sampled_from(Model.names()),
    )
)
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


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *(("stages=1+", "TYPE"), ("stages=", "TYPE"), ("stages=0+4", "RANGE")),
        *(("shared=yes", "TYPE"), ("shared=2", "RANGE"), ("block=none", "TYPE"), ("kernel=0", "RANGE")),
        ("tp=64,stages=" + "+".join(["1"] * 64), "RANGE"),
    ],
)
def test_what_no_engine_has_is_refused(text: str, code: str) -> None:
    """Stages are counts of layers, switches are 1 or 0, and stages count towards the number of workers."""
    assert refusal(Side.parse, text) == code


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


def test_a_shared_side_divides_its_groups() -> None:
    """shared=1 gives a hybrid model several groups of states, over one memory."""
    (worker,) = Side.parse("shared=1", "--src").engine(Model.shipped("qwen3-next-80b"), "e", 2)
    assert [group.name for group in worker.groups] == ["state", "state.1", "state.2", "attn"]
    assert len(worker.regions) == 12


def test_a_block_as_large_as_a_state() -> None:
    """block=auto makes a block of as many kernel blocks as a state is large."""
    side = Side.parse("tp=4,block=auto,kv=split,kernel=16", "--src")
    (worker, *_) = side.engine(Model.shipped("nemotron-3-nano-30b-a3b"), "e", 2)
    assert {group.tokens_per_block for group in worker.groups} == {None, 131 * 16}


def test_stages_and_a_draft_reach_the_engine() -> None:
    """Stages hold the layers given, and the last one those of the draft."""
    workers = Side.parse("stages=3+13,draft=qwen3-0.6b", "--src").engine(Model.shipped("llama-3.2-1b"), "e", 2)
    assert [len(worker.views) for worker in workers] == [3, 13 + 28]


def test_scales_and_spread_reach_the_engine() -> None:
    """scales=region keeps scales apart, and spread=1 makes context ranks of PCP."""
    model = in_bits(Model.shipped("llama-3.2-1b"), 8)
    first, second = Side.parse("scales=region,pcp=2,spread=1", "--src").engine(model, "e", 2)
    assert len(first.regions) == 2 * 16
    assert [worker.groups[0].context.rank for worker in (first, second)] == [0, 1]


ALL = "'kvplan --help' lists all"


@pytest.mark.parametrize(
    "model, told",
    [
        ("llama-3.1-9b", "'llama-3.1-9b' (did you mean 'llama-3.1-8b', 'llama-3.1-70b' or 'llama-3.2-1b'? {all})"),
        ("Llama-3.1-8B", "'Llama-3.1-8B' (did you mean 'llama-3.1-8b'? {all})"),
        ("meta-llama/Llama-3.1-8B", "'meta-llama/Llama-3.1-8B': no such file (did you mean 'llama-3.1-8b'? {all})"),
        ("no/such-thing", "'no/such-thing': no such file ({all})"),
        ("xyz", "'xyz' ({all})"),
        ("./nope.json", "'./nope.json': no such file"),
        ("llama-3.1-8b.json", "'llama-3.1-8b.json': no such file"),
        ("/", "'/': Is a directory"),
    ],
)
def test_a_model_that_is_not_found_is_told_with_those_like_it(model: str, told: str) -> None:
    """A name has up to three like it, in lower case and without its organisation; a file that is not there is none."""
    with pytest.raises(KVPlanError) as caught:
        load(model)
    expected = "expected the name of a shipped model, or the path of a config.json, got "
    assert str(caught.value) == f"CONFIG: cannot load a model: {expected}{told.format(all=ALL)}"


@pytest.mark.parametrize("key, hint", [("tpp", "did you mean 'tp', 'pp' or 'pcp'?"), ("TP", "did you mean 'tp'?")])
def test_a_key_with_a_slip_in_it_is_told_with_those_like_it(key: str, hint: str) -> None:
    """A key that is none has those like it; one that is like none has no hint."""
    with pytest.raises(KVPlanError, match=r"^LAYOUT: cannot read --src: expected keys of tp, pp, ") as caught:
        Side.parse(f"{key}=4", "--src")
    assert caught.value.hint == hint
    with pytest.raises(KVPlanError) as caught:
        Side.parse("zzz=4", "--src")
    assert caught.value.hint == ""
