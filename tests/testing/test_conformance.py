"""The conformance kit: kvplan's own copies are right in every case, and planted faults are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

from kvplan import plan_reads
from kvplan.testing.conformance import ConnectorContract, EngineMemory, PairCase, RefusedError, Rows, Verdict, cases
from kvplan.testing.simulation import Connector, LeaseConnector, Site
from tests.pages import ROOT


class TestKvplan(ConnectorContract):
    """kvplan as the connector: it refuses no case."""

    num_fleets = 2

    def copies(self, case: PairCase, source: EngineMemory, destination: EngineMemory) -> Rows:
        request: dict[str, Any] = {"local": {"attn": destination.table}, "remote": {"attn": source.table}}
        for rank in destination.ranks:
            plan = plan_reads(rank.worker, [other.worker for other in source.ranks])
            for spec in plan.bind(**request, tokens=(case.start, case.stop)):
                for written, read in zip(*(side.tolist() for side in spec.descriptors()), strict=True):
                    yield read[0], written[0], read[1]

    def connector(self, site: Site) -> Connector:
        return LeaseConnector(site)


@pytest.mark.parametrize("order", ["LBHNKD", "KLBNHD", "BLNHKD"])
def test_no_order_is_refused_by_kvplan(order: str) -> None:
    contract = TestKvplan()
    contract.order = order
    assert {*contract.verdicts().values()} == {Verdict("right")}


class Faulty(TestKvplan):
    """Its copies end where ``edit`` puts them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def copies(self, case: PairCase, source: EngineMemory, destination: EngineMemory) -> Rows:
        rows = [*super().copies(case, source, destination)]
        if self.name == "refuses":
            raise RefusedError("not today")
        if self.name == "misses":
            return rows[1:]
        if self.name == "repeats":
            return [*rows, rows[0]]
        if self.name == "moves nothing":
            return []
        size = destination.side.tokens  # elsewhere: beyond the caches
        return [(read, written + (size << 40), length) for read, written, length in rows]


@pytest.mark.parametrize(
    ("name", "code"), [("misses", "COVER"), ("repeats", "DISJOINT"), ("moves nothing", "COVER"), ("leaves", "BOUNDS")]
)
def test_a_fault_is_wrong(name: str, code: str) -> None:
    contract = Faulty(name)
    for case_name, case in contract.cases().items():
        if case_name in {"equal engines", "prefix hit", "latents, blocks in turn"}:
            verdict = contract.verdict(case)
            assert verdict.word == "wrong"
            assert code in verdict.why
    with pytest.raises(AssertionError, match=code):
        contract.check()


def test_hypothesis_finds_what_cases_do_not() -> None:
    contract = Faulty("moves nothing")
    with pytest.raises(AssertionError, match="COVER"):
        contract.test_random_cases()


def test_what_is_refused_is_no_fault() -> None:
    contract = Faulty("refuses")
    assert {*contract.verdicts().values()} == {Verdict("refused", "not today")}
    with pytest.raises(SkipTest, match="not today"):
        contract.test_case("equal engines")
    assert contract.check() == []


def test_a_wrong_case_names_its_report() -> None:
    verdict = Faulty("misses").verdicts()["prefix hit"]
    assert verdict.why.endswith("(as in vllm-project/vllm#48633)")


class NeverReads(LeaseConnector):
    """It says that it has read what it has not."""

    def begin_read(self, request: Any, num_tokens: int) -> None:
        pass


def test_a_fleet_that_breaks_a_rule_fails() -> None:
    contract = TestKvplan()
    contract.connector = NeverReads  # type: ignore[method-assign, assignment]
    with pytest.raises(AssertionError, match=r"seed 0: \w+: "):
        contract.test_fleets()


def test_fleets_are_optional() -> None:
    with pytest.raises(SkipTest):
        ConnectorContract().test_fleets()


def test_cases_are_whole_blocks() -> None:
    """A connector that counts blocks can pass: requests begin and end at blocks of both sides."""
    for case in cases("LBHNKD").values():
        for side in (case.source, case.destination):
            assert case.source.possible
            assert case.start % (side.tokens * side.contexts) == case.stop % (side.tokens * side.contexts) == 0


FOREIGN = """
from kvplan.testing.conformance import ConnectorContract, RefusedError

class TestConnector(ConnectorContract):
    order = "LBHNKD"
    def copies(self, case, source, destination):
        if source.side != destination.side:
            raise RefusedError("unequal engines")
        for read, written in zip(source.ranks, destination.ranks):
            for here, there in zip(read.caches, written.caches):
                size = here.memory[0].nbytes
                for block, other in zip(source.block_ids, destination.block_ids):
                    yield here.address + block * size, there.address + other * size, size
"""


def test_a_repository_of_another_connector(tmp_path: Path) -> None:
    """pytest makes a test of each case: this connector loses count at a cached prefix, and refuses other sizes."""
    (tmp_path / "test_mine.py").write_text(FOREIGN)
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "-p", "no:xdist", "test_mine.py"]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)}
    )
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    assert any("test_case[prefix hit]" in line for line in failed), run.stdout + run.stderr
    assert any("test_random_cases" in line for line in failed)
    assert len(failed) == 2
