"""Adapters over a base in few bits: what is kept, that it is the same everywhere, and its bytes."""

import dataclasses
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_runs import train

from jaxinfra.api.models import start_from
from jaxinfra.checkpoint.load_pretrained import load_pretrained
from jaxinfra.checkpoint.model_directory import write_ours
from jaxinfra.checkpoint.parameter_sources import LiveParameters, MappedParameters
from jaxinfra.config.finetune import AdapterKind, BaseWeights, LoraConfig
from jaxinfra.config.mesh import parse_mesh
from jaxinfra.config.precision import Fp8Matmuls, PolicyName
from jaxinfra.config.validate import validate
from jaxinfra.errors import ConfigError
from jaxinfra.model.definition import by_path, define_model, is_weight
from jaxinfra.model.quantized_base import base_shapes, quantized_weight
from jaxinfra.parallel.execution import execution_on
from jaxinfra.training.describe import placement_table
from jaxinfra.training.job import make_job
from jaxinfra.training.start import with_frozen
from pallas_kernels.quantized_weight.weight import NF4_VALUES, unpacked_pairs
from tests.small_models import dense

MODEL = dense(model_dim=128, head_dim=32, hidden_dim=256, init_std=0.2)
LORA = LoraConfig(rank=2, alpha=4.0, targets=("query", "down"), base=BaseWeights.NF4_DOUBLE)

# Where one value ends and the next begins, as bitsandbytes' kernel spells them.
BOUNDS = np.float32(
    [
        *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544),
        *(-0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767),
        *(0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683),
        *(0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
    ]
)


def nf4_by_hand(weight_OI):
    """Codes and scales of blocks of 64 inputs, one element at a time's worth of thought."""
    blocks = weight_OI.reshape(-1, 64)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    scaled = blocks / scales
    codes = (scaled[..., None] > BOUNDS).sum(axis=-1)
    return codes.reshape(weight_OI.shape), scales.reshape(len(weight_OI), -1)


def test_its_values_are_quantiles_of_a_normal_distribution():
    """Appendix E: eight of the negative half and nine of the other, 0 in both, over the largest."""
    quantile = statistics.NormalDist().inv_cdf
    ends = 0.9677083
    above = [quantile(p) for p in np.linspace(ends, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(ends, 0.5, 8)[:-1]]
    want = np.sort(np.array([*above, 0.0, *below]))
    np.testing.assert_allclose(NF4_VALUES, want / want.max(), atol=2e-7)
    middles = (np.array(NF4_VALUES)[1:] + np.array(NF4_VALUES)[:-1]) / 2
    np.testing.assert_array_equal(np.float32(middles), BOUNDS)


def test_every_bit_of_nf4_is_that_of_a_reference():
    rng = np.random.default_rng(0)
    weight_OI = rng.standard_normal((6, 128)).astype(np.float32)
    weight_OI[0, :16] = np.float32(NF4_VALUES)
    weight_OI[0, 16:31], weight_OI[0, 31:64] = BOUNDS, 0  # ties, and a block whose scale is 1
    codes_OI, scales_OG = nf4_by_hand(weight_OI)
    ours = quantized_weight(jnp.asarray(weight_OI.T[None]), BaseWeights.NF4, num_inputs=1)
    np.testing.assert_array_equal(np.asarray(unpacked_pairs(ours.data, 64))[0], codes_OI.T)
    np.testing.assert_array_equal(np.asarray(ours.scales)[0], scales_OG.T)
    want = np.float32(NF4_VALUES)[codes_OI] * np.repeat(scales_OG, 64, axis=1)
    np.testing.assert_array_equal(np.asarray(ours.dequantize(np.float32))[0], want.T)


def test_scales_in_8_bits_are_those_of_a_reference():
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.standard_normal((2, 64, 9, 70)), jnp.float32)
    plain = quantized_weight(weight, BaseWeights.NF4, num_inputs=1)
    double = quantized_weight(weight, BaseWeights.NF4_DOUBLE, num_inputs=1).scales
    plain_scales, all_values = np.asarray(plain.scales), np.asarray(double.values())
    double = jax.device_get(double)
    e4m3 = double.codes.dtype
    for layer in range(2):
        flat = plain_scales[layer].reshape(-1)
        mean = np.float32(double.mean[layer])
        np.testing.assert_allclose(mean, flat.mean(dtype=np.float64), rtol=1e-6)
        for number, start in enumerate(range(0, len(flat), 256)):
            apart = flat[start : start + 256] - mean
            constant = np.abs(apart).max() * np.float32(1 / 448)
            codes = (apart / constant).astype(e4m3)
            got = double.codes[layer].reshape(-1)[start : start + 256]
            np.testing.assert_array_equal(got.view(np.uint8), codes.view(np.uint8))
            assert np.float32(double.constants[layer, number]) == constant
            values = codes.astype(np.float32) * constant + mean
            got = all_values[layer].reshape(-1)[start : start + 256]
            np.testing.assert_array_equal(got, values)
    # Of a scale near the mean almost nothing is lost, of the one farthest from it e4m3's last bit.
    lost = np.abs(all_values - plain_scales)
    assert 0 < lost.max() < 2**-4 * np.abs(plain_scales).max()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "model"
    return written(path, define_model(MODEL, execution_on()).initialize(jax.random.key(0)))


def written(path, parameters):
    options = dict(hf=None, tokenizer_directory=path, dtype=None, max_shard_bytes=10**9)
    source = LiveParameters(arrays=by_path(parameters, is_leaf=is_weight))
    write_ours(source, define_model(MODEL, execution_on()), path, **options)
    return path


def run_config(directory, lora=LORA):
    config = start_from(directory, lora=lora)
    training = dataclasses.replace(config.training, steps=20, batch_size=8, sequence_length=32)
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e-2, warmup_steps=0)
    return dataclasses.replace(config, training=training, optimizer=optimizer)


def assert_moved_alike(first, second, *, steps):
    """Adam moves an element by about the rate, however small its gradient: a tenth of that apart is
    rounding in a few gradients near 0.
    """
    for path, value in by_path(second.parameters).items():
        apart = np.abs(np.asarray(by_path(first.parameters)[path]) - np.asarray(value))
        assert apart.max() <= 0.1 * steps * 1e-2
        assert np.median(apart) <= 1e-5


@pytest.mark.slow
def test_it_trains_beside_what_the_bits_stand_for(directory, tmp_path):
    """The same losses as adapters over a plain model of the dequantized weights."""
    config = run_config(directory)
    job, state, losses = train(config)
    plain = written(tmp_path / "plain", job.model.frozen)
    assert not np.array_equal(
        by_path(load_pretrained(plain, policy=PolicyName.FP32).parameters)[
            "blocks/0/mlp/up/weight"
        ],
        by_path(load_pretrained(directory, policy=PolicyName.FP32).parameters)[
            "blocks/0/mlp/up/weight"
        ],
    )
    lora = dataclasses.replace(LORA, base=BaseWeights.COMPUTE)
    _, other, want = train(run_config(plain, lora))
    np.testing.assert_allclose(losses, want, rtol=3e-6)
    assert losses[-1] < losses[0]
    assert_moved_alike(state, other, steps=3)
    assert len(by_path(state.parameters)) == 4


@pytest.mark.slow
def test_what_devices_hold_of_it(directory, monkeypatch):
    """The table's bytes are those of the arrays, and no read is of more than a layer."""
    config = run_config(directory)
    read, sizes = MappedParameters.read, []

    def watched(self, path, index):
        value = read(self, path, index)
        sizes.append((path, value.shape))
        return value

    monkeypatch.setattr(MappedParameters, "read", watched)
    job = with_frozen(make_job(config))
    projections = [each for each in sizes if each[0].split("/")[-2] in ("query", "up", "down")]
    assert len(projections) == 6
    assert all(shape[0] == 1 for _, shape in projections)
    table = placement_table(job)
    rows = {line.split()[0]: line.split() for line in table.splitlines()}
    elements = 2 * 128 * 256
    held = {
        "data": elements // 2,
        "scales/codes": elements // 64,
        "scales/constants": 2 * 4 * -(-elements // 2 // 64 // 256),
        "scales/mean": 2 * 4,
    }
    for part, size in held.items():
        assert rows[f"blocks/0/mlp/up/weight/{part}"][-4:] == ["frozen", f"{size:,}", "0", "0"]
    kept = by_path(job.model.frozen, is_leaf=is_weight)["blocks/0/mlp/up/weight"]
    assert kept.nbytes == sum(held.values())
    assert kept.nbytes / elements < 0.53
    base = define_model(MODEL, execution_on())
    assert job.model.num_frozen == base.num_parameters
    assert {row.path for row in job.model.table() if row.trained} == set(by_path(job.model.shapes))


MESHES = ["fsdp=2,tensor=2,replica=2", "replica=4,tensor=2"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", AdapterKind)
def test_on_a_mesh_as_on_one_device(directory, mesh, kind):
    lora = dataclasses.replace(LORA, kind=kind)
    one, state, losses = train(run_config(directory, lora), steps=2)
    config = dataclasses.replace(run_config(directory, lora), mesh=parse_mesh(mesh))
    job, other, again = train(config, steps=2)
    for path, part in by_path(one.model.frozen).items():
        np.testing.assert_array_equal(part, by_path(job.model.frozen)[path], err_msg=path)
    np.testing.assert_allclose(again, losses, rtol=3e-6)
    assert_moved_alike(other, state, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [each for each in BaseWeights if each is not BaseWeights.COMPUTE])
def test_each_form_trains(directory, kept):
    lora = dataclasses.replace(LORA, base=kept)
    job, _, losses = train(run_config(directory, lora))
    assert losses[-1] < losses[0]
    plain = load_pretrained(directory, policy=PolicyName.FP32).parameters
    weight = by_path(job.model.frozen, is_leaf=is_weight)["blocks/0/mlp/up/weight"]
    want = by_path(plain)["blocks/0/mlp/up/weight"]
    error = jnp.abs(weight.dequantize(np.float32) - want).max() / jnp.abs(want).max()
    assert (
        0
        < error
        < {1: 0.005, 0.5625: 0.16, 0.52: 0.17}.get(round(weight.nbytes / weight.size, 4), 0.17)
    )


def test_what_does_not_go_with_few_bits(directory):
    config = run_config(directory)
    eight = dataclasses.replace(config.precision, policy=PolicyName.BF16, fp8=Fp8Matmuls())
    with pytest.raises(ConfigError, match=r"base=nf4_double with precision\.fp8"):
        validate(dataclasses.replace(config, precision=eight))
    narrow = dataclasses.replace(MODEL, model_dim=96)
    with pytest.raises(ConfigError, match="96 inputs, which do not divide into blocks of 64"):
        base_shapes(define_model(narrow, execution_on()), BaseWeights.NF4)
    base_shapes(define_model(narrow, execution_on()), BaseWeights.INT8)
