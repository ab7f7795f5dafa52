"""Model families: for each ``model_type`` of a config.json, which layers cache what.

One rule reads most families: K and V of each head (or a latent for all heads, if the family has
``kv_lora_rank``) of every layer, in a window if the family has ``sliding_window``; ``layer_types``
says which layers slide, have a state, or cache nothing. families.json lists the keys that each
family reads, with the defaults of its class in transformers 5.23, and those that its class lacks.
:data:`FAMILIES` names the families that need more: the rule that gives the kind of each layer if
the file has no list of them (``configuration_*.py``), the state of recurrent layers, and keys that
are computed from others (``modeling_*.py``). :data:`REFUSED` says why kvplan doesn't read the rest.

``num_key_value_heads: null`` means ``num_attention_heads``, ``head_dim: null`` means
``hidden_size // num_attention_heads``. Sizes that every published file states
(``num_hidden_layers``) have no default: a guess would plan the cache of another model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan._checks import is_one_of
from kvplan.models.config import (
    BOTH,
    HEAD_DIMS,
    HIDDEN,
    KV_HEADS,
    MAX_LAYERS,
    NONE,
    NUM_HEADS,
    NUM_LAYERS,
    AttentionReader,
    Config,
    Family,
    KeyRule,
    Keys,
    LayerRule,
    Registry,
    StateReader,
    dtype_of,
    flag_of,
    integer_of,
    integers_of,
    mapping_of,
    optional_integer_of,
    stated_key,
    unusable,
)
from kvplan.models.tensors import (
    FULL,
    SLIDING,
    STATE,
    Layer,
    attention,
    convolution,
    delta,
    latent,
    lightning,
    mamba1,
    mamba2,
    sparse_latent,
    with_index_keys,
)

# What a layer caches


def kv_heads(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return K and V of each head. V has ``v_head_dim`` elements, if the family has that key."""
    # A file without a number of KV heads has one for each query head.
    num_heads = optional_integer_of(config, KV_HEADS) or integer_of(config, NUM_HEADS)
    num_query_heads = integer_of(config, NUM_HEADS, num_heads)
    if num_query_heads % num_heads:
        expected = f"a divisor of {stated_key(config, NUM_HEADS)} {num_query_heads}"
        raise unusable(stated_key(config, KV_HEADS), expected, num_heads)
    # A file without a size of heads divides the width of the model among them.
    dim = optional_integer_of(config, HEAD_DIMS)
    if dim is None:
        dim, remainder = divmod(integer_of(config, HIDDEN), integer_of(config, NUM_HEADS))
        if remainder or not dim:
            width_key = stated_key(config, HIDDEN)
            expected = f"a multiple of {stated_key(config, NUM_HEADS)} {num_query_heads}"
            raise unusable(width_key, expected, config[width_key])
    value_dim = optional_integer_of(config, "v_head_dim") or dim
    return attention(num_heads, dim, group, window, value_dim)


def mla(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return one latent for all heads, or K and V of each head if ``kv_lora_rank`` is null."""
    if "kv_lora_rank" in config and config["kv_lora_rank"] is None:
        return kv_heads(config, group, window)
    rank = integer_of(config, "kv_lora_rank")
    rope_dim = integer_of(config, "qk_rope_head_dim")
    return latent(rank, rope_dim, group, window)


def sparse_mla(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return a latent and the keys of an indexer.

    A layer that slides has no indexer, and some layers use that of another layer.
    """
    if group == SLIDING or not flag_of(config, "use_dsa", True):
        return mla(config, group, window)
    rank = integer_of(config, "kv_lora_rank")
    rope_dim = integer_of(config, "qk_rope_head_dim")
    tensors = sparse_latent(rank, rope_dim, integer_of(config, "index_head_dim"))
    # The first tensor is the latent, the others are those of the indexer.
    return tensors[:1] if flag_of(config, "shares_index") else tensors


def block_indexed(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return K and V of each head, and the keys of an indexer in layers that have one."""
    tensors = kv_heads(config, group, window)
    if not flag_of(config, "has_indexer"):
        return tensors
    return with_index_keys(tensors, integer_of(config, "index_head_dim"))


def chunked_heads(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return K and V of each head; a layer with a window attends inside of chunks of that size."""
    (heads,) = kv_heads(config, group, window)
    return (attrs.evolve(heads, chunked=window is not None),)


def stated_window(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return K and V of each head, in a window if the file states one (nemotron_h.py of vLLM)."""
    return kv_heads(config, group, optional_integer_of(config, "sliding_window"))


def mamba1_state(config: Config, width_key: str | None = None) -> Layer:
    """Return the state of a Mamba layer.

    The number of its channels is under ``width_key``, or a multiple of the model's width.
    """
    state_size = integer_of(config, ("state_size", "mamba_d_state"))
    steps = _steps(config, ("conv_kernel", "mamba_d_conv"))
    return mamba1(_channels(config, width_key), state_size, steps, *_dtypes(config))


_HEADS: Final = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
_GROUPS: Final = ("mamba_n_groups", "mamba_ngroups", "n_groups")


def mamba2_state(config: Config) -> Layer:
    """Return the state of a Mamba-2 layer."""
    num_heads = integer_of(config, _HEADS)
    dim = integer_of(config, ("mamba_d_head", "mamba_head_dim", "head_dim"))
    num_groups = integer_of(config, _GROUPS)
    state_size = integer_of(config, ("mamba_d_state", "ssm_state_size", "state_size"))
    if num_heads % num_groups:
        raise unusable(stated_key(config, _GROUPS), f"a divisor of {num_heads} heads", num_groups)
    steps = _steps(config, ("mamba_d_conv", "conv_kernel"))
    return mamba2(num_heads, dim, num_groups, state_size, steps, *_dtypes(config))


def granite_state(config: Config) -> Layer:
    """Return the state of a Mamba-2 layer whose file states how wide all heads are together.

    It may state how wide each head is, too.
    """
    channels = _channels(config, "mamba_d_ssm")
    num_heads = integer_of(config, _HEADS)
    states_dim = config.get("mamba_d_head") not in (None, "auto")
    dim = integer_of(config, "mamba_d_head") if states_dim else channels // num_heads
    if dim * num_heads != channels:
        expected = f"heads that make up the {channels} channels"
        raise unusable(stated_key(config, _HEADS), expected, num_heads)
    return mamba2_state({**config, "mamba_d_head": dim})


def delta_state(config: Config) -> Layer:
    """Return the state of a gated delta layer."""
    key_heads = integer_of(config, "linear_num_key_heads")
    value_heads = integer_of(config, "linear_num_value_heads")
    key_dim = integer_of(config, "linear_key_head_dim")
    value_dim = integer_of(config, "linear_value_head_dim")
    if value_heads % key_heads:
        expected = f"a divisor of linear_num_value_heads {value_heads}"
        raise unusable("linear_num_key_heads", expected, key_heads)
    steps = _steps(config, "linear_conv_kernel_dim")
    return delta(key_heads, key_dim, value_heads, value_dim, steps, *_dtypes(config))


def kimi_state(config: Config) -> Layer:
    """Return the state of Kimi delta attention."""
    num_heads = integer_of(config, "linear_num_heads")
    dim = integer_of(config, "linear_head_dim")
    steps = _steps(config, "linear_conv_kernel_dim")
    return delta(num_heads, dim, num_heads, dim, steps, *_dtypes(config))


def bailing_state(config: Config) -> Layer:
    """Return the state of lightning attention in files of Ling 2.5, else that of Kimi.

    (bailing_moe_linear.py of vLLM 0.33)
    """
    if "BailingMoeV2_5ForCausalLM" in str(config.get("architectures")):
        return lightning_state(config)
    return kimi_state(config)


def lightning_state(config: Config) -> Layer:
    """Return the state of a lightning attention layer: a matrix for each query head."""
    # Without a number of KV heads, they are as many as the query heads.
    (query_heads,) = kv_heads({**config, "num_key_value_heads": None, "v_head_dim": None})
    sizes = dict(query_heads.axes)
    _, ssm_dtype = _dtypes(config)
    return lightning(sizes["head"], sizes["dim"], ssm_dtype)


def short_conv(config: Config) -> Layer:
    """Return the last inputs of a short convolution over the model's width."""
    channels = integer_of(config, HIDDEN)
    steps = _steps(config, "conv_L_cache")
    conv_dtype, _ = _dtypes(config)
    return convolution(channels, steps, conv_dtype)


def _channels(config: Config, width_key: str | None) -> int:
    width = None if width_key is None else optional_integer_of(config, width_key)
    return width or integer_of(config, ("expand", "mamba_expand")) * integer_of(config, HIDDEN)


def _steps(config: Config, keys: Keys) -> int:
    """Return how many inputs a convolution stores: of width ``w``, the last ``w - 1``."""
    return integer_of(config, keys, low=2) - 1


def _dtypes(config: Config) -> tuple[str, str]:
    """Return the dtypes of the convolution and of the SSM state.

    Files of Nemotron-H and Qwen3.5 may state the second.
    """
    conv_dtype = dtype_of(config, "bfloat16")
    return conv_dtype, dtype_of(config, "float32", ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))


# Keys that are computed from others


def query_width(config: Config) -> Config:
    """Return the size of the heads of Zamba.

    Its attention reads the layer's input beside the embeddings, so the heads are twice as wide.
    """
    dim = 2 * integer_of(config, HIDDEN) // integer_of(config, NUM_HEADS)
    return {} if config.get("attention_head_dim") is not None else {"attention_head_dim": dim}


def falcon_heads(config: Config) -> Config:
    """Return one KV head (``multi_query``), unless a new file states how many (FalconConfig)."""
    is_new = flag_of(config, "new_decoder_architecture")
    is_grouped = is_new or not flag_of(config, "multi_query")
    return {"num_key_value_heads": config.get("num_kv_heads") if is_grouped else 1}


def chatglm_heads(config: Config) -> Config:
    """Return as many groups as heads without ``multi_query_attention``.

    ``multi_query_group_num`` counts only with it (vllm/model_executor/models/chatglm.py).
    """
    if flag_of(config, "multi_query_attention"):
        return {}
    return {"multi_query_group_num": integer_of(config, NUM_HEADS)}


def nested_heads(config: Config) -> Config:
    """Return the number of KV heads that ``attn_config`` states (DbrxConfig)."""
    return {"num_key_value_heads": mapping_of(config, "attn_config").get("kv_n_heads", 1)}


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


_LINEAR_KEYS: Final = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
_KIMI_KEYS: Final = ("num_heads", "head_dim", "short_conv_kernel_size")
_BAILING_KEYS: Final = ("num_attention_heads", "head_dim", "short_conv_kernel_size")


def kimi_keys(config: Config) -> Config:
    """Return the sizes of linear layers that ``linear_attn_config`` states (KimiLinearConfig)."""
    sizes = mapping_of(config, "linear_attn_config")
    names = zip(_LINEAR_KEYS, _KIMI_KEYS, strict=True)
    return {key: sizes[kimi_key] for key, kimi_key in names if kimi_key in sizes}


def bailing_keys(config: Config) -> Config:
    """Return the sizes of linear layers, which have the query heads (BailingHybridConfig)."""
    names = zip(_LINEAR_KEYS, _BAILING_KEYS, strict=True)
    return {key: config.get(source) for key, source in names if config.get(key) is None}


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


def grouped_heads(config: Config) -> Config:
    """Return the KV heads that files of Step-3.5 may state as groups (step3p5.py of vLLM)."""
    num_groups = config.get("num_attention_groups")
    return {} if num_groups is None else {"num_key_value_heads": num_groups}


def double_layers(config: Config) -> Config:
    """Return twice as many layers as the file has: each attends twice (LongcatFlashConfig)."""
    return {"num_hidden_layers": 2 * integer_of(config, "num_layers", high=MAX_LAYERS)}


def window_from(key: str, tokens_of: Callable[[int], int] = int) -> KeyRule:
    """Return the rule for layers that see as many tokens as follow from the value under ``key``."""

    def rule(config: Config) -> Config:
        tokens = optional_integer_of(config, key)
        return {"sliding_window": None if tokens is None else tokens_of(tokens)}

    return KeyRule(rule, {"sliding_window": key})


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


def block_indexers(config: Config) -> Config:
    """Return the layers that have an indexer (MiniMaxM3VLTextConfig).

    ``sparse_attention_config`` may state them and the size of their keys. It may let indexers have
    values too, which transformers and SGLang's PD mode do not keep.
    """
    num_layers = _num_layers(config)
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
    num_layers = _num_layers(config)
    values = mapping_of(config, "sparse_attention_config").get(key)
    expected = f"0 or 1 for each of {num_layers} layers"
    flags = integers_of(values, key, (0, 1), expected)
    if flags is None:
        return [default] * num_layers
    if len(flags) != num_layers:
        raise unusable(key, expected, values)
    return flags


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


def nas_heads(config: Config) -> Config:
    """Return the KV heads of each layer of Nemotron-NAS, which ``block_configs`` states.

    (nemotron_nas.py of vLLM 0.33)
    """
    num_heads = integer_of(config, NUM_HEADS)
    # The numbers of KV heads are exceptions of single layers.
    exceptions = {}
    for layer, block in enumerate(_nas_attention(config)):
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
    layers = range(_num_layers(config))
    return ["S" if max(layer - offset + 1, 0) % period else "F" for layer in layers]


# Of which kind each layer is


def all_of(kind: str) -> LayerRule:
    """Return the rule that all layers are of one kind."""
    return lambda config: [kind] * _num_layers(config)


def all_slide(config: Config) -> list[str]:
    """All layers slide if the file has a window in use, else none, as in transformers."""
    return [SLIDING if _uses_window(config) else FULL] * _num_layers(config)


def _uses_window(config: Config) -> bool:
    # Families whose files have no such flag use the window that they state.
    in_use = flag_of(config, "use_sliding_window", "use_sliding_window" not in config)
    return in_use and config.get("sliding_window") is not None


def all_but_each(
    kind: str,
    period: str | int,
    offset: str | int | None = None,
    first: int = 0,
    last: str | None = None,
) -> LayerRule:
    """Return the rule that all layers are of one kind, except one of each ``period``.

    That one attends to all positions; it is the one at ``offset``, or the last of the period. The
    ``first`` layers attend to all positions too. ``last`` is the kind of the last layer, if it has
    its own. ``period`` and ``offset`` are numbers, or the keys that have them.

    >>> rule = all_but_each(SLIDING, "sliding_window_pattern")
    >>> rule({"num_hidden_layers": 4, "sliding_window_pattern": 3})
    ['swa', 'swa', 'attn', 'swa']
    """

    def rule(config: Config) -> list[str]:
        num_layers_of_period = period if isinstance(period, int) else integer_of(config, period)
        if offset is None:
            place = num_layers_of_period - 1
        elif isinstance(offset, int):
            place = offset
        else:
            place = integer_of(config, offset, low=0, high=num_layers_of_period)
        kinds = [kind] * _num_layers(config)
        for layer in range(len(kinds)):
            if layer < first or layer % num_layers_of_period == place:
                kinds[layer] = FULL
        return kinds if last is None else [*kinds[:-1], last]

    return rule


def full_behind_groups(config: Config) -> list[str]:
    """All layers have a state but the last of each group, and those behind the last whole group.

    >>> full_behind_groups({"num_hidden_layers": 5, "layer_group_size": 2})
    ['state', 'attn', 'state', 'attn', 'attn']
    """
    kinds = all_but_each(STATE, "layer_group_size")(config)
    # Layers behind the last whole group
    num_behind = len(kinds) % integer_of(config, "layer_group_size")
    return kinds[: len(kinds) - num_behind] + [FULL] * num_behind


def lower_half_caches(config: Config) -> list[str]:
    """The lower half and the next two layers cache; those above attend to the last cache of these.

    One layer of each ``mb_per_layer`` has a state. Of the others, those of the lower half slide
    (phi4flash.py of vLLM 0.10).

    >>> keys = {"num_hidden_layers": 8, "mb_per_layer": 2, "sliding_window": 512}
    >>> lower_half_caches(keys)
    ['state', 'swa', 'state', 'swa', 'state', 'attn', 'none', 'none']
    """
    period = integer_of(config, "mb_per_layer")
    slides = all_slide(config)
    half = len(slides) // 2
    kinds = []
    for layer, kind in enumerate(slides):
        # Above, attention reads the last cache below, and Mamba the last output.
        if layer >= half + 2:
            kinds.append(NONE)
        elif layer % period == 0:
            kinds.append(STATE)
        else:
            kinds.append(kind if layer < half else FULL)
    return kinds


def with_full(layers: LayerRule) -> LayerRule:
    """Return the rule that the last layer attends to all positions if no other layer does."""

    def rule(config: Config) -> list[str]:
        kinds = layers(config)
        # A short file may end before the first layer of the rule that attends to all positions.
        return kinds if FULL in kinds else [*kinds[:-1], FULL]

    return rule


def by_list(key: str, absent: str, kind: str = FULL) -> LayerRule:
    """Return the rule that a list under ``key`` has the layers of a kind that attends.

    The others have a state. Without such a list, all layers are of the kind ``absent``.
    """

    def rule(config: Config) -> list[str]:
        layers = range(_num_layers(config))
        numbers = integers_of(config.get(key), key, layers, f"layers of 0 to {len(layers) - 1}")
        if numbers is None:
            return [absent for _ in layers]
        return [kind if layer in numbers else STATE for layer in layers]

    return rule


def upper_slide(config: Config) -> list[str]:
    """Layers from ``max_window_layers`` on slide, if sliding is in use (Qwen2Config)."""
    layers = range(_num_layers(config))
    in_use = _uses_window(config)
    first = integer_of(config, "max_window_layers", low=0) if in_use else len(layers)
    return [SLIDING if layer >= first else FULL for layer in layers]


def every_other_lower_slides(config: Config) -> list[str]:
    """Every other layer below ``max_window_layers`` slides, if any does (Qwen2MoeConfig)."""
    in_use = flag_of(config, "use_sliding_window")
    end = integer_of(config, "max_window_layers", low=0) if in_use else 0
    sliding_layers = range(0, end, 2)
    return [SLIDING if layer in sliding_layers else FULL for layer in range(_num_layers(config))]


_LETTERS: Final = MappingProxyType({"M": STATE, "*": FULL, "-": NONE, "E": NONE})


def by_letter(config: Config) -> list[str]:
    """``hybrid_override_pattern`` has a letter for each layer (NemotronHConfig).

    >>> by_letter({"hybrid_override_pattern": "M-M*"})
    ['state', 'none', 'state', 'attn']
    """
    pattern = config.get("hybrid_override_pattern")
    letters = pattern if isinstance(pattern, str) else ""
    if not 0 < len(letters) < MAX_LAYERS or {*letters} - {*_LETTERS}:
        expected = f"a letter of {' '.join(_LETTERS)} for each layer"
        raise unusable("hybrid_override_pattern", expected, pattern)
    return [_LETTERS[letter] for letter in letters]


def by_block(config: Config) -> list[str]:
    """Layers of ``block_configs`` attend, unless a linear layer or nothing takes the place."""
    kinds = []
    for block in _nas_attention(config):
        is_replaced = flag_of(block, "no_op") or flag_of(block, "replace_with_linear")
        kinds.append(NONE if is_replaced else FULL)
    return kinds


def _nas_attention(config: Config) -> list[Config]:
    """Return the keys of each layer's attention in ``block_configs``. None has a window."""
    blocks = config.get("block_configs")
    num_layers = _num_layers(config)
    expected = f"a mapping with an 'attention' for each of {num_layers} layers"
    if not isinstance(blocks, list | tuple) or len(blocks) != num_layers:
        raise unusable("block_configs", expected, blocks)
    layers = []
    for block in blocks:
        # A block has an attention and an FFN, which caches nothing.
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise unusable("block_configs", expected, block)
        if attention.get("window_length") is not None:
            raise unusable("block_configs", "no window_length", attention["window_length"])
        layers.append(attention)
    return layers


def numbered_from_one(config: Config) -> list[str]:
    """``linear_attn_config`` lists the layers, numbered from 1 (KimiLinearConfig)."""
    num_layers = _num_layers(config)
    key = "linear_attn_config"
    stated = mapping_of(config, key)
    if "full_attn_layers" not in stated or "kda_layers" not in stated:
        return [FULL if layer and layer % 4 == 0 else STATE for layer in range(num_layers)]
    numbers = range(1, num_layers + 1)
    expected = f"each of the layers 1 to {num_layers} once"
    full_numbers = integers_of(stated["full_attn_layers"], key, numbers, expected) or []
    state_numbers = integers_of(stated["kda_layers"], key, numbers, expected) or []
    if sorted(full_numbers + state_numbers) != [*numbers]:
        raise unusable(key, expected, stated)
    return [FULL if number in full_numbers else STATE for number in numbers]


def by_flags(key: str, kinds: Mapping[int, str], otherwise: LayerRule | None = None) -> LayerRule:
    """Return the rule that ``key`` has a number for each layer.

    Files that lack it follow the rule ``otherwise``.

    >>> rule = by_flags("attn_type_list", {0: STATE, 1: FULL})
    >>> rule({"num_hidden_layers": 2, "attn_type_list": [0, 1]})
    ['state', 'attn']
    """

    def rule(config: Config) -> list[str]:
        num_layers = _num_layers(config)
        expected = f"{num_layers} of {', '.join(map(str, kinds))}"
        flags = integers_of(config.get(key), key, kinds, expected) or []
        if not flags and otherwise is not None:
            return otherwise(config)
        if len(flags) != num_layers:
            raise unusable(key, expected, config.get(key))
        return [kinds[flag] for flag in flags]

    return rule


def by_period(config: Config) -> list[str]:
    """``sliding_window_pattern`` is a number, or the letters of a period (Exaone4Config)."""
    pattern = config.get("sliding_window_pattern")
    if config.get("sliding_window") is None:
        return all_of(FULL)(config)
    if not isinstance(pattern, str):
        return all_but_each(SLIDING, "sliding_window_pattern")(config)
    if not pattern or {*pattern} - {*"LG"}:
        raise unusable("sliding_window_pattern", "a number, or letters of L and G", pattern)
    num_layers = _num_layers(config)
    # The letters of all periods, at least as many as there are layers; the last layer is full.
    letters = pattern * (num_layers // len(pattern) + 1)
    kinds = [SLIDING if letter == "L" else FULL for letter in letters[:num_layers]]
    return [*kinds[:-1], FULL]


def after_dense(config: Config) -> list[str]:
    """The first layers may have a pattern of their own (Cohere2MoeConfig)."""
    num_layers = _num_layers(config)
    num_dense = integer_of(config, "first_k_dense_replace", 0, low=0)
    if num_dense > num_layers:
        raise unusable("first_k_dense_replace", f"at most {num_layers} layers", num_dense)
    dense_kinds = _pattern(config, "prefix_dense_sliding_window_pattern", num_dense)
    other_kinds = _pattern(config, "sliding_window_pattern", num_layers - num_dense)
    return dense_kinds + other_kinds


def _pattern(config: Config, key: str, num_layers: int) -> list[str]:
    """Return the kinds of ``num_layers`` layers that slide, except one of each period."""
    if not num_layers:
        return []
    return all_but_each(SLIDING, key)({**config, "num_hidden_layers": num_layers})


def from_last(config: Config) -> list[str]:
    """The last layer attends to all positions, and each fourth before it."""
    return all_but_each(SLIDING, 4, 0)(config)[::-1]


def conv_and_slide(config: Config) -> list[str]:
    """Layers 2, 6, 10 ... attend to all positions, layers 4, 8, 12 ... in a window (Lfm3Config).

    The others are convolutions, layer 0 too.
    """
    period = (SLIDING, STATE, FULL, STATE)
    kinds = [period[layer % 4] for layer in range(_num_layers(config))]
    return [STATE, *kinds[1:]]


def _num_layers(config: Config) -> int:
    return integer_of(config, NUM_LAYERS, high=MAX_LAYERS)


# The families

_TABLE: Final[Mapping[str, Mapping[str, Any]]] = json.loads(
    resources.files("kvplan.models").joinpath("families.json").read_bytes(),
    object_hook=MappingProxyType,
)

_CLASS_DEFAULTS: Final = MappingProxyType({**_TABLE["families"], **_TABLE["others"]})
"""The keys that each family reads, with the defaults of its class."""


def _families(
    *model_types: str,
    layers: LayerRule = all_slide,
    attention: AttentionReader | None = None,
    state: StateReader | None = None,
    keys: KeyRule | None = None,
    last: str | None = None,
) -> dict[str, Family]:
    """Return the families of some types, which differ only in their defaults.

    Without ``attention``, a family that has the keys of latents keeps latents, any other K and V of
    each head.
    """
    families = {}
    for model_type in model_types:
        # Files may state keys that the class of the family lacks.
        defaults = {**_CLASS_DEFAULTS[model_type], **_TABLE["unlisted"].get(model_type, {})}
        reader = attention or _attention_of(defaults)
        families[model_type] = Family(defaults, layers, reader, state, keys, last)
    return families


def _attention_of(defaults: Config) -> AttentionReader:
    if "index_head_dim" in defaults:
        return sparse_mla
    return mla if "kv_lora_rank" in defaults else kv_heads


# A window of Cohere counts the tokens before one; that of ModernBERT reaches in both directions.
_WITH_OWN_TOKEN: Final = window_from("sliding_window", lambda tokens_before: tokens_before + 1)
_HALF_WINDOW: Final = window_from("local_attention", lambda tokens: tokens // 2)
_MAMBA_STATE: Final = partial(mamba1_state, width_key="intermediate_size")

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        # One rule reads all families but those that follow.
        **_families(*_CLASS_DEFAULTS),
        # Families with layers that slide
        **_families("cohere_compass_text", "laguna", "mellum", layers=all_of(FULL)),
        **_families("cwm", "granite_swa", "granitemoe_swa", layers=all_but_each(SLIDING, 4, 0)),
        **_families("exaone4", "exaone_moe", layers=by_period),
        **_families("gemma2", "gpt_oss", "vaultgemma", layers=all_but_each(SLIDING, 2)),
        **_families("gemma3n_text", "kolibri1", layers=all_but_each(SLIDING, 5)),
        **_families("muse_glimmer_text", "muse_spark_text", layers=from_last),
        **_families("olmo3", layers=all_but_each(SLIDING, 4)),
        **_families("afmoe", layers=all_but_each(SLIDING, "global_attn_every_n_layers")),
        **_families("beam", layers=all_but_each(SLIDING, 6, last=FULL)),
        **_families("flint", layers=all_but_each(SLIDING, 4, 1, first=2, last=FULL)),
        **_families("qwen2", "qwen2_vl_text", "qwen2_5_vl_text", layers=upper_slide),
        **_families("qwen2_5_omni_text", "qwen3", "dots1", "mimo", layers=upper_slide),
        **_families("deepseek_ocr2_text", layers=upper_slide),
        **_families("qwen2_moe", layers=every_other_lower_slides),
        **_families("gemma3_text", layers=all_but_each(SLIDING, "sliding_window_pattern")),
        **_families(
            "cohere2",
            layers=all_but_each(SLIDING, "sliding_window_pattern"),
            keys=_WITH_OWN_TOKEN,
        ),
        **_families("cohere2_moe", layers=after_dense, keys=_WITH_OWN_TOKEN),
        **_families(
            "gemma4_text",
            "gemma4_unified_text",
            "diffusion_gemma_text",
            layers=all_but_each(SLIDING, 6),
            keys=KeyRule(
                global_heads,
                {
                    "full_head_dim": "global_head_dim",
                    "full_num_key_value_heads": "num_global_key_value_heads",
                },
            ),
            last=FULL,
        ),
        **_families(
            "llama4_text",
            layers=by_flags(
                "no_rope_layers",
                {0: FULL, 1: SLIDING},
                otherwise=all_but_each(SLIDING, "no_rope_layer_interval"),
            ),
            attention=chunked_heads,
            # A layer sees one chunk at most (Llama4TextConfig).
            keys=window_from("attention_chunk_size"),
        ),
        **_families(
            "mimo_v2_flash",
            layers=by_flags(
                "hybrid_layer_pattern",
                {0: FULL, 1: SLIDING},
                otherwise=all_but_each(SLIDING, 6, first=1),
            ),
            keys=KeyRule(
                sliding_heads,
                {
                    "swa_num_key_value_heads": "num_key_value_heads",
                    "sliding_window": "sliding_window_size",
                },
            ),
        ),
        **_families(
            "modernbert-decoder",
            layers=all_but_each(SLIDING, "global_attn_every_n_layers", 0),
            keys=_HALF_WINDOW,
        ),
        # Families that state their heads or their latents in a way of their own
        **_families(
            "chatglm", keys=KeyRule(chatglm_heads, {"multi_query_group_num": "num_attention_heads"})
        ),
        **_families("dbrx", keys=KeyRule(nested_heads, {"num_key_value_heads": "attn_config"})),
        **_families(
            "nemotron-nas",
            layers=by_block,
            keys=KeyRule(nas_heads, {"per_layer_config": "block_configs"}),
        ),
        **_families(
            "falcon",
            "gpt_bigcode",
            keys=KeyRule(falcon_heads, {"num_key_value_heads": "num_kv_heads"}),
        ),
        **_families(
            "longcat_flash", keys=KeyRule(double_layers, {"num_hidden_layers": "num_layers"})
        ),
        **_families(
            "step3p5",
            layers=all_of(FULL),
            keys=KeyRule(grouped_heads, {"num_key_value_heads": "num_attention_groups"}),
        ),
        **_families(
            "deepseek_v32",
            "glm_moe_dsa",
            "hy_v4",
            keys=KeyRule(shared_indexers, {"per_layer_config": "indexer_types"}),
        ),
        **_families(
            "minimax_m3_vl_text",
            attention=block_indexed,
            keys=KeyRule(
                block_indexers,
                {
                    "index_head_dim": "sparse_attention_config",
                    "per_layer_config": "sparse_attention_config",
                },
            ),
            layers=all_of(FULL),
        ),
        **_families("dots3_note_text", layers=all_but_each(SLIDING, 4, 1, first=2)),
        **_families(
            "minimax_m2",
            layers=by_flags("attn_type_list", {1: FULL}, otherwise=all_of(FULL)),
        ),
        # Families with recurrent states
        **_families("mamba", "falcon_mamba", state=_MAMBA_STATE, layers=all_of(STATE)),
        **_families("mamba2", state=mamba2_state, layers=all_of(STATE)),
        **_families(
            "jamba",
            state=mamba1_state,
            layers=all_but_each(STATE, "attn_layer_period", "attn_layer_offset"),
        ),
        **_families("nemotron_h", state=mamba2_state, attention=stated_window, layers=by_letter),
        **_families("bamba", state=granite_state, layers=by_list("attn_layer_indices", STATE)),
        **_families("granitemoehybrid", state=granite_state, layers=all_of(STATE)),
        **_families("falcon_h1", state=granite_state, layers=all_of(BOTH)),
        **_families(
            "zamba2",
            state=granite_state,
            layers=by_list("hybrid_layer_ids", STATE, BOTH),
            keys=KeyRule(query_width, {"attention_head_dim": "hidden_size"}),
        ),
        **_families("lfm2", "lfm2_moe", state=short_conv, layers=by_list("full_attn_idxs", FULL)),
        **_families("lfm3", state=short_conv, layers=conv_and_slide),
        **_families(
            "qwen3_next",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            state=delta_state,
            layers=all_but_each(STATE, "full_attention_interval"),
        ),
        **_families(
            "olmo_hybrid",
            state=delta_state,
            layers=with_full(all_but_each(STATE, 4)),
            keys=KeyRule(
                olmo_keys,
                {
                    "linear_num_key_heads": "num_attention_heads",
                    "linear_num_value_heads": "num_attention_heads",
                    "linear_key_head_dim": "hidden_size",
                    "linear_value_head_dim": "hidden_size",
                },
            ),
        ),
        **_families(
            "kimi_linear",
            state=kimi_state,
            layers=numbered_from_one,
            keys=KeyRule(kimi_keys, dict.fromkeys(_LINEAR_KEYS, "linear_attn_config")),
        ),
        **_families(
            "bailing_hybrid",
            state=bailing_state,
            layers=all_but_each(STATE, "layer_group_size"),
            keys=KeyRule(bailing_keys, dict(zip(_LINEAR_KEYS, _BAILING_KEYS, strict=True))),
        ),
        **_families("bailing_moe_linear", state=lightning_state, layers=full_behind_groups),
        **_families("phi4flash", state=mamba1_state, layers=lower_half_caches),
        **_families("minimax", state=lightning_state, layers=all_but_each(STATE, 2, 0)),
        **_families(
            "minimax_text_01",
            "minimax_m1",
            state=lightning_state,
            layers=by_flags("attn_type_list", {0: STATE, 1: FULL}),
        ),
    }
)
"""The family of each known ``model_type``."""

OUTER: Final[Mapping[str, str]] = _TABLE["outer"]
"""The family of a decoder without a ``model_type``, by the type of the file around it."""


def _reason_of_each_type() -> dict[str, str]:
    reasons = {}
    for reason, model_types in _TABLE["refused"].items():
        reasons.update(dict.fromkeys(model_types, reason))
    return reasons


REFUSED: Final[Mapping[str, str]] = MappingProxyType(_reason_of_each_type())
"""The reasons why the files of a ``model_type`` cannot be read."""

REGISTRY: Final = Registry(FAMILIES, OUTER, REFUSED)
"""All types that kvplan can read, or has a reason not to read."""
