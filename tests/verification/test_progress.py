"""Progress: shares from 0 to 1 that only grow, from whatever takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvplan import Blocks, plan_mesh, verify, verify_together
from kvplan.cli import demo
from kvplan.cli.advice import advise
from kvplan.cli.matrix import cases, cells
from kvplan.cli.sides import Side
from kvplan.cli.trials import Request, Trial
from kvplan.models.model import Model
from kvplan.verification.progress import Progress, part, told, untold
from tests.small import engine

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = Model.from_config({**CONFIG, "num_key_value_heads": 4}, "tiny")
MESH = plan_mesh(engine("decode", tp=2, tokens=8), engine("prefill"))
REQUEST: dict[str, Any] = {"local": {"attn": Blocks([7])}, "remote": {"attn": Blocks([4, 9])}, "tokens": (0, 8)}


def run_matrix(progress: Progress) -> None:
    assert len(list(cells(TINY, progress=progress))) == len(list(cases(TINY)))


LONG: dict[str, Callable[[Progress], object]] = {
    "verify": lambda progress: verify(MESH, **REQUEST, progress=progress),
    "verify together": lambda progress: verify_together([(MESH, REQUEST)], progress=progress),
    "trial": lambda progress: Trial.of(Request.of(TINY, Side(tp=2), Side(tp=4), (0, 20)), progress),
    "advise": lambda progress: advise(TINY, Side(layout="LBNHC"), Side(tp=2), 20, progress),
    "matrix": run_matrix,
    "demo": lambda progress: list(demo.trials(progress)),
}


def test_an_item_is_done_when_the_next_is_asked_for() -> None:
    """Shares are told between items, not before the first."""
    shares: list[float] = []
    for number, _ in enumerate(told("abcd", shares.append)):
        assert len(shares) == number
    assert shares == [0.25, 0.5, 0.75, 1]


def test_parts_are_nested() -> None:
    """A part of a part tells its share of the whole."""
    shares: list[float] = []
    inner = part(part(shares.append, 1, 2), 2, 4)
    inner(0)
    inner(1)
    assert shares == [0.75, 0.875]


def test_nobody_needs_to_listen() -> None:
    """Without a listener nothing happens."""
    assert list(told((), untold)) == []
    assert list(told((1, 2), untold)) == [1, 2]


@pytest.mark.parametrize("name", LONG)
def test_shares_grow_to_all_of_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever takes long tells shares in steps that never go back, and all of it in the end."""
    monkeypatch.setattr(demo, "CASES", demo.CASES[4:5] * 2)
    shares: list[float] = []
    LONG[name](shares.append)
    assert shares == sorted(shares)
    assert len(set(shares)) > 1
    assert 0 < shares[0] < 0.6
    assert shares[-1] == pytest.approx(1)


def test_a_destination_is_told_in_steps() -> None:
    """Filling, copying and comparing are steps of each destination worker."""
    shares: list[float] = []
    verify(MESH, **REQUEST, progress=shares.append)
    assert shares == pytest.approx([1 / 6, 2 / 6, 5 / 12, 6 / 12, 4 / 6, 5 / 6, 11 / 12, 1])
