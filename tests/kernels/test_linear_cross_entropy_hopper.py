"""The Hopper form of the loss without a GPU: values in the interpreter, and its lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.common import device
from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.cross_entropy import hopper, linear_cross_entropy
from pallas_kernels.cross_entropy.hopper import exponentials
from tests.kernels.loss_oracle import exact
from tests.seeds import seeded
from tests.tolerance import assert_within_rounding

B, T, D, V = 2, 12, 64, 300
OPTIONS = {
    "plain": {},
    "z_loss": {"z_loss": 0.02},
    "both": {"z_loss": 0.02, "logit_soft_cap": 1.5},
    "smoothed": {"z_loss": 0.02, "label_smoothing": 0.2},
}


@pytest.fixture
def on_hopper():
    """Chosen for an H200, run by the interpreter."""
    parameters = plgpu.InterpretGPUParams()
    with device.compiling_for(device.H200), plgpu.force_gpu_interpret_mode(parameters):
        yield


def inputs(spread=0.5):
    rng = np.random.default_rng(seeded(0))
    hidden = jnp.asarray(rng.normal(size=(B, T, D)), jnp.bfloat16)
    table = jnp.asarray(spread * rng.normal(size=(V, D)), jnp.bfloat16).astype(jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    weights = jnp.asarray(rng.choice([0.0, 1.0, 0.5], size=(B, T)), jnp.float32)
    # Padding may hold an id that no table has; a counted one outside contributes lse alone.
    targets = jnp.where(weights == 0.0, jnp.int32(V + 7), targets).at[1, 3].set(-1)
    return hidden, table, targets, weights.at[1, 3].set(1.0)


def evaluate(arrays, *, dtype=jnp.bfloat16, **options):
    """(total, nll) and the gradients of the total by hidden and table."""
    hidden, table, targets, weights = arrays

    def total(hidden, table):
        sums = linear_cross_entropy(hidden, table, targets, weights, **options)
        return sums.total, sums.nll

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(
        hidden.astype(dtype), table
    )


@pytest.mark.slow_cases("plain-1", "smoothed-2")
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("options", "num_chunks"), [("plain", 1), ("both", 2), ("smoothed", 2)])
def test_loss_and_gradients_are_no_worse_than_the_plain_form(options, num_chunks):
    chosen, arrays = OPTIONS[options], inputs()
    chunk_bytes = B * T * V * 2 // num_chunks
    got = evaluate(arrays, implementation="hopper", chunk_bytes=chunk_bytes, **chosen)
    assert_within_rounding(got, exact(arrays, **chosen), what=options)


@pytest.mark.gpu
def test_devices_that_share_the_vocabulary_get_the_same_loss(monkeypatch):
    """Two devices with 150 ids each, padded to 192: sums and hidden's gradient are parts.

    The second's references are higher, as if its sums had been too large. Not in the interpreter,
    which keeps all devices' barriers in one place: it fails now and then, where one device's kernel
    ends before another's.
    """
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    arrays, chosen = inputs(), OPTIONS["smoothed"]
    in_range = hopper._in_range

    def raised(static, x_RD, table_VD, reference_R, with_matrix):
        reference_R += 20.0 * jax.lax.axis_index("half").astype(jnp.float32)
        return in_range(static, x_RD, table_VD, reference_R, with_matrix)

    monkeypatch.setattr(hopper, "_in_range", raised)
    half = PartitionSpec("half")

    def local(hidden, table, targets, weights):
        options = {"implementation": "hopper", "vocabulary_axes": ("half",), **chosen}
        sums, (d_hidden, d_table) = evaluate((hidden, table, targets, weights), **options)
        return *(x[None] for x in (*sums, d_hidden)), d_table

    whole = PartitionSpec()
    mesh = jax.make_mesh((2,), ("half",), axis_types=(AxisType.Auto,))
    in_specs = (whole, half, whole, whole)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=half, check_vma=False)
    *parts, d_table = jax.jit(sharded)(*arrays)
    total, nll, d_hidden = (jnp.sum(x.astype(jnp.float32), 0).astype(x.dtype) for x in parts)
    assert_within_rounding(((total, nll), (d_hidden, d_table)), exact(arrays, **chosen))


@pytest.mark.slow  # its kernels are those of the loss below
@pytest.mark.usefixtures("on_hopper")
def test_references_rise_where_the_target_is_hundreds_of_nats_away():
    arrays = inputs(spread=16.0)
    (_, nll), _ = got = evaluate(arrays, implementation="hopper")
    assert nll > 150 * jnp.sum(arrays[3])
    sums, gradients = exact(arrays)
    assert_within_rounding(got[0], sums)
    # One wrong id has all probability. Its gradient is a product of two numbers rounded to bf16,
    # 2**-9 each; the plain form's probability is exactly 1, so it is no measure here.
    for mine, true in zip(got[1], gradients, strict=True):
        error = np.linalg.norm(np.asarray(mine, np.float64) - true.value)
        assert error <= 2.0**-8 * np.linalg.norm(true.value)


@pytest.mark.usefixtures("on_hopper")
def test_without_gradient_only_the_sums_are_computed():
    hidden, table, targets, weights = arrays = inputs()
    f = functools.partial(linear_cross_entropy, implementation="hopper", **OPTIONS["smoothed"])
    got = jax.jit(f)(hidden, table, targets, weights)
    assert_within_rounding(tuple(got), exact(arrays, **OPTIONS["smoothed"])[0])
    assert f"bf16[{B * T},{320}]" not in str(jax.make_jaxpr(f)(*arrays))


@pytest.mark.slow_cases("128256-None-True", "50257-None-False")
@pytest.mark.parametrize(
    ("num_ids", "cap", "with_matrix"),
    [(128256, None, True), (50257, 30.0, True), (50257, None, False)],
)
def test_lowers(num_ids, cap, with_matrix):
    def f(x, table, reference):
        return exponentials(
            x, table, reference, num_ids=num_ids, logit_soft_cap=cap, with_matrix=with_matrix
        )

    shape = jax.ShapeDtypeStruct
    args = (
        shape((2048, 2048), jnp.bfloat16),
        shape((num_ids + -num_ids % 64, 2048), jnp.bfloat16),
        shape((2048,), jnp.float32),
    )
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": jnp.float32}, "hidden is float32; exponentials need bfloat16"),
        ({"width": 96}, "width 96 is not a multiple of 64"),
        ({"batch_shards": 2}, "the call is spread over 2 devices"),
        ({"num_devices": 4}, "the call is spread over 4 devices"),
        ({"label_smoothing": 0.1, "logit_soft_cap": 30.0}, "needs the sum of the capped logits"),
        ({"facts": None}, "is not a Hopper GPU"),
    ],
    ids=str,
)
def test_refuses(change, words):
    width = change.get("width", 64)
    hidden = jnp.zeros((B, T, width), change.get("dtype", jnp.bfloat16))
    facts = device.H200 if "facts" not in change else device.facts_of(jax.devices()[0])
    with device.compiling_for(facts), pytest.raises(UnsupportedError, match=words):
        linear_cross_entropy(
            hidden, jnp.zeros((V, width)), jnp.zeros((B, T), jnp.int32), jnp.ones((B, T)),
            implementation="hopper", batch_shards=change.get("batch_shards", 1),
            num_devices=change.get("num_devices", 1),
            label_smoothing=change.get("label_smoothing", 0.0),
            logit_soft_cap=change.get("logit_soft_cap"),
        )  # fmt: skip


def test_hopper_takes_what_it_says():
    with device.compiling_for(device.H200):
        assert hopper.unsupported(jnp.zeros((1, 8, 128), jnp.bfloat16), num_devices=1) is None


@pytest.mark.parametrize(
    ("num_ids", "num_devices", "kernels"),
    [(100_000, 1, True), (50_257, 1, False), (100_000, 2, False)],
)
def test_auto_takes_it_where_it_was_measured_to_win(num_ids, num_devices, kernels):
    shape = jax.ShapeDtypeStruct
    args = (
        shape((1, 128, 64), jnp.bfloat16),
        shape((num_ids, 64), jnp.float32),
        shape((1, 128), jnp.int32),
        shape((1, 128), jnp.float32),
    )
    loss = jax.jit(functools.partial(linear_cross_entropy, num_devices=num_devices))
    with device.compiling_for(device.H200):
        text = str(loss.trace(*args).jaxpr)
    assert ("mpmd_map" in text) == kernels
