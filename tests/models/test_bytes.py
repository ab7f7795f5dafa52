"""Bytes per token: kvplan's are those that vLLM has counted for published models, and those of the page."""

from __future__ import annotations

import pytest

from tests.models.vllm_bytes import NAMES, POOL_GIB, SPARSE, counted, results, table
from tests.pages import ROOT


@pytest.mark.parametrize("name", [*NAMES, *SPARSE])
def test_a_model_has_the_bytes_that_vllm_counts(name: str) -> None:
    """Per token in all layers, and per request in all states."""
    number = results()[name]
    assert counted(name) == {"token": number["token"], "request": number["request"]}


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "phi-4", "mistral-small-24b"])
def test_bytes_per_token_follow_from_what_vllm_logs(name: str) -> None:
    """Where all layers are alike, the tokens that vLLM logs, times their bytes, are the memory of its pool."""
    number = results()[name]
    rest = (POOL_GIB << 30) - number["logged"] * number["token"]
    assert 0 <= rest < number["logged"] * number["token"] / 1000


def test_the_page_has_the_table() -> None:
    """The guide shows the numbers of vLLM."""
    page = (ROOT / "docs" / "how-to" / "models.md").read_text()
    assert page.partition("<!-- bytes -->")[2].partition("<!-- end -->")[0].strip() == table()
