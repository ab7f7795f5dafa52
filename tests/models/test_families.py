"""Families: the caches of each kind of layer, from the keys that published files have."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan import KVPlanError
from kvplan.models.config import draft, read

HEADS = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
LATENT = {"kv_lora_rank": 12, "qk_rope_head_dim": 4}

MAMBA1 = ["conv.x", "ssm"]
MAMBA2 = ["conv.x", "conv.B", "conv.C", "ssm"]
DELTA = ["conv.q", "conv.k", "conv.v", "ssm"]
ATTENTION = ["attn"]

FILES: list[tuple[dict[str, Any], list[list[str]]]] = [
    ({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 8}, [MAMBA1] * 2),
    ({"model_type": "falcon_mamba", "num_hidden_layers": 2, "hidden_size": 8}, [MAMBA1] * 2),
    ({"model_type": "mamba2", "num_hidden_layers": 2}, [MAMBA2] * 2),
    ({"model_type": "jamba", "num_hidden_layers": 8, **HEADS}, [*[MAMBA1] * 4, ATTENTION, *[MAMBA1] * 3]),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-E*", **HEADS}, [MAMBA2, [], [], ATTENTION]),
    (
        {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "full_attention", "mlp"], **HEADS},
        [MAMBA2, [], ATTENTION, []],
    ),
    (
        {"model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], **HEADS},
        [MAMBA2, ATTENTION],
    ),
    ({"model_type": "falcon_h1", "num_hidden_layers": 2, **HEADS}, [ATTENTION + MAMBA2] * 2),
    ({"model_type": "qwen3_next", "num_hidden_layers": 4, **HEADS}, [DELTA, DELTA, DELTA, ATTENTION]),
    ({"model_type": "qwen3_next", "num_hidden_layers": 2, "full_attention_interval": 2, **HEADS}, [DELTA, ATTENTION]),
    ({"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 4, **HEADS}}, [DELTA, DELTA, DELTA, ATTENTION]),
    (
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 3,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2],
                "head_dim": 8,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            **LATENT,
        },
        [DELTA, DELTA, ATTENTION],
    ),
    ({"model_type": "kimi_linear", "num_hidden_layers": 5, **LATENT}, [*[DELTA] * 4, ATTENTION]),
    ({"model_type": "deepseek_v32", "num_hidden_layers": 1, **LATENT}, [["attn", "index", "index.scale"]]),
    (
        {"model_type": "deepseek_v32", "num_hidden_layers": 1, "layer_types": ["deepseek_sparse_attention"], **LATENT},
        [["attn", "index", "index.scale"]],
    ),
    ({"model_type": "gemma3n_text", "num_hidden_layers": 20, **HEADS}, [*[ATTENTION] * 5, *[[]] * 15]),
]


def tensors(config: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The axes of every kind of tensor, of its first layer."""
    found: dict[str, dict[str, int]] = {}
    for layer in read(config)[1]:
        for tensor in layer:
            found.setdefault(tensor.kind, dict(tensor.axes))
    return found


@pytest.mark.parametrize(
    ("config", "kinds"), FILES, ids=lambda value: value.get("model_type", "") if type(value) is dict else ""
)
def test_each_layer_caches_what_its_kind_does(config: dict[str, Any], kinds: list[list[str]]) -> None:
    """Lists and patterns of layers, in new and in older words, and the family's rule where a file has none."""
    assert [[tensor.kind for tensor in layer] for layer in read(config)[1]] == kinds


@pytest.mark.parametrize(
    ("config", "channels"),
    [
        ({"model_type": "falcon_mamba", "hidden_size": 4096, "expand": 16, "intermediate_size": 8192}, 8192),
        ({"model_type": "mamba", "hidden_size": 768}, 1536),
        ({"model_type": "jamba", "intermediate_size": 14336, **HEADS}, 2048),
    ],
)
def test_width_of_a_mamba_layer(config: dict[str, Any], channels: int) -> None:
    """A stated width counts before expand times hidden_size, but Jamba's intermediate_size is another thing's."""
    found = tensors({"num_hidden_layers": 1, **config})
    assert (found["conv.x"], found["ssm"]["channel"]) == ({"channel": channels, "step": 3}, channels)


@pytest.mark.parametrize(
    ("config", "heads", "dim", "group"),
    [
        ({"model_type": "mamba2"}, 128, 64, 8 * 128),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M", **HEADS}, 128, 64, 8 * 128),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M", "mamba_n_groups": 2, **HEADS}, 128, 64, 2 * 128),
        ({"model_type": "granitemoehybrid", **HEADS, "hidden_size": 4096}, 128, 64, 256),
        ({"model_type": "granitemoehybrid", **HEADS, "mamba_n_heads": 32, "mamba_d_head": 64}, 32, 64, 256),
        ({"model_type": "falcon_h1", **HEADS}, 128, 8, 256),
        ({"model_type": "falcon_h1", **HEADS, "mamba_d_ssm": None, "mamba_n_heads": 16}, 16, 128, 256),
    ],
)
def test_heads_and_groups_of_mamba_2(config: dict[str, Any], heads: int, dim: int, group: int) -> None:
    """Heads, their size, and how wide B and C are; mamba_d_head auto shares the channels out."""
    found = tensors({"num_hidden_layers": 1, **config})
    assert found["conv.x"] == {"channel": heads * dim, "step": 3}
    assert found["conv.B"] == found["conv.C"] == {"channel": group, "step": 3}
    assert (found["ssm"]["head"], found["ssm"]["dim"]) == (heads, dim)


def test_sizes_of_a_gated_delta_layer() -> None:
    """q and k by key head, v and the state by value head, as the defaults of Qwen3-Next have it."""
    found = tensors({"model_type": "qwen3_next", "num_hidden_layers": 4, **HEADS})
    assert [found[f"conv.{part}"]["channel"] for part in "qkv"] == [2048, 2048, 4096]
    assert found["ssm"] == {"head": 32, "value": 128, "key": 128}
    assert found["attn"] == {"kv": 2, "head": 4, "dim": 256}


@pytest.mark.parametrize(
    ("keys", "dtypes"),
    [
        ({}, {"bfloat16", "float32"}),
        ({"dtype": "float16", "mamba_ssm_cache_dtype": "float32"}, {"float16", "float32"}),
        ({"mamba_ssm_dtype": "bfloat16"}, {"bfloat16"}),
    ],
)
def test_dtypes_of_a_state(keys: dict[str, Any], dtypes: set[str]) -> None:
    """Convolutions have the dtype of the weights; SSM states are fp32 unless a key says otherwise."""
    ((*conv, ssm),) = read({"model_type": "mamba2", "num_hidden_layers": 1, **keys})[1]
    assert {tensor.dtype for tensor in conv} | {ssm.dtype} == dtypes


@pytest.mark.parametrize(
    ("keys", "full"),
    [
        ({}, (4, 512)),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 2}, (2, 512)),
        ({"attention_k_eq_v": False, "num_global_key_value_heads": 2}, (4, 512)),
        ({"global_head_dim": 64}, (4, 64)),
        ({"per_layer_config": {"5": {"head_dim": 128, "num_key_value_heads": 1}}}, (1, 128)),
    ],
)
def test_full_layers_of_gemma_4(keys: dict[str, Any], full: tuple[int, int]) -> None:
    """They have a head size of their own, and KV heads of their own where K equals V."""
    layers = read({"model_type": "gemma4_text", "num_hidden_layers": 7, **HEADS, **keys})[1]
    found = [(t.group, dict(t.axes)["head"], dict(t.axes)["dim"]) for (t,) in layers]
    assert found == [*[("swa", 4, 256)] * 5, ("attn", *full), ("attn", *full)]


def test_a_layer_that_reuses_a_cache_has_none() -> None:
    """Of four layers, the last two of num_kv_shared_layers are no tensors."""
    keys = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    layers = read({"model_type": "gemma4_text", **HEADS, **keys})[1]
    assert [[tensor.group for tensor in layer] for layer in layers] == [["swa"], ["attn"], [], []]


def test_draft_layers_are_like_the_attention_layers() -> None:
    """num_nextn_predict_layers of them, indexer included."""
    keys = {"model_type": "deepseek_v32", "num_hidden_layers": 3, "num_nextn_predict_layers": 2, **LATENT}
    assert draft(keys) == read(keys)[1][:2]


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("n_groups", {"model_type": "mamba2", "num_heads": 6, "n_groups": 4}),
        ("mamba_n_heads", {"model_type": "granitemoehybrid", **HEADS, "mamba_n_heads": 6}),
        ("conv_kernel", {"model_type": "mamba2", "conv_kernel": 1}),
        ("mamba_ssm_cache_dtype", {"model_type": "mamba2", "mamba_ssm_cache_dtype": "auto"}),
        ("attn_layer_offset", {"model_type": "jamba", **HEADS, "attn_layer_offset": 8}),
        ("hybrid_override_pattern", {"model_type": "nemotron_h", **HEADS, "hybrid_override_pattern": "MX"}),
        ("hybrid_override_pattern", {"model_type": "nemotron_h", **HEADS}),
        ("layers_block_type", {"model_type": "nemotron_h", **HEADS, "layers_block_type": []}),
        ("layer_types", {"model_type": "granitemoehybrid", **HEADS, "layer_types": ["sliding_attention"]}),
        ("linear_num_key_heads", {"model_type": "qwen3_next", **HEADS, "linear_num_key_heads": 3}),
        ("linear_attn_config", {"model_type": "kimi_linear", **LATENT, "linear_attn_config": [1]}),
        (
            "linear_attn_config",
            {"model_type": "kimi_linear", **LATENT, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1]}},
        ),
        (
            "linear_attn_config",
            {"model_type": "kimi_linear", **LATENT, "linear_attn_config": {"full_attn_layers": 1, "kda_layers": []}},
        ),
        ("num_kv_shared_layers", {"model_type": "gemma4_text", **HEADS, "num_kv_shared_layers": 5}),
        ("per_layer_config", {"model_type": "gemma4_text", **HEADS, "per_layer_config": {"1": 3}}),
    ],
)
def test_an_unusable_value_is_named(key: str, config: dict[str, Any]) -> None:
    """A value that no model of the family can have is refused with its key."""
    with pytest.raises(KVPlanError) as caught:
        read({"num_hidden_layers": 2, **config})
    assert (caught.value.code, caught.value.details["key"]) == ("CONFIG", key)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("mamba", "hidden_size"),
        ("deepseek_v32", "kv_lora_rank"),
        ("kimi_linear", "qk_rope_head_dim"),
        ("granitemoehybrid", "hidden_size"),
        ("mamba2", "num_hidden_layers"),
        ("qwen3_next", "num_attention_heads"),
    ],
)
def test_a_missing_key_is_named(model_type: str, key: str) -> None:
    """What every published file states is not guessed."""
    config = {"model_type": model_type, "num_hidden_layers": 4, **HEADS, **LATENT, "num_key_value_heads": None}
    del config[key]
    with pytest.raises(KVPlanError, match=f"{key}.*got no such key") as caught:
        read(config)
    assert caught.value.code == "CONFIG"
