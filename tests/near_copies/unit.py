"""Of all that is tested in one process and on one device."""

_GRADIENTS = "test_loss_and_gradients[deepseek_v3]; sharded/test_repeated_heads.py of gemma_like"
_LOGITS = "test_logits of the same family"
_GOLDEN = {
    **{f"test_loss_and_gradients[{name}]": _GRADIENTS for name in ("gemma2", "gpt2", "qwen3")},
    "test_loss_and_gradients[gpt_oss]": "kernels' sinks; unit/test_experts.py, clamped with biases",
    **{f"test_greedy_continuations[{name}]": _LOGITS for name in ("gemma2", "gpt2", "gpt_oss")},
    **{
        f"test_bfloat16_logits[{name}]": "test_bfloat16_logits[llama3]"
        for name in ("gemma2", "gpt2", "qwen3")
    },
    **{
        f"test_logits[{name}]": f"test_logits[{kept}], whose tensors are these; unit/test_rope.py"
        for name, kept in (
            *((f"llama{name}", "llama") for name in ("3", "_linear", "_yarn")),
            ("phi3", "phi3_longrope"),
        )
    },
    **{
        f"test_logits[{name}]": "test_logits[llama]; of biases, test_logits[qwen2_moe]"
        for name in ("qwen2", "qwen2_yarn")
    },
    "test_logits[gpt2_untied]": "test_logits[gpt2]; of a table of its own, test_logits[qwen3_moe]",
    "test_longrope_rows_end_with_the_context": (
        "unit/test_serving_generate.py, rows end where the model has no positions left"
    ),
    "test_logits[deepseek_v2]": "test_logits of deepseek_v2_lite, and of v3, which has groups too",
    "test_greedy_continuations[phi3_longrope]": (
        "test_longrope_rows_that_cross_over_are_run_again, and test_logits of both its lengths"
    ),
}

_THERE = "test_logits in unit/test_hf_golden.py and test_round_trip in unit/test_hf_config.py of "
_CONVERTED = {
    f"test_there_and_back_is_bitwise[{name}]": f"{_THERE}it; its tensors are those of {like}"
    for name, like in (
        *(("deepseek_v2", "deepseek_v3"), ("deepseek_v2_lite", "deepseek_v3")),
        *((name, "qwen2_moe") for name in ("llama", "llama3", "llama_linear", "llama_yarn")),
        *((name, "qwen2_moe") for name in ("mistral", "mixtral", "qwen2", "qwen2_yarn", "qwen3")),
        *(("gpt2_untied", "gpt2"), ("qwen3_moe", "qwen2_moe")),
    )
} | {
    "test_there_and_back_is_bitwise[phi3_longrope]": f"{_THERE}it; those of phi3 lie together too",
    **{
        f"test_pieces_of_tensors_make_the_same_files[{name}]": "the same test of qwen2"
        for name in ("gemma2", "llama_linear")
    },
}

_ORACLE = "the same test of gemma_like-xla; sharded/test_meshes.py, by the same oracle"
_MODEL = {
    "test_unrolling_changes_no_bit[none]": (
        "unit/test_layer_loop.py, values and gradients of a scan"
    ),
    "test_scan_over_layers_is_a_loop": "unit/test_layer_loop.py, values and gradients of a scan",
    **{
        f"test_what_is_recomputed[{case}]": "the same test of mlp, named and full"
        for case in ("none-0-0", "dots-0-0")
    },
    **{
        f"{test}[{case}]": _ORACLE
        for test in (
            "test_logits_are_the_oracle_s",
            "test_a_packed_document_has_the_logits_it_has_alone",
        )
        for case in ("llama_like-xla", "gpt_like-reference", "gemma_like-reference")
    },
    **{
        f"test_no_token_sees_the_future_or_another_document[{case}]": (
            "the same test of gpt_like-reference; the receptive field of xla; of gemma_like-xla "
            "test_a_packed_document_has_the_logits_it_has_alone"
        )
        for case in ("llama_like-xla", "gemma_like-xla", "gemma_like-reference")
    },
    "test_receptive_field_of_windows_adds_up_over_layers[reference]": "the same test of xla",
    "test_recomputation_changes_no_bit[full]": (
        "test_what_is_recomputed; sharded/test_meshes.py's untied, which recomputes all of a layer"
    ),
}

_TWO_STACKS = "unit/test_hf_golden.py's continuations of deepseek_v3, which has two stacks"
_CACHES = {
    "test_a_prompt_in_chunks_is_the_prompt_at_once[learned_positions-fp32]": (
        "the same model's cached logits at every position, one token at a time"
    ),
    "test_a_prompt_in_chunks_is_the_prompt_at_once[two_stacks-fp32]": _TWO_STACKS,
    **{
        f"test_cached_logits_agree_at_every_position[gqa-{dtype}]": (
            "the same test of gemma-fp32, whose heads are groups; a prompt in chunks in bf16"
        )
        for dtype in ("bf16", "fp32")
    },
    "test_a_prompt_in_chunks_is_the_prompt_at_once[latent-fp32]": (
        "the same test of gemma-bf16; the same model's cached logits at every position"
    ),
    "test_cached_logits_agree_at_every_position[two_stacks-fp32]": _TWO_STACKS,
}

_ONE_MESH = "the same test of fsdp_tensor, whose tensor axis divides heads alike"
_SERVING_MESHES = {
    **{
        f"test_rows_are_those_of_one_device[{name}]": _ONE_MESH
        for name in ("tensor", "replica_tensor")
    },
    **{
        f"test_logits_are_as_close_as_on_one_device_and_the_cache_is_spread[{name}]": (
            "test_rows_are_those_of_one_device[fsdp_tensor]; test_decoding_exchanges_no_cache"
        )
        for name in ("tensor", "fsdp_tensor")
    },
    "test_models_of_every_layout_are_loaded_onto_a_mesh[ours]": "the same test of run",
    "test_models_of_every_layout_are_loaded_onto_a_mesh[hf]": (
        "the same test of run; unit/test_hf_convert.py of each device's share of Hugging Face's"
    ),
}

_POLICY = "the same test of bf16-gemma_like, fp16-gpt_like"
_POLICIES = {
    f"test_every_matmul_of_a_step_is_what_the_policy_says[{case}]": _POLICY
    for case in ("fp32-gemma_like", "fp32-gpt_like", "fp16-gemma_like", "bf16-gpt_like")
} | {
    "test_every_matmul_of_a_step_is_what_the_policy_says[fp16-gpt_like]": (
        "the same test of bf16-gemma_like; of this policy and model every reduction"
    ),
    **{
        f"test_every_reduction_of_a_step_is_in_fp32[{case}]": _POLICY
        for case in ("fp32-gemma_like", "fp32-gpt_like", "fp16-gemma_like", "bf16-gpt_like")
    },
    "test_compiled_cpu_program_sums_in_fp32[fp32]": (
        "the same test of bf16; sharded/test_meshes.py, whose bounds are those of fp32"
    ),
}

_ROUTING = {
    f"test_equals_a_loop_over_tokens[{case}]": kept
    for case, kept in (
        ("groups by their best", "the same test of groups by their two best"),
        ("softmax over all", "unit/test_hf_golden.py's logits of qwen2_moe"),
        ("softmax over the chosen", "unit/test_hf_golden.py's logits of mixtral and gpt_oss"),
        ("sigmoid", "the same test of groups; unit/test_hf_golden.py's logits of deepseek_v3"),
        ("without gates", "the same test of shared and gated"),
    )
}

_CHUNKED = "the same test of all options, and of this dtype with all; of none"
_LOSSES = {
    f"test_chunked_is_no_worse_than_the_reference[{case}]": _CHUNKED
    for case in (
        *("both-4-float32", "plain-4-bfloat16", "plain-4-float16"),
        *("smoothed-4-float32", "soft_cap-4-float32", "z_loss-4-float32"),
    )
} | {
    f"test_reference_is_the_formula[{case}-float32]": "the same test of all options, and of none"
    for case in ("both", "smoothed", "soft_cap", "z_loss")
}

_SAMPLING = {
    **{
        f"test_rows_draw_what_compiled_settings_draw[{case}]": "the same test of both at once"
        for case in ("free", "top-k", "top-p", "wide-top-k")
    },
    **{
        f"test_frequencies[{case}]": "the same test of mixed, min-p-mixed, cold and ties"
        for case in ("all", "free", "hot", "min-p", "ties-top-k-4", "top-k", "top-p")
    },
}

_ENGINE = {
    "test_every_family_as_generated_alone[phi3_longrope]": (
        "test_settings_hold_whatever_is_shared_and_begun_again; unit/test_serving_steps.py of "
        "longrope; unit/test_hf_golden.py of the families"
    ),
    "test_programs_are_those_listed_and_traced_once": (
        "test_load_loses_no_page_and_compiles_nothing[200]"
    ),
    **{
        f"test_settings_hold_whatever_is_shared_and_begun_again[{case}]": (
            "the same test of presence_and_frequency; unit/test_serving_penalties.py"
        )
        for case in ("bias", "repetition")
    },
}

_EIGHT_BITS = {
    "test_product_and_gradients_are_those_of_rounded_operands[blocks by powers of two]": (
        "the same test of blocks; kernels/test_quantize.py"
    ),
    "test_a_mesh_quantizes_to_the_same_bits[squares]": "the same test of blocks",
}

UNIT: dict[str, dict[str, str]] = {
    "test_decode_launches.py": {
        "test_a_layer_is_seven_kernels[int4 g128]": (
            "the same test of bf16; kernels/test_resident_rows.py, what both kernels are made of"
        ),
    },
    "test_engine.py": _ENGINE,
    "test_experts.py": _ROUTING,
    "test_finetune.py": {
        "test_it_resumes_without_what_it_started_from": (
            "test_adapters_need_the_weights_they_were_trained_beside, which resumes too"
        ),
    },
    "test_fp8.py": _EIGHT_BITS,
    "test_hf_commands.py": {
        "test_generate_in_a_chat_template": (
            "unit/test_finetune.py, a conversation run speaks by its own template; "
            "unit/test_hf_chat.py of templates"
        ),
        "test_generate_continues_alike": (
            "test_an_exported_run_gives_the_same_logits; unit/test_serving_load.py's command"
        ),
    },
    "test_hf_convert.py": _CONVERTED,
    "test_hf_golden.py": _GOLDEN,
    "test_layer_loop.py": {
        "test_weights_of_experts_are_rounded_before_the_layers": (
            "test_only_experts_are_read_as_rounded; test_values_and_gradients_of_a_scan"
        ),
    },
    "test_lora.py": {
        "test_merged_weights_give_the_logits_of_the_adapters[phi3]": (
            "unit/test_finetune.py, adapters merged on the way out; unit/test_peft.py of phi3"
        ),
    },
    "test_loss.py": _LOSSES,
    "test_memory_report.py": {
        "test_the_report_of_an_error": (
            "e2e/test_bad_input.py, a model that no device holds, whose report is written"
        ),
    },
    "test_model.py": _MODEL,
    "test_numerics_program.py": _POLICIES,
    "test_pipeline_report.py": {
        f"test_report_names_the_bubble_and_draws_the_picture[{case}]": "the same test of zb_v"
        for case in ("gpipe", "interleaved", "zb_h1")
    },
    "test_serving_cache.py": _CACHES,
    "test_serving_form.py": {
        f"test_generation_is_the_same[{case}]": (
            "test_logits_are_within_rounding; e2e/test_serve.py's completions, of this form"
        )
        for case in ("drawn", "greedy")
    },
    "test_serving_mesh.py": _SERVING_MESHES,
    "test_serving_sampling.py": _SAMPLING,
    "test_serving_pages.py": {
        "test_on_hopper_the_kernels_read_the_cache[bfloat16-plain-False-2]": (
            "the same test of plain-True"
        )
    },
    "test_serving_steps.py": {
        "test_chunks_continue_as_the_whole_prompt[window]": (
            "unit/test_serving_cache.py, a prompt in chunks of gemma, which has windows"
        ),
    },
    "test_step.py": {
        "test_a_run_traces_its_step_once": (
            "sharded/test_placement.py, a step leaves shardings and types unchanged"
        ),
        "test_non_finite_step_changes_counters_only[<lambda>1]": "the same test of both others",
        "test_micro_batches_equal_the_batch[4]": (
            "sharded/test_meshes.py's untied on three axes, in four ragged micro-batches"
        ),
    },
    "test_step_bench.py": {
        "test_both_steps_and_the_control_train_alike_under_warmup_and_clipping": (
            "test_channels_in_another_order_are_the_same_function; of warm-up the plain optimizer's"
        ),
    },
}
