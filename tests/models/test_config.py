"""Configs: families, defaults, nesting, and refusals that name the key."""

from typing import Any

import pytest

from kvplan import KVPlanError
from kvplan.models.config import read
from kvplan.models.families import FAMILIES
from kvplan.models.tensors import Tensor

STATES = [
    *("mamba", "falcon_mamba", "mamba2", "jamba", "nemotron_h", "granitemoehybrid", "falcon_h1"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"),
]
LATENTS = ["deepseek_v2", "deepseek_v3", "deepseek_v32"]
ATTENTION = sorted({*FAMILIES} - {*STATES, *LATENTS})


def config(model_type: str, **keys: Any) -> dict[str, Any]:
    base = {"model_type": model_type, "num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 32}
    return {**base, **keys}


def geometry(keys: dict[str, Any]) -> tuple[int, int]:
    """KV heads and head_dim of the first layer."""
    axes = dict(read({"num_kv_shared_layers": 0, **keys})[1][0][0].axes)
    return axes["head"], axes["dim"]


def groups(keys: dict[str, Any]) -> list[str]:
    return [tensor.group for (tensor,) in read(keys)[1]]


@pytest.mark.parametrize(
    ("model_type", "heads", "head_dim"),
    [
        ("llama", 32, 32),
        ("mistral", 8, 32),
        ("ministral", 8, 32),
        ("ministral3", 8, 128),
        ("mixtral", 8, 32),
        ("phi3", 32, 32),
        ("qwen2", 32, 32),
        ("qwen2_moe", 16, 32),
        ("qwen3", 32, 128),
        ("qwen3_moe", 4, 32),
        ("gemma2", 4, 256),
        ("gemma3_text", 4, 256),
        ("gpt_oss", 8, 64),
    ],
)
def test_what_a_file_leaves_out_is_the_family_default(model_type: str, heads: int, head_dim: int) -> None:
    """num_key_value_heads and head_dim default as the family's class in transformers does."""
    assert geometry(config(model_type)) == (heads, head_dim)


@pytest.mark.parametrize("model_type", ATTENTION)
def test_what_a_file_states_counts(model_type: str) -> None:
    """Stated heads and head_dim are taken, whatever hidden_size would give."""
    assert geometry(config(model_type, num_key_value_heads=2, head_dim=80)) == (2, 80)


def test_null_heads_are_the_query_heads() -> None:
    """num_key_value_heads: null means one KV head per query head, not the default of the class."""
    assert geometry(config("mistral", num_key_value_heads=None)) == (32, 32)


def test_null_head_dim_is_derived() -> None:
    """head_dim: null means hidden_size // num_attention_heads, not the default of the class."""
    assert geometry(config("qwen3", head_dim=None, num_key_value_heads=8)) == (8, 32)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_a_latent_is_one_row_of_latent_and_rotary_key(model_type: str) -> None:
    """MLA keeps kv_lora_rank + qk_rope_head_dim elements a token, with neither kv nor head, for every rank."""
    (tensor,) = read(config(model_type, kv_lora_rank=512, qk_rope_head_dim=64, num_key_value_heads=128))[1][0]
    assert tensor == Tensor("attn", "attn", (("dim", 576),))
    assert tensor.parts(5, 8) == tensor.parts(0, 1)


@pytest.mark.parametrize(
    ("outer", "inner", "heads"),
    [("mistral3", "mistral", 8), ("mistral3", "ministral3", 8), ("gemma3", "gemma3_text", 4), ("llava", "llama", 32)],
)
def test_a_nested_decoder_is_a_model_of_its_own(outer: str, inner: str, heads: int) -> None:
    """text_config gives type and geometry; keys of the outer file don't."""
    keys = {"model_type": outer, "num_hidden_layers": 99, "num_key_value_heads": 99, "text_config": config(inner)}
    model_type, layers, _ = read(keys)
    assert (model_type, len(layers), dict(layers[0][0].axes)["head"]) == (inner, 4, heads)


@pytest.mark.parametrize(("outer", "inner"), [("mistral3", "mistral"), ("gemma3", "gemma3_text")])
def test_a_nested_decoder_without_a_type_has_that_of_its_family(outer: str, inner: str) -> None:
    """Older files leave model_type out of text_config."""
    text = {key: value for key, value in config(inner).items() if key != "model_type"}
    assert read({"model_type": outer, "text_config": text})[0] == inner


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
    assert read(config("llama", **keys))[2] == dtype


@pytest.mark.parametrize(("inner", "dtype"), [({}, "float16"), ({"dtype": "float32"}, "float32")])
def test_a_nested_decoder_may_state_its_dtype(inner: dict[str, Any], dtype: str) -> None:
    """The dtype of text_config counts before that of the outer file."""
    assert (
        read({"model_type": "gemma3", "torch_dtype": "float16", "text_config": config("gemma3_text", **inner)})[2]
        == dtype
    )


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
    ],
)
def test_a_missing_key_is_named(model_type: str, missing: str) -> None:
    """No geometry is guessed where every published file states it."""
    keys = config(model_type, kv_lora_rank=512, qk_rope_head_dim=64)
    del keys[missing]
    with pytest.raises(KVPlanError, match=f"{missing}.*got no such key") as caught:
        read(keys)
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
        ("layer_types", [["full_attention"]] * 4),
        ("layer_types", "full"),
    ],
)
def test_an_unusable_value_is_named(key: str, value: object) -> None:
    """A value of the wrong type, out of range, or that no model can have, is refused with its key."""
    with pytest.raises(KVPlanError) as caught:
        read(config("llama", **{key: value}))
    assert caught.value.code == "CONFIG"
    assert caught.value.details["key"] in (key, "dtype")
    assert str(caught.value).count(repr(value)) == 1


@pytest.mark.parametrize("model_type", ["deepseek_v4", "rwkv", "mllama_text_model", None, 7])
def test_an_unknown_model_type_points_to_views(model_type: object) -> None:
    """A model whose caches are not modelled is refused, not approximated, and the message says what to do."""
    keys = {**config("llama"), "model_type": model_type}
    with pytest.raises(KVPlanError, match=r"model_type of llama, .*Views of Workers") as caught:
        read(keys)
    assert caught.value.code == "CONFIG"


@pytest.mark.parametrize("value", [None, [], "llama"])
def test_a_configuration_is_a_mapping(value: Any) -> None:
    """What json.load gave must be an object."""
    with pytest.raises(KVPlanError) as caught:
        read(value)
    assert caught.value.code == "TYPE"


@pytest.mark.parametrize("query_heads", [24, 48])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("heads", [1, 2, 4, 12])
def test_a_rank_holds_the_heads_that_its_query_heads_read(heads: int, tp: int, query_heads: int) -> None:
    """Query head q reads KV head q * K // Q; a rank has exactly those of its share of the query heads."""
    tensor = Tensor("attn", "attn", (("head", heads),), sharded="head", shards=heads)
    share = query_heads // tp
    for rank in range(tp):
        read_by = {q * heads // query_heads for q in range(rank * share, (rank + 1) * share)}
        assert set(tensor.units(rank, tp)) == read_by


def test_shards_stay_whole() -> None:
    """An axis of 32 channels in 4 shards goes to 3 ranks by shards of 8 channels."""
    tensor = Tensor("conv", "state", (("step", 3), ("channel", 32)), paged=False, sharded="channel", shards=4)
    parts = [next(part for part in tensor.parts(rank, 3) if part.name == "channel") for rank in range(3)]
    assert [(part.start, part.stop, part.size) for part in parts] == [(0, 16, 32), (8, 24, 32), (16, 32, 32)]


@pytest.mark.parametrize(("sharded", "shards"), [("head", 3), ("channel", 1)])
def test_shards_divide_an_axis_of_the_tensor(sharded: str, shards: int) -> None:
    """The sharded axis exists, and its size is a multiple of its shards."""
    with pytest.raises(KVPlanError) as caught:
        Tensor("attn", "attn", (("head", 8),), sharded=sharded, shards=shards)
    assert caught.value.code == "SIZE"


def test_the_last_layer_of_gemma_4_is_full_whatever_its_list_says() -> None:
    """Gemma4TextConfig forces the last layer to attend to all positions."""
    stated = config("gemma4_text", head_dim=8, global_head_dim=16, layer_types=["sliding_attention"] * 4)
    assert groups(stated) == ["swa", "swa", "swa", "attn"]


def test_a_layer_shares_the_cache_of_its_kind() -> None:
    """A sharing layer whose kind no earlier layer has is refused."""
    keys = config("gemma3n_text", num_kv_shared_layers=1)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    with pytest.raises(KVPlanError, match="an earlier one of its kind that has one, got 1") as caught:
        read({**keys, "layer_types": kinds})
    assert caught.value.code == "CONFIG"
    assert [len(layer) for layer in read({**keys, "layer_types": kinds[::-1]})[1]] == [1, 1, 1, 0]


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
    layers = read(config(model_type, **keys))[1]
    assert {(tensor.group, tensor.window) for (tensor,) in layers} == {("attn", window)}
