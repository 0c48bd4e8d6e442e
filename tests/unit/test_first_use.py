"""What somebody meets in the first hour: refusals at once, words that help, figures that agree."""

import argparse
import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfra.cli import quantize, serve, train
from jaxinfra.cli.main import Parser, main
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.run import Remat
from jaxinfra.config.validate import validate
from jaxinfra.diagnostics.trace import events_by_device, jax
from jaxinfra.errors import ConfigError, DataError, nearest
from jaxinfra.planning.answer import train_command, training_lines
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.layout import Layout
from jaxinfra.planning.model import find_model
from jaxinfra.planning.plan import make_plan
from jaxinfra.planning.search import Question, search
from jaxinfra.runtime.files import local_path
from jaxinfra.training.progress import status_cells


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="jaxinfra train", allow_abbrev=False)
    train.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("preset", ["tiny", "small", "llama3_8b"])
def test_fewer_steps_than_the_warm_up_shorten_it_and_say_so(preset, capsys):
    config = train.config_of(parsed(preset, "--steps", "20"))
    validate(config)
    assert (config.training.steps, config.optimizer.warmup_steps) == (20, 2)
    assert "warm-up of 2 steps instead of" in capsys.readouterr().out


def test_a_warm_up_that_was_asked_for_stays(capsys):
    args = parsed("tiny", "--steps", "20", "--set", "optimizer.warmup_steps=30")
    with pytest.raises(ConfigError, match="warmup_steps=30 exceeds"):
        validate(train.config_of(args))
    assert not capsys.readouterr().out


def test_a_refusal_loads_no_jax():
    program = (
        "import sys\nfrom jaxinfra.cli.main import main\n"
        "assert main(['train', 'tiny', '--mesh', 'fsdp=3']) == 1\n"
        "assert 'jax' not in sys.modules"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "multiple of 3" in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_a_family_is_not_taken_for_another():
    assert "did you mean 'mixtral_8x7b'" in nearest("mixtral", ["mistral_7b", "mixtral_8x7b"])
    assert "did you mean 'steps'" in nearest("step", ["seed", "steps"])


@pytest.mark.parametrize("place", ["gs://bucket/run", "s3://bucket/run", Path("gs://bucket/run")])
def test_object_stores_are_refused_by_name(place):
    with pytest.raises(ConfigError, match="directories that all processes see"):
        local_path(place)
    assert local_path("runs/a:b") == Path("runs/a:b")


LAYOUTS = {
    "one device": Layout(length=1024, batch=4, accumulation=2),
    "sharded": Layout(
        length=8192, batch=16, mesh=MeshConfig(fsdp=4, tensor=2), sequence_parallel=True
    ),
    "zero": Layout(length=512, batch=16, mesh=MeshConfig(replica=2, fsdp=4), zero=2),
    "kept": Layout(length=512, batch=16, mesh=MeshConfig(fsdp=8), keep_gathered=True),
    "interleaved": Layout(length=512, batch=16, mesh=MeshConfig(pipe=4), chunks=4, accumulation=8),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_plan_begins_with_a_command_that_trains_so(name):
    layout = LAYOUTS[name]
    plan = make_plan(find_model("llama3_8b"), layout, find_device("h200"))
    words = shlex.split(train_command(plan) or "")
    share = None
    if words[0].startswith("XLA_PYTHON_CLIENT_MEM_FRACTION="):
        share = float(words.pop(0).partition("=")[2])
    assert words[:2] == ["jaxinfra", "train"]
    # What the arrays take, a share of it free, is what JAX may take; the reserve is beside that.
    whole = find_device("h200").hbm_bytes
    if plan.fits:
        assert plan.memory.arrays <= 0.96 * (share or 0.75) * whole
        assert plan.memory.reserved <= (1 - (share or 0.75)) * whole
    config = train.config_of(parsed(*words[2:]))
    validate(config)
    training, sharding = config.training, config.sharding
    assert (training.batch_size, training.sequence_length) == (layout.batch, layout.length)
    assert (training.accumulation, training.remat) == (layout.accumulation, layout.remat)
    assert (config.mesh, sharding.zero) == (layout.mesh, layout.zero)
    assert sharding.sequence_parallel == layout.sequence_parallel
    assert sharding.keep_gathered == layout.keep_gathered
    if layout.chunks > 1:
        assert config.pipeline.chunks_per_stage == layout.chunks
    first, second, *_ = training_lines(plan, searched=True)
    assert first.startswith(("fastest that fits: llama3_8b", "llama3_8b"))
    assert f"{plan.time.total_s:.4g} s per step" in first
    if plan.fits:
        assert second.strip().endswith(" ".join(words))


@pytest.mark.parametrize("name", ["small", "small_moe", "tiny"])
def test_a_plan_of_stages_trains_whatever_its_preset_unrolls(name):
    mesh = MeshConfig(pipe=2, replica=5)
    layout = Layout(length=640, batch=50, mesh=mesh, accumulation=5)
    command = train_command(make_plan(find_model(name), layout, find_device("h200"))) or ""
    validate(train.config_of(parsed(*shlex.split(command.partition("train ")[2]))))


@pytest.mark.parametrize(
    ("devices", "fixed"), [(6, ()), (12, (("pipe", 2),)), (20, (("tensor", 2),))]
)
def test_a_search_finds_what_trains(devices, fixed):
    question = Question(devices=devices, length=8192, batch=devices * 4, fixed=fixed)
    found = search(find_model("llama3_8b"), question, find_device("h200"), runners_up=3)
    for plan in (found.best, *(plan for plan, _ in found.runners_up)):
        words = shlex.split(train_command(plan) or "")
        validate(train.config_of(parsed(*words[words.index("train") + 1 :])))


@pytest.mark.parametrize(
    ("option", "keeps", "setting"),
    [((), True, None), (("no",), False, "false")],
)
def test_a_plan_says_whether_gathered_weights_stay(capsys, option, keeps, setting):
    told = ["--keep-gathered", *option] if option else []
    words = ["plan", "llama32_1b", "--devices", "8", "--mesh", "fsdp=8", "--length", "1024", *told]
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["layout"]["keep_gathered"] is values["gathered_weights"]["keeps"] is keeps
    assert values["gathered_weights"]["by_default"] is not bool(option)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "gathered weights" in out
    assert ("sharding.keep_gathered" in out) == bool(option)
    assert setting is None or f"--set sharding.keep_gathered={setting}\n" in out


def test_a_plan_says_why_recomputing_is_predicted_to_be_faster():
    layout = Layout(length=8192, batch=8, mesh=MeshConfig(fsdp=8), remat=Remat.DOTS)
    plan = make_plan(find_model("llama3_8b"), layout, find_device("h200"))
    forms = plan.by_remat()
    assert forms["none"].time.total_s > forms["dots"].time.total_s
    (line,) = (line for line in training_lines(plan, searched=False) if "remat=dots: none" in line)
    assert "memory takes" in line


def test_a_plan_names_its_own_recomputation():
    """The reason is that of the form that it has, against all that keep more."""
    layout = Layout(length=8192, batch=32, mesh=MeshConfig(fsdp=8), remat=Remat.MLP)
    plan = make_plan(find_model("llama3_8b"), layout, find_device("h100"))
    (line,) = (line for line in training_lines(plan, searched=False) if "remat=" in line[:9])
    assert line.startswith("  remat=mlp: none does not fit")
    assert "dots does not fit" in line


@pytest.mark.slow_cases("words1-each part held 2 times", "words3-experts have no kernel")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama3_8b", "--inference"], "jaxinfra serve DIR --max-running"),
        (
            ["llama3_70b", "--inference", "--devices", "16", "--weights", "fp8"],
            "each part held 2 times",
        ),
        (["mixtral_8x7b", "--inference", "--devices", "2"], "--mesh fsdp=2,expert=2"),
        (["mixtral_8x7b", "--inference", "--weights", "fp8"], "experts have no kernel"),
        (["llama3_70b", "--inference"], "do not fit"),
        (["tiny", "--inference"], "requests of 2,048 tokens fit"),  # its positions
        (["tiny", "--inference", "--context", "4096"], "requests of 4,096 tokens fit"),
    ],
)
def test_a_plan_of_serving_begins_with_the_answer(capsys, words, said):
    assert main(["plan", *words, "--brief"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 10
    assert said in "\n".join(lines)
    for line in lines:
        found = re.search(r"jaxinfra (serve|quantize) (.*)", line)
        if found:
            parser = argparse.ArgumentParser()
            {"serve": serve, "quantize": quantize}[found[1]].add_arguments(parser)
            parser.parse_args(shlex.split(found[2]))


def test_a_schedule_draws_nothing_unasked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--schedule", "1f1b", "-p", "2", "-m", "4"]) == 0
    assert "bubble" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_bench_lists_what_there_is(capsys):
    assert main(["bench"]) == 0
    assert "linear_cross_entropy" in capsys.readouterr().out


def test_an_example_of_a_trace_ships(capsys):
    assert main(["trace", "--example", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["by_kind_ms"].values()) == pytest.approx(found["span_ms"], rel=1e-6)
    assert found["communication_by_axis"]["tensor"]["launches"] == 101
    assert main(["trace", "--example"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert re.search(r"loses .* to communication over tensor: .*Remedy: ", first)
    assert main(["trace"]) == 1


def test_a_profile_of_a_cpu_says_what_to_do(monkeypatch, tmp_path):
    class Plane:
        name = "/host:CPU"
        lines = ()

    class Profile:
        planes = (Plane(),)

        @staticmethod
        def from_serialized_xspace(_):
            return Profile()

    monkeypatch.setattr(jax.profiler, "ProfileData", Profile)
    (tmp_path / "a.xplane.pb").touch()
    with pytest.raises(DataError, match=r"tensorboard --logdir.*jaxinfra trace --example"):
        events_by_device(tmp_path)


def test_the_held_out_loss_shown_says_of_which_step_it_is():
    values = {"step": 9, "loss": 1.0, "gradient_norm": 1.0, "learning_rate": 1e-3}
    values |= {"loss_scale": 1.0, "skipped": 0}

    class Stopped:
        step_s = None

        def tokens_per_s(self, step_s):
            return step_s

        mfu = tokens_per_s

    def cells(step):
        heldout = {"step": step, "heldout_loss": 2.5}
        return dict(status_cells(values, Stopped(), steps=10, heldout=heldout))

    assert cells(9)["held-out"] == "2.5000"
    assert cells(4)["held-out"] == "2.5000 (step 4)"


def test_presets(capsys):
    assert main(["presets", "mixtral", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == [
        "mixtral_8x7b",
        "mixtral_8x22b",
    ]
    assert main(["presets", "mixtrall"]) == 1


@pytest.mark.parametrize("argument", ["", "  "])
def test_an_empty_argument_is_named(argument, capsys):
    """What a script passes on whose variable is not set."""
    with pytest.raises(SystemExit, match="2"):
        main(["train", "tiny", argument])
    assert "unknown option ''; leave the empty argument out" in capsys.readouterr().err
