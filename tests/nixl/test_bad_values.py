"""The public functions of kvplan_nixl: whatever a caller passes, a call ends in a KVPlanError or in a result."""

from __future__ import annotations

import pytest
import torch

import kvplan_nixl
from kvplan.errors import CODES
from kvplan_nixl import NixlExecutor
from kvplan_nixl.calibrate import calibrate
from kvplan_nixl.rearrange import TorchCopier
from tests.bad_values import ends, outcome, page
from tests.nixl.bad_values import MADE, calls
from tests.pages import ROOT

GOLDEN = ROOT / "tests" / "golden" / "bad-values-nixl.txt"


def test_every_public_function_is_called() -> None:
    """Nobody adds a function, or a method of an executor or a copier, without a line in this test."""
    called = {name for name, _, _ in calls()}
    assert {name for name in kvplan_nixl.__all__ if callable(getattr(kvplan_nixl, name))} - called == {*MADE}
    for made in (NixlExecutor, TorchCopier):
        methods = {name for name, value in vars(made).items() if callable(value) and not name.startswith("_")}
        without_parameters = {"envelope", "close", "discard_messages"}
        assert methods - {name.rpartition(".")[2] for name in called} <= without_parameters


def test_right_calls_are_right() -> None:
    """Without a wrong value every call is accepted; ``test_calibrate`` has that of calibrate, which takes seconds."""
    ends_of = {name: outcome(function, given) for name, function, given in calls() if function is not calibrate}
    assert {*ends_of.values()} == {"accepted"}, ends_of


@pytest.mark.filterwarnings("ignore")
def test_bad_values_end_in_typed_errors() -> None:
    """The page lists what each function does with each value: a code, or that the value is accepted."""
    found = page(calls())
    assert not [line for line in found.splitlines() if "Error" in line or "Exception" in line]
    assert found == GOLDEN.read_text()


NESTED = {
    "backend without options": {"UCX": None},
    "backend without a name": {None: {}},
    "empty name of a backend": {"": {}},
    "option that is no string": {"UCX": {"engine_config": 1}},
    "option without a name": {"UCX": {None: "y"}},
    "region without a tensor": {"kv": None},
    "sparse tensor": {"kv": torch.ones(3).to_sparse()},
    "meta tensor": {"kv": torch.empty(2, device="meta")},
}


@pytest.mark.filterwarnings("ignore")
def test_bad_values_within_mappings_end_in_typed_errors() -> None:
    """Backends, their options and tensors are checked one by one."""
    found = ends(calls(), NESTED)
    raw = [(name, parameter, {*values} - {*CODES, "accepted"}) for name, parameter, values in found]
    assert [each for each in raw if each[2]] == []
