"""The identity of a vLLM engine: the facts of :mod:`kvplan_nixl.identity`, from its configuration.

Each field of vLLM's configuration that can change a value in a cache is a fact, unless it has its
default. :data:`HARMLESS` lists the fields that cannot, with the reason, and :data:`STATED` those
whose effect another fact has. A field in neither list, such as one of a later release, is a fact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from vllm.config import VllmConfig

from kvplan import KVPlanError
from kvplan.describe import model_text, model_values
from kvplan_nixl.identity import (
    HF_CONFIG,
    KEPT_WHOLE,
    MISTRAL_CONFIG,
    Facts,
    Identity,
    changes,
    config_facts,
    difference,
    file_facts,
    folder_with,
    is_long_rope,
    merged,
    option_facts,
    processor_facts,
    stated_config,
    without,
)
from kvplan_nixl.vllm.drafts import WITH_CACHE
from kvplan_nixl.vllm.settings import ModelSettings
from kvplan_nixl.weights import folder_of, weights_of

Reasons = Mapping[str, str]

SAME_FILES: Final = ("auto", "hf", "safetensors", "instanttensor", "ipc_cache", "runai_streamer")
"""Formats that load the weights of the model's folder, whose fingerprint is a fact."""

RELEASE: Final = "derived by vLLM when the engine starts"
KERNEL: Final = "another kernel for the same sums, whose rounding may differ as between GPUs"
MEMORY: Final = "where something is kept, and how much of it"
REQUESTS: Final = "how requests are taken, checked and answered"
INPUTS: Final = "how fast inputs are prepared, and who may send them"
SAMPLING: Final = "how tokens are drawn; those of a request are known"
BLOCKS: Final = "blocks and their sizes, which handshakes and plans compare"
VIEWS: Final = "the dtype of a cache, which each view of a worker has"
FINGERPRINT: Final = "the fact weights has it"
CONFIG: Final = "the facts config.* have it"

HARMLESS: Final[Mapping[str, Reasons]] = MappingProxyType(
    {
        "VllmConfig": {
            "parallel_config": "how many ranks share the work; handshakes compare what each has",
            "scheduler_config": "when requests are computed, and how many at once",
            "device_config": "the kind of device",
            "offload_config": MEMORY,
            "aux_output_config": "what answers have besides tokens",
            "engram_config": MEMORY,
            "kernel_config": KERNEL,
            "watermark_config": SAMPLING,
            "structured_outputs_config": SAMPLING,
            "reasoning_config": SAMPLING,
            "observability_config": "metrics and traces",
            "logging_config": "logs",
            "compilation_config": "how the same code is compiled, and which operations are fused",
            "profiler_config": "profiles",
            "kv_transfer_config": "the connector itself, which has settings of its own",
            "kv_events_config": "events for routers",
            "ec_transfer_config": "who computes the outputs of encoders",
            "ec_manager_config": MEMORY,
            "instance_id": "a name",
            "optimization_level": "how the same code is compiled",
            "performance_mode": KERNEL,
            "shutdown_timeout": "when the engine stops",
            "watchdog_config": "when an engine that hangs is ended",
        },
        "ModelConfig": {
            "runner": "engines that hand over caches generate",
            "convert": "engines that hand over caches generate",
            "tokenizer": "requests have their tokens",
            "tokenizer_mode": "requests have their tokens",
            "tokenizer_revision": "requests have their tokens",
            "skip_tokenizer_init": "requests have their tokens",
            "trust_remote_code": "code of the folder is in its fingerprint",
            "seed": SAMPLING,
            "is_submodel_config": RELEASE,
            "word_embeddings_untied_by_checkpoint": RELEASE,
            "allowed_local_media_path": INPUTS,
            "allowed_media_domains": INPUTS,
            "spec_target_max_model_len": "the longest request",
            "allow_deprecated_quantization": "whether a warning is an error",
            "enforce_eager": "how the same code is run",
            "return_sampling_mask": REQUESTS,
            "max_logprobs": REQUESTS,
            "logprobs_mode": REQUESTS,
            "use_fp64_gumbel": SAMPLING,
            "enable_trace_replay": "a replay of requests, to measure",
            "disable_sliding_window": "it limits requests to the window, so nothing lies before it",
            "disable_cascade_attn": KERNEL,
            "enable_prompt_embeds": REQUESTS,
            "served_model_name": "a name",
            "hf_token": "who may download",
            "generation_config": SAMPLING,
            "override_generation_config": SAMPLING,
            "enable_sleep_mode": "refused",
            "sleep_preserve_parameter_names": "of sleep mode, which is refused",
            "sleep_mode_backend": "of sleep mode, which is refused",
            "sleep_mode_offload_cudagraph": "of sleep mode, which is refused",
            "enable_nccl_comm_suspend": "of sleep mode, which is refused",
            "enable_cumem_allocator": MEMORY,
            "model_impl": "another implementation of the same model",
            "logits_processors": SAMPLING,
            "io_processor_plugin": REQUESTS,
            "renderer_num_workers": INPUTS,
            "pooler_config": "engines that hand over caches generate",
        },
        "CacheConfig": {
            "block_size": BLOCKS,
            "user_specified_block_size": BLOCKS,
            "kv_cache_layout": BLOCKS,
            "prefix_match_unit": BLOCKS,
            "gpu_memory_utilization": MEMORY,
            "cache_dtype": VIEWS,
            "is_attention_free": RELEASE,
            "num_gpu_blocks_override": BLOCKS,
            "sliding_window": CONFIG,
            "enable_prefix_caching": "what an engine finds of its own",
            "prefix_caching_hash_algo": "names of blocks within an engine",
            "prefix_cache_retention_interval": "what an engine finds of its own",
            "kv_cache_dtype_skip_layers": VIEWS,
            "mamba_page_size_padded": BLOCKS,
            "skip_page_size_padded": BLOCKS,
            "mamba_block_size": BLOCKS,
            "mamba_cache_dtype": VIEWS,
            "mamba_ssm_cache_dtype": VIEWS,
            "mamba_cache_mode": "which states an engine keeps",
            "enable_mamba_shared_prefix_checkpoint": "which states an engine keeps",
            "use_kda_recoverssm": RELEASE,
            "num_gpu_blocks": BLOCKS,
            "num_cpu_blocks": BLOCKS,
            "effective_attention_block_size": BLOCKS,
            "kv_cache_size_tokens": BLOCKS,
            "kv_cache_max_concurrency": BLOCKS,
            "hash_block_size": BLOCKS,
            "cache_hit_alignment_tokens": BLOCKS,
            "kv_sharing_fast_prefill": "layers skip tokens whose cache they have from others",
            "swa_bounded_replay": "layers skip positions that no later token attends to",
            "kv_cache_memory_bytes": MEMORY,
            "kv_offloading_size": MEMORY,
            "kv_offloading_backend": MEMORY,
            "simple_cpu_offload_num_blocks": MEMORY,
            "_block_size_resolved": RELEASE,
        },
        "LoadConfig": {
            "download_dir": MEMORY,
            "safetensors_load_strategy": "how fast weights are loaded",
            "safetensors_prefetch_num_threads": "how fast weights are loaded",
            "safetensors_prefetch_block_size": "how fast weights are loaded",
            "device": "where weights are loaded first",
            "use_tqdm_on_load": "a progress bar",
            "pt_load_map_location": "where weights are loaded first",
        },
        "LoRAConfig": {
            "max_lora_rank": "the largest adapter, whose smaller ones are padded with zeros",
            "max_loras": MEMORY,
            "fully_sharded_loras": "how ranks share the work",
            "max_cpu_loras": MEMORY,
            "default_mm_loras": "a request has the adapter that it gets by it",
            "specialize_active_lora": KERNEL,
            "enable_mixed_moe_lora_format": KERNEL,
            "max_lora_cls_labels": "engines that hand over caches generate",
        },
        "MultiModalConfig": {
            "language_model_only": "it refuses inputs other than text",
            "limit_per_prompt": "it refuses requests",
            "enable_mm_embeds": "which inputs requests may have",
            "mm_device_do_normalize": "where pixels are scaled; " + KERNEL,
            "mm_processor_cache_gb": MEMORY,
            "mm_processor_cache_type": MEMORY,
            "mm_shm_cache_max_object_size_mb": MEMORY,
            "mm_encoder_only": "an engine without the language model has no cache",
            "mm_encoder_tp_mode": "how ranks share the work",
            "mm_encoder_attn_backend": KERNEL,
            "mm_encoder_fp8_scale_save_path": "a file that is written",
            "mm_encoder_fp8_scale_save_margin": "of a file that is written",
            "interleave_mm_strings": "requests have their tokens",
            "skip_mm_profiling": MEMORY,
            "mm_tensor_ipc": INPUTS,
            "mm_ipc_gpu_memory_gb": MEMORY,
        },
        "SpeculativeConfig": {
            "enforce_eager": "how the same code is run",
            "num_speculative_tokens": "how many tokens are drafted",
            "num_speculative_tokens_per_batch_size": "how many tokens are drafted",
            "draft_tensor_parallel_size": "how ranks share the work",
            "tensor_parallel_size": "how ranks share the work",
            "moe_backend": KERNEL,
            "attention_backend": KERNEL,
            "kv_cache_dtype": VIEWS,
            "max_model_len": "the longest request that is drafted for",
            "disable_padded_drafter_batch": KERNEL,
            "disable_eagle_block_drop": "which blocks an engine finds of its own",
            "disable_lookahead_block_hashes": "which blocks an engine finds of its own",
            "use_local_argmax_reduction": SAMPLING,
            "prompt_lookup_max": "of drafts without a cache",
            "prompt_lookup_min": "of drafts without a cache",
            "suffix_decoding_max_tree_depth": "of drafts without a cache",
            "suffix_decoding_max_cached_requests": "of drafts without a cache",
            "suffix_decoding_max_spec_factor": "of drafts without a cache",
            "suffix_decoding_min_token_prob": "of drafts without a cache",
            "target_model_config": "the model itself",
            "target_parallel_config": "how ranks share the work",
            "draft_parallel_config": "how ranks share the work",
            "rejection_sample_method": SAMPLING,
            "synthetic_acceptance_rates": SAMPLING,
            "synthetic_acceptance_length": SAMPLING,
            "enable_adaptive_verification": SAMPLING,
            "draft_sample_method": SAMPLING,
            "dspark_draft_topk": SAMPLING,
            "draft_lm_head_quantization": SAMPLING,
            "xpress_topc": SAMPLING,
            "fly_window_size": SAMPLING,
            "fly_entropy_threshold": SAMPLING,
            "fly_entropy_top_k": SAMPLING,
        },
        "MambaConfig": {"backend": KERNEL, "ssu_algorithm": KERNEL},
        "AttentionConfig": {
            "backend": KERNEL,
            "minimax_m3_msa_decode_backend": KERNEL,
            "backend_per_kind": KERNEL,
            "flash_attn_version": KERNEL,
            "flash_attn_max_num_splits_for_cuda_graph": KERNEL,
            "tokenspeed_mla_min_split_kv": KERNEL,
            "tq_max_kv_splits_for_cuda_graph": KERNEL,
            "use_trtllm_attention": KERNEL,
            "disable_flashinfer_q_quantization": "queries are rounded, as some backends do anyway",
            "mla_prefill_backend": KERNEL,
            "trtllm_ragged_backend": KERNEL,
            "use_prefill_query_quantization": "queries are rounded, as some backends do anyway",
            "indexer_kv_dtype": VIEWS,
            "indexer_sparse_logits": KERNEL,
            "indexer_tp_shard_min_rows": "how ranks share the work",
            "minimax_m3_indexer_cp": "how ranks share the work",
            "hisparse_config": MEMORY,
            "sparse_mla_force_mqa": KERNEL,
            "sparse_mla_prefill_workspace_factor": MEMORY,
            "flex_attn_block_m": KERNEL,
            "flex_attn_block_n": KERNEL,
            "flex_attn_q_block_size": KERNEL,
            "flex_attn_kv_block_size": KERNEL,
        },
    }
)
"""Fields of vLLM 0.32 and 0.33 that change no value in a cache, by class, and why."""

STATED: Final[Mapping[str, Reasons]] = MappingProxyType(
    {
        "VllmConfig": {
            "model_config": "its fields are walked",
            "cache_config": "its fields are walked",
            "load_config": "its fields are walked",
            "attention_config": "its fields are walked",
            "mamba_config": "its fields are walked",
            "lora_config": "its fields are walked",
            "diffusion_config": "its fields are walked",
            "speculative_config": "its fields are walked, of a draft that has a cache",
            "quant_config": "the facts config.quantization_config.* and quantization have it",
            "weight_transfer_config": "the fact weights_version has what it does",
        },
        "ModelConfig": {
            "model": FINGERPRINT,
            "model_weights": FINGERPRINT,
            "revision": FINGERPRINT,
            "hf_config": CONFIG,
            "hf_text_config": CONFIG,
            "hf_config_path": CONFIG,
            "config_format": CONFIG,
            "hf_overrides": "the facts config.* have it, or overrides.*",
            "dtype": "the fact dtype has it",
            "quantization": "the fact quantization has it, where the files do not",
            "max_model_len": "the facts rope.is_long and attn_temperature_tuning have what it does",
            "multimodal_config": "its fields are walked",
        },
        "LoadConfig": {"load_format": "a fact where other files are loaded, or none"},
        "LoRAConfig": {"lora_dtype": "a fact where it is not the model's"},
        "MultiModalConfig": {
            "mm_encoder_fp8_scale_path": "the fact mm_encoder_fp8_scales has its content"
        },
        "SpeculativeConfig": {
            "method": "the fact draft.method has it",
            "model": "the fact draft.weights has it",
            "revision": "the fact draft.weights has it",
            "draft_model_config": "the facts draft.config.* have it",
            "draft_load_config": "the fact draft.load_format has it",
            "quantization": "the fact draft.quantization has it, where the files do not",
        },
    }
)
"""Fields whose effect other facts have, by class, and which they are."""


def identity_of(config: VllmConfig, settings: ModelSettings) -> Facts:
    """Return the facts that decide what is in the caches of an engine, as it starts.

    It reads files, which takes seconds, and they may change later: call it once in each process.
    """
    model = config.model_config
    facts = _model_facts(model, config.load_config, model.hf_overrides, settings.weights)
    if settings.model:
        facts["model"] = settings.model
    facts["dtype"] = _dtype(model.dtype)
    for part in (model, config.cache_config, config.attention_config, config.mamba_config, config):
        facts.update(_field_facts(part))
    for part in (config.diffusion_config, model.multimodal_config):
        if part is not None:
            facts.update(_field_facts(part))
    if model.multimodal_config is not None:
        option = "mm_encoder_fp8_scale_path"
        path = getattr(model.multimodal_config, option)
        facts.update(file_facts("mm_encoder_fp8_scales", option, path))
    if config.lora_config is not None:
        facts.update(_field_facts(config.lora_config))
        if config.lora_config.lora_dtype not in ("auto", model.dtype):
            facts["lora_dtype"] = _dtype(config.lora_config.lora_dtype)
    facts.update(_length_facts(model))
    facts.update(_draft_facts(config, settings))
    return without(facts, settings.ignored_facts)


def check_models(identity: Identity, models: Iterable[str]) -> None:
    """Refuse an engine whose files have changed between the start of its scheduler and its workers.

    Raises ``MODEL``.
    """
    own = model_text(identity.started)
    for model in models:
        if model != own:
            expected, got = model_values(own, model)
            raise KVPlanError(
                "MODEL",
                "start an engine",
                expected=f"{expected} (its scheduler)",
                got=f"{got} (one of its workers)",
                hint="the model's files have changed while it started: start it again",
            )


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _model_facts(model: Any, load: Any, overrides: Any, weights: str = "") -> Facts:
    facts = Facts()
    loaded = model.model_weights or model.model
    folder = folder_of(model.model, model.revision)
    if load.load_format not in SAME_FILES:
        facts["load_format"] = str(load.load_format)
    facts.update(_field_facts(load))
    if weights:
        facts["weights"] = weights
    elif load.load_format == "dummy":
        facts["weights"] = "dummy"
    else:
        facts["weights"] = weights_of(loaded, model.revision)
        if facts["weights"] in ("unknown", model.revision):
            facts["model"] = loaded
    configured = _config_facts(model, overrides)
    facts.update(configured)
    if folder is not None:
        facts.update(processor_facts(folder))
    is_quantized = any(f"config.{key}" in name for name in configured for key in KEPT_WHOLE)
    if model.quantization and not is_quantized:
        facts["quantization"] = str(model.quantization)
    return facts


def _config_facts(model: Any, overrides: Any) -> Facts:
    """Return the facts of a configuration with its overrides.

    An override counts as part of the file if vLLM reads such a file to the same configuration. It
    does not, for instance, where reading renames a key. Then the override's effect is the fact.
    """
    folder = folder_of(model.hf_config_path or model.model, model.revision)
    name = MISTRAL_CONFIG if _is_mistral(model, folder) else HF_CONFIG
    stated = None if folder is None else stated_config(folder, name)
    # a configuration that is in no folder here is as vLLM has made it
    if folder is None or stated is None:
        return config_facts(model.hf_config.to_dict())
    if not overrides:
        return config_facts(stated)
    read = _read(folder, model, overrides)
    plain = _read(folder, model, {})
    if read is not None:
        # what was given, or what a function has changed, as if the file had it
        texts = [] if callable(overrides) else [overrides]
        texts += [] if plain is None else [changes(read, plain)]
        for text in texts:
            new = merged(stated, text)
            with folder_with(folder, name, new) as other:
                if _read(other, model, {}) == read:
                    return config_facts(new)
    effect = difference(read or model.hf_config.to_dict(), plain or stated)
    return {**config_facts(stated), **effect}


def _read(folder: Path, model: Any, overrides: Any) -> dict[str, Any] | None:
    """Read a configuration as ``ModelConfig.__post_init__`` does, None if vLLM cannot read it."""
    from vllm.transformers_utils.config import get_config

    texts: dict[str, Any] = {}
    mappings: dict[str, Any] = {}
    if not callable(overrides):
        texts = {key: value for key, value in overrides.items() if not isinstance(value, dict)}
        mappings = {key: value for key, value in overrides.items() if isinstance(value, dict)}
    try:
        config = get_config(
            str(folder),
            model.trust_remote_code,
            code_revision=model.code_revision,
            config_format=model.config_format,
            hf_overrides_kw=texts,
            hf_overrides_fn=overrides if callable(overrides) else None,
        )
        model._apply_dict_overrides(config, mappings)
    except Exception:  # an override may be what makes a file readable at all
        return None
    read: dict[str, Any] = config.to_dict()
    return {key: value for key, value in read.items() if key != "_name_or_path"}


def _is_mistral(model: Any, folder: Path | None) -> bool:
    """Decide as ``get_config`` of vLLM does whether a configuration is in Mistral's format."""
    from vllm.transformers_utils.repo_utils import is_mistral_model_repo

    kind = str(getattr(model.config_format, "value", model.config_format))
    if kind != "auto" or folder is None:
        return kind == "mistral"
    has_file = Path(folder, MISTRAL_CONFIG).is_file()
    return has_file and bool(is_mistral_model_repo(model_name_or_path=str(folder), revision=None))


def _length_facts(model: Any) -> Facts:
    """Return the facts that the longest request decides, of the models that ask for it.

    ``Phi3LongRoPEScaledRotaryEmbedding`` and ``Llama4ForCausalLM`` in vllm/model_executor.
    """
    facts = Facts()
    text_config = model.hf_text_config
    is_long = is_long_rope(text_config, model.max_model_len)
    if is_long is not None:
        facts["rope.is_long"] = is_long
    if str(getattr(text_config, "model_type", "")).startswith("llama4"):
        generation = {**model.try_get_generation_config(), **model.override_generation_config}
        is_default = model.max_model_len > 32768
        facts["attn_temperature_tuning"] = generation.get("attn_temperature_tuning", is_default)
    return facts


def _draft_facts(config: VllmConfig, settings: ModelSettings) -> Facts:
    speculative: Any = config.speculative_config
    if speculative is None or speculative.method not in WITH_CACHE:
        return {}
    facts = {"method": str(speculative.method), **_field_facts(speculative)}
    draft = speculative.draft_model_config
    # a draft in the model's own files, and weights, has their facts
    if draft.model != config.model_config.model:
        load = speculative.draft_load_config or config.load_config
        # its overrides are what vLLM makes of the model's, which are facts of the model
        facts.update(_model_facts(draft, load, {}))
        if settings.draft:
            facts["model"] = settings.draft
    return {f"draft.{name}": value for name, value in facts.items()}


def _field_facts(config: Any) -> Facts:
    """Return the fields of a configuration in neither list, unless they have their defaults."""
    kind = type(config).__name__
    facts = Facts()
    for field in dataclasses.fields(config):
        if field.name in HARMLESS.get(kind, ()) or field.name in STATED.get(kind, ()):
            continue
        value = getattr(config, field.name, None)
        if not _is_default(field, value):
            is_plain = not dataclasses.is_dataclass(value)
            given = value if is_plain else dataclasses.asdict(value)  # type: ignore[arg-type]
            facts.update(option_facts(field.name, given))
    return facts


def _is_default(field: Any, value: Any) -> bool:
    default = field.default
    if hasattr(default, "get_default"):  # of pydantic
        default = default.get_default(call_default_factory=True)
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return bool(value == default)
