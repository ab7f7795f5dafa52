"""Families: for each ``model_type``, which keys of a config.json count, and what each kind of layer caches.

Defaults and rules are those of transformers 5.23 (``configuration_*.py`` and, for sizes that no key states,
``modeling_*.py`` of each family): ``num_key_value_heads: null`` means ``num_attention_heads``, ``head_dim: null``
means ``hidden_size // num_attention_heads``. Keys that every published file states (``num_hidden_layers``) have no
default here: a guess would plan another model's cache.

SSM states are fp32 unless ``mamba_ssm_cache_dtype`` or ``mamba_ssm_dtype`` says otherwise, as the reference kernels
keep them; convolutions have the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan.caches import FULL, SLIDING, STATE, Layer, attention, latent, sparse_latent
from kvplan.keys import Config, count, dtype, first_of, unusable
from kvplan.kinds import (
    ALL_FULL,
    BOTH,
    NONE,
    Kinds,
    all_of,
    by_interval,
    by_letter,
    by_period,
    each_nth,
    every_other_lower,
    last_is_full,
    linear_config,
    numbered_from_one,
    sliding,
    upper,
)
from kvplan.states import delta, mamba1, mamba2

Caches = Callable[[Config, str], Mapping[str, Layer]]
"""What a layer of each kind caches, given the dtype of the weights."""


def _heads(config: Config, group: str = FULL, window: int | None = None) -> Layer:
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


def _window(config: Config) -> int | None:
    return count(config, "sliding_window") if config.get("sliding_window") is not None else None


def _attends(config: Config, weights: str) -> dict[str, Layer]:
    return {FULL: _heads(config), SLIDING: _heads(config, SLIDING, _window(config))}


def _gemma4(config: Config, weights: str) -> dict[str, Layer]:
    """Full layers have a head size of their own, and KV heads of their own only where K equals V."""
    of_full = {**config, "head_dim": config["global_head_dim"]}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        of_full["num_key_value_heads"] = config["num_global_key_value_heads"]
    stated = config.get("per_layer_config")
    if stated is not None:  # newer files spell out, for each full layer, what it has of its own
        values = list(stated.values()) if isinstance(stated, Mapping) else []
        if not values or not isinstance(values[0], Mapping) or any(value != values[0] for value in values):
            raise unusable("per_layer_config", "a mapping of equal mappings, one for each full layer", stated)
        of_full = {**config, **values[0]}
    return {FULL: _heads(of_full), SLIDING: _heads(config, SLIDING, _window(config))}


def _latent(config: Config, weights: str) -> dict[str, Layer]:
    return {FULL: latent(count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim"))}


def _sparse(config: Config, weights: str) -> dict[str, Layer]:
    rank, rope = count(config, "kv_lora_rank"), count(config, "qk_rope_head_dim")
    return {FULL: sparse_latent(rank, rope, count(config, "index_head_dim"))}


def _ssm_dtype(config: Config) -> str:
    return dtype(config, "float32", ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"))


def _steps(config: Config, *keys: str) -> int:
    """A convolution of width ``w`` keeps its last ``w - 1`` inputs."""
    return count(config, first_of(config, keys), low=2) - 1


def _channels(config: Config, *keys: str) -> int:
    """The width of a Mamba layer, stated under the first of ``keys``, or ``expand`` times that of the model."""
    if len(keys) > 1 and config.get(keys[0]) is not None:
        return count(config, keys[0])
    return count(config, keys[-1]) * count(config, "hidden_size")


def _mamba(config: Config, weights: str) -> dict[str, Layer]:
    channels = _channels(config, "intermediate_size", "expand")
    steps = _steps(config, "conv_kernel")
    return {STATE: mamba1(channels, count(config, "state_size"), steps, weights, _ssm_dtype(config))}


def _jamba(config: Config, weights: str) -> dict[str, Layer]:
    channels, steps = _channels(config, "mamba_expand"), _steps(config, "mamba_d_conv")
    state = mamba1(channels, count(config, "mamba_d_state"), steps, weights, _ssm_dtype(config))
    return {FULL: _heads(config), STATE: state}


def _by_head(config: Config, weights: str, heads: int, dim: int, groups_key: str, state_key: str, steps: int) -> Layer:
    groups = count(config, groups_key)
    if heads % groups:
        raise unusable(groups_key, f"a divisor of {heads} heads", groups)
    return mamba2(heads, dim, groups, count(config, state_key), steps, weights, _ssm_dtype(config))


def _mamba2(config: Config, weights: str) -> dict[str, Layer]:
    heads, dim, steps = count(config, "num_heads"), count(config, "head_dim"), _steps(config, "conv_kernel")
    return {STATE: _by_head(config, weights, heads, dim, "n_groups", "state_size", steps)}


def _nemotron(config: Config, weights: str) -> dict[str, Layer]:
    heads, dim = count(config, "mamba_num_heads"), count(config, "mamba_head_dim")
    groups, steps = first_of(config, ("mamba_n_groups", "n_groups")), _steps(config, "mamba_d_conv", "conv_kernel")
    state = _by_head(config, weights, heads, dim, groups, "ssm_state_size", steps)
    head_dim = config[first_of(config, ("attention_head_dim", "head_dim"))]  # the name in older files, and the newer
    return {FULL: _heads({**config, "head_dim": head_dim}), STATE: state, NONE: ()}


def _granite(config: Config, weights: str) -> dict[str, Layer]:
    channels, heads = _channels(config, "mamba_d_ssm", "mamba_expand"), count(config, "mamba_n_heads")
    stated = config.get("mamba_d_head") not in (None, "auto")
    dim = count(config, "mamba_d_head") if stated else channels // heads
    if dim * heads != channels:
        raise unusable("mamba_n_heads", f"heads that make up the {channels} channels", heads)
    state = _by_head(config, weights, heads, dim, "mamba_n_groups", "mamba_d_state", _steps(config, "mamba_d_conv"))
    full = _heads(config)
    return {FULL: full, STATE: state, BOTH: (*full, *state)}


def _delta(config: Config, weights: str) -> dict[str, Layer]:
    heads = [count(config, f"linear_num_{side}_heads") for side in ("key", "value")]
    dims = [count(config, f"linear_{side}_head_dim") for side in ("key", "value")]
    if heads[1] % heads[0]:
        raise unusable("linear_num_key_heads", f"a divisor of linear_num_value_heads {heads[1]}", heads[0])
    steps = _steps(config, "linear_conv_kernel_dim")
    state = delta(heads[0], dims[0], heads[1], dims[1], steps, weights, _ssm_dtype(config))
    return {FULL: _heads(config), STATE: state}


def _kimi(config: Config, weights: str) -> dict[str, Layer]:
    given = linear_config(config)
    linear = {
        "heads": given.get("num_heads", config["linear_num_heads"]),
        "dim": given.get("head_dim", config["linear_head_dim"]),
        "conv": given.get("short_conv_kernel_size", config["linear_conv_kernel_dim"]),
    }
    heads, dim = count(linear, "heads"), count(linear, "dim")
    state = delta(heads, dim, heads, dim, _steps(linear, "conv"), weights, _ssm_dtype(config))
    return {**_latent(config, weights), STATE: state}


@attrs.frozen
class Family:
    """How a ``model_type`` is read: its defaults, the kinds of its layers where no list says, and their caches.

    ``types`` are the keys of a list of layer types, the first that has a value counts.
    """

    defaults: Config
    kinds: Kinds = ALL_FULL
    caches: Caches = _attends
    types: tuple[str, ...] = ("layer_types",)


def _attention(heads: int | None, head_dim: int | None = None, kinds: Kinds = ALL_FULL, **defaults: Any) -> Family:
    return Family({"num_key_value_heads": heads, "head_dim": head_dim, **defaults}, kinds)


_QWEN: Final[Config] = MappingProxyType({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28})
_MAMBA: Final = Family({"expand": 2, "conv_kernel": 4, "state_size": 16}, all_of(STATE), _mamba, ())
_GDN: Final[Config] = MappingProxyType(
    {
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
)
_GRANITE: Final[Config] = MappingProxyType(
    {"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 128}
)
_LATENT: Final = Family({}, caches=_latent)
_BLOCK_TYPES: Final = ("layers_block_type", "layer_types")

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": _attention(None),
        "mistral": _attention(8),
        "ministral": _attention(8),
        "ministral3": _attention(8, 128),
        "mixtral": _attention(8),
        "phi3": _attention(None),
        "qwen2": _attention(32, kinds=sliding(upper), **_QWEN),
        "qwen2_moe": _attention(16, kinds=sliding(every_other_lower), **_QWEN),
        "qwen3": _attention(32, 128, sliding(upper), **_QWEN),
        "qwen3_moe": _attention(4),
        "gemma2": _attention(
            4, 256, sliding(lambda layer, _: layer % 2 == 0), num_attention_heads=8, sliding_window=4096
        ),
        "gemma3_text": _attention(
            4,
            256,
            sliding(each_nth("sliding_window_pattern")),
            num_attention_heads=8,
            sliding_window_pattern=6,
            sliding_window=4096,
        ),
        "gemma3n_text": _attention(
            2,
            256,
            sliding(each_nth("sliding_window_pattern")),
            num_attention_heads=8,
            sliding_window_pattern=5,
            sliding_window=512,
            num_kv_shared_layers=15,
        ),
        "gemma4_text": Family(
            {
                "num_key_value_heads": 4,
                "head_dim": 256,
                "global_head_dim": 512,
                "num_attention_heads": 8,
                "sliding_window_pattern": 6,
                "sliding_window": 512,
                "num_kv_shared_layers": 0,
            },
            last_is_full,
            _gemma4,
        ),
        "gpt_oss": _attention(8, 64, sliding(lambda layer, _: layer % 2 == 0), sliding_window=128),
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "deepseek_v32": Family({"index_head_dim": 128}, caches=_sparse),
        "mamba": _MAMBA,
        "falcon_mamba": _MAMBA,
        "mamba2": Family(
            {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4},
            all_of(STATE),
            _mamba2,
            (),
        ),
        "jamba": Family(
            {
                "num_key_value_heads": 8,
                "attn_layer_period": 8,
                "attn_layer_offset": 4,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
            },
            by_period,
            _jamba,
            (),
        ),
        "nemotron_h": Family(
            {
                "num_key_value_heads": 8,
                "head_dim": 128,
                "ssm_state_size": 128,
                "mamba_num_heads": 128,
                "mamba_head_dim": 64,
                "n_groups": 8,
                "conv_kernel": 4,
            },
            by_letter,
            _nemotron,
            _BLOCK_TYPES,
        ),
        "granitemoehybrid": Family(_GRANITE, all_of(STATE), _granite, _BLOCK_TYPES[::-1]),
        "falcon_h1": Family({**_GRANITE, "num_key_value_heads": 8, "mamba_d_ssm": 1024}, all_of(BOTH), _granite, ()),
        "qwen3_next": Family({"num_key_value_heads": 2, **_GDN}, by_interval, _delta),
        "qwen3_5_text": Family({"num_key_value_heads": 4, **_GDN}, by_interval, _delta),
        "qwen3_5_moe_text": Family({"num_key_value_heads": 2, **_GDN}, by_interval, _delta),
        "kimi_linear": Family(
            {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}, numbered_from_one, _kimi
        ),
    }
)
"""The readable values of ``model_type``."""

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
"""The family of a ``text_config`` that does not state its own, by the outer ``model_type``."""
