"""Of kernels and the operations that they compute."""

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
            "rms_norm-32768-bfloat16",
            "softmax-126976-bfloat16",
            "softmax-262144-float32",
        )
    },
    **{f"{_MASKED}[{columns}-bfloat16]": _ROWS for columns in (32768, 131072, 262144)},
    f"{_MASKED}[262144-float32]": "the same test of 126976; the unmasked rows of this length",
}

_WIDTH = "the same test of mla, whose widths differ, and of this mask in another dtype"
_ATTENTION = {
    f"test_reference_and_xla[{case}]": f"the same test of {kept}"
    for case, kept in (
        ("bias-float32", "bias-of-queries and bias-broadcast"),
        ("causal-float32", "causal-more-queries, and of everything"),
        ("causal-more-keys-float32", "everything, more keys too, and of causal-more-queries"),
        ("everything-float16", "everything in float32 and bfloat16, and of outliers in float16"),
        ("lengths-float32", "everything; sinks-empty-rows, a row without keys too"),
        ("mha-float32", "everything, whose heads are groups; mla, whose are not"),
        ("mqa-float32", "everything, of groups too, and of mla"),
        ("packed-bfloat16", "everything, in bfloat16 too"),
        ("packed-cross-float32", "everything, more keys too, and of bias-of-queries"),
        ("sinks-bfloat16", "sinks-empty-rows and sinks-and-one-off"),
        ("soft-cap-causal-bfloat16", "everything and bias-broadcast, which are capped"),
        ("window-float32", "everything, a window of both sides; window-open-left"),
        ("window-left-bfloat16", "everything; unit/test_model.py, the field of windows"),
        ("window-of-two-float32", "everything, and of window-open-left"),
    )
} | {
    f"test_reference_and_xla[{case}]": _WIDTH
    for case in (
        "causal-bfloat16",
        "full-float16",
        "gqa-8-float16",
        "outliers-causal-bfloat16",
        "width-72-bfloat16",
        "width-80-bfloat16",
        "width-96-float16",
        "width-112-bfloat16",
        "width-160-bfloat16",
        "width-256-bfloat16",
    )
}

_WIDER = "wider heads, which need more, and the lowering of all masks"
_HOPPER = {
    "test_forward_is_the_oracle[Case(T=136, S=None, B=1, N=2, K=1, H=64, Hv=None, left=None, "
    "right=None, cap=None, segments=False, lengths=False, sinks=False)]": (
        "the same test of keys of another length, causal, whose tiles are not whole either"
    ),
    **{
        f"test_backward_of_packed_documents_fits_shared_memory[({width}, {width})]": _WIDER
        for width in (64, 96, 128)
    },
    "test_backward_of_packed_documents_fits_shared_memory[(192, 128)]": _WIDER,
    "test_backward_lowers[widths1-causal]": "the same test of window",
    "test_backward_lowers[widths28-causal]": (
        "the same test of window; packed documents of the widest heads"
    ),
    "test_backward_lowers[widths15-full]": "the same of capped, and of other masks",
}

_PAGED = {
    f"test_lowers[{case}]": "the same test of latents and of many queries"
    for case in (
        "4-7-6-2-256-256-32-bfloat16",
        "64-1-32-8-128-128-64-float16",
        "64-1-32-8-128-128-64-bfloat16",
        "128-1-32-32-128-128-16-bfloat16",
        "1-1-64-8-128-128-128-bfloat16",
    )
}

_TWO_FORMS = "the same test of this form in the other way to lie, and of the other form"
_SPLIT = {
    "test_hopper_kernels_lower_on_a_mesh[shard_map]": "the same test of a part of a mesh",
    "test_hopper_kernels_lower_on_a_mesh[explicit]": (
        "the same test of a part of a mesh; test_sharded_arrays of custom-call and Explicit"
    ),
    "test_public_function_on_explicit_axes[reference]": "the same test of xla",
    **{
        f"test_sharded_arrays[{case}]": _TWO_FORMS
        for case in (
            *("xla-gqa-Explicit", "xla-sinks-and-bias-Auto", "custom-call-gqa-Auto"),
            *("custom-call-mqa-Auto", "custom-call-sinks-and-bias-Explicit"),
            "custom-call-too-few-kv-heads-Explicit",
        )
    },
}

_ROWS_OF_SOFTMAX = {
    "test_long_rows_are_no_worse_than_the_plain_form[folded ahead]": (
        "test_where_of_long_rows of this form; the same test of rows read twice"
    ),
    "test_where_of_long_rows[read twice]": (
        "test_long_rows of this form; the same test of both others"
    ),
    "test_lowers[8192x32768]": "test_rows_choice.py, masked rows of 126976",
    "test_other_dtypes_are_no_worse_than_the_plain_form[float32-softmax-(3, 2048)]": (
        "the same test of float32-log_softmax, and of this length in float16"
    ),
    "test_other_dtypes_are_no_worse_than_the_plain_form[float16-softmax-(8, 32)]": (
        "the same test of float16-log_softmax; this length in the test before it"
    ),
    **{
        f"test_kernels_are_no_worse_than_the_plain_form[{case}]": (
            "the same test of softmax of long rows and of log_softmax of short ones"
        )
        for case in ("softmax-shape0", "log_softmax-shape3")
    },
}

_ROUNDED_NORMS = {
    "test_lowers[layer_norm+residual-8192x32768]": (
        "the same test of 16384x8192 and of 4096x131072"
    ),
    "test_long_rows_are_no_worse_than_the_plain_form[read again-layer_norm+residual]": (
        "the same test of kept rows; test_norm.py, rows read twice"
    ),
    **{
        f"test_kernels_are_no_worse_than_the_plain_form[{case}]": (
            "the same test of layer_norm+residual, which has all, and of rms_norm"
        )
        for case in (
            *("(2, 2048)-layer_norm", "(2, 2048)-rms_norm", "(2, 2048)-rms_norm+residual"),
            *("(8, 96)-layer_norm", "(8, 96)-layer_norm+residual", "(8, 96)-rms_norm+residual"),
        )
    },
}


KERNELS: dict[str, dict[str, str]] = {
    "test_append_heads.py": {
        "test_heads_go_into_pages_in_few_bits[e4m3]": (
            "the same test of int4; unit/test_cache_formats.py, what e4m3 keeps"
        ),
        "test_pools_in_few_bits_are_written_in_place[int8]": "the same test of e4m3",
    },
    "test_attention_numerics.py": _ATTENTION,
    "test_attention_choice.py": {
        "test_a_kernel_lowers_to_cuda[d256 full b8 s2048 h16/4]": "test_hopper.py of this width",
    },
    "test_attention_sharding.py": _SPLIT,
    "test_attention_transforms.py": {
        f"test_vmap_equals_a_loop[{case}]": "the same test of the other form and of this one"
        for case in ("custom-call-False", "xla-True")
    },
    "test_grouped_matmul_hopper.py": {"test_lowers[odd]": "test_lowers[gated]"},
    "test_hopper.py": _HOPPER,
    "test_ladder.py": {
        "test_a_rung_multiplies[prefetched]": "the same test of clustered, which prefetches too",
    },
    "test_linear_cross_entropy_hopper.py": {
        "test_loss_and_gradients_are_no_worse_than_the_plain_form[plain-1]": "its case both",
        "test_lowers[128256-None-True]": "test_lowers[50257-30.0-True]",
        "test_loss_and_gradients_are_no_worse_than_the_plain_form[smoothed-2]": "its case both",
        "test_lowers[50257-None-False]": "test_lowers[50257-30.0-True]",
    },
    "test_norm.py": {
        "test_long_rows_of_other_dtypes_are_no_worse_than_the_plain_form[read twice-float32]": (
            "test_rows_read_twice, this kernel in bf16; norms in fp32 of test_norm_fp8.py"
        ),
        "test_kernels_are_no_worse_than_the_plain_form[(8, 32)-1e-06-layer_norm+residual]": (
            "test_other_dtypes of this shape; the same test of long rows"
        ),
        "test_lowers_with_everything[1024]": "the same test of the longest rows; test_lowers",
        "test_other_dtypes_are_no_worse_than_the_plain_form[float32-(2, 2048)]": (
            "the same test of float16; test_norm_fp8.py of float32; portable forms in float32"
        ),
    },
    "test_norm_fp8.py": _ROUNDED_NORMS,
    "test_paged_attention.py": {
        "test_caches_in_few_bits_are_codes_times_scales[pages-64-e4m3-xla]": (
            "the same test of int4; unit/test_cache_formats.py, what e4m3 keeps"
        ),
    },
    "test_paged_attention_hopper.py": _PAGED,
    "test_paged_codes.py": {
        "test_threads_compute_the_definition[int4-128]": "the same test of int4-64 and fp8-128",
        "test_threads_compute_the_definition[fp8-64]": "the same test of int4-64 and fp8-128",
    },
    "test_rows_choice.py": _SHARED_MEMORY,
    "test_rows_flat.py": {
        "test_the_real_form_lowers[rms_norm-1001]": "the same test of layer_norm, a bias beside it",
        **{
            f"test_each_row_is_taken_once_by_a_block_of_its_shift[1031-{columns}]": (
                "the same test of 1001 and 17706 columns; of these with 300 rows"
            )
            for columns in (5001, 12496, 27164)
        },
    },
    "test_rows_odd.py": {
        "test_softmaxes_are_no_worse_than_the_plain_form[read again]": (
            "the same of windows; test_softmax.py, rows read twice"
        ),
    },
    "test_rows_uneven.py": {
        "test_the_real_form_lowers[ahead]": "the same test of a loop of chunks, ahead too",
        "test_layer_norm_is_no_worse_than_the_plain_form[ahead-0.0]": (
            "test_neighbors_that_are_no_numbers of this form, whose results and gradients are held "
            "to the same bounds; the same test of a loop of chunks"
        ),
        "test_a_count_that_is_off_by_a_column_is_caught[of a chunk]": (
            "test_totals_of_a_cluster of a column too many, in chunks and rows; the same of a row"
        ),
    },
    "test_scaled_matmul_hopper.py": {
        **{
            f"test_workloads_lower_for_a_gpu[{case}]": "the same test of 64x4096x7168"
            for case in ("128x7168x18432", "4096x24576x1536")
        },
    },
    "test_softmax.py": _ROWS_OF_SOFTMAX,
}
