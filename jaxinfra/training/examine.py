"""What a step's loss is made of: the loss of each sample, and which layers' gradients grew.

Dims: B sequence of the batch, T position, D model width, K micro-batch, R row of a micro-batch.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfra.axes import LAYERS
from jaxinfra.data.batch import Batch
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.data.train_iterator import TrainIterator
from jaxinfra.model.definition import ModelDefinition, Parameters, only
from jaxinfra.parallel.context.zigzag import from_zigzag
from jaxinfra.parallel.place import path_name
from jaxinfra.training.gradients import hidden_loss, own_loss, split_batch
from jaxinfra.training.job import Job
from jaxinfra.training.metrics import finite
from jaxinfra.training.state import State
from jaxinfra.training.step import step_key

TEXT_TOKENS = 48  # of each sample, decoded
GREW = 0.5
"""Share of the largest growth from which on a layer is among those that grew."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleLoss:
    """One sample of a step."""

    sample: int  # its number in the run's order of data
    loss: float  # nats per counted target
    targets: int  # that count
    documents: int  # of which it holds parts
    source: str | None  # of a mixture
    text: str  # how it begins


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerGrowth:
    """The gradient norm of one layer's parameters, beside an ordinary step's."""

    name: str  # "layer 3", or a top-level name such as "embedding"
    norm: float
    usual: float

    @property
    def growth(self) -> float:
        """Times the ordinary step's."""
        return self.norm / max(self.usual, float(np.finfo(np.float32).tiny))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """A step's samples, highest loss first, and its layers in the order that the model has them."""

    step: int
    compared_with: int  # the ordinary step
    samples: tuple[SampleLoss, ...]
    layers: tuple[LayerGrowth, ...]

    @property
    def first(self) -> LayerGrowth:
        """Of the layers whose gradients grew most, the one that the backward pass meets first."""
        most = max(layer.growth for layer in self.layers)
        return next(each for each in reversed(self.layers) if each.growth >= GREW * most)

    def describe(self) -> str:
        """In two sentences."""
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
        """For files; what is not finite is None."""
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
    batches: TrainIterator,
    tokenizer: Tokenizer,
    *,
    step: int,
    usual_step: int,
) -> Examination:
    """Computes a step's loss by sample and its gradient by layer; a collective.

    It costs two compilations, two gradients, and for each sample the loss of its micro-batch.

    Args:
        state: before the step.
        batches: of the run; what comes next stays as it is.
        usual_step: the one whose gradient, of the same parameters, is the ordinary one.
    """
    batch, usual = (job.put(batches.batch(number - 1)) for number in (step, usual_step))
    whole = job.placement.replicated
    by_sample = jax.jit(functools.partial(sample_losses, job), out_shardings=whole)
    by_layer = jax.jit(functools.partial(_squares, job), out_shardings=whole)
    nll_B, count_B, tokens_BT, documents_B = jax.device_get(by_sample(state.tree, batch))
    norms, usual_norms = (
        _by_layer(job, jax.device_get(by_layer(state, each))) for each in (batch, usual)
    )
    tokens_BT = from_zigzag(tokens_BT, job.config.mesh.context)
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
    """Of each row the summed nll, the number of its counted targets, its tokens, its documents.

    No matmul is in 8 bits there, and nothing is dropped out. A row's loss is that of its
    micro-batch with all other rows' targets left out, so that it is computed as the step's is.
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
            return _nll(model, tree, hidden_RTD, one, loss=training.loss)

        return jax.lax.map(of_row, rows)

    nll_KR = jax.lax.map(of_micro, split_batch(batch, count))
    documents_B = jnp.ones(batch.tokens.shape[0], jnp.int32)
    if batch.segment_ids is not None:
        documents_B = jnp.max(batch.segment_ids, axis=1) + 1
    # Row k of micro-batch r is row r K + k of the batch.
    return nll_KR.T.reshape(-1), jnp.sum(batch.weights, axis=1), batch.tokens, documents_B


def _nll(
    model: ModelDefinition, tree: Parameters, hidden: jax.Array, batch: Batch, *, loss: str | None
) -> jax.Array:
    if loss is not None:
        return own_loss(model, tree, hidden, batch, loss=loss).nll
    return hidden_loss(model, tree, hidden, batch, z_loss=0.0, label_smoothing=0.0).nll


def _squares(job: Job, state: State, batch: Batch) -> Parameters:
    """The sum of squares of each array's gradient, by layer where it is stacked."""
    scale = state.loss_scale.value
    learned = job.gradient(
        state.parameters, state.model_state, batch, key=step_key(state), loss_scale=scale
    )

    def squares(gradient: jax.Array, leaf: Any) -> jax.Array:
        first = 1 if leaf.dims and leaf.dims[0] == LAYERS else 0
        exact = gradient.astype(scale.dtype) / scale
        return jnp.sum(jnp.square(exact), axis=tuple(range(first, gradient.ndim)))

    return jax.tree.map(squares, learned.gradients, job.model.dims)


def _by_layer(job: Job, squares: Parameters) -> dict[str, float]:
    """The norm of each layer's gradient: what comes before the layers, the layers, the rest."""
    numbers = {place: number for number, place in enumerate(job.config.model.layer_places)}
    sums: dict[str, float] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(squares):
        parts = path_name(path).split("/")
        if value.ndim == 0:
            sums[parts[0]] = sums.get(parts[0], 0.0) + float(value)
            continue
        block = int(parts[1]) if parts[0] == "blocks" else 0
        for repetition, each in enumerate(value):
            name = f"layer {numbers[block, repetition]}"
            sums[name] = sums.get(name, 0.0) + float(each)
    before = [name for name in ("embedding", "positions") if name in sums]
    layers = [name for n in range(len(numbers)) if (name := f"layer {n}") in sums]
    after = [name for name in sums if name not in (*before, *layers)]
    return {name: float(np.sqrt(sums[name])) for name in (*before, *layers, *after)}
