"""Configs of Hugging Face families: which keys are read, which are refused, and what is written."""

import json

import pytest

from jaxinfra.checkpoint.model_directory import read_model_directory
from jaxinfra.config.model import BlockConfig, MlpConfig
from jaxinfra.config.recurrent import NoMixer
from jaxinfra.errors import ConfigError
from jaxinfra.hf import from_hf_config, to_hf_config
from jaxinfra.hf.shared import in_runs
from tests.golden_families import GOLDEN, described, weights_of, write_directory


def test_steps_without_a_bound_are_read_as_older_releases_write_them(tmp_path):
    write_directory("mamba2", tmp_path)
    config = tmp_path / "config.json"
    want = read_model_directory(tmp_path).config
    older = described("mamba2")["config"] | {"time_step_limit": [0.0, float("inf")]}
    config.write_text(json.dumps(older))
    assert "Infinity" in config.read_text()
    assert read_model_directory(tmp_path).config == want


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gemma4", {"use_bidirectional_attention": "vision"}),  # Gemma 4 26B and 31B
        ("llama4", {"nope_layer_interval": 4}),  # Llama 4 Maverick in FP8
        ("mamba2", {"time_step_limit": [0.0, 1e308]}),  # as JSON has no infinity: Nemotron 3 Ultra
        ("nemotron_h", {"time_step_limit": [0.0, 1e308]}),
        ("glm_moe_dsa", {"layer_types": ["deepseek_sparse_attention"] * 3}),  # of transformers 5.2
        ("exaone_moe", {"first_last_k_dense_replace": 1, "num_nextn_predict_layers": 1}),
        ("exaone_moe", {"is_moe_layer": [False, True, True, True]}),
        ("exaone", {"embed_dropout": 0.0}),
        ("phi", {"rotary_dim": 4}),  # Phi 1
        ("falcon_odd", {"n_head": 4, "n_layer": 2}),
        ("exaone4", {"_num_mtp_layers": 1, "mtp_share_layers": True}),  # EXAONE 4.5
        ("hy_v3", {"qk_norm": True, "first_k_dense_replace": 1, "expert_hidden_dim": 16}),
        ("solar_open", {"intermediate_size": 10240, "first_k_dense_replace": 0}),
        ("glm4_moe_lite", {"first_k_dense_replace": 1, "partial_rotary_factor": 1.0}),
    ],
)
def test_keys_of_released_configs_change_nothing(name, keys):
    values = described(name)["config"]
    values = {each: x for each, x in values.items() if each != "time_step_limit"}
    assert from_hf_config(values | keys) == from_hf_config(values)


def test_layers_of_many_kinds_are_few_stacks():
    a, b, c = (
        BlockConfig(mixer=NoMixer(), feed_forward=MlpConfig(hidden_dim=n)) for n in (1, 2, 3)
    )
    for layers, sizes in (
        ([c, *[a, a, b, a] * 3, a, b], [(1, 1), (4, 3), (2, 1)]),
        ([a, b, c], [(3, 1)]),
        ([a] * 5 + [b, c], [(1, 5), (2, 1)]),
        ([a], [(1, 1)]),
    ):
        stacks = in_runs(layers)
        assert [(len(each.pattern), each.repeats) for each in stacks] == sizes
        assert [block for each in stacks for block in each.pattern * each.repeats] == layers


def test_kimi_k2_is_deepseek_v3_by_another_name():
    values = json.loads((GOLDEN.parent / "hf" / "deepseek_v3" / "config.json").read_text())
    assert from_hf_config(values | {"model_type": "kimi_k2"}) == from_hf_config(values)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v32", {"index_topk": 0}, "top_k=0 must be at least 1"),
        ("deepseek_v32", {"index_head_dim": 3}, "head_dim=3 is below rope_dim=4"),
        ("deepseek_v32", {"q_lora_rank": None}, "'q_lora_rank' is missing"),
        ("deepseek_v32", {"index_n_heads": None}, "'index_n_heads' is missing"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "is indexed_attention here"),
        ("deepseek_v32", {"mlp_layer_types": ["dense", "moe", "dense"]}, "name dense or sparse"),
        ("deepseek_v32", {"rope_interleave": False}, "neighbours are rotated"),
        ("glm_moe_dsa", {"indexer_types": ["full", "full", "shared"]}, "not computed here"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types of 1 layers"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": 2}, "'shared'"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FFS"}, "'shared'"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "the indexer rotates neighbours"),
    ],
)
def test_indexers_that_cannot_be_computed_are_refused(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        from_hf_config(described(name)["config"] | changes)
    every = {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 3}
    same = described("glm_moe_dsa")["config"]
    assert from_hf_config(same | every) == from_hf_config(same)


def test_keys_that_a_layer_takes_from_another_are_left_out():
    """Files of Gemma 4 have tensors of layers that never compute keys."""
    config = from_hf_config(described("gemma4_shared")["config"])
    ignored = weights_of(config, "gemma4_text").ignored
    assert ignored is not None
    names = [f"model.layers.{i}.self_attn.k_proj.weight" for i in range(6)]
    assert [bool(ignored.fullmatch(name)) for name in names] == [False] * 4 + [True] * 2
    assert config.layers[4].mixer.cache.elements == 0


# As releases before transformers 5, or makers of models, wrote what the cases' configs say.
OLDER = {
    "gemma3": {"rope_local_base_freq": 1e4, "rope_theta": 1e6}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "olmo3": {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10_000},
    "ministral3_odd": {"rope_theta": 10_000.0}
    | {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 2.0}
        | {"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 5}
    },
    "stablelm": {"partial_rotary_factor": 0.25, "rope_theta": 10_000},
    "minimax_m2": {"rotary_dim": 4, "rope_theta": 5e6, "use_qk_norm": True},
    "nemotron_h": {"layers_block_type": None, "hybrid_override_pattern": "MEM-*E"},
    "mamba": {"d_model": 32, "d_inner": 64, "n_layer": 3, "rms_norm": True, "ssm_cfg": {}},
    "falcon_mamba": {"expand": 16},
    "granite_hybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "lfm2_odd": {"layer_types": None, "full_attn_idxs": [0, 2], "block_ff_dim": 48}
    | {"tie_embedding": False, "tie_word_embeddings": True, "rope_theta": 500.0},
    "kimi_linear": {"layer_types": None, "linear_head_dim": None, "linear_num_heads": None}
    | {
        "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4]}
        | {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}
    }
    | {"mlp_layer_types": None, "first_k_dense_replace": 1},
}


@pytest.mark.parametrize("name", OLDER)
def test_older_keys_say_the_same(name):
    newer = described(name)["config"]
    older = {key: value for key, value in newer.items() if key != "rope_parameters"}
    if name == "olmo3":
        newer["rope_parameters"]["full_attention"]["rope_theta"] = 5e5
        older["rope_scaling"] = {"original_max_position_embeddings": 16}
    for key, value in OLDER[name].items():
        older[key] = {**older.get(key, {}), **value} if isinstance(value, dict) else value
    assert from_hf_config(older) == from_hf_config(newer)


def test_phimoe_reads_and_writes_how_long_its_first_context_was():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "type": "longrope"}
    factors |= {"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 16}
    values = described("phimoe")["config"] | {"rope_parameters": None, "rope_scaling": factors}
    config = from_hf_config(values)
    assert config.layers[0].mixer.rope.scaling.original_max_positions == 16
    assert from_hf_config(to_hf_config(config, model_type="phimoe")) == config


# Keys of released configs that no release of the reference reads.
RELEASED = {
    "minimax_m2": {"layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192}
    | {"shared_moe_mode": "sigmoid"},
    "nemotron_h": {"rms_norm_eps": 1e-5},
    "ernie4_5_moe": {"moe_capacity": [64], "moe_gate": "topk", "num_nextn_predict_layers": 0},
    "hunyuan_moe": {"moe_topk": [2] * 3, "num_shared_expert": [1] * 3, "attention_head_dim": 8}
    | {"moe_intermediate_size": [48] * 3, "kv_lora_rank": None, "topk_group": False},
    "gemma3n": {"altup_lr_multiplier": 1.0, "query_pre_attn_scalar": 256},
    "cohere": {"model_max_length": 131_072},
    "starcoder2": {"activation_function": "gelu"},
    "nemotron": {"kv_channels": 8, "rope_percent": 0.5},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "mpt": {"architectures": ["MPTForCausalLM"]},
    "bloom": {"n_head": None, "num_attention_heads": 4},
    "hunyuan_dense": {"num_experts": 1, "moe_topk": [1] * 3, "num_shared_expert": [1] * 3},
    "falcon": {"ff_factor": 4},
    "qwen3_5": {"mlp_only_layers": []},
    "stablelm": {"norm_eps": 1e-5, "rope_pct": 0.25},
    "nemotron_h_odd": {"mamba_expand": 2, "mamba_dt_min": 0.6, "num_query_groups": 1},
}


@pytest.mark.parametrize("name", RELEASED)
def test_keys_of_released_configs_are_known(name):
    values = described(name)["config"]
    released = {k: v for k, v in (values | RELEASED[name]).items() if k != "n_head" or v}
    assert from_hf_config(released) == from_hf_config(values)


def test_the_text_of_gemma_3_has_the_sizes_that_its_config_leaves_out():
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    config = from_hf_config({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    attention = config.layers[0].mixer
    assert (attention.num_q_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_positions) == (262_208, 131_072)


def test_missing_keys_have_the_defaults_of_the_reference():
    values = described("dots1_odd")["config"] | {"layer_types": None, "max_window_layers": 2}
    assert [block.mixer.window for block in from_hf_config(values).layers] == [None, None, 5]
    values = described("qwen3_next_odd")["config"]
    short = {key: value for key, value in values.items() if key != "norm_topk_prob"}
    assert from_hf_config(short) == from_hf_config(values | {"norm_topk_prob": True})
    values, scaling = described("apertus")["config"], {"rope_type": "linear", "factor": 2.0}
    ropes = [{"rope_parameters": scaling | more} for more in ({}, {"rope_theta": 12e6})]
    assert from_hf_config(values | ropes[0]) == from_hf_config(values | ropes[1])
    values = described("jamba")["config"] | {"num_attention_heads": 16, "hidden_size": 64}
    short = {key: value for key, value in values.items() if key != "num_key_value_heads"}
    assert from_hf_config(short) == from_hf_config(values | {"num_key_value_heads": 8})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("exaone4", "sliding_window"),
        ("gemma4", "head_dim"),
        ("gemma4", "hidden_size_per_layer_input"),
    ],
)
def test_keys_without_one_default_are_required(name, key):
    values = {k: value for k, value in described(name)["config"].items() if k != key}
    with pytest.raises(ConfigError, match=key):
        from_hf_config(values)


def test_settings_of_one_type_of_layer_that_are_not_read_are_refused():
    values = json.loads(json.dumps(described("gemma3")["config"]))
    values["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = 0.5
    with pytest.raises(ConfigError, match=r"sliding_attention: partial_rotary_factor=0\.5"):
        from_hf_config(values)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "truncate": False}
    values["rope_parameters"]["sliding_attention"] = yarn
    with pytest.raises(ConfigError, match="sliding_attention: truncate=false"):
        from_hf_config(values)


@pytest.mark.parametrize("name", ["bamba", "glm", "phi", "qwen3_next", "qwen3_5_moe", "stablelm"])
def test_another_part_of_a_head_than_by_default_is_written(name):
    values = json.loads(json.dumps(described(name)["config"]))
    values["rope_parameters"]["partial_rotary_factor"] = 1.0
    config = from_hf_config(values)
    assert from_hf_config(to_hf_config(config, model_type=values["model_type"])) == config


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bamba", {"attn_layer_indices": [*range(9)]}),
        ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}),
        ("granite_hybrid", {"layer_types": ["attention"] * 4}),
        ("lfm2", {"layer_types": ["full_attention"] * 4}),
        ("qwen3_next", {"layer_types": ["full_attention"] * 3}),
        ("nemotron_h", {"layers_block_type": ["full_attention", "mlp"], "num_hidden_layers": 2}),
    ],
)
def test_a_hybrid_whose_layers_all_attend_is_written(name, keys):
    values = described(name)["config"] | keys
    config = from_hf_config(values)
    assert not any(block.mixer.cache.state for block in config.layers)
    assert from_hf_config(to_hf_config(config, model_type=values["model_type"])) == config


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("glm4_moe", {"first_k_dense_replace": 9}),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 3}),
        ("exaone_moe", {"mlp_layer_types": ["dense"] * 4}),
        ("hy_v3", {"mlp_layer_types": ["dense"] * 3}),
        ("kimi_linear", {"mlp_layer_types": ["dense"] * 4}),
        ("dots1", {"first_k_dense_replace": 9}),
        ("llama4", {"moe_layers": []}),
        ("ernie4_5_moe", {"moe_layer_start_index": 9}),
        ("qwen3_next", {"mlp_only_layers": [0, 1, 2]}),
    ],
)
def test_a_model_of_experts_whose_layers_are_all_dense_is_written(name, keys):
    values = described(name)["config"] | keys
    config = from_hf_config(values)
    assert all(isinstance(block.feed_forward, MlpConfig) for block in config.layers)
    assert from_hf_config(to_hf_config(config, model_type=values["model_type"])) == config


@pytest.mark.parametrize(
    ("name", "keys", "other"),
    [
        ("ernie4_5", {"head_dim": 12}, "ernie4_5"),  # Helium's heads are as wide as the model
        ("seed_oss", {"attention_bias": False, "num_attention_heads": 6}, "mistral"),
        ("granite", {"attention_multiplier": 0.0}, "granite"),  # Gemma's writer divides by it
    ],
)
def test_a_model_is_written_as_an_architecture_that_the_reference_reads(name, keys, other):
    config = from_hf_config(described(name)["config"] | keys)
    assert to_hf_config(config)["model_type"] == other


def test_a_ministral_whose_queries_do_not_grow_is_written():
    values = json.loads(json.dumps(described("ministral3")["config"]))
    values["rope_parameters"]["llama_4_scaling_beta"] = 0.0
    config = from_hf_config(values)
    written = to_hf_config(config, model_type="ministral3")
    assert written["rope_parameters"]["llama_4_scaling_beta"] == 0.0
    assert config.layers[0].mixer.query_scaling is None
    assert from_hf_config(written) == config


def test_a_model_whose_layers_are_not_rotated_is_written():
    values = described("exaone4")["config"] | {"layer_types": ["full_attention"] * 4}
    config = from_hf_config(values)
    assert all(block.mixer.rope is None for block in config.layers)
    assert from_hf_config(to_hf_config(config, model_type="exaone4")) == config


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("cohere", "use_parallel_block", False, "side by side"),
        ("gemma3", "attn_logit_softcapping", 50.0, "implementations differ"),
        ("gemma4", "num_kv_shared_layers", 6, "none before them is of the type"),
        ("gemma4", "per_layer_config", {"0": {"head_dim": 8}}, "all global layers alike"),
        ("opt", "do_layer_norm_before", False, "OPT-350m"),
        ("opt", "word_embed_proj_dim", 16, "as wide as the model"),
        ("bloom", "apply_residual_connection_post_layernorm", True, "normalized values"),
        ("mpt", "attn_config", {"qk_ln": True}, "plain causal"),
        ("falcon", "alibi_bias", 3, "unknown keys"),
        ("llama4", "num_experts_per_tok", 2, "scales_inputs"),
        ("smollm3", "no_rope_layers", [1, 0], "no_rope_layers"),
        ("smollm3_odd", "use_sliding_window", False, "no sliding_window"),
        ("cwm", "rope_parameters", None, "takes for a scaling"),
        ("gptj", "rotary_dim", None, "missing"),
        ("falcon", "apply_residual_connection_post_layernorm", True, "normalized values"),
        ("minimax_m2", "attn_type_list", [1, 0, 1], "full attention"),
        ("phimoe", "num_experts_per_tok", 4, "SparseMixer"),
        ("olmo2", "clip_qkv", 8.0, "unknown keys"),
        ("granite", "residual_multiplier", 0.0, "positive"),
        ("granite", "logits_scaling", 0, "logits_scaling=0 must be positive"),
        ("helium", "head_dim", 12, "as wide together as hidden_size"),
        ("olmo2", "num_attention_heads", 0, "num_attention_heads=0 must be positive"),
        ("olmo2", "num_hidden_layers", 0, "num_hidden_layers=0 must be positive"),
        ("mamba2", "time_step_limit", [0.1], "the least and the largest"),
        ("exaone4", "layer_types", ["chunked_attention"] * 4, "not supported"),
        ("exaone4", "layer_types", None, "layer_types"),
        ("ernie4_5_moe", "use_bias", True, "implementations differ"),
        ("exaone_moe", "is_moe_layer", [True] * 4, "by other keys"),
        ("exaone_moe", "first_last_k_dense_replace", 2, "1 by other keys"),
        ("phi", "rotary_dim", 8, "partial_rotary_factor says 4"),
        ("falcon_odd", "n_head", 3, "num_attention_heads says otherwise"),
        ("exaone", "architectures", ["MistralForCausalLM"], "a language model, ExaoneForCausalLM"),
        ("hy_v3", "qk_norm", False, "qk_norm=False: it is true in every Hy3"),
        ("hy_v3", "expert_hidden_dim", 24, "moe_intermediate_size says otherwise"),
        ("solar_open", "first_k_dense_replace", 1, "every layer has experts"),
        ("glm4_moe_lite", "scoring_func", "softmax", "scores of this architecture are sigmoid"),
        ("hunyuan_moe", "moe_topk", [1, 2], "alike"),
        ("ministral3", "attention_bias", True, "no such bias"),
        ("granite_hybrid", "position_embedding_type", "alibi", "known are rope and nope"),
        ("granite_hybrid", "mamba_d_head", 7, "have together"),
        ("ernie4_5_moe", "moe_norm_min", 0.5, "no other bound"),
        ("bloom", "slow_but_exact", True, "leaves biases out"),
        ("gpt_neox", "rope_theta", 77.0, "another name for rotary_emb_base"),
        ("gemma3", "rope_parameters", {"rope_theta": 1e4}, "entry for each of sliding_attention"),
        ("hunyuan_dense", "rope_scaling", {"alpha": 9.0}, "unknown keys"),
        ("bamba", "mamba_n_groups", 3, "not a multiple"),
        ("bamba", "hidden_act", "gelu", "convolutions"),
        ("bamba", "partial_rotary_factor", 0.75, "write it in rope_parameters"),
        ("falcon_h1", "ssm_multipliers", [1.0], "give 5"),
        ("falcon_h1", "projectors_bias", True, "biases together"),
        ("nemotron_h", "layers_block_type", ["rnn"], "rnn is not supported"),
        ("nemotron_h", "hybrid_override_pattern", "M?", "no kind of layer"),
        ("nemotron_h", "mlp_bias", True, "only dense layers"),
        ("nemotron_h", "time_step_limit", [0.1, 0.2], "implementations differ"),
        ("lfm2", "layer_types", ["conv"], "1 entries for 4"),
        ("mamba", "rescale_prenorm_residual", True, "implementations differ"),
        ("mamba2", "rescale_prenorm_residual", True, "implementations differ"),
        ("jamba", "attn_layer_offset", 3, "below attn_layer_period=3"),
        ("kimi_linear", "mlp_layer_types", ["sparse"], "each of 4"),
        ("kimi_linear", "linear_attn_config", {"full_attn_layers": [1]}, "each of 4 layers once"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(name, key, value, said):
    with pytest.raises(ConfigError, match=said):
        from_hf_config(described(name)["config"] | {key: value})
