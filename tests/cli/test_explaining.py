"""``kvplan explain``: both engines and what a plan registers, in three details and as JSON."""

from __future__ import annotations

import json
import re

import pytest

from kvplan import Model, decode, explain, plan_mesh
from kvplan.show.explanation import WIDTH
from tests.conftest import Cli

SMALL = ("explain", "qwen3-0.6b", "--src", "tp=2,blocks=9", "--dst", "tp=4,blocks=10")
MODEL = Model.shipped("qwen3-0.6b")
SRC, DST = MODEL.engine("src", tp=2, num_blocks=9), MODEL.engine("dst", tp=4, num_blocks=10)
MESH = plan_mesh(DST, SRC)


def test_explain_tells_both_engines_and_the_plan(cli: Cli) -> None:
    """explain shows a worker of each side, then the rows of every pair."""
    run = cli("explain", "qwen3-0.6b", "--src", "tp=2", "--dst", "tp=4,blocks=10")
    assert run.status == 0
    assert "src, tp=2: 2 workers" in run.out
    assert "views layers.0-27.attn in group attn" in run.out
    assert "in each of 10 blocks" in run.out
    assert re.search(r"dst/3 reads from 1 of 2 workers: .*\n    <- src/1: ", run.out)


def test_a_line_of_each_side_and_the_plans(cli: Cli) -> None:
    """With --detail line, each side is a title and a worker's line, and all plans are one."""
    run = cli(*SMALL, "--detail", "line")
    assert (run.status, run.err) == (0, "")
    assert run.out.splitlines() == [
        "src, tp=2,blocks=9: 2 workers, the first is",
        str(SRC[0]),
        "dst, tp=4,blocks=10: 4 workers, the first is",
        str(DST[0]),
        explain(MESH, detail="line"),
    ]


def test_every_row_of_all(cli: Cli) -> None:
    """With --detail rows, every worker of both sides and every plan is told row by row."""
    run = cli(*SMALL, "--detail", "rows")
    told = [
        *("src, tp=2,blocks=9: 2 workers", *(explain(worker, detail="rows") for worker in SRC), ""),
        *("dst, tp=4,blocks=10: 4 workers", *(explain(worker, detail="rows") for worker in DST), ""),
        explain(MESH, detail="rows"),
    ]
    assert run.status == 0
    assert run.out == "\n".join(told) + "\n"


@pytest.mark.parametrize("detail", ["line", "workers"])
def test_the_first_two_details_fit_a_terminal(cli: Cli, detail: str) -> None:
    """However long a side is, no line is longer than a terminal is wide."""
    stages = "+".join(["1"] * 40)
    run = cli("explain", "granite-4.0-h-tiny", "--src", f"tp=3,stages={stages}", "--detail", detail)
    assert run.status == 0
    assert max(map(len, run.out.splitlines())) <= WIDTH


def test_explain_as_json(cli: Cli) -> None:
    """--json has each worker as its offer, each row of each pair, and the completions of each worker."""
    document = json.loads(cli(*SMALL, "--json").out)
    offers = {key: [decode(json.dumps(offer).encode()) for offer in found] for key, found in document["offers"].items()}
    assert (document["model"], document["src"], document["dst"]) == ("qwen3-0.6b", "tp=2,blocks=9", "tp=4,blocks=10")
    assert offers == {"src": list(SRC), "dst": list(DST)}
    assert [plan["worker"] for plan in document["plans"]] == [worker.label for worker in DST]
    assert document["completions"]["src/1"] == {"sends": [], "awaits": ["dst/2", "dst/3"]}
    pairs = [pair for plan in document["plans"] for pair in plan["pairs"]]
    expected = [pair for plan in MESH.plans for pair in plan.pairs]
    for found, pair in zip(pairs, expected, strict=True):
        for side, table in (("local", pair.local_table), ("remote", pair.remote_table)):
            numbers = [
                [row[key] for key in ("address", "length", "device", "stride", "count")] for row in found["rows"][side]
            ]
            assert numbers == table.rows.tolist()
            assert [row["first_id"] for row in found["rows"][side]] == table.first.tolist()
    assert pairs[0]["rows"]["local"][1]["region"] == DST[0].regions[1].name


def test_an_unknown_detail_is_refused(cli: Cli) -> None:
    """What is no detail is one line and exit status 2."""
    run = cli(*SMALL, "--detail", "all")
    assert (run.status, run.out) == (2, "")
    assert run.err.startswith("NAME: cannot read the command line: ")
