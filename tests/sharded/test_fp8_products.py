"""Matmuls in 8 bits, each device of a mesh with its share: NumPy's, which knows of no mesh.

In fp32 beside the 8 bits. Every axis that shares out a dim is in ``MESH``: fsdp and context tokens,
fsdp the stored weight, tensor what column-parallel products give and row-parallel ones contract.
"""

import functools
import logging
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.axes import BATCH, EMBED, MLP, SEQUENCE, STREAM, STREAM_SEQUENCE, Dims
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.precision import Fp8Matmuls, Fp8Scales, PolicyName, PrecisionConfig, Site
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.model.definition import define_model, merged
from jaxinfra.numerics.policy import policy_of
from jaxinfra.ops.fp8_operands import empty_record
from jaxinfra.ops.quantized import H200, compiling_for
from jaxinfra.parallel import fp8
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from tests.seeds import seeded
from tests.small_models import dense
from tests.tolerance import assert_within_rounding
from tests.unit.test_fp8 import CONFIGS, expected
from tests.unit.test_fp8_layers import equations

B, T, D, F = 2, 512, 256, 256
MESH = MeshConfig(fsdp=2, context=2, tensor=2)
SPLIT = ShardingConfig(sequence_parallel=True)
INWARD = ("BTD,DF->BTF", (EMBED, MLP))
OUTWARD = ("BTF,FD->BTD", (MLP, EMBED))


def placement_of(mesh: MeshConfig, sharding: ShardingConfig = SPLIT) -> Placement:
    devices = jax.devices()[: mesh.num_devices]
    return Placement(mesh=make_mesh(mesh, devices=devices), rules=state_rules(sharding, mesh))


def arrays():
    """x, weight and cotangent, of rows whose sizes differ by powers of ten."""
    rng = np.random.default_rng(seeded(0))
    x = rng.normal(size=(B, T, D)) * 10.0 ** rng.uniform(-2, 2, (B, T, 1))
    weight = rng.normal(size=(D, F)) * 10.0 ** rng.uniform(-1, 0, (D, 1))
    cotangent = rng.normal(size=(B, T, F)) * 1e-4 * 10.0 ** rng.uniform(-1, 1, (B, T, 1))
    return tuple(each.astype(np.float32) for each in (x, weight, cotangent))


def computed(
    config: Fp8Matmuls, placement: Placement, *directions, policy: PolicyName = PolicyName.FP32
):
    """Of each direction y, dx, dweight and what the record emits."""
    precision = PrecisionConfig(policy=policy, fp8=config)
    execution = execution_on(placement, policy=policy_of(precision))
    recipe = execution.policy.recipe(Site.PROJECTION)

    def one(spec, dims, x, weight, cotangent):
        inward = dims[0] == EMBED

        def product(x, weight, record):
            if inward:
                x = execution.multiply.prepared(x, recipe=recipe, dims=dims[:1])
            return execution.multiply(spec, x, weight, recipe=recipe, record=record, dims=dims)

        stream, hidden = (BATCH, STREAM_SEQUENCE, STREAM), (BATCH, SEQUENCE, MLP)
        x = execution.place(x, stream if inward else hidden)
        weight = jax.lax.with_sharding_constraint(weight, placement.sharding(dims))
        y, pull = jax.vjp(product, x, weight, empty_record())
        cotangent = execution.place(cotangent.astype(y.dtype), hidden if inward else stream)
        return y, *pull(cotangent)

    def run(*arrays):
        return [one(*direction, *arrays) for direction in directions]

    return jax.tree.map(np.asarray, jax.jit(run)(*arrays()))


def assert_as_numpy(config: Fp8Matmuls, placement: Placement, *directions) -> None:
    oracle, largest = expected(config, *arrays()), [np.abs(each).max() for each in arrays()]
    for *found, emitted in computed(config, placement, *(directions or (INWARD, OUTWARD))):
        assert_within_rounding(tuple(found), oracle)
        above = 1.0 if config.scales is Fp8Scales.POWER_OF_TWO else 1e-6
        np.testing.assert_array_less(largest, emitted[:, 0] * (1 + 1e-6))
        np.testing.assert_array_less(emitted[:, 0], np.multiply(largest, 1 + above))
        assert np.all(emitted[:, -1] == 0.0)


@pytest.mark.slow_cases("blocks by powers of two", "squares", "blocks")
@pytest.mark.parametrize("name", CONFIGS)
def test_shares_are_multiplied_as_the_whole(name):
    assert_as_numpy(CONFIGS[name], placement_of(MESH))


@pytest.mark.slow  # four programs, each with a fault of its own
@pytest.mark.parametrize(
    ("method", "fault", "name"),
    [
        ("total", lambda self, y, over: y, "squares"),
        ("total_gradient", lambda self, gradient, dims: gradient, "squares"),
    ],
    ids=["no sum", "no sum of gradients"],
)
def test_what_devices_do_not_tell_each_other_is_caught(method, fault, name):
    mesh = MeshConfig(context=2, tensor=2)
    with (
        mock.patch.object(fp8.PerDeviceKernels, method, fault),
        pytest.raises(AssertionError),
    ):
        assert_as_numpy(CONFIGS[name], placement_of(mesh, ShardingConfig()))


def test_a_share_without_whole_blocks_is_left_to_the_compiler(caplog):
    """The log says so."""
    devices = fp8.fp8_devices_on(placement_of(MESH))()
    tokens = ((BATCH, SEQUENCE), (B, T))
    for sides in (
        (((BATCH, SEQUENCE), (B, 128)), ((EMBED,), (D,))),
        (tokens, ((EMBED,), (128,))),
        (tokens, ((MLP,), (384,))),
    ):
        assert "not whole blocks of 128" in devices.why_unfit(sides)
    assert devices.why_unfit((tokens, ((EMBED,), (D,)), ((None,), (72,)))) is None

    execution = execution_on(placement_of(MESH))
    precision = PrecisionConfig(policy=PolicyName.BF16, fp8=CONFIGS["blocks"])
    recipe = policy_of(precision).recipe(Site.PROJECTION)
    multiply = functools.partial(execution.multiply, recipe=recipe, dims=(EMBED, MLP))
    x, weight = jnp.ones((B, T, D)), jnp.ones((D, 72))
    with caplog.at_level(logging.INFO, "pallas_kernels.common.chosen"):
        jaxpr = jax.make_jaxpr(functools.partial(multiply, "BTD,DF->BTF"))(x, weight)
    assert "8-bit matmul on cpu uses xla for scales by 1x128 of 1024 x 256 x 72" in caplog.text
    assert "72 of mlp over 2 devices" in caplog.text
    assert "shard_map" not in str(jaxpr)


def traced(placement: Placement, config: Fp8Matmuls, spec: str, dims: Dims) -> list:
    """Equations of a product and its gradients in bf16, as for H200s."""
    precision = PrecisionConfig(policy=PolicyName.BF16, fp8=config)
    execution = execution_on(placement, policy=policy_of(precision))
    recipe = execution.policy.recipe(Site.PROJECTION)
    multiply = functools.partial(execution.multiply, spec, recipe=recipe, dims=dims)

    def run(x, weight, cotangent):
        y, pull = jax.vjp(multiply, x, weight)
        return y, pull(cotangent.astype(y.dtype))

    with compiling_for(H200):
        return list(equations(jax.make_jaxpr(run)(*arrays()).jaxpr))


def counted(found: list, primitive: str, dtype) -> int:
    """Equations by their name and their first operand's dtype."""
    each = [equation for equation in found if equation.primitive.name == primitive]
    return sum(equation.invars[0].aval.dtype == dtype for equation in each)


@pytest.mark.parametrize(
    ("direction", "gathers"),
    [
        # The weight for both passes, and the cotangent.
        (OUTWARD, 3),
        pytest.param(INWARD, 2, marks=pytest.mark.slow),  # the same code but for what is gathered
    ],
    ids=["outward", "inward"],
)
def test_on_h200s_kernels_multiply_what_was_gathered_in_8_bits(direction, gathers):
    """The traced program, in which nothing is dequantized; lowering a kernel takes a second."""
    placement = placement_of(MeshConfig(fsdp=2, tensor=2))
    found = traced(placement, CONFIGS["squares"], *direction)
    kernels = [each for each in found if each.primitive.name == "mpmd_map"]
    products = [each for each in kernels if len(each.invars) == 4]
    assert (len(products), len(kernels)) == (3, 3 + 3)  # and x, weight, cotangent
    dtypes = {str(each.aval.dtype) for product in products for each in product.invars}
    assert dtypes == {"float8_e4m3fn", "float32"}
    assert not [each for each in found if each.primitive.name == "dot_general"]
    assert counted(found, "all_gather", jnp.uint8) == gathers
    assert counted(found, "all_gather", jnp.bfloat16) == 0
    # y or dx over tensor, which shares out what it contracts; the weight's gradient over fsdp.
    assert counted(found, "reduce_scatter", jnp.bfloat16) == 1
    assert counted(found, "reduce_scatter", jnp.float32) == 1
    assert not [each for each in found if each.primitive.name == "psum"]


MODEL = dense(
    model_dim=256, heads=(4, 4), head_dim=64, hidden_dim=512, max_positions=256, init_std=0.05
)


def test_every_projection_of_a_model_multiplies_on_each_device(caplog):
    """None is left to the compiler, and what they read comes together in 8 bits."""
    execution = execution_on(
        placement_of(MeshConfig(fsdp=2, tensor=2)),
        policy=policy_of(PrecisionConfig(policy=PolicyName.BF16, fp8=CONFIGS["squares"])),
        attention=AttentionImplementation.XLA,
    )
    model = define_model(MODEL, execution)
    ids = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    tree = merged(model.shapes, model.state_shapes)
    with caplog.at_level(logging.INFO, "pallas_kernels.common.chosen"):
        jaxpr = jax.make_jaxpr(lambda tree, ids: model.bind(tree).hidden(ids))(tree, ids)
    assert "8-bit matmul" not in caplog.text
    found = list(equations(jaxpr.jaxpr))
    projections, inputs = 7, 2  # of a layer: attention's and the feed-forward layer's are gathered
    assert counted(found, "all_gather", jnp.uint8) == projections + inputs
    assert counted(found, "reduce_scatter", jnp.bfloat16) == 3  # out, down and the embedding's
