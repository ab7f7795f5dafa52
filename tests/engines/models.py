"""Tiny models with random weights, made from configuration classes: nothing is downloaded.

Weights are large (initializer_range 0.2) and embeddings are small, so that what a token becomes depends on the cache
more than on the token before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, 16 KiB a token": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "qwen3": {"model_type": "qwen3"},
    "gemma-3": {
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granite-hybrid": {
        "model_type": "granitemoehybrid",
        "num_attention_heads": 2,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_head": 32,
        "mamba_expand": 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
        "position_embedding_type": "rope",
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 64,
        # YaRN, as DeepSeek's own. Without it vLLM 0.32 on a CPU rotates wrongly: tokens depend on the batch.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 256,
        },
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
    },
}


def build(name: str, folder: Path) -> None:
    """Writes a model of MODELS into a folder: configuration, weights, the same each time, and token ``n`` as ``wn``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**COMMON, **MODELS[name]}))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
