"""Checks of pages: fenced blocks, Python blocks run as one program, console sessions, and texts of examples."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import kvplan
from tests.conftest import Cli

ROOT = Path(__file__).parent.parent


def fences(text: str) -> list[tuple[str, str]]:
    """The language and text of each fenced block of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def differs(expected: str, got: str) -> str:
    """The difference, where ``...`` matches anything. Empty if there is none."""
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS
    if checker.check_output(expected, got, flags):
        return ""
    return checker.output_difference(doctest.Example("", expected), got, flags)


def wrong_prints(page: Path) -> list[str]:
    """The differences between the output of a page's Python blocks, run in order as one program, and the page.

    The expected output of a block is the text block right after it, or nothing. Without NIXL, a page runs up to the
    first block that mentions it.
    """
    namespace: dict[str, Any] = {}
    blocks = [*fences(page.read_text()), ("", "")]
    found = []
    for (kind, source), (following, text) in pairwise(blocks):
        if kind != "python":
            continue
        if "nixl" in source and find_spec("nixl") is None:
            break
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, page.name, "exec"), namespace)
        found.append(differs(text if following == "text" else "", printed.getvalue()))
    return [difference for difference in found if difference]


def wrong_program(page: Path, folder: Path) -> str:
    """The difference between what a page's Python prints, run as one file, and its text blocks. Empty if there is none.

    Such a page starts processes, which import the file.
    """
    blocks = fences(page.read_text())
    program = folder / "connector.py"
    program.write_text("\n\n".join(text for kind, text in blocks if kind == "python"))
    command = [sys.executable, program.name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NIXL_LOG_LEVEL": "FATAL"}
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, env=environment)
    assert run.returncode == 0, run.stderr
    printed = "".join(line for line in run.stdout.splitlines(keepends=True) if " NIXL " not in line)
    return differs("".join(text for kind, text in blocks if kind == "text"), printed)


def failed_examples(page: Path, names: Mapping[str, Any]) -> int:
    """How many examples of a text print something else. They know the names of kvplan's door, and these ``names``."""
    public = {name: getattr(kvplan, name) for name in kvplan.__all__}
    return doctest.testfile(str(page), module_relative=False, globs=public | {**names}).failed


def commands(page: Path) -> Iterator[tuple[str, str, int]]:
    """Each command of a page's console blocks, its output, and its exit status: 0, or that of ``echo $?``."""
    for kind, console in fences(page.read_text()):
        if kind == "console":
            yield from _commands(console)


def _commands(console: str) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        if line == "echo $?":
            found[-1] = (*found[-1][:2], int(output))
        else:
            found.append((line, output, 0))
    return found


def wrong_command(cli: Cli, command: str, output: str, status: int) -> str:
    """The difference between a command's output, run in the root folder, and the page. Empty if there is none."""
    program, *arguments = shlex.split(command)
    assert program == "kvplan"
    with contextlib.chdir(ROOT):
        run = cli(*arguments)
    return differs(output, run.out + run.err) if run.status == status else f"exit status {run.status}, not {status}"
