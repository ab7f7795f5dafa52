"""Options of SGLang's ``ServerArgs``, 0.5.23, that are no facts of an engine's identity, and why.

An option in neither list, such as one of a later release, is a fact unless it has its default: two
engines may refuse each other for it, but never share caches that differ.
"""

from __future__ import annotations

from itertools import chain
from types import MappingProxyType
from typing import Final

STATED: Final = MappingProxyType(
    {
        "model_path": "weights, config.* and processor.*: what the folder has, wherever it is",
        "revision": "the same",
        "json_model_override_args": "config.*, as if the file had it",
        "dtype": "dtype: that of activations, whichever option it comes from",
        "quantization": "quantization, where the file does not name the same method",
        "quantization_param_path": "kv_scales: a digest of the file",
        "load_format": "sglang.load_format, for formats that load other tensors than the folder's",
        "model_loader_extra_config": "sglang.model_loader_extra_config, without numbers of threads",
        "weight_version": "weights_version, of each request",
        "served_model_name": "model, where weights have no fingerprint",
        "lora_paths": "the adapter of a request: its content, when it was loaded",
        "speculative_algorithm": "draft.method, if the draft has a cache",
        "speculative_draft_model_path": "draft.weights and draft.config.*",
        "speculative_draft_model_revision": "the same",
        "speculative_draft_model_quantization": "draft.quantization",
        "speculative_draft_load_format": "draft.load_format",
        "speculative_draft_window_size": "draft.window_size",
        "speculative_draft_sink_size": "draft.sink_size",
    }
)
"""Options whose effect another fact has, and which one."""

HARMLESS: Final = MappingProxyType(
    {
        "how weights are read, which changes no value of them": (
            "startup_weight_load_mode weight_loader_disable_mmap "
            "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads "
            "weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip "
            "remote_instance_weight_loader_seed_instance_service_port "
            "remote_instance_weight_loader_send_weights_group_ports "
            "remote_instance_weight_loader_backend "
            "remote_instance_weight_loader_start_seed_via_transfer_engine "
            "engine_info_bootstrap_port download_dir model_checksum delete_ckpt_after_loading "
            "weight_cache_socket weight_cache_timeout enable_weights_cpu_backup "
            "enable_draft_weights_cpu_backup"
        ),
        "files that are written": "modelopt_checkpoint_save_path modelopt_export_path",
        "Python code of the folder, which its fingerprint has": "trust_remote_code",
        "limits of length, apart from rope.is_long": "context_length allow_auto_truncate",
        "dtypes of tensors, which a plan compares one by one": (
            "kv_cache_dtype speculative_draft_kv_cache_dtype mamba_ssm_dtype"
        ),
        "weights come by an update, which begins a version": (
            "checkpoint_engine_wait_weights_before_ready"
        ),
        "requests and answers as text; a cache is of tokens": (
            "tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num "
            "detokenizer_worker_num skip_tokenizer_init host port fastapi_root_path smg_grpc_mode "
            "grpc_mode grpc_port grpc_worker_threads sidecar sidecar_args skip_server_warmup "
            "warmups enable_http2 http2_max_concurrent_streams "
            "http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs "
            "ssl_keyfile_password enable_ssl_refresh api_key admin_api_key chat_template "
            "trust_request_chat_template hf_chat_template_name completion_template "
            "file_storage_path enable_cache_report return_input_ids return_output_ids "
            "reasoning_parser default_chat_template_kwargs strip_thinking_cache "
            "enable_strict_thinking tool_call_parser tool_server sampling_defaults "
            "asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params "
            "stream_interval batch_notify_size stream_response_default_include_usage "
            "incremental_streaming_output enable_streaming_session "
            "constrained_json_whitespace_pattern constrained_json_disable_any_whitespace "
            "constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer "
            "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
            "enable_tokenizer_batch_encode disable_tokenizer_batch_decode enable_response_store "
            "grpc_response_timeout_secs enable_http_worker_reuseport"
        ),
        "which inputs are accepted, and how they arrive; a prompt has their content": (
            "enable_multimodal enable_broadcast_mm_inputs_process enable_prefix_mm_cache "
            "mm_processor_worker_num mm_io_worker_num allowed_media_domains "
            "media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes "
            "limit_mm_data_per_request enable_mm_global_cache mm_global_cache_backend "
            "mm_feature_transport"
        ),
        "kernels, and how work is divided among ranks: equal up to rounding": (
            "mm_attention_backend mm_enable_dp_encoder enable_memory_saver attention_backend "
            "decode_attention_backend enable_lean_attention prefill_attention_backend "
            "sampling_backend grammar_backend fp8_gemm_runner_backend fp4_gemm_runner_backend "
            "bf16_gemm_backend dsa_prefill_backend dsa_decode_backend "
            "dsa_paged_mqa_logits_backend dsa_topk_backend disable_flashinfer_autotune "
            "flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32 "
            "triton_attention_num_kv_splits triton_attention_split_tile_size "
            "flashinfer_mla_disable_ragged enable_fused_qk_norm_rope dsv4_attn_backend "
            "enable_amd_monokernel dsa_triton_union enable_dsa_fused_indexer "
            "enable_nvidia_megakernel cuda_graph_config cuda_graph_backend_decode "
            "cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill "
            "cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context "
            "disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph "
            "disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc "
            "debug_cuda_graph enable_torch_compile enable_torch_compile_debug_mode "
            "torch_compile_max_bs cuda_graph_max_seq_len_prefill enable_layerwise_nvtx_marker "
            "enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp "
            "enable_torch_symm_mem enable_scattered_sconv pre_warm_nccl boundary_reduction "
            "enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion "
            "flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion "
            "disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode "
            "enable_two_batch_overlap enable_single_batch_overlap "
            "tbo_token_distribution_threshold cpu_offload_gb offload_group_size "
            "offload_num_in_group offload_prefetch_step offload_mode ple_offload_embedding "
            "ple_offload_backend ple_offload_dir enable_fused_moe_sum_all_reduce moe_a2a_backend "
            "deepep_v2_mode moe_runner_backend deepep_mode fuseep_mode ep_num_redundant_experts "
            "ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm "
            "eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk "
            "eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode "
            "expert_distribution_recorder_buffer_size expert_balancedness_report_mode "
            "deepep_config elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device "
            "enable_waterfill ep_join_mode elastic_ep_scale_timeout "
            "disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion "
            "enforce_shared_experts_fusion kt_cpuinfer kt_threadpool_count "
            "flashinfer_a2a_dispatch_type enable_paged_experts paged_experts_num_resident "
            "nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank tp_size "
            "dcp_size pp_size pp_max_micro_batch_size pp_async_batch_depth dp_size attn_dp_size "
            "load_balance_method attn_cp_size moe_dp_size dwdp_size dcp_comm_backend "
            "dcp_replicate_q_proj enable_prefill_cp cp_strategy enable_dsa_cache_layer_split "
            "enable_cp_decode_attn_tp enable_kv_cache_sharding enable_dp_attention "
            "enable_dp_attention_local_control_broadcast enable_dp_lm_head "
            "enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered "
            "enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp "
            "enable_layernorm_sp disable_attn_tp_gather enable_p2p_check ep_size "
            "moe_dense_tp_size ep_join_rank_offset elastic_ep_initial_size max_ep_size "
            "enable_cp_tp_group_sharing enable_megamoe_for_layernorm_sp "
            "enable_deterministic_inference mamba_backend linear_attn_backend "
            "linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend "
            "enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec "
            "lora_backend max_lora_chunk_size lora_use_virtual_experts"
        ),
        "states that are not transferred": (
            "mamba_max_states_per_path mamba_cache_philox_rounds mamba_radix_cache_strategy "
            "uses_mamba_radix_cache mamba_track_interval int8_mamba_ckpt_size"
        ),
        "what is returned or sampled after the last layer": (
            "enable_fp32_lm_head enable_custom_logit_processor enable_return_hidden_states "
            "return_hidden_states_mode enable_return_routed_experts enable_return_indexer_topk "
            "sampling_mask_max_tokens disable_outlines_disk_cache enable_watermark "
            "watermark_config watermark_key watermark_key_b watermark_context_window "
            "watermark_mixing_probability watermark_max_probability watermark_default_enabled "
            "watermark_enforce_all enable_return_aux_hidden_states aux_hidden_state_capture "
            "return_aux_hidden_state_layer_ids"
        ),
        "which requests run, and when": (
            "mem_fraction_static max_running_requests max_queued_requests max_total_tokens "
            "chunked_prefill_size prefill_decode_interval enable_dynamic_chunking "
            "max_prefill_tokens prefill_max_requests schedule_policy enable_priority_scheduling "
            "disable_priority_preemption default_priority_value abort_on_priority_when_disabled "
            "schedule_low_priority_values_first priority_scheduling_preemption_threshold "
            "retraction_policy schedule_conservativeness page_size c128_page_size "
            "swa_full_tokens_ratio disable_hybrid_swa_memory prefill_only_disable_kv_cache "
            "disable_chunked_prefix_cache disable_overlap_schedule num_continuous_decode_steps "
            "scheduler_recv_interval enable_mixed_chunk max_mamba_cache_size "
            "mamba_full_memory_ratio enable_prefill_delayer prefill_delayer_max_delay_passes "
            "prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets "
            "prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio "
            "prefill_delayer_max_delay_ms min_free_slots_delay "
            "_swa_full_tokens_ratio_explicitly_set swa_prefix_tails "
            "prefill_decode_interval_min_bs"
        ),
        "which caches are kept, and where": (
            "radix_eviction_policy radix_eviction_policy_config disable_radix_cache "
            "enable_page_major_kv_layout enable_unified_memory enable_session_radix_cache "
            "radix_cache_backend enable_hierarchical_cache hicache_host_memory_mode hicache_ratio "
            "hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout "
            "hicache_storage_backend hicache_storage_prefetch_policy "
            "hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval "
            "hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker "
            "unified_cache_external_linker_backend enable_hisparse hisparse_config enable_lmcache "
            "lmcache_config_file enable_flexkv flexkv_config_file "
            "_radix_eviction_policy_explicitly_set hicache_host_memory_fraction "
            "enable_linker_mla_dedup unified_cache_external_linker_config"
        ),
        "the machine and its processes": (
            "device base_gpu_id gpu_id_step random_seed mlx_enable_sampling watchdog_timeout "
            "soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler numa_node "
            "gc_threshold"
        ),
        "what is measured and logged": (
            "log_level log_level_http log_requests log_requests_level log_requests_format "
            "log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder "
            "show_time_cost enable_metrics smg_http_sidecar_port enable_mfu_metrics "
            "enable_metrics_for_all_schedulers load_snapshot_publish_interval "
            "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels "
            "extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency "
            "bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets "
            "gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging "
            "kv_events_config load_publish_endpoint enable_forward_pass_metrics "
            "forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace "
            "trace_modules otlp_traces_endpoint export_metrics_to_file export_metrics_to_file_dir "
            "stat_loggers kv_canary kv_canary_real_data kv_canary_sweep_interval "
            "debug_tensor_dump_output_folder debug_tensor_dump_layers "
            "debug_tensor_dump_input_file msprobe_dump_config otlp_service_name"
        ),
        "how prefill and decode find each other": (
            "decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank "
            "decoupled_spec_role disaggregation_mode disaggregation_transfer_backend "
            "disaggregation_bootstrap_port disaggregation_ib_device "
            "disaggregation_decode_enable_radix_cache "
            "disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup "
            "num_reserved_decode_tokens disaggregation_decode_extra_slots "
            "disaggregation_decode_polling_interval optimistic_prefill_attempts encoder_only "
            "language_only language_model_only encoder_transfer_backend encoder_urls "
            "encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder "
            "enable_pdmux pdmux_config_path sm_group_num disaggregation_enable_kv_checksum "
            "enable_pd_role_switch disaggregation_decode_host_receive_threshold "
            "disaggregation_decode_allocation_policy"
        ),
        "which adapters are kept; a request has the content of its own": (
            "enable_lora enable_lora_overlap_loading max_lora_rank max_loaded_loras "
            "max_loras_per_batch lora_eviction_policy lora_strict_loading "
            "lora_drain_wait_threshold"
        ),
        "which drafted tokens are proposed and accepted; what they cache is of the prompt": (
            "speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
            "speculative_dflash_block_size speculative_dspark_block_size "
            "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path "
            "speculative_dspark_align_verify_tokens_to_graph_tier "
            "speculative_accept_threshold_single speculative_accept_threshold_acc "
            "speculative_use_rejection_sampling speculative_token_map speculative_attention_mode "
            "speculative_draft_attention_backend speculative_dsa_topk_backend "
            "speculative_moe_runner_backend speculative_moe_a2a_backend "
            "_speculative_draft_quantization_explicitly_set enable_multi_layer_eagle "
            "speculative_adaptive speculative_adaptive_config spec_trace_dir "
            "speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth "
            "speculative_ngram_match_type speculative_ngram_max_trie_depth "
            "speculative_ngram_capacity speculative_ngram_external_corpus_path "
            "speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens "
            "speculative_domino_candidate_pool_size speculative_boundary_reduction "
            "speculative_use_block_verification"
        ),
        "how blocks of a diffusion are scheduled": "dllm_fdfo",
    }
)
"""Options that change no value in a cache, by the reason."""

NO_FACTS: Final = frozenset(chain.from_iterable(map(str.split, HARMLESS.values())))
