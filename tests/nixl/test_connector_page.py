"""The tutorial of a connector's author, as its reader runs it: one file, and several processes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.pages import ROOT, fences, wrong_program

PAGE = ROOT / "docs" / "write-a-connector.md"


def test_the_program_prints_what_the_page_says(tmp_path: Path) -> None:
    """Requests move, are refused, shared and aborted, a reader and prefill die, and prefill comes back."""
    assert wrong_program(PAGE, tmp_path) == ""


def test_the_page_s_command_takes_the_program(tmp_path: Path) -> None:
    """The same Python as the test above runs."""
    (command,) = [text.splitlines()[0] for kind, text in fences(PAGE.read_text()) if kind == "sh"]
    taken, place = command.split(" > ")
    assert place == "connector.py"
    run = subprocess.run(taken, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "".join(text for kind, text in fences(PAGE.read_text()) if kind == "python")


def test_each_call_of_the_page_is_in_its_program() -> None:
    """The table of what to call names methods that the program calls, but for the three it has no use for."""
    text = PAGE.read_text()
    table = re.findall(r"^\| .*$", text.partition("## Your tensors")[0], re.MULTILINE)
    named = {*re.findall(r"`(?:exporter|importer|reads)\.(\w+)", "".join(table))}
    program = "".join(source for kind, source in fences(text) if kind == "python")
    called = {*re.findall(r"(?:exporter|importer|reads)\.(\w+)\(", program)}
    assert len(named) > 10
    assert named - called == {"revoke", "reset"}
