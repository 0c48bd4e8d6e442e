"""A run's set-up in words, and what each device will hold of its parameters as a table."""

import math

import jax

from jaxinfra.config.run import CheckpointConfig, TrainingConfig
from jaxinfra.data.arrays import TokenArrays
from jaxinfra.data.corpus import Corpus
from jaxinfra.parallel.place import path_name
from jaxinfra.training.job import Job


def describe_job(job: Job) -> str:
    """Size, precision, devices and length of a run."""
    config = job.config
    mesh = ", ".join(f"{a}={n}" for a, n in job.placement.mesh.shape.items() if n > 1)
    return (
        f"{job.model.num_parameters:,} parameters, {config.precision.policy} on "
        f"{jax.devices()[0].device_kind} ({mesh or 'one device'}); {config.training.steps} steps "
        f"of {config.training.batch_size} x {config.training.sequence_length} tokens"
    )


def describe_corpus(corpus: Corpus) -> str:
    """How much text is on each side of the split."""

    def side(arrays: TokenArrays) -> str:
        return (
            f"{arrays.num_documents:,} documents, {_short(arrays.num_bytes)}B, "
            f"{_short(arrays.num_tokens).rstrip()} tokens"
        )

    return f"training text: {side(corpus.train)}; held out: {side(corpus.heldout)}"


def _short(number: int) -> str:
    """A count and its unit's prefix: 1,234 as "1.23 k"."""
    for size, prefix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number} "


def describe_ranking(training: TrainingConfig, checkpoint: CheckpointConfig) -> str | None:
    """A warning where checkpoints are to be ranked by a loss that is not measured when they are
    made.
    """
    save, evaluate = checkpoint.every, training.evaluate_every
    if not checkpoint.keep_best or save is None or evaluate is None:
        return None
    if math.lcm(save, evaluate) < training.steps or min(save, evaluate) >= training.steps:
        return None
    return (
        f"WARNING: no step but the last is both evaluated (every {evaluate}) and saved (every "
        f"{save}), so keep_best={checkpoint.keep_best} has nothing to choose from; make one a "
        "multiple of the other"
    )


def parameter_table(job: Job) -> str:
    """path | shape | dtype | spec | bytes per device, and totals; nothing is allocated."""
    state = job.abstract_state()
    leaves = jax.tree_util.tree_leaves_with_path(state.parameters)
    rows = [("parameter", "shape", "dtype", "spec", "bytes per device")]
    rows += [
        (
            path_name(path),
            " x ".join(map(str, leaf.shape)),
            leaf.dtype.name,
            ", ".join(_axes(entry) for entry in leaf.sharding.spec) or "replicated",
            f"{_bytes_per_device(leaf):,}",
        )
        for path, leaf in leaves
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
            + [row[-1].rjust(widths[-1])]
        )
        for row in rows
    ]
    whole = sum(_bytes_per_device(leaf) for leaf in jax.tree.leaves(state))
    parameters = sum(_bytes_per_device(leaf) for _, leaf in leaves)
    lines.append(
        f"{job.model.num_parameters:,} parameters; on each of {job.placement.mesh.size} devices "
        f"{parameters:,} bytes of them, {whole:,} bytes with the optimizer's state"
    )
    return "\n".join(lines)


def _axes(entry: str | tuple[str, ...] | None) -> str:
    if entry is None:
        return "-"
    return entry if isinstance(entry, str) else "+".join(entry)


def _bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
