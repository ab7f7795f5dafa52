"""Deployments that are published: what ``kvplan verify`` says that a rank reads is what vLLM counts."""

from __future__ import annotations

import pytest

from kvplan import plan_mesh
from kvplan.cli.inputs import EngineInput
from kvplan.cli.model_files import load
from kvplan.cli.trials import PlacedRequest
from kvplan.models import Model
from tests.models.deployments import DEPLOYMENTS, results
from tests.models.test_published_files import FILES

COUNTED = results()


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_rank_reads_the_bytes_that_vllm_counts(name: str) -> None:
    """Windows, states in the dtypes that vLLM gives them, and fp8 of ModelOpt's file are in it."""
    if name not in Model.names() and name not in FILES:
        pytest.skip("needs aiconfigurator-core")
    ranks, tokens = DEPLOYMENTS[name]
    model = load(str(FILES.get(name, name)))
    options = EngineInput.parse(f"vllm,tp={ranks}", "--src").options(model)
    request = PlacedRequest.of(model, options, options, (0, tokens))
    plan = plan_mesh(request.destinations, request.sources).plans[-1]
    specs = plan.bind(local=request.local, remote=request.remote, tokens=request.tokens)
    assert sum(spec.num_bytes for spec in specs) == COUNTED[name]
