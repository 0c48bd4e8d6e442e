"""A run's set-up in words, and what each device will hold of its state as a table."""

import math

import jax
from jax.sharding import NamedSharding

from jaxinfra.config.finetune import BaseWeights
from jaxinfra.config.precision import Fp8Matmuls, Site
from jaxinfra.config.run import CheckpointConfig, RunConfig, TrainingConfig
from jaxinfra.data.corpora import Corpora, schedule_of
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.parallel.place import path_name
from jaxinfra.training.job import Job
from jaxinfra.training.xla_options import describe_options


def describe_job(job: Job) -> str:
    """Size, precision, devices and length of a run."""
    config = job.config
    mesh = ", ".join(f"{a}={n}" for a, n in job.placement.mesh.shape.items() if n > 1)
    trained = ""
    if job.model.frozen:
        trained = f" ({job.model.num_parameters - job.model.num_frozen:,} of them trained)"
    lora = config.lora
    if lora is not None and lora.base is not BaseWeights.COMPUTE:
        trained += f", adapters over a base in {lora.base}"
    options = "" if job.options is None else f"; XLA options {describe_options(job.options)}"
    fp8 = _in_eight_bits(config.precision.fp8)
    choice = "".join(f"\n{each.describe()}" for each in (job.choice, job.gathers) if each)
    return (
        f"{job.model.num_parameters:,} parameters{trained}, {config.precision.policy}{fp8} on "
        f"{jax.devices()[0].device_kind} ({mesh or 'one device'}); {config.training.steps} steps "
        f"of {config.training.batch_size} x {config.training.sequence_length} tokens"
        f"{options}{choice}"
    )


_IN_EIGHT_BITS = {Site.PROJECTION: "projections", Site.EXPERTS: "routed experts"}


def _in_eight_bits(fp8: Fp8Matmuls | None) -> str:
    if fp8 is None:
        return ""
    out = {"first": fp8.first_layers_out, "last": fp8.last_layers_out}
    but = " and ".join(f"the {where} {count}" for where, count in out.items() if count)
    sites = " and ".join(_IN_EIGHT_BITS[site] for site in fp8.sites)
    by = f" with {sites} in fp8 by {fp8.scaling.value}"
    return f"{by} in all layers but {but}" if but else by


def describe_corpora(corpora: Corpora, config: RunConfig) -> str:
    """How much text there is to train and to evaluate on."""

    def side(arrays: TokenArrays) -> str:
        counted = ""
        if arrays.counted is not None:
            counted = f", {_short(arrays.num_counted).rstrip()} of them the model's own"
        return (
            f"{arrays.num_documents:,} documents, {_short(arrays.num_bytes)}B, "
            f"{_short(arrays.num_tokens).rstrip()} tokens{counted}"
        )

    validation = [
        f"validation set {name}: {side(each.heldout)}" for name, each in corpora.validation.items()
    ]
    if not config.data.mixture:
        (own,) = corpora.sources.values()
        text = f"training text: {side(own.train)}; held out: {side(own.heldout)}"
        return "\n".join([text, *validation])
    steps, size = config.training.steps, config.training.sequence_length
    shares = schedule_of(config.data, config.training).mean_shares(steps)
    lines = [f"mixture of {len(shares)} sources, by their parts of all {steps} steps:"]
    for (name, each), share in zip(corpora.sources.items(), shares, strict=True):
        there = each.train.num_tokens + each.train.num_documents
        epochs = share * steps * config.training.batch_size * size / there
        lines.append(
            f"  {name} {share:.2%}, {epochs:.3g} epochs: {side(each.train)}; held out: "
            f"{side(each.heldout)}"
        )
    return "\n".join([*lines, *validation])


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


def placement_table(job: Job) -> str:
    """What lies where: a row for each parameter with the bytes that a device holds of it, of its
    gradient while micro-batches are summed, and of its moments. Nothing is allocated.
    """
    state = job.abstract_state()
    gradients = jax.tree.leaves(job.placement.gradients(job.model))
    updates = jax.tree.leaves(job.placement.updates(job.model))
    moments = [
        (path_name(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer)
    ]
    moments += [
        (f"average/{path_name(path)}", leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.average)
    ]
    rows: list[tuple[str, ...]] = [
        ("parameter", "shape", "dtype", "lies over", "its moments", *_HELD)
    ]
    totals = [0, 0, 0]
    for (path, leaf), gradient, update in zip(
        jax.tree_util.tree_leaves_with_path(state.parameters), gradients, updates, strict=True
    ):
        name = path_name(path)
        held = (
            _bytes_per_device(leaf),
            _bytes_per_device(leaf, gradient),
            sum(_bytes_per_device(each) for path, each in moments if path.endswith("/" + name)),
        )
        totals = [total + bytes_ for total, bytes_ in zip(totals, held, strict=True)]
        rows.append(
            (
                name,
                " x ".join(map(str, leaf.shape)),
                leaf.dtype.name,
                _spec(leaf.sharding),
                _spec(update),
                *(f"{bytes_:,}" for bytes_ in held),
            )
        )
    untrained = [
        (path, leaf, sharding, why)
        for why, tree, shardings in (
            ("frozen", job.model.frozen, job.frozen_shardings),
            ("changed by rule", state.model_state, job.shardings.model_state),
        )
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(shardings), strict=True
        )
    ]
    for path, leaf, sharding, why in untrained:
        held = _bytes_per_device(leaf, sharding)
        totals[0] += held
        shape, lies = " x ".join(map(str, leaf.shape)), _spec(sharding)
        rows.append((path_name(path), shape, leaf.dtype.name, lies, why, f"{held:,}", "0", "0"))
    rows.append(("total", "", "", "", "", *(f"{total:,}" for total in totals)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if index >= len(row) - len(_HELD) else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    devices = job.placement.mesh.size
    lines.append(
        f"{job.model.num_parameters:,} parameters; bytes on each of {devices} device"
        f"{'s' if devices > 1 else ''}, activations apart: {sum(totals):,}"
    )
    return "\n".join(lines)


_HELD = ("parameter bytes", "gradient bytes", "moment bytes")


def _spec(sharding: NamedSharding) -> str:
    """Mesh axes by dim, such as ``-, fsdp, tensor``."""
    if all(entry is None for entry in sharding.spec):
        return "replicated"
    return ", ".join(_axes(entry) for entry in sharding.spec)


def _axes(entry: str | tuple[str, ...] | None) -> str:
    if entry is None:
        return "-"
    return entry if isinstance(entry, str) else "+".join(entry)


def _bytes_per_device(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding | None = None) -> int:
    sharding = sharding or leaf.sharding
    assert sharding is not None
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
