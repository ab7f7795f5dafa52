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
from collections.abc import Mapping
from functools import partial
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

from kvplan.models.caches import (
    bailing_state,
    block_indexed,
    chunked_heads,
    delta_state,
    granite_state,
    kimi_state,
    kv_heads,
    lightning_state,
    mamba1_state,
    mamba2_state,
    mla,
    short_conv,
    sparse_mla,
    stated_window,
)
from kvplan.models.config import AttentionReader, Family, KeyRule, LayerRule, Registry, StateReader
from kvplan.models.keys import (
    BAILING_KEYS,
    LINEAR_KEYS,
    bailing_keys,
    block_indexers,
    chatglm_heads,
    double_layers,
    falcon_heads,
    global_heads,
    grouped_heads,
    kimi_keys,
    nas_heads,
    nested_heads,
    olmo_keys,
    query_width,
    shared_indexers,
    sliding_heads,
    window_from,
)
from kvplan.models.kinds import (
    after_dense,
    all_but_each,
    all_of,
    all_slide,
    by_block,
    by_flags,
    by_letter,
    by_list,
    by_period,
    conv_and_slide,
    every_other_lower_slides,
    from_last,
    full_behind_groups,
    lower_half_caches,
    numbered_from_one,
    upper_slide,
    with_full,
)
from kvplan.models.names import BOTH
from kvplan.models.tensors import (
    FULL,
    SLIDING,
    STATE,
)
from kvplan.models.values import Config

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
            keys=KeyRule(kimi_keys, dict.fromkeys(LINEAR_KEYS, "linear_attn_config")),
        ),
        **_families(
            "bailing_hybrid",
            state=bailing_state,
            layers=all_but_each(STATE, "layer_group_size"),
            keys=KeyRule(bailing_keys, dict(zip(LINEAR_KEYS, BAILING_KEYS, strict=True))),
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
