"""Rates: numbers of seconds, kept in files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvplan import KVPlanError
from kvplan.staging import Rates
from kvplan.staging.rates import SHARED_MEMORY

RATES = Rates("here", 1e-4, 2e-6, 3e-10, 4e-5, 5e-10)


def test_rates_survive_a_file(tmp_path: Path) -> None:
    """What was saved is loaded, to the last bit."""
    for rates in (RATES, SHARED_MEMORY):
        rates.save(tmp_path / "rates.json")
        assert Rates.load(str(tmp_path / "rates.json")) == rates


@pytest.mark.parametrize(
    ("value", "code"), [(-1e-9, "RANGE"), (math.inf, "RANGE"), (math.nan, "RANGE"), ("1", "TYPE"), (True, "TYPE")]
)
@pytest.mark.parametrize("name", ["transfer_s", "descriptor_s", "byte_s", "copy_s", "copied_byte_s"])
def test_each_rate_is_a_number_of_seconds(name: str, value: Any, code: str) -> None:
    """Finite and not negative, integers too."""
    with pytest.raises(KVPlanError, match=f"^{code}: .*{name}"):
        Rates(**{**attrs.asdict(RATES), name: value})
    assert getattr(Rates(**{**attrs.asdict(RATES), name: 1}), name) == 1.0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "MESSAGE: cannot read rates from .*: expected JSON, got "),
        ("[]", "KEY: cannot read rates from .*: expected the keys measured, transfer_s, "),
        (json.dumps({**attrs.asdict(RATES), "more": 1}), "KEY"),
        (json.dumps({**attrs.asdict(RATES), "byte_s": "1"}), "TYPE"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, error: str) -> None:
    """No JSON, another object, and rates that are no numbers."""
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(KVPlanError, match=f"^{error}"):
        Rates.load(path)
