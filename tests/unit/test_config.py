"""Configs: JSON both ways, settings by path, and every rule with its values and remedy."""

import dataclasses
import json

import pytest

from jaxinfra.checkpoint.metadata import setting_changes
from jaxinfra.config.codec import from_dict, normalized, override, to_dict, to_json
from jaxinfra.config.data import DataConfig, TokenizerConfig, TokenizerKind
from jaxinfra.config.kinds import MlpKind
from jaxinfra.config.mesh import MeshConfig, parse_mesh
from jaxinfra.config.model import NormConfig
from jaxinfra.config.precision import PolicyName, PrecisionConfig
from jaxinfra.config.presets import MODELS, run_preset
from jaxinfra.config.rope import LinearScaling, RopeConfig
from jaxinfra.config.run import Remat, RunConfig
from jaxinfra.config.validate import validate
from jaxinfra.errors import ConfigError


@pytest.mark.parametrize("name", MODELS)
def test_presets_survive_json_and_are_valid(name):
    run = run_preset(name)
    validate(run)
    again = from_dict(RunConfig, json.loads(to_json(run)))
    assert again == run
    assert hash(again) == hash(run)  # results are cached by their config
    assert to_json(run).endswith("}\n")


def test_settings_reach_every_kind_of_field():
    run = override(
        run_preset("tiny"),
        [
            "training.steps=7",
            "optimizer.learning_rate=1",
            "optimizer.clip_norm=none",
            "training.remat=none",
            " mesh.fsdp = 2 ",
            "precision.policy=bf16",
            "model.stacks.0.pattern.0.feed_forward.kind=geglu",
            "model.stacks.0.pattern.0.mixer.qk_norm={}",
            'model.stacks.0.pattern.0.mixer.rope.scaling={"kind": "LinearScaling", "factor": 2}',
            "data.source=/some/where=else",
            "model.tie_embeddings=false",
        ],
    )
    block = run.model.blocks[0]
    assert run.training.steps == 7
    assert run.optimizer.learning_rate == 1.0
    assert isinstance(run.optimizer.learning_rate, float)
    assert run.optimizer.clip_norm is None
    assert run.training.remat is Remat.NONE
    assert run.mesh == MeshConfig(fsdp=2)
    assert run.precision.policy == "bf16"
    assert block.feed_forward.kind is MlpKind.GEGLU
    assert block.mixer.qk_norm == NormConfig()
    assert block.mixer.rope == RopeConfig(scaling=LinearScaling(factor=2.0))
    assert run.data.source == "/some/where=else"
    assert run.model.tie_embeddings is False
    assert override(run, []) == run


WRONG_SETTINGS = {
    # Names, with the nearest one.
    "training.stepz=3": r"no setting 'training.stepz'.*did you mean 'steps'\? Known: .*batch_size",
    "trainer.steps=3": r"unknown name 'trainer'; did you mean 'training'\?",
    "model.stacks.0.pattern.1.feed_forward.bias=true": r"unknown name '1'; Known: 0",
    "training.steps": r"'training.steps' has no value; write path=value",
    "precision.policy=bf61": r"'bf61' is no PolicyName; did you mean 'bf16'\? Known: bf16, fp16",
    # Types mean what they say.
    "training.steps=1.5": r"1.5 is a float, expected int",
    'training.steps="3"': r"'3' is a str, expected int",
    "training.steps=true": r"True is a bool, expected int",
    "model.tie_embeddings=1": r"1 is a int, expected bool",
    "optimizer.learning_rate=NaN": r"nan is not a finite number",
    "optimizer.learning_rate=Infinity": r"inf is not a finite number",
    # Rules of one config.
    "data.heldout_fraction=1": r"heldout_fraction=1.0 must be in \[0, 1\)",
    "data.prefetch_batches=0": r"prefetch_batches=0 at least 1",
    "data.num_prefetch_threads=-1": r"num_prefetch_threads=-1 must not be negative",
    "data.tokenizer.kind=file": r"kind=file with path=None: a path goes with kind=file",
    "data.tokenizer.path=x.json": r"kind=bpe with path='x.json'.*only with it",
    "mesh.tensor=0": r"mesh axis tensor=0 must be at least 1",
    "model.stacks.0.pattern.0.mixer.num_kv_heads=3": r"num_q_heads=2 is not a multiple of "
    r"num_kv_heads=3; query heads share key/value heads in equal groups",
    "model.stacks.0.pattern.0.mixer.head_dim=0": r"head_dim=0 must be positive",
    "model.stacks.0.pattern.0.mixer.head_dim=7": r"head_dim=7.*even",
    "model.stacks.0.pattern.0.mixer.window=0": r"window=0 must be at least 1 \(a token sees",
    "model.stacks.0.pattern.0.mixer.logit_soft_cap=0": r"logit_soft_cap=0.0 must be positive",
    "model.stacks.0.pattern.0.mixer.rope.theta=1": r"theta=1.0 must exceed 1",
    'model.stacks.0.pattern.0.mixer.rope.scaling={"kind": "NtkScaling", "factor": 0}': r"scaling "
    r"factor=0.0 must be at least 1",
    "model.stacks.0.pattern.0.feed_forward.hidden_dim=0": r"mlp hidden_dim=0 must be at least 1",
    "model.stacks.0.pattern.0.norm.epsilon=0": r"norm epsilon=0.0 must be positive",
    "model.final_norm.epsilon=-1": r"norm epsilon=-1.0 must be positive",
    "model.logit_soft_cap=-2": r"logit_soft_cap=-2.0 must be positive, or none",
    "model.init_std=0": r"init_std=0.0 must be positive",
    "model.stacks.0.repeats=0": r"a stack of 0 repetitions of 1 blocks",
    "model.stacks.0.pattern=[]": r"repetitions of 0 blocks",
    "model.vocab_size=0": r"vocab_size=0 must be at least 1",
    "model.model_dim=-1": r"model_dim=-1 must be at least 1",
    "model.max_positions=0": r"max_positions=0 must be at least 1",
    "model.dropout_rate=1": r"dropout_rate=1.0 must be in \[0, 1\)",
    "optimizer.learning_rate=0": r"learning_rate=0.0 must be positive",
    "optimizer.warmup_steps=-1": r"warmup_steps=-1 not negative",
    "optimizer.beta1=1": r"beta1=1.0 must be in \[0, 1\)",
    "optimizer.beta2=-0.1": r"beta2=-0.1 must be in \[0, 1\)",
    "optimizer.epsilon=0": r"epsilon=0.0 must be positive",
    "optimizer.weight_decay=-1": r"weight_decay=-1.0 not negative",
    "optimizer.final_fraction=2": r"final_fraction=2.0 in \[0, 1\]",
    "optimizer.clip_norm=0": r"clip_norm=0.0 must be positive, or none",
    "optimizer.decay_steps=0": r"decay_steps=0 must be at least 1, or none",
    "optimizer.frozen=*norm*": r"'\*norm\*' is no list; write one",
    "precision.policy=fp16": r"policy=fp16 with loss_scaling=none loses gradients.*choose",
    "precision.initial_loss_scale=0.5": r"initial_loss_scale=0.5.*must be at least 1",
    "precision.growth_interval=0": r"growth_interval=0 must be at least 1",
    "training.steps=0": r"steps=0 must be at least 1",
    "training.batch_size=0": r"batch_size=0 must be at least 1",
    "training.sequence_length=0": r"sequence_length=0 must be at least 1",
    "training.accumulation=0": r"accumulation=0 must be at least 1",
    "training.log_every=0": r"log_every=0 must be at least 1",
    "training.evaluate_every=0": r"evaluate_every=0 must be at least 1, or none",
    "training.accumulation=5": r"batch_size=16 is not a multiple of accumulation=5",
    "training.z_loss=-1": r"z_loss=-1.0 must not be negative",
    "training.label_smoothing=1": r"label_smoothing=1\.0 must be at least 0 and below 1",
    "checkpoint.every=0": r"every=0 .* must be at least 1",
    "checkpoint.keep_last=0": r"keep_last=0 must be at least 1",
    "checkpoint.keep_best=-1": r"keep_best=-1 not negative",
}


@pytest.mark.parametrize("setting", WRONG_SETTINGS)
def test_a_wrong_setting_names_values_and_rule(setting):
    with pytest.raises(ConfigError, match=WRONG_SETTINGS[setting]) as error:
        override(run_preset("tiny"), [setting])
    assert "\n" not in str(error.value), "one clear line"


# Rules across configs: each part is right alone.
IMPOSSIBLE = {
    "mesh.replica=3": r"a micro-batch of 16 sequences \(batch_size=16 / accumulation=1\) does not "
    r"divide over replica=3 x fsdp=1; make it a multiple of 3",
    "training.accumulation=16 mesh.fsdp=2": r"a micro-batch of 1 sequences .*multiple of 2",
    "training.sequence_length=4096": r"sequence_length=4096 exceeds the model's "
    r"max_positions=2048; shorten the sequence or raise model.max_positions",
    "optimizer.warmup_steps=100000": r"warmup_steps=100000 exceeds steps=",
    "mesh.tensor=4 model.stacks.0.pattern.0.mixer.num_q_heads=12 "
    "model.stacks.0.pattern.0.mixer.num_kv_heads=6": r"num_kv_heads=6 does not "
    r"divide over tensor=4; choose a tensor size",
    "mesh.tensor=2 model.stacks.0.pattern.0.feed_forward.hidden_dim=5": r"hidden_dim=5 does not",
    "mesh.tensor=2 model.vocab_size=4097": r"vocab_size=4097 does not divide over tensor=2",
    "mesh.fsdp=2 model.model_dim=127": r"model_dim=127 does not divide over fsdp=2",
}


@pytest.mark.parametrize("settings", IMPOSSIBLE)
def test_an_impossible_run_names_values_rule_and_remedy(settings):
    run = override(run_preset("tiny"), settings.split())
    with pytest.raises(ConfigError, match=IMPOSSIBLE[settings]):
        validate(run)


def test_unknown_and_missing_fields_are_named():
    values = to_dict(run_preset("tiny"))
    with pytest.raises(ConfigError, match="required field 'training' is missing"):
        from_dict(RunConfig, {name: part for name, part in values.items() if name != "training"})
    with pytest.raises(ConfigError, match="extra fields found \\(colour\\)"):
        from_dict(RunConfig, {**values, "colour": "red"})
    with pytest.raises(ConfigError) as error:
        from_dict(RunConfig, {**values, "model": 3})
    assert "RunConfig.model" in str(error.value)


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(ConfigError, match=r"(?s)steps.*batch_size|batch_size.*steps"):
        override(run_preset("tiny"), ["training.steps=x", "training.batch_size=y"])


def test_parse_mesh():
    assert parse_mesh("fsdp=4,tensor=2") == MeshConfig(fsdp=4, tensor=2)
    assert parse_mesh(" replica=2 , fsdp=2,") == MeshConfig(replica=2, fsdp=2)
    assert parse_mesh("") == MeshConfig()
    mesh = MeshConfig(replica=2, fsdp=3, tensor=4)
    assert (mesh.num_devices, mesh.num_data_shards) == (24, 6)
    assert list(mesh.sizes()) == ["pipe", "replica", "fsdp", "context", "tensor"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fdsp=4", r"unknown mesh axis 'fdsp'; did you mean 'fsdp'\? Known: context, expert"),
        ("fsdp=2,fsdp=4", "'fsdp' is given twice in 'fsdp=2,fsdp=4'"),
        ("fsdp", "'fsdp' needs a whole size, as in fsdp=4,tensor=2"),
        ("fsdp=", "'fsdp=' needs a whole size"),
        ("fsdp=-1", "'fsdp=-1' needs a whole size"),
        ("fsdp=2.0", "'fsdp=2.0' needs a whole size"),
        ("fsdp=0", "fsdp=0 must be at least 1"),
        pytest.param(f"fsdp={'9' * 5000}", "needs a whole size", id="5000 digits"),
    ],
)
def test_a_wrong_mesh_says_what_is_wrong(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_mesh(text)


def test_a_script_may_write_words_for_choices():
    tokenizer = TokenizerConfig(kind="file", path="tokenizer.json")  # no false refusal
    run = dataclasses.replace(
        run_preset("tiny"),
        precision=PrecisionConfig(policy="bf16"),
        data=DataConfig(tokenizer=tokenizer),
    )
    assert normalized(run, RunConfig).precision.policy is PolicyName.BF16
    assert normalized(run, RunConfig).data.tokenizer.kind is TokenizerKind.FILE
    wrong = dataclasses.replace(run, precision=PrecisionConfig(policy="bf61"))
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        normalized(wrong, RunConfig)


def test_a_changed_setting_is_said_as_it_is_written():
    run = run_preset("tiny")
    other = override(run, ["optimizer.schedule=wsd"])
    found = setting_changes(to_dict(run), to_dict(other))
    assert found == ["optimizer.schedule: saved 'cosine', now 'wsd'"]


def test_a_setting_that_is_new_since_a_checkpoint_is_no_change():
    now = to_dict(run_preset("tiny"))
    saved = json.loads(json.dumps(now))
    del saved["data"]["best_by"]
    assert not setting_changes(saved, now)
    del saved["optimizer"]["learning_rate"]  # required: of a version that is not read
    saved["training"]["steps"] = 7
    assert any("training.steps: saved 7" in each for each in setting_changes(saved, now))
