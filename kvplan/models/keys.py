"""Keys of a config.json that are computed from others, family by family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from kvplan._checks import is_one_of
from kvplan.models.kinds import nas_attention, num_layers_of
from kvplan.models.values import (
    HIDDEN,
    MAX_LAYERS,
    NUM_HEADS,
    NUM_LAYERS,
    Config,
    flag_of,
    integer_of,
    integers_of,
    mapping_of,
    optional_integer_of,
    stated_key,
    unusable,
)


@attrs.frozen(eq=False)
class KeyRule:
    """How a family computes keys from those that a file has.

    ``sources`` has the key that a file states for each computed key: errors name it.
    """

    compute: Callable[[Config], Config]
    sources: Mapping[str, str]


def computes(**sources: str) -> Callable[[Callable[[Config], Config]], KeyRule]:
    """Decorate a function of keys as the rule for some keys, each with the key that a file has."""
    return lambda compute: KeyRule(compute, MappingProxyType(sources))


@computes(attention_head_dim="hidden_size")
def query_width(config: Config) -> Config:
    """Return the size of the heads of Zamba.

    Its attention reads the layer's input and the embeddings, so the heads are twice as wide.
    """
    dim = 2 * integer_of(config, HIDDEN) // integer_of(config, NUM_HEADS)
    return {} if config.get("attention_head_dim") is not None else {"attention_head_dim": dim}


@computes(num_key_value_heads="num_kv_heads")
def falcon_heads(config: Config) -> Config:
    """Return one KV head (``multi_query``), unless a new file states how many (FalconConfig)."""
    is_new = flag_of(config, "new_decoder_architecture")
    is_grouped = is_new or not flag_of(config, "multi_query")
    return {"num_key_value_heads": config.get("num_kv_heads") if is_grouped else 1}


@computes(multi_query_group_num="num_attention_heads")
def chatglm_heads(config: Config) -> Config:
    """Return as many groups as heads without ``multi_query_attention``.

    ``multi_query_group_num`` counts only with it (vllm/model_executor/models/chatglm.py).
    """
    if flag_of(config, "multi_query_attention"):
        return {}
    return {"multi_query_group_num": integer_of(config, NUM_HEADS)}


@computes(num_key_value_heads="attn_config")
def nested_heads(config: Config) -> Config:
    """Return the number of KV heads that ``attn_config`` states (DbrxConfig)."""
    return {"num_key_value_heads": mapping_of(config, "attn_config").get("kv_n_heads", 1)}


@computes(
    full_head_dim="global_head_dim",
    full_num_key_value_heads="num_global_key_value_heads",
)
def global_heads(config: Config) -> Config:
    """Return the head size of the full layers of Gemma 4.

    They have their own number of KV heads, too, if K equals V. Newer files state both in
    ``per_layer_config``.
    """
    if config.get("per_layer_config") is not None:
        return {}
    # Keys that begin with full_ count only for layers that attend to all positions.
    keys = {"full_head_dim": config["global_head_dim"]}
    num_heads = config.get("num_global_key_value_heads")
    if flag_of(config, "attention_k_eq_v") and num_heads is not None:
        keys["full_num_key_value_heads"] = num_heads
    return keys


# The sizes of linear layers as kvplan reads them, and by the names of two families.
_LINEAR_KEYS: Final = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
_KIMI_KEYS: Final = ("num_heads", "head_dim", "short_conv_kernel_size")
_BAILING_KEYS: Final = ("num_attention_heads", "head_dim", "short_conv_kernel_size")


@computes(**dict.fromkeys(_LINEAR_KEYS, "linear_attn_config"))
def kimi_keys(config: Config) -> Config:
    """Return the sizes of linear layers that ``linear_attn_config`` states (KimiLinearConfig)."""
    sizes = mapping_of(config, "linear_attn_config")
    names = zip(_LINEAR_KEYS, _KIMI_KEYS, strict=True)
    return {key: sizes[kimi_key] for key, kimi_key in names if kimi_key in sizes}


@computes(**dict(zip(_LINEAR_KEYS, _BAILING_KEYS, strict=True)))
def bailing_keys(config: Config) -> Config:
    """Return the sizes of linear layers, which have the query heads (BailingHybridConfig)."""
    names = zip(_LINEAR_KEYS, _BAILING_KEYS, strict=True)
    return {key: config.get(source) for key, source in names if config.get(key) is None}


@computes(
    linear_num_key_heads="num_attention_heads",
    linear_num_value_heads="num_attention_heads",
    linear_key_head_dim="hidden_size",
    linear_value_head_dim="hidden_size",
)
def olmo_keys(config: Config) -> Config:
    """Return what a file leaves out, from its heads and its width (OlmoHybridConfig)."""
    num_heads = integer_of(config, NUM_HEADS)
    width = integer_of(config, HIDDEN)
    key_heads = optional_integer_of(config, "linear_num_key_heads") or num_heads
    value_heads = optional_integer_of(config, "linear_num_value_heads") or num_heads
    key_dim = optional_integer_of(config, "linear_key_head_dim") or int(0.75 * width / key_heads)
    value_dim = optional_integer_of(config, "linear_value_head_dim") or 2 * key_dim
    sizes = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }
    return {key: size for key, size in sizes.items() if config.get(key) is None}


@computes(num_key_value_heads="num_attention_groups")
def grouped_heads(config: Config) -> Config:
    """Return the KV heads that files of Step-3.5 may state as groups (step3p5.py of vLLM)."""
    num_groups = config.get("num_attention_groups")
    return {} if num_groups is None else {"num_key_value_heads": num_groups}


@computes(num_hidden_layers="num_layers")
def double_layers(config: Config) -> Config:
    """Return twice as many layers as the file has: each attends twice (LongcatFlashConfig)."""
    return {"num_hidden_layers": 2 * integer_of(config, "num_layers", high=MAX_LAYERS)}


@computes(sliding_window="sliding_window")
def window_with_own_token(config: Config) -> Config:
    """Return the window of Cohere, which counts the tokens before one."""
    return _window(config, "sliding_window", lambda tokens_before: tokens_before + 1)


@computes(sliding_window="local_attention")
def half_window(config: Config) -> Config:
    """Return the window of ModernBERT, which reaches in both directions."""
    return _window(config, "local_attention", lambda tokens: tokens // 2)


@computes(sliding_window="attention_chunk_size")
def chunk_window(config: Config) -> Config:
    """Return the most that a layer sees of its chunk (Llama4TextConfig)."""
    return _window(config, "attention_chunk_size", int)


def _window(config: Config, key: str, tokens_of: Callable[[int], int]) -> Config:
    tokens = optional_integer_of(config, key)
    return {"sliding_window": None if tokens is None else tokens_of(tokens)}


@computes(
    swa_num_key_value_heads="num_key_value_heads",
    sliding_window="sliding_window_size",
)
def sliding_heads(config: Config) -> Config:
    """Return the KV heads and the window of sliding layers, which files of MiMo-V2 state.

    Where they leave out the heads, transformers doubles those of the other layers.
    """
    keys = {}
    if optional_integer_of(config, "swa_num_key_value_heads") is None:
        keys["swa_num_key_value_heads"] = 2 * integer_of(config, "num_key_value_heads")
    tokens_before = optional_integer_of(config, "sliding_window_size")
    if tokens_before is not None:
        keys["sliding_window"] = tokens_before + 1
    return keys


@computes(
    index_head_dim="sparse_attention_config",
    per_layer_config="sparse_attention_config",
)
def block_indexers(config: Config) -> Config:
    """Return the layers that have an indexer (MiniMaxM3VLTextConfig).

    ``sparse_attention_config`` may state them and the size of their keys. It may let indexers have
    values too, which transformers and SGLang's PD mode do not keep.
    """
    num_layers = num_layers_of(config)
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list | tuple):
        flags = [kind == "minimax_m3_sparse" for kind in layer_types]
    else:
        flags = [bool(flag) for flag in _indexer_flags(config, "sparse_attention_freq", 0)]
    has_no_values = _indexer_flags(config, "sparse_disable_index_value", 1)
    layers = [layer for layer in range(num_layers) if flags[layer : layer + 1] == [True]]
    if not all(has_no_values[layer] for layer in layers):
        expected = "indexers without values"
        raise unusable("sparse_attention_config", expected, "sparse_disable_index_value")
    stated = mapping_of(config, "sparse_attention_config")
    dim = stated.get("sparse_index_dim", config["index_head_dim"])
    exceptions = {layer: {"has_indexer": True} for layer in layers}
    return {"index_head_dim": dim, "per_layer_config": exceptions}


def _indexer_flags(config: Config, key: str, default: int) -> list[int]:
    """Return the number for each layer that ``sparse_attention_config`` has under a key."""
    num_layers = num_layers_of(config)
    values = mapping_of(config, "sparse_attention_config").get(key)
    expected = f"0 or 1 for each of {num_layers} layers"
    flags = integers_of(values, key, (0, 1), expected)
    if flags is None:
        return [default] * num_layers
    if len(flags) != num_layers:
        raise unusable(key, expected, values)
    return flags


@computes(per_layer_config="indexer_types")
def shared_indexers(config: Config) -> Config:
    """Return the layers that use the indexer of an earlier one.

    Files list them, have a letter for each layer, or mean all but one of each period
    (``index_topk_freq`` of vllm/model_executor/models/deepseek_v2.py, 0.33).
    """
    key = stated_key(config, ("indexer_types", "index_topk_pattern"))
    types = config.get(key)
    if types is None:
        types = _periodic_indexers(config)
    is_sequence = isinstance(types, list | tuple | str)
    if not is_sequence or not all(is_one_of(kind, ("full", "shared", "F", "S")) for kind in types):
        raise unusable(key, "full or shared for each layer", types)
    num_layers = integer_of(config, NUM_LAYERS, len(types), high=MAX_LAYERS)
    if len(types) < num_layers:
        raise unusable(key, f"full or shared for each of {num_layers} layers", types)
    # Layers that share are exceptions: they have no indexer of their own.
    sharers = [layer for layer, kind in enumerate(types) if kind in ("shared", "S")]
    exceptions = {layer: {"shares_index": True} for layer in sharers}
    return {"per_layer_config": exceptions} if exceptions else {}


@computes(per_layer_config="block_configs")
def nas_heads(config: Config) -> Config:
    """Return the KV heads of each layer of Nemotron-NAS, which ``block_configs`` states.

    (nemotron_nas.py of vLLM 0.33)
    """
    num_heads = integer_of(config, NUM_HEADS)
    # The numbers of KV heads are exceptions of single layers.
    exceptions = {}
    for layer, block in enumerate(nas_attention(config)):
        heads_of_group = optional_integer_of(block, "n_heads_in_group")
        if heads_of_group is not None:
            if num_heads % heads_of_group:
                expected = f"n_heads_in_group to divide {num_heads} heads"
                raise unusable("block_configs", expected, heads_of_group)
            exceptions[layer] = {"num_key_value_heads": num_heads // heads_of_group}
    return {"per_layer_config": exceptions}


def _periodic_indexers(config: Config) -> list[str]:
    """Return ``F`` for each layer with an indexer of its own, one of a period, else ``S``."""
    period = integer_of(config, "index_topk_freq")
    offset = integer_of(config, "index_skip_topk_offset", low=0)
    layers = range(num_layers_of(config))
    return ["S" if max(layer - offset + 1, 0) % period else "F" for layer in layers]


_RULES: Final = (
    *(query_width, falcon_heads, chatglm_heads, nested_heads, global_heads, kimi_keys),
    *(bailing_keys, olmo_keys, grouped_heads, double_layers, window_with_own_token, half_window),
    *(chunk_window, sliding_heads, block_indexers, shared_indexers, nas_heads),
)

RULES: Final[Mapping[str, KeyRule]] = MappingProxyType(
    {rule.compute.__name__: rule for rule in _RULES}
)
"""What families.json may name as ``keys``."""
