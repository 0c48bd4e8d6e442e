"""The first lines of ``jaxinfra plan``: its answer, the command that runs it, and the reasons."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfra.config.cache import CacheFormat
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.presets import MODELS, run_preset
from jaxinfra.config.run import Remat
from jaxinfra.config.validate import check_divides
from jaxinfra.errors import ConfigError
from jaxinfra.hf import quantization_of
from jaxinfra.planning.devices import Device
from jaxinfra.planning.inference import (
    PLAIN,
    Serving,
    cache_copies,
    cached_bytes,
    slow_weights,
    weight_bytes,
)
from jaxinfra.planning.layout import BY_STRENGTH, untrainable
from jaxinfra.planning.model import PlannedModel, config_file
from jaxinfra.planning.plan import Plan
from jaxinfra.planning.step import step_time
from jaxinfra.quantize.recipes import quantization_recipe
from jaxinfra.runtime.files import INFINITY, read_json

_LEAST_S = 0.001
_ROOM = 1.5  # what trained mixtures need, whose loads are balanced by a loss or a bias
_MOST_RUNNING = 256  # requests, as many as a server takes by default


def training_lines(plan: Plan, *, searched: bool) -> list[str]:
    """Returns the answer of a plan for training: its figures, the command and the reasons.

    Args:
        searched: whether the layout was found by the search.
    """
    layout, seconds = plan.layout, plan.time.total_s
    best = "fastest that fits: " if searched and plan.fits else ""
    mesh = f", {layout.describe()}" if layout.devices > 1 else ""
    lines = [
        f"{best}{plan.model.name} on {layout.devices} {plan.device.name}{mesh}: "
        f"{seconds:.4g} s per step, {plan.tokens_per_s_per_device:,.0f} tokens/s per GPU, MFU "
        f"{plan.mfu:.1%}, {plan.memory.total / 1e9:,.1f} of {plan.device.hbm_bytes / 1e9:,.0f} GB"
    ]
    command = train_command(plan)
    if command is not None and plan.fits:
        reason = untrainable(plan.model, plan.asked)
        lines.append(f"  {command}" if reason is None else f"  not trained here: {reason}")
    if layout.devices > plan.device.node_devices:
        nodes = -(-layout.devices // plan.device.node_devices)
        lines.append(
            f"  one process per GPU, on {nodes} nodes: by srun, or one jaxinfra launch per node "
            "(docs/multi-host.md)"
        )
    if not plan.fits:
        lines.append(
            f"  does not fit: {plan.memory.arrays / 1e9:,.1f} GB of arrays, and a run may use "
            f"{plan.device.budget_bytes / 1e9:,.1f}"
        )
    return [*lines, *_recomputation(plan), *_spare_room(plan)]


def train_command(plan: Plan) -> str | None:
    """Returns the ``jaxinfra train`` command of a plan; None if its formats cannot be trained.

    Where JAX's own share of the memory is too small, the command sets another.
    """
    layout, name = plan.asked, plan.model.name
    if layout.recipe != "bf16":
        return None
    start = name if name in MODELS else f"--init {shlex.quote(_directory(name))}"
    options = {
        "--mesh": layout.mesh.option,
        "--batch-size": layout.batch,
        "--accumulation": layout.accumulation,
        "--sequence-length": layout.length,
        "--remat": layout.remat.value,
        "--zero": layout.zero if layout.mesh.shards_state and 0 < layout.zero < 3 else None,
        "--sequence-parallel": "true" if layout.sequence_parallel else None,
        "--schedule": "interleaved" if layout.chunks > 1 else None,
        "--policy": "bf16",
    }
    words = [f"{option} {value}" for option, value in options.items() if value]
    if layout.mesh.expert > 1:
        chosen = {name: getattr(layout.exchange, name) for name in ("room_factor", "node_size")}
        words += [f"--set exchange.{name}={value:g}" for name, value in chosen.items() if value]
    if layout.chunks > 1:
        words.append(f"--set pipeline.chunks={layout.chunks}")
    if layout.keep_gathered is not None and layout.may_keep_gathered:
        words.append(f"--set sharding.keep_gathered={str(layout.keep_gathered).lower()}")
    if name in MODELS and layout.mesh.pipe > 1 and run_preset(name).training.unroll > 1:
        words.append("--set training.unroll=1")  # stages loop over their layers
    if layout.devices > plan.device.node_devices:
        words.append("--run runs/planned")  # processes share the directory that is named
    fraction = plan.device.memory_fraction(plan.memory.arrays)
    return " ".join([*_with_memory(fraction), "jaxinfra train", start, *words])


def _with_memory(fraction: float | None) -> list[str]:
    return [] if fraction is None else [f"XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:g}"]


def _directory(name: str) -> str:
    file = config_file(name)
    return name if file is None else str(file.parent)


def _spare_room(plan: Plan) -> list[str]:
    """Returns the cost of exchange buffers for any load, where experts are on other devices."""
    layout = plan.layout
    if layout.mesh.expert == 1 or layout.exchange.room_factor is not None:
        return []
    exchange = dataclasses.replace(layout.exchange, room_factor=_ROOM)
    tight = dataclasses.replace(layout, exchange=exchange)
    saved = plan.time.total_s - step_time(plan.model, tight, plan.device).total_s
    if saved < _LEAST_S:
        return []
    return [
        f"  the exchange between experts has room for any load; --room {_ROOM:g} (times the mean; "
        f"choices beyond it are dropped and counted) would take {1e3 * saved:,.0f} ms less"
    ]


def _recomputation(plan: Plan) -> list[str]:
    """Returns why the plan recomputes as it does, and not less."""
    forms, own = plan.by_remat(), plan.layout.remat
    why = []
    for form in BY_STRENGTH[: BY_STRENGTH.index(own)]:
        other = forms[form.value]
        lost = other.time.total_s - plan.time.total_s
        if not other.fits:
            why.append(f"{form.value} does not fit ({other.memory.total / 1e9:,.1f} GB)")
        elif lost <= 0:
            why.append(f"{form.value} would fit, too, and take {-1e3 * lost:,.0f} ms less")
        elif form is Remat.NONE:
            part, more = _grows_most(other, plan)
            why.append(
                f"none is {1e3 * lost:,.0f} ms slower, since what it keeps is written and read "
                f"again ({part} takes {1e3 * more:,.0f} ms more)"
            )
        else:
            why.append(f"{form.value} is {1e3 * lost:,.0f} ms slower")
    return [f"  remat={own.value}: {'; '.join(why)}"] if why else []


def _grows_most(plan: Plan, base: Plan) -> tuple[str, float]:
    """Returns the part of a step that takes most seconds more than in another plan."""
    growth = {name: s - base.time.parts.get(name, 0.0) for name, s in plan.time.parts.items()}
    part = max(growth, key=growth.__getitem__)
    return part, growth[part]


def brief_lines(plan: Plan, runners_up: Sequence[tuple[Plan, str]]) -> list[str]:
    """Returns the memory and the time of a plan, and what is next best, in a line each."""
    roles = dataclasses.asdict(plan.memory).items()
    memory = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in roles)
    parts = sorted(plan.time.parts.items(), key=lambda each: -each[1])[:5]
    time = ", ".join(f"{name} {seconds / plan.time.total_s:.0%}" for name, seconds in parts)
    gathered = [] if plan.gathers is None else [f"  gathered weights {plan.gathers.describe()}"]
    others = [f"  next: {each.layout.describe()}, {why}" for each, why in runners_up[:3]]
    return [*gathered, f"  GB: {memory}", f"  time: {time}", *others]


def serving_lines(
    model: PlannedModel, device: Device, serving: Serving, figures: Mapping[str, Any]
) -> list[str]:
    """Returns the answer of a plan for serving: its figures, the commands and the reasons.

    Args:
        figures: ``inference.summary`` of these settings.
    """
    most, context = figures["max_batch"], figures["context"]
    on = f"{model.name} on {serving.devices} {device.name}"
    weights = f"{figures['weight_bytes'] / 1e9:,.1f} GB of {serving.weights} weights"
    if not most:
        return [
            f"{on}: {weights} and a KV cache of {context:,} tokens do not fit the "
            f"{serving.devices * device.budget_bytes / 1e9:,.1f} GB that a server may use; add "
            "--devices, shorten --context, or take --weights or --cache of fewer bits"
        ]
    one, *_, full = [each for each in figures["by_batch"] if each["fits"]] * 2
    slow = [
        f"  {reason}"
        for batch in dict.fromkeys((1, most))
        if (reason := slow_weights(model, device, serving, batch=batch, context=context))
    ]
    return [
        f"{on}: {weights}; {most:,} requests of {context:,} tokens fit, with KV caches in "
        f"{serving.cache}",
        f"  1 request: {1e3 * one['seconds']:,.2f} ms per token; {most:,} together: "
        f"{1e3 * full['seconds']:,.1f} ms per token, {full['tokens_per_s']:,.0f} tokens/s; the "
        f"first token after {1e3 * figures['prefill_s']:,.0f} ms",
        *(f"  {each}" for each in _serve_commands(model, device, serving, most, context)),
        *(f"  {each}" for each in _devices_used(model, device, serving)),
        *slow,
    ]


def serving_mesh(model: PlannedModel, devices: int) -> MeshConfig:
    """Returns the mesh that serves one copy of a model on ``devices`` devices."""
    if model.num_experts and model.num_experts % devices == 0:
        return MeshConfig(fsdp=devices, expert=devices)
    return MeshConfig(tensor=devices)


def _serve_commands(
    model: PlannedModel, device: Device, serving: Serving, running: int, context: int
) -> list[str]:
    """Returns the commands that quantize and serve a model as planned."""
    mesh = serving_mesh(model, serving.devices)
    try:
        check_divides(model.config, mesh)
    except ConfigError as error:
        return [f"not served on {serving.devices} devices: {error}"]
    file = config_file(model.name)
    directory = "DIR" if file is None else shlex.quote(str(file.parent))
    lines = [f"DIR: a directory with the weights of {model.name}"] if file is None else []
    is_quantized = (
        file is not None and quantization_of(read_json(file, constants=INFINITY)) is not None
    )
    if serving.weights != PLAIN and not is_quantized:
        source, directory = directory, f"{directory}-{serving.weights}"
        text = " --calibrate TEXT" if quantization_recipe(serving.weights).needs_text else ""
        group = f" --group-size {serving.group}" if serving.weights.endswith("int4") else ""
        lines.append(
            f"jaxinfra quantize {source} {directory} --recipe {serving.weights}{group}{text}"
        )
    most = model.config.max_positions
    if context > most:
        lines.append(f"requests of at most {most:,} tokens, the positions that {model.name} has")
    running, context = min(running, _MOST_RUNNING), min(context, most)
    caches = cached_bytes(model, serving, batch=running, context=context)
    needs = (weight_bytes(model, device, serving) + caches) / serving.devices
    is_plain = serving.cache not in tuple(CacheFormat)
    options = {
        "--mesh": mesh.option,
        "--max-running": running,
        "--max-context": context,
        "--cache": None if is_plain else serving.cache,
        "--policy": serving.cache if is_plain else "bf16",
    }
    words = [f"{option} {value}" for option, value in options.items() if value]
    start = _with_memory(device.memory_fraction(needs))
    return [*lines, " ".join([*start, "jaxinfra serve", directory, *words])]


def _devices_used(model: PlannedModel, device: Device, serving: Serving) -> list[str]:
    """Returns how several devices share one copy of a model."""
    if serving.devices == 1:
        return []
    copies = cache_copies(model, serving.devices)
    caches = "KV caches are split over them"
    if copies == serving.devices:
        caches = "each holds all KV caches"
    elif copies > 1:
        caches = f"KV caches are split over them, each part held {copies:g} times"
    nodes = -(-serving.devices // device.node_devices)
    several = f"; {nodes} nodes: start it on each (docs/multi-host.md)" if nodes > 1 else ""
    return [
        f"{serving.devices} devices hold one copy of the weights; {caches}; times leave out what "
        f"they send one another{several}"
    ]
