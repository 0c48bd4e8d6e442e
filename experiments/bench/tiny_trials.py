"""Trials of the preset tiny: many settings of its optimizer at once, on one device.

    python -m experiments.bench.tiny_trials --only e-seeds        # a group of the stored trials
    python -m experiments.bench.tiny_trials --groups mine.json --data /texts --out trials.json

A group shares what shapes the program: ``settings`` of the preset, as after ``--set``. Its members
differ in numbers only, and one program trains all of them (``jax.vmap`` over the step that a run
takes, with the run's own optimizer). On a GPU a group of nine takes a quarter of a minute; held-out
bits per byte are those of two CPU cores but for rounding, the time is not: measure it there.
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.environment import environment
from jaxinfra.config import codec
from jaxinfra.config.data import DataConfig
from jaxinfra.config.optimizer import MuonConfig, OptimizerConfig
from jaxinfra.config.presets import run_preset
from jaxinfra.config.run import AttentionImplementation, RunConfig
from jaxinfra.core.places import user_cache
from jaxinfra.data.batch import Batch
from jaxinfra.data.corpus import Corpus, open_corpus
from jaxinfra.data.heldout import heldout_batches
from jaxinfra.data.packing import PackedWindows
from jaxinfra.models.definition import ModelDefinition, define_model
from jaxinfra.optim.learning_rate import learning_rate
from jaxinfra.optim.optimizer import make_optimizer
from jaxinfra.parallel.execution import execution_on
from jaxinfra.training.gradients import make_evaluation_step, make_gradient
from jaxinfra.training.state import State, state_around
from jaxinfra.training.step import make_train_step

STORED = Path(__file__).parent.parent / "results" / "tiny-stdlib-cpu.json"
_CHUNK = 100  # steps in one call
_EVALUATED = 1 << 14  # tokens at a time

type Member = dict[str, Any]
"""``seed``, ``init_std``, ``muon.NAME`` or a name of ``OptimizerConfig``, to a number."""


def with_numbers(config: OptimizerConfig, member: Member) -> OptimizerConfig:
    """The config with a member's numbers, which may be traced: unchecked, as they have no value."""
    muon = config.muon
    if muon is not None:
        own = {name[5:]: value for name, value in member.items() if name.startswith("muon.")}
        muon = _unchecked(muon, own)
    names = {field.name for field in dataclasses.fields(config)}
    own = {name: value for name, value in member.items() if name in names}
    return _unchecked(config, {**own, "muon": muon})


def _unchecked[C: (OptimizerConfig, MuonConfig)](config: C, changes: dict[str, Any]) -> C:
    new: Any = object.__new__(type(config))
    for field in dataclasses.fields(config):
        value = changes.get(field.name, getattr(config, field.name))
        object.__setattr__(new, field.name, value)
    return new


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """The functions of a group: of all its members at once."""

    config: RunConfig
    model: ModelDefinition

    def start(self, member: Member) -> State:
        """Of one member: the model's weights are all drawn with its ``init_std``."""
        parameters = self.model.initialize(jax.random.key(member["seed"]))
        wider = member["init_std"] / self.config.model.init_std
        parameters = jax.tree_util.tree_map_with_path(
            lambda path, x: x if path[-1].key == "scale" else x * wider, parameters
        )
        optimizer = self._optimizer(member)
        state = self.model.initial_state()
        return state_around(parameters, state, optimizer, precision=self.config.precision, seed=0)

    def _optimizer(self, member: Member):
        optimizer = with_numbers(self.config.optimizer, member)
        return make_optimizer(optimizer, dims=self.model.dims, steps=self.config.training.steps)

    def steps(self, members: Member, states: State, batches: Batch) -> tuple[State, jax.Array]:
        """Over batches [step, ...]; losses are [step, member]."""
        training = self.config.training
        gradient = make_gradient(self.model, training=training)

        def step(member: Member, state: State, batch: Batch) -> tuple[State, jax.Array]:
            optimizer = with_numbers(self.config.optimizer, member)
            train = make_train_step(
                gradient,
                self._optimizer(member),
                learning_rate=learning_rate(optimizer, steps=training.steps),
                precision=self.config.precision,
                next_model_state=self.model.next_state,
            )
            state, metrics = train(state, batch)
            return state, metrics.loss

        def each(states: State, batch: Batch) -> tuple[State, jax.Array]:
            return jax.vmap(step, in_axes=(0, 0, None))(members, states, batch)

        return jax.lax.scan(each, states, batches)

    def loss(self, states: State, batches: Batch) -> jax.Array:
        """Mean nll of held-out tokens, [member]."""
        evaluate = jax.vmap(make_evaluation_step(self.model), in_axes=(0, None))
        nll, count = jax.lax.map(lambda batch: evaluate(states.tree, batch), batches)
        return jnp.sum(nll, axis=0) / jnp.sum(count, axis=0)


def run_group(group: dict[str, Any], *, data: str, cache: Path) -> dict[str, Any]:
    """Trains a group's members; the group with each member's held-out bits per byte."""
    config = codec.override(run_preset("tiny"), group["settings"].split())
    training = config.training
    execution = execution_on(attention=AttentionImplementation.XLA, unroll=config.model.num_layers)
    trials = Trials(config=config, model=define_model(config.model, execution))
    given = [
        {"seed": 0, "init_std": config.model.init_std, **member} for member in group["members"]
    ]
    members = {name: jnp.asarray([member[name] for member in given]) for name in given[0]}
    source = DataConfig(source=data)
    corpus = open_corpus(source, vocab_size=config.model.vocab_size, cache_dir=cache)
    windows = PackedWindows(corpus.train, sequence_length=training.sequence_length, seed=0)
    steps = jax.jit(trials.steps, donate_argnums=1)
    states, losses, started = jax.jit(jax.vmap(trials.start))(members), [], time.perf_counter()
    for first in range(0, training.steps, _CHUNK):
        last = min(first + _CHUNK, training.steps)
        rows = windows.batch(np.arange(first * training.batch_size, last * training.batch_size))
        shape = (last - first, training.batch_size, training.sequence_length)
        batches = jax.tree.map(lambda leaf, shape=shape: leaf.reshape(shape), rows)
        states, loss = steps(members, states, batches)
        losses.append(loss)
    curve = np.concatenate(jax.device_get(losses))
    bits = _bits_per_byte(trials, states, corpus)
    return {
        **group,
        "num_parameters": trials.model.num_parameters,
        "tokens": training.steps * training.batch_size * training.sequence_length,
        "bits_per_byte": [round(float(each), 4) for each in bits],
        "losses": [
            [round(float(x), 3) for x in part.mean(axis=0)]
            for part in np.array_split(curve, min(8, len(curve)))
        ],
        "seconds": round(time.perf_counter() - started, 1),
    }


def _bits_per_byte(trials: Trials, states: State, corpus: Corpus) -> np.ndarray:
    length = trials.config.training.sequence_length
    batches = heldout_batches(
        corpus.heldout, sequence_length=length, batch_size=_EVALUATED // length
    )
    loss = jax.jit(trials.loss)(states, jax.tree.map(lambda *x: np.stack(x), *batches))
    scale = corpus.heldout.num_tokens / math.log(2) / corpus.heldout.num_bytes
    return np.asarray(loss, np.float64) * scale


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=Path, default=STORED, help='JSON with "trials"')
    parser.add_argument("--only", nargs="*", help="names of groups")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    groups = json.loads(args.groups.read_text())["trials"]
    found = []
    for group in groups:
        if args.only is None or group["name"] in args.only:
            wanted = {name: group[name] for name in ("name", "settings", "members")}
            found.append(run_group(wanted, data=args.data, cache=user_cache()))
            print(f"{group['name']}: {found[-1]['bits_per_byte']}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"environment": environment(), "trials": found}, indent=1))


if __name__ == "__main__":
    main()
