"""Explanations of bad steps: where a number was not finite, which samples made the loss jump, and
which layers' gradients grew.

Dims: B sequence of the batch, T position, D model width, K micro-batch, R row of a micro-batch.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxinfra.axes import BATCH, LAYERS
from jaxinfra.checkpoint import processes
from jaxinfra.checkpoint.run_directory import RunDirectory, write_atomically
from jaxinfra.data.batch import Batch
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.model.definition import Parameters, only
from jaxinfra.parallel.place import path_name
from jaxinfra.parallel.zigzag import from_zigzag
from jaxinfra.runtime.recorder import EXCLUDED, read_incidents
from jaxinfra.training.gradients import hidden_loss, split_batch
from jaxinfra.training.job import Job
from jaxinfra.training.metrics import finite
from jaxinfra.training.own_data import Batches
from jaxinfra.training.state import State
from jaxinfra.training.step import step_key
from jaxinfra.training.watch import Watch


def locate_nonfinite(job: Job, state: State, batches: Batches, *, step: int) -> dict[str, Any]:
    """Finds the rank and tensors in which a step became NaN or infinite. A collective.

    The gradient is computed once per rank's rows, with all other rows' targets masked out. So a
    number that is not finite comes from those rows. This costs one compilation in all.

    Args:
        state: the state before or after the step; they have equal parameters, as a step that is
            not finite is skipped.

    Returns:
        What ``Watch.incident`` records: text, cause, ranks, and the tensors of their gradients.
    """
    parts = job.placement.batch_shards
    batch = job.put(batches.batch(step - 1))
    key = jax.random.key(0)
    alone = jax.jit(
        lambda state, batch, part: _gradient_of(job, state, batch, part, parts, key),
        out_shardings=job.placement.replicated,
    )
    found = []
    for part in range(parts):
        loss, flags = jax.device_get(alone(state, batch, part))
        tensors = _names(job, flags)
        if tensors or not np.isfinite(loss):
            found.append((part, float(loss), tensors))
    if not found:
        text = "computed again, the batch's loss and gradient are finite: a fault that passed"
        return {"text": text, "cause": "transient", "ranks": [], "tensors": []}
    ranks = sorted({rank for part, _, _ in found for rank in _ranks(job, part, parts)})
    first = next((tensors for _, _, tensors in found if tensors), [])
    where = f"first in {first[0]} ({len(first)} tensors in all)" if first else "in the loss only"
    text = (
        f"the rows of rank {', '.join(map(str, ranks))} make it so, {where}; the batch is "
        f"skipped; jaxinfra replay RUN --step {step} names the operation"
    )
    return {"text": text, "cause": "batch", "ranks": ranks, "tensors": first[:20]}


def _gradient_of(
    job: Job, state: State, batch: Batch, part: Int[Array, ""], parts: int, key: Key[Array, ""]
) -> tuple[Float[Array, ""], Parameters]:
    num_rows = batch.tokens.shape[0]
    mine = jnp.arange(num_rows) // (num_rows // parts) == part
    kept = jax.tree.map(
        lambda x: jnp.where(mine.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x)), batch
    )
    scale = jnp.ones((), batch.weights.dtype)
    learned = job.gradient(state.parameters, state.model_state, kept, key=key, loss_scale=scale)

    def flags(gradient: jax.Array, leaf: Any) -> jax.Array:
        return ~jnp.all(jnp.isfinite(gradient), axis=_own_axes(gradient, leaf))

    return learned.loss, jax.tree.map(flags, learned.gradients, job.model.dims)


def _names(job: Job, flags: Parameters) -> list[str]:
    """Tensors that are not finite, deepest layer first: the backward pass starts there."""
    found = [
        (-1, name) if layer is None else (layer, f"layer {layer}: {name}")
        for name, layer, flag in _each(job, flags)
        if flag
    ]
    return [name for _, name in sorted(found, reverse=True)]


def _each(job: Job, tree: Parameters) -> Iterator[tuple[str, int | None, Any]]:
    """Path, number of the layer (None: of none) and value of all values, stacked ones apart."""
    numbers = {place: number for number, place in enumerate(job.config.model.layer_positions)}
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if value.ndim == 0:
            yield name, None, value
            continue
        block = int(name.split("/")[1]) if name.startswith("blocks/") else 0
        for repetition, each in enumerate(value):
            yield name, numbers[block, repetition], each


def _own_axes(array: jax.Array, leaf: Any) -> tuple[int, ...]:
    """Axes of one layer's part of an array, whose layers may be stacked."""
    return tuple(range(bool(leaf.dims) and leaf.dims[0] == LAYERS, array.ndim))


def _ranks(job: Job, part: int, parts: int) -> list[int]:
    """Processes that hold a part of the batch."""
    held = job.placement.sharding((BATCH,)).devices_indices_map((parts,))
    return sorted(
        {
            device.process_index
            for device, index in held.items()
            if index[0].indices(parts)[0] == part
        }
    )


TEXT_TOKENS = 48  # of each sample, decoded
GREW = 0.5
"""Share of the largest growth from which on a layer is among those that grew."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleLoss:
    """The loss of one sample of a step."""

    sample: int  # index in the run's order of data
    loss: float  # nats per counted target
    targets: int  # number of counted targets
    documents: int  # number of documents with tokens in the sample
    source: str | None  # name in the data mixture; None without a mixture
    text: str  # first characters


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerGrowth:
    """The gradient norm of one layer's parameters in the examined step and in an ordinary step."""

    name: str  # "layer 3", or a top-level name such as "embedding"
    norm: float
    usual: float  # the norm in the ordinary step

    @property
    def growth(self) -> float:
        """Ratio of the layer's gradient norm to that of an ordinary step."""
        return self.norm / max(self.usual, float(np.finfo(np.float32).tiny))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """The findings about one step: its samples from highest to lowest loss, and its layers in the
    model's order.
    """

    step: int
    compared_with: int  # the ordinary step
    samples: tuple[SampleLoss, ...]
    layers: tuple[LayerGrowth, ...]

    @property
    def first(self) -> LayerGrowth:
        """Layer where the growth began: of the layers whose gradients grew most, the one that the
        backward pass reaches first.
        """
        most = max(layer.growth for layer in self.layers)
        return next(each for each in reversed(self.layers) if each.growth >= GREW * most)

    def describe(self) -> str:
        """Describes in two sentences which samples and layers stand out in the step."""
        losses = [each.loss for each in self.samples]
        worst = self.samples[:3]
        named = ", ".join(f"{each.sample} ({each.loss:.2f})" for each in worst)
        most = max(self.layers, key=lambda each: each.growth)
        return (
            f"samples of highest loss: {named}, median {np.nanmedian(losses):.2f} nats; gradients "
            f"grew first in {self.first.name} ({self.first.growth:.1f} times step "
            f"{self.compared_with}'s), most in {most.name} ({most.growth:.1f} times)"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the examination as JSON values; a number that is not finite becomes None."""
        layers = [{**dataclasses.asdict(e), "growth": e.growth} for e in self.layers]
        samples = [dataclasses.asdict(each) for each in self.samples]
        return {
            "step": self.step,
            "compared_with": self.compared_with,
            "text": self.describe(),
            "samples": [finite(each) for each in samples],
            "layers": [finite(each) for each in layers],
            "first": self.first.name,
        }


def examine_step(
    job: Job,
    state: State,
    batches: Batches,
    tokenizer: Tokenizer,
    *,
    step: int,
    usual_step: int,
) -> Examination:
    """Computes a step's loss per sample and its gradient norm per layer; a collective.

    It costs two compilations, two gradients, and for each sample the loss of its micro-batch.

    Args:
        state: before the step.
        batches: iterator of the run's batches; its position does not change.
        usual_step: step whose batch is not suspect; its gradient at the current parameters is the
            baseline for each layer's growth.
    """
    batch, usual = (job.put(batches.batch(number - 1)) for number in (step, usual_step))
    whole = job.placement.replicated
    by_sample = jax.jit(functools.partial(sample_losses, job), out_shardings=whole)
    by_layer = jax.jit(functools.partial(_squares, job), out_shardings=whole)
    nll_B, count_B, tokens_BT, documents_B = jax.device_get(by_sample(state.tree, batch))
    norms, usual_norms = (
        _by_layer(job, jax.device_get(by_layer(state, each))) for each in (batch, usual)
    )
    tokens_BT = from_zigzag(tokens_BT, job.config.mesh.sequence_shards)
    numbers = batches.sample_ids(step - 1)
    sources = batches.row_sources(step - 1) or [None] * len(numbers)
    samples = [
        SampleLoss(
            sample=int(numbers[row]),
            loss=float(nll_B[row] / max(count_B[row], 1.0)),
            targets=int(count_B[row]),
            documents=int(documents_B[row]),
            source=sources[row],
            text=tokenizer.decode(tokens_BT[row, :TEXT_TOKENS]),
        )
        for row in range(len(numbers))
    ]
    layers = (LayerGrowth(name=n, norm=v, usual=usual_norms[n]) for n, v in norms.items())
    return Examination(
        step=step,
        compared_with=usual_step,
        samples=tuple(sorted(samples, key=lambda each: np.nan_to_num(-each.loss, nan=-np.inf))),
        layers=tuple(layers),
    )


def sample_losses(
    job: Job, tree: Parameters, batch: Batch
) -> tuple[Float[Array, "B"], Float[Array, "B"], jax.Array, jax.Array]:
    """Computes for each row of a batch its summed nll, counted targets, tokens and documents.

    8-bit matmuls and dropout are off. Each row's loss is computed on its whole micro-batch, with
    the targets of all other rows masked out, so shapes are those of the training step.
    """
    model, training = job.model.unquantized, job.config.training
    tree, count = only(tree, model.arrays), training.accumulation

    def of_micro(micro: Batch) -> jax.Array:
        hidden_RTD = model.bind(tree).hidden(
            micro.tokens, segment_ids=micro.segment_ids, positions=micro.positions
        )
        rows = jnp.arange(micro.tokens.shape[0])

        def of_row(row: jax.Array) -> jax.Array:
            alone = jnp.where((rows == row)[:, None], micro.weights, jnp.zeros_like(micro.weights))
            one = dataclasses.replace(micro, weights=alone)
            options = {"z_loss": 0.0, "label_smoothing": 0.0, "loss": training.loss}
            return hidden_loss(model, tree, hidden_RTD, one, **options).nll

        return jax.lax.map(of_row, rows)

    nll_KR = jax.lax.map(of_micro, split_batch(batch, count))
    documents_B = jnp.ones(batch.tokens.shape[0], jnp.int32)
    if batch.segment_ids is not None:
        documents_B = jnp.max(batch.segment_ids, axis=1) + 1
    # Row k of micro-batch r is row r K + k of the batch.
    return nll_KR.T.reshape(-1), jnp.sum(batch.weights, axis=1), batch.tokens, documents_B


def _squares(job: Job, state: State, batch: Batch) -> Parameters:
    """The sum of squares of each array's gradient, by layer where it is stacked."""
    scale = state.loss_scale.value
    learned = job.gradient(
        state.parameters, state.model_state, batch, key=step_key(state), loss_scale=scale
    )

    def squares(gradient: jax.Array, leaf: Any) -> jax.Array:
        exact = gradient.astype(scale.dtype) / scale
        return jnp.sum(jnp.square(exact), axis=_own_axes(gradient, leaf))

    return jax.tree.map(squares, learned.gradients, job.model.dims)


def _by_layer(job: Job, squares: Parameters) -> dict[str, float]:
    """The norm of each layer's gradient: what comes before the layers, the layers, the rest."""
    sums: dict[str, float] = {}
    for path, layer, value in _each(job, squares):
        name = path.split("/")[0] if layer is None else f"layer {layer}"
        sums[name] = sums.get(name, 0.0) + float(value)
    before = [name for name in ("embedding", "positions") if name in sums]
    layers = [name for n in range(job.config.model.num_layers) if (name := f"layer {n}") in sums]
    after = [name for name in sums if name not in (*before, *layers)]
    return {name: float(np.sqrt(sums[name])) for name in (*before, *layers, *after)}


SPIKE = "loss spike"


def explain_spike(
    job: Job,
    state: State,
    batches: Batches,
    tokenizer: Tokenizer,
    *,
    run: RunDirectory,
    watch: Watch,
    step: int,
) -> None:
    """Writes the report of a step that is skipped because of its loss, if there is none yet; a
    collective.

    It is called when the run, after its roll-back, reaches the skipped batch again. At that point
    the state before the step is in memory, so the report needs no checkpoint and no replay.

    Args:
        state: before the step.
        step: number of the skipped step.
    """
    file = run.spike_file(step)

    def rejected() -> str | None:
        """Incident text of the step's rejected loss, unless it was explained already."""
        if file.exists():
            return None
        told = ((e["kind"], e["step"], e["text"]) for e in read_incidents(run.incidents_file))
        return next((text for kind, at, text in told if (kind, at) == (EXCLUDED, step)), None)

    found = processes.on_first(rejected)
    if found is None:
        return
    watch.phase("rollback", step)
    # The nearest step before that is trained on; the first one has the next.
    usual = next((n for n in range(step - 1, 0, -1) if n not in watch.excluded), step + 1)
    examined = examine_step(job, state, batches, tokenizer, step=step, usual_step=usual)
    done = "the run went back to before it, and its batch is left out from now on"
    report = {**examined.as_json(), "seen": found, "done": done}

    def write() -> None:
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, json.dumps(report, indent=1, allow_nan=False) + "\n")

    processes.on_first(write)
    watch.incident(SPIKE, step=step, text=f"{examined.describe()}; {done}", report=str(file))
