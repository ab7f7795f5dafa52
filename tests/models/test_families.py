"""Families: which tensors each layer of a config.json caches, by family, and refusals that name the key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvplan import KVPlanError, Model
from kvplan.cli.model_files import load
from kvplan.models import FAMILIES, families, kinds
from kvplan.models.caches import ATTENTION as ATTENTION_READERS
from kvplan.models.caches import STATES
from kvplan.models.keys import RULES
from kvplan.models.tensors import FULL, SLIDING, STATE, Layers, Tensor

ATTENTION = [
    name
    for name, family in FAMILIES.items()
    if family.state is None and family.keys is None and {"num_key_value_heads", "head_dim"} <= {*family.defaults}
    if "kv_lora_rank" not in family.defaults
]

ONE_HEAD = {"head_dim": 128, "num_key_value_heads": 1}
HEADS = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
LATENT = {"kv_lora_rank": 12, "qk_rope_head_dim": 4}


def config(model_type: str, **keys: Any) -> dict[str, Any]:
    base = {"model_type": model_type, "num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 32}
    return {**base, **keys}


def layers_of(keys: dict[str, Any]) -> Layers:
    return Model.from_config(keys).layers


def geometry(keys: dict[str, Any]) -> tuple[int, int]:
    """KV heads and head_dim of the first layer."""
    axes = dict(layers_of({"num_kv_shared_layers": 0, **keys})[0][0].axes)
    return axes["head"], axes["dim"]


def groups(keys: dict[str, Any]) -> list[str]:
    return [tensor.group for (tensor,) in layers_of(keys)]


def tensors(config: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The axes of each kind of tensor, in its first layer."""
    found: dict[str, dict[str, int]] = {}
    for layer in layers_of(config):
        for tensor in layer:
            found.setdefault(tensor.kind, dict(tensor.axes))
    return found


@pytest.mark.parametrize("model_type", ATTENTION)
def test_what_a_file_states_counts(model_type: str) -> None:
    """Stated heads and head_dim are taken, whatever hidden_size would give."""
    assert geometry(config(model_type, num_key_value_heads=2, head_dim=80)) == (2, 80)


def test_null_heads_are_the_query_heads() -> None:
    """num_key_value_heads: null means one KV head per query head, not the default of the class."""
    assert geometry(config("mistral", num_key_value_heads=None)) == (32, 32)


def test_null_head_dim_is_derived() -> None:
    """head_dim: null means hidden_size // num_attention_heads, not the default of the class."""
    keys = config("nemotron_h", hybrid_override_pattern="*M*M", head_dim=None, num_key_value_heads=8)
    assert geometry(keys) == (8, 32)
    assert geometry(config("qwen3", head_dim=None, num_key_value_heads=8)) == (8, 32)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_a_latent_is_one_row_of_latent_and_rotary_key(model_type: str) -> None:
    """MLA has kv_lora_rank + qk_rope_head_dim elements a token, with neither kv nor head, on every rank."""
    ((tensor,), *_) = layers_of(config(model_type, kv_lora_rank=512, qk_rope_head_dim=64, num_key_value_heads=128))
    assert tensor == Tensor("attn", "attn", (("dim", 576),))


NO_GROUPS = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "opt", **NO_GROUPS, "num_key_value_heads": 4},
        {"model_type": "persimmon", **NO_GROUPS, "num_key_value_heads": 4},
        {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 8, "num_key_value_heads": 2},
        {"model_type": "mimo_v2_flash", **HEADS, "num_hidden_layers": 2, "attention_chunk_size": 128},
    ],
)
def test_a_key_that_changes_nothing_may_be_stated(keys: dict[str, Any]) -> None:
    """As many KV heads as heads, KV heads of a model without attention, chunks that MiMo-V2 does not have."""
    *_, superfluous = keys
    without = {key: value for key, value in keys.items() if key != superfluous}
    assert layers_of(keys) == layers_of(without)


@pytest.mark.parametrize("model_type", ["minimax_m3", "minimax_m3_text"])
def test_other_names_of_minimax_m3(model_type: str) -> None:
    """A file with the text model alone, and what vLLM's reader makes of a nested one."""
    keys = {"num_hidden_layers": 2, "sparse_attention_config": {"sparse_attention_freq": [0, 1]}}
    assert layers_of({"model_type": model_type, **keys}) == layers_of({"model_type": "minimax_m3_vl_text", **keys})


@pytest.mark.parametrize(
    ("outer", "inner", "heads"),
    [("mistral3", "mistral", 8), ("mistral3", "ministral3", 8), ("gemma3", "gemma3_text", 4), ("llava", "llama", 32)],
)
def test_a_nested_decoder_is_a_model_of_its_own(outer: str, inner: str, heads: int) -> None:
    """text_config gives type and geometry; keys of the outer file don't."""
    keys = {"model_type": outer, "num_hidden_layers": 99, "num_key_value_heads": 99, "text_config": config(inner)}
    model = Model.from_config(keys)
    assert (model.name, len(model.layers), dict(model.layers[0][0].axes)["head"]) == (inner, 4, heads)


@pytest.mark.parametrize(("outer", "inner"), [("mistral3", "mistral"), ("gemma3", "gemma3_text")])
def test_a_nested_decoder_without_a_type_has_that_of_its_family(outer: str, inner: str) -> None:
    """Older files leave model_type out of text_config."""
    text = {key: value for key, value in config(inner).items() if key != "model_type"}
    assert Model.from_config({"model_type": outer, "text_config": text}).name == inner


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": None, "torch_dtype": "torch.float16"}, "float16"),
    ],
)
def test_dtype_is_that_of_the_weights(keys: dict[str, Any], dtype: str) -> None:
    """dtype counts before torch_dtype, and bfloat16 where there is neither."""
    assert Model.from_config(config("llama", **keys)).dtype == dtype


@pytest.mark.parametrize(("inner", "dtype"), [({}, "float16"), ({"dtype": "float32"}, "float32")])
def test_a_nested_decoder_may_state_its_dtype(inner: dict[str, Any], dtype: str) -> None:
    """The dtype of text_config counts before that of the outer file."""
    keys = {"model_type": "gemma3", "torch_dtype": "float16", "text_config": config("gemma3_text", **inner)}
    assert Model.from_config(keys).dtype == dtype


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (config("gpt_oss"), ["swa", "attn", "swa", "attn"]),
        (config("gemma2"), ["swa", "attn", "swa", "attn"]),
        (config("gemma3_text", num_hidden_layers=7), ["swa"] * 5 + ["attn", "swa"]),
        (config("gemma3_text", sliding_window_pattern=2), ["swa", "attn", "swa", "attn"]),
        (config("qwen3", use_sliding_window=True, max_window_layers=3), ["attn", "attn", "attn", "swa"]),
        (config("qwen2", use_sliding_window=True, max_window_layers=1), ["attn", "swa", "swa", "swa"]),
        (config("qwen2_moe", use_sliding_window=True, max_window_layers=2), ["swa", "attn", "attn", "attn"]),
        (config("qwen3", use_sliding_window=False, max_window_layers=1), ["attn"] * 4),
        (config("qwen3", use_sliding_window=True, sliding_window=None, max_window_layers=1), ["attn"] * 4),
        (config("mistral", sliding_window=4096), ["attn"] * 4),
        (
            config("gpt_oss", num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]),
            ["attn", "swa"],
        ),
    ],
)
def test_layers_of_two_kinds_have_two_groups(keys: dict[str, Any], expected: list[str]) -> None:
    """Full and sliding layers have block tables of their own, by layer_types or else by the family's rule."""
    assert groups(keys) == expected


def test_layers_of_one_kind_have_one_group() -> None:
    """A model that slides everywhere has the one group that a model that slides nowhere has."""
    assert groups(config("ministral", layer_types=["sliding_attention"] * 4)) == ["attn"] * 4


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("llama", "num_hidden_layers"),
        ("llama", "num_attention_heads"),
        ("mistral", "hidden_size"),
        ("deepseek_v3", "kv_lora_rank"),
        ("deepseek_v3", "qk_rope_head_dim"),
        ("mamba", "hidden_size"),
        ("deepseek_v32", "kv_lora_rank"),
        ("kimi_linear", "qk_rope_head_dim"),
        ("granitemoehybrid", "hidden_size"),
        ("mamba2", "num_hidden_layers"),
        ("qwen3_next", "num_attention_heads"),
    ],
)
def test_a_missing_key_is_named(model_type: str, missing: str) -> None:
    """A value that every published file states is not guessed."""
    keys = config(model_type, num_hidden_layers=5, num_key_value_heads=None)
    keys |= LATENT if "kv_lora_rank" in FAMILIES[model_type].defaults else {}
    del keys[missing]
    with pytest.raises(KVPlanError, match=f"{missing}.*got no such key") as caught:
        Model.from_config(keys)
    assert (caught.value.code, caught.value.details["key"]) == ("CONFIG", missing)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 1 << 20),
        ("num_hidden_layers", "4"),
        ("num_key_value_heads", True),
        ("num_key_value_heads", 12),
        ("num_key_value_heads", 64),
        ("head_dim", 64.0),
        ("head_dim", 1 << 40),
        ("hidden_size", 1000),
        ("torch_dtype", "auto"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "chunked_attention", "full_attention", "full_attention"]),
        ("layer_types", ["full_attention", "linear_attention", "full_attention", "full_attention"]),
        ("layer_types", [["full_attention"]] * 4),
        ("layer_types", "full"),
    ],
)
def test_an_unusable_value_is_named(key: str, value: object) -> None:
    """A value of the wrong type, out of range, or that no model can have, is refused with its key."""
    with pytest.raises(KVPlanError) as caught:
        Model.from_config(config("llama", **{key: value}))
    assert caught.value.code == "CONFIG"
    assert caught.value.details["key"] == key
    assert str(caught.value).count(repr(value)) == 1


@pytest.mark.parametrize("model_type", ["phi3small", None, 7, ["llama"]])
def test_an_unknown_model_type_is_no_dead_end(model_type: object) -> None:
    """A model whose caches are not known is refused, not approximated, and the message says what to do."""
    keys = {**config("llama"), "model_type": model_type}
    with pytest.raises(
        KVPlanError, match=r"one of the \d+ types in models.FAMILIES.*head_dim=128.*Views of Workers"
    ) as caught:
        Model.from_config(keys)
    assert caught.value.code == "CONFIG"


def test_the_sizes_of_a_message_make_a_model() -> None:
    """The sizes that the refusal of an unknown type shows are those of a model, as the command line reads them."""
    with pytest.raises(KVPlanError) as caught:
        Model.from_config({"model_type": "phi3small"})
    shown = re.search(r"layers=\S+", caught.value.hint)
    assert shown is not None
    model = load(shown[0])
    assert (len(model.layers), dict(model.layers[0][0].axes)) == (40, {"kv": 2, "head": 10, "dim": 128})


SPARSE_LAYERS = {"sparse_attention_freq": [0, 1, 1], "sparse_disable_index_value": [0, 1, 1]}


@pytest.mark.parametrize(
    ("keys", "dims"),
    [
        ({}, [[], [], []]),
        ({"sparse_attention_config": {**SPARSE_LAYERS, "sparse_index_dim": 64}}, [[], [64], [64]]),
        ({"sparse_attention_config": {**SPARSE_LAYERS, "sparse_disable_index_value": None}}, [[], [128], [128]]),
        ({"layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"]}, [[128], [], [128]]),
    ],
    ids=["none", "older", "default", "types"],
)
def test_layers_that_choose_blocks_keep_index_keys(keys: dict[str, Any], dims: list[list[int]]) -> None:
    """Files of MiniMax-M3 list them by type, or in ``sparse_attention_config``."""
    model = Model.from_config({**config("minimax_m3_vl_text", num_hidden_layers=3), **keys})
    found = [[dict(tensor.axes)["dim"] for tensor in layer if tensor.kind == "index"] for layer in model.layers]
    assert found == dims
    assert all(layer[0].kind == "attn" for layer in model.layers)


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        ({"sparse_attention_freq": [0, 1]}, "0 or 1 for each of 3 layers"),
        ({**SPARSE_LAYERS, "sparse_disable_index_value": [0, 1, 0]}, "indexers without values"),
    ],
)
def test_indexers_that_are_refused(stated: dict[str, Any], text: str) -> None:
    """Of too few layers, or with values, which nobody moves."""
    keys = {**config("minimax_m3_vl_text", num_hidden_layers=3), "sparse_attention_config": stated}
    with pytest.raises(KVPlanError, match=f"^CONFIG: .* {text}"):
        Model.from_config(keys)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bert", "keeps no cache"),
        ("t5", "keys and values of an encoder's outputs"),
        ("mllama_text_model", "keys and values of an encoder's outputs"),
        ("rwkv", "recurrent state has a shape of its own"),
        ("deepseek_v4", "at several ratios"),
    ],
)
def test_a_refused_family_has_its_reason(model_type: str, reason: str) -> None:
    """What isn't described says why, and what to do."""
    keys = {**config(model_type), "is_encoder_decoder": model_type == "t5"}
    with pytest.raises(KVPlanError, match=f"^CONFIG: .*{reason}.*Views of Workers"):
        Model.from_config(keys)


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("attn_layer_indices", config("granitemoehybrid", attn_layer_indices=[1], mamba_n_heads=32)),
        ("num_attention_groups", config("llama", num_attention_groups=1, head_dim=256)),
        ("share_q_dim", config("llama", share_q_dim=2048, head_dim=256)),
        ("kv_lora_rank", config("llama", kv_lora_rank=512)),
        ("sliding_window", config("llama", sliding_window=512)),
        ("full_attention_interval", config("llama", full_attention_interval=4)),
        (
            "num_key_value_heads",
            {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64, "num_key_value_heads": 2},
        ),
    ],
)
def test_a_key_that_a_family_lacks_is_not_ignored(key: str, keys: dict[str, Any]) -> None:
    """A file whose model_type was changed is refused: Bamba as Granite had no attention layers."""
    with pytest.raises(KVPlanError, match=f"expected no '{key}', which this type doesn't have") as caught:
        Model.from_config(keys)
    assert (caught.value.code, caught.value.details["key"]) == ("CONFIG", key)
    del keys[key]
    Model.from_config(keys)


@pytest.mark.parametrize(
    "keys", [{"sliding_window": None}, {"sliding_window": 512, "use_sliding_window": False}, {"mamba_n_heads": None}]
)
def test_a_key_without_effect_is_ignored(keys: dict[str, Any]) -> None:
    """Null keys, and a window that isn't used, change nothing."""
    assert layers_of(config("llama", **keys)) == layers_of(config("llama"))


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "float8_e4m3fn"),
        ({"kv_cache_quant_algo": "FP8"}, "float8_e4m3fn"),
        ({"kv_cache_scheme": None}, "float16"),
        ({"quant_method": "awq"}, "float16"),
    ],
)
def test_a_quantized_cache_is_honoured(stated: dict[str, Any], dtype: str) -> None:
    """A file may say that K and V are fp8."""
    assert Model.from_config(config("llama", dtype="float16", quantization_config=stated)).dtype == dtype


@pytest.mark.parametrize(
    "stated", [{"kv_cache_scheme": {"type": "int", "num_bits": 8}}, {"kv_cache_quant_algo": "NVFP4"}]
)
def test_an_unknown_quantized_cache_is_refused(stated: dict[str, Any]) -> None:
    """A quantized cache of another kind is not taken for one of the weights' dtype."""
    with pytest.raises(KVPlanError, match=r"^CONFIG: .*expected fp8; .*Model\.quantized"):
        Model.from_config(config("llama", quantization_config=stated))


@pytest.mark.parametrize("value", [None, [], "llama"])
def test_a_configuration_is_a_mapping(value: Any) -> None:
    """What json.load gave must be an object."""
    with pytest.raises(KVPlanError, match=r"^TYPE: "):
        Model.from_config(value)


def test_the_last_layer_of_gemma_4_is_full_whatever_its_list_says() -> None:
    """Gemma4TextConfig forces the last layer to attend to all positions."""
    stated = config("gemma4_text", head_dim=8, global_head_dim=16, layer_types=["sliding_attention"] * 4)
    assert groups(stated) == ["swa", "swa", "swa", "attn"]


def test_a_layer_shares_the_cache_of_its_kind() -> None:
    """A sharing layer whose kind no earlier layer has is refused."""
    keys = config("gemma3n_text", num_kv_shared_layers=1)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    with pytest.raises(KVPlanError, match=r"^CONFIG: .*an earlier layer of the same kind that has one, got 1"):
        layers_of({**keys, "layer_types": kinds})
    assert [len(layer) for layer in layers_of({**keys, "layer_types": kinds[::-1]})] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("model_type", "keys", "window"),
    [
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("mixtral", {}, None),
        ("phi3", {"sliding_window": 2047}, 2047),
        ("qwen3_moe", {"sliding_window": 4096}, None),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 512}, 512),
    ],
)
def test_all_layers_slide_in_a_window(model_type: str, keys: dict[str, Any], window: int | None) -> None:
    """Families without a list of layer types slide everywhere or nowhere, in one group."""
    layers = layers_of(config(model_type, **keys))
    assert {(tensor.group, tensor.window) for (tensor,) in layers} == {("attn", window)}


@pytest.mark.parametrize("model_type", ["cohere2", "cohere2_moe"])
def test_cohere_slides_over_a_token_and_a_window_before_it(model_type: str) -> None:
    """vLLM and SGLang attend to one token more than the file states, so a request moves one more."""
    model = Model.from_config(config(model_type, sliding_window=64))
    assert model.windows == {"swa": 65, "attn": None}
    assert model.tokens(0, 200, model.engine("decode")[0])["swa"] == (135, 200)


@pytest.mark.parametrize(("window", "expected"), [(None, None), (64, 64)])
def test_nemotron_h_slides_if_its_file_has_a_window(window: int | None, expected: int | None) -> None:
    """Its attention layers are one group, in a window or not."""
    keys = config("nemotron_h", hybrid_override_pattern="*M*M", sliding_window=window)
    assert Model.from_config(keys).windows == {"attn": expected}


def test_ling_2_5_and_ling_3_have_one_model_type_and_unequal_states() -> None:
    """Files of Ling 2.5 say so by their architecture: a matrix of head_dim for each head, and no convolution."""
    keys = config("bailing_hybrid", head_dim=64, v_head_dim=128, layer_group_size=4, **LATENT)
    old = {**keys, "architectures": ["BailingMoeV2_5ForCausalLM"]}
    assert [[tensor.kind for tensor in layer] for layer in layers_of(keys)] == [*[DELTA] * 3, ATTENDS]
    assert [[tensor.kind for tensor in layer] for layer in layers_of(old)] == [*[["ssm"]] * 3, ATTENDS]
    assert tensors(old)["ssm"] == {"head": 32, "key": 64, "value": 64}


MAMBA1 = ["conv.x", "ssm"]
MAMBA2 = ["conv.x", "conv.B", "conv.C", "ssm"]
DELTA = ["conv.q", "conv.k", "conv.v", "ssm"]
ATTENDS = ["attn"]

FILES: list[tuple[dict[str, Any], list[list[str]]]] = [
    ({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 8}, [MAMBA1] * 2),
    ({"model_type": "falcon_mamba", "num_hidden_layers": 2, "hidden_size": 8}, [MAMBA1] * 2),
    ({"model_type": "mamba2", "num_hidden_layers": 2}, [MAMBA2] * 2),
    ({"model_type": "jamba", "num_hidden_layers": 8, **HEADS}, [*[MAMBA1] * 4, ATTENDS, *[MAMBA1] * 3]),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-E*", **HEADS}, [MAMBA2, [], [], ATTENDS]),
    (
        {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "full_attention", "mlp"], **HEADS},
        [MAMBA2, [], ATTENDS, []],
    ),
    (
        {"model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], **HEADS},
        [MAMBA2, ATTENDS],
    ),
    ({"model_type": "falcon_h1", "num_hidden_layers": 2, **HEADS}, [ATTENDS + MAMBA2] * 2),
    ({"model_type": "qwen3_next", "num_hidden_layers": 4, **HEADS}, [DELTA, DELTA, DELTA, ATTENDS]),
    ({"model_type": "qwen3_next", "num_hidden_layers": 2, "full_attention_interval": 2, **HEADS}, [DELTA, ATTENDS]),
    ({"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 4, **HEADS}}, [DELTA, DELTA, DELTA, ATTENDS]),
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
        [DELTA, DELTA, ATTENDS],
    ),
    ({"model_type": "kimi_linear", "num_hidden_layers": 5, **LATENT}, [*[DELTA] * 4, ATTENDS]),
    ({"model_type": "deepseek_v32", "num_hidden_layers": 1, **LATENT}, [["attn", "index", "index.scale"]]),
    (
        {"model_type": "deepseek_v32", "num_hidden_layers": 1, "layer_types": ["deepseek_sparse_attention"], **LATENT},
        [["attn", "index", "index.scale"]],
    ),
    ({"model_type": "gemma3n_text", "num_hidden_layers": 20, **HEADS}, [*[ATTENDS] * 5, *[[]] * 15]),
]


@pytest.mark.parametrize(
    ("config", "kinds"), FILES, ids=lambda value: value.get("model_type", "") if type(value) is dict else ""
)
def test_each_layer_caches_what_its_kind_does(config: dict[str, Any], kinds: list[list[str]]) -> None:
    """Lists and patterns of layers, with new and older names, and the family's rule for files without them."""
    assert [[tensor.kind for tensor in layer] for layer in layers_of(config)] == kinds


@pytest.mark.parametrize(
    ("config", "channels"),
    [
        ({"model_type": "falcon_mamba", "hidden_size": 4096, "expand": 16, "intermediate_size": 8192}, 8192),
        ({"model_type": "mamba", "hidden_size": 768}, 1536),
        ({"model_type": "jamba", "intermediate_size": 14336, **HEADS}, 2048),
    ],
)
def test_width_of_a_mamba_layer(config: dict[str, Any], channels: int) -> None:
    """A stated width counts before expand times hidden_size, but Jamba's intermediate_size is that of its MLP."""
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
    ((*conv, ssm),) = layers_of({"model_type": "mamba2", "num_hidden_layers": 1, **keys})
    assert {tensor.dtype for tensor in conv} | {ssm.dtype} == dtypes


@pytest.mark.parametrize(
    ("keys", "full"),
    [
        ({}, (4, 512)),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 2}, (2, 512)),
        ({"attention_k_eq_v": False, "num_global_key_value_heads": 2}, (4, 512)),
        ({"global_head_dim": 64}, (4, 64)),
        ({"per_layer_config": {"5": ONE_HEAD, "6": ONE_HEAD}}, (1, 128)),
        ({"per_layer_config": {"05": ONE_HEAD, "06": ONE_HEAD}}, (1, 128)),  # as transformers writes more than ten
    ],
)
def test_full_layers_of_gemma_4(keys: dict[str, Any], full: tuple[int, int]) -> None:
    """They have a head size of their own, and KV heads of their own if K equals V."""
    layers = layers_of({"model_type": "gemma4_text", "num_hidden_layers": 7, **HEADS, **keys})
    found = [(t.group, dict(t.axes)["head"], dict(t.axes)["dim"]) for (t,) in layers]
    assert found == [*[("swa", 4, 256)] * 5, ("attn", *full), ("attn", *full)]


def test_a_layer_that_reuses_a_cache_has_none() -> None:
    """The last two of four layers have no tensors if num_kv_shared_layers is 2."""
    keys = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    layers = layers_of({"model_type": "gemma4_text", **HEADS, **keys})
    assert [[tensor.group for tensor in layer] for layer in layers] == [["swa"], ["attn"], [], []]


def test_draft_layers_are_like_the_attention_layers() -> None:
    """There are num_nextn_predict_layers of them, with an indexer if the model has one."""
    keys = {"model_type": "deepseek_v32", "num_hidden_layers": 3, "num_nextn_predict_layers": 2, **LATENT}
    model = Model.from_config(keys, with_draft_layers=True)
    assert model.drafts == model.layers[:2]
    assert Model.from_config(keys).drafts == ()


@pytest.mark.parametrize(
    ("model_type", "number", "text"),
    [
        ("mamba", 1, "none in a model without attention layers, got 1"),
        ("llama", 0, r"an integer in \[1, 16384\), got 0"),
        ("llama", None, "a value for key 'num_nextn_predict_layers', got null"),
    ],
)
def test_draft_layers_that_cannot_be_are_refused(model_type: str, number: int | None, text: str) -> None:
    """A file states how many there are, and there are attention layers for them to be like."""
    keys = config(model_type, num_nextn_predict_layers=number)
    with pytest.raises(KVPlanError, match=text) as caught:
        Model.from_config(keys, with_draft_layers=True)
    assert (caught.value.code, caught.value.details["key"]) == ("CONFIG", "num_nextn_predict_layers")


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
        *(
            ("per_layer_config", {"model_type": "gemma4_text", **HEADS, "per_layer_config": exceptions})
            for exceptions in ({"1": 3}, {"1": ONE_HEAD, "01": ONE_HEAD}, {"02": ONE_HEAD}, {"0" * 5000: ONE_HEAD})
        ),
    ],
)
def test_an_unusable_value_of_a_family_is_named(key: str, config: dict[str, Any]) -> None:
    """A value that no model of the family can have is refused with its key."""
    with pytest.raises(KVPlanError) as caught:
        Model.from_config({"num_hidden_layers": 2, **config})
    assert (caught.value.code, caught.value.details["key"]) == ("CONFIG", key)


@pytest.mark.parametrize(
    ("name", "rules"), [("layers", kinds.RULES), ("attention", ATTENTION_READERS), ("state", STATES), ("keys", RULES)]
)
def test_each_rule_has_a_family(name: str, rules: Mapping[str, Any]) -> None:
    """families.json names all rules; a rule without a family goes."""
    table = json.loads(Path(families.__file__).with_suffix(".json").read_text())["rules"].values()
    stated = json.dumps([entry[name] for entry in table if name in entry])
    by_default = {"all_slide", "repeat", "kv_heads", "mla", "sparse_mla"}
    assert {rule for rule in rules if f'"{rule}"' not in stated} <= by_default


def kinds_in(rule: Any) -> Iterator[str]:
    """The kinds of layers that a rule of families.json states."""
    if isinstance(rule, list):
        yield from rule
    elif isinstance(rule, dict):
        named = [rule[name] for name in ("kind", "absent", "listed", "last", "needs") if name in rule]
        yield from (*named, *rule.get("period", ()) * ("kind" not in rule), *rule.get("first", ()))
        yield from rule.get("kinds", {}).values()
        yield from kinds_in(rule.get("otherwise"))


def test_rules_state_kinds_of_layers() -> None:
    """A misspelled kind would be one of layers without a cache."""
    table = json.loads(Path(families.__file__).with_suffix(".json").read_text())["rules"].values()
    found = {kind for entry in table for kind in kinds_in(entry.get("layers"))}
    found |= {entry["last"] for entry in table if "last" in entry}
    assert found == {FULL, SLIDING, STATE, kinds.BOTH}


def test_the_families_cannot_be_changed() -> None:
    """No value of the module is a mutable container, nor are the defaults of a family."""
    values = {name: value for name, value in vars(families).items() if not name.startswith("__")}
    assert [name for name, value in values.items() if isinstance(value, dict | list | set)] == []
    for family in FAMILIES.values():
        with pytest.raises(TypeError):
            family.defaults["rope_theta"] = 10000  # type: ignore[index]


def test_a_type_that_is_no_string_is_refused_whatever_it_is_read_like() -> None:
    """A type that cannot be looked up is no unknown type."""
    with pytest.raises(KVPlanError, match=r"CONFIG: cannot read a model configuration: .*got a list of 0"):
        Model.from_config({"model_type": []}, like="llama")


def test_the_window_of_sliding_heads_is_a_count() -> None:
    """MiMo-V2 states the positions before a token; what is no integer is refused."""
    keys = {"model_type": "mimo_v2_flash", "num_key_value_heads": 4, "sliding_window_size": "128"}
    with pytest.raises(KVPlanError, match=r"CONFIG: .*sliding_window_size"):
        Model.from_config(keys)


def test_layers_of_lfm3_begin_with_one_that_attends_to_all_positions() -> None:
    """Of four layers, the third is full; the first slides, but layer 0 is a convolution (Lfm3Config)."""
    found = [layer[0].group for layer in layers_of(config("lfm3", num_hidden_layers=9))]
    assert found == ["state", "state", "attn", "state", "swa", "state", "attn", "state", "swa"]


def immutable(value: Any) -> bool:
    """Whether nothing of a value can be changed, at any depth."""
    if isinstance(value, MappingProxyType):
        return all(map(immutable, value.values()))
    return isinstance(value, int | float | str | None)


def test_the_defaults_of_a_family_are_nobodys_to_change() -> None:
    """Families share what a data file says of them: whoever changes one of them would change others."""
    assert all(immutable(family.defaults) for family in FAMILIES.values())
    with pytest.raises(TypeError):
        FAMILIES["llama"].defaults["head_dim"] = 7  # type: ignore[index]
    with pytest.raises(TypeError):
        FAMILIES["llama"] = FAMILIES["mistral"]  # type: ignore[index]
