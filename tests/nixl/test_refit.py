"""The weights of docs/how-to/weights.md, moved over NIXL between the arrays themselves."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from kvplan_nixl import NixlExecutor
from tests.pages import ROOT, fences


def test_weights_are_refitted_twice() -> None:
    """After each step every part of the engine is as the trainer has computed it."""
    names: dict[str, Any] = {}
    for language, program in fences((ROOT / "docs/how-to/weights.md").read_text()):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(program, "weights.md", "exec"), names)
    num_parts = sum(len(parts) for _, parts in names["engine"])
    with contextlib.ExitStack() as opened:
        sources = [opened.enter_context(NixlExecutor(worker)) for worker in names["sources"]]
        executors = {worker.key: opened.enter_context(NixlExecutor(worker)) for worker in names["destinations"]}
        for plan in names["mesh"].plans:
            for source in sources:
                executors[plan.local.key].connect(source.envelope())
            executors[plan.local.key].prepare(plan)
        for step in (3, 4):
            names["train"](step)
            assert names["num_wrong"](step) == num_parts
            names["refit"](executors, step)
            assert names["num_wrong"](step) == 0
