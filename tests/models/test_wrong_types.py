"""Wrong types in a config.json: whatever stands under a key, a file is read as before or refused by that key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from kvplan import KVPlanError, Model
from kvplan.models import FAMILIES
from kvplan.models import families as table_module
from kvplan.models.config import NESTED, shipped_configs
from kvplan.models.families import CACHE_KEYS
from kvplan.models.values import DRAFTS, HIDDEN, NUM_HEADS, NUM_LAYERS
from tests.models.test_families import FILES as HYBRIDS
from tests.models.test_families import HEADS, LATENT
from tests.models.test_published import FILES as PUBLISHED

VALUES: Final[tuple[Any, ...]] = (
    *("0", "x", "", True, False, 0, 1.5, float("nan"), -1, 2**70, None, {}, {"0": 1}),
    *([], [1], ["0"], [True], [1.0], [None], [[1]], [2**70], [-1]),
)

ANYWHERE: Final = (
    *("layer_types", "layers_block_type", "per_layer_config", "dtype", "torch_dtype", "architectures"),
    *("mamba_ssm_cache_dtype", "mamba_ssm_dtype", "quantization_config", "is_encoder_decoder", "model_type"),
    *("swa_head_dim", "full_head_dim", "shares_index", *NESTED, *DRAFTS),
)
"""Keys that are read of files of any family."""

FLAGS: Final = (
    *("use_sliding_window", "use_dsa", "attention_k_eq_v", "is_encoder_decoder", "shares_index"),
    *("multi_query", "multi_query_attention", "new_decoder_architecture"),
)

NO_FLAGS: Final[tuple[Any, ...]] = ("false", "0", "", 0, 1, [], {})

SIZES: Final = {
    **dict.fromkeys(NUM_LAYERS, 20),
    **dict.fromkeys(NUM_HEADS, 8),
    **dict.fromkeys(HIDDEN, 1024),
    "num_key_value_heads": 4,
    "attn_type_list": [1] * 20,
    **LATENT,
}
PERIODS: Final[Mapping[str, dict[str, int]]] = {
    "bailing_moe_linear": {"layer_group_size": 5},
    "phi4flash": {"mb_per_layer": 2, "sliding_window": 512},
}
"""What families of hybrids need besides."""

BAMBA: Final = {"model_type": "bamba", **HEADS, "mamba_n_heads": 32}
ZAMBA: Final = {"model_type": "zamba2", **HEADS, "n_mamba_heads": 32}
KIMI_SIZES: Final = {"model_type": "kimi_linear", **LATENT}
NAS: Final = {"model_type": "nemotron-nas"}
KIMI: Final = {"full_attn_layers": [2], "kda_layers": [1]}


def files() -> Iterator[dict[str, Any]]:
    """A file of each family that is read in its own way, and some of the other tests."""
    table = json.loads(Path(table_module.__file__).with_suffix(".json").read_text())["rules"]
    families = {(str(table.get(name)), *family.defaults): name for name, family in FAMILIES.items()}
    for model_type in families.values():
        read = {"num_hidden_layers", "num_attention_heads", "hidden_size", *FAMILIES[model_type].defaults}
        keys: dict[str, Any] = {key: value for key, value in SIZES.items() if key in read}
        if model_type == "nemotron_h":
            keys["hybrid_override_pattern"] = "M*M*"
        keys |= PERIODS.get(model_type, {})
        if model_type == "nemotron-nas":
            keys["block_configs"] = [{"attention": {"n_heads_in_group": 2}}] * 20
        yield {"model_type": model_type, **keys}
    yield from (config for config, _ in HYBRIDS)
    yield from (PUBLISHED[name][0] for name in ("Kimi-Linear-48B", "Bamba-9B", "MiMo-V2-Flash", "Llama-4-Scout"))
    yield from (shipped_configs()[name] for name in ("gemma-4-31b", "qwen3-next-80b"))


def wrong_files(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The file with each value under each key that is read, in its decoder."""
    outer = next((key for key in NESTED if key in config), None)
    if outer is not None:
        yield from ((key, {**config, outer: decoder}) for key, decoder in wrong_files(config[outer]))
        return
    family = FAMILIES.get(config.get("model_type", ""))
    keys = {*ANYWHERE, *({*config} & CACHE_KEYS), *(family.defaults if family else ())}
    for key in sorted(keys):
        yield from ((key, {**config, key: value}) for value in VALUES)
    for inner in config.get("linear_attn_config") or {}:
        sizes = config["linear_attn_config"]
        yield from ((inner, {**config, "linear_attn_config": {**sizes, inner: value}}) for value in VALUES)


def keys_in(config: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a file and of the mappings in it."""
    for key, value in config.items():
        yield key
        yield from keys_in(value) if isinstance(value, Mapping) else ()


def test_a_value_of_another_type_ends_in_a_model_or_a_refusal() -> None:
    """No value leaks an error of Python's own, and no refusal names a key that neither file nor family has."""
    leaks = []
    codes = set()
    for config in files():
        Model.from_config(config)
        for key, wrong in wrong_files(config):
            try:
                Model.from_config(wrong, with_draft_layers=key in DRAFTS)
            except KVPlanError as error:
                codes.add(error.code)
                family = FAMILIES.get(str(wrong.get("model_type")))
                named = {*keys_in(wrong), *ANYWHERE, *NUM_LAYERS[:1], *(family.defaults if family else ())}
                assert "model_type" in error.details or error.details["key"] in named, str(error)
            except Exception as error:
                leaks.append((config.get("model_type"), key, wrong.get(key), repr(error)))
    assert leaks == []
    assert codes == {"CONFIG"}


@pytest.mark.parametrize(
    ("key", "config"),
    [
        # Layers and flags that are equal to numbers as text
        ("attn_layer_indices", {**BAMBA, "attn_layer_indices": ["0"]}),
        ("attn_layer_indices", {**BAMBA, "attn_layer_indices": [True]}),
        ("attn_layer_indices", {**BAMBA, "attn_layer_indices": [2]}),
        ("hybrid_layer_ids", {**ZAMBA, "hybrid_layer_ids": ["1"]}),
        ("full_attn_idxs", {"model_type": "lfm2", **HEADS, "full_attn_idxs": ["1"]}),
        ("full_attn_idxs", {"model_type": "lfm2", **HEADS, "full_attn_idxs": [1.0]}),
        ("attn_type_list", {"model_type": "minimax_m1", **HEADS, "attn_type_list": ["0", "1"]}),
        ("attn_type_list", {"model_type": "minimax_m2", **HEADS, "attn_type_list": 0}),
        ("no_rope_layers", {"model_type": "llama4_text", **HEADS, "no_rope_layers": ["0", "1"]}),
        ("hybrid_layer_pattern", {"model_type": "mimo_v2_flash", **HEADS, "hybrid_layer_pattern": {}}),
        ("linear_attn_config", {**KIMI_SIZES, "linear_attn_config": {**KIMI, "full_attn_layers": ["2"]}}),
        ("linear_attn_config", {**KIMI_SIZES, "linear_attn_config": {**KIMI, "kda_layers": [True]}}),
        # Values that are false, which stood for a missing one
        ("linear_num_key_heads", {"model_type": "olmo_hybrid", **HEADS, "linear_num_key_heads": [1]}),
        ("linear_num_value_heads", {"model_type": "olmo_hybrid", **HEADS, "linear_num_value_heads": ""}),
        ("linear_key_head_dim", {"model_type": "olmo_hybrid", **HEADS, "linear_key_head_dim": 0}),
        ("linear_value_head_dim", {"model_type": "olmo_hybrid", **HEADS, "linear_value_head_dim": {}}),
        ("v_head_dim", {"model_type": "mimo_v2_flash", **HEADS, "v_head_dim": False}),
        ("swa_num_key_value_heads", {"model_type": "mimo_v2_flash", **HEADS, "swa_num_key_value_heads": "4"}),
        ("per_layer_config", {"model_type": "gemma4_text", **HEADS, "per_layer_config": []}),
        ("attn_config", {"model_type": "dbrx", **HEADS, "attn_config": []}),
        ("quantization_config", {"model_type": "llama", **HEADS, "quantization_config": "fp8"}),
        # Indexers, whose list may be shorter than the model
        ("indexer_types", {"model_type": "glm_moe_dsa", **HEADS, **LATENT, "indexer_types": {}}),
        ("indexer_types", {"model_type": "glm_moe_dsa", **HEADS, **LATENT, "indexer_types": ["full"]}),
        ("index_topk_pattern", {"model_type": "glm_moe_dsa", **HEADS, **LATENT, "index_topk_pattern": "S"}),
    ],
)
def test_what_was_read_for_something_else_is_refused(key: str, config: dict[str, Any]) -> None:
    """A list of layers has integers, flags are numbers of the family, and what is false is not missing."""
    with pytest.raises(KVPlanError) as caught:
        Model.from_config({"num_hidden_layers": 2, **config})
    assert (caught.value.code, caught.value.details["key"]) == ("CONFIG", key)


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("num_kv_heads", {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 3}),
        ("attn_config", {"model_type": "dbrx", "n_heads": 8, "d_model": 64, "attn_config": {"kv_n_heads": 3}}),
        ("num_attention_groups", {"model_type": "step3p5", "num_attention_groups": 3}),
        ("global_head_dim", {"model_type": "gemma4_text", "global_head_dim": "x", "layer_types": ["attention"] * 2}),
        (
            "swa_head_dim",
            {
                "model_type": "mimo_v2_flash",
                "num_key_value_heads": 4,
                "swa_head_dim": 0,
                "hybrid_layer_pattern": [1, 1],
            },
        ),
        ("num_key_value_heads", {"model_type": "mimo_v2_flash", "num_key_value_heads": 8}),
        ("linear_attn_config", {**KIMI_SIZES, "linear_attn_config": {**KIMI, "num_heads": 0}}),
        ("short_conv_kernel_size", {"model_type": "bailing_hybrid", **LATENT, "short_conv_kernel_size": 1}),
        ("head_dim", {"model_type": "bailing_hybrid", **LATENT, "head_dim": None}),
        ("num_layers", {"model_type": "longcat_flash", **LATENT, "num_layers": (1 << 14) - 1}),
        ("attention_chunk_size", {"model_type": "llama4_text", "attention_chunk_size": None}),
        ("block_configs", {**NAS, "block_configs": [{"attention": {"n_heads_in_group": 5}}] * 2}),
        ("block_configs", {**NAS, "block_configs": [{"attention": {"window_length": 8}}] * 2}),
        ("block_configs", {**NAS, "block_configs": [{}, {"attention": {"n_heads_in_group": 4}}]}),
        ("local_attention", {"model_type": "modernbert-decoder", "local_attention": 1}),
        ("hidden_size", {"model_type": "olmo_hybrid", "hidden_size": 8}),
        ("torch_dtype", {"model_type": "llama", "torch_dtype": "auto"}),
        ("mamba_ssm_dtype", {"model_type": "mamba2", "mamba_ssm_dtype": "auto"}),
        ("text_config", {"model_type": "gemma3", "text_config": "x"}),
        ("text_config", {"model_type": "gemma3", "text_config": []}),
        ("text_config", {"model_type": "gemma3", "text_config": False}),
    ],
)
def test_a_refusal_names_the_key_that_the_file_states(key: str, config: dict[str, Any]) -> None:
    """Whatever kvplan computes from a key, the error is of the file's own key, and a decoder is a mapping."""
    with pytest.raises(KVPlanError, match=key) as caught:
        Model.from_config({"num_hidden_layers": 2, **HEADS, "num_key_value_heads": None, **config})
    assert (caught.value.code, caught.value.details["key"]) == ("CONFIG", key)


def test_a_computed_value_stands_beside_the_stated_one() -> None:
    """The message has both if they differ, and the number of heads by its own name."""
    config = {"model_type": "dbrx", "n_layers": 2, "n_heads": 8, "d_model": 64, "attn_config": {"kv_n_heads": 3}}
    expected = r"a divisor of n_heads 8 as 'num_key_value_heads', got 3 from \{'kv_n_heads': 3\}$"
    with pytest.raises(KVPlanError, match=expected):
        Model.from_config(config)


def test_a_flag_is_true_or_false() -> None:
    """Text is no flag: "false" was read as true."""
    for config in files():
        family = FAMILIES[config["model_type"]] if config.get("model_type") in FAMILIES else None
        for key in {*FLAGS} & {*(family.defaults if family else ()), "is_encoder_decoder"}:
            for value in NO_FLAGS:
                with pytest.raises(KVPlanError, match="true or false") as caught:
                    Model.from_config({**config, key: value})
                assert (caught.value.code, caught.value.details["key"]) == ("CONFIG", key)
