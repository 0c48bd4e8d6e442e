"""Runs that start from a trained model: what they start from, keep, refuse and hand on."""

import json
import math
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_model import MODEL, write_model
from flax import nnx

import jaxinfra
from jaxinfra.checkpoint.checkpointer import load_state
from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.cli.main import main
from jaxinfra.config.precision import PolicyName
from jaxinfra.errors import ConfigError
from jaxinfra.hf import by_path
from jaxinfra.model.adapters import with_chosen
from jaxinfra.model.definition import ModelDefinition
from jaxinfra.serving.adapter_bank import load_bank
from jaxinfra.serving.load import load as load_trained
from jaxinfra.training.job import make_job
from jaxinfra.training.start import first_state, kept_from_start

IDS = np.arange(40, dtype=np.int32)[None]
SIZES = ("--batch-size", "4", "--sequence-length", "64", "--set", "optimizer.warmup_steps=0")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("finetune")
    write_model(path / "hf")
    (path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 30)
    chats = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "!"}]}
        for i in range(30)
    ]
    (path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


def train(place, name, *options):
    cache = ["--cache", str(place / "cache")]
    return main(["train", "--run", str(place / name), *SIZES, *cache, *map(str, options)])


@pytest.fixture(scope="module")
def full(place):
    text = ["--data", place / "text.txt", "--set", f"data.heldout_source={place / 'text.txt'}"]
    # What it would write of itself, adapters' runs do.
    options = ["--steps", 4, "--checkpoint-every", 2, "--learning-rate", "1e-3", "--no-sample"]
    assert train(place, "full", "--init", place / "hf", *text, *options) == 0
    return place / "full"


@pytest.fixture(scope="module")
def lora(place):
    data = ["--data", place / "chats.jsonl", "--chat", "--set", "data.heldout_fraction=0.3"]
    spec = "rank=2,targets=query+down,kind=dora,scaling=rslora"
    options = ["--lora", spec, "--steps", 4, "--learning-rate", "1e-2", "--checkpoint-every", 2]
    assert train(place, "lora", "--init", place / "hf", *data, *options) == 0
    return place / "lora"


def losses(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_it_starts_from_those_weights_and_draws_none(full, place, monkeypatch):
    monkeypatch.setattr(ModelDefinition, "initialize", None)
    config = RunDirectory(full).read_config()
    assert config.model == MODEL
    assert config.init.path == str(place / "hf")
    assert len(config.init.sha256) == 64
    monkeypatch.undo()
    job = make_job(config)
    monkeypatch.setattr("jaxinfra.training.job.Job.initialize", None)
    state = first_state(job)
    want = by_path(load_pretrained(place / "hf").parameters)
    got = by_path(state.parameters)
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)
    assert int(state.step) == 0
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(state.optimizer))
    assert losses(full)[-1] < losses(full)[0]


def rewind(run, to, step):
    """A copy of a run as it was when it had done so many of its steps."""
    copy = shutil.copytree(run, to)
    for path in (copy / "checkpoints").glob("step_*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    (copy / "summary.json").unlink()
    return copy


def state(run, step=4):
    shapes = make_job(RunDirectory(run).read_config()).abstract_state()
    return load_state(run / "checkpoints", shapes, step=step).state


def resume(place, run, *options):
    where = ["--resume", str(run), "--cache", str(place / "cache"), "--no-sample"]
    return main(["train", *where, *options])


@pytest.mark.slow
def test_it_resumes_without_what_it_started_from(full, place):
    copy = rewind(full, place / "resumed", 2)
    (place / "hf").rename(place / "away")
    try:
        assert resume(place, copy) == 0
    finally:
        (place / "away").rename(place / "hf")
    chex.assert_trees_all_equal(state(copy), state(full))
    assert losses(copy) == losses(full)


@pytest.mark.slow
def test_it_goes_back_as_it_came(full, place):
    out = place / "out"
    assert main(["convert", str(full), str(out)]) == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen2"
    for name in ("chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (place / "hf" / name).read_bytes()
    models = [jaxinfra.load_model(path) for path in (full, out)]
    np.testing.assert_array_equal(*(model(IDS) for model in models))


def test_adapters_alone_are_saved_and_merged_on_the_way_out(lora, place, tmp_path, capsys):
    config = RunDirectory(lora).read_config()
    assert config.lora.targets == ("query", "down")
    saved = json.loads((lora / "checkpoints/step_00000004/metadata.json").read_text())["tree"]
    paths = [leaf["path"] for leaf in saved if leaf["path"].startswith("parameters/")]
    assert len(paths) == 6
    assert all("/adapter/" in path for path in paths)
    assert losses(lora)[-1] < losses(lora)[0]
    assert main(["convert", str(lora), str(tmp_path / "merged")]) == 0
    got, want = (jaxinfra.load_model(path)(IDS) for path in (tmp_path / "merged", lora))
    base = jaxinfra.load_model(place / "hf")(IDS)
    # Weights of 0.1 merged and rounded once; what training changed is far larger.
    changed = float(np.abs(want - base).max())
    assert float(np.abs(got - want).max()) < 1e-4 * changed
    capsys.readouterr()
    assert main(["convert", str(lora), str(tmp_path / "peft"), "--adapters-only"]) == 0
    written = sum(math.prod(leaf["shape"]) for leaf in saved if leaf["path"] in paths)
    assert f"{written:,} parameters in the layout of PEFT" in capsys.readouterr().out
    values = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert values["target_modules"] == ["mlp.down_proj", "self_attn.q_proj"]
    assert values["base_model_name_or_path"] == str(place / "hf")
    assert values["use_dora"]
    assert values["use_rslora"]


def test_a_conversation_run_speaks_by_its_own_template(lora, place, capsys):
    assert main(["evaluate", str(lora), "--cache", str(place / "cache"), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    want = json.loads((lora / "summary.json").read_text())
    assert got["heldout_loss"] == want["heldout_loss"]
    # "!", the end of the turn and the line break: what the assistants said, and nothing else.
    assert got["tokens"] % 3 == 0
    assert got["bytes"] == got["tokens"] // 3 * len("!<|im_end|>\n")
    options = ["--max-new-tokens", "3", "--temperature", "0"]
    assert main(["generate", str(lora), "--prompt", "1?", "--chat", *options]) == 0


def test_adapters_need_the_weights_they_were_trained_beside(lora, place, capsys):
    copy = rewind(lora, place / "again", 2)
    (place / "hf").rename(place / "away")
    try:
        assert resume(place, copy) == 1
    finally:
        (place / "away").rename(place / "hf")
    assert "is not there; restore it, or name where it is" in capsys.readouterr().err
    other = shutil.copytree(place / "hf", place / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert resume(place, copy, "--set", f"init.path={other}") == 1
    assert "the run started from" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_are_resumed_beside_weights_in_another_place(lora, place):
    copy = rewind(lora, place / "third", 2)
    away = shutil.copytree(place / "hf", place / "elsewhere")
    assert resume(place, copy, "--set", f"init.path={away}") == 0
    chex.assert_trees_all_equal(state(copy), state(lora))


@pytest.mark.slow
def test_a_runs_adapters_are_served_beside_others(lora, place):
    """Rows with the run's adapter have the run's logits, rows without one the model's."""
    model = load_trained(place / "hf", policy=PolicyName.FP32)
    bank = load_bank(model, place / "hf", {"run": lora})
    graphdef, state = nnx.split(bank.added_to(model))
    ids = np.concatenate([IDS, IDS])
    bound = nnx.merge(graphdef, with_chosen(state, jnp.array([0, 1])))
    base, run = (jaxinfra.load_model(path)(IDS)[0] for path in (place / "hf", lora))
    got = np.asarray(bound(ids))
    changed = float(np.abs(run - base).max())
    for row, want in zip(got, (base, run), strict=True):
        assert float(np.abs(row - want).max()) < 1e-4 * changed


def test_adapters_of_other_weights_are_not_served(lora, full, place):
    model = load_trained(full)
    for path, what in ((full, "have"), (place / "hf", "trained all parameters, not adapters")):
        adapters = {"run": lora if path == full else full}
        with pytest.raises(ConfigError, match=what):
            load_bank(model, path, adapters)


@pytest.mark.slow
def test_over_a_base_in_few_bits(place, tmp_path, capsys):
    """Trained, resumed to the same bits, evaluated, asked, and merged with what the bits say."""
    kept = "int8"
    text = ["--data", place / "text.txt", "--set", f"data.heldout_source={place / 'text.txt'}"]
    options = ["--lora", f"rank=2,targets=query+down,kind=dora,base={kept}", "--steps", 4]
    options += ["--checkpoint-every", 2, "--learning-rate", "1e-2"]
    run = place / kept
    assert train(place, kept, "--init", place / "hf", *text, *options) == 0
    assert "adapters over a base in" in capsys.readouterr().out
    copy = rewind(run, place / f"{kept}_again", 2)
    assert resume(place, copy) == 0
    chex.assert_trees_all_equal(state(copy), state(run))
    assert losses(copy) == losses(run)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--cache", str(place / "cache"), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["heldout_loss"] == json.loads((run / "summary.json").read_text())["heldout_loss"]
    assert main(["generate", str(run), "--prompt", "1?", "--max-new-tokens", "3"]) == 0
    assert main(["convert", str(run), str(tmp_path / "merged")]) == 0
    merged, want = (jaxinfra.load_model(path)(IDS) for path in (tmp_path / "merged", run))
    base = jaxinfra.load_model(place / "hf")(IDS)
    changed = float(np.abs(want - base).max())
    assert float(np.abs(merged - want).max()) < 1e-4 * changed


@pytest.mark.slow
@pytest.mark.parametrize("source", ["hf", "full"])
@pytest.mark.parametrize("lora", [(), ("--lora", "rank=2,targets=query")])
def test_in_eight_bits(source, lora, full, place):
    """Records of 8-bit operands are in no file of a model, and begin anew."""
    fp8 = ["--policy", "bf16", "--set", 'precision.fp8={"scaling": "squares"}']
    name = f"{source}-8-{len(lora)}"
    options = ["--data", place / "text.txt", "--steps", 1, "--learning-rate", "1e-9", "--no-sample"]
    assert train(place, name, "--init", place / source, *options, *fp8, *lora) == 0
    plain = f"{source}-16-{len(lora)}"
    assert train(place, plain, "--init", place / source, *options, "--policy", "bf16", *lora) == 0
    (loss,), (want,) = losses(place / name), losses(place / plain)
    assert loss == pytest.approx(want, rel=0.02)


@pytest.mark.slow
def test_from_a_run(full, place):
    """And from a converted directory, to the same numbers."""
    assert main(["convert", str(place / "out"), str(place / "ours")]) == 0
    first = []
    for source in ("full", "ours"):
        options = ["--data", place / "text.txt", "--steps", 1, "--lora", "rank=1"]
        options += ["--set", f"data.heldout_source={place / 'text.txt'}"]
        assert train(place, f"from_{source}", "--init", place / source, *options) == 0
        first.append(losses(place / f"from_{source}"))
    assert first[0] == first[1]


REFUSED = {
    "preset 'tiny' beside --init": ["tiny", "--init", "hf"],
    "model.vocab_size=300: the model in": ["--init", "hf", "--set", "model.vocab_size=300"],
    "data.tokenizer.kind='bytes'": [
        *("--init", "hf", "--set", "data.tokenizer.kind=bytes"),
        *("--set", "data.tokenizer.path=none"),
    ],
    "--lora is for a model that is trained already": ["--lora", "rank=2"],
    "--chat is for a model": ["tiny", "--chat"],
    "holds adapters, not a whole model": ["--init", "lora"],
    "is no run directory": ["--init", "cache"],
    "give no preset, no --config, no --run, no --init": ["--resume", "full", "--lora", "rank=2"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together(message, full, lora, place, capsys):
    names = {"hf", "lora", "full", "cache"}
    options = [str(place / each) if each in names else each for each in REFUSED[message]]
    run = [] if "--resume" in options else ["--run", str(place / "never")]
    assert main(["train", *options, *run]) == 1
    assert message in capsys.readouterr().err
    assert not (place / "never").exists()


def test_another_directorys_chat_template_takes_the_place_of_the_models(place, tmp_path):
    config = jaxinfra.start_from(str(place / "hf"), chat=True)
    assert "chat_template.jinja" in kept_from_start(config)
    other = "{{ messages[0].content }}"
    template = {"chat_template": other}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(template))
    kept = kept_from_start(jaxinfra.override(config, [f"data.chat_template={tmp_path}"]))
    assert kept["chat_template.jinja"].decode() == other
    assert kept.keys() == kept_from_start(config).keys(), "the rest is the model's"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"{tmp_path} ships no chat template"):
        kept_from_start(jaxinfra.override(config, [f"data.chat_template={tmp_path}"]))
