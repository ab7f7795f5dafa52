"""Published files: config.json as its authors wrote it, with keys that older versions of transformers left out."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan import Model


def sizes(model_type: str, layers: int, hidden: int, heads: int, kv: int | None, **more: Any) -> dict[str, Any]:
    keys = {"model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**keys, **({} if kv is None else {"num_key_value_heads": kv}), **more}


MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
UNUSED = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
KIMI = {
    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    "kda_layers": [layer for layer in range(1, 28) if layer % 4 and layer != 27],
    "head_dim": 128,
    "num_heads": 32,
    "short_conv_kernel_size": 4,
}
ZAMBA = {
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_headdim": 64,
    "mamba_ngroups": 1,
    "n_mamba_heads": 64,
    "hybrid_layer_ids": [5, 11, 17, 23, 29, 35],
    "kv_channels": 64,
    "attention_head_dim": 128,
}
BAMBA = {
    "attn_layer_indices": [9, 18, 27],
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "sliding_window": None,
}
FLASH = {
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0] * 8,
}
CHUNKED = {"head_dim": 128, "attention_chunk_size": 8192, "no_rope_layers": [], "interleave_moe_layer_step": 1}
HUNYUAN = {"attention_head_dim": 128, "head_dim": 128, "use_cla": False, "cla_share_factor": 2}


def nas(heads_of_group: int | None, **more: Any) -> dict[str, Any]:
    """What a file of Nemotron-NAS states of a layer; without a group of heads it has no attention."""
    attention = {"n_heads_in_group": heads_of_group, "no_op": heads_of_group is None, "replace_with_linear": False}
    return {"attention": {**attention, "window_length": None, **more}, "ffn": {"no_op": False}}


NAS = {"num_key_value_heads": None, "head_dim": 128}

FILES: dict[str, tuple[dict[str, Any], str]] = {
    # The shape of Llama-3.3-Nemotron-Super-49B: most layers keep 8 KV heads, others fewer or none.
    "Nemotron-NAS": (
        sizes(
            "nemotron-nas",
            5,
            8192,
            64,
            None,
            **NAS,
            block_configs=[nas(8), nas(None), nas(16), nas(None, no_op=False, replace_with_linear=True), nas(8)],
        ),
        "2 attn 2x8x128, 2 , 1 attn 2x4x128",
    ),
    "Phi-3-mini": (sizes("phi3", 32, 3072, 32, 32, sliding_window=2047), "32 attn 2x32x96 within 2047"),
    "phi-4": (sizes("phi3", 40, 5120, 40, 10, sliding_window=None), "40 attn 2x10x128"),
    "Phi-4-mini": (sizes("phi3", 32, 3072, 24, 8, sliding_window=262144), "32 attn 2x8x128 within 262144"),
    "OLMo-2-32B": (sizes("olmo2", 64, 5120, 40, 8), "64 attn 2x8x128"),
    "GLM-4-9B-0414": (sizes("glm4", 40, 4096, 32, 2, head_dim=128), "40 attn 2x2x128"),
    "GLM-4.5": (sizes("glm4_moe", 92, 5120, 96, 8, head_dim=128, num_nextn_predict_layers=1), "92 attn 2x8x128"),
    "GLM-4.5V": (
        {"model_type": "glm4v_moe", "text_config": sizes("glm4v_moe_text", 46, 4096, 96, 8, head_dim=128)},
        "46 attn 2x8x128",
    ),
    "Mixtral-8x7B": (sizes("mixtral", 32, 4096, 32, 8, sliding_window=None), "32 attn 2x8x128"),
    "Command-R7B": (
        sizes("cohere2", 32, 4096, 32, 8, head_dim=128, sliding_window=4096, sliding_window_pattern=4),
        "24 swa 2x8x128 within 4097, 8 attn 2x8x128",
    ),
    "Llama-4-Scout": (
        {"model_type": "llama4", "text_config": sizes("llama4_text", 48, 5120, 40, 8, **CHUNKED)},
        "36 swa 2x8x128 within 8192, 12 attn 2x8x128",
    ),
    "Qwen3-VL-8B": (
        {"model_type": "qwen3_vl", "text_config": sizes("qwen3_vl_text", 36, 4096, 32, 8, head_dim=128)},
        "36 attn 2x8x128",
    ),
    "Qwen2.5-VL-7B": (sizes("qwen2_5_vl", 28, 3584, 28, 4, **UNUSED), "28 attn 2x4x128"),
    "Qwen2-VL-7B": (sizes("qwen2_vl", 28, 3584, 28, 4, **UNUSED), "28 attn 2x4x128"),
    "Qwen2.5-Omni-7B": (
        {
            "model_type": "qwen2_5_omni",
            "thinker_config": {"text_config": sizes("qwen2_5_omni_text", 28, 3584, 28, 4, **UNUSED)},
        },
        "28 attn 2x4x128",
    ),
    "Qwen3-30B-A3B": (
        sizes("qwen3_moe", 48, 2048, 32, 4, head_dim=128, **{**UNUSED, "sliding_window": None}),
        "48 attn 2x4x128",
    ),
    "MiniMax-Text-01": (
        sizes("minimax_text_01", 80, 6144, 64, 8, head_dim=128, attn_type_list=[*[0] * 7, 1] * 10),
        "70 state ssm 64x128x128, 10 attn 2x8x128",
    ),
    "MiniMax-M2": (
        sizes("minimax_m2", 62, 3072, 48, 8, head_dim=128, attn_type_list=[1] * 62, num_mtp_modules=3),
        "62 attn 2x8x128",
    ),
    "Kimi-Linear-48B": (
        sizes("kimi_linear", 27, 2304, 32, 32, head_dim=72, linear_attn_config=KIMI, **MLA),
        "20 state conv 12288x3 ssm 32x128x128, 7 attn 576",
    ),
    "Kimi-K2": (sizes("kimi_k2", 61, 7168, 64, 64, num_nextn_predict_layers=0, **MLA), "61 attn 576"),
    "LFM2-1.2B": (
        sizes(
            "lfm2", 16, 2048, 32, 8, conv_L_cache=3, conv_dim=2048, num_heads=32, full_attn_idxs=[2, 5, 8, 10, 12, 14]
        ),
        "10 state conv 2048x2, 6 attn 2x8x64",
    ),
    "Zamba2-1.2B": (
        sizes("zamba2", 38, 2048, 32, 32, **ZAMBA),
        "32 state conv 4352x3 ssm 64x64x128, 6 attn 2x32x128 state conv 4352x3 ssm 64x64x128",
    ),
    "Bamba-9B": (
        sizes("bamba", 32, 4096, 32, 8, **BAMBA),
        "29 state conv 8448x3 ssm 128x64x128, 3 attn 2x8x128",
    ),
    "Hunyuan-7B": (sizes("hunyuan_v1_dense", 32, 4096, 32, 8, **HUNYUAN), "32 attn 2x8x128"),
    "Hunyuan-A13B": (sizes("hunyuan_v1_moe", 32, 4096, 32, 8, **HUNYUAN), "32 attn 2x8x128"),
    "ERNIE-4.5-0.3B": (sizes("ernie4_5", 18, 1024, 16, 2, head_dim=128), "18 attn 2x2x128"),
    "ERNIE-4.5-21B-A3B": (sizes("ernie4_5_moe", 28, 2560, 20, 4), "28 attn 2x4x128"),
    "Step-3": (
        {
            "model_type": "step3_vl",
            "text_config": sizes(
                "step3_text", 61, 7168, 64, None, num_attention_groups=1, head_dim=256, share_q_dim=2048
            ),
        },
        "61 attn 2x1x256",
    ),
    "Step-3.5-Flash": (
        sizes(
            "step3p5",
            4,
            4096,
            64,
            None,
            num_attention_groups=4,
            head_dim=128,
            sliding_window=512,
            layer_types=["full_attention", *["sliding_attention"] * 3],
        ),
        "1 attn 2x4x128, 3 swa 2x4x128 within 512",
    ),
    "HunyuanOCR": (
        {"model_type": "hunyuan_vl", "text_config": sizes("hunyuan_vl_text", 24, 1024, 16, 8, attention_head_dim=128)},
        "24 attn 2x8x128",
    ),
    "Granite-3.3-8B": (sizes("granite", 40, 4096, 32, 8), "40 attn 2x8x128"),
    "Seed-OSS-36B": (sizes("seed_oss", 64, 5120, 80, 8, head_dim=128), "64 attn 2x8x128"),
    "SmolLM3-3B": (
        sizes(
            "smollm3", 36, 2048, 16, 4, no_rope_layers=[1, 1, 1, 0] * 9, use_sliding_window=False, sliding_window=None
        ),
        "36 attn 2x4x128",
    ),
    "OLMo-3-7B": (
        sizes("olmo3", 32, 4096, 32, 32, sliding_window=4096),
        "24 swa 2x32x128 within 4096, 8 attn 2x32x128",
    ),
    "EXAONE-4.0-32B": (
        sizes("exaone4", 64, 5120, 40, 8, head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG"),
        "48 swa 2x8x128 within 4096, 16 attn 2x8x128",
    ),
    "MiMo-V2-Flash": (
        sizes("mimo_v2_flash", 48, 4096, 64, 4, **FLASH),
        "16 attn 4x320, 32 swa 8x320 within 129",
    ),
    "LongCat-Flash": (
        {"model_type": "longcat_flash", "num_layers": 28, "hidden_size": 6144, "num_attention_heads": 64, **MLA},
        "56 attn 576",
    ),
    "InternVL3-8B": (
        {"model_type": "internvl_chat", "llm_config": sizes("qwen2", 28, 3584, 28, 4, **UNUSED)},
        "28 attn 2x4x128",
    ),
    "LLaVA-1.5-7B": ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "32 attn 2x32x128"),
    "ChatGLM3-6B": (
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 128,
        },
        "28 attn 2x2x128",
    ),
}


def summary(model: Model) -> str:
    """How many layers of each kind cache what: sizes of K and V, of convolutions and of states."""
    counts: dict[str, int] = {}
    for layer in model.layers:
        conv = [dict(tensor.axes) for tensor in layer if tensor.kind.startswith("conv.")]
        parts = [t.group for t in layer[:1]]
        for tensor in layer:
            dims = "x".join(str(size) for _, size in tensor.axes)
            if tensor.kind == "attn":
                parts.append(dims + (f" within {tensor.window}" if tensor.window else ""))
                parts += ["state"] if len(layer) > 1 else []
            elif tensor.kind == "ssm":
                parts.append(f"ssm {dims}")
            elif tensor is next(t for t in layer if t.kind.startswith("conv.")):
                parts.append(f"conv {sum(axes['channel'] for axes in conv)}x{conv[0]['step']}")
        key = " ".join(parts)
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())


@pytest.mark.parametrize(("config", "expected"), FILES.values(), ids=FILES)
def test_a_published_file_is_read(config: dict[str, Any], expected: str) -> None:
    """Each layer caches what the model's authors and the engines say."""
    assert summary(Model.from_config(config)) == expected


def test_glm_drafts_with_one_layer() -> None:
    """GLM-4.5 has one layer of multi-token prediction, with the K and V of its other layers."""
    model = Model.from_config(FILES["GLM-4.5"][0], with_draft_layers=True)
    assert model.drafts == model.layers[:1]


def test_minimax_m2_drafts_with_three_layers() -> None:
    """MiniMax-M2 calls them modules."""
    model = Model.from_config(FILES["MiniMax-M2"][0], with_draft_layers=True)
    assert model.drafts == model.layers[:3]
