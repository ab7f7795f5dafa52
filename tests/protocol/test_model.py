"""The protocol of leases as a model: no state is wrong, and taking any rule away makes one wrong."""

from __future__ import annotations

import re

import pytest

from tests.pages import ROOT
from tests.protocol.model import FAULTS, check, is_available
from tests.protocol.transitions import PAGE as PAGE_OF_TABLES
from tests.protocol.transitions import TABLES, Table, written

PAGE = ROOT / "docs" / "protocol.md"

needs_spin = pytest.mark.skipif(not is_available(), reason="no spin and C compiler here")


@needs_spin
def test_no_state_is_wrong() -> None:
    """All states of one prefill engine, two decode engines and two requests: a request that is right has its bytes."""
    verdict = check(FAULTS["none"], PREFILLS=1, READS=1)
    assert not verdict.is_violated
    assert verdict.num_states > 10_000


@needs_spin
def test_no_state_is_wrong_where_messages_overtake_each_other() -> None:
    """With a place for two messages to prefill the later one may come first, in states that one place does not have."""
    alone, overtaking = (check(FAULTS["none"], PREFILLS=1, READS=1, PLACES=places) for places in (1, 2))
    assert not overtaking.is_violated
    assert overtaking.num_states > 2 * alone.num_states


@needs_spin
@pytest.mark.parametrize("places", [1, 2])
def test_no_state_is_wrong_where_an_engine_reads_again(places: int) -> None:
    """An answer to its first read, which has failed, may come while it waits for that to its second one."""
    assert not check(FAULTS["none"], PREFILLS=1, DECODES=1, READS=2, PLACES=places).is_violated


@needs_spin
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_a_fault_is_found(fault: str) -> None:
    """Without a rule some request attends to bytes that are not its own; and some request is right at all."""
    assert check(FAULTS[fault], READS=1).is_violated


def test_the_model_has_the_tables_of_the_code() -> None:
    """``python -m tests.protocol.transitions`` writes them after a change; check all states then."""
    assert PAGE_OF_TABLES.read_text() == written()


CHANGES = {
    "a computed request is not pinned": ("EXPORT", ("COMPUTING", "FINISH"), "FREE"),
    "a lease that has ended pins": ("EXPORT", ("PINNED", "LEASE_ENDED"), None),
    "the last part ends a request": ("IMPORT", ("READING", "LAST"), "ENDED"),
    "a request without blocks is read": ("IMPORT", ("CLAIMED", "ALLOCATE"), "CLAIMED"),
    "a request does not end": ("IMPORT", ("ENDING", "END"), None),
}
"""Rows of a table, and what they become."""


def changed(prefix: str, row: tuple[str, str], after: str | None) -> dict[str, Table]:
    """The tables of the code with one row changed, or left out."""
    table = {(state.name, event.name): (state, event) for state, event in TABLES[prefix]}
    state, event = table[row]
    others = {key: value for key, value in TABLES[prefix].items() if key != (state, event)}
    return {**TABLES, prefix: others | ({} if after is None else {(state, event): type(state)[after]})}


@needs_spin
@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_table_is_found(change: str) -> None:
    """The model runs the tables: one that lets bytes land in another request's block is an error in some state."""
    assert check(FAULTS["none"], changed(*CHANGES[change]), READS=1).is_violated


def test_the_page_has_a_row_for_each_fault() -> None:
    """docs/protocol.md has the verdict of each fault, and none of another one."""
    rows = re.findall(r"^\| (.*?) \| [\d,]+ \| [\d.]+ \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == {name: "found" if fault else "no state is wrong" for name, fault in FAULTS.items()}
