"""Tests that see the effect of a setting of an engine or a server: each fails where the setting is hidden (hidden.py)."""

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.server.settings import ServerSettings

TABLES = {"engine": EngineConfig, "server": ServerSettings}

SEEN = {
    "engine.load_format": "tests/engine/test_sglang_engine.py::test_a_format_is_that_of_the_weights",
    "engine.model_checksum": "tests/runtime/models/test_load_formats.py::test_each_file_that_the_format_reads_must_be_listed",
    "engine.weight_version": "tests/runtime/kv_cache/test_disk_tier.py::test_nothing_of_another_kind_is_found",
    "engine.chat_template": "tests/lang/test_local.py::test_a_template_that_an_engine_starts_with_gives_roles_their_text",
    "engine.dp_size": "tests/engine/test_nodes.py::test_replicas_of_two_nodes_answer_like_one_engine",
    "engine.base_gpu_id": "tests/runtime/loading/test_rank_device.py::test_each_rank_has_a_gpu_of_its_own_and_runs_near_it",
    "engine.gpu_id_step": "tests/runtime/loading/test_rank_device.py::test_each_rank_has_a_gpu_of_its_own_and_runs_near_it",
    "engine.quantization": "tests/runtime/models/test_packings.py::test_what_is_quantised_is_not_quantised_again",
    "engine.quantization_param_path": "tests/runtime/models/test_fp8.py::test_scales_of_a_file_count_before_those_of_the_checkpoint",
    "engine.context_length": "tests/runtime/kv_cache/test_disk_tier.py::test_nothing_of_another_kind_is_found",
    "engine.page_size": "tests/runtime/kv_cache/test_disk_tier.py::test_nothing_of_another_kind_is_found",
    "engine.enable_multimodal": "tests/runtime/media/test_image_settings.py::test_a_model_that_reads_images_can_be_without",
    "engine.limit_mm_data_per_request": "tests/runtime/media/test_sounds.py::test_the_limit_of_sounds_is_their_own",
    "engine.mm_process_config": "tests/server/test_encoders.py::test_other_settings_of_the_encoder_are_found",
    "engine.encoder_only": "tests/server/test_encoders.py::test_an_encoder_in_a_process_of_its_own",
    "engine.language_only": "tests/server/test_encoders.py::test_other_settings_of_the_encoder_are_found",
    "engine.encoder_urls": "tests/server/test_encoders.py::test_other_settings_of_the_encoder_are_found",
    "engine.prefix_cache": "tests/runtime/core/test_cache_miss.py::test_an_engine_without_a_cache_says_so",
    "engine.explain_cache_misses": "tests/runtime/core/test_cache_miss.py::test_an_engine_of_several_tells_nothing_of_others_prompts",
    "engine.enable_return_routed_experts": "tests/runtime/kv_cache/test_tiers.py::test_names_depend_on_what_an_engine_records_of_tokens",
    "engine.enable_return_hidden_states": "tests/runtime/kv_cache/test_tiers.py::test_names_depend_on_what_an_engine_records_of_tokens",
    "engine.hicache_ratio": "tests/runtime/kv_cache/test_prefix_files.py::test_a_small_host_takes_what_fits",
    "engine.hicache_write_policy": "tests/runtime/kv_cache/test_tiers.py::test_what_nobody_has_used_again_is_not_copied_by_the_selective_policy",
    "engine.hicache_storage_backend": "tests/runtime/scheduler/test_prefetch.py::test_files_are_read_while_a_request_waits_for_its_turn",
    "engine.hicache_storage_dir": "tests/runtime/scheduler/test_prefetch.py::test_files_are_read_while_a_request_waits_for_its_turn",
    "engine.hicache_storage_prefetch_policy": "tests/runtime/kv_cache/test_disk_tier.py::test_a_request_waits_for_files_as_long_as_the_policy_says",
    "engine.speculation": "tests/runtime/media/test_images.py::test_drafts_behind_an_image_change_nothing_and_guess_no_image",
    "engine.draft_tokens": "tests/runtime/core/test_cut.py::test_drafted_tokens_are_cut_in_time_as_well",
    "engine.draft_context": "tests/runtime/drafting/test_drafters.py::test_a_context_is_as_long_as_the_setting_says",
    "engine.deterministic": "tests/runtime/models/test_cpu_small_batch.py::test_rows_that_must_not_depend_on_others_have_torch_operators",
    "engine.original_logprobs": "tests/runtime/executor/test_sampling.py::test_log_probabilities_of_the_model_itself_on_demand",
    "engine.lora_paths": "tests/runtime/core/test_adapters.py::test_more_adapters_than_slots_wait_and_none_fails",
    "engine.max_loras_per_batch": "tests/runtime/core/test_adapters.py::test_adapters_of_small_ranks_leave_their_pages_to_others",
    "engine.max_loaded_loras": "tests/runtime/core/test_adapters.py::test_an_adapter_that_gave_way_is_read_again",
    "engine.max_lora_rank": "tests/runtime/core/test_adapters.py::test_adapters_of_small_ranks_leave_their_pages_to_others",
    "engine.lora_target_modules": "tests/runtime/models/test_lora.py::test_modules_that_are_left_out_may_not_be_changed",
    "engine.lora_eviction_policy": "tests/runtime/core/test_adapters.py::test_the_adapter_that_gives_way_is_the_one_used_or_loaded_longest_ago",
    "engine.constraint_backend": "tests/runtime/structured_output/test_registry.py::test_a_name_of_the_registry_is_a_setting_with_an_engine",
    "engine.attention_backend": "tests/runtime/attention/test_registry.py::test_a_name_of_the_registry_is_a_setting_with_a_backend",
    "engine.ep_size": "tests/runtime/parallel/test_expert_moves.py::test_requests_get_the_same_tokens_while_experts_move",
    "engine.expert_distribution_recorder_mode": "tests/server/test_expert_record.py::test_a_record_of_experts_begins_ends_and_is_read",
    "engine.enable_layerwise_nvtx_marker": "tests/runtime/models/test_layer_watch.py::test_layers_are_ranges_of_profiles",
    "engine.debug_tensor_dump_output_folder": "tests/runtime/models/test_layer_watch.py::test_a_file_of_steps_may_end_in_the_middle_of_one_and_has_no_adapters",
    "engine.debug_tensor_dump_layers": "tests/runtime/models/test_layer_watch.py::test_hidden_states_are_those_of_transformers",
    "engine.pp_size": "tests/runtime/loading/test_rank_device.py::test_each_rank_has_a_gpu_of_its_own_and_runs_near_it",
    "server.port": "tests/compat/sglang/test_launch_server.py::test_the_callback_is_called_once_the_server_can_be_reached",
    "server.served_model_name": "tests/server/openai/test_embeddings.py::test_what_the_model_is_can_be_asked",
    "server.playground": "tests/server/test_playground.py::test_when_there_is_a_page",
    "server.admin_api_key": "tests/server/test_playground.py::test_when_there_is_a_page",
    "server.weights_root": "tests/server/test_weight_routes.py::test_weights_lie_in_the_root_if_there_is_one",
    "server.weights_scheme": "tests/server/test_weight_routes.py::test_an_address_is_read_only_if_its_scheme_is_allowed",
    "server.allowed_origin": "tests/server/test_guards.py::test_a_page_of_an_allowed_origin_may_use_the_server_and_read_its_answers",
    "server.reasoning_parser": "tests/server/ollama/test_ollama.py::test_thoughts_are_apart",
    "server.unknown_fields": "tests/server/test_reader_pool.py::test_a_field_without_effect_is_reported",
    "server.incremental_streaming_output": "tests/server/test_native.py::test_a_stream_may_have_what_is_new_in_each_event",
    "server.max_body_mb": "tests/server/test_bad_input.py::test_a_body_that_is_too_large_is_not_read",
    "server.body_timeout_s": "tests/server/test_bad_input.py::test_a_body_that_does_not_come_is_given_up",
    "server.head_timeout_s": "tests/server/test_connection.py::test_a_head_that_does_not_come_is_given_up",
    "server.max_connections_per_client": "tests/server/test_connection.py::test_connections_over_a_limit_are_told_to_come_again",
    "server.large_body_kb": "tests/server/test_reader_pool.py::test_a_body_above_the_limit_leaves_the_process_and_a_smaller_one_stays",
    "server.max_requests_per_minute": "tests/server/test_quotas.py::test_grpc_calls_are_counted_too",
    "server.max_tokens_per_minute": "tests/server/test_quotas.py::test_an_answer_may_take_more_than_is_left_and_the_next_request_waits_for_it",
    "server.max_tokens_per_day": "tests/server/test_quotas.py::test_the_longest_wait_of_all_quotas_is_told",
    "server.program_max_nodes": "tests/server/programs/test_program.py::test_the_servers_own_limits_hold_above_the_clients",
    "server.log_level": "tests/server/sglang/test_server_args.py::test_requests_are_logged_by_a_server_and_not_by_an_engine",
    "server.log_format": "tests/server/test_operating.py::test_the_log_of_a_command_is_json_too_without_its_polls_of_other_servers",
    "server.metrics_names": "tests/server/test_metrics.py::test_names_of_vllm",
    "engine.device": "tests/runtime/loading/test_device_properties.py::test_a_torch_for_cpus_beside_a_driver_is_said",
    "engine.dist_init_addr": "tests/engine/test_nodes.py::test_replicas_of_two_nodes_answer_like_one_engine",
    "engine.max_total_tokens": "tests/engine/test_setting_effects.py::test_a_cache_has_as_much_room_as_the_engine_is_told",
    "engine.policy": "tests/engine/test_setting_effects.py::test_priorities_count_under_their_policy",
    "engine.seed": "tests/engine/test_setting_effects.py::test_engines_of_a_seed_draw_the_same",
    "engine.served_model_name": "tests/engine/test_setting_effects.py::test_an_engine_has_the_name_that_it_is_given",
    "engine.step_tokens": "tests/engine/test_setting_effects.py::test_a_prompt_takes_as_many_steps_as_it_has_parts",
    "server.allowed_host": "tests/server/test_guards.py::test_a_server_is_reached_by_address_and_by_its_own_names",
    "server.api_key": "tests/server/test_guards.py::test_generating_for_health_needs_a_key",
    "server.cache_salt_by_key": "tests/server/test_guards.py::test_a_key_reuses_its_own_prefixes_and_with_a_salt_no_others",
    "server.grpc_port": "tests/server/test_grpc.py::test_what_gRPC_lacks_is_told_before_a_model_is_loaded",
    "server.health_timeout_s": "tests/server/test_setting_effects.py::test_a_token_for_health_takes_as_long_as_the_server_says",
    "server.host": "tests/server/test_app.py::test_a_server_that_strangers_can_use_warns",
    "server.max_connections": "tests/server/test_connection.py::test_connections_over_a_limit_are_told_to_come_again",
    "server.max_depth": "tests/server/test_setting_effects.py::test_a_body_may_be_nested_as_deeply_as_the_server_says",
    "server.max_head_kb": "tests/server/test_setting_effects.py::test_a_head_may_be_as_long_as_the_server_says",
    "server.max_header_lines": "tests/server/test_setting_effects.py::test_a_head_may_have_as_many_lines_as_the_server_says",
    "server.max_open": "tests/server/test_bad_input.py::test_more_than_may_be_open_is_told_to_come_again",
    "server.max_open_per_key": "tests/server/test_setting_effects.py::test_a_key_may_have_as_many_open_requests_as_the_server_says",
    "server.max_stored_mb": "tests/server/openai/test_responses.py::test_events_count_for_the_room_of_the_store",
    "server.max_stored_responses": "tests/server/test_setting_effects.py::test_as_many_responses_are_kept_as_the_server_says",
    "server.media_url_max_total_mb": "tests/server/test_images.py::test_the_files_of_all_open_requests_are_bounded",
    "server.program_max_branches": "tests/server/test_setting_effects.py::test_a_program_is_as_large_as_the_server_says",
    "server.program_max_s": "tests/server/test_setting_effects.py::test_a_program_runs_as_long_as_the_server_says",
    "server.program_max_tokens": "tests/server/test_setting_effects.py::test_a_program_is_as_large_as_the_server_says",
    "server.ssl_certfile": "tests/server/test_setting_effects.py::test_a_certificate_is_spoken_with",
    "server.tool_call_parser": "tests/server/test_setting_effects.py::test_calls_have_the_format_that_the_server_says",
}

# Settings without such a test so far, with the reason. The list may only become shorter.
UNSEEN = {
    name: reason
    for reason, names in {
        "another process or machine is needed, which a hidden setting cannot be told of": """
            engine.remote_instance_weight_loader_seed_instance_ip
            engine.remote_instance_weight_loader_seed_instance_service_port
            engine.remote_instance_weight_loader_send_weights_group_ports
            engine.remote_instance_weight_loader_backend engine.nnodes engine.node_rank engine.dist_timeout
            engine.use_ray engine.restart engine.stall_timeout_s engine.stream_interval_s engine.in_process
            engine.load_balance_method server.enable_trace server.otlp_traces_endpoint server.drain_s
            server.body_processes
        """,
        "several ranks or a GPU is needed": """
            engine.tp_size engine.enable_dp_attention engine.ep_num_redundant_experts engine.init_expert_location
            engine.enable_eplb engine.eplb_algorithm engine.eplb_rebalance_num_iterations
            engine.disable_custom_all_reduce engine.cuda_graphs engine.cpu_offload_gb engine.offload_group_size
            engine.mem_fraction engine.kv_dtype
        """,
        "it names or shapes what is loaded: all tests of the engine would fail, or a file of its own is needed": """
            engine.model engine.revision engine.model_impl engine.dtype engine.skip_tokenizer_init
            engine.special_tokens_in_roles server.ssl_keyfile server.ssl_keyfile_password
            server.allowed_media_domains server.media_url_max_file_size_mb
        """,
        "it changes times or memory alone, never an answer": """
            engine.load_threads engine.threads engine.overlap engine.jump_forward engine.draft_capacity
            engine.image_cache_mb engine.eviction engine.compile_timeout_s engine.compile_memory_mb
            engine.compile_processes engine.hicache_size engine.hicache_storage_max_gb
            engine.enable_hierarchical_cache engine.max_running engine.max_queued server.stream_interval_ms
        """,
        "tests that see it need a model whose memory can be given back": """
            engine.enable_memory_saver engine.enable_weights_cpu_backup engine.refuse_while_asleep
            engine.enable_lora
        """,
        "it changes what is printed": """
            engine.log_level
        """,
    }.items()
    for name in names.split()
}
