"""What a notebook shows of values: pictures of workers and plans, and texts of the others."""

from __future__ import annotations

import subprocess
import sys
from html import escape

import pytest

from kvplan import Blocks, KVPlanError, Model, Worker, compare, explain, plan_mesh, plan_reads, show, verify
from kvplan.display import blockmap
from kvplan.staging import choose
from tests.small import engine

PREFILL, DECODE = engine("prefill", tp=2), engine("decode")
PLAN = plan_reads(DECODE[0], PREFILL)
TABLE = {"attn": Blocks([0])}


@pytest.mark.parametrize("value", [DECODE[0], PLAN])
def test_a_worker_and_a_plan_are_pictures(value: Worker) -> None:
    """As :func:`kvplan.show` draws them."""
    assert value._repr_svg_() == show(value).svg


@pytest.mark.parametrize(
    "value",
    [
        Model.shipped("llama-3.1-8b"),
        plan_mesh(DECODE, PREFILL),
        compare(DECODE[0], PREFILL[0]),
        verify(PLAN, local=TABLE, remote=TABLE, tokens=(0, 4)),
        PLAN.cost(),
        choose(DECODE[0], PREFILL, tokens=4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_texts(value: Model) -> None:
    """What :func:`kvplan.explain` says, as HTML."""
    text = escape(explain(value))
    style = "font-family: monospace; white-space: pre; overflow-x: auto"
    assert value._repr_html_() == f'<pre style="{style}">{text}</pre>'


def test_what_cannot_be_drawn_has_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook shows its text then."""
    monkeypatch.setattr(blockmap, "MAX_PIECES", 0)
    with pytest.raises(KVPlanError, match=r"^RANGE: cannot draw"):
        show(PLAN)
    assert PLAN._repr_svg_() is None


def test_nothing_loads_display_before_a_notebook_asks() -> None:
    """A connector never does."""
    code = "import sys, kvplan; print([name for name in sys.modules if name.startswith('kvplan.display')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
