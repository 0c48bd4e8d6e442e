"""Shapes of Hugging Face configs, and the command."""

import json
from pathlib import Path

import pytest

from jaxinfra.cli.main import main
from jaxinfra.config import codec
from jaxinfra.config.presets import run_preset
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

PUBLISHED = json.loads((Path(__file__).parents[1] / "golden/hf/published.json").read_text())
MIXTRAL = PUBLISHED["mixtral_8x7b"]


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("deepseek_v2_lite", 15.7, 2.7), ("qwen15_moe_a27b", 14.3, 2.7)],
)
def test_published_sizes(name, billions, active):
    """arXiv 2405.04434 says 15.7B and 2.4B without tables; Qwen1.5-MoE-A2.7B is named so."""
    model = plan_model(from_hf_config(PUBLISHED[name]))
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
    config = from_hf_config(PUBLISHED["qwen3_30b_a3b"] | changes)
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


def test_a_run_is_a_model_too(tmp_path):
    (tmp_path / "config.json").write_text(codec.to_json(run_preset("tiny")))
    assert find_model(str(tmp_path)).config == run_preset("tiny").model


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


@pytest.mark.slow
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
    with pytest.raises(SystemExit):
        plan(capsys, "--schedule", "2f2b")
    assert "1f1b" in capsys.readouterr().err


@pytest.mark.slow
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
