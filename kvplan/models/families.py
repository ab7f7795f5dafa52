"""Model families: for each ``model_type`` of a config.json, which layers cache what.

One rule reads most families: K and V of each head (or a latent for all heads, if the family has
``kv_lora_rank``) of every layer, in a window if the family has ``sliding_window``; ``layer_types``
says which layers slide, have a state, or cache nothing. families.json lists the keys that each
family reads, with the defaults of its class in transformers 5.23. :data:`SPECIAL` has the families
that need more: the rule that gives the kind of each layer if the file has no list of them
(``configuration_*.py``), the state of recurrent layers, and keys that are computed from others
(``modeling_*.py``). :data:`REFUSED` says why kvplan doesn't read the others.

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

from kvplan.models.config import (
    BOTH,
    HIDDEN,
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
    count,
    dtype,
    key_of,
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
)

# What a layer caches

_KV_HEADS: Final = ("num_key_value_heads", "num_attention_groups", "multi_query_group_num")
_HEAD_DIM: Final = ("attention_head_dim", "head_dim", "kv_channels")


def kv_heads(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return K and V of each head. V has ``v_head_dim`` elements, if the family has that key."""
    heads_key = key_of(config, _KV_HEADS)
    num_heads = count(config, heads_key if config.get(heads_key) is not None else NUM_HEADS)
    num_query_heads = count(config, NUM_HEADS, num_heads)
    if num_query_heads % num_heads:
        expected = f"a divisor of num_attention_heads {num_query_heads}"
        raise unusable(heads_key, expected, num_heads)
    dim_key = key_of(config, _HEAD_DIM)
    if config.get(dim_key) is not None:
        dim = count(config, dim_key)
    else:
        dim, remainder = divmod(count(config, HIDDEN), count(config, NUM_HEADS))
        if remainder or not dim:
            width_key = key_of(config, HIDDEN)
            expected = f"a multiple of num_attention_heads {num_query_heads}"
            raise unusable(width_key, expected, config[width_key])
    value_dim = count(config, "v_head_dim", dim) if config.get("v_head_dim") else dim
    return attention(num_heads, dim, group, window, value_dim)


def mla(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return one latent for all heads, or K and V of each head if ``kv_lora_rank`` is null."""
    if "kv_lora_rank" in config and config["kv_lora_rank"] is None:
        return kv_heads(config, group, window)
    rank = count(config, "kv_lora_rank")
    rope_dim = count(config, "qk_rope_head_dim")
    return latent(rank, rope_dim, group, window)


def sparse_mla(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return a latent and the keys of an indexer.

    A layer that slides has no indexer, and some layers use that of another layer.
    """
    if group == SLIDING or config.get("use_dsa") is False:
        return mla(config, group, window)
    rank = count(config, "kv_lora_rank")
    rope_dim = count(config, "qk_rope_head_dim")
    tensors = sparse_latent(rank, rope_dim, count(config, "index_head_dim"))
    return tensors[:1] if config.get("shares_index") else tensors


def stated_window(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """Return K and V of each head, in a window if the file states one.

    (vllm/model_executor/models/nemotron_h.py, 0.33)
    """
    states_window = config.get("sliding_window") is not None
    return kv_heads(config, group, count(config, "sliding_window") if states_window else None)


def mamba1_state(config: Config, width_key: str | None = None) -> Layer:
    """Return the state of a Mamba layer.

    The number of its channels is under ``width_key``, or a multiple of the model's width.
    """
    state_size = count(config, ("state_size", "mamba_d_state"))
    steps = _steps(config, ("conv_kernel", "mamba_d_conv"))
    return mamba1(_channels(config, width_key), state_size, steps, *_dtypes(config))


_HEADS: Final = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
_GROUPS: Final = ("mamba_n_groups", "mamba_ngroups", "n_groups")


def mamba2_state(config: Config) -> Layer:
    """Return the state of a Mamba-2 layer."""
    num_heads = count(config, _HEADS)
    dim = count(config, ("mamba_d_head", "mamba_head_dim", "head_dim"))
    num_groups = count(config, _GROUPS)
    state_size = count(config, ("mamba_d_state", "ssm_state_size", "state_size"))
    if num_heads % num_groups:
        raise unusable(key_of(config, _GROUPS), f"a divisor of {num_heads} heads", num_groups)
    steps = _steps(config, ("mamba_d_conv", "conv_kernel"))
    return mamba2(num_heads, dim, num_groups, state_size, steps, *_dtypes(config))


def granite_state(config: Config) -> Layer:
    """Return the state of a Mamba-2 layer whose file states how wide all heads are together.

    It may state how wide each head is, too.
    """
    channels = _channels(config, "mamba_d_ssm")
    num_heads = count(config, _HEADS)
    states_dim = config.get("mamba_d_head") not in (None, "auto")
    dim = count(config, "mamba_d_head") if states_dim else channels // num_heads
    if dim * num_heads != channels:
        expected = f"heads that make up the {channels} channels"
        raise unusable(key_of(config, _HEADS), expected, num_heads)
    return mamba2_state({**config, "mamba_d_head": dim})


def delta_state(config: Config) -> Layer:
    """Return the state of a gated delta layer."""
    key_heads = count(config, "linear_num_key_heads")
    value_heads = count(config, "linear_num_value_heads")
    key_dim = count(config, "linear_key_head_dim")
    value_dim = count(config, "linear_value_head_dim")
    if value_heads % key_heads:
        expected = f"a divisor of linear_num_value_heads {value_heads}"
        raise unusable("linear_num_key_heads", expected, key_heads)
    steps = _steps(config, "linear_conv_kernel_dim")
    return delta(key_heads, key_dim, value_heads, value_dim, steps, *_dtypes(config))


def kimi_state(config: Config) -> Layer:
    """Return the state of Kimi delta attention."""
    num_heads = count(config, "linear_num_heads")
    dim = count(config, "linear_head_dim")
    steps = _steps(config, "linear_conv_kernel_dim")
    return delta(num_heads, dim, num_heads, dim, steps, *_dtypes(config))


def bailing_state(config: Config) -> Layer:
    """Return the state of lightning attention in files of Ling 2.5, else of Kimi delta attention.

    (bailing_moe_linear.py of vLLM 0.33)
    """
    if "BailingMoeV2_5ForCausalLM" in str(config.get("architectures")):
        return lightning_state(config)
    return kimi_state(config)


def lightning_state(config: Config) -> Layer:
    """Return the state of a lightning attention layer: a matrix for each query head."""
    (query_heads,) = kv_heads({**config, "num_key_value_heads": None, "v_head_dim": None})
    sizes = dict(query_heads.axes)
    _, ssm_dtype = _dtypes(config)
    return lightning(sizes["head"], sizes["dim"], ssm_dtype)


def short_conv(config: Config) -> Layer:
    """Return the last inputs of a short convolution over the model's width."""
    channels = count(config, HIDDEN)
    steps = _steps(config, "conv_L_cache")
    conv_dtype, _ = _dtypes(config)
    return convolution(channels, steps, conv_dtype)


def _channels(config: Config, width_key: str | None) -> int:
    if width_key is not None and config.get(width_key) is not None:
        return count(config, width_key)
    return count(config, ("expand", "mamba_expand")) * count(config, HIDDEN)


def _steps(config: Config, keys: Keys) -> int:
    """Return how many inputs a convolution stores: of width ``w``, the last ``w - 1``."""
    return count(config, keys, low=2) - 1


def _dtypes(config: Config) -> tuple[str, str]:
    """Return the dtypes of the convolution and of the SSM state.

    Files of Nemotron-H and Qwen3.5 may state the second.
    """
    conv_dtype = dtype(config, "bfloat16")
    return conv_dtype, dtype(config, "float32", ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))


# Keys that are computed from others


def query_width(config: Config) -> Config:
    """Return the size of the heads of Zamba.

    Its attention reads the layer's input beside the embeddings, so the heads are twice as wide.
    """
    dim = 2 * count(config, HIDDEN) // count(config, NUM_HEADS)
    return {} if config.get("attention_head_dim") is not None else {"attention_head_dim": dim}


def falcon_heads(config: Config) -> Config:
    """Return one KV head (``multi_query``), unless a new file states how many.

    (FalconConfig, GPTBigCodeConfig)
    """
    is_grouped = config.get("new_decoder_architecture") or not config["multi_query"]
    return {"num_key_value_heads": config.get("num_kv_heads") if is_grouped else 1}


def chatglm_heads(config: Config) -> Config:
    """Return as many groups as heads without ``multi_query_attention``.

    ``multi_query_group_num`` counts only with it (vllm/model_executor/models/chatglm.py).
    """
    if config["multi_query_attention"]:
        return {}
    return {"multi_query_group_num": count(config, NUM_HEADS)}


def nested_heads(config: Config) -> Config:
    """Return the number of KV heads that ``attn_config`` states (DbrxConfig)."""
    attn_config = config.get("attn_config") or {"kv_n_heads": 1}
    if not isinstance(attn_config, Mapping):
        raise unusable("attn_config", "a mapping", attn_config)
    return {"num_key_value_heads": attn_config.get("kv_n_heads", 1)}


def global_heads(config: Config) -> Config:
    """Return the head size of the full layers of Gemma 4.

    They have their own number of KV heads, too, if K equals V. Newer files state both in
    ``per_layer_config``.
    """
    if config.get("per_layer_config") is not None:
        return {}
    keys = {"full_head_dim": config["global_head_dim"]}
    num_heads = config.get("num_global_key_value_heads")
    if config.get("attention_k_eq_v") and num_heads is not None:
        keys["full_num_key_value_heads"] = num_heads
    return keys


_KIMI_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
)


def kimi_keys(config: Config) -> Config:
    """Return the sizes of linear layers that ``linear_attn_config`` states (KimiLinearConfig)."""
    sizes = _linear_attn_config(config)
    return {_KIMI_NAMES[key]: value for key, value in sizes.items() if key in _KIMI_NAMES}


_BAILING_SOURCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "linear_num_heads": "num_attention_heads",
        "linear_head_dim": "head_dim",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
)


def bailing_keys(config: Config) -> Config:
    """Return the sizes of linear layers, which have the query heads (BailingHybridConfig)."""
    missing_keys = [key for key in _BAILING_SOURCES if config.get(key) is None]
    return {key: config.get(_BAILING_SOURCES[key]) for key in missing_keys}


def olmo_keys(config: Config) -> Config:
    """Return what a file leaves out, from its heads and its width (OlmoHybridConfig)."""
    num_heads = count(config, NUM_HEADS)
    width = count(config, HIDDEN)
    key_heads = config.get("linear_num_key_heads") or num_heads
    value_heads = config.get("linear_num_value_heads") or num_heads
    key_dim = config.get("linear_key_head_dim") or int(0.75 * width / key_heads)
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * key_dim,
    }


def grouped_heads(config: Config) -> Config:
    """Return the KV heads that files of Step-3.5 may state as groups.

    (vllm/model_executor/models/step3p5.py)
    """
    num_groups = config.get("num_attention_groups")
    return {} if num_groups is None else {"num_key_value_heads": num_groups}


def two_in_each(config: Config) -> Config:
    """Return twice as many layers as the file has, each of which attends twice.

    (LongcatFlashConfig)
    """
    return {"num_hidden_layers": 2 * count(config, "num_layers", high=MAX_LAYERS)}


def window_of(key: str, tokens_of: Callable[[int], int] = int) -> KeyRule:
    """Return the rule for layers that see as many tokens as follow from the value under ``key``."""

    def rule(config: Config) -> Config:
        if config.get(key) is None:
            return {}
        return {"sliding_window": tokens_of(count(config, key))}

    return rule


def sliding_heads(config: Config) -> Config:
    """Return the KV heads and the window of sliding layers, which files of MiMo-V2 state.

    Where they leave out the heads, transformers doubles those of the other layers.
    """
    num_heads = config.get("swa_num_key_value_heads")
    keys = {"swa_num_key_value_heads": num_heads or 2 * count(config, "num_key_value_heads")}
    if config.get("sliding_window_size") is not None:
        keys["sliding_window"] = count(config, "sliding_window_size") + 1
    return keys


def shared_indexers(config: Config) -> Config:
    """Return the layers that use the indexer of an earlier one.

    Files list them, have a letter for each layer, or mean all but one of each period
    (``index_topk_freq`` of vllm/model_executor/models/deepseek_v2.py, 0.33).
    """
    types = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is None:
        types = _periodic_indexers(config)
    is_sequence = isinstance(types, list | tuple | str)
    if not is_sequence or {*map(str, types)} - {"full", "shared", "F", "S"}:
        raise unusable("indexer_types", "full or shared for each layer", types)
    sharers = [layer for layer, kind in enumerate(types) if kind in ("shared", "S")]
    return {"per_layer_config": {i: {"shares_index": True} for i in sharers}} if sharers else {}


def _periodic_indexers(config: Config) -> list[str]:
    """Return ``F`` for each layer with an indexer of its own, one of a period, else ``S``."""
    period = count(config, "index_topk_freq")
    offset = count(config, "index_skip_topk_offset", low=0)
    layers = range(_num_layers(config))
    return ["S" if max(layer - offset + 1, 0) % period else "F" for layer in layers]


# Of which kind each layer is


def all_of(kind: str) -> LayerRule:
    """Return the rule that all layers are of one kind."""
    return lambda config: [kind] * _num_layers(config)


def all_slide(config: Config) -> list[str]:
    """All layers slide if the file has a window in use, else none.

    (``get_layer_types_and_kwargs``)
    """
    return [SLIDING if _uses_window(config) else FULL] * _num_layers(config)


def _uses_window(config: Config) -> bool:
    has_window = config.get("sliding_window") is not None
    return has_window and bool(config.get("use_sliding_window", True))


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
        num_layers_of_period = period if isinstance(period, int) else count(config, period)
        if offset is None:
            place = num_layers_of_period - 1
        elif isinstance(offset, int):
            place = offset
        else:
            place = count(config, offset, low=0, high=num_layers_of_period)
        kinds = []
        for layer in range(_num_layers(config)):
            is_full = layer < first or layer % num_layers_of_period == place
            kinds.append(FULL if is_full else kind)
        return kinds if last is None else [*kinds[:-1], last]

    return rule


def listed(key: str, absent: str, kind: str = FULL) -> LayerRule:
    """Return the rule that a list under ``key`` has the layers of a kind that attends.

    The others have a state. Without such a list, all layers are of the kind ``absent``.
    """

    def rule(config: Config) -> list[str]:
        layers = range(_num_layers(config))
        numbers = config.get(key)
        if numbers is None:
            return [absent for _ in layers]
        is_list = isinstance(numbers, list | tuple)
        if not is_list or not {*map(str, numbers)} <= {*map(str, layers)}:
            raise unusable(key, f"layers of 0 to {len(layers) - 1}", numbers)
        return [kind if layer in numbers else STATE for layer in layers]

    return rule


def upper_slide(config: Config) -> list[str]:
    """Layers from ``max_window_layers`` on slide, if sliding is in use (Qwen2Config)."""
    layers = range(_num_layers(config))
    if not _uses_window(config):
        return [FULL for _ in layers]
    first = count(config, "max_window_layers", low=0)
    return [SLIDING if layer >= first else FULL for layer in layers]


def every_other_lower_slides(config: Config) -> list[str]:
    """Every other layer below ``max_window_layers`` slides, if sliding is in use.

    (Qwen2MoeConfig)
    """
    layers = range(_num_layers(config))
    in_use = config["use_sliding_window"]
    end = count(config, "max_window_layers", low=0) if in_use else 0
    return [SLIDING if layer < end and layer % 2 == 0 else FULL for layer in layers]


_LETTERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "M": STATE,
        "*": FULL,
        "-": NONE,
        "E": NONE,
    }
)


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


def numbered_from_one(config: Config) -> list[str]:
    """``linear_attn_config`` lists the layers, numbered from 1 (KimiLinearConfig)."""
    num_layers = _num_layers(config)
    linear_attn_config = _linear_attn_config(config)
    if "full_attn_layers" not in linear_attn_config or "kda_layers" not in linear_attn_config:
        return [FULL if layer and layer % 4 == 0 else STATE for layer in range(num_layers)]
    lists = {key: linear_attn_config[key] for key in ("full_attn_layers", "kda_layers")}
    numbers: list[str] = []
    for numbers_of_kind in lists.values():
        is_list = isinstance(numbers_of_kind, list | tuple)
        numbers += map(str, numbers_of_kind) if is_list else ["no list"]
    if sorted(numbers) != sorted(map(str, range(1, num_layers + 1))):
        raise unusable("linear_attn_config", f"each of the layers 1 to {num_layers} once", lists)
    full_numbers = lists["full_attn_layers"]
    return [FULL if layer + 1 in full_numbers else STATE for layer in range(num_layers)]


def _linear_attn_config(config: Config) -> Config:
    """Return what a Kimi file states about its linear layers."""
    linear_attn_config = config.get("linear_attn_config")
    if linear_attn_config is not None and not isinstance(linear_attn_config, Mapping):
        raise unusable("linear_attn_config", "a mapping", linear_attn_config)
    return linear_attn_config or {}


def by_flags(key: str, kinds: Mapping[int, str], otherwise: LayerRule | None = None) -> LayerRule:
    """Return the rule that ``key`` has a number for each layer.

    Files that lack it follow the rule ``otherwise``.

    >>> rule = by_flags("attn_type_list", {0: STATE, 1: FULL})
    >>> rule({"num_hidden_layers": 2, "attn_type_list": [0, 1]})
    ['state', 'attn']
    """

    def rule(config: Config) -> list[str]:
        num_layers = _num_layers(config)
        flags = config.get(key)
        if not flags and otherwise is not None:
            return otherwise(config)
        of_layers = flags if isinstance(flags, list | tuple) else ()
        if len(of_layers) != num_layers or not {*map(str, of_layers)} <= {*map(str, kinds)}:
            raise unusable(key, f"{num_layers} of {', '.join(map(str, kinds))}", flags)
        return [kinds[flag] for flag in of_layers]

    return rule


def repeated(config: Config) -> list[str]:
    """``sliding_window_pattern`` is a number, or a letter for each layer of a period.

    (Exaone4Config)
    """
    pattern = config.get("sliding_window_pattern")
    if config.get("sliding_window") is None:
        return all_of(FULL)(config)
    if not isinstance(pattern, str):
        return all_but_each(SLIDING, "sliding_window_pattern")(config)
    if not pattern or {*pattern} - {*"LG"}:
        raise unusable("sliding_window_pattern", "a number, or letters of L and G", pattern)
    num_layers = _num_layers(config)
    kinds = []
    for layer in range(num_layers):
        slides = pattern[layer % len(pattern)] == "L" and layer < num_layers - 1
        kinds.append(SLIDING if slides else FULL)
    return kinds


def after_dense(config: Config) -> list[str]:
    """The first layers may have a pattern of their own (Cohere2MoeConfig)."""
    num_layers = _num_layers(config)
    num_dense = count(config, "first_k_dense_replace", 0, low=0)
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
    """Every other layer attends, the first of them in a window; the rest are convolutions.

    (Lfm3Config)
    """
    kind_of_place = {0: SLIDING, 2: FULL}
    layers = range(_num_layers(config))
    return [kind_of_place.get(layer % 4, STATE) if layer else STATE for layer in layers]


def _num_layers(config: Config) -> int:
    return count(config, NUM_LAYERS, high=MAX_LAYERS)


# The families

_TABLE: Final[Mapping[str, Mapping[str, Any]]] = json.loads(
    resources.files("kvplan.models").joinpath("families.json").read_bytes(),
    object_hook=MappingProxyType,
)

_CLASS_DEFAULTS: Final = MappingProxyType({**_TABLE["families"], **_TABLE["others"]})
"""The keys that each family reads, with the defaults of its class."""

_NO_KEYS: Final[Config] = MappingProxyType({})


def _families(
    *model_types: str,
    layers: LayerRule = all_slide,
    attention: AttentionReader | None = None,
    state: StateReader | None = None,
    keys: KeyRule | None = None,
    last: str | None = None,
    defaults: Config = _NO_KEYS,
) -> dict[str, Family]:
    """Return the families of some types, which differ only in the defaults of their classes.

    ``defaults`` are those of keys that the classes lack. Without ``attention``, a family that has
    the keys of latents keeps latents, any other K and V of each head.
    """
    families = {}
    for model_type in model_types:
        class_defaults = _CLASS_DEFAULTS[model_type]
        families[model_type] = Family(
            defaults={**class_defaults, **defaults},
            layers=layers,
            attention=attention or _attention_of(class_defaults),
            state=state,
            keys=keys,
            last=last,
        )
    return families


def _attention_of(class_defaults: Config) -> AttentionReader:
    if "index_head_dim" in class_defaults:
        return sparse_mla
    return mla if "kv_lora_rank" in class_defaults else kv_heads


def _unset(*keys: str) -> Config:
    """Return keys that a family reads where a file states them."""
    return MappingProxyType(dict.fromkeys(keys))


_INDEXERS: Final[Config] = MappingProxyType(
    {
        "indexer_types": None,
        "index_topk_pattern": None,
        "index_topk_freq": 1,
        "index_skip_topk_offset": 2,
    }
)
_SLIDING_HEADS: Final = _unset("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")

_WINDOWS: Final[Mapping[str, Family]] = MappingProxyType(
    {
        **_families("cohere_compass_text", "laguna", "mellum", layers=all_of(FULL)),
        **_families("cwm", "granite_swa", "granitemoe_swa", layers=all_but_each(SLIDING, 4, 0)),
        **_families("exaone4", "exaone_moe", layers=repeated),
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
        **_families(
            "cohere2",
            layers=all_but_each(SLIDING, "sliding_window_pattern"),
            keys=window_of("sliding_window", lambda tokens_before: tokens_before + 1),
            defaults={"sliding_window_pattern": 4},
        ),
        **_families(
            "cohere2_moe",
            layers=after_dense,
            keys=window_of("sliding_window", lambda tokens_before: tokens_before + 1),
        ),
        **_families(
            "gemma3_text",
            layers=all_but_each(SLIDING, "sliding_window_pattern"),
            defaults={"sliding_window_pattern": 6},
        ),
        **_families(
            "gemma4_text",
            "gemma4_unified_text",
            "diffusion_gemma_text",
            layers=all_but_each(SLIDING, 6),
            keys=global_heads,
            last=FULL,
            defaults={"global_head_dim": 512, "num_global_key_value_heads": None},
        ),
        **_families(
            "llama4_text",
            layers=by_flags(
                "no_rope_layers",
                {0: FULL, 1: SLIDING},
                otherwise=all_but_each(SLIDING, "no_rope_layer_interval"),
            ),
            keys=window_of("attention_chunk_size"),  # one chunk at most (Llama4TextConfig)
        ),
        **_families(
            "mimo_v2_flash",
            layers=by_flags(
                "hybrid_layer_pattern",
                {0: FULL, 1: SLIDING},
                otherwise=all_but_each(SLIDING, 6, first=1),
            ),
            keys=sliding_heads,
            defaults={**_SLIDING_HEADS, **_unset("hybrid_layer_pattern", "sliding_window_size")},
        ),
        **_families(
            "modernbert-decoder",
            layers=all_but_each(SLIDING, "global_attn_every_n_layers", 0),
            # The window is in both directions (ModernBertDecoderConfig).
            keys=window_of("local_attention", lambda tokens: tokens // 2),
            defaults={
                "global_attn_every_n_layers": 3,
                "local_attention": 128,
                "sliding_window": None,
            },
        ),
    }
)
"""Families with layers that slide."""

_HEADS_AND_LATENTS: Final[Mapping[str, Family]] = MappingProxyType(
    {
        **_families("chatglm", keys=chatglm_heads),
        **_families("dbrx", keys=nested_heads, defaults=_unset("num_key_value_heads")),
        **_families("falcon", keys=falcon_heads),
        **_families("gpt_bigcode", keys=falcon_heads, defaults=_unset("num_key_value_heads")),
        **_families(
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "hunyuan_vl_text",
            defaults=_unset("attention_head_dim"),
        ),
        **_families("longcat_flash", keys=two_in_each),
        **_families(
            "minimax_m2",
            layers=by_flags("attn_type_list", {1: FULL}, otherwise=all_of(FULL)),
            defaults=_unset("attn_type_list"),
        ),
        **_families(
            "step3p5",
            layers=all_of(FULL),
            keys=grouped_heads,
            defaults=_unset("num_attention_groups"),
        ),
        **_families("deepseek_v32", "glm_moe_dsa", keys=shared_indexers, defaults=_INDEXERS),
        **_families("hy_v4", keys=shared_indexers, defaults={**_INDEXERS, "index_topk_freq": 4}),
        **_families(
            "dots3_note_text",
            layers=all_but_each(SLIDING, 4, 1, first=2),
            defaults={
                **_SLIDING_HEADS,
                "sliding_window": 512,
                "swa_kv_lora_rank": 1024,
                "swa_qk_rope_head_dim": 64,
                "use_dsa": None,
            },
        ),
    }
)
"""Families that state their heads or their latents in a way of their own."""

_STATES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        **_families(
            "mamba",
            "falcon_mamba",
            state=partial(mamba1_state, width_key="intermediate_size"),
            layers=all_of(STATE),
        ),
        **_families("mamba2", state=mamba2_state, layers=all_of(STATE)),
        **_families(
            "jamba",
            state=mamba1_state,
            layers=all_but_each(STATE, "attn_layer_period", "attn_layer_offset"),
        ),
        **_families(
            "nemotron_h",
            state=mamba2_state,
            attention=stated_window,
            layers=by_letter,
            defaults=_unset(
                "hybrid_override_pattern",
                "attention_head_dim",
                "mamba_n_groups",
                "mamba_d_conv",
            ),
        ),
        **_families("bamba", state=granite_state, layers=listed("attn_layer_indices", STATE)),
        **_families("granitemoehybrid", state=granite_state, layers=all_of(STATE)),
        **_families("falcon_h1", state=granite_state, layers=all_of(BOTH)),
        **_families(
            "zamba2",
            state=granite_state,
            layers=listed("hybrid_layer_ids", STATE, BOTH),
            keys=query_width,
            defaults=_unset(
                "hybrid_layer_ids",
                "attention_head_dim",
                "kv_channels",
                "mamba_headdim",
            ),
        ),
        **_families("lfm2", "lfm2_moe", state=short_conv, layers=listed("full_attn_idxs", FULL)),
        **_families("lfm3", state=short_conv, layers=conv_and_slide),
        **_families(
            "qwen3_next",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            state=delta_state,
            layers=all_but_each(STATE, "full_attention_interval"),
            defaults={"full_attention_interval": 4},
        ),
        **_families(
            "olmo_hybrid",
            state=delta_state,
            layers=all_but_each(STATE, 4),
            keys=olmo_keys,
        ),
        **_families(
            "kimi_linear",
            state=kimi_state,
            layers=numbered_from_one,
            keys=kimi_keys,
            defaults=_unset("linear_attn_config"),
        ),
        **_families(
            "bailing_hybrid",
            state=bailing_state,
            layers=all_but_each(STATE, "layer_group_size"),
            keys=bailing_keys,
            defaults=_unset("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"),
        ),
        **_families("minimax", state=lightning_state, layers=all_but_each(STATE, 2, 0)),
        **_families(
            "minimax_text_01",
            "minimax_m1",
            state=lightning_state,
            layers=by_flags("attn_type_list", {0: STATE, 1: FULL}),
        ),
    }
)
"""Families with recurrent states."""

SPECIAL: Final = MappingProxyType({**_WINDOWS, **_HEADS_AND_LATENTS, **_STATES})
"""The families that the one rule does not read."""

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType({**_families(*_CLASS_DEFAULTS), **SPECIAL})
"""How to read each known value of ``model_type``."""

OUTER: Final[Mapping[str, str]] = _TABLE["outer"]
"""The family of a decoder without a ``model_type``, by the type of the file around it."""


def _reason_of_each_type() -> dict[str, str]:
    reasons = {}
    for reason, model_types in _TABLE["refused"].items():
        reasons.update(dict.fromkeys(model_types, reason))
    return reasons


REFUSED: Final[Mapping[str, str]] = MappingProxyType(_reason_of_each_type())
"""Why the files of a ``model_type`` cannot be read."""

REGISTRY: Final = Registry(FAMILIES, OUTER, REFUSED)
"""All types that kvplan can read, or has a reason not to read."""
