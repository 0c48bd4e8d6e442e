"""Steps with projections in 8 bits on meshes, accumulated and recomputed: one device's.

In fp32 beside the 8 bits, so that sums in another order move few elements to another of their 256
values: one such element changes a gradient by 1/16 of itself, where all losses are means of 4096
tokens. Blocks of tokens are the same wherever a device has whole ones (``SEQUENCE``).
"""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.data import DataConfig
from jaxinfra.config.finetune import LoraConfig
from jaxinfra.config.mesh import ShardingConfig, parse_mesh
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.precision import Fp8Matmuls, Fp8Scaling, PolicyName, PrecisionConfig
from jaxinfra.config.run import Remat, RunConfig, TrainingConfig
from jaxinfra.config.validate import validate
from jaxinfra.data.batch import Batch
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import define_model
from jaxinfra.numerics.policy import policy_of
from jaxinfra.parallel.execution import execution_on
from jaxinfra.runtime.compile_cache import cache_for_stages
from jaxinfra.training.gradients import AccumulatedGradient
from jaxinfra.training.job import Job, lower_step, make_job
from tests.small_models import dense
from tests.unit.test_fp8_layers import num_casts

BATCH, SEQUENCE, STEPS = 8, 512, 2
MODEL = dense(
    model_dim=256, heads=(8, 4), head_dim=32, hidden_dim=512, max_positions=SEQUENCE, init_std=0.05
)


def job_of(
    mesh: str = "",
    *,
    scaling: Fp8Scaling | None = Fp8Scaling.BLOCKS,
    accumulation: int = 1,
    remat: Remat = Remat.NONE,
    sequence_parallel: bool = False,
    zero: int = 3,
) -> Job:
    config = parse_mesh(mesh or "fsdp=1")
    run = RunConfig(
        model=MODEL,
        data=DataConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-2, epsilon=1e-2),
        training=TrainingConfig(
            steps=10,
            batch_size=BATCH,
            sequence_length=SEQUENCE,
            accumulation=accumulation,
            remat=remat,
        ),
        precision=PrecisionConfig(
            policy=PolicyName.FP32, fp8=scaling and Fp8Matmuls(scaling=scaling)
        ),
        mesh=config,
        sharding=ShardingConfig(sequence_parallel=sequence_parallel, zero=zero),
    )
    sizes = (config.pipe, config.replica, config.fsdp, config.context, config.tensor)
    return make_job(run, devices=jax.devices()[: math.prod(sizes)])


def batches():
    rng = np.random.default_rng(0)
    shape = (BATCH, SEQUENCE)
    for _ in range(STEPS):
        ids = rng.integers(0, MODEL.vocab_size, (BATCH, SEQUENCE + 1)).astype(np.int32)
        yield Batch(
            tokens=ids[:, :-1],
            targets=ids[:, 1:],
            segment_ids=np.zeros(shape, np.int32),
            positions=np.tile(np.arange(SEQUENCE, dtype=np.int32), (BATCH, 1)),
            weights=np.ones(shape, np.float32),
        )


@functools.cache
def trained(mesh: str = "", **how):
    """Losses and gradient norms of some steps, and the state after them."""
    job = job_of(mesh, **how)
    state, found = job.initialize(), []
    with cache_for_stages(job.config.mesh.pipe):
        for batch in batches():
            state, metrics = job.train_step(state, job.put(batch))
            found.append((float(metrics.loss), float(metrics.gradient_norm)))
    return np.asarray(found), jax.device_get(state.model_state), jax.device_get(metrics.fp8)


CASES = {
    "fsdp": ("fsdp=4", {}),
    "replica-zero1": ("replica=2,fsdp=2", {"zero": 1}),
    "tensor-sequence": ("fsdp=2,tensor=2", {"sequence_parallel": True}),
    "context": ("context=2,fsdp=2", {}),
    "pipe": ("pipe=2", {"accumulation": 2}),
    "accumulated": ("fsdp=2", {"accumulation": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_mesh_trains_as_one_device(case):
    mesh, how = CASES[case]
    ours, state, _ = trained(mesh, **how)
    one, of_one, _ = trained()
    np.testing.assert_allclose(ours[0, 0], one[0, 0], rtol=1e-4)
    np.testing.assert_allclose(ours[:, 1], one[:, 1], rtol=2e-2)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(of_one), strict=True):
        np.testing.assert_allclose(a[..., 0], b[..., 0], rtol=0.1)  # largest elements
    plain, _, _ = trained(scaling=None)
    assert np.all(one[:, 0] != plain[:, 0])
    np.testing.assert_allclose(one[0, 0], plain[0, 0], rtol=1e-3)  # of equal weights
    # After an update, what moved to another value has moved others: by less than 8 bits move all.
    assert abs(ours[1, 0] - one[1, 0]) < abs(one[1, 0] - plain[1, 0])


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [s for s in Fp8Scaling if s is not Fp8Scaling.BLOCKS])
def test_every_recipe_trains_on_a_mesh(scaling):
    ours, one = (trained(mesh, scaling=scaling)[0] for mesh in ("fsdp=2,tensor=2", ""))
    np.testing.assert_allclose(ours[:, 0], one[:, 0], rtol=5e-4)


@pytest.mark.slow
def test_shares_of_weights_are_gathered_in_8_bits():
    """Of projections a byte for each element comes together, where the policy's format has four:
    each device holds whole blocks of 128.
    """
    sizes = {}
    for scaling in (None, Fp8Scaling.BLOCKS):
        text = lower_step(job_of("fsdp=2", scaling=scaling)).compile().as_text()
        found: collections.Counter[str] = collections.Counter()
        for dtype, dims in re.findall(r"= (\w+)\[([\d,]*)\][^=]*? all-gather\(", text):
            found[dtype] += math.prod(map(int, dims.split(",")))
        sizes[scaling] = found
    weights = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512  # of a layer
    eight = sum(n for dtype, n in sizes[Fp8Scaling.BLOCKS].items() if dtype == "u8")
    assert eight >= 2 * weights, sizes  # for each pass
    assert sizes[Fp8Scaling.BLOCKS]["f32"] <= sizes[None]["f32"] - 1.9 * weights, sizes


def casts(remat: Remat, scaling: Fp8Scaling) -> int:
    """Conversions to 8 bits in a gradient, with what recomputation repeats."""
    precision = PrecisionConfig(policy=PolicyName.BF16, fp8=Fp8Matmuls(scaling=scaling))
    execution = execution_on(policy=policy_of(precision), remat=remat)
    model = define_model(MODEL, execution)
    training = TrainingConfig(steps=1, batch_size=BATCH, sequence_length=SEQUENCE)
    gradient = AccumulatedGradient(model, training=training)
    (batch, *_) = batches()
    batch = jax.tree.map(jnp.asarray, batch)
    jaxpr = jax.make_jaxpr(
        lambda parameters, state: gradient(
            parameters, state, batch, key=jax.random.key(0), loss_scale=jnp.float32(1.0)
        )
    )(model.shapes, model.state_shapes)
    return num_casts(jaxpr.jaxpr)


def test_nothing_is_quantized_twice():
    """A layer has 4 inputs and 7 cotangents, each cast along rows and across, and 7 weights."""
    assert casts(Remat.MLP, Fp8Scaling.BLOCKS) == 2 * 4 + 2 * 7 + 7


@pytest.mark.slow  # a trace more
def test_nothing_is_quantized_twice_in_squares():
    assert casts(Remat.DOTS, Fp8Scaling.SQUARES) == 4 + 7 + 7


@pytest.mark.slow
def test_evaluation_is_not_in_8_bits():
    job = job_of()
    state = job.initialize()
    (batch, *_) = batches()
    lowered = job.evaluation_step.lower(state.tree, job.put(batch))
    assert "f8E" not in lowered.as_text()
    nll, count = job.evaluation_step(state.tree, job.put(batch))
    assert abs(float(nll / count) - trained(scaling=None)[0][0, 0]) < 1e-5


@pytest.mark.slow
def test_adapters_train_over_a_base_in_8_bits():
    """Products of the frozen base are in 8 bits, the adapters' own are not."""
    precision = PrecisionConfig(policy=PolicyName.FP32, fp8=Fp8Matmuls())
    lora = LoraConfig(rank=4, targets=("query", "down"))
    gradients = {}
    for name, fp8 in (("8 bits", precision), ("fp32", PrecisionConfig())):
        execution = execution_on(policy=policy_of(fp8))
        base = define_model(MODEL, execution)
        frozen = base.initialize(jax.random.key(0))
        model = define_model(MODEL, execution, lora=lora).freeze(frozen)
        training = TrainingConfig(steps=1, batch_size=BATCH, sequence_length=SEQUENCE)
        gradient = jax.jit(AccumulatedGradient(model, training=training))
        (batch, *_) = batches()
        adapters = model.initialize(jax.random.key(1))
        found = gradient(
            adapters,
            model.initial_state(),
            batch,
            key=jax.random.key(0),
            loss_scale=jnp.float32(1.0),
        )
        gradients[name] = found.gradients["blocks"][0]["mlp"]["down"]["adapter"]["b"]
    a, b = (np.asarray(gradients[name], np.float64) for name in ("8 bits", "fp32"))
    assert 0 < np.linalg.norm(a - b) < 0.15 * np.linalg.norm(b)


def test_what_cannot_be_combined_is_refused():
    run = job_of_config()
    with pytest.raises(ConfigError, match="fp8 gathers them in 8 bits"):
        validate(run)


def job_of_config() -> RunConfig:
    return RunConfig(
        model=MODEL,
        data=DataConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        training=TrainingConfig(steps=1, batch_size=BATCH, sequence_length=SEQUENCE),
        precision=PrecisionConfig(policy=PolicyName.FP32, fp8=Fp8Matmuls()),
        mesh=parse_mesh("fsdp=2"),
        sharding=ShardingConfig(keep_gathered=True),
    )
