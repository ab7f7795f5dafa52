"""The layout that kvplan's connectors ask vLLM for, and the line that says what vLLM took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backends import utils
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvplan_nixl.vllm import base
from kvplan_nixl.vllm.base import LayoutRequest
from kvplan_nixl.vllm.connector import KvplanConnector


def config(*, use_mla: bool = False) -> Any:
    """As much of vLLM's configuration as is asked."""
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla),
        cache_config=SimpleNamespace(kv_cache_layout=None),
        kv_transfer_config=SimpleNamespace(),
    )


@pytest.fixture(params=[True, False], ids=["CPU", "GPU"])
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(base, "current_platform", SimpleNamespace(is_cpu=lambda: request.param))
    return bool(request.param)


def test_what_is_asked_for(on_cpu: bool) -> None:
    """One piece for a block of all layers, but where attention reads heads of single layers, and not for latents."""
    assert KvplanConnector.get_required_kvcache_layout(config()) == ("LBHNC" if on_cpu else "BLHNC")
    assert KvplanConnector.get_required_kvcache_layout(config(use_mla=True)) is None
    assert LayoutRequest.of(SimpleNamespace(model_config=None)).layout is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("supported", "got", "text"),
    [
        (["LBNHC", "LBHNC", "BLHNC"], "BLHNC", "as kvplan asked: a block of all layers is contiguous"),
        (["LBNHC", "LBHNC"], "LBNHC", "asked for BLHNC"),
    ],
)
def test_what_vllm_takes(supported: list[str], got: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own resolution takes the layout where all backends can, else its first one; the line says so."""
    monkeypatch.setattr(base, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    asked = LayoutRequest.of(config())
    monkeypatch.setattr(utils, "get_kv_connector_cache_layout", lambda config: asked.layout)
    layout = utils.resolve_kv_cache_layout(config(), [supported])
    assert layout is KVCacheLayout[got]
    line = asked.note(layout.name, None)
    assert line.startswith(f"KV cache layout {got}")
    assert text in line


def test_other_reasons() -> None:
    """An operator's setting, and vLLM's own choice for latents."""
    asked = LayoutRequest("BLHNC", "a block of all layers is contiguous")
    assert asked.note("LHBNC", "LHBNC") == "KV cache layout LHBNC, by VLLM_KV_CACHE_LAYOUT=LHBNC"
    assert "vLLM's choice" in LayoutRequest(None, "latents").note("LBNHC", None)
