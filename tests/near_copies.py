"""Cases that `make test` leaves to `make test-full`, each with a test that fails by its faults.

A test that is slow in itself is marked at its place. These are cases of parametrized tests, or
tests beside a stricter one: a fifth of the CPU seconds, and nothing more is found.
"""

from collections.abc import Sequence

import pytest

_GRADIENTS = "test_loss_and_gradients[deepseek_v3]; sharded/test_meshes.py's oracle of gemma_like"
_LOGITS = "test_logits of the same family"
_GOLDEN = {
    **{f"test_loss_and_gradients[{name}]": _GRADIENTS for name in ("gemma2", "gpt2", "qwen3")},
    "test_loss_and_gradients[gpt_oss]": "kernels' sinks; unit/test_experts.py, clamped with biases",
    **{f"test_greedy_continuations[{name}]": _LOGITS for name in ("gemma2", "gpt2", "gpt_oss")},
    **{
        f"test_bfloat16_logits[{name}]": "test_bfloat16_logits[llama3]"
        for name in ("gpt2", "qwen3")
    },
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
        *((name, "llama") for name in ("llama3", "llama_linear", "llama_yarn", "mistral")),
        *(("phi3_longrope", "phi3"), ("qwen2_yarn", "qwen2"), ("qwen3", "qwen3_moe")),
    )
}

_ORACLE = "the same test of gemma_like-xla, gpt_like-reference"
_MODEL = {
    "test_unrolling_changes_no_bit[none]": (
        "test_scan_over_layers_is_a_loop; unit/test_layer_loop.py, values and gradients of a scan"
    ),
    **{
        f"{test}[{case}]": _ORACLE
        for test in (
            "test_logits_are_the_oracle_s",
            "test_a_packed_document_has_the_logits_it_has_alone",
        )
        for case in ("llama_like-xla", "gemma_like-reference")
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

_ROWS = "the same test of the widest row of this kernel in another dtype, of masked rows"
_COUNTED = "test_kernels_ask_for_the_shared_memory_that_was_counted"
_MASKED = "test_masked_kernels_ask_for_the_shared_memory_that_was_counted"
_SHARED_MEMORY = {
    **{
        f"{_COUNTED}[{case}]": _ROWS
        for case in (
            "softmax-131072-bfloat16",
            "softmax-262144-bfloat16",
            "rms_norm-262144-bfloat16",
            "rms_norm-262144-float32",
            "layer_norm-10240-bfloat16",
            "layer_norm-131072-bfloat16",
            "layer_norm-262144-float32",
            "softmax-126976-bfloat16",
            "softmax-262144-float32",
        )
    },
    **{f"{_MASKED}[{columns}-bfloat16]": _ROWS for columns in (32768, 131072, 262144)},
}

_WIDTH = "the same test of widths 72 and 256, and of this mask in another dtype"
_ATTENTION = {
    f"test_reference_and_xla[{case}]": f"the same test of {kept}"
    for case, kept in (
        ("bias-float32", "bias-of-queries and bias-broadcast"),
        ("causal-more-keys-float32", "everything, more keys too, and of causal-more-queries"),
        ("everything-float16", "everything in float32 and bfloat16, and of outliers in float16"),
        ("mqa-float32", "causal, of groups too, and of mha"),
        ("sinks-bfloat16", "sinks-empty-rows and sinks-and-one-off"),
        ("soft-cap-causal-bfloat16", "everything and bias-broadcast, which are capped"),
        ("window-of-two-float32", "window, window-left and window-open-left"),
    )
} | {
    f"test_reference_and_xla[{case}]": _WIDTH
    for case in (
        "causal-bfloat16",
        "full-float16",
        "gqa-8-float16",
        "outliers-causal-bfloat16",
        "width-80-bfloat16",
        "width-96-float16",
        "width-112-bfloat16",
        "width-160-bfloat16",
    )
}

_WIDER = "wider heads, which need more, and the lowering of all masks at 128"
_HOPPER = {
    **{f"test_forward_lowers[({width}, {width})-causal]": _WIDER for width in (64, 96, 128)},
    "test_forward_lowers[(128, 128)-full]": _WIDER,
    **{
        f"test_backward_of_packed_documents_fits_shared_memory[({width}, {width})]": _WIDER
        for width in (64, 96, 128)
    },
    "test_backward_of_packed_documents_fits_shared_memory[(192, 128)]": _WIDER,
    "test_backward_lowers[widths3-causal-True]": "the same test of the widest heads",
    "test_backward_lowers[widths30-full-False]": "the same of capped-False, and of other masks",
}

_PAGED = {
    f"test_lowers[{case}]": "the same test of latents, of many queries and of float16"
    for case in (
        "64-1-32-8-128-128-64-bfloat16",
        "128-1-32-32-128-128-16-bfloat16",
        "1-1-64-8-128-128-128-bfloat16",
    )
}

_TWO_STACKS = "unit/test_hf_golden.py's continuations of deepseek_v3, which has two stacks"
_CACHES = {
    "test_a_prompt_in_chunks_is_the_prompt_at_once[learned_positions-fp32]": (
        "the same model's cached logits at every position, one token at a time"
    ),
    "test_a_prompt_in_chunks_is_the_prompt_at_once[two_stacks-fp32]": _TWO_STACKS,
    "test_cached_logits_agree_at_every_position[gqa-fp32]": "the same test of gqa-bf16, gemma-fp32",
    "test_cached_logits_agree_at_every_position[two_stacks-fp32]": _TWO_STACKS,
}

_ONE_MESH = "the same test of fsdp_tensor, whose tensor axis divides heads alike"
_SERVING_MESHES = {
    **{
        f"test_rows_are_those_of_one_device[{name}]": _ONE_MESH
        for name in ("tensor", "replica_tensor")
    },
    "test_logits_are_as_close_as_on_one_device_and_the_cache_is_spread[tensor]": _ONE_MESH,
    "test_models_of_every_layout_are_loaded_onto_a_mesh[ours]": "the same test of run",
    "test_models_of_every_layout_are_loaded_onto_a_mesh[hf]": (
        "the same test of run; unit/test_hf_convert.py of each device's share of Hugging Face's"
    ),
}

_POLICY = "the same test of bf16-gemma_like, fp32-gpt_like, fp16-gpt_like"
_POLICIES = {
    f"test_every_matmul_of_a_step_is_what_the_policy_says[{case}]": _POLICY
    for case in ("fp32-gemma_like", "fp16-gemma_like", "bf16-gpt_like")
} | {
    **{
        f"test_every_reduction_of_a_step_is_in_fp32[{case}]": _POLICY
        for case in ("fp32-gemma_like", "fp16-gemma_like", "bf16-gpt_like")
    },
    "test_compiled_cpu_program_sums_in_fp32[fp32]": (
        "the same test of bf16; test_every_matmul_of_a_step_is_what_the_policy_says of fp32"
    ),
}

_ROUTING = {
    f"test_equals_a_loop_over_tokens[{case}]": kept
    for case, kept in (
        ("groups by their best", "the same test of groups by their two best"),
        ("softmax over all", "the same test of softmax over the chosen; hf_golden's qwen2_moe"),
        ("without gates", "the same test of shared and gated"),
    )
}

# File, and the names in it, without `test_` only where pytest has none.
NEAR_COPIES: dict[str, dict[str, str]] = {
    "e2e/test_checkpoint_processes.py": {
        "test_killed_at_random_moments[2]": (
            "e2e/test_training_interrupted.py, killed in turn while a checkpoint is written"
        ),
    },
    "e2e/test_launch.py": {
        "test_fault[1]": "unit/test_launch.py, a killed rank; `make nightly` has every fault",
    },
    "e2e/test_training_run.py": {
        "test_as_people_start_it": (
            "e2e/test_launch.py's two processes, started by `python -m jaxinfra` too; the start of "
            "e2e/test_package.py"
        ),
    },
    "kernels/test_append_heads.py": {
        "test_heads_go_into_pages_in_few_bits[e4m3]": (
            "the same test of int4; unit/test_cache_formats.py, what e4m3 keeps"
        ),
        "test_pools_in_few_bits_are_written_in_place[int8]": "the same test of e4m3",
    },
    "kernels/test_attention_numerics.py": _ATTENTION,
    "kernels/test_attention_sharding.py": {
        "test_hopper_kernels_lower_on_a_mesh[fused-shard_map]": "the same test of a part of a mesh",
    },
    "kernels/test_fused_matmul.py": {
        f"test_portable_forms_compute_the_formula[{case}-reference]": "the same test of apart"
        for case in ("norm", "norm of fp32, gated", "hidden values, residual")
    },
    "kernels/test_grouped_matmul_hopper.py": {"test_lowers[odd]": "test_lowers[gated]"},
    "kernels/test_hopper.py": _HOPPER,
    "kernels/test_linear_cross_entropy_hopper.py": {
        "test_loss_and_gradients_are_no_worse_than_the_plain_form[smoothed-2]": "its case both",
        "test_lowers[1-50257-None-False]": "test_lowers[1-50257-30.0-True]",
    },
    "kernels/test_norm.py": {
        "test_long_rows_of_other_dtypes_are_no_worse_than_the_plain_form[read twice-float32]": (
            "test_rows_read_twice, this kernel in bf16; test_other_dtypes, fp32 in another"
        ),
    },
    "kernels/test_norm_fp8.py": {
        "test_lowers[layer_norm+residual-8192x32768]": (
            "the same test of 16384x8192 and of 4096x131072"
        ),
    },
    "kernels/test_paged_attention.py": {
        "test_caches_in_few_bits_are_codes_times_scales[pages-64-e4m3-xla]": (
            "the same test of int4; unit/test_cache_formats.py, what e4m3 keeps"
        ),
    },
    "kernels/test_paged_attention_hopper.py": _PAGED,
    "kernels/test_paged_codes.py": {
        "test_threads_compute_the_definition[int4-128]": "the same test of int4-64 and fp8-128",
        "test_threads_compute_the_definition[fp8-64]": "the same test of int4-64 and fp8-128",
    },
    "kernels/test_rows_choice.py": _SHARED_MEMORY,
    "sharded/test_channel.py": {
        "test_equals_one_device[fsdp, tensor and context]": (
            "sharded/test_experts.py, whose routers emit and keep state; its case interleaved"
        ),
    },
    "sharded/test_collectives.py": {
        "test_one_device_does_not_communicate": (
            "test_tensor_parallel_all_reduces_once_a_half_block, which counts all that is sent"
        ),
        "test_data_parallel_only_reduces_gradients": (
            "sharded/test_zero.py, replicas sum gradients once; sharded/test_context_step.py, a "
            "step sums gradients and nothing else"
        ),
        "test_tensor_and_fully_sharded_compose": (
            "test_tensor_parallel_all_reduces_once_a_half_block, sharded/test_zero.py of fsdp, and "
            "test_meshes.py of both"
        ),
    },
    "sharded/test_context_attention.py": {
        "test_bytes_sent_are_the_formula[ring-float32]": (
            "sharded/test_context_step.py, what a step sends round, by the same formula"
        ),
        "test_equals_one_device[packed-all_gather]": (
            "sharded/test_pipeline_gradients.py's zb_v with context, packed and by all_gather"
        ),
    },
    "sharded/test_context_step.py": {
        "test_step_equals_one_device[tied-context4-ring-]": (
            "sharded/test_pipeline_gradients.py's zb_v with context, a ring within stages; "
            "sharded/test_context_attention.py of four devices; the same test of latent"
        ),
    },
    "sharded/test_experts.py": {
        "test_equals_one_device[expert 4, tensor 2, per expert]": (
            "the same test of expert 2 of fsdp 4; sharded/test_exchange.py of both forms"
        ),
    },
    "sharded/test_matrix.py": {
        "test_equals_one_device[untied-fsdp=2,context=2,tensor=2-3]": (
            "sharded/test_context_step.py of replica, context and tensor; test_meshes.py of fsdp"
        ),
    },
    "sharded/test_meshes.py": {
        "test_mesh_equals_one_device[tied-replica8]": "sharded/test_matrix.py of replica 2, fsdp 4",
        "test_mesh_equals_one_device[capped-replica2-fsdp2-tensor2]": (
            "test_one_device_equals_the_oracle[capped]; the same test of untied; "
            "sharded/test_matrix.py of replica 2, fsdp 4"
        ),
        "test_mesh_equals_one_device[latent-fsdp2-tensor4]": (
            "sharded/test_context_step.py's latent on replica, context and tensor; the same test "
            "of untied"
        ),
        "test_dropout_mask_is_the_same_on_a_mesh": (
            "e2e/test_training_damage.py, on two devices the same losses follow, with dropout; "
            "sharded/test_dropout.py of masks on a mesh"
        ),
        "test_mesh_equals_one_device[tied-fsdp8]": (
            "test_kept_weights_change_nothing[tied-fsdp2-tensor4]; sharded/test_matrix.py of fsdp 4"
        ),
    },
    "sharded/test_muon_meshes.py": {
        "test_losses_are_one_device_s[fsdp2-tensor4]": "test_updates_are_one_device_s",
    },
    "sharded/test_pipeline_gradients.py": {
        "test_pipeline_equals_one_device[interleaved with fsdp, tensor]": (
            "the same test of zb_v; sharded/test_channel.py of interleaved"
        ),
    },
    "sharded/test_zero.py": {
        "test_bytes_on_a_device[fsdp=8-2]": "test_bytes_on_a_device[fsdp=8-3], and its formula",
        "test_stage_1_scatters_gradients_once_and_gathers_parameters_once[2]": (
            "test_two_levels_scatter_first, which gathers as often"
        ),
        "test_kept_weights_are_gathered_once": (
            "sharded/test_planning_receipt.py, bytes of a step that keeps what it gathered"
        ),
    },
    "unit/test_decode_launches.py": {
        "test_a_layer_is_seven_kernels[int4 g128]": (
            "the same test of bf16; kernels/test_resident_rows.py, what both kernels are made of"
        ),
    },
    "unit/test_experts.py": _ROUTING,
    "unit/test_finetune.py": {
        "test_it_resumes_without_what_it_started_from": (
            "test_adapters_need_the_weights_they_were_trained_beside, which resumes too"
        ),
    },
    "unit/test_hf_commands.py": {
        "test_generate_continues_alike": (
            "test_an_exported_run_gives_the_same_logits; unit/test_serving_load.py's command"
        ),
    },
    "unit/test_hf_convert.py": _CONVERTED,
    "unit/test_hf_golden.py": _GOLDEN,
    "unit/test_layer_loop.py": {
        "test_weights_of_experts_are_rounded_before_the_layers": (
            "test_only_experts_are_read_as_rounded; test_values_and_gradients_of_a_scan"
        ),
    },
    "unit/test_model.py": _MODEL,
    "unit/test_numerics_program.py": _POLICIES,
    "unit/test_serving_cache.py": _CACHES,
    "unit/test_serving_form.py": {
        "test_generation_is_the_same[greedy]": "test_generation_is_the_same[drawn]",
    },
    "unit/test_serving_mesh.py": _SERVING_MESHES,
    "unit/test_serving_sampling.py": {
        f"test_rows_draw_what_compiled_settings_draw[{case}]": "the same test of both at once"
        for case in ("top-k", "top-p")
    },
    "unit/test_serving_pages.py": {
        "test_on_hopper_the_kernels_read_the_cache[bfloat16-plain-False-2]": (
            "the same test of plain-True"
        )
    },
    "unit/test_serving_steps.py": {
        "test_chunks_continue_as_the_whole_prompt[window]": (
            "unit/test_serving_cache.py, a prompt in chunks of gemma, which has windows"
        ),
    },
    "unit/test_step.py": {
        "test_micro_batches_equal_the_batch[4]": (
            "sharded/test_meshes.py's untied on one device, in four ragged micro-batches"
        ),
    },
    "unit/test_step_bench.py": {
        "test_both_steps_and_the_control_train_alike_under_warmup_and_clipping": (
            "test_channels_in_another_order_are_the_same_function; of warm-up the plain optimizer's"
        ),
    },
}


def mark_slow(items: Sequence[pytest.Item]) -> set[str]:
    """Marks them, and returns what is listed here of a file that was collected and is not in it."""
    collected = {"/".join(item.path.parts[-2:]) for item in items}
    unknown = {
        f"tests/{file}::{name}"
        for file, names in NEAR_COPIES.items()
        if file in collected
        for name in names
    }
    for item in items:
        file = "/".join(item.path.parts[-2:])
        if item.name in NEAR_COPIES.get(file, {}):
            item.add_marker(pytest.mark.slow)
            unknown.discard(f"tests/{file}::{item.name}")
    return unknown
