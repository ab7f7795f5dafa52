"""The layout that kvplan's connectors ask vLLM for, and the line that says what vLLM took."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from vllm.config import ModelConfig
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.attention.backends import utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvplan_nixl.vllm import base
from kvplan_nixl.vllm.base import LayoutRequest
from kvplan_nixl.vllm.connector import KvplanConnector
from tests.engines.specs import Cached, Caches, allocated, planned

SPARSE: Final = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
"""DeepSeek-V3.2's configuration, with fewer and smaller layers. A latent is as wide as there."""


def sparse_caches(block: int = 64) -> Caches:
    """What vLLM keeps of that model with ``fp8_ds_mla``: latents of 656 bytes and index keys of 132."""
    caches: Caches = {}
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn"
        usual: dict[str, Any] = {"block_size": block, "num_kv_heads": 1, "max_tp_shards": 1, "dtype": torch.uint8}
        latent = interface.MLAAttentionSpec(
            **usual,
            head_size=576,
            cache_dtype_str="fp8_ds_mla",
            state_content_bytes=656,
            kv_quant_mode=interface.get_kv_quant_mode("fp8_ds_mla"),
        )
        caches[f"{name}.attn"] = Cached(latent, 656)
        keys = interface.MLAAttentionSpec(**usual, head_size=132, cache_role=interface.SparseCacheRole.INDEXER)
        caches[f"{name}.indexer.k_cache"] = Cached(keys, 128, 4)
    return caches


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


def test_sparse_mla_is_never_asked_for_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of sparse MLA count whole rows of 656 bytes from block to block, which BLHNC breaks by the index keys.

    The configuration is read by vLLM's own class. With what the connector asks for, vLLM takes a layout whose views of
    latents these kernels accept; in BLHNC the same caches are refused.
    """
    monkeypatch.setattr(base, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    sparse = config()
    sparse.model_config = ModelConfig(str(tmp_path), skip_tokenizer_init=True)
    assert sparse.model_config.hf_text_config.index_topk == SPARSE["index_topk"]
    asked = KvplanConnector.get_required_kvcache_layout(sparse)
    assert asked is None
    caches = sparse_caches()
    monkeypatch.setattr(utils, "get_kv_connector_cache_layout", lambda config: asked)
    supported = [layout.name for layout in utils._DEFAULT_LAYOUT_PREFERENCE]
    assert "BLHNC" in supported
    layout = utils.resolve_kv_cache_layout(sparse, [supported], [cached.spec for cached in caches.values()])
    for rows in latents(caches, layout.name):
        flat_kv_row_view(rows, 64)
    for rows in latents(caches, "BLHNC"):
        with pytest.raises(AssertionError, match="not a whole number of rows"):
            flat_kv_row_view(rows, 64)


def latents(caches: Caches, layout: str) -> list[torch.Tensor]:
    """The latents of each layer as attention gets them: blocks, slots and bytes."""
    cache = planned(caches, layout, 8)
    _, views = allocated(cache, layout, 1)
    rows = [view.squeeze() for name, view in views.items() if name.endswith(".attn")]
    assert {each.shape for each in rows} == {(8, 64, 656)}
    return rows


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


def hybrid_specs() -> list[Any]:
    """What Granite 4.0 H keeps: K and V of heads, and a state, padded to pages of one size."""
    attention = interface.FullAttentionSpec(block_size=400, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)
    state = interface.MambaSpec(
        block_size=400, shapes=((48, 64, 128),), dtypes=(torch.bfloat16,), page_size_padded=attention.page_size_bytes
    )
    return [attention, state]


def window_specs() -> list[Any]:
    """What Gemma-3 keeps: K and V of equal shape, of all positions or of a window."""
    fields = {"block_size": 16, "num_kv_heads": 4, "head_size": 128, "dtype": torch.bfloat16}
    return [
        interface.FullAttentionSpec(**fields),
        interface.SlidingWindowSpec(**fields, sliding_window=1024),
    ]


@pytest.mark.parametrize(
    ("supported", "specs", "is_taken"),
    [
        (None, [], True),
        (None, window_specs(), True),
        (None, hybrid_specs(), False),
        (["LBHNC", "BLHNC"], [], False),  # FlashInfer on Blackwell
        (["LBNHC"], [], False),
    ],
)
def test_heads_outside_layers_by_the_operator(
    supported: list[str] | None, specs: list[Any], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention and Triton read BHLNC. Where a backend or a model's caches do not, vLLM does not start."""
    if supported is None:
        backends = [FlashAttentionBackend, TritonAttentionBackend]
        supported = [layout.name for layout in utils.get_supported_kv_cache_layouts(backends)]
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BHLNC")
    if is_taken:
        assert utils.resolve_kv_cache_layout(config(), [supported], specs) is KVCacheLayout.BHLNC
    else:
        with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT=BHLNC does not satisfy every supported set"):
            utils.resolve_kv_cache_layout(config(), [supported], specs)
