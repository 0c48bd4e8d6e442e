"""Generation on a mesh is generation on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxinfra
from jaxinfra.axes import MeshAxis
from jaxinfra.checkpoint.checkpointer import Checkpointer
from jaxinfra.cli import main
from jaxinfra.config import codec
from jaxinfra.config.data import DataConfig, TokenizerConfig, TokenizerKind
from jaxinfra.config.mesh import MeshConfig, parse_mesh
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.run import CheckpointConfig, RunConfig, TrainingConfig
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.errors import ConfigError
from jaxinfra.model.cache import PagedCache, after_pass, in_layer
from jaxinfra.model.definition import define_model
from jaxinfra.parallel.execution import execution_on, kernels_on
from jaxinfra.serving.convert import convert
from jaxinfra.serving.load import load, serving_placement
from jaxinfra.serving.sampling import GREEDY, SamplingConfig
from jaxinfra.training.job import make_job
from tests.decoder_oracle import attention, drawn, model, oracle
from tests.generation import served
from tests.tolerance import assert_within_rounding

CONFIG = dataclasses.replace(
    model(attention(window=5), attention(num_kv_heads=4), tie_embeddings=False), vocab_size=32
)
MESHES = {
    "one": MeshConfig(),
    "tensor": MeshConfig(tensor=4),  # two key/value heads of the first block: each on two devices
    "fsdp_tensor": MeshConfig(fsdp=2, tensor=2),
    "replica_tensor": MeshConfig(replica=2, tensor=2),
}
PROMPTS = [[5], [7, 25, 3, 29, 4, 8, 1, 2, 3, 30], [1, 2, 3]]  # three rows for two data shards


@pytest.fixture(scope="module")
def decoders():
    made = {}
    for name, mesh in MESHES.items():
        placement = serving_placement(CONFIG, mesh)
        definition = define_model(CONFIG, execution_on(placement))
        parameters = jax.device_put(drawn(definition), placement.parameters(definition))
        made[name] = definition.bind(parameters)
    return made


def tokens(decoder, sampling) -> dict[int, list[int]]:
    rows = {}
    for new in served(decoder, PROMPTS, max_new_tokens=12, sampling=sampling, seed=2):
        rows.setdefault(new.row, []).append(new.token)
    return rows


@pytest.mark.slow  # by default the logits of `test_serving_form.py`, pages and exchanges below
@pytest.mark.parametrize("name", [name for name in MESHES if name != "one"])
def test_rows_are_those_of_one_device(decoders, name):
    settings = [GREEDY, GREEDY, SamplingConfig(temperature=0.8, top_k=20, top_p=0.9)]
    one = tokens(decoders["one"], settings)
    assert tokens(decoders[name], settings) == one
    assert len({token for row in one.values() for token in row}) > 6, "a telling sequence"


@pytest.mark.slow_cases("tensor", "fsdp_tensor")
@pytest.mark.parametrize("name", ["tensor", "fsdp_tensor"])
def test_logits_are_as_close_as_on_one_device_and_the_cache_is_spread(decoders, name):
    ids = np.random.default_rng(0).integers(0, 32, (4, 16)).astype(np.int32)

    @jax.jit
    def logits(decoder, ids):
        """Of a prompt of 8, and then of a token at a time."""
        cache = decoder.empty_cache(batch=4, num_slots=16)
        results = []
        for start, stop in [(0, 8), (8, 12), (12, 13), (13, 16)]:
            positions = jnp.broadcast_to(jnp.arange(start, stop)[None], (4, stop - start))
            out = decoder.run(ids[:, start:stop], positions=positions, cache=cache)
            cache = out.cache
            results.append(decoder.logits(out.x))
        return jnp.concatenate(results, axis=1)

    true = oracle(drawn(define_model(CONFIG, execution_on())), CONFIG, ids)
    assert_within_rounding(logits(decoders[name], ids), true)

    rows = None if name == "tensor" else (MeshAxis.FSDP,)
    spec = PartitionSpec(None, rows, None, (MeshAxis.TENSOR,))
    cache = jax.jit(lambda decoder: decoder.empty_cache(batch=4, num_slots=32))(decoders[name])
    for position in range(2):
        for stored in jax.tree.leaves(cache):
            assert stored.sharding.is_equivalent_to(
                jax.sharding.NamedSharding(stored.sharding.mesh, spec), stored.ndim
            )
        _, cache = step(decoders[name], ids[:, :1], np.full((4, 1), position, np.int32), cache)


@functools.partial(jax.jit, donate_argnames="cache")
def step(decoder, ids, positions, cache):
    """A token of each row."""
    out = decoder.run(ids, positions=positions, cache=cache)
    return decoder.logits(out.x), out.cache


def test_decoding_exchanges_no_cache(decoders):
    decoder = decoders["fsdp_tensor"]
    cache = jax.jit(lambda decoder: decoder.empty_cache(batch=4, num_slots=4096))(decoder)
    cache = tuple(after_pass(each, each.arrays) for each in cache)
    ids = jnp.zeros((4, 1), jnp.int32)
    program = step.lower(decoder, ids, ids, cache).compile()
    a_device = sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) // 4
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= a_device
    # A layer's slices and scores: with what other devices cache it would not fit.
    assert memory.temp_size_in_bytes < a_device


def test_pages_are_read_alike_on_a_mesh():
    mixer = attention(window=20)
    placement = serving_placement(CONFIG, MeshConfig(fsdp=2, tensor=2))
    rng = np.random.default_rng(4)
    tables = jnp.asarray(rng.permutation(32)[:16].reshape(4, 4), jnp.int32)
    cache = PagedCache.zeros(
        mixer.cache, num_layers=2, num_pages=32, page_size=8, tables_BM=tables, dtype=jnp.float32
    )
    assert not after_pass(cache, cache.arrays).is_empty
    new = {name: jnp.asarray(rng.normal(size=(4, 30, 2, 8)), jnp.float32) for name in "kv"}
    positions = jnp.tile(jnp.arange(30, dtype=jnp.int32), (4, 1))
    inside = in_layer(cache, cache.arrays, jnp.int32(1)).append(new, positions)
    q = rng.normal(size=(4, 3, 4, 8)).astype(np.float32)
    results = [
        jax.jit(
            lambda q, cache, port=port: port(
                q, cache.view(), config=mixer, positions_BT=positions[:, 27:]
            )
        )(q, inside)
        for port in (kernels_on(None).decode, kernels_on(placement).decode)
    ]
    np.testing.assert_array_equal(*results)


RUN = RunConfig(
    model=dataclasses.replace(
        model(attention(), tie_embeddings=False), vocab_size=258, max_positions=64
    ),
    data=DataConfig(tokenizer=TokenizerConfig(kind=TokenizerKind.BYTES)),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0),
    training=TrainingConfig(steps=4, batch_size=1, sequence_length=16),
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A model as a run, as a Hugging Face directory and as a converted one."""
    place = tmp_path_factory.mktemp("models")
    run = place / "run"
    run.mkdir()
    (run / "config.json").write_text(codec.to_json(RUN))
    bytes_tokenizer().save(run / "tokenizer.json")
    job = make_job(RUN)
    state = job.initialize()
    state = dataclasses.replace(state, parameters=drawn(job.model))
    identity = {"model": codec.to_dict(RUN.model)}
    with Checkpointer(run / "checkpoints", CheckpointConfig(), identity=identity) as saver:
        saver.save(2, state, data_state={})
    convert(run, place / "hf", dtype=None, max_shard_bytes=10**9)
    convert(place / "hf", place / "ours", dtype=None, max_shard_bytes=10**9)
    return place


@pytest.mark.slow_cases("ours", "hf", "run")
@pytest.mark.parametrize("source", ["run", "hf", "ours"])
def test_models_of_every_layout_are_loaded_onto_a_mesh(directories, source, capsys):
    command = ["generate", str(directories / source), "--prompt", "abc", "--max-new-tokens", "16"]
    texts = []
    for mesh in ("", "tensor=2"):
        assert main.main([*command, "--temperature", "0", "--mesh", mesh]) == 0
        texts.append(capsys.readouterr().out)
        loaded = load(directories / source, mesh=parse_mesh(mesh))
        weight = loaded.parameters["blocks"][0]["attention"]["query"]["weight"]
        assert len(weight.sharding.device_set) == parse_mesh(mesh).num_devices
    assert texts[0] == texts[1]
    ids = np.arange(8)[None]
    one = jaxinfra.load_model(directories / source)(ids)
    two = jaxinfra.load_model(directories / source, mesh=MeshConfig(tensor=2))(ids)
    true = oracle(drawn(make_job(RUN).model), RUN.model, ids)
    for logits in (one, two):
        assert_within_rounding(logits, true)


@pytest.mark.parametrize("command", ["generate", "serve", "compile"])
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "replica=2"])
def test_commands_that_generate_hold_one_copy(directories, capsys, command, mesh):
    words = ["--prompt", "a"] if command == "generate" else []
    assert main.main([command, str(directories / "run"), *words, "--mesh", mesh]) == 1
    assert "it splits a batch over 2 replica or fsdp devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tensor=8", r"vocab_size=260 does not divide over tensor=8; choose a tensor size that"),
        ("pipe=2", r"mesh pipe=2: generation spreads a model over replica, fsdp, tensor only"),
        ("context=2,tensor=2", r"mesh context=2: generation spreads"),
        ("replica=16", r"needs 16 devices, 8 are here"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(directories, mesh, message):
    config: ModelConfig = dataclasses.replace(RUN.model, vocab_size=260)
    with pytest.raises(ConfigError, match=message):
        serving_placement(config, parse_mesh(mesh))
    if mesh == "pipe=2":
        with pytest.raises(ConfigError, match=message):
            load(directories / "run", mesh=parse_mesh(mesh))
