"""Engines that keep fewer positions than a reader needs are refused when they meet, whatever a prompt's length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from kvplan import KVPlanError, Model, plan_reads
from kvplan.connector.retention import WINDOWS, check_kept, keeping
from kvplan.models.tensors import attention

MODEL = Model("m", (attention(2, 4), attention(2, 4, "swa", 8)), "int32")


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
