"""ZeRO's stages are placements of one step: bytes on a device and bytes sent are the formulas'."""

import functools
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfra.config.mesh import MeshConfig, ShardingConfig, parse_mesh
from jaxinfra.config.precision import PolicyName, PrecisionConfig, WeightGradients
from jaxinfra.config.run import Remat
from jaxinfra.hlo.program import Collective, collectives
from jaxinfra.numerics.policy import policy_of
from jaxinfra.numerics.recipe import Site
from jaxinfra.ops.multiply import multiply
from jaxinfra.parallel.place import path_name
from tests.sharded.cases import Built, build, gpt_like, gradients_of, llama_like, packed_batch

ACCUMULATIONS = [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 4))]
ITEM = 4  # bytes of an fp32 parameter, gradient or moment


@functools.cache
def built(
    mesh: str, zero: int = 3, accumulation: int = 1, batch_size: int = 32, *, keep: bool = False
) -> Built:
    return build(
        llama_like(),
        mesh=parse_mesh(mesh),
        sharding=ShardingConfig(zero=zero, keep_gathered=keep),
        remat=Remat.FULL if keep else Remat.NONE,
        accumulation=accumulation,
        batch_size=batch_size,
    )


@functools.cache
def compiled(mesh: str, zero: int = 3, accumulation: int = 1, batch_size: int = 32) -> Any:
    step = built(mesh, zero, accumulation, batch_size).step
    state = built(mesh, zero, accumulation, batch_size).shapes
    return step.lower(state, packed_batch(rows=batch_size)).compile()


def sent(found: list[Collective], *, scope: str | None = None) -> float:
    return sum(each.sent_bytes for each in found if each.shape and (scope or "") in each.scope)


def num_parameters() -> int:
    return built("fsdp=8").model.num_parameters


@pytest.mark.slow_cases("fsdp=8-2", "fsdp=8-3")
@pytest.mark.parametrize(
    ("mesh", "zero"),
    [
        pytest.param("replica=8", 3, marks=pytest.mark.slow),
        pytest.param("fsdp=8", 1, marks=pytest.mark.slow),
        ("fsdp=8", 2),
        ("fsdp=8", 3),
    ],
)
def test_bytes_on_a_device(mesh, zero):
    """Arguments of the compiled step: parameters, two moments, the batch and counters; of N
    devices, a stage keeps P bytes of parameters (P/N from 3) and 2P/N of moments.

    Every parameter of this model has the dim that fsdp shards.
    """
    whole = num_parameters() * ITEM
    shards = 8 if mesh == "fsdp=8" else 1
    state = whole / (shards if zero == 3 else 1) + 2 * whole / shards
    batch = sum(leaf.nbytes for leaf in jax.tree.leaves(packed_batch(rows=32))) / 8
    start = built(mesh, zero).shapes
    counters = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(start))
    counters -= 3 * whole
    arguments = compiled(mesh, zero, 2).memory_analysis().argument_size_in_bytes
    unused = _dropped_arguments(mesh, zero)
    assert arguments == state + batch + counters - unused


def _dropped_arguments(mesh: str, zero: int) -> int:
    """Bytes of arguments that the step does not read."""
    kept = compiled(mesh, zero, 2).input_shardings[0]
    state = built(mesh, zero).shapes
    leaves = jax.tree.leaves((state, packed_batch(rows=32)), is_leaf=_is_none)
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf, sharding in zip(leaves, jax.tree.leaves(kept, is_leaf=_is_none), strict=True)
        if sharding is None and leaf is not None
    )


def _is_none(node: Any) -> bool:
    return node is None


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
def test_stage_1_scatters_gradients_once_and_gathers_parameters_once(accumulation):
    """2 D (N-1)/N bytes, the all-reduce's own, whatever the number of micro-batches."""
    found = [each for each in collectives(compiled("fsdp=8", 1, accumulation)) if each.shape]
    assert {each.kind for each in found} == {"reduce-scatter", "all-gather"}
    assert {each.times for each in found} == {1}
    half = num_parameters() * ITEM * 7 / 8
    for kind in ("reduce-scatter", "all-gather"):
        assert sent([each for each in found if each.kind == kind]) == half


@pytest.mark.slow_cases("replica=2,fsdp=4-2")
@pytest.mark.parametrize(
    ("mesh", "accumulation"),
    [
        ("replica=2,fsdp=4", 2),
        *(
            pytest.param(mesh, accumulation, marks=pytest.mark.slow)
            for mesh, accumulation in (
                ("replica=8", 2),
                ("replica=2,fsdp=4", 4),
                ("replica=2,tensor=4", 2),
                ("replica=2,tensor=4", 4),
            )
        ),
    ],
)
def test_replicas_sum_gradients_once(mesh, accumulation):
    """However many micro-batches, one all-reduce of a device's share of every gradient."""
    found = collectives(compiled(mesh, 3, accumulation))
    replicas = [each for each in found if each.shape and "psum" in each.scope and _is_sum(each)]
    assert {(each.kind, each.times) for each in replicas} == {("all-reduce", 1)}
    shapes = parse_mesh(mesh)
    share = sum(
        math.prod(sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(
            jax.tree.leaves(built(mesh).model.shapes),
            jax.tree.leaves(built(mesh).shardings.parameters),
            strict=True,
        )
    )
    replica = shapes.replica
    assert sent(replicas) == 2 * share * ITEM * (replica - 1) / replica


def _is_sum(each: Collective) -> bool:
    return "embedding" not in each.scope


@pytest.mark.slow
def test_two_levels_scatter_first():
    """ZeRO 1 with replicas: what crosses the slower link is a share, not the whole gradient."""
    found = [each for each in collectives(compiled("replica=2,fsdp=4", 1, 2)) if each.shape]
    assert {each.times for each in found} == {1}
    whole = num_parameters() * ITEM
    by_kind = {
        kind: sent([each for each in found if each.kind == kind])
        for kind in {each.kind for each in found}
    }
    assert by_kind == {
        "reduce-scatter": whole * 3 / 4,
        "all-reduce": 2 * (whole / 4) / 2,
        "all-gather": whole * 3 / 4,
    }


@pytest.mark.slow_cases("2-2")
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("zero", [2, 3])
def test_sharded_gradients_are_summed_in_every_micro_batch(zero, accumulation):
    """A device that keeps 1/N of the gradients has no room to sum all of them first: the price of
    stages 2 and 3 is K sums instead of one. On CPU, XLA writes reduce-scatter as an all-reduce and
    a slice, so what is counted is elements.
    """
    found = collectives(compiled("fsdp=8", zero, accumulation))
    summed = [each for each in found if each.shape and each.kind == "all-reduce"]
    elements = sum(math.prod(each.shape) * each.times for each in summed)
    table = llama_like().vocab_size * llama_like().model_dim
    # The embedding's share of the table's gradient is exchanged by token (all-to-all) where the
    # table is split, and summed as the loss's share is where it is whole.
    again = table if zero == 2 else 0
    assert elements == accumulation * (num_parameters() + again)


def test_stage_3_gathers_each_layer_where_it_is_used():
    found = collectives(compiled("fsdp=8", 3, 2))
    # all-to-all carries embedded tokens between batch and width shards. On CPU, XLA writes
    # reduce-scatter as all-reduce and a slice.
    kinds = {each.kind for each in found}
    assert kinds <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    gathered = [each for each in found if each.kind == "all-gather" and each.dtype == "f32"]
    in_layers = [each for each in gathered if "jvp(layer)" in each.scope]
    # Both passes of both micro-batches gather each layer's parameters inside the loop over layers:
    # 4 projections, 3 of the mlp, 2 norms.
    inside = Counter("transpose" in each.scope for each in in_layers)
    assert inside == {False: 9, True: 9}
    layers = llama_like().num_layers
    assert {each.times for each in in_layers} == {2 * layers}
    assert all(each.shape[0] != layers for each in gathered), "a stack was gathered whole"


def test_stage_2_gathers_parameters_once_and_stage_3_in_every_pass():
    parameters = num_parameters()
    gathered = {}
    for zero in (2, 3):
        found = collectives(compiled("fsdp=8", zero, 2))
        of_weights = [each for each in found if each.kind == "all-gather" and each.dtype == "f32"]
        gathered[zero] = sum(math.prod(each.shape) * each.times for each in of_weights)
    assert gathered[2] == parameters
    # Blocks are gathered by each micro-batch's forward and backward pass. The table, and the final
    # norm's scale in both passes, do not change between micro-batches and are gathered once.
    table = llama_like().vocab_size * llama_like().model_dim
    width = llama_like().model_dim
    blocks = parameters - table - width
    assert gathered[3] == 2 * 2 * blocks + table + 2 * width


def test_rounded_gradients_are_off_by_their_roundings_only():
    """N devices round a part each, and their sum is rounded: half a bf16 ulp of every one."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    rows, width = (
        NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("fsdp",), (None, "fsdp"))
    )
    rng = np.random.default_rng(0)
    x, d_out = (rng.standard_normal(shape, np.float32) for shape in ((8, 4, 16), (8, 4, 24)))
    x, d_out = (jnp.asarray(each).astype(jnp.bfloat16) for each in (x, d_out))
    config = PrecisionConfig(policy=PolicyName.BF16, weight_gradients=WeightGradients.COMPUTE)
    recipe = policy_of(config).recipe(Site.PROJECTION)
    einsum = functools.partial(multiply, "BTD,DF->BTF", recipe=recipe)

    def gradient(x_BTD, weight_DF, d_BTF):
        return jax.vjp(lambda weight_DF: einsum(x_BTD, weight_DF), weight_DF)[1](d_BTF)[0]

    on_mesh = jax.jit(gradient, in_shardings=(rows, width, rows), out_shardings=width)
    got = np.asarray(on_mesh(x, jnp.zeros((16, 24)), d_out), float)
    parts = np.einsum(
        "NbTD,NbTF->NDF", *(np.asarray(each, float).reshape(4, 2, 4, -1) for each in (x, d_out))
    )
    roundings = np.abs(parts).sum(0) + np.abs(parts).cumsum(0).sum(0)  # of parts, of their sums
    fp32 = 32 * np.finfo(np.float32).eps * np.abs(parts).sum(0)
    error = np.abs(got - parts.sum(0))
    half_ulp = float(jnp.finfo(jnp.bfloat16).eps) / 2
    assert np.all(error <= half_ulp * roundings + fp32)
    assert np.max(error) > 10 * np.max(fp32), "nothing was rounded"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero"), [("replica=8", 3), ("fsdp=8", 1), ("fsdp=8", 2), ("fsdp=8", 3)]
)
def test_memory_does_not_grow_with_accumulation(mesh, zero):
    """Micro-batches of one size, more of them: temporaries stay but for the larger batch's rows."""
    temporaries, rows = {}, {}
    for accumulation in (2, 8):
        temporaries[accumulation] = (
            compiled(mesh, zero, accumulation, 8 * accumulation)
            .memory_analysis()
            .temp_size_in_bytes
        )
        batch = packed_batch(rows=8 * accumulation)
        rows[accumulation] = sum(leaf.nbytes for leaf in jax.tree.leaves(batch)) / 8
    growth = temporaries[8] - temporaries[2]
    assert growth <= 2 * (rows[8] - rows[2])


@pytest.mark.slow
def test_kept_weights_are_gathered_once():
    """Though all else is recomputed; norms' scales, too, a layer's as a row of their stack."""
    case = built("fsdp=8", 3, 2, 16, keep=True)
    shapes = case.shapes, packed_batch(rows=16)
    found = collectives(case.step.lower(*shapes).compile())
    gathered = [each for each in found if each.kind == "all-gather" and each.dtype == "f32"]
    of_layers = [each for each in gathered if "jvp(layer)" in each.scope]
    table_and_last_norm = (llama_like().vocab_size + 1) * llama_like().model_dim
    elements = sum(math.prod(each.shape) * each.times for each in of_layers)
    assert elements == 2 * (num_parameters() - table_and_last_norm), "once a micro-batch"


@pytest.mark.slow  # lowers two steps; of the speed on a GPU, where `test_h200_schedule.py` sees it
def test_gradients_of_kept_weights_lie_as_the_weights():
    """So that no optimizer turns what it updates (``test_h200_schedule.py`` sees it on a GPU)."""
    for keep in (True, False):
        case = built("fsdp=8", 3, 2, 16, keep=keep)
        lines = case.step.lower(case.shapes, packed_batch(rows=16)).as_text().splitlines()
        shape = "x".join(
            map(str, case.shapes.parameters["blocks"][0]["mlp"]["down"]["weight"].shape[1:])
        )
        pinned = [line for line in lines if "LayoutConstraint" in line and f"<{shape}xf32>" in line]
        assert bool(pinned) == keep


@functools.cache
def in_bf16(keep: bool):
    """Loss and gradients of a step."""
    case = build(
        llama_like(),
        mesh=MeshConfig(fsdp=4),
        sharding=ShardingConfig(keep_gathered=keep),
        policy=PolicyName.BF16,
        remat=Remat.DOTS,
        batch_size=16,
    )
    state, metrics = case.step(case.state(), packed_batch(rows=16))
    return jax.device_get((metrics.loss, gradients_of(state)))


@pytest.mark.slow  # `test_meshes.py` holds kept weights to the oracle, in fp32
def test_kept_weights_change_no_bit_in_bf16():
    """The step is that which gathers twice."""
    jax.tree.map(np.testing.assert_array_equal, in_bf16(False), in_bf16(True))


@pytest.mark.slow
def test_kept_weights_leave_gradients_in_fp32():
    """No gradient is rounded to what weights are multiplied in."""
    weight = np.asarray(in_bf16(True)[1]["blocks"][0]["mlp"]["up"]["weight"])
    assert (weight.astype(jnp.bfloat16).astype(np.float32) != weight).mean() > 0.9


def test_what_the_specs_say():
    shardings = {zero: built("fsdp=8", zero).shardings for zero in (1, 2, 3)}

    def specs(tree: Any) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {path_name(path): sharding.spec for path, sharding in leaves}

    for zero, sharding in shardings.items():
        parameters = specs(sharding.parameters)["blocks/0/mlp/up/weight"]
        assert ("fsdp" in str(parameters)) == (zero == 3)
        moments = [
            s for name, s in specs(sharding.optimizer).items() if "mu/blocks/0/mlp/up" in name
        ]
        assert len(moments) == 1
        assert "fsdp" in str(moments[0])


@pytest.mark.slow
def test_a_model_without_the_sharded_dim_somewhere():
    """Inward biases lack the model's width: a stage leaves them whole, and sums them whole."""
    case = build(
        gpt_like(), mesh=MeshConfig(fsdp=8), sharding=ShardingConfig(zero=1), batch_size=32
    )
    program = case.step.lower(case.shapes, packed_batch(rows=32)).compile()
    found = [each for each in collectives(program) if each.shape]
    shapes = jax.tree_util.tree_leaves_with_path(case.model.shapes)
    whole = [leaf for path, leaf in shapes if path_name(path).endswith(tuple(_INWARD_BIASES))]
    reduced = sum(each.sent_bytes for each in found if each.kind == "all-reduce")
    assert whole
    assert reduced == sum(2 * leaf.size * ITEM * 7 / 8 for leaf in whole)


_INWARD_BIASES = ("query/bias", "key/bias", "value/bias", "up/bias")
