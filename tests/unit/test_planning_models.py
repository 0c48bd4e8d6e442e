"""Shapes of Hugging Face configs, and the command."""

import json

import pytest

from jaxinfra.cli.main import main
from jaxinfra.config.presets import MODELS
from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.hf import from_hf_config
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.model import (
    active_parameters,
    find_model,
    plan_model,
    total_parameters,
)
from jaxinfra.planning.receipt import compile_only_devices, importlib

COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
MIXTRAL = COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "max_position_embeddings": 32_768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32_000,
}
QWEN3_MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "max_window_layers": 48,
    "norm_topk_prob": True,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40_960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151_936,
}
DEEPSEEK_V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "n_group": 8,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163_840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129_280,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 16,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "vocab_size": 102_400,
}
QWEN15_MOE = COMMON | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
    "vocab_size": 151_936,
}


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (MIXTRAL, "mixtral_8x7b"),
        (QWEN3_MOE, "qwen3_30b_a3b"),
        (DEEPSEEK_V3, "deepseek_v3"),
        (DEEPSEEK_V2_LITE, "deepseek_v2_lite"),
    ],
)
def test_published_configs_are_the_presets(values, name):
    assert from_hf_config(values) == MODELS[name]()


@pytest.mark.parametrize(
    ("values", "billions", "active"),
    [(DEEPSEEK_V2_LITE, 15.7, 2.7), (QWEN15_MOE, 14.3, 2.7)],
)
def test_published_sizes(values, billions, active):
    """arXiv 2405.04434 says 15.7B and 2.4B without tables; Qwen1.5-MoE-A2.7B is named so."""
    model = plan_model(from_hf_config(values))
    assert round(total_parameters(model) / 1e9, 1) == billions
    assert round(active_parameters(model) / 1e9, 1) == active


@pytest.mark.parametrize(
    ("changes", "repeats", "counts"),
    [
        ({"mlp_only_layers": [0, 5]}, (1, 4, 1, 42), [2, 46]),
        ({"decoder_sparse_step": 2}, (24, 24), [24, 24]),
    ],
)
def test_layers_that_do_not_route(changes, repeats, counts):
    """Runs of layers that are alike are stacks, a pattern that repeats is one."""
    config = from_hf_config(QWEN3_MOE | changes)
    assert config.repeats == repeats
    assert len(config.stacks) == (1 if len(repeats) == 2 else 4)
    assert [layer.count for layer in plan_model(config).layers] == counts


def test_unknown_architectures_and_missing_keys_are_named():
    with pytest.raises(ConfigError, match="mamba"):
        from_hf_config({"model_type": "mamba"})
    with pytest.raises(ConfigError, match="num_local_experts"):
        from_hf_config({k: v for k, v in MIXTRAL.items() if k != "num_local_experts"})
    with pytest.raises(ConfigError, match="expert_choice"):
        from_hf_config(MIXTRAL | {"expert_choice": True})


def test_a_config_file_and_its_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    by_file = find_model(str(tmp_path / "config.json"))
    assert total_parameters(by_file) == total_parameters(find_model(str(tmp_path)))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="object"):
        find_model(str(tmp_path))


@pytest.fixture(autouse=True)
def no_results_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(capsys, *arguments) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_prints_json_for_a_mesh_and_for_a_search(capsys):
    code, out, _ = plan(capsys, "llama3_8b", "--devices", "8", "--mesh", "fsdp=8", "--json")
    assert code == 0
    assert json.loads(out)["mesh"]["fsdp"] == 8
    code, out, _ = plan(
        capsys,
        *("llama3_8b", "--devices", "8", "--tokens", "1e12", "--json", "--batch", "32"),
        *("--recipe", "bf16,fp8-transformer-engine", "--fix", "pipe=1,context=1"),
    )
    assert code == 0
    values = json.loads(out)
    assert values["search"]["runners_up"][0]["why"]
    assert values["days"] > 0
    assert values["mesh"]["pipe"] == 1
    assert values["layout"]["recipe"] == "fp8-transformer-engine"
    told = {each["choice"]: each for each in values["search"]["alternatives"]}
    assert told["recipe"]["value"] == "bf16"
    assert told["recipe"]["step_s"] > values["step_s"]
    assert "takes" in told["tensor"]["why"] or "does not fit" in told["tensor"]["why"]
    assert values["search"]["pareto"][-1]["step_s"] == values["step_s"]
    assert values["memory_by_remat"]["full"]["total"] < values["memory_by_remat"]["none"]["total"]
    assert values["decode_flops_per_token"] < values["flops_per_token"]


def test_results_of_ones_own_devices_are_read_and_named(capsys, tmp_path):
    environment = {"device": "NVIDIA H200"}
    own = {"environment": environment, "constants": {"matmul_efficiency": {"bf16": 0.5}}}
    directory = tmp_path / "cache" / "jaxinfra" / "bench"
    directory.mkdir(parents=True)
    arguments = ["llama3_8b", "--devices", "8", "--mesh", "fsdp=8", "--json"]
    shipped = json.loads(plan(capsys, *arguments)[1])
    (directory / "constants.json").write_text(json.dumps(own))
    measured = json.loads(plan(capsys, *arguments)[1])
    assert measured["step_s"] > 1.2 * shipped["step_s"]
    assert measured["constants"]["matmul_efficiency"] == str(directory / "constants.json")
    other = json.loads(plan(capsys, *arguments, "--device", "h100")[1])
    assert "h200.json" in other["constants"]["matmul_efficiency"]
    (directory / "broken.json").write_text("{")
    code, _, err = plan(capsys, *arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert "broken.json" in err
    assert "--bench" in err


def test_plan_prints_tables(capsys):
    code, out, _ = plan(
        capsys, "deepseek_v3", "--devices", "256", "--device", "h100", "--fix", "pipe=1,context=1"
    )
    assert code == 0
    assert "671,026,419,200" in out
    code, out, _ = plan(capsys, "deepseek_v3", "--devices", "16", "--inference")
    assert code == 0
    assert "MLA" in out
    code, out, _ = plan(capsys, "formats")
    assert code == 0
    assert "65504" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lama3_8b"], "did you mean 'llama3_8b'"),
        (["llama3_8b", "--device", "h300"], "unknown device 'h300'"),
        (["llama3_8b", "--devices", "6", "--mesh", "tensor=6"], "num_q_heads=32"),
        (["llama3_8b", "--devices", "64", "--mesh", "pipe=64"], "64 stages"),
        (["llama3_8b", "--devices", "8", "--mesh", "fsdp=4"], "needs 4 devices"),
        (["llama3_8b", "--mesh", "fdsp=1"], "fsdp"),
        (["llama3_8b", "--compile", "cpu"], "--mesh"),
        (["llama3_8b", "--recipe", "fp9"], "unknown --recipe 'fp9'"),
        (["llama3_8b", "--memory", "500"], "h200 has 141 GB"),
        (["llama3_8b", "--fix", "tensor=7"], "no layout can run"),
        (["llama3_8b", "--mesh", "fsdp=1", "--fix", "tensor=1"], "leave --mesh out"),
        (["llama3_8b", "--bench", "nowhere"], "--bench nowhere"),
        (["llama3_8b", "--inference", "--cache", "int3"], "unknown cache format 'int3'"),
        (["llama3_8b", "--inference", "--mesh", "fsdp=1"], "leave --mesh"),
        ([], "no model"),
    ],
)
def test_nonsense_gets_one_line(capsys, arguments, words):
    code, _, err = plan(capsys, *arguments)
    assert code == 1
    assert words in err
    assert err.count("\n") == 1


def test_a_schedule_alone(capsys, tmp_path):
    arguments = ["--schedule", "1f1b", "-p", "4", "-m", "8"]
    code, out, _ = plan(capsys, *arguments, "--json", "--pictures", str(tmp_path))
    assert code == 0
    assert json.loads(out)["stages"] == 4
    assert (tmp_path / "1f1b-p4-m8.png").exists()
    code, _, err = plan(capsys, "--schedule", "2f2b")
    assert code == 1
    assert "1f1b" in err


def test_pictures(capsys, tmp_path):
    code, _, _ = plan(
        capsys, "llama3_8b", "--devices", "8", "--json", "--pictures", str(tmp_path / "plan")
    )
    assert code == 0
    names = {path.name for path in (tmp_path / "plan").iterdir()}
    assert names == {"memory.png", "time.png", "roofline.png", "pareto.png"}
    assert plan(capsys, "formats", "--json", "--pictures", str(tmp_path))[0] == 0
    assert (tmp_path / "formats.png").stat().st_size > 10_000


def test_compiling_for_a_gpu_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"jaxinfra\[cuda\]"):
        compile_only_devices(find_device("h200"), 1)
    with pytest.raises(UnsupportedError, match="a100"):
        compile_only_devices(find_device("a100"), 1)
