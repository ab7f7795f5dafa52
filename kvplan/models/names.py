"""Names in a config.json: the keys that have sizes or change a cache, and the types of layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvplan.models.tensors import FULL, SLIDING, STATE

BOTH: Final = "both"
"""The kind of a layer that attends and has a state. Other kinds are the names of their groups."""

NONE: Final = "none"
"""The kind of a layer without a cache."""

LAYER_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "full_attention": FULL,
        "sliding_attention": SLIDING,
        "chunked_attention": SLIDING,
        "indexed_attention": FULL,
        "minimax_m3_sparse": FULL,
        "linear_attention": STATE,
        "conv": STATE,
        "hybrid": BOTH,
        "moe": NONE,
        "mlp": NONE,
        "attention": FULL,
        "mamba": STATE,
        "recurrent": STATE,
        "deepseek_sparse_attention": FULL,
    }
)
"""The kind of a layer by its type.

The last four are older names (``remap_legacy_layer_types`` of transformers).
"""

TYPE_NEEDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "chunked_attention": "attention_chunk_size",
        "indexed_attention": "index_head_dim",
        "minimax_m3_sparse": "sparse_attention_config",
    }
)
"""The key that a family must read for its files to have layers of a type."""

NUM_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
NUM_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
LATENT: Final = ("kv_lora_rank", "qk_rope_head_dim")
KV_HEADS: Final = ("num_key_value_heads", "num_attention_groups", "multi_query_group_num")
HEAD_DIMS: Final = ("attention_head_dim", "head_dim", "kv_channels")
LAYER_LISTS: Final = ("layer_types", "layers_block_type")
DRAFTS: Final = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "num_mtp_layers",
)

SIZES: Final = frozenset((*NUM_LAYERS, *NUM_HEADS, *HIDDEN, *LATENT)) - {"num_heads"}
"""Keys that a file always states.

Only a nested decoder leaves them out if it has the defaults of its class.
"""

CACHE_KEYS: Final = frozenset(
    (
        # Other names of the numbers of layers and heads, and of the model's width
        *("n_layer", "n_layers", "num_layers", "n_head", "n_heads", "attention_heads"),
        *("n_embd", "d_model"),
        # K and V
        *("num_key_value_heads", "num_kv_heads", "num_attention_groups", "multi_query_group_num"),
        *("multi_query", "multi_query_attention", "new_decoder_architecture", "attn_config"),
        "block_configs",
        *("attention_head_dim", "kv_channels", "v_head_dim", "share_q_dim"),
        *("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads"),
        *("num_kv_shared_layers", "use_cla"),
        # Latents and indexers
        *("kv_lora_rank", "qk_rope_head_dim", "use_dsa"),
        *("index_head_dim", "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern"),
        *("indexer_types", "sparse_attention_config"),
        # Windows
        *("sliding_window", "sliding_window_size", "local_attention", "attention_chunk_size"),
        *("use_sliding_window", "max_window_layers", "sliding_window_pattern"),
        *("prefix_dense_sliding_window_pattern", "global_attn_every_n_layers"),
        *("swa_head_dim", "swa_v_head_dim", "swa_num_key_value_heads"),
        *("swa_kv_lora_rank", "swa_qk_rope_head_dim"),
        # The kind of each layer
        *("attn_layer_indices", "attn_layer_offset", "attn_layer_period", "attn_type_list"),
        *("full_attention_interval", "full_attn_idxs", "hybrid_layer_ids", "hybrid_layer_pattern"),
        *("hybrid_override_pattern", "layer_group_size", "layers_block_type"),
        *("no_rope_layers", "no_rope_layer_interval", "mb_per_layer"),
        # Recurrent states
        *("conv_kernel", "conv_L_cache", "short_conv_kernel_size", "expand", "n_groups"),
        *("state_size", "ssm_state_size", "n_mamba_heads"),
        *("mamba_d_conv", "mamba_d_head", "mamba_d_ssm", "mamba_d_state", "mamba_expand"),
        *("mamba_head_dim", "mamba_headdim", "mamba_n_groups", "mamba_ngroups"),
        *("mamba_n_heads", "mamba_num_heads"),
        *("linear_attn_config", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads"),
        *("linear_key_head_dim", "linear_num_key_heads"),
        *("linear_value_head_dim", "linear_num_value_heads"),
    )
)
"""Keys that change the cache: a file that has one is refused if its family doesn't read it."""
