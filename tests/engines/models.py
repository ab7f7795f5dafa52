"""Tiny models with random weights, made from configuration classes: nothing is downloaded.

Weights are large (initializer_range 0.2) and embeddings are small, so that what a token becomes depends on the cache
more than on the token before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    # YaRN, as DeepSeek's own. Without it vLLM 0.32 on a CPU rotates wrongly:
    # tokens depend on the batch.
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
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, other weights": {"model_type": "llama"},
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
    # SGLang gives the windows of this one a pool of their own
    "mellum": {
        "model_type": "mellum",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    # the same, and vLLM has it too
    "laguna": {
        "model_type": "laguna",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense"] * 4,
    },
    # the layer pattern of published ones; layers that attend to all have fewer and larger KV heads
    "gemma-4, 12 layers": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "global_head_dim": 64,
        "attention_k_eq_v": True,
        "sliding_window": 64,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 64},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "sliding_window": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma-3n": {
        "model_type": "gemma3n_text",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "llama-4": {
        "model_type": "llama4_text",
        "attention_chunk_size": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2,
    },
    "phi-3": {"model_type": "phi3", "sliding_window": None},
    "olmo-3": {
        "model_type": "olmo3",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "cohere-2": {
        "model_type": "cohere2",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "exaone-4": {
        "model_type": "exaone4",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "glm-4": {"model_type": "glm4"},
    "smollm-3": {"model_type": "smollm3"},
    "starcoder-2": {"model_type": "starcoder2"},
    "qwen-3 moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mamba-2": {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 1,
        "state_size": 16,
        "chunk_size": 64,
    },
    "nemotron-h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "attention"] * 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 64,
    },
    "falcon-h1": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    },
    "zamba-2": {
        "model_type": "zamba2",
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "chunk_size": 64,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
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
    "deepseek-v2": {"model_type": "deepseek_v2", **LATENT},
    "deepseek-v3": {"model_type": "deepseek_v3", **LATENT},
    "deepseek-v3, MTP": {
        "model_type": "deepseek_v3",
        **LATENT,
        "num_hidden_layers": 5,
        "first_k_dense_replace": 5,
    },
}


THETA: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
    }
}
EPSILON: dict[str, Any] = {"rms_norm_eps": 0.5}
WINDOW: dict[str, Any] = {"sliding_window": 32}
"""Values of config.json that decide what a cache holds, and not its shape."""

for key, name, value in (
    ("llama, RoPE theta", "llama", THETA),
    ("llama, YaRN", "llama", YARN),
    ("llama, epsilon", "llama", EPSILON),
    ("gemma-3, window", "gemma-3", WINDOW),
):
    MODELS[key] = {**MODELS[name], **value}

for name in ("gemma-3", "granite-hybrid"):
    MODELS[f"{name}, invented"] = MODELS[name]

BFLOAT16 = ("granite-hybrid", "nemotron-h", "falcon-h1", "mamba-2", "llama")
"""Models that also exist as published ones do, with weights of bfloat16 and a config.json that says so."""

for name in BFLOAT16:
    MODELS[f"{name}, bfloat16"] = MODELS[name]

DRAFTS = {"llama, EAGLE": 1, "llama, another EAGLE": 1, "llama, EAGLE-3": 3}
"""Drafts of one layer that go with hidden states of a llama, by the release of EAGLE."""

SEEDS = {"llama, other weights": 1, "llama, another EAGLE": 1}
"""Seeds of weights, 0 for other models."""

ABSENT = dict.fromkeys(
    ("mamba-2", "mamba-2, bfloat16"), ("num_attention_heads", "num_key_value_heads", "intermediate_size")
)
"""Keys of COMMON that files of a model do not state."""

ADAPTED = ("llama", "qwen3")
"""Models that have the LoRA adapters 1 and 2."""

TARGETS = ("q_proj", "k_proj", "v_proj")
"""Modules that an adapter changes. SGLang takes none that leaves out queries."""


CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
"""The template of a chat, whose prompt is what was said."""


def build(name: str, folder: Path) -> None:
    """Writes a model of MODELS into a folder: configuration, weights, the same each time, and token ``n`` as ``wn``."""
    torch.manual_seed(SEEDS.get(name, 0))
    if name in DRAFTS:
        build_draft(DRAFTS[name], folder)
        return
    sizes = {**COMMON, **MODELS[name]}
    for key in ABSENT.get(name, ()):
        del sizes[key]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)
    model.to(torch.bfloat16 if name.endswith(", bfloat16") else torch.float32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=CHAT).save_pretrained(folder)
    if name in ADAPTED:
        for number in (1, 2):
            adapt(model, folder / f"adapter-{number}")
    if name.endswith(", MTP"):
        predict_with_last_layer(folder)
    if name.endswith(", invented"):
        invent_type(folder, type(model.config).__name__)


def invent_type(folder: Path, known_class: str) -> None:
    """Gives a model a type that nobody has heard of, and the code that reads its file, as published models do."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "invented", "auto_map": {"AutoConfig": "configuration_invented.InventedConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_invented.py").write_text(
        f"from transformers import {known_class}\n\n\n"
        f'class InventedConfig({known_class}):\n    model_type = "invented"\n'
    )


def build_draft(release: int, folder: Path) -> None:
    """Writes a draft for EAGLE: random weights of a llama's layer, in the form of published ones."""
    hidden = COMMON["hidden_size"]
    heads = COMMON["num_attention_heads"] * COMMON["head_dim"]
    kv_heads = COMMON["num_key_value_heads"] * COMMON["head_dim"]
    attended = hidden if release == 1 else 2 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads, attended),
        "self_attn.k_proj": (kv_heads, attended),
        "self_attn.v_proj": (kv_heads, attended),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (COMMON["intermediate_size"], hidden),
        "mlp.up_proj": (COMMON["intermediate_size"], hidden),
        "mlp.down_proj": (hidden, COMMON["intermediate_size"]),
        "post_attention_layernorm": (hidden,),
    }
    layer = "layers.0"
    outside: dict[str, tuple[int, ...]] = {"fc": (hidden, 2 * hidden)}
    sizes: dict[str, Any] = {
        **COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
    }
    if release == 3:
        layer = "midlayer"
        shapes |= {"hidden_norm": (hidden,), "input_layernorm": (hidden,)}
        outside = {"fc": (hidden, 3 * hidden), "norm": (hidden,), "lm_head": (VOCABULARY, hidden)}
        sizes |= {"draft_vocab_size": VOCABULARY, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    shapes = {f"{layer}.{name}": shape for name, shape in shapes.items()} | outside
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.2
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(sizes))


def predict_with_last_layer(folder: Path) -> None:
    """Makes a DeepSeek's last layer one that predicts tokens, in the form of DeepSeek-V3's own."""
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    hidden = config["hidden_size"]
    prefix = f"model.layers.{last}"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{prefix}.{name}.weight"] = torch.ones(hidden)
    weights[f"{prefix}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    weights[f"{prefix}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{prefix}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def adapt(model: Any, folder: Path) -> None:
    """Writes a LoRA adapter of random weights for queries, keys and values, in the form of peft."""
    rank = 8
    weights = {}
    for name, layer in model.named_modules():
        if name.endswith(TARGETS):
            out_size, in_size = layer.weight.shape
            weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, in_size) * 0.3
            weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out_size, rank) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": TARGETS,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
