"""Every mesh computes what one device computes: loss, each gradient, each parameter after a step.

The bound is that of rounding (``tests/sharded/oracle.py``), on one device and on any mesh.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.config.run import Remat
from jaxinfra.parallel.execution import kernels_on
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.parallel.place import Placement, path_name
from tests.sharded import oracle
from tests.sharded.cases import (
    OPTIMIZER,
    build,
    drawn,
    gemma_like,
    gpt_like,
    gradients_of,
    llama_like,
    mla_like,
    packed_batch,
)
from tests.tolerance import SPREADS, assert_within_rounding

MESHES = {
    "fsdp8": MeshConfig(fsdp=8),
    "fsdp2-tensor4": MeshConfig(fsdp=2, tensor=4),
    "replica2-fsdp2-tensor2": MeshConfig(replica=2, fsdp=2, tensor=2),
}
CASES = {
    "tied": (llama_like, {"z_loss": 0.01, "label_smoothing": 0.1}),
    "untied": (gpt_like, {"accumulation": 4, "batch_size": 32, "remat": Remat.FULL}),
    # Its pattern once: the float64 decoder's program grows with the layers. Patterns that repeat:
    # the logits in unit/test_model.py, and the slow tests of pipelines.
    "capped": (lambda: gemma_like().with_layers(2), {}),
    "latent": (mla_like, {}),
}


def run(case: str, mesh: MeshConfig, **how):
    """Parameters before one step, and (loss, gradient norm, gradients, parameters) after it, whole
    on the host.
    """
    make, options = CASES[case]
    built = build(make(), mesh=mesh, **{**options, **how})
    before = built.state()
    parameters = jax.device_get(before.parameters)
    batch = packed_batch(rows=options.get("batch_size", 8))
    state, metrics = built.step(before, built.put(batch))
    after = jax.device_get((gradients_of(state), state.parameters))
    return parameters, (metrics.loss, metrics.gradient_norm, *after)


@functools.cache
def single(case: str):
    """``run`` on one device."""
    return run(case, MeshConfig())


def assert_as_one_device(got, case: str, *, what: str) -> None:
    """The first parts of ``run``'s result."""
    assert_within_rounding(got, exact(case)[: len(got)], what=what)


@functools.cache
def exact(case: str):
    """``run``'s result in float64, and how far fp32 programs may be from it."""
    make, options = CASES[case]
    parameters = drawn(make())
    samples = oracle.samples(
        make(),
        parameters,
        packed_batch(rows=options.get("batch_size", 8)),
        z_loss=options.get("z_loss", 0.0),
        label_smoothing=options.get("label_smoothing", 0.0),
    )
    return oracle.rounded([_after_a_step(parameters, *sample) for sample in samples])


def _after_a_step(parameters, loss, gradients):
    gradients, norm = oracle.clipped(gradients, OPTIMIZER.clip_norm)
    assert norm > OPTIMIZER.clip_norm, "clipping is part of what is compared"

    def updated(path, theta, gradient):
        decay = not {"scale", "bias"} & {getattr(key, "key", None) for key in path}
        rate = OPTIMIZER.learning_rate / OPTIMIZER.warmup_steps
        return oracle.adamw(OPTIMIZER, theta, [gradient], [rate], decay=decay)

    after = jax.tree_util.tree_map_with_path(updated, parameters, gradients)
    first_moment = jax.tree.map(lambda g: (1 - OPTIMIZER.beta1) * g, gradients)
    return loss, norm, first_moment, after


@pytest.mark.slow  # by default a mesh is held to the same figures below
@pytest.mark.parametrize("case", CASES)
def test_one_device_equals_the_oracle(case):
    _, result = single(case)
    assert_as_one_device(result, case, what=f"{case} on one device")


@functools.cache
def on_three_axes():
    """``run`` of biases and whole heads on replicas, shards and tensor shards, accumulated and
    recomputed, its gradients sharded by ZeRO's stage 2 and its stream by positions.
    """
    sharding = ShardingConfig(zero=2, sequence_parallel=True)
    return run("untied", MESHES["replica2-fsdp2-tensor2"], sharding=sharding)


def test_replicas_shards_and_stage_2_equal_one_device():
    start, result = on_three_axes()
    chex.assert_trees_all_equal(start, drawn(gpt_like()))
    assert_as_one_device(result, "untied", what="on three axes")


@pytest.mark.slow  # by default `test_planning_receipt.py` has what a step of kept weights sends
@pytest.mark.parametrize(
    ("case", "mesh"),
    [("tied", "fsdp2-tensor4"), ("untied", "fsdp8")],
)
def test_kept_weights_change_nothing(case, mesh):
    how = {"sharding": ShardingConfig(keep_gathered=True), "remat": Remat.DOTS}
    _, result = run(case, MESHES[mesh], **how)
    assert_as_one_device(result, case, what=f"{case} on {mesh} with kept weights")


@pytest.mark.slow
def test_dropout_mask_is_the_same_on_a_mesh():
    """A mask that differed in one element would move gradients by parts in a thousand; rounding
    moves both runs by what it may move those without dropout.
    """
    config = dataclasses.replace(llama_like(), dropout_rate=0.25)
    results = []
    for shape in (MeshConfig(), MESHES["replica2-fsdp2-tensor2"]):
        built = build(config, mesh=shape, accumulation=2, batch_size=16)
        state, metrics = built.step(built.state(), packed_batch(rows=16))
        results.append(jax.device_get((metrics.loss, gradients_of(state))))
    loss, _, gradients, _ = exact("tied")
    assert abs(results[0][0] - loss.value) > 1e-3, "dropout was off"
    for alone, sharded, true in zip(
        *map(jax.tree.leaves, (*results, (loss, gradients))), strict=True
    ):
        relative = 2 * SPREADS * np.max(true.spread) / np.max(np.abs(true.value))
        assert np.max(np.abs(sharded - alone)) <= relative * np.max(np.abs(alone))


def _on_half_of_the_rows(result):
    """What a device has before gradients are summed over two."""
    make, options = CASES["tied"]
    built = build(make(), **options)
    batch = packed_batch(rows=8)
    half = dataclasses.replace(batch, weights=batch.weights.at[4:].set(0.0))
    state, metrics = built.step(built.state(), half)
    return metrics.loss, metrics.gradient_norm, jax.device_get(gradients_of(state))


def _with_gradients(change):
    return lambda result: (*result[:2], jax.tree.map(change, result[2]))


def _with_one_gradient(change):
    def faulty(result):
        leaves, structure = jax.tree.flatten(result[2])
        largest = max(range(len(leaves)), key=lambda i: np.max(np.abs(leaves[i])))
        leaves[largest] = change(leaves[largest])
        return (*result[:2], structure.unflatten(leaves))

    return faulty


@pytest.mark.slow  # of the bound
@pytest.mark.parametrize(
    "fault",
    [
        _on_half_of_the_rows,
        _with_gradients(lambda g: g.astype(jnp.bfloat16).astype(np.float32)),
        _with_gradients(lambda g: g * np.float32(1.0001)),
        _with_one_gradient(lambda g: np.where(g == np.max(g), 0.0, g).astype(np.float32)),
        _with_one_gradient(lambda g: np.roll(g, 1, axis=0)),
        lambda result: (result[0] * np.float32(1.0001), *result[1:3]),
        lambda result: (result[0], result[1] * np.float32(2.0), result[2]),
    ],
    ids=[
        "gradients not summed over devices",
        "gradients summed in bf16",
        "scale one in ten thousand off",
        "an element lost",
        "a shard in another's place",
        "loss",
        "gradients summed twice, then clipped",
    ],
)
def test_the_bound_catches(fault):
    _, result = single("tied")
    assert_as_one_device(result[:3], "tied", what="without the fault")
    with pytest.raises(AssertionError, match="are rounding"):
        assert_as_one_device(fault(result), "tied", what="with it")


def test_a_gradient_of_zero_is_held_on_the_scale_of_its_terms():
    """A shift of all keys moves no softmax: a key bias's gradient is rounding, and no more."""
    _, (loss, norm, gradients, _) = on_three_axes()
    gradients = jax.tree.map(lambda leaf: leaf, gradients)  # the cached tree stays as it is
    key = gradients["blocks"][0]["attention"]["key"]["bias"]
    value = gradients["blocks"][0]["attention"]["value"]["bias"]
    assert np.max(np.abs(key)) < 1e-5 * np.max(np.abs(value))
    shifted = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 1e-4 * value if path_name(path).endswith("0/attention/key/bias") else x,
        gradients,
    )
    with pytest.raises(AssertionError, match=r"\['key'\]\['bias'\].*are rounding"):
        assert_as_one_device((loss, norm, shifted), "untied", what="a shift that counts")


def test_sinks_lie_with_their_heads():
    """Each device has its own heads' sinks; their gradients are summed over rows of the batch."""
    config = GroupedAttentionConfig(
        num_q_heads=4, num_kv_heads=2, head_dim=8, rope=None, window=5, sinks=True
    )
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(4, 16, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    sinks = jnp.asarray(rng.normal(size=4), jnp.float32)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), devices=jax.devices()[:4])
    results = []
    for placement in (None, Placement(mesh=mesh)):
        attend = kernels_on(placement).attend

        def loss(sinks, attend=attend):
            out = attend(q, k, v, config=config, segment_ids_BT=None, sinks_N=sinks)
            return jnp.sum(out**2), out

        results.append(jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(sinks)))
    (d_one, out_one), (d_mesh, out_mesh) = results
    plain = functools.partial(kernels_on(None).attend, config=config, segment_ids_BT=None)
    without = np.asarray(jax.jit(plain)(q, k, v))
    assert np.abs(out_one - without).max() > 0.1
    np.testing.assert_allclose(out_mesh, out_one, rtol=1e-5, atol=1e-6)
    # A sum of 64 rows' terms.
    np.testing.assert_allclose(d_mesh, d_one, rtol=1e-5, atol=1e-5)
