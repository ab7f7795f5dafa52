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
from tests.models.vllm_bytes import results as bytes_of_tokens

COUNTED = results()


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_rank_reads_the_bytes_that_vllm_counts(name: str) -> None:
    """Windows, states in the dtypes that vLLM gives them, and fp8 of ModelOpt's file are in it."""
    if name not in Model.names() and name not in FILES:
        pytest.skip("needs aiconfigurator-core")
    ranks, tokens = DEPLOYMENTS[name]
    model = load(str(FILES.get(name, name)))
    assert bytes_read(model, f"vllm,tp={ranks}", tokens) == COUNTED[name]


def test_a_rank_of_sparse_latents_reads_the_bytes_that_vllm_counts() -> None:
    """Latents in rows of fp8 with their scales, and index keys: each rank has all of them."""
    command = "vllm serve deepseek-ai/DeepSeek-V3.2 --tensor-parallel-size 8 --kv-cache-dtype fp8"
    num_bytes = bytes_read(Model.shipped("deepseek-v3.2"), command, 4_000)
    assert num_bytes == 4_000 * bytes_of_tokens()["deepseek-v3.2"]["token"]


def bytes_read(model: Model, side: str, tokens: int) -> int:
    """The bytes that the last rank reads, by what ``kvplan verify`` does with a side."""
    options = EngineInput.parse(side, "--src").options(model)
    request = PlacedRequest.of(model, options, options, (0, tokens))
    plan = plan_mesh(request.destinations, request.sources).plans[-1]
    specs = plan.bind(local=request.local, remote=request.remote, tokens=request.tokens)
    return sum(spec.num_bytes for spec in specs)
