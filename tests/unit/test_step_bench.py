"""What the step's benchmarks make of their measurements, and that their two sides are one step."""

import dataclasses
import json
import weakref

import jax
import numpy as np
import pytest

from experiments.bench.training import plain_step, step_curve
from experiments.bench.training.step_curve import WINDOW, batches_of, compare, table, tokens_of
from experiments.bench.training.step_parts import product
from experiments.bench.training.step_programs import (
    Program,
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


@pytest.mark.parametrize("mine", [(5.5, 5.8, 5.6), (5.0, 5.3, 5.5), (5.0, 5.3, float("nan"))])
def test_a_side_or_a_seed_that_learns_less_is_no_noise(mine):
    found = compare({"plain": curves(5.0, 5.3, 5.1), "ours": curves(*mine)})
    assert not found["holds"]
    assert "DOES NOT HOLD" in found["verdict"]


@pytest.mark.parametrize(("control", "holds"), [(0.5, False), (1.2, True), (float("nan"), False)])
def test_a_spike_holds_only_where_the_control_has_as_large_a_one(control, holds):
    theirs = curves(5.0, 5.3, 5.1)
    found = compare(
        {
            "plain": theirs,
            "control": [theirs[0], spiked(theirs[1], control), theirs[2]],
            "ours": [spiked(theirs[0], 1.1), *theirs[1:]],
        }
    )
    assert found["holds"] is holds
    spike = found["windows"][2]
    assert spike["first_step"] == 2 * WINDOW
    assert spike["ours"]["largest"] == pytest.approx(1.1)
    assert spike["ours"]["rms"] == pytest.approx(1.1 / 3**0.5)
    assert found["windows"][1]["ours"]["largest"] == 0
    lines = table(found).splitlines()
    assert len(lines) == 1 + 4 + 1
    assert "1.1000" in lines[3]


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


class State:
    """Of a program that does nothing."""


def pretended(side: str, alive: weakref.WeakSet, fails_at: int) -> Program:
    """Loses a tenth of a nat a step; refuses to start beside another's state, and at a seed."""

    def start(seed: int) -> State:
        assert not alive, "another state is in memory"
        if seed == fails_at:
            raise KeyboardInterrupt
        state = State()
        alive.add(state)
        state.loss = 8.0 + seed + (side == "ours") * 0.01
        return state

    def advance(state: State, batch: tuple) -> tuple[State, np.float64]:
        state.loss -= 0.1
        return state, np.float64(state.loss)

    return Program(
        name=side,
        start=start,
        put=lambda tokens, targets: (tokens, targets),
        advance=advance,
        temp_bytes=0,
        need_bytes=0,
        compile_s=0.0,
    )


def test_a_run_that_is_cut_leaves_the_seeds_that_it_finished(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("Sphinx of black quartz, judge my vow.\n" * 200)
    out = tmp_path / "curve.json"
    command = f"step_curve --preset tiny --data {tmp_path}/text --steps 20 --length 16 --out {out}"
    monkeypatch.setattr("sys.argv", command.split())
    for last, holds in ((1, None), (2, True), (3, True)):
        alive = weakref.WeakSet()
        programs = {side: pretended(side, alive, last) for side in ("plain", "control", "ours")}
        monkeypatch.setattr(step_curve, "_programs", lambda *_, programs=programs: programs)
        if last < 3:
            with pytest.raises(KeyboardInterrupt):
                step_curve.main()
        else:
            step_curve.main()
        found = json.loads(out.read_text())
        assert found.get("holds") is holds
        assert found["settings"]["warmup"] == 4
        for side in programs:
            assert np.shape(found["losses"][side]) == (last, 20)
    assert "step 20: " in capsys.readouterr().out
    assert found["differences"]["ours"]["largest"] == pytest.approx(0.01)
    assert found["differences"]["control"]["largest"] == 0
    assert found["differences"]["seeds"]["largest"] == pytest.approx(2)


@pytest.mark.parametrize("wrong", ["--steps 25", "--seeds 1"])
def test_settings_without_windows_or_noise_are_refused(wrong, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["step_curve", *wrong.split()])
    with pytest.raises(SystemExit):
        step_curve.main()
    assert f"{wrong}: must be" in capsys.readouterr().err


@pytest.fixture
def standard_promotion():
    """The plain step is written as JAX's defaults allow."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


QUICK = {"xla_backend_optimization_level": 0}  # half the time to compile
SHAPE = plain_step.Shape(
    layers=2, width=32, heads=8, kv_heads=4, hidden=48, vocab=50, batch=2, length=8
)


def test_the_plain_optimizer_warms_up_and_clips(standard_promotion):
    """Against AdamW by hand, of a matrix and a norm, in float64."""
    rate, decay, warmup, clip = 1e-2, 0.1, 3, 0.5
    optimizer, _ = plain_step.make_step(
        SHAPE, remat="none", learning_rate=rate, weight_decay=decay, warmup=warmup, clip_norm=clip
    )
    rng = np.random.default_rng(0)
    params = {"embed": rng.normal(size=(3, 4)), "norm": np.ones(4)}
    mine = jax.tree.map(lambda x: x.astype(np.float32), params)
    state = jax.jit(optimizer.init)(mine)
    update = jax.jit(optimizer.update)
    first = second = dict.fromkeys(params, 0.0)
    for step in range(5):
        # Past the clip and under it in turns.
        size = (2.0, 0.05)[step % 2]
        gradients = {name: size * rng.normal(size=x.shape) for name, x in params.items()}
        updates, state = update(
            jax.tree.map(lambda x: x.astype(np.float32), gradients), state, mine
        )
        mine = jax.tree.map(np.add, mine, updates)
        norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
        clipped = {name: g * min(1, clip / norm) for name, g in gradients.items()}
        first = {name: 0.9 * first[name] + 0.1 * g for name, g in clipped.items()}
        second = {name: 0.95 * second[name] + 0.05 * g**2 for name, g in clipped.items()}
        for name, x in params.items():
            m = first[name] / (1 - 0.9 ** (step + 1))
            v = second[name] / (1 - 0.95 ** (step + 1))
            shrink = decay * x if name == "embed" else 0
            now = rate * min(1, (step + 1) / warmup)
            params[name] = x - now * (m / (np.sqrt(v) + 1e-8) + shrink)
    for name, x in params.items():
        np.testing.assert_allclose(mine[name], x, rtol=1e-5, atol=1e-6)


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
