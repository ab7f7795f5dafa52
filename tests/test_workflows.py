"""The workflows of a repository: what others' code may do in them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.pages import ROOT

WORKFLOWS: dict[str, Any] = {
    path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")
}
JOBS: dict[str, Any] = {
    f"{name} {job}": steps for name, workflow in WORKFLOWS.items() for job, steps in workflow["jobs"].items()
}


@pytest.mark.parametrize("name", JOBS)
def test_actions_are_pinned(name: str) -> None:
    """By a commit: whoever owns an action can move its tags."""
    used = [step["uses"] for step in JOBS[name]["steps"] if "uses" in step]
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []


def test_workflows_may_read_alone() -> None:
    """Unless a job says otherwise, and no pull request runs with the repository's rights."""
    assert [workflow["permissions"] for workflow in WORKFLOWS.values()] == [{"contents": "read"}] * len(WORKFLOWS)
    assert not any("pull_request_target" in f"{workflow}" for workflow in WORKFLOWS.values())


def test_a_job_that_may_write_runs_nothing_of_others() -> None:
    """It fetches what was built and attaches it: it installs and builds nothing, and has no checkout to run."""
    writing = {name: job for name, job in JOBS.items() if "write" in f"{job.get('permissions')}"}
    assert [*writing] == ["release.yml release"]
    (job,) = writing.values()
    assert [step.get("uses", "").partition("@")[0] for step in job["steps"]] == ["actions/download-artifact", ""]
    (command,) = (step["run"] for step in job["steps"] if "run" in step)
    assert re.fullmatch(r"gh release create [^;&|\n]*", command.strip())
    others = [name for name in JOBS if name not in writing and "secrets." in f"{JOBS[name]}"]
    assert others == []


@pytest.mark.parametrize("name", [name for name in JOBS if "checkout" in f"{JOBS[name]}"])
def test_a_checkout_leaves_no_credentials(name: str) -> None:
    """What the checks run could read them."""
    checkouts = [step for step in JOBS[name]["steps"] if "checkout" in step.get("uses", "")]
    assert [step["with"]["persist-credentials"] for step in checkouts] == [False] * len(checkouts)
