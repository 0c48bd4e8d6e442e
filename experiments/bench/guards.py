"""What the default guards cost a step: with them and without, in one process, alternating.

    python -m experiments.bench.guards                   # Llama-3.2-1B shapes, one GPU
    python -m experiments.bench.guards --preset tiny --batch 2 --length 64 --steps 5

Without: gradient, optimizer, update, losses fetched one step late. With, as the trainer does it:
the same step with the test for what is not finite and the selection of the old state, metrics
fetched one step late, the recorder's phases, the table exchanged beside the step, stragglers, the
loss spike's median; and, timed apart and spread over their intervals, the hash of the whole state
(every 100 steps) and the probe of the device (every 50).
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.bench.environment import environment
from experiments.bench.step_programs import LEARNING_RATE, WEIGHT_DECAY, data, without_rope_scaling
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.optimizer import LearningRateSchedule, OptimizerConfig
from jaxinfra.config.precision import PolicyName, PrecisionConfig
from jaxinfra.config.presets import MODELS
from jaxinfra.config.reliability import ReliabilityConfig
from jaxinfra.config.run import AttentionImplementation, Remat, TrainingConfig
from jaxinfra.data.batch import Batch
from jaxinfra.models.definition import define_model
from jaxinfra.numerics.policy import POLICIES
from jaxinfra.optim.learning_rate import learning_rate
from jaxinfra.optim.optimizer import make_optimizer
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import make_mesh
from jaxinfra.reliability.exchange import Exchange, ProcessRow
from jaxinfra.reliability.hashes import StateHash
from jaxinfra.reliability.recorder import Recorder
from jaxinfra.reliability.stragglers import Stragglers
from jaxinfra.training.gradients import make_gradient
from jaxinfra.training.guards import Guards
from jaxinfra.training.state import initial_state
from jaxinfra.training.step import make_train_step, step_record
from jaxinfra.training.watch import DeviceProbe


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.guards", description=__doc__)
    parser.add_argument("--preset", default="llama32_1b", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6, help="steps a measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    bench = _Bench(args)
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for name in seconds:
        bench.run(name, 2)
    for _ in range(args.rounds):
        for name, values in seconds.items():
            values.append(bench.run(name, args.steps))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    apart = bench.apart()
    defaults = ReliabilityConfig()
    spread = {
        "hash": apart["hash"] / (defaults.hash_every or 1),
        "probe": apart["probe"] / (defaults.probe_every or 1),
    }
    extra = medians["with"] - medians["without"]
    share = (extra + sum(spread.values())) / medians["without"]
    print(f"step without guards {1e3 * medians['without']:9.3f} ms")
    print(
        f"step with guards    {1e3 * medians['with']:9.3f} ms ({extra / medians['without']:+.3%})"
    )
    for name, value in apart.items():
        print(f"{name:19s} {1e3 * value:9.3f} ms each, {1e3 * spread[name]:.4f} ms a step")
    print(f"all default guards  {share:+.3%} of a step")
    result = {
        "environment": environment(),
        "shapes": {"preset": args.preset, "batch": args.batch, "length": args.length},
        "seconds": seconds,
        "median_s": medians,
        "apart_s": apart,
        "share_of_step": share,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


class _Bench:
    """One state that both loops go on with."""

    def __init__(self, args: argparse.Namespace):
        config = without_rope_scaling(MODELS[args.preset]())
        training = TrainingConfig(
            steps=10**6, batch_size=args.batch, sequence_length=args.length, remat=Remat.DOTS
        )
        optimizing = OptimizerConfig(
            learning_rate=LEARNING_RATE,
            schedule=LearningRateSchedule.CONSTANT,
            weight_decay=WEIGHT_DECAY,
        )
        precision = PrecisionConfig(policy=PolicyName.BF16)
        execution = execution_on(
            policy=POLICIES[precision.policy],
            attention=AttentionImplementation(args.attention),
            remat=training.remat,
        )
        model = define_model(config, execution)
        optimizer = make_optimizer(optimizing, dims=model.dims, steps=training.steps)
        gradient = make_gradient(model, training=training)
        guarded = make_train_step(
            gradient,
            optimizer,
            learning_rate=learning_rate(optimizing, steps=training.steps),
            precision=precision,
            next_model_state=model.next_state,
        )
        whole = NamedSharding(make_mesh(MeshConfig()), PartitionSpec())
        initial = functools.partial(initial_state, model, optimizer, precision=precision, seed=0)
        self._state = jax.jit(initial, out_shardings=whole)()
        tokens, targets = data(config, batch=args.batch, length=args.length)
        weights = np.ones(tokens.shape, np.float32)
        self._batch = jax.device_put(
            Batch(
                tokens=tokens, targets=targets, segment_ids=None, positions=None, weights=weights
            ),
            whole,
        )
        compile_ = functools.partial(jax.jit, donate_argnums=0, out_shardings=whole)
        self._steps: dict[str, Callable[..., Any]] = {
            "with": compile_(guarded),
            "without": compile_(functools.partial(_unguarded, gradient, optimizer)),
        }
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state
        )
        self._hash = StateHash(abstract)
        self._guards = Guards(ReliabilityConfig(spike_factor=2.0), abstract)
        self._probe, self._exchange = DeviceProbe(), Exchange()
        self._recorder = Recorder(pathlib.Path(tempfile.mkdtemp()), 0)

    def run(self, name: str, count: int) -> float:
        """Seconds a step, the queue drained before and after."""
        jax.block_until_ready(self._state)
        began = time.perf_counter()
        (self._with if name == "with" else self._without)(count)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - began) / count

    def _without(self, count: int) -> None:
        pending: list[jax.Array] = []
        for _ in range(count):
            self._state, loss = self._steps["without"](self._state, self._batch)
            pending.append(loss)
            if len(pending) > 1:
                float(pending.pop(0))

    def _with(self, count: int) -> None:
        pending: list[Any] = []
        stragglers, records = Stragglers(), [{"step": 0, "loss": 1e9}] * 16
        for step in range(1, count + 1):
            self._recorder.phase("input", step=step)
            input_s = self._recorder.phase("place", step=step)
            host_s = self._recorder.phase("step", step=step)
            self._state, metrics = self._steps["with"](self._state, self._batch)
            pending.append(
                (metrics, self._exchange.start(ProcessRow(input_s=input_s, host_s=host_s)), step)
            )
            if len(pending) > 1:
                values, table, of_step = pending.pop(0)
                self._recorder.phase("wait", step=of_step)
                record = step_record(jax.device_get(values))
                self._guards.check_loss(records, step=of_step, loss=record["loss"])
                stragglers.add(table.rows(), step_s=1.0)
                self._recorder.phase("host", step=of_step)

    def apart(self) -> dict[str, float]:
        """Seconds of what is not done every step."""

        def timed(work: Callable[[], Any]) -> float:
            work()
            values = []
            for _ in range(5):
                jax.block_until_ready(self._state)
                began = time.perf_counter()
                work()
                values.append(time.perf_counter() - began)
            return statistics.median(values)

        return {
            "hash": timed(lambda: np.asarray(self._hash(self._state))),
            "probe": timed(self._probe.seconds),
        }


def _unguarded(gradient: Any, optimizer: optax.GradientTransformation, state: Any, batch: Any):
    """What is left of the step without any test of its result."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    learned = gradient(
        state.parameters, state.model_state, batch, key=key, loss_scale=state.loss_scale.value
    )
    updates, moments = optimizer.update(learned.gradients, state.optimizer, state.parameters)
    parameters = optax.apply_updates(state.parameters, updates)
    step = state.step + 1
    return dataclasses.replace(
        state, step=step, parameters=parameters, optimizer=moments
    ), learned.loss


if __name__ == "__main__":
    main()
