"""Families: for each ``model_type``, which defaults its config.json has, and the kinds of its layers and their caches.

Defaults and rules are those of transformers 5.23 (``configuration_*.py`` of each family). Keys that every published
file states (``num_hidden_layers``) have no default here: a guess would plan another model's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvplan.models.keys import Config
from kvplan.models.kinds import (
    ALL_FULL,
    BOTH,
    Kinds,
    all_of,
    all_slide,
    by_interval,
    by_letter,
    by_period,
    each_nth,
    every_other_lower,
    numbered_from_one,
    sliding,
    upper,
)
from kvplan.models.layers import (
    Caches,
    attends,
    gated_delta,
    gemma4,
    granite,
    jamba,
    kimi,
    latents,
    mamba,
    mamba2,
    nemotron,
    sparse,
)
from kvplan.models.tensors import FULL, STATE


@attrs.frozen
class Family:
    """How a ``model_type`` is read: its defaults, the kinds of its layers where no list says, and their caches.

    ``types`` are the keys of a list of layer types, the first that has a value counts. ``last`` is the kind of the last
    layer, whatever list or rule says otherwise.
    """

    defaults: Config
    kinds: Kinds = ALL_FULL
    caches: Caches = attends
    types: tuple[str, ...] = ("layer_types",)
    last: str | None = None


def _attention(heads: int | None, head_dim: int | None = None, kinds: Kinds = ALL_FULL, **defaults: Any) -> Family:
    return Family({"num_key_value_heads": heads, "head_dim": head_dim, **defaults}, kinds)


_QWEN: Final[Config] = MappingProxyType({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28})
_MAMBA: Final = Family({"expand": 2, "conv_kernel": 4, "state_size": 16}, all_of(STATE), mamba, ())
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
_LATENT: Final = Family({}, caches=latents)
_BLOCK_TYPES: Final = ("layers_block_type", "layer_types")

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "llama": _attention(None),
        "mistral": _attention(8, kinds=all_slide, sliding_window=4096),
        "ministral": _attention(8, kinds=all_slide, sliding_window=4096),
        "ministral3": _attention(8, 128, all_slide),
        "mixtral": _attention(8, kinds=all_slide),
        "phi3": _attention(None, kinds=all_slide),
        "qwen2": _attention(32, kinds=sliding(upper), **_QWEN),
        "qwen2_moe": _attention(16, kinds=sliding(every_other_lower), **_QWEN),
        "qwen3": _attention(32, 128, sliding(upper), **_QWEN),
        "qwen3_moe": _attention(4, kinds=all_slide, use_sliding_window=False, sliding_window=4096),
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
            sliding(each_nth("sliding_window_pattern")),
            gemma4,
            last=FULL,
        ),
        "gpt_oss": _attention(8, 64, sliding(lambda layer, _: layer % 2 == 0), sliding_window=128),
        "deepseek_v2": _LATENT,
        "deepseek_v3": _LATENT,
        "deepseek_v32": Family({"index_head_dim": 128}, caches=sparse),
        "mamba": _MAMBA,
        "falcon_mamba": _MAMBA,
        "mamba2": Family(
            {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4},
            all_of(STATE),
            mamba2,
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
            jamba,
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
            nemotron,
            _BLOCK_TYPES,
        ),
        "granitemoehybrid": Family(_GRANITE, all_of(STATE), granite, _BLOCK_TYPES[::-1]),
        "falcon_h1": Family({**_GRANITE, "num_key_value_heads": 8, "mamba_d_ssm": 1024}, all_of(BOTH), granite, ()),
        "qwen3_next": Family({"num_key_value_heads": 2, **_GDN}, by_interval, gated_delta),
        "qwen3_5_text": Family({"num_key_value_heads": 4, **_GDN}, by_interval, gated_delta),
        "qwen3_5_moe_text": Family({"num_key_value_heads": 2, **_GDN}, by_interval, gated_delta),
        "kimi_linear": Family(
            {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}, numbered_from_one, kimi
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
