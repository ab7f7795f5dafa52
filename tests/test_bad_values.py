"""The public door: whatever a caller passes, a call ends in a KVPlanError or in a result."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import kvplan
from tests import bad_values
from tests.pages import ROOT

GOLDEN = ROOT / "tests" / "golden" / "bad-values.txt"
NO_CALLS = {
    *("Executor", "Copier"),
    *("Attended", "Digest", "KvHeads"),
    *("Descriptors", "Fact", "Ids", "Ints", "Key", "Layer", "Range", "Request"),
    *("ImportState", "Status"),
}
"""Protocols, types of functions, of values, and enumerations."""

CHECKS = ("_arrays", "_checks", "_text")
"""What :mod:`kvplan.support` lists: these get wrong values, and all else from code."""

GENERATED = (
    *CHECKS,
    *("bridges.sglang_model", "bridges.vllm_model", "describe.model", "describe.tensors"),
    *("protocol.digest_requests", "protocol.exporter", "protocol.groups", "protocol.importer"),
    *("protocol.keys", "protocol.page", "protocol.retention", "protocol.rooms"),
    *("protocol.system", "testing.memory"),
)
"""What :mod:`tests.test_public_values` calls by its signatures, without a list."""


def public() -> Iterator[str]:
    """All public functions and classes of the package and its rooms."""
    rooms = [
        kvplan,
        *(importlib.import_module(f"kvplan.{each.name}") for each in pkgutil.iter_modules(kvplan.__path__)),
    ]
    for room in rooms:
        for name in getattr(room, "__all__", ()):
            value = getattr(room, name)
            if callable(value) and not str(value.__module__).startswith(tuple(f"kvplan.{room}" for room in GENERATED)):
                yield name


def test_every_public_function_is_called() -> None:
    """Nobody adds a function to a room without a line in this test."""
    called = {name for name, _, _ in bad_values.calls()}
    parts = {part for name in called for part in name.split(".")}
    assert {*public()} - parts - {*bad_values.MADE.split()} - NO_CALLS == set()


def test_right_calls_are_right() -> None:
    """Without a wrong value no call has a wrong type or a wrong number."""
    ends = {name: bad_values.outcome(function, given) for name, function, given in bad_values.calls()}
    others = {"protocol.tls_contexts": "PEER"}
    others["staging.Pipeline.release"] = "TRANSFER"
    assert {name: end for name, end in ends.items() if end != "accepted"} == others


@pytest.mark.filterwarnings("ignore")
def test_bad_values_end_in_typed_errors() -> None:
    """The page lists what each function does with each value: a code, or that the value is accepted."""
    found = bad_values.page(bad_values.calls())
    raw = [line for line in found.splitlines() if "Error" in line or "Exception" in line]
    assert not raw
    assert found == GOLDEN.read_text()


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_no_numbers_end_in_typed_errors() -> None:
    """Meta tensors, sparse ones and bfloat16 have no numbers that numpy reads."""
    pytest.importorskip("torch")
    known = {*kvplan.errors.CODES, "accepted"}
    found = bad_values.ends(bad_values.calls(), bad_values.of_torch())
    raw = [(name, parameter, {*ends} - known) for name, parameter, ends in found]
    assert [each for each in raw if each[2]] == []
