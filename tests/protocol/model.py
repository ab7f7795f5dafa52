"""Checks the model of handoffs, claims and leases exhaustively, as it is and with each fault."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from tests.protocol.transitions import PAGE, TABLES, Table, written

MODEL: Final = Path(__file__).with_name("leases.pml")

FAULTS: Final = MappingProxyType(
    {
        "none": 0,
        "a read is right without a last question": 1,
        "the last question is asked before the last byte": 2,
        "the answer to an earlier question counts": 3,
        "a claim brings a lease back that has ended": 4,
        "a start takes the leases of the one before for its own": 5,
        "a timer frees a block that a claim holds": 6,
        "decode frees a block while bytes may land in it": 7,
        "none, and no read were right": 8,
    }
)
"""The faults of the model, by what they are."""

TOOLS: Final = ("spin", "cc")


class Verdict(NamedTuple):
    """How many states were reached, and whether an assertion failed in one of them."""

    num_states: int
    is_violated: bool


def is_available() -> bool:
    """Whether the model can be checked here."""
    return all(map(shutil.which, TOOLS))


def check(fault: int, tables: Mapping[str, Table] = TABLES, **sizes: int) -> Verdict:
    """Searches all states with a fault; ``sizes`` are PREFILLS, DECODES, REQUESTS, READS, DEATHS, PLACES."""
    defines = [f"-D{name}={value}" for name, value in {"FAULT": fault, **sizes}.items()]
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: str) -> str:
            return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout

        model = Path(folder, MODEL.name)
        model.write_text(MODEL.read_text())
        Path(folder, PAGE.name).write_text(written(tables))
        run("spin", "-a", *defines, str(model))
        run("cc", "-O1", "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c")
        # the depth of a search that goes on until it has seen all states
        output = run("./pan", "-m1000000", "-w22")
    (num_states,) = re.findall(r"(\d+) states, stored", output)
    (num_errors,) = re.findall(r"errors: (\d+)", output)
    assert "max search depth too small" not in output
    return Verdict(int(num_states), num_errors != "0")
