"""Reinforcement learning on several devices: meshes, weights that move between them, and memory."""

import dataclasses
import functools
import gc
import json

import jax
import numpy as np
import pytest
import small_run

import jaxinfra
from jaxinfra.config import codec
from jaxinfra.config.rl import RlConfig
from jaxinfra.config.run import RunConfig
from jaxinfra.data.batch import Batch, Rollout
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.diagnostics.memory.rollouts import rollout_memory
from jaxinfra.errors import ConfigError
from jaxinfra.reinforcement.handover import Handover, engine_placement
from jaxinfra.reinforcement.sampler import Sampler, sampling_programs
from jaxinfra.runtime.compile_cache import cache_for_stages
from jaxinfra.serving.engine.fit import device_bytes, temporary_bytes
from jaxinfra.training.job import make_job

OWN = {"engine_mesh": "tensor=2", "engine_devices": "own", "overlap": True}


def config_of(mesh: str, **rl) -> RunConfig:
    sizes = ["training.batch_size=8", "training.sequence_length=16", *mesh.split()]
    given = {"prompts": "p.jsonl", "reward": "exact_match", "group_size": 4, "max_new_tokens": 6}
    config = dataclasses.replace(small_run.config_of(*sizes), rl=RlConfig(**given | rl))
    return codec.normalized(config, RunConfig)


@pytest.fixture
def four_devices(monkeypatch):
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    return devices


def completions(sampler: Sampler) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    contexts = {place: [256, 48 + place // 4, 61] for place in range(8)}
    found = list(sampler.sample(contexts, seed=3, is_over=lambda: False))
    found.sort(key=lambda each: each.place)
    return [(each.ids, each.log_probabilities) for each in found]


def test_only_arrays_that_are_sharded_otherwise_are_copied(four_devices):
    """To the engine's mesh and back the values are equal; nothing is compiled a second time."""
    config = config_of("mesh.fsdp=4", engine_mesh="replica=2,tensor=2")
    job = make_job(config)
    trained = job.initialize().tree
    same = config_of("mesh.fsdp=4")
    for each, copies in ((same, False), (config, True)):
        placement = engine_placement(each)
        sampler = Sampler(each, bytes_tokenizer())
        handover = Handover(each, placement, sampler.definition)
        given = handover.trained(trained)
        leaves = list(zip(jax.tree.leaves(given), jax.tree.leaves(trained), strict=True))
        assert any(new is not old for new, old in leaves) == copies
        for new, old in leaves:
            np.testing.assert_array_equal(new, old)
        with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled again"))
            handover.trained(trained)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_on_another_mesh_samples_what_one_device_does(four_devices):
    one = config_of("")
    tree = make_job(one).initialize().tree
    alone = Sampler(one, bytes_tokenizer())
    alone.renew({}, tree)
    wanted = completions(alone)
    engine = alone._engine
    assert engine is not None
    assert {*engine.runner.programs._made} <= {*sampling_programs(engine.limits, [3] * 8)}
    config = config_of("mesh.fsdp=4", engine_mesh="replica=2,tensor=2")
    trained = jax.device_put(tree, make_job(config).shardings.tree)
    sampler = Sampler(config, bytes_tokenizer())
    counts = []
    for _ in range(3):
        sampler.renew({}, trained)
        found = completions(sampler)
        sampler.release()
        assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
        for (_, got), (_, want) in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert counts[1] == counts[2]  # neither weights nor pages of a rollout stay


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mesh", "rl"),
    [
        ("mesh.fsdp=2 mesh.tensor=2", {"kl": 0.05}),
        ("mesh.fsdp=2", OWN),
        ("mesh.fsdp=4 precision.numerics=exact", {"engine_mesh": "replica=2,tensor=2"}),
        (
            "mesh.fsdp=2 mesh.pipe=2 training.accumulation=2 precision.numerics=exact",
            {"engine_mesh": "fsdp=4", "kl": 0.05},
        ),
        ("mesh.fsdp=2 mesh.tensor=2 precision.numerics=exact", {"engine_mesh": "fsdp=4"}),
    ],
)
def test_runs_learn_on_several_devices(four_devices, tmp_path, mesh, rl):
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(20)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    config = config_of(mesh, **{"prompts": str(tmp_path / "p.jsonl"), "algorithm": "ppo"} | rl)
    jaxinfra.rl(config, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 4
    if "exact" in mesh:
        assert {each["rl/engine_difference_max"] for each in records} == {0.0}
    assert records[0]["rl/engine_difference_max"] < 1e-5
    assert {each.get("rl/lag") for each in records} == ({0, 1} if "overlap" in rl else {None})


@pytest.mark.slow
def test_a_pipeline_has_the_gradients_and_figures_of_one_device(four_devices):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, (8, 17))
    given = {name: rng.normal(-5.0, 0.3, (8, 16)) for name in ("old", "importance", "advantages")}
    given = {name: x.astype(np.float32) for name, x in given.items()}
    counted = (np.arange(16) > 4)[None].repeat(8, axis=0).astype(np.float32)
    batch = Batch(
        tokens=ids[:, :-1].astype(np.int32),
        targets=ids[:, 1:].astype(np.int32),
        segment_ids=None,
        positions=None,
        weights=counted,
        rollout=Rollout(share=counted, **given),
    )
    found = []
    for mesh in ("", "mesh.fsdp=2 mesh.pipe=2 training.accumulation=4"):
        job = make_job(config_of(mesh, **({"engine_mesh": "fsdp=4"} if mesh else {})))
        state, key = job.initialize(), jax.random.key(0)
        run = jax.jit(functools.partial(job.gradient, key=key, loss_scale=jax.numpy.ones(())))
        with cache_for_stages(job.config.mesh.pipe):
            found.append(run(state.parameters, state.model_state, job.put(batch)))
    one, stages = found
    assert one.figures.keys() == stages.figures.keys() >= {"entropy", "ratio", "clipped_low"}
    compared = [(each.loss, each.figures, each.gradients) for each in (stages, one)]
    for new, old in zip(*map(jax.tree.leaves, compared), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5 * float(abs(old).max()))


def test_devices_that_are_not_there_are_named(four_devices):
    with pytest.raises(ConfigError, match="needs 4 devices, and training leaves 2 of 4"):
        engine_placement(config_of("mesh.fsdp=2", **OWN | {"engine_mesh": "tensor=4"}))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mesh", "rl"),
    [
        ("precision.policy=bf16", {"kl": 0.1}),
        ("mesh.fsdp=4", {"engine_mesh": "replica=2,tensor=2"}),
        ("mesh.fsdp=4", {}),
        ("mesh.fsdp=2 mesh.pipe=2 training.accumulation=2", {"engine_mesh": "fsdp=4"}),
    ],
)
def test_memory_of_sampling_is_foretold(four_devices, mesh, rl):
    """Against the arrays that are there, and the compiled program that needs most beside them."""
    config = config_of(mesh, **rl)
    found = rollout_memory(config, limit_bytes=None)
    gc.collect()
    before = {id(each) for each in jax.live_arrays()}
    job = make_job(config)
    state = job.initialize()
    reference = job.initialize().tree if "kl" in rl else None
    sampler = Sampler(config, bytes_tokenizer())
    sampler.renew({}, state.tree)
    engine = sampler._engine
    assert engine is not None
    held = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for each in jax.live_arrays()
        if id(each) not in before
        for shard in each.addressable_shards
    }
    on_first = sum(size for (device, _), size in held.items() if device == four_devices[0])
    beside = max(
        temporary_bytes(engine.runner.lowered(key).compile())
        for key in engine.runner.keys
        if key.name in ("step", "score", "verify")
    )
    assert found.phases["sampling"] == pytest.approx(on_first + beside, rel=0.03)
    assert found.phases["training"] > device_bytes(jax.tree.leaves(job.abstract_state()))
    del reference
