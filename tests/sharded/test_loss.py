"""The loss of each device's own tokens: the whole batch's, with both gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.axes import BATCH, EMBED, SEQUENCE, VOCAB
from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.hlo.program import collectives
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.ops.cross_entropy import HOPPER_LEAST_IDS, kernel_on_one_device
from jaxinfra.ops.quantized import H200, compiling_for
from jaxinfra.parallel import loss as loss_on_meshes
from jaxinfra.parallel.loss import cross_entropy_of_token_shards, shards_by_tokens
from jaxinfra.parallel.mesh import make_mesh, state_rules
from jaxinfra.parallel.place import Placement
from tests.rounding import Rounded
from tests.seeds import seeded
from tests.sharded.test_meshes import assert_as_one_device, run
from tests.tolerance import assert_within_rounding

B, T, D, V = 8, 6, 16, 40
HOW = {"z_loss": 1e-2, "logit_soft_cap": 5.0, "label_smoothing": 0.2}


def operands():
    rng = np.random.default_rng(seeded(0))
    return (
        rng.standard_normal((B, T, D), np.float32),
        rng.standard_normal((V, D), np.float32),
        rng.integers(0, V, (B, T), np.int32),
        rng.integers(0, 2, (B, T)).astype(np.float32),
    )


def results(loss):
    """nll, d_hidden, d_table; the total counts threefold, as under a loss scale."""

    def total(hidden, table, targets, weights):
        sums = loss(hidden, table, targets, weights)
        return 3.0 * sums.total, sums.nll

    def run(*arrays):
        (_, nll), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(*arrays)
        return nll, *gradients

    return run


def exact():
    """In float64, materialized."""
    hidden, table, targets, weights = operands()
    h, w = Rounded(hidden), Rounded(table)
    cap = HOW["logit_soft_cap"]
    tanh = np.tanh(h @ w.T / cap)
    logits = cap * tanh
    lse = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    p = np.exp(logits - lse[..., None])
    wanted = (1 - HOW["label_smoothing"]) * (np.arange(V) == targets[..., None])
    wanted = wanted + HOW["label_smoothing"] / V
    d_logits = p * (1 + 2 * HOW["z_loss"] * lse)[..., None] - wanted
    d_raw = 3.0 * weights[..., None] * d_logits * (1 - tanh**2)
    return (weights * (lse - picked)).sum(), d_raw @ w, np.einsum("BTV,BTD->VD", d_raw, h)


@pytest.mark.parametrize(
    ("mesh", "zero"),
    [
        (MeshConfig(fsdp=4), 3),
        (MeshConfig(replica=2, fsdp=2, context=2), 3),
        (MeshConfig(replica=2, fsdp=4), 2),
        (MeshConfig(fsdp=2, tensor=4), 3),
    ],
    ids=["fsdp", "three axes", "whole table", "rows split"],
)
def test_is_the_whole_batchs(mesh, zero):
    placement = Placement(
        mesh=make_mesh(mesh, devices=jax.devices()[: mesh.num_devices]),
        rules=state_rules(ShardingConfig(zero=zero)),
    )

    def own(*arrays):
        return cross_entropy_of_token_shards(
            placement, *arrays, policy=POLICIES[PolicyName.FP32], **HOW
        )

    rows = placement.sharding((BATCH, SEQUENCE))
    tokens = placement.sharding((BATCH, SEQUENCE, None))
    table = placement.sharding((VOCAB, EMBED))
    function = jax.jit(
        results(own),
        in_shardings=(tokens, table, rows, rows),
        out_shardings=(placement.replicated, tokens, table),
    )
    compiled = function.lower(*operands()).compile()
    assert_within_rounding(compiled(*operands()), exact(), what=str(mesh))
    if zero == 3:
        large = {each.kind: each.times for each in collectives(compiled) if each.shape}
        assert large.items() >= {"all-gather": 1, "reduce-scatter": 1}.items()


def test_where_it_is_taken():
    hidden = jax.ShapeDtypeStruct((4, 8, 2048), jnp.bfloat16)
    assert not kernel_on_one_device(hidden, num_ids=128_256), "no GPU here"
    with compiling_for(H200):
        assert kernel_on_one_device(hidden, num_ids=128_256)
        assert not kernel_on_one_device(hidden, num_ids=HOPPER_LEAST_IDS - 1), "not measured"
        whole = Placement(mesh=make_mesh(MeshConfig(fsdp=8)))
        assert shards_by_tokens(whole, hidden, num_ids=HOPPER_LEAST_IDS)
        split = Placement(mesh=make_mesh(MeshConfig(fsdp=4, tensor=2)))
        assert shards_by_tokens(split, hidden, num_ids=2 * HOPPER_LEAST_IDS)
        assert not shards_by_tokens(split, hidden, num_ids=2 * HOPPER_LEAST_IDS - 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mesh", "how"),
    [
        ("untied", MeshConfig(replica=2, fsdp=4), {}),  # accumulated, so that replicas run apart
        ("tied", MeshConfig(fsdp=4), {"sharding": ShardingConfig(zero=1)}),
        ("tied", MeshConfig(fsdp=2, context=2), {}),
        (
            "tied",
            MeshConfig(fsdp=2, tensor=2),
            {"sharding": ShardingConfig(sequence_parallel=True)},
        ),
    ],
    ids=["accumulated", "zero 1", "context", "tensor"],
)
def test_a_step_with_it_equals_one_device(monkeypatch, case, mesh, how):
    monkeypatch.setattr(loss_on_meshes, "shards_by_tokens", lambda *_, **__: True)
    _, result = run(case, mesh, **how)
    assert_as_one_device(result[:3], case, what=f"{case} on {mesh}")
