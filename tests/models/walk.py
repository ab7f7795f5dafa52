"""The families of transformers: what their configuration classes leave out, and what their models really cache.

``python -m tests.models.walk`` walks all of them and prints what became of each. ``python -m tests.models.walk write``
writes the defaults of their classes to kvplan/models/families.json, which tests compare.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import traceback
from collections import Counter
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

import kvplan
from kvplan import KVPlanError, Model
from kvplan.models.families import REFUSED
from kvplan.models.values import SIZES

TABLE: Final = Path(kvplan.__file__).parent / "models" / "families.json"

KEYS: Final = re.findall(
    r"\w+",
    """
        num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads attention_heads
        hidden_size n_embd d_model num_key_value_heads num_kv_heads head_dim attention_head_dim kv_channels
        v_head_dim kv_lora_rank qk_rope_head_dim index_head_dim indexer_types
        sliding_window use_sliding_window max_window_layers attention_window_size attention_chunk_size
        global_attn_every_n_layers sliding_window_pattern layer_group_size full_attn_idxs attn_layer_indices block_types
        attn_layer_period attn_layer_offset layers_block_type no_rope_layers no_rope_layer_interval num_kv_shared_layers
        attention_k_eq_v prefix_dense_sliding_window_pattern attn_config multi_query new_decoder_architecture
        linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim
        linear_head_dim linear_num_heads short_conv_kernel_size conv_L_cache lru_width conv1d_width
        mamba_d_state mamba_d_conv mamba_expand mamba_n_heads mamba_d_head mamba_d_ssm mamba_n_groups mamba_ngroups
        n_mamba_heads mamba_num_heads mamba_head_dim n_groups ssm_state_size state_size conv_kernel expand
    """,
)
"""The keys on which a cache depends, in some family."""


TINY: Final[dict[str, Any]] = {
    "vocab_size": 99,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim_model"), 96),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size"), 40),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 40),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 6),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 6),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 3),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "index_n_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "head_dim": 20,
    "attention_head_dim": 20,
    "kv_channels": 20,
    "sliding_window": 7,
    "kv_lora_rank": 22,
    "q_lora_rank": 26,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 14,
    "index_head_dim": 16,
    "index_topk": 4,
    "attention_chunk_size": 9,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 3,
    "linear_head_dim": 10,
    "linear_num_heads": 7,
    "conv_L_cache": 5,
    "mamba_d_state": 18,
    "mamba_d_conv": 5,
    "mamba_expand": 2,
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_n_groups": 3,
    "mamba_ngroups": 3,
    "n_mamba_heads": 12,
    "mamba_num_heads": 12,
    "mamba_head_dim": 16,
    "n_groups": 3,
    "ssm_state_size": 18,
    "state_size": 18,
    "conv_kernel": 5,
    "expand": 2,
}
"""Sizes that differ wherever they may, so that no two can be taken for each other."""

ROPE: Final[dict[str, Any]] = {"rope_type": "default", "rope_theta": 1e4}
EIGHT: Final = {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}}
TEN: Final = {"rope_parameters": {**ROPE, "mrope_section": [4, 3, 3]}}

EXCEPTIONS: Final[dict[str, dict[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1, 4]},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**ROPE, "mrope_section": [3, 3, 2]}}},
    "codegen": {"n_head": 8, "rotary_dim": 4},
    "cosmos3_edge_text": TEN,
    "dbrx": {"attn_config": {"kv_n_heads": 3, "rope_theta": 1e4, "clip_qkv": 8}},
    "diffusion_gemma_text": {"top_k_experts": 2},
    "diffllama": {"num_key_value_heads": 2},
    "dots1": {"n_shared_experts": 1},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * 6},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [24, 24], **EIGHT},
    "falcon_h1": {"mamba_d_ssm": 192},
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "glm4v_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 4]},
    "helium": {"head_dim": 16},
    "lfm2": {"full_attn_idxs": [2, 4]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 12, "head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 5], "rotary_dim": 4},
    "nemotron_h": {"sliding_window": None},
    "zamba2": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"]},
    **dict.fromkeys(("glm4v_text", "glm_ocr_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), EIGHT),
    "paddleocr_vl_text": TEN,
    "hunyuan_vl_text": TEN,
}
"""Sizes of single families, whose classes refuse those of :data:`TINY`."""


def model_types() -> dict[str, list[str]]:
    """The text models behind all causal and multimodal language models, each with the outer types that nest it."""
    mappings = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    names = {name for kind in mappings for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})}
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        text = CONFIG_MAPPING[name]
        with suppress(Exception):  # a class may refuse its own defaults
            text = type(text().get_text_config(decoder=True))
        found.setdefault(text.model_type, []).extend([name] if name != text.model_type else [])
        CLASSES[text.model_type] = text
    return found


CLASSES: Final[dict[str, Any]] = {}


def defaults(config_class: Any) -> dict[str, Any]:
    """The fields of a configuration class on which the cache depends, with their defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    plain = {key: fields[key] for key in KEYS if key in fields and fields[key] is not dataclasses.MISSING}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def tiny(model_type: str) -> Any:
    """A small configuration of a family, with unequal sizes."""
    config_class = CLASSES[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)}
    sizes = {key: value for key, value in TINY.items() if key in fields}
    if "kv_lora_rank" in fields:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return config_class(**{**sizes, **EXCEPTIONS.get(model_type, {})})


def model_of(config: Any) -> Any:
    """A model of a configuration: the text model of its module where transformers maps none to it."""
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        with suppress(ValueError):
            return auto.from_config(config)
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    made = [
        value
        for value in vars(module).values()
        if getattr(value, "__module__", "") == module.__name__ and getattr(value, "config_class", None) is type(config)
        if "past_key_values" in inspect.signature(value.forward).parameters
    ]
    return min(made, key=lambda found: ("Text" not in found.__name__, found.__name__))(config)


ONE_MORE: Final = ("cohere2", "cohere2_moe")
"""Families whose windows are a token longer in vLLM and SGLang than in transformers, which caches less."""

Shapes = dict[str, tuple[int | None, ...]]
"""What one layer caches: sizes by name. The window of attention is its last."""


def cached(config: Any) -> list[Shapes]:
    """What each layer of the model really caches after a forward of 11 tokens."""
    torch.manual_seed(0)
    model, tokens = model_of(config).eval(), torch.arange(3, 14)[None]
    with torch.no_grad():
        output = model(input_ids=tokens, use_cache=True)
    cache = getattr(output, "past_key_values", None)
    cache = getattr(output, "cache_params", None) if cache is None else cache
    if cache is None:
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=cache)
    found: list[Shapes] = []
    for layer in cache.layers:
        shapes: Shapes = {}
        if getattr(layer, "keys", None) is not None:
            _, heads, _, k = layer.keys.shape
            _, v_heads, _, v = layer.values.shape
            assert heads == v_heads
            window = getattr(layer, "sliding_window", None)
            shapes["attention"] = (heads, k + v, window and window + (config.model_type in ONE_MORE))
        for name in ("indexer_keys", "idx_keys"):
            if getattr(layer, name, None) is not None:
                shapes["index"] = (getattr(layer, name).shape[-1],)
        for state in getattr(layer, "conv_states", {}).values():
            if state is not None:  # transformers keeps one column more, which it doesn't read again
                shapes["conv"] = (state.shape[1], state.shape[2] - 1)
        for state in getattr(layer, "recurrent_states", {}).values():
            if state is not None:
                shapes["state"] = (state.shape[1], *sorted(state.shape[2:]))
        found.append(shapes)
    for layer, state in enumerate(getattr(cache, "linear_cache", ())):  # of MiniMax, which keeps its states apart
        if isinstance(state, torch.Tensor):
            found[layer : layer + 1] = [{"state": (state.shape[1], *sorted(state.shape[2:]))}]
    return found


def planned(config: dict[str, Any]) -> list[Shapes]:
    """What each layer caches according to kvplan."""
    found: list[Shapes] = []
    for layer in Model.from_config(config).with_dtypes("bfloat16").layers:
        shapes: Shapes = {}
        conv = [dict(tensor.axes) for tensor in layer if tensor.kind.startswith("conv.")]
        if conv:
            shapes["conv"] = (sum(axes["channel"] for axes in conv), conv[0]["step"])
        for tensor in layer:
            axes = dict(tensor.axes)
            if tensor.kind == "attn":
                shapes["attention"] = (axes.get("head", 1), axes.get("kv", 1) * axes["dim"], tensor.window)
            elif tensor.kind == "index":
                shapes["index"] = (axes.get("byte") or axes["dim"],)
            elif tensor.kind == "ssm":
                shapes["state"] = (tensor.axes[0][1], *sorted(size for _, size in tensor.axes[1:]))
        found.append(shapes)
    return found


def stated(config: Any) -> dict[str, Any]:
    """The config.json of a configuration."""
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found


def shorter(config: Any) -> dict[str, Any]:
    """The config.json without the keys that its class computes or has as defaults, as older files are."""
    keys, config_class = stated(config), type(config)
    same = {key: keys.get(key) for key in (*KEYS, "layer_types", "per_layer_config")}
    for key in (*KEYS, "layer_types", "per_layer_config"):
        less = {name: value for name, value in keys.items() if name != key}
        if key in keys and key not in SIZES:
            with suppress(Exception):
                made = stated(config_class(**{name: value for name, value in less.items() if name != "model_type"}))
                if {name: made.get(name) for name in same} == same:
                    keys = less
    return keys


def verdict(model_type: str) -> tuple[str, str]:
    """``equal``, ``refused`` or ``wrong``, and what there is to say about it."""
    if model_type in REFUSED:
        return "refused", REFUSED[model_type]
    config = tiny(model_type)
    try:
        ours = planned(stated(config))
        old = planned(shorter(config))
    except KVPlanError as error:
        return "refused", str(error)
    real = cached(config)
    if ours != real:
        pairs = zip_longest(ours, real)
        return "wrong", "\n".join(f"  {mine} where the model has {its}" for mine, its in pairs if mine != its)
    return ("equal", "") if old == ours else ("wrong", f"  of a shorter file: {old}")


def write() -> None:
    """Write the defaults of all families that aren't refused; the other parts are written by hand."""
    types, table = model_types(), json.loads(TABLE.read_text())
    refused = {model_type for types_of in table["refused"].values() for model_type in types_of}
    families = {name: defaults(CLASSES[name]) for name in sorted(types) if name not in refused}
    outer = {name: inner for inner, names in types.items() for name in names if inner not in refused}
    parts: dict[str, dict[str, Any]] = {"outer": dict(sorted(outer.items())), "classes": families}
    parts |= {part: table[part] for part in ("rules", "refused")}
    lines = [
        f'"{part}": {{\n' + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items()) + "\n}"
        for part, rows in parts.items()
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(names: list[str]) -> None:
    """Walk the families named, or all."""
    if names == ["write"]:
        write()
        return
    counts: Counter[str] = Counter()
    types = model_types()
    for model_type in names or sorted(types):
        try:
            result, text = verdict(model_type)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            result, text = "unbuilt", f"{type(error).__name__} {error} {place.filename[-40:]}:{place.lineno}"[-300:]
        counts[result] += 1
        print(result, model_type, text[:1500], flush=True)
    print(dict(counts))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    main(sys.argv[1:])
