"""Speculative decoding in vLLM's connector: which drafts may run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvplan import KVPlanError

drafts = pytest.importorskip("kvplan_nixl.vllm.drafts", reason="needs vLLM")


def check(
    method: str | None, stages: int = 1, context: int = 1, modules: int = 1, groups: int = 1, states: bool = False
) -> None:
    """Check an engine's drafts, of which vLLM's configuration says this."""
    speculative = SimpleNamespace(method=method, use_multi_module_mtp=lambda: modules > 1)
    parallel = SimpleNamespace(pipeline_parallel_size=stages, decode_context_parallel_size=context)
    config = SimpleNamespace(speculative_config=speculative if method else None, parallel_config=parallel)
    cache = SimpleNamespace(kv_cache_groups=[None] * groups, has_mamba_layers=states)
    drafts.check_drafts(config, cache)


def test_drafts_that_may_run() -> None:
    """Nothing is refused without drafts, with those that have no cache, and with those whose cache moves."""
    check(None, stages=2, groups=2, states=True)
    for method in drafts.WITHOUT_CACHE:
        check(method, stages=2, context=2, groups=2)
    for method in drafts.WITH_CACHE:
        check(method)
    check("eagle3", groups=2)


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({"method": "dflash"}, "got dflash"),
        ({"method": "ngram", "states": True}, "expected a model without Mamba or linear-attention states"),
        ({"method": "mtp", "modules": 2}, "expected one module that predicts tokens, got several"),
        ({"method": "eagle", "stages": 2}, "expected one pipeline stage, with drafts that have a cache, got 2"),
        ({"method": "eagle", "context": 2}, "expected a decode context of 1, with drafts that have a cache, got 2"),
        ({"method": "draft_model", "groups": 3}, "expected one cache group, with a draft model, got 3"),
    ],
)
def test_drafts_that_are_refused(engine: dict[str, Any], text: str) -> None:
    """Whose cache is not known to be right is refused by name."""
    with pytest.raises(KVPlanError, match=text) as caught:
        check(**engine)
    assert caught.value.code == "LAYOUT"
