"""The protocol of leases as a model: no state is wrong, and taking any rule away makes one wrong."""

from __future__ import annotations

import re

import pytest

from tests.pages import ROOT
from tests.protocol.model import FAULTS, check, is_available

PAGE = ROOT / "docs" / "protocol.md"

needs_spin = pytest.mark.skipif(not is_available(), reason="no spin and C compiler here")


@needs_spin
def test_no_state_is_wrong() -> None:
    """All states of one prefill engine, two decode engines and two requests: a request that is right has its bytes."""
    verdict = check(FAULTS["none"], PREFILLS=1, READS=1)
    assert not verdict.is_violated
    assert verdict.num_states > 10_000


@needs_spin
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_a_fault_is_found(fault: str) -> None:
    """Without a rule some request attends to bytes that are not its own; and some request is right at all."""
    assert check(FAULTS[fault], READS=1).is_violated


def test_the_page_has_a_row_for_each_fault() -> None:
    """docs/protocol.md has the verdict of each fault, and none of another one."""
    rows = re.findall(r"^\| (.*?) \| [\d,]+ \| [\d.]+ \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == {name: "found" if fault else "no state is wrong" for name, fault in FAULTS.items()}
