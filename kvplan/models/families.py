"""Model families: for each ``model_type`` of a config.json, which layers cache what.

One rule reads most families: K and V of each head (or a latent for all heads, if the family has ``kv_lora_rank``) of
every layer, in a window if the family has ``sliding_window``; ``layer_types`` says which layers slide, have a state, or
cache nothing. families.json lists the keys that each family reads, with the defaults of its class in transformers 5.23.
:data:`SPECIAL` adds what is particular to a family: which rule gives the kind of each layer if the file has no list of
them (``configuration_*.py``), the state of its recurrent layers, and keys that are computed from others
(``modeling_*.py``). :data:`REFUSED` says why kvplan doesn't read the others.

``num_key_value_heads: null`` means ``num_attention_heads``, ``head_dim: null`` means
``hidden_size // num_attention_heads``. Sizes that every published file states (``num_hidden_layers``) have no default:
a guess would plan the cache of another model.
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
    Config,
    Family,
    Keys,
    LayerRule,
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


def kv_heads(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """K and V of each head. V has ``v_head_dim`` elements, if the family has that key."""
    query_heads = config.get(key_of(config, NUM_HEADS))
    given = key_of(config, ("num_key_value_heads", "num_attention_groups", "multi_query_group_num"))
    heads = count(config, given if config.get(given) is not None else NUM_HEADS)
    query_heads = count(config, NUM_HEADS, heads)
    if query_heads % heads:
        raise unusable(given, f"a divisor of num_attention_heads {query_heads}", heads)
    stated = key_of(config, ("attention_head_dim", "head_dim", "kv_channels"))
    if config.get(stated) is not None:
        dim = count(config, stated)
    else:
        dim, rest = divmod(count(config, HIDDEN), count(config, NUM_HEADS))
        if rest or not dim:
            expected = f"a multiple of num_attention_heads {query_heads}"
            raise unusable(key_of(config, HIDDEN), expected, config[key_of(config, HIDDEN)])
    return attention(heads, dim, group, window, count(config, "v_head_dim", dim) if config.get("v_head_dim") else dim)


def mla(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """One latent for all heads, or K and V of each head if ``kv_lora_rank`` is null."""
    if "kv_lora_rank" in config and config["kv_lora_rank"] is None:
        return kv_heads(config, group, window)
    return latent(count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim"), group, window)


def sparse_mla(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """A latent and the keys of an indexer, unless the layer slides or uses those of another layer."""
    if group == SLIDING or config.get("use_dsa") is False:
        return mla(config, group, window)
    rank, rope = count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim")
    return sparse_latent(rank, rope, count(config, "index_head_dim"))[: 1 if config.get("shares_index") else None]


def stated_window(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """K and V of each head, in a window if the file states one (vllm/model_executor/models/nemotron_h.py, 0.33)."""
    return kv_heads(config, group, None if config.get("sliding_window") is None else count(config, "sliding_window"))


def mamba1_state(config: Config, channels: str | None = None) -> Layer:
    """The state of a Mamba layer. Its width is under ``channels``, or a multiple of the model's."""
    state, steps = count(config, ("state_size", "mamba_d_state")), _steps(config, ("conv_kernel", "mamba_d_conv"))
    return mamba1(_channels(config, channels), state, steps, *_dtypes(config))


_HEADS: Final = ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
_GROUPS: Final = ("mamba_n_groups", "mamba_ngroups", "n_groups")


def mamba2_state(config: Config) -> Layer:
    """The state of a Mamba-2 layer."""
    heads, dim = count(config, _HEADS), count(config, ("mamba_d_head", "mamba_head_dim", "head_dim"))
    groups, state = count(config, _GROUPS), count(config, ("mamba_d_state", "ssm_state_size", "state_size"))
    if heads % groups:
        raise unusable(key_of(config, _GROUPS), f"a divisor of {heads} heads", groups)
    return mamba2(heads, dim, groups, state, _steps(config, ("mamba_d_conv", "conv_kernel")), *_dtypes(config))


def granite_state(config: Config) -> Layer:
    """The state of a Mamba-2 layer whose file states how wide all heads are together, and maybe how wide each is."""
    channels, heads = _channels(config, "mamba_d_ssm"), count(config, _HEADS)
    stated = config.get("mamba_d_head") not in (None, "auto")
    dim = count(config, "mamba_d_head") if stated else channels // heads
    if dim * heads != channels:
        raise unusable(key_of(config, _HEADS), f"heads that make up the {channels} channels", heads)
    return mamba2_state({**config, "mamba_d_head": dim})


def delta_state(config: Config) -> Layer:
    """The state of a gated delta layer."""
    heads = [count(config, f"linear_num_{side}_heads") for side in ("key", "value")]
    dims = [count(config, f"linear_{side}_head_dim") for side in ("key", "value")]
    if heads[1] % heads[0]:
        raise unusable("linear_num_key_heads", f"a divisor of linear_num_value_heads {heads[1]}", heads[0])
    steps = _steps(config, "linear_conv_kernel_dim")
    return delta(heads[0], dims[0], heads[1], dims[1], steps, *_dtypes(config))


def kimi_state(config: Config) -> Layer:
    """The state of Kimi delta attention."""
    heads, dim = count(config, "linear_num_heads"), count(config, "linear_head_dim")
    return delta(heads, dim, heads, dim, _steps(config, "linear_conv_kernel_dim"), *_dtypes(config))


def bailing_state(config: Config) -> Layer:
    """Lightning attention in the files of Ling 2.5, else Kimi delta attention (bailing_moe_linear.py of vLLM 0.33)."""
    return (lightning_state if "BailingMoeV2_5ForCausalLM" in str(config.get("architectures")) else kimi_state)(config)


def lightning_state(config: Config) -> Layer:
    """The state of a lightning attention layer: a matrix for each query head."""
    axes = dict(kv_heads({**config, "num_key_value_heads": None, "v_head_dim": None})[0].axes)
    return lightning(axes["head"], axes["dim"], _dtypes(config)[1])


def short_conv(config: Config) -> Layer:
    """The last inputs of a short convolution over the model's width."""
    return convolution(count(config, HIDDEN), _steps(config, "conv_L_cache"), _dtypes(config)[0])


def _channels(config: Config, stated: str | None) -> int:
    if stated is not None and config.get(stated) is not None:
        return count(config, stated)
    return count(config, ("expand", "mamba_expand")) * count(config, HIDDEN)


def _steps(config: Config, keys: Keys) -> int:
    """A convolution of width ``w`` stores its last ``w - 1`` inputs."""
    return count(config, keys, low=2) - 1


def _dtypes(config: Config) -> tuple[str, str]:
    """Of the convolution and of the SSM state; Nemotron-H and Qwen3.5 files may state the second."""
    return dtype(config, "bfloat16"), dtype(config, "float32", ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))


# Keys that are computed from others


def query_width(config: Config) -> Config:
    """The attention of Zamba reads the layer's input beside the embeddings, so its heads are twice as wide."""
    dim = 2 * count(config, HIDDEN) // count(config, NUM_HEADS)
    return {} if config.get("attention_head_dim") is not None else {"attention_head_dim": dim}


def falcon_heads(config: Config) -> Config:
    """One KV head (``multi_query``), unless a new file states how many (FalconConfig, GPTBigCodeConfig)."""
    grouped = config.get("new_decoder_architecture")
    stated = config.get("num_kv_heads") if grouped or not config["multi_query"] else 1
    return {"num_key_value_heads": stated}


def chatglm_heads(config: Config) -> Config:
    """``multi_query_group_num`` counts only with ``multi_query_attention`` (vllm/model_executor/models/chatglm.py)."""
    return {} if config["multi_query_attention"] else {"multi_query_group_num": count(config, NUM_HEADS)}


def nested_heads(config: Config) -> Config:
    """``attn_config`` states the KV heads (DbrxConfig)."""
    given = config.get("attn_config") or {"kv_n_heads": 1}
    if not isinstance(given, Mapping):
        raise unusable("attn_config", "a mapping", given)
    return {"num_key_value_heads": given.get("kv_n_heads", 1)}


def global_heads(config: Config) -> Config:
    """Full layers of Gemma 4 have a head size of their own, and their own number of KV heads if K equals V."""
    if config.get("per_layer_config") is not None:  # newer files state them
        return {}
    of_full = {"head_dim": config["global_head_dim"]}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        of_full["num_key_value_heads"] = config["num_global_key_value_heads"]
    return {f"full_{key}": value for key, value in of_full.items()}


def kimi_keys(config: Config) -> Config:
    """``linear_attn_config`` states the sizes of linear layers (KimiLinearConfig)."""
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    return {names[key]: value for key, value in _linear(config).items() if key in names}


def bailing_keys(config: Config) -> Config:
    """Linear layers have the query heads (BailingHybridConfig)."""
    sources = {
        "linear_num_heads": "num_attention_heads",
        "linear_head_dim": "head_dim",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
    return {key: config.get(source) for key, source in sources.items() if config.get(key) is None}


def olmo_keys(config: Config) -> Config:
    """What a file leaves out follows from the heads and the width (OlmoHybridConfig)."""
    heads, hidden = count(config, NUM_HEADS), count(config, HIDDEN)
    given = {key: config.get(f"linear_num_{key}_heads") or heads for key in ("key", "value")}
    dim = config.get("linear_key_head_dim") or int(0.75 * hidden / given["key"])
    return {
        "linear_num_key_heads": given["key"],
        "linear_num_value_heads": given["value"],
        "linear_key_head_dim": dim,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * dim,
    }


def grouped_heads(config: Config) -> Config:
    """Files of Step-3.5 may state KV heads as groups (vllm/model_executor/models/step3p5.py)."""
    given = config.get("num_attention_groups")
    return {} if given is None else {"num_key_value_heads": given}


def two_in_each(config: Config) -> Config:
    """Each of ``num_layers`` layers attends twice (LongcatFlashConfig)."""
    return {"num_hidden_layers": 2 * count(config, "num_layers", high=MAX_LAYERS)}


def window_of(key: str, tokens: Callable[[int], int] = int) -> Callable[[Config], Config]:
    """Layers that slide see as many ``tokens`` as follow from the value under ``key``."""
    return lambda config: {} if config.get(key) is None else {"sliding_window": tokens(count(config, key))}


def sliding_heads(config: Config) -> Config:
    """Files of MiMo-V2 state the heads of sliding layers; transformers doubles those of the others."""
    window = config.get("sliding_window_size")
    keys = {
        "swa_num_key_value_heads": config.get("swa_num_key_value_heads") or 2 * count(config, "num_key_value_heads")
    }
    return keys if window is None else {**keys, "sliding_window": window + 1}


def shared_indexers(config: Config) -> Config:
    """Some layers use the indexer of an earlier one: as listed, by a letter for each layer, or all but one of a period.

    (``index_topk_freq`` of vllm/model_executor/models/deepseek_v2.py, 0.33)
    """
    types = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is None:
        period, offset = count(config, "index_topk_freq"), count(config, "index_skip_topk_offset", low=0)
        types = ["S" if max(i - offset + 1, 0) % period else "F" for i in range(_num_layers(config))]
    if not isinstance(types, list | tuple | str) or {*map(str, types)} - {"full", "shared", "F", "S"}:
        raise unusable("indexer_types", "full or shared for each layer", types)
    shared = {i: {"shares_index": True} for i, kind in enumerate(types) if kind in ("shared", "S")}
    return {"per_layer_config": shared} if shared else {}


# Of which kind each layer is


def all_of(kind: str) -> LayerRule:
    """All layers are of one kind."""
    return lambda config: [kind] * _num_layers(config)


def all_slide(config: Config) -> list[str]:
    """All layers slide if the file has a window in use, else none (``get_layer_types_and_kwargs``)."""
    in_use = bool(config.get("use_sliding_window", True)) and config.get("sliding_window") is not None
    return [SLIDING if in_use else FULL] * _num_layers(config)


def all_but_each(
    kind: str, every: str | int, offset: str | int | None = None, first: int = 0, last: str | None = None
) -> LayerRule:
    """All layers are of one kind, except that one of ``every`` attends to all positions: at ``offset``, or the last.

    The ``first`` layers attend to all positions too. ``last`` is the kind of the last layer, if it has its own.

    >>> all_but_each(SLIDING, "sliding_window_pattern")({"num_hidden_layers": 4, "sliding_window_pattern": 3})
    ['swa', 'swa', 'attn', 'swa']
    """

    def rule(config: Config) -> list[str]:
        period = every if isinstance(every, int) else count(config, every)
        full = offset if isinstance(offset, int) else period - 1
        full = count(config, offset, low=0, high=period) if isinstance(offset, str) else full
        layers = range(_num_layers(config))
        kinds = [FULL if layer < first or layer % period == full else kind for layer in layers]
        return kinds if last is None else [*kinds[:-1], last]

    return rule


def listed(key: str, absent: str, kind: str = FULL) -> LayerRule:
    """The layers whose numbers are under ``key`` are of a kind that attends, the others have a state.

    Without such a list, all layers are of the kind ``absent``.
    """

    def rule(config: Config) -> list[str]:
        layers, numbers = range(_num_layers(config)), config.get(key)
        if numbers is None:
            return [absent for _ in layers]
        if not isinstance(numbers, list | tuple) or not {*map(str, numbers)} <= {*map(str, layers)}:
            raise unusable(key, f"layers of 0 to {len(layers) - 1}", numbers)
        return [kind if layer in numbers else STATE for layer in layers]

    return rule


def upper_slide(config: Config) -> list[str]:
    """Layers from ``max_window_layers`` on slide, if sliding is in use (Qwen2Config)."""
    layers = range(_num_layers(config))
    if not config.get("use_sliding_window", True) or config.get("sliding_window") is None:
        return [FULL for _ in layers]
    first = count(config, "max_window_layers", low=0)
    return [SLIDING if layer >= first else FULL for layer in layers]


def every_other_lower_slides(config: Config) -> list[str]:
    """Every other layer below ``max_window_layers`` slides, if sliding is in use (Qwen2MoeConfig)."""
    layers = range(_num_layers(config))
    first = count(config, "max_window_layers", low=0) if config["use_sliding_window"] else 0
    return [SLIDING if layer < first and layer % 2 == 0 else FULL for layer in layers]


def by_letter(config: Config) -> list[str]:
    """``hybrid_override_pattern`` has a letter for each layer (NemotronHConfig).

    >>> by_letter({"hybrid_override_pattern": "M-M*"})
    ['state', 'none', 'state', 'attn']
    """
    kinds = {"M": STATE, "*": FULL, "-": NONE, "E": NONE}
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or len(pattern) >= MAX_LAYERS or set(pattern) - {*kinds}:
        raise unusable("hybrid_override_pattern", f"a letter of {' '.join(kinds)} for each layer", pattern)
    return [kinds[letter] for letter in pattern]


def numbered_from_one(config: Config) -> list[str]:
    """``linear_attn_config`` lists the layers, numbered from 1 (KimiLinearConfig)."""
    layers, given = _num_layers(config), _linear(config)
    if "full_attn_layers" not in given or "kda_layers" not in given:
        return [FULL if layer and layer % 4 == 0 else STATE for layer in range(layers)]
    listed = {key: given[key] for key in ("full_attn_layers", "kda_layers")}
    lists = [numbers if isinstance(numbers, list | tuple) else [None] for numbers in listed.values()]
    if sorted(str(number) for numbers in lists for number in numbers) != sorted(map(str, range(1, layers + 1))):
        raise unusable("linear_attn_config", f"each of the layers 1 to {layers} once", listed)
    return [FULL if layer + 1 in listed["full_attn_layers"] else STATE for layer in range(layers)]


def _linear(config: Config) -> Config:
    """What a Kimi file states about its linear layers."""
    given = config.get("linear_attn_config")
    if given is not None and not isinstance(given, Mapping):
        raise unusable("linear_attn_config", "a mapping", given)
    return given or {}


def by_flags(key: str, kinds: Mapping[int, str], otherwise: LayerRule | None = None) -> LayerRule:
    """A number for each layer under ``key``; another rule for files that lack it.

    >>> by_flags("attn_type_list", {0: STATE, 1: FULL})({"num_hidden_layers": 2, "attn_type_list": [0, 1]})
    ['state', 'attn']
    """

    def rule(config: Config) -> list[str]:
        layers, flags = _num_layers(config), config.get(key)
        if not flags and otherwise is not None:
            return otherwise(config)
        if not isinstance(flags, list | tuple) or len(flags) != layers or not {*map(str, flags)} <= {*map(str, kinds)}:
            raise unusable(key, f"{layers} of {', '.join(map(str, kinds))}", flags)
        return [kinds[flag] for flag in flags]

    return rule


def repeated(config: Config) -> list[str]:
    """``sliding_window_pattern`` is a number, or a letter for each layer of a period (Exaone4Config)."""
    pattern = config.get("sliding_window_pattern")
    if config.get("sliding_window") is None:
        return all_of(FULL)(config)
    if not isinstance(pattern, str):
        return all_but_each(SLIDING, "sliding_window_pattern")(config)
    if not pattern or {*pattern} - {*"LG"}:
        raise unusable("sliding_window_pattern", "a number, or letters of L and G", pattern)
    layers = _num_layers(config)
    return [SLIDING if pattern[layer % len(pattern)] == "L" and layer < layers - 1 else FULL for layer in range(layers)]


def after_dense(config: Config) -> list[str]:
    """The first layers may have a pattern of their own (Cohere2MoeConfig)."""
    layers, dense = _num_layers(config), count(config, "first_k_dense_replace", 0, low=0)
    if dense > layers:
        raise unusable("first_k_dense_replace", f"at most {layers} layers", dense)
    first, rest = (
        all_but_each(SLIDING, key)({**config, "num_hidden_layers": number}) if number else []
        for key, number in (("prefix_dense_sliding_window_pattern", dense), ("sliding_window_pattern", layers - dense))
    )
    return first + rest


def from_last(config: Config) -> list[str]:
    """The last layer attends to all positions, and each fourth before it."""
    return all_but_each(SLIDING, 4, 0)(config)[::-1]


def conv_and_slide(config: Config) -> list[str]:
    """Every other layer attends, the first of them in a window; the rest are convolutions (Lfm3Config)."""
    kinds = {0: SLIDING, 2: FULL}
    return [kinds.get(layer % 4, STATE) if layer else STATE for layer in range(_num_layers(config))]


def _num_layers(config: Config) -> int:
    return count(config, NUM_LAYERS, high=MAX_LAYERS)


# The table

_INDEXERS: Final = MappingProxyType(
    {"indexer_types": None, "index_topk_pattern": None, "index_topk_freq": 1, "index_skip_topk_offset": 2}
)
_SLIDING_HEADS: Final = dict.fromkeys(("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"))
_KIMI: Final = dict.fromkeys(("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"))

_SHARED: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("cohere_compass_text laguna mellum", {"layers": all_of(FULL)}),
    ("cwm granite_swa granitemoe_swa", {"layers": all_but_each(SLIDING, 4, 0)}),
    ("deepseek_v32 glm_moe_dsa", {"keys": shared_indexers, "defaults": _INDEXERS}),
    ("exaone4 exaone_moe", {"layers": repeated}),
    ("gemma2 gpt_oss vaultgemma", {"layers": all_but_each(SLIDING, 2)}),
    ("gemma3n_text kolibri1", {"layers": all_but_each(SLIDING, 5)}),
    ("hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text", {"defaults": {"attention_head_dim": None}}),
    ("lfm2 lfm2_moe", {"state": short_conv, "layers": listed("full_attn_idxs", FULL)}),
    (
        "minimax_text_01 minimax_m1",
        {"state": lightning_state, "layers": by_flags("attn_type_list", {0: STATE, 1: FULL})},
    ),
    ("muse_glimmer_text muse_spark_text", {"layers": from_last}),
    ("olmo3", {"layers": all_but_each(SLIDING, 4)}),
    (
        "qwen2 qwen3 qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text deepseek_ocr2_text dots1 mimo",
        {"layers": upper_slide},
    ),
    (
        "qwen3_next qwen3_5_text qwen3_5_moe_text",
        {
            "state": delta_state,
            "layers": all_but_each(STATE, "full_attention_interval"),
            "defaults": {"full_attention_interval": 4},
        },
    ),
    (
        "gemma4_text gemma4_unified_text diffusion_gemma_text",
        {
            "layers": all_but_each(SLIDING, 6),
            "keys": global_heads,
            "last": FULL,
            "defaults": {"global_head_dim": 512, "num_global_key_value_heads": None},
        },
    ),
    (
        "mamba falcon_mamba",
        {"state": partial(mamba1_state, channels="intermediate_size"), "layers": all_of(STATE)},
    ),
)
"""What several families share, as in :data:`SPECIAL`."""

SPECIAL: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        **{model_type: special for model_types, special in _SHARED for model_type in model_types.split()},
        "qwen2_moe": {"layers": every_other_lower_slides},
        "afmoe": {"layers": all_but_each(SLIDING, "global_attn_every_n_layers")},
        "beam": {"layers": all_but_each(SLIDING, 6, last=FULL)},
        "cohere2": {
            "keys": window_of("sliding_window", lambda tokens: tokens + 1),
            "layers": all_but_each(SLIDING, "sliding_window_pattern"),
            "defaults": {"sliding_window_pattern": 4},
        },
        "cohere2_moe": {"layers": after_dense, "keys": window_of("sliding_window", lambda tokens: tokens + 1)},
        "flint": {"layers": all_but_each(SLIDING, 4, 1, first=2, last=FULL)},
        "gemma3_text": {
            "layers": all_but_each(SLIDING, "sliding_window_pattern"),
            "defaults": {"sliding_window_pattern": 6},
        },
        "mimo_v2_flash": {
            "layers": by_flags("hybrid_layer_pattern", {0: FULL, 1: SLIDING}, all_but_each(SLIDING, 6, first=1)),
            "keys": sliding_heads,
            "defaults": {**_SLIDING_HEADS, "hybrid_layer_pattern": None, "sliding_window_size": None},
        },
        "modernbert-decoder": {
            "layers": all_but_each(SLIDING, "global_attn_every_n_layers", 0),
            "keys": window_of(
                "local_attention", lambda tokens: tokens // 2
            ),  # both directions (ModernBertDecoderConfig)
            "defaults": {"global_attn_every_n_layers": 3, "local_attention": 128, "sliding_window": None},
        },
        "llama4_text": {
            "layers": by_flags(
                "no_rope_layers", {0: FULL, 1: SLIDING}, all_but_each(SLIDING, "no_rope_layer_interval")
            ),
            "keys": window_of("attention_chunk_size"),  # one chunk at most (Llama4TextConfig)
        },
        "longcat_flash": {"keys": two_in_each},
        "falcon": {"keys": falcon_heads},
        "gpt_bigcode": {"keys": falcon_heads, "defaults": {"num_key_value_heads": None}},
        "dbrx": {"keys": nested_heads, "defaults": {"num_key_value_heads": None}},
        "hy_v4": {"keys": shared_indexers, "defaults": {**_INDEXERS, "index_topk_freq": 4}},
        "dots3_note_text": {
            "layers": all_but_each(SLIDING, 4, 1, first=2),
            "defaults": {
                "sliding_window": 512,
                "swa_kv_lora_rank": 1024,
                "swa_qk_rope_head_dim": 64,
                "use_dsa": None,
                **_SLIDING_HEADS,
            },
        },
        "mamba2": {"state": mamba2_state, "layers": all_of(STATE)},
        "jamba": {"state": mamba1_state, "layers": all_but_each(STATE, "attn_layer_period", "attn_layer_offset")},
        "nemotron_h": {
            "state": mamba2_state,
            "attention": stated_window,
            "layers": by_letter,
            "defaults": dict.fromkeys(
                ("hybrid_override_pattern", "attention_head_dim", "mamba_n_groups", "mamba_d_conv")
            ),
        },
        "bamba": {"state": granite_state, "layers": listed("attn_layer_indices", STATE)},
        "granitemoehybrid": {"state": granite_state, "layers": all_of(STATE)},
        "falcon_h1": {"state": granite_state, "layers": all_of(BOTH)},
        "zamba2": {
            "state": granite_state,
            "layers": listed("hybrid_layer_ids", STATE, BOTH),
            "keys": query_width,
            "defaults": dict.fromkeys(("hybrid_layer_ids", "attention_head_dim", "kv_channels", "mamba_headdim")),
        },
        "lfm3": {"state": short_conv, "layers": conv_and_slide},
        "olmo_hybrid": {"state": delta_state, "layers": all_but_each(STATE, 4), "keys": olmo_keys},
        "kimi_linear": {
            "state": kimi_state,
            "layers": numbered_from_one,
            "keys": kimi_keys,
            "defaults": {"linear_attn_config": None},
        },
        "bailing_hybrid": {
            "state": bailing_state,
            "layers": all_but_each(STATE, "layer_group_size"),
            "keys": bailing_keys,
            "defaults": _KIMI,
        },
        "minimax": {"state": lightning_state, "layers": all_but_each(STATE, 2, 0)},
        "minimax_m2": {
            "layers": by_flags("attn_type_list", {1: FULL}, all_of(FULL)),
            "defaults": {"attn_type_list": None},
        },
        "chatglm": {"keys": chatglm_heads},
        "step3p5": {"layers": all_of(FULL), "keys": grouped_heads, "defaults": {"num_attention_groups": None}},
    }
)
"""What is particular to a family, as arguments of :class:`Family`."""


def _family(model_type: str, defaults: Config) -> Family:
    attends = sparse_mla if "index_head_dim" in defaults else mla if "kv_lora_rank" in defaults else kv_heads
    special = SPECIAL.get(model_type, {})
    defaults = {**defaults, **special.get("defaults", {})}
    return Family(**{"layers": all_slide, "attention": attends, **special, "defaults": defaults})


_TABLE: Final = json.loads(resources.files("kvplan.models").joinpath("families.json").read_bytes())

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {name: _family(name, keys) for part in ("families", "others") for name, keys in _TABLE[part].items()}
)
"""How to read each known value of ``model_type``."""

OUTER: Final[Mapping[str, str]] = MappingProxyType(_TABLE["outer"])
"""The family of a decoder without a ``model_type``, by the ``model_type`` of the file around it."""

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {model_type: reason for reason, types in _TABLE["refused"].items() for model_type in types}
)
"""Why the files of a ``model_type`` cannot be read."""
