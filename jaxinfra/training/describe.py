"""Descriptions of a run: its set-up in words, the bytes of state per device, and the hardware and
software that computed its steps.

The environment is one line per session. A replay reads it to know whether its results must equal
the first ones bit for bit.
"""

import dataclasses
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxinfra.config import codec
from jaxinfra.config.data import OWN_SOURCE
from jaxinfra.config.finetune import BaseWeights
from jaxinfra.config.precision import Fp8Matmuls, Site
from jaxinfra.config.run import CheckpointConfig, RunConfig, TrainingConfig
from jaxinfra.data.corpora import Corpora, schedule_of
from jaxinfra.data.token_arrays import TokenArrays
from jaxinfra.parallel.place import path_name
from jaxinfra.runtime.files import drop_cut_line, read_log
from jaxinfra.training.job import Job
from jaxinfra.training.own_data import OwnTexts, Texts
from jaxinfra.training.xla_options import describe_options


def describe_job(job: Job) -> str:
    """Describes a run's size, precision, devices and length in one text."""
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


def describe_texts(texts: Texts, config: RunConfig) -> str:
    """Describes what a run trains on and evaluates on."""
    if not isinstance(texts, OwnTexts):
        return _describe_corpora(texts, config)
    if (rl := config.rl) is not None:
        held = rl.heldout_prompts or "nothing"
        return f"prompts: {rl.prompts}; {rl.algorithm} with reward {rl.reward}; held out: {held}"
    trained = "data=" if config.data.source == OWN_SOURCE else config.data.source
    held = ", ".join(texts.heldout)
    return f"training on {trained}; held out: {f'validation= ({held})' if held else 'nothing'}"


def _describe_corpora(corpora: Corpora, config: RunConfig) -> str:

    def side(arrays: TokenArrays | None) -> str:
        counted = ""
        if arrays is None:
            return "nothing (data.heldout_source names a text)"
        if arrays.counted is not None:
            counted = f", {_short(arrays.num_counted).rstrip()} of them the model's own"
        return (
            f"{_documents(arrays.num_documents)}, {_short(arrays.num_bytes)}B, "
            f"{_short(arrays.num_tokens).rstrip()} tokens{counted}"
        )

    validation = [
        f"validation set {name}: {side(each.heldout)}" for name, each in corpora.validation.items()
    ]
    notes = [note for each in corpora.sources.values() for note in each.notes]
    if not config.data.mixture:
        (own,) = corpora.sources.values()
        text = f"training text: {side(own.train)}; held out: {side(own.heldout)}"
        return "\n".join([text, *notes, *validation])
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
    return "\n".join([*lines, *notes, *validation])


def _documents(number: int) -> str:
    return "1 document" if number == 1 else f"{number:,} documents"


def _short(number: int) -> str:
    """A count and its unit's prefix: 1,234 as "1.23 k"."""
    for size, prefix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number} "


def describe_ranking(training: TrainingConfig, checkpoint: CheckpointConfig) -> str | None:
    """Returns a warning if checkpoints are ranked by held-out loss, but no evaluation runs at the
    steps that are saved.
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
    """Formats one row per parameter: bytes per device of the parameter, its summed gradient and its
    optimizer moments. Nothing is allocated.
    """
    state, leaves_of = job.abstract_state(), jax.tree_util.tree_leaves_with_path
    moments = [(path_name(path), leaf) for path, leaf in leaves_of(state.optimizer)]
    moments += [(f"average/{path_name(path)}", leaf) for path, leaf in leaves_of(state.average)]
    updates = jax.tree.leaves(job.placement.updates(job.model))
    gradients = jax.tree.leaves(job.placement.gradients(job.model))
    # Name, shape, sharding, what is said of its moments, and bytes: its own, gradient, moments.
    entries: list[tuple[str, Any, Any, str, tuple[int, int, int]]] = []
    for (path, leaf), gradient, update in zip(
        leaves_of(state.parameters), gradients, updates, strict=True
    ):
        name = path_name(path)
        own = [each for of, each in moments if of.endswith("/" + name)]
        held = (_bytes_per_device(leaf, gradient), sum(map(_bytes_per_device, own)))
        entries.append((name, leaf, leaf.sharding, _spec(update), (_bytes_per_device(leaf), *held)))
    for why, tree, shardings in (
        ("frozen", job.model.frozen, job.frozen_shardings),
        ("changed by rule", state.model_state, job.shardings.model_state),
    ):
        for (path, leaf), lies in zip(leaves_of(tree), jax.tree.leaves(shardings), strict=True):
            held = (_bytes_per_device(leaf, lies), 0, 0)
            entries.append((path_name(path), leaf, lies, why, held))
    totals = [sum(column) for column in zip(*(held for *_, held in entries), strict=True)]
    rows = [
        ("parameter", "shape", "dtype", "lies over", "its moments"),
        *(
            (name, " x ".join(map(str, leaf.shape)), leaf.dtype.name, _spec(lies), note)
            for name, leaf, lies, note, _ in entries
        ),
        ("total", "", "", "", ""),
    ]
    held = ("parameter bytes", "gradient bytes", "moment bytes")
    sizes = [held, *([f"{each:,}" for each in held] for *_, held in entries)]
    sizes.append([f"{total:,}" for total in totals])
    table = aligned([(*row, *each) for row, each in zip(rows, sizes, strict=True)], left=5)
    devices = job.placement.mesh.size
    return (
        f"{table}\n{job.model.num_parameters:,} parameters; bytes on each of {devices} device"
        f"{'s' if devices > 1 else ''}, activations apart: {sum(totals):,}"
    )


def aligned(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Formats rows as lines of aligned columns: the first ``left`` columns are left-justified, the
    others right-justified."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


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


_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Hardware, software and compiler flags of a session. They decide the order and rounding of
    floating-point sums; two sessions that differ in them may differ in the last bits.
    """

    jax_version: str
    device_kind: str
    num_processes: int
    mesh: dict[str, Any]  # of the config
    xla_flags: str

    @classmethod
    def of(cls, job: Job) -> "Environment":
        """Returns the environment in which this process computes a job's steps."""
        device = job.placement.mesh.devices.flat[0]
        return cls(
            jax_version=jax.__version__,
            device_kind=device.device_kind,
            num_processes=jax.process_count(),
            mesh=codec.to_dict(job.config.mesh),
            xla_flags=os.environ.get("XLA_FLAGS", ""),
        )

    def differences(self, other: "Environment") -> list[str]:
        """Lists the fields in which two environments differ, with both values. The XLA flag for
        the number of simulated CPU devices is ignored.
        """
        found = []
        for field in dataclasses.fields(self):
            mine, theirs = (_alike(getattr(each, field.name)) for each in (self, other))
            if mine != theirs:
                found.append(f"{field.name} {mine} here, {theirs} there")
        return found


def _alike(value: Any) -> Any:
    """A value in words, without what changes no bit: the CPU devices that a host shows."""
    if isinstance(value, dict):
        return " x ".join(f"{axis}={size}" for axis, size in value.items() if size != 1) or "1"
    if not isinstance(value, str):
        return value
    words = (word for word in value.split() if "host_platform_device_count" not in word)
    return " ".join(sorted(words))


def record_environment(file: Path, job: Job, *, step: int) -> None:
    """Appends this session's environment to the file, with the step after which it applies. Only
    process 0 writes.
    """
    if jax.process_index() > 0:
        return
    line = {"step": step, **dataclasses.asdict(Environment.of(job))}
    try:
        drop_cut_line(file)
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    except OSError as error:  # it only tells what happened
        _LOG.warning("%s: %s; a replay will not know what the run ran on", file, error.strerror)


def environment_of(file: Path, *, step: int) -> Environment | None:
    """Returns the environment of the last session that computed ``step``; None if it was not
    recorded.
    """
    lines, _ = read_log(file, holds=dict[str, Any])
    names = {field.name for field in dataclasses.fields(Environment)}
    known = [line for line in lines if line.keys() >= names and line.get("step", step) < step]
    return Environment(**{name: known[-1][name] for name in names}) if known else None
