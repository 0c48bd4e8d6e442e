"""Of programs for several devices."""

SHARDED: dict[str, dict[str, str]] = {
    "test_channel.py": {
        "test_equals_one_device[fsdp, tensor and context]": (
            "sharded/test_experts.py, whose routers emit and keep state"
        ),
        "test_equals_one_device[interleaved]": (
            "sharded/test_experts.py in a pipeline; unit/test_pipeline_schedules.py of interleaved"
        ),
    },
    "test_collectives.py": {
        "test_one_device_does_not_communicate": (
            "test_tensor_parallel_all_reduces_once_a_half_block, which counts all that is sent"
        ),
        "test_data_parallel_only_reduces_gradients": (
            "sharded/test_zero.py, two levels; sharded/test_context_step.py, a step sums gradients "
            "and nothing else"
        ),
        "test_tensor_and_fully_sharded_compose": (
            "test_tensor_parallel_all_reduces_once_a_half_block, sharded/test_zero.py of fsdp, and "
            "test_meshes.py of both"
        ),
    },
    "test_context_attention.py": {
        "test_equals_one_device[bf16-ring]": "the same test of packed-ring, in float32",
        "test_equals_one_device[window-of-chunks-ring]": "the same test of packed-ring",
        "test_bytes_sent_are_the_formula[ring-float32]": (
            "sharded/test_context_step.py, what a step sends round, by the same formula"
        ),
        "test_equals_one_device[packed-all_gather]": (
            "sharded/test_pipeline_gradients.py's zb_v with context, packed and by all_gather"
        ),
    },
    "test_context_step.py": {
        "test_step_equals_one_device[tied-context4-ring-]": (
            "sharded/test_pipeline_gradients.py's zb_v with context, a ring within stages; "
            "sharded/test_context_attention.py of four devices; the same test of latent"
        ),
    },
    "test_exchange.py": {
        "test_bytes_are_those_of_the_formula[per_device]": "the same test of per_expert",
        "test_what_has_no_room_is_counted[per_device]": (
            "the same test of per_expert; test_two_levels of per_device, what is left out too"
        ),
    },
    "test_experts_use.py": {
        "test_greedy_is_argmax_without_a_cache": (
            "unit/test_hf_golden.py's continuations of deepseek_v3; sharded/test_engine_meshes.py"
        ),
    },
    "test_meshes.py": {
        "test_one_device_equals_the_oracle[untied]": (
            "test_replicas_shards_and_stage_2_equal_one_device, of the same model and oracle"
        ),
        "test_one_device_equals_the_oracle[capped]": (
            "sharded/test_repeated_heads.py: windows, caps and sandwich norms, by the same oracle"
        ),
        "test_one_device_equals_the_oracle[latent]": (
            "sharded/test_context_step.py's latent, by the same oracle"
        ),
        "test_dropout_mask_is_the_same_on_a_mesh": "sharded/test_dropout.py of masks on a mesh",
    },
    "test_muon_meshes.py": {
        "test_losses_are_one_device_s[fsdp2-tensor4]": "test_updates_are_one_device_s",
        "test_updates_are_one_device_s[fsdp8-zero1]": (
            "the same test of pipe, fsdp and tensor; sharded/test_zero.py of stage 1"
        ),
    },
    "test_pipeline_gradients.py": {
        "test_pipeline_equals_one_device[interleaved with fsdp, tensor]": (
            "the same test of zb_v; unit/test_pipeline_schedules.py of interleaved"
        ),
        "test_temporaries_do_not_grow_with_the_micro_batches[1f1b]": (
            "unit/test_pipeline_schedules.py, peak activations, and slots that no stage exceeds"
        ),
    },
    "test_zero.py": {
        "test_bytes_on_a_device[fsdp=8-2]": "test_bytes_on_a_device[fsdp=8-3], and its formula",
        "test_stage_1_scatters_gradients_once_and_gathers_parameters_once[2]": (
            "test_two_levels_scatter_first, which gathers as often"
        ),
        "test_replicas_sum_gradients_once[replica=2,fsdp=4-2]": (
            "test_two_levels_scatter_first, which counts the replicas' sum"
        ),
        "test_kept_weights_are_gathered_once": (
            "sharded/test_planning_receipt.py, bytes of a step that keeps what it gathered"
        ),
    },
}
