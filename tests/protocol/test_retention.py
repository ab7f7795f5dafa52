"""Engines that keep fewer positions than a reader needs are refused when they meet, whatever a prompt's length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from kvplan import KVPlanError, Model, plan_reads
from kvplan.models.tensors import attention, mamba1
from kvplan.protocol.retention import WHOLE_PROMPTS, WINDOWS, check_kept, keeping

MODEL = Model("m", (attention(2, 4), attention(2, 4, "swa", 8)), "int32")
STATES = Model("m", (attention(2, 4), mamba1(4, 2, 2, "int32", "int32")), "int32")


def checked(destination: Mapping[str, int], source: Any) -> None:
    """Check a plan between two engines whose groups keep windows."""
    (local,), (remote,) = (MODEL.engine(name, num_blocks=4) for name in ("decode", "prefill"))
    remote = attrs.evolve(remote, extensions={WINDOWS: source, "own": 1})
    check_kept(plan_reads(keeping(local, destination), [remote]))


@pytest.mark.parametrize(
    ("destination", "source"),
    [({}, {}), ({"swa": 7}, {"swa": 7}), ({"swa": 7}, {}), ({"swa": 7}, {"swa": 15}), ({}, {"other": 7})],
)
def test_a_source_that_keeps_enough(destination: dict[str, int], source: dict[str, int]) -> None:
    """A reader with a window reads from a source that keeps as much, or all positions."""
    checked(destination, source)


@pytest.mark.parametrize(
    ("destination", "text"),
    [({}, "expected a source that keeps all positions"), ({"swa": 15}, "expected a source that keeps the last 15")],
)
def test_a_source_that_has_freed_what_is_needed(destination: dict[str, int], text: str) -> None:
    """GROUP, with both values."""
    with pytest.raises(KVPlanError, match=f"^GROUP: cannot read group 'swa' from prefill/0: {text}") as caught:
        checked(destination, {"swa": 7})
    assert caught.value.got == "one whose group 'swa' keeps the last 7 positions"


@pytest.mark.parametrize("windows", [None, 7, [], {"swa": "7"}, {"swa": True}, {"swa": None}])
def test_windows_of_a_peer_that_are_none(windows: Any) -> None:
    """A peer's extensions are data: what is no window is none."""
    checked({"swa": 7}, windows)


def test_extensions_stay() -> None:
    """A connector's own facts stay beside windows."""
    (worker,) = MODEL.engine("decode", num_blocks=4)
    assert keeping(attrs.evolve(worker, extensions={"own": 1}), {"swa": 7}).extensions == (
        '{"kvplan.windows":{"swa":7},"own":1}'
    )


def check_ends(reader: str, source: str, model: Model, kept: dict[str, int], error: str | None) -> None:
    """Check a plan between engines that have whole prompts, or also what is before the last token."""
    (local,), (remote,) = (model.engine(name, num_blocks=4) for name in ("decode", "prefill"))
    local = keeping(local, {"swa": 7}, whole_prompts=reader == "whole")
    plan = plan_reads(local, [keeping(remote, kept, whole_prompts=source == "whole")])
    if error is None:
        check_kept(plan)
        return
    with pytest.raises(KVPlanError, match=f"^GROUP: .*{error}"):
        check_kept(plan)


@pytest.mark.parametrize(
    ("reader", "source", "error"),
    [
        ("rest", "rest", None),
        ("whole", "whole", None),
        ("whole", "rest", None),
        ("rest", "whole", "group 'state' .* keeps the state before a prompt's last token, got .* after it"),
    ],
)
def test_a_state_is_of_the_position_where_its_reader_goes_on(reader: str, source: str, error: str | None) -> None:
    """vLLM's prefill stops where a request asks it to, so a reader of whole prompts is served by it too."""
    check_ends(reader, source, STATES, {}, error)


@pytest.mark.parametrize(("kept", "error"), [(7, "expected a source that keeps the last 8 positions"), (8, None)])
def test_the_last_token_attends_to_one_position_more(kept: int, error: str | None) -> None:
    """Of a whole prompt, whose last token its reader computes again."""
    check_ends("rest", "whole", MODEL, {"swa": kept}, error)


def test_what_is_not_true_is_no_whole_prompt() -> None:
    (local,), (remote,) = (MODEL.engine(name, num_blocks=4) for name in ("decode", "prefill"))
    remote = attrs.evolve(remote, extensions={WINDOWS: {"swa": 7}, WHOLE_PROMPTS: "yes"})
    check_kept(plan_reads(keeping(local, {"swa": 7}), [remote]))
