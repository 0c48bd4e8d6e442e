"""What the step's benchmarks make of their measurements, and that their two sides are one step."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.bench.training import plain_step, step_curve
from experiments.bench.training.step_curve import WINDOW, batches_of, compare, tokens_of
from experiments.bench.training.step_parts import product
from experiments.bench.training.step_programs import (
    ours,
    plain,
    plain_reordered,
    without_rope_scaling,
)
from jaxinfra.config.presets import MODELS
from jaxinfra.planning.operations import PlannedMatmul


def curves(*levels: float, wave: float = 0.01) -> list[list[float]]:
    """A loss that falls, for each seed at its level; steps differ by ``wave``."""
    return [
        [level + 10 / (1 + i) + wave * (-1) ** i for i in range(4 * WINDOW)] for level in levels
    ]


def spiked(curve: list[float], height: float) -> list[float]:
    """Higher in its third window."""
    return [loss + height * (i // WINDOW == 2) for i, loss in enumerate(curve)]


def test_curves_are_compared_seed_by_seed_over_windows():
    found = compare({"plain": curves(5.0, 5.3, 5.1), "ours": curves(5.02, 5.32, 5.12, wave=0.5)})
    assert found["differences"]["ours"] == pytest.approx({"rms": 0.02, "largest": 0.02})
    assert found["mean_signed"] == pytest.approx({"ours": 0.02})
    assert found["differences"]["seeds"]["largest"] == pytest.approx(0.3)
    assert found["holds"]
    assert "HOLDS, 3 seeds" in found["verdict"]


def test_one_statistic_past_the_noise_is_enough():
    theirs = curves(5.0, 5.3)
    # A spike in one window of a control outdoes the largest, not the root mean square of a shift.
    found = compare(
        {
            "plain": theirs,
            "control": [spiked(theirs[0], 0.5), theirs[1]],
            "ours": curves(5.4, 5.7),
        }
    )
    assert "largest window difference of ours 0.4000 nats is within" in found["verdict"]
    assert "rms window difference of ours 0.4000 nats is PAST" in found["verdict"]
    assert not found["holds"]


def test_a_seed_orders_the_rows_and_all_of_them_are_read_once(tmp_path):
    (tmp_path / "b.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    (tmp_path / "a.txt").write_text("Pack my box with five dozen liquor jugs.\n" * 40)
    ids = tokens_of(str(tmp_path), vocab_size=300, needed=6 * 2 * 8 + 1)
    np.testing.assert_array_equal(ids, tokens_of(str(tmp_path), vocab_size=300, needed=len(ids)))
    first, again, other = (batches_of(ids, seed, batch=2, length=8) for seed in (0, 0, 1))
    assert len(first) == 6
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    for batches in (first, other):
        tokens, targets = (np.concatenate(each) for each in zip(*batches, strict=True))
        rows = np.concatenate([tokens, targets[:, -1:]], axis=1)
        assert sorted(map(tuple, rows)) == sorted(tuple(ids[i : i + 9]) for i in range(0, 96, 8))
    with pytest.raises(SystemExit, match="name more text by --data"):
        tokens_of(str(tmp_path), vocab_size=300, needed=1_000_000)


@pytest.fixture
def standard_promotion():
    """The plain step is written as JAX's defaults allow."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


QUICK = {"xla_backend_optimization_level": 0}  # half the time to compile
SHAPE = plain_step.Shape(
    layers=2, width=32, heads=8, kv_heads=4, hidden=48, vocab=50, batch=2, length=8
)


@pytest.mark.slow
def test_channels_in_another_order_are_the_same_function(standard_promotion):
    # Larger than at the start, and norms that are not all one, so that every channel counts.
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: draw.normal(size=x.shape).astype(np.float32) / 4,
        jax.eval_shape(lambda: plain_step.initialize(SHAPE, jax.random.key(0))),
    )
    tokens, targets = draw.integers(0, SHAPE.vocab, (2, SHAPE.batch, SHAPE.length))
    gradient = jax.jit(
        jax.value_and_grad(plain_step.make_loss(SHAPE, "none")), compiler_options=QUICK
    )
    loss, gradients = jax.device_get(gradient(params, tokens, targets))
    other = plain_step.reordered(SHAPE, params)
    got_loss, got = jax.device_get(gradient(other, tokens, targets))
    wanted = plain_step.reordered(SHAPE, gradients)
    assert loss == pytest.approx(got_loss, rel=2**-8)
    leaves = list(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
    for mine, one in leaves:
        # A few roundings to bf16 (2^-8) on the way; of another function it would be sqrt(2).
        assert rms(mine - one) < 0.03 * rms(one)
    assert any(not np.array_equal(mine, one) for mine, one in leaves)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.slow
def test_both_steps_and_the_control_train_alike_under_warmup_and_clipping(standard_promotion):
    config = dataclasses.replace(
        without_rope_scaling(MODELS["tiny"]()).with_layers(1), vocab_size=256
    )
    sizes = {"batch": 2, "length": 16}
    # Gradients of the order of AdamW's epsilon, where it feels what they were clipped to.
    training = {"learning_rate": 1e-2, "warmup": 4, "clip_norm": 1e-5}
    training |= {"remat": "none", "options": QUICK}
    theirs = plain(config, **sizes, **training)
    control = plain_reordered(theirs, config, **sizes)
    mine = ours(config, **sizes, **training, attention="auto")
    ids = np.random.default_rng(0).integers(0, 256, 2 * 16 + 1).astype(np.int32)
    batches = batches_of(ids, 0, **sizes) * 8
    programs = (theirs, control, mine)
    losses = np.array([step_curve.train(program, batches, 0) for program in programs])
    assert losses[0, 0] - losses[0, -1] > 0.5
    # Another warm-up or clip on one side is 0.05 and more away, rounding 0.002.
    np.testing.assert_allclose(losses[1:], losses[[0, 0]], rtol=0, atol=0.01)
    assert np.any(losses[0] != losses[1])


@pytest.mark.parametrize(("name", "out"), [("up", 2), ("up dx", 2), ("up dw", 4)])
def test_products_have_the_steps_shapes_and_results(name, out):
    function, *operands = product(PlannedMatmul(name, 24, 16, 8, out=out))
    result = jax.eval_shape(function, *operands)
    assert (result.shape, result.dtype.itemsize) == ((24, 16), out)
