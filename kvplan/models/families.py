"""Model families: for each ``model_type`` of a config.json, which layers cache what.

:data:`FAMILIES` is the table to add a family to. An entry says which function reads the cache of each kind of layer,
which rule gives the kind of each layer if the file has no list of them, and which defaults the file's keys have. The
readers of caches and the rules are the functions above the table.

Defaults and rules are those of transformers 5.23 (``configuration_*.py`` of each family, and ``modeling_*.py`` for
sizes that no key states): ``num_key_value_heads: null`` means ``num_attention_heads``, ``head_dim: null`` means
``hidden_size // num_attention_heads``. Keys that every published file states (``num_hidden_layers``) have no default: a
guess would plan the cache of another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan.models.config import BOTH, MAX_LAYERS, NONE, Config, Family, Keys, LayerRule, count, dtype, key_of, unusable
from kvplan.models.tensors import FULL, SLIDING, STATE, Layer, attention, delta, latent, mamba1, mamba2, sparse_latent

# What a layer caches


def kv_heads(config: Config, group: str = FULL, window: int | None = None) -> Layer:
    """K and V of each head."""
    given = config.get("num_key_value_heads")
    heads = count(config, "num_key_value_heads" if given is not None else "num_attention_heads")
    query_heads = count(config, "num_attention_heads", heads)
    if query_heads % heads:
        raise unusable("num_key_value_heads", f"a divisor of num_attention_heads {query_heads}", heads)
    if config.get("head_dim") is not None:
        return attention(heads, count(config, "head_dim"), group, window)
    dim, rest = divmod(count(config, "hidden_size"), count(config, "num_attention_heads"))
    if rest or not dim:
        raise unusable("hidden_size", f"a multiple of num_attention_heads {query_heads}", config["hidden_size"])
    return attention(heads, dim, group, window)


def kv_heads_in_window(config: Config) -> Layer:
    """K and V of each head, of a layer that attends to the last ``sliding_window`` tokens."""
    window = count(config, "sliding_window") if config.get("sliding_window") is not None else None
    return kv_heads(config, SLIDING, window)


def gemma4_full(config: Config) -> Layer:
    """Full layers have their own head size, and their own number of KV heads only if K equals V."""
    of_full = {**config, "head_dim": config["global_head_dim"]}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        of_full["num_key_value_heads"] = config["num_global_key_value_heads"]
    stated = config.get("per_layer_config")
    if stated is not None:  # newer files state the exceptions of each full layer
        values = list(stated.values()) if isinstance(stated, Mapping) else []
        if not values or not isinstance(values[0], Mapping) or any(value != values[0] for value in values):
            raise unusable("per_layer_config", "a mapping of equal mappings, one for each full layer", stated)
        of_full = {**config, **values[0]}
    return kv_heads(of_full)


def nemotron_heads(config: Config) -> Layer:
    """Older files call the head size ``attention_head_dim``."""
    return kv_heads({**config, "head_dim": config.get(key_of(config, ("attention_head_dim", "head_dim")))})


def mla(config: Config) -> Layer:
    """One latent for all heads."""
    return latent(count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim"))


def sparse_mla(config: Config) -> Layer:
    """A latent and the keys of an indexer."""
    rank, rope = count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim")
    return sparse_latent(rank, rope, count(config, "index_head_dim"))


def no_cache(config: Config) -> Layer:
    """Nothing."""
    return ()


def heads_and_state(config: Config) -> Layer:
    """K and V of each head, and a state."""
    return (*kv_heads(config), *granite_state(config))


def mamba1_state(config: Config, *, channels: str | None, expand: str, state: str, conv: str) -> Layer:
    """The state of a Mamba layer. Its width is under ``channels``, or it is ``expand`` times the model's."""
    width, steps = _channels(config, channels, expand), _steps(config, conv)
    return mamba1(width, count(config, state), steps, *_dtypes(config))


def mamba2_state(config: Config, *, heads: str, dim: str, groups: Keys, state: str, conv: Keys) -> Layer:
    """The state of a Mamba-2 layer."""
    num_heads, width, steps = count(config, heads), count(config, dim), _steps(config, conv)
    num_groups = count(config, groups)
    if num_heads % num_groups:
        raise unusable(key_of(config, groups), f"a divisor of {num_heads} heads", num_groups)
    return mamba2(num_heads, width, num_groups, count(config, state), steps, *_dtypes(config))


def granite_state(config: Config) -> Layer:
    """The state of a Mamba-2 layer whose file states how wide all heads are together, and maybe how wide each is."""
    channels, heads = _channels(config, "mamba_d_ssm", "mamba_expand"), count(config, "mamba_n_heads")
    stated = config.get("mamba_d_head") not in (None, "auto")
    dim = count(config, "mamba_d_head") if stated else channels // heads
    if dim * heads != channels:
        raise unusable("mamba_n_heads", f"heads that make up the {channels} channels", heads)
    return mamba2_state(
        {**config, "mamba_d_head": dim},
        heads="mamba_n_heads",
        dim="mamba_d_head",
        groups="mamba_n_groups",
        state="mamba_d_state",
        conv="mamba_d_conv",
    )


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
    given = {
        **config,
        "num_heads": config["linear_num_heads"],
        "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        **_linear(config),
    }
    heads, dim = count(given, "num_heads"), count(given, "head_dim")
    return delta(heads, dim, heads, dim, _steps(given, "short_conv_kernel_size"), *_dtypes(config))


def _channels(config: Config, stated: str | None, expand: str) -> int:
    if stated is not None and config.get(stated) is not None:
        return count(config, stated)
    return count(config, expand) * count(config, "hidden_size")


def _steps(config: Config, keys: Keys) -> int:
    """A convolution of width ``w`` stores its last ``w - 1`` inputs."""
    return count(config, keys, low=2) - 1


def _dtypes(config: Config) -> tuple[str, str]:
    """Of the convolution and of the SSM state; Nemotron-H and Qwen3.5 files may state the second."""
    return dtype(config, "bfloat16"), dtype(config, "float32", ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))


# Of which kind each layer is


def all_of(kind: str) -> LayerRule:
    """All layers are of one kind."""
    return lambda config: [kind] * _num_layers(config)


all_full: Final = all_of(FULL)


def all_but_each(kind: str, every: str | int, offset: str | None = None) -> LayerRule:
    """All layers are of one kind, except that one of ``every`` attends to all positions: at ``offset``, or the last.

    >>> all_but_each(SLIDING, "sliding_window_pattern")({"num_hidden_layers": 4, "sliding_window_pattern": 3})
    ['swa', 'swa', 'attn', 'swa']
    """

    def rule(config: Config) -> list[str]:
        period = every if isinstance(every, int) else count(config, every)
        full = period - 1 if offset is None else count(config, offset, low=0, high=period)
        return [FULL if layer % period == full else kind for layer in range(_num_layers(config))]

    return rule


def all_slide(config: Config) -> list[str]:
    """All layers slide if the file has a window in use, else none (MistralConfig, Qwen3MoeConfig)."""
    in_use = bool(config.get("use_sliding_window", True)) and config.get("sliding_window") is not None
    return [SLIDING if in_use else FULL] * _num_layers(config)


def upper_slide(config: Config) -> list[str]:
    """Layers from ``max_window_layers`` on slide, if sliding is in use (Qwen2Config)."""
    layers = range(_num_layers(config))
    if not config["use_sliding_window"] or config["sliding_window"] is None:
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


def _num_layers(config: Config) -> int:
    return count(config, "num_hidden_layers", high=MAX_LAYERS)


# The table


def _attention(heads: int | None, head_dim: int | None = None, layers: LayerRule = all_full, **more: Any) -> Family:
    """A family whose layers all have K and V by head, with the defaults of its keys."""
    caches = {FULL: kv_heads, SLIDING: kv_heads_in_window}
    return Family(caches, layers, {"num_key_value_heads": heads, "head_dim": head_dim, **more})


def _gemma(heads: int, pattern: int, window: int, **more: int) -> Family:
    """A family in which one of ``pattern`` layers attends to all positions, and the others slide."""
    layers = all_but_each(SLIDING, "sliding_window_pattern")
    more |= {"num_attention_heads": 8, "sliding_window_pattern": pattern, "sliding_window": window}
    return _attention(heads, 256, layers, **more)


def _gated_delta(heads: int) -> Family:
    """A family in which one of four layers attends, and the others are gated delta layers."""
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    return Family({STATE: delta_state, FULL: kv_heads}, all_but_each(STATE, "full_attention_interval"), defaults)


_QWEN: Final[Config] = MappingProxyType({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28})
_MAMBA: Final = Family(
    {
        STATE: partial(
            mamba1_state, channels="intermediate_size", expand="expand", state="state_size", conv="conv_kernel"
        )
    },
    all_of(STATE),
    {"expand": 2, "conv_kernel": 4, "state_size": 16},
    lists=None,
)
_GRANITE: Final[Config] = MappingProxyType(
    {"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 128}
)
_GRANITE_CACHES: Final = MappingProxyType({STATE: granite_state, FULL: kv_heads, BOTH: heads_and_state})

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": _attention(None),
        "mistral": _attention(8, layers=all_slide, sliding_window=4096),
        "ministral": _attention(8, layers=all_slide, sliding_window=4096),
        "ministral3": _attention(8, 128, all_slide),
        "mixtral": _attention(8, layers=all_slide),
        "phi3": _attention(None, layers=all_slide),
        "qwen2": _attention(32, layers=upper_slide, **_QWEN),
        "qwen2_moe": _attention(16, layers=every_other_lower_slides, **_QWEN),
        "qwen3": _attention(32, 128, upper_slide, **_QWEN),
        "qwen3_moe": _attention(4, layers=all_slide, use_sliding_window=False, sliding_window=4096),
        "gemma2": _attention(4, 256, all_but_each(SLIDING, 2), num_attention_heads=8, sliding_window=4096),
        "gemma3_text": _gemma(4, 6, 4096),
        "gemma3n_text": _gemma(2, 5, 512, num_kv_shared_layers=15),
        "gemma4_text": attrs.evolve(
            _gemma(4, 6, 512, global_head_dim=512, num_kv_shared_layers=0),
            caches={FULL: gemma4_full, SLIDING: kv_heads_in_window},
            last=FULL,
        ),
        "gpt_oss": _attention(8, 64, all_but_each(SLIDING, 2), sliding_window=128),
        "deepseek_v2": Family({FULL: mla}, all_full),
        "deepseek_v3": Family({FULL: mla}, all_full),
        "deepseek_v32": Family({FULL: sparse_mla}, all_full, {"index_head_dim": 128}),
        "mamba": _MAMBA,
        "falcon_mamba": _MAMBA,
        "mamba2": Family(
            {
                STATE: partial(
                    mamba2_state,
                    heads="num_heads",
                    dim="head_dim",
                    groups="n_groups",
                    state="state_size",
                    conv="conv_kernel",
                )
            },
            all_of(STATE),
            {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4},
            lists=None,
        ),
        "jamba": Family(
            {
                STATE: partial(
                    mamba1_state, channels=None, expand="mamba_expand", state="mamba_d_state", conv="mamba_d_conv"
                ),
                FULL: kv_heads,
            },
            all_but_each(STATE, "attn_layer_period", "attn_layer_offset"),
            {
                "num_key_value_heads": 8,
                "attn_layer_period": 8,
                "attn_layer_offset": 4,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
            },
            lists=None,
        ),
        "nemotron_h": Family(
            {
                STATE: partial(
                    mamba2_state,
                    heads="mamba_num_heads",
                    dim="mamba_head_dim",
                    groups=("mamba_n_groups", "n_groups"),
                    state="ssm_state_size",
                    conv=("mamba_d_conv", "conv_kernel"),
                ),
                FULL: nemotron_heads,
                NONE: no_cache,
            },
            by_letter,
            {
                "num_key_value_heads": 8,
                "head_dim": 128,
                "ssm_state_size": 128,
                "mamba_num_heads": 128,
                "mamba_head_dim": 64,
                "n_groups": 8,
                "conv_kernel": 4,
            },
            lists=("layers_block_type", "layer_types"),
        ),
        "granitemoehybrid": Family(
            _GRANITE_CACHES, all_of(STATE), _GRANITE, lists=("layer_types", "layers_block_type")
        ),
        "falcon_h1": Family(
            _GRANITE_CACHES, all_of(BOTH), {**_GRANITE, "num_key_value_heads": 8, "mamba_d_ssm": 1024}, lists=None
        ),
        "qwen3_next": _gated_delta(2),
        "qwen3_5_text": _gated_delta(4),
        "qwen3_5_moe_text": _gated_delta(2),
        "kimi_linear": Family(
            {STATE: kimi_state, FULL: mla},
            numbered_from_one,
            {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
        ),
    }
)
"""How to read each known value of ``model_type``."""

NESTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gemma3": "gemma3_text",
        "gemma3n": "gemma3n_text",
        "gemma4": "gemma4_text",
        "mistral3": "mistral",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
    }
)
"""The family of a ``text_config`` without a ``model_type``, by the outer ``model_type``."""
