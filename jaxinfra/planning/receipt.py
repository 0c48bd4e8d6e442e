"""Comparison of a plan with the real training step, compiled for devices that are not present.

The comparison covers the compiled step's arguments, temporaries and communication. Communication
is compared by mesh axis and purpose, in bytes of whole arrays. So it does not matter whether XLA
sums by a reduce-scatter, or by an all-reduce and a slice. The report also shows the collectives and
the bytes that a device sends. Where bytes differ by more than ``TOLERANCE``, it lists the program's
largest collectives by name.

The CUDA plugin compiles for absent GPUs from a description of the chip. Its entry points are
private to JAX and the plugin (seen to work in 0.11.2), so this module is the only one to use them.
Each one that is absent raises an error that names it.
"""

import collections
import dataclasses
import functools
import importlib.util
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jaxlib import xla_client

from jaxinfra.axes import MeshAxis
from jaxinfra.config.mesh import EXPERT, NODES, ShardingConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.run import AttentionImplementation
from jaxinfra.errors import UnsupportedError
from jaxinfra.hlo.buffers import step_bytes
from jaxinfra.hlo.collective_bytes import sent_bytes
from jaxinfra.hlo.program import Collective, collectives, collectives_in_kernels
from jaxinfra.model.definition import define_model
from jaxinfra.ops.quantized import Facts, compiling_for
from jaxinfra.parallel.execution import execution_on
from jaxinfra.parallel.mesh import state_rules
from jaxinfra.parallel.place import Placement
from jaxinfra.planning.devices import Device, find_device
from jaxinfra.planning.layout import Layout, run_config
from jaxinfra.planning.memory import memory
from jaxinfra.planning.model import plan_model
from jaxinfra.planning.plan import traffic
from jaxinfra.training.job import lower_step, make_job

_PLUGINS = (("jax_plugins.xla_cuda13", 13000), ("jax_plugins.xla_cuda12", 12090))

# Of the description, what differs between the chips of constants/*.json.
_CHIPS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}


def compile_only_devices(device: Device, count: int) -> tuple[list[Any], Facts]:
    """Returns ``count`` absent GPUs to compile for, and their ``Facts``, which select kernels.

    Raises:
        UnsupportedError: no CUDA plugin, a plugin already in use, or an undescribed GPU.
    """
    if device.name not in _CHIPS:
        raise UnsupportedError(
            f"compiling for {device.name} where it is absent: chips described here are "
            f"{', '.join(_CHIPS)}; name one of them, or compile on a machine with {device.name}"
        )
    plugin, cuda = _plugin()
    api = _load(str(plugin))
    nodes = max(count // device.node_devices, 1)
    layout = f"{nodes}x1x{count // nodes}"
    topology = xla_client.make_c_api_device_topology(
        api, layout, target_config=_description(device, cuda), topology=layout
    )
    facts = Facts(kind=_CHIPS[device.name], is_gpu=True, capability=(9, 0), cuda=cuda)
    return list(topology._make_compile_only_devices()), facts


def _plugin() -> tuple[Path, int]:
    for name, cuda in _PLUGINS:
        found = importlib.util.find_spec("jax_plugins")
        spec = importlib.util.find_spec(name) if found is not None else None
        if spec is not None and spec.submodule_search_locations:
            library = Path(next(iter(spec.submodule_search_locations))) / "xla_cuda_plugin.so"
            if library.exists():
                return library, cuda
    raise UnsupportedError(
        "compiling for an absent GPU needs the CUDA plugin, which is missing: install "
        "jaxinfra[cuda] (a GPU is not needed), compile on a machine with the GPU, or, to plan, "
        "give --compile cpu"
    )


@functools.cache
def _load(library: str) -> Any:
    """The plugin's interface. JAX finds an installed plugin too and must then not load it again, so
    this runs before JAX starts its backends.
    """
    if xla_client.pjrt_plugin_loaded("cuda"):
        raise UnsupportedError(
            "compiling for an absent GPU: JAX has loaded the CUDA plugin already; compile before "
            "anything else uses JAX, in a process of its own"
        )
    api = xla_client.load_pjrt_plugin_dynamically("cuda", library)
    xla_client.initialize_pjrt_plugin("cuda")
    # It would say that the plugin is loaded already.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)
    return api


def _description(device: Device, cuda: int) -> str:
    # XLA puts calls of libraries into CUDA graphs only if it is told versions that can do so.
    version = f"{cuda // 1000}.{cuda % 1000 // 10}.0"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {device.num_sms}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(device.hbm_bytes_per_s)}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {device.hbm_bytes}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "{version}"
  runtime_version: "{version}"
  compile_time_toolkit_version: "{version}"
}}
platform_name: "CUDA"
device_description_str: "{_CHIPS[device.name]}"
"""


TOLERANCE = 0.02
"""Formulas leave out token ids, and count vectors as if they were matrices."""

_PURPOSES = {
    "all-gather": "gather",
    "reduce-scatter": "sum",
    "all-reduce": "sum",
    "all-to-all": "exchange",
    "permute": "send",
    "collective-permute": "send",
}
_COPIES = {"scatter_sum_by_copies": "sum", "gather_by_copies": "gather"}
"""Purposes of permutes by the function of ``parallel.copies`` that makes them."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Exchanged:
    """Bytes that one device exchanges per step over a mesh axis for a purpose."""

    array_bytes: float = 0.0  # of whole arrays, over all executions
    sent_bytes: float = 0.0
    kinds: set[str] = dataclasses.field(default_factory=set)
    by_name: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, kind: str, array_bytes: float, sent: float, *, name: str = "") -> None:
        """Adds the bytes of one more collective."""
        self.array_bytes += array_bytes
        self.sent_bytes += sent
        self.kinds.add(kind)
        self.by_name[name] += round(array_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Predicted and compiled communication bytes of one mesh axis and purpose."""

    axis: str
    purpose: str  # gather, sum, exchange, send
    predicted: Exchanged
    compiled: Exchanged

    @property
    def error(self) -> float:
        """Relative error of the predicted bytes; infinite if zero bytes were predicted."""
        predicted = self.predicted.array_bytes
        return self.compiled.array_bytes / predicted - 1 if predicted else math.inf

    @property
    def holds(self) -> bool:
        """Tells whether the compiled bytes are within ``TOLERANCE`` of the predicted ones."""
        return abs(self.error) <= TOLERANCE

    @property
    def calls(self) -> dict[str, int]:
        """Names and bytes of the program's largest collectives, if the prediction is wrong."""
        return {} if self.holds else dict(self.compiled.by_name.most_common(6))

    def as_dict(self) -> dict[str, object]:
        """Returns the axis, the purpose and both numbers of bytes, for ``--json``."""
        sides = {
            name: {
                "kinds": sorted(each.kinds),
                "array_bytes": round(each.array_bytes),
                "sent_bytes": round(each.sent_bytes),
            }
            for name, each in (("predicted", self.predicted), ("compiled", self.compiled))
        }
        named = {"axis": self.axis, "purpose": self.purpose}
        return {**named, **sides, "holds": self.holds, "calls": self.calls}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Predicted and compiled bytes per device: arguments, temporaries and communication."""

    target: str
    predicted_arguments: dict[str, int]
    argument_bytes: int
    lines: tuple[Line, ...]
    predicted_temporaries: float
    temporary_bytes: int
    step_bytes: int  # arguments, temporaries and new results
    budget_bytes: float | None  # what a run on the device may use; None for CPU devices

    @property
    def fits(self) -> bool:
        """Tells whether the compiled step fits in what a run on the device may use."""
        return self.budget_bytes is None or self.step_bytes <= self.budget_bytes

    @property
    def arguments_equal(self) -> bool:
        """Tells whether the compiled step's arguments have exactly the predicted bytes."""
        return sum(self.predicted_arguments.values()) == self.argument_bytes

    @property
    def axes_equal(self) -> bool:
        """Tells whether the compiled step communicates over exactly the predicted mesh axes."""
        predicted, compiled = (
            {line.axis for line in self.lines if getattr(line, side).array_bytes}
            for side in ("predicted", "compiled")
        )
        return predicted == compiled

    def as_dict(self) -> dict[str, object]:
        """Returns all predicted and compiled bytes, for ``--json``."""
        return {
            "target": self.target,
            "argument_bytes": {
                "predicted": sum(self.predicted_arguments.values()),
                "compiled": self.argument_bytes,
                "by_role": self.predicted_arguments,
            },
            "equal": {
                "argument_bytes": self.arguments_equal,
                "axes": self.axes_equal,
                "exchanged": all(line.holds for line in self.lines),
            },
            "temporary_bytes": {
                "predicted": round(self.predicted_temporaries),
                "compiled": self.temporary_bytes,
            },
            "step_bytes": self.step_bytes,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "exchanged": [line.as_dict() for line in self.lines],
        }


def _refuse_pipeline(layout: Layout) -> None:
    if layout.mesh.pipe > 1:
        raise UnsupportedError(
            f"--compile with {layout.describe()}: a compiled pipeline does not say how often its "
            "loops run, so its calls cannot be counted; set pipe=1, or leave --compile out"
        )


def compile_on_cpu(model: ModelConfig, layout: Layout) -> Receipt:
    """Compiles a layout's training step for as many fake CPU devices as it has devices.

    The step and its predictions are in fp32: XLA's CPU backend widens 16-bit matmuls, and aborts on
    some 16-bit all-reduces.
    """
    _refuse_pipeline(layout)
    here = jax.devices("cpu")
    if len(here) < layout.devices:
        raise UnsupportedError(
            f"--compile cpu for {layout.devices} devices: this process was started with "
            f"{len(here)} CPU devices; set jax_num_cpu_devices before JAX is used"
        )
    xla = AttentionImplementation.XLA
    config = run_config(model, layout, policy=PolicyName.FP32, attention=xla)
    job = make_job(config, devices=here[: layout.devices])
    # LLVM's optimizations are half of the compile time and change no collective.
    options = {"xla_backend_optimization_level": 0}
    compiled = lower_step(job).compile(compiler_options=options)
    layout = dataclasses.replace(layout, recipe="fp32")
    target = f"{layout.devices} CPU devices, fp32"
    found = compare(model, layout, compiled, find_device("h200"), target=target)
    return dataclasses.replace(found, budget_bytes=None)


def compile_for_gpu(model: ModelConfig, layout: Layout, device: Device) -> Receipt:
    """Compiles a bf16 training step for absent GPUs, with XLA's own buffer assignment.

    Predicted arguments must match to the byte, temporaries within 15%.
    """
    _refuse_pipeline(layout)
    devices, facts = compile_only_devices(device, layout.devices)
    config = run_config(model, layout, attention=AttentionImplementation.HOPPER)
    with compiling_for(facts):
        job = make_job(config, devices=devices)
        lowered = lower_step(job, platforms=("cuda",))
    target = f"{layout.devices} {device.name}, bf16, attention hopper"
    return compare(model, layout, lowered.compile(), device, target=target)


def compare(
    model: ModelConfig,
    layout: Layout,
    compiled: jax.stages.Compiled,
    device: Device,
    *,
    target: str,
) -> Receipt:
    """Compares a compiled step's arguments, temporaries and communication with predictions."""
    planned = plan_model(model)
    predicted: dict[tuple[str, str], Exchanged] = {}
    for each in traffic(planned, layout, device):
        entry = predicted.setdefault((each.axis, _PURPOSES[each.kind]), Exchanged())
        entry.add(each.kind, each.array_bytes, each.wire_bytes)
    calls = [*collectives(compiled), *collectives_in_kernels(compiled)]
    found = exchanged(calls, layout.axes)
    analysis = compiled.memory_analysis()
    assert analysis is not None, "CPU and CUDA compilers report their memory"
    return Receipt(
        target=target,
        predicted_arguments=argument_bytes(model, layout),
        argument_bytes=analysis.argument_size_in_bytes,
        lines=tuple(
            Line(
                axis=axis,
                purpose=purpose,
                predicted=predicted.get((axis, purpose), Exchanged()),
                compiled=found.get((axis, purpose), Exchanged()),
            )
            for axis, purpose in sorted({*predicted, *found})
        ),
        predicted_temporaries=memory(planned, layout, device).temporaries,
        temporary_bytes=analysis.temp_size_in_bytes,
        step_bytes=step_bytes(compiled),
        budget_bytes=device.budget_bytes,
    )


def exchanged(
    calls: Iterable[Collective], mesh: Mapping[str, int]
) -> dict[tuple[str, str], Exchanged]:
    """Sums the bytes of a program's collectives by axis and purpose, leaving out scalars.

    A call over several axes counts as one call per axis, ``fsdp`` first. Each further call's array
    is divided by the sizes of the axes before it, so the total of bytes sent is unchanged. An
    exchange of expert tokens counts for the expert axis, or for its nodes. Other calls over a part
    of an axis count for that axis. Permutes by which weights are gathered or gradients summed count
    as gathers or sums.

    Args:
        mesh: axis sizes in mesh order, with the expert axis last.
    """
    axes = {axis: size for axis, size in mesh.items() if axis != EXPERT}
    found: dict[tuple[str, str], Exchanged] = {}
    for call in calls:
        if not call.shape:
            continue
        name = f"{call.kind} {call.dtype}{list(call.shape)} x {call.times}: {call.scope[-60:]}"
        size, purpose = call.array_bytes, _PURPOSES[call.kind]
        if copied := [_COPIES[each] for each in _COPIES if each in call.scope]:
            purpose, size = copied[0], size * call.num_devices / (call.num_devices - 1)
        over = sorted(call.axes(axes), key=lambda axis: axis != MeshAxis.FSDP)
        if call.kind == "all-to-all" and "exchange" in call.scope:
            over = [NODES if "exchange/nodes" in call.scope else EXPERT]
        for axis in over:
            entry = found.setdefault((axis, purpose), Exchanged())
            members = mesh[axis] if len(over) > 1 else call.num_devices
            sent = call.array_bytes if copied else sent_bytes(call.kind, size, members)
            entry.add(f"{call.kind}{' in kernels' * call.in_kernel}", size, sent, name=name)
            size /= members
    return found


def argument_bytes(model: ModelConfig, layout: Layout) -> dict[str, int]:
    """Returns a step's argument bytes per device: fp32 weights, two moments, counters, batch."""
    sizes = layout.mesh.device_axes
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    placement = Placement(
        mesh=mesh, rules=state_rules(ShardingConfig(zero=layout.zero), layout.mesh)
    )
    definition = define_model(model, execution_on())

    def elements(shardings: dict) -> int:
        shares = jax.tree.map(
            lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)),
            definition.shapes,
            shardings,
        )
        return sum(jax.tree.leaves(shares))

    return {
        "weights": 4 * elements(placement.parameters(definition)),
        "moments": 8 * elements(placement.updates(definition)),
        # step, skipped, skipped in a row, the loss scale's two, Adam's and the schedule's counts,
        # and a key of two words.
        "counters": 4 * 9,
        "batch": 5 * 4 * layout.micro_tokens * layout.accumulation,
    }
