"""Adapters: nothing at first, little state, the same on a mesh, and out again exactly."""

import dataclasses
import json
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_runs import batch, train
from flax import nnx
from safetensors.numpy import load_file, save_file
from tolerance import assert_no_worse

from jaxinfra.api.models import start_from
from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.model_directory import read_model_directory, write_ours
from jaxinfra.checkpoint.onto_mesh import place_parameters
from jaxinfra.checkpoint.parameter_sources import LiveParameters
from jaxinfra.checkpoint.peft_files import MergedParameters, host_adapters, write_peft
from jaxinfra.config import codec
from jaxinfra.config.finetune import AdapterKind, AdapterScaling, LoraConfig
from jaxinfra.config.mesh import MeshConfig, parse_mesh
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import Remat
from jaxinfra.config.validate import validate
from jaxinfra.errors import ConfigError
from jaxinfra.hf import by_path, weight_map
from jaxinfra.model.definition import define_model
from jaxinfra.model.dropout import dropout
from jaxinfra.model.flops import matmul_parameters, training_flops_per_token
from jaxinfra.parallel.execution import execution_on
from jaxinfra.training.describe import describe_job, placement_table
from jaxinfra.training.job import make_job
from jaxinfra.training.start import first_state, with_frozen
from tests.small_models import dense

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "hf"
ALL = LoraConfig(rank=3, alpha=7.0, targets=("query", "key", "value", "out", "gate", "up", "down"))
NO_GATE = dataclasses.replace(ALL, targets=("query", "value", "out", "up", "down"))
DORA = dataclasses.replace(NO_GATE, kind=AdapterKind.DORA)


def nudged(adapters):
    """Adapters as after some training: B is no longer zero."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(0.05 * rng.standard_normal(x.shape).astype(np.float32)), adapters
    )


def adapted(name, lora):
    """The base of a golden model, the model with adapters beside it, and trained adapters."""
    base = load_pretrained(GOLDEN / name, policy=PolicyName.FP32)
    whole = define_model(base.definition.config, base.definition.execution, lora=lora)
    return base, whole, nudged(whole.freeze(base.definition.shapes).initialize(jax.random.key(1)))


IDS = np.random.default_rng(3).integers(0, 61, (2, 36)).astype(np.int32)


@pytest.mark.slow_cases("phi3")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
        "phi3",
    ],
)
def test_merged_weights_give_the_logits_of_the_adapters(name, tmp_path):
    """Against PEFT's formula written out in float64 on their tensors: W + alpha/rank B A."""
    lora = NO_GATE if name == "gpt2" else ALL
    base, whole, adapters = adapted(name, lora)
    got = whole.freeze(base.parameters).bind(adapters)(IDS)
    directory = read_model_directory(GOLDEN / name)
    source = MergedParameters(
        base=directory.open(base.definition), adapters=host_adapters(lora, by_path(adapters))
    )
    shardings = base.placement.parameters(base.definition)
    parameters = place_parameters(source, base.definition, shardings, piece_bytes=300)
    plain = base.definition.bind(parameters)(IDS)
    # The same weights by hand from the exported files, in float64.
    weights = weight_map(directory.hf["model_type"], directory.config, base.definition.shapes)
    write_peft(source.adapters, weights, tmp_path / "peft", base="x", source=source.base)
    values = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    theirs = load_file(GOLDEN / name / "model.safetensors")
    pairs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    modules = sorted({key.rpartition(".lora_")[0] for key in pairs})
    assert len(modules) >= 4 * directory.config.num_layers - 4
    for module in modules:
        a, b = (pairs[f"{module}.lora_{each}.weight"].astype(np.float64) for each in "AB")
        short = ".".join(module.split(".")[-2:])
        assert short in values["target_modules"]
        rank = values["rank_pattern"].get(short, values["r"])
        assert a.shape[0] == b.shape[1] == rank
        alpha = values["alpha_pattern"].get(short, values["lora_alpha"])
        delta = alpha / rank * b @ a
        key = module.removeprefix("base_model.model.") + ".weight"
        delta = delta.T if values["fan_in_fan_out"] else delta
        assert np.abs(delta).max() > 1e-3
        theirs[key] = (theirs[key] + delta).astype(np.float32)
    copy = tmp_path / "merged"
    copy.mkdir()
    (copy / "config.json").write_text((GOLDEN / name / "config.json").read_text())
    save_file(theirs, copy / "model.safetensors")
    by_hand = load_pretrained(copy, policy=PolicyName.FP32)
    want = by_hand.definition.bind(by_hand.parameters)(IDS)
    # All three are fp32 models of the same function; each may err by twice what the reference
    # implementation errs on this architecture, so two of them differ by at most four times that.
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        error = np.abs(arrays["logits32"] - arrays["logits64"]).max()
        error /= np.abs(arrays["logits64"]).max()
    scale = float(np.abs(want).max())
    assert float(np.abs(want - base.definition.bind(base.parameters)(IDS)).max()) > 1e-2 * scale
    for each in (got, plain):
        assert float(np.abs(each - want).max()) <= 4 * error * scale
    for path, value in by_path(by_hand.parameters).items():
        mine = by_path(parameters)[path]
        assert_no_worse(mine, plain=value, oracle=np.asarray(value, np.float64), what=path)


MODEL = dense(init_std=0.3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model in a directory of ours."""
    path = tmp_path_factory.mktemp("base") / "model"
    definition = define_model(MODEL, execution_on())
    source = LiveParameters(arrays=by_path(definition.initialize(jax.random.key(0))))
    options = dict(hf=None, tokenizer_directory=path, dtype=None, max_shard_bytes=10**9)
    write_ours(source, definition, path, **options)
    return path


def run_config(directory, *, lora=NO_GATE, **training):
    config = start_from(directory, lora=lora)
    settings = dict(steps=20, batch_size=8, sequence_length=32, remat=Remat.DOTS) | training
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e-2, warmup_steps=0)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, **settings),
        optimizer=optimizer,
    )


@pytest.mark.slow  # a run of adapters alone: `test_finetune.py`
def test_only_adapters_are_trained(directory):
    config = run_config(directory)
    job, state, losses = train(config)
    base = load_pretrained(directory, policy=PolicyName.FP32)
    paths = by_path(state.parameters)
    assert len(paths) == 2 * len(NO_GATE.targets)
    assert all("/adapter/" in path for path in paths)
    # Two moments for each adapter and a few counters: nothing of the size of the base.
    elements = sum(x.size for x in paths.values())
    moments = sum(x.size for x in jax.tree.leaves(state.optimizer))
    assert 2 * elements <= moments <= 2 * elements + 8
    assert elements < job.model.num_parameters // 3
    assert losses[-1] < losses[0]
    # The first loss is that of the base, to the last bit.
    first = job.evaluation_step(first_state(job).parameters, job.put(batch()))
    plain = dataclasses.replace(config, lora=None)
    of_base = make_job(plain).evaluation_step(base.parameters, job.put(batch()))
    np.testing.assert_array_equal(first, of_base)


@pytest.mark.slow
def test_no_gradient_of_the_frozen_weights_is_computed(directory):
    """Matmul FLOPs of a step: forward and input gradients, not weight gradients."""

    def flops(config):
        job = make_job(config)
        abstract = job.abstract_state()
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
        frozen = (job.model.frozen,) if config.lora else ()
        return job.train_step.lower(*frozen, abstract, rows).compile().cost_analysis()["flops"]

    small = LoraConfig(rank=1, targets=("query",))
    full, adapters = (flops(run_config(directory, lora=lora)) for lora in (None, small))
    assert adapters < 0.8 * full


@pytest.fixture(scope="module")
def one_device(directory):
    return train(run_config(directory), steps=2)[2]


@pytest.mark.slow  # by default the norm below, of columns that devices share
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("fsdp=2,tensor=2,replica=2", {}),
        ("fsdp=4,tensor=2", {"accumulation": 2, "remat": Remat.FULL}),
        ("replica=4,tensor=2", {"accumulation": 2, "remat": Remat.NONE}),
    ],
)
def test_on_a_mesh_as_on_one_device(directory, one_device, mesh, settings):
    config = run_config(directory, **settings)
    job, state, losses = train(dataclasses.replace(config, mesh=parse_mesh(mesh)), steps=2)
    np.testing.assert_allclose(losses, one_device, rtol=3e-6)
    a, b = (by_path(state.parameters)[f"blocks/0/attention/query/adapter/{x}"] for x in "ab")
    assert b.sharding.spec[2] == "tensor"
    assert a.sharding.spec[1] == ("fsdp" if "fsdp" in mesh else None)
    assert by_path(job.model.frozen)["blocks/0/mlp/up/weight"].sharding.spec[-1] == "tensor"


@pytest.mark.slow
def test_dropout_of_adapters_does_not_depend_on_the_mesh(directory, one_device):
    lora = dataclasses.replace(NO_GATE, dropout=0.4)
    config = run_config(directory, lora=lora)
    _, _, alone = train(config, steps=2)
    assert alone[0] == one_device[0]  # B is still zero
    assert alone[1] != one_device[1]
    mesh = parse_mesh("fsdp=2,tensor=2,replica=2")
    _, _, losses = train(dataclasses.replace(config, mesh=mesh), steps=2)
    np.testing.assert_allclose(losses, alone, rtol=3e-6)


def test_an_adapter_reads_what_dropout_leaves(directory):
    """Against the formula: y = W x + s B A drop(x), with the mask of the block's key."""
    lora = LoraConfig(rank=3, targets=("up",), dropout=0.5)
    base = load_pretrained(directory, policy=PolicyName.FP32)
    execution = base.definition.execution
    whole = define_model(MODEL, execution, lora=lora)
    adapters = nudged(whole.freeze(base.definition.shapes).initialize(jax.random.key(1)))
    first = whole.freeze(base.parameters).bind(adapters).blocks[0]
    adapter = first.mlp.up.adapter
    adapter.a, adapter.b = (nnx.Param(each[...][0]) for each in (adapter.a, adapter.b))
    x = jax.random.normal(jax.random.key(2), (2, 5, adapter.a[...].shape[0]))
    plain = np.asarray(adapter(x))
    key = jax.random.key(4)
    first._drop_in_adapters(key)
    own = jax.random.fold_in(key, zlib.crc32(b"mlp.up.adapter"))
    dropped = np.float64(dropout(x, rate=0.5, key=own, place=execution.place))
    assert 0.3 < (dropped == 0).mean() < 0.7
    a, b = np.float64(adapter.a[...]), np.float64(adapter.b[...])
    for values, got in ((np.float64(x), plain), (dropped, np.asarray(adapter(x)))):
        want = lora.scale * values @ a @ b
        size = lora.scale * np.abs(values) @ np.abs(a) @ np.abs(b)
        assert (np.abs(got - want) <= 40 * np.finfo(np.float32).eps * size).all()
    model = whole.freeze(base.parameters)
    ids = jnp.asarray(IDS)
    read = jax.jit(lambda key: model.bind(adapters).hidden(ids, dropout_key=key))
    ones = [np.asarray(read(jax.random.key(seed))) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(ones[0], ones[1])
    assert np.abs(ones[0] - ones[2]).max() > 0.01


def test_a_norm_is_of_the_whole_column_wherever_its_rows_lie(directory):
    """Each device squares the inputs that it has, and what they add up to is exchanged."""
    base = load_pretrained(directory, policy=PolicyName.FP32).parameters
    config = dataclasses.replace(
        run_config(directory, lora=DORA), mesh=parse_mesh("fsdp=2,tensor=2,replica=2")
    )
    job = with_frozen(make_job(config))
    found, weights = by_path(first_state(job).parameters), by_path(base)
    # Inputs of the first lie over fsdp, those of the others over tensor.
    for name, inner in {"attention/query": (1,), "attention/out": (1, 2), "mlp/down": (1,)}.items():
        got = found[f"blocks/0/{name}/adapter/magnitude"]
        want = np.sqrt(np.square(np.float64(weights[f"blocks/0/{name}/weight"])).sum(inner))
        np.testing.assert_allclose(got, want, rtol=48 * np.finfo(np.float32).eps)
    assert found["blocks/0/attention/query/adapter/magnitude"].sharding.spec[1] == "tensor"
    initial = jax.jit(job._initial, out_shardings=job.shardings)
    program = initial.lower(job.model.frozen).compile().as_text()
    assert "all-reduce" in program
    assert "all-gather" not in program


@pytest.mark.slow
def test_lengths_are_trained_on_a_mesh_as_on_one_device(directory):
    config = run_config(directory, lora=DORA)
    alone, one, losses = train(config, steps=2)
    meshed = dataclasses.replace(config, mesh=parse_mesh("fsdp=2,tensor=2,replica=2"))
    job, state, again = train(meshed, steps=2)
    np.testing.assert_allclose(again, losses, rtol=3e-6)
    plain = dataclasses.replace(config, lora=None)
    base = load_pretrained(directory, policy=PolicyName.FP32)
    of_base = make_job(plain).evaluation_step(base.parameters, alone.put(batch()))
    first = alone.evaluation_step(first_state(alone).parameters, alone.put(batch()))
    np.testing.assert_allclose(first[0], of_base[0], rtol=1e-6)  # each factor within rounding of 1
    began, ended = by_path(first_state(job).parameters), by_path(state.parameters)
    for path in (path for path in began if path.endswith("magnitude")):
        assert np.abs(np.asarray(ended[path]) - np.asarray(began[path])).max() > 1e-3
        np.testing.assert_allclose(ended[path], by_path(one.parameters)[path], rtol=1e-4)


def test_the_base_is_held_as_it_is_used(directory):
    config = run_config(directory)
    policy = dataclasses.replace(config.precision, policy=PolicyName.BF16)
    job = with_frozen(make_job(dataclasses.replace(config, precision=policy)))
    assert {x.dtype.name for x in jax.tree.leaves(job.model.frozen)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(job.abstract_state().parameters)} == {"float32"}


def test_the_table_has_what_is_frozen(directory):
    job = make_job(dataclasses.replace(run_config(directory), mesh=parse_mesh("fsdp=8")))
    table = placement_table(job)
    (row,) = (line for line in table.splitlines() if line.startswith("blocks/0/mlp/up/weight"))
    assert row.split()[-4:] == ["frozen", f"{2 * 32 * 48 * 4 // 8:,}", "0", "0"]
    adapters = sum(x.size for x in jax.tree.leaves(job.model.shapes))
    assert f"({adapters:,} of them trained)" in describe_job(job)
    assert job.model.num_parameters == job.model.num_frozen + adapters
    # Its forward pass and input gradients; all three of the adapters.
    whole = define_model(MODEL, execution_on())
    base = matmul_parameters(whole.table())
    attention = training_flops_per_token(whole, 32) - 6 * base
    assert training_flops_per_token(job.model, 32) == attention + 4 * base + 6 * adapters


def parse_lora(text):
    return codec.parse_record(LoraConfig, text, what="lora")


def test_settings_as_text():
    assert parse_lora("rank=4,alpha=8.5,targets=query+up") == LoraConfig(
        rank=4, alpha=8.5, targets=("query", "up")
    )
    chosen = parse_lora("rank=4,alpha=8,kind=dora,scaling=rslora")
    assert (chosen.kind, chosen.scaling) == (AdapterKind.DORA, AdapterScaling.RSLORA)
    assert chosen.scale == 4.0
    for text, message in {
        "rank": "no value",
        "rank=x": "'x' is a str, expected int",
        "rank=0": "at least 1",
        "dropout=1": r"dropout=1.0 must be in \[0, 1\)",
        "targets=kv_up,dropout=0.1": "target 'kv_up'",
        "ranks=3": "did you mean 'rank'",
        "kind=dor": "did you mean 'dora'",
        "targets=queri": "did you mean 'query'",
        "targets=up+up": "each projection once",
        "alpha=NaN": "not a finite number",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_lora(text)


def test_what_adapters_need(directory):
    config = run_config(directory)
    with pytest.raises(ConfigError, match="--init DIR"):
        validate(dataclasses.replace(config, init=None))
    with pytest.raises(ConfigError, match="pipe=2"):
        validate(dataclasses.replace(config, mesh=MeshConfig(pipe=2)))
    gpt2 = read_model_directory(GOLDEN / "gpt2").config
    with pytest.raises(ConfigError, match="'gate': this model has no such"):
        define_model(gpt2, execution_on(), lora=ALL)
