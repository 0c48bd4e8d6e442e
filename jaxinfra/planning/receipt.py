"""Predictions beside the program itself: the real training step, compiled for devices that are not
there, read for its arguments, collectives and temporaries.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import jax

from jaxinfra.config.mesh import MeshConfig, ShardingConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.pipeline import PipelineConfig, PipelineSchedule
from jaxinfra.config.precision import PolicyName, PrecisionConfig
from jaxinfra.config.presets.runs import pretraining
from jaxinfra.config.run import AttentionImplementation, Remat, RunConfig
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.ops.target import compiling_for
from jaxinfra.parallel.program import collectives
from jaxinfra.planning.communication import argument_bytes, communication
from jaxinfra.planning.communication_call import Call, Step
from jaxinfra.planning.devices import Device, find_device
from jaxinfra.planning.from_config import shape_of
from jaxinfra.planning.gpu_target import compile_only_devices
from jaxinfra.planning.layout import Layout, Recompute
from jaxinfra.planning.memory import memory
from jaxinfra.planning.plan import traffic
from jaxinfra.training.job import lower_step, make_job


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One kind of array that the program communicates, and what was predicted of it."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    times: int  # executions of each
    predicted: int  # how many of them
    compiled: int
    reason: str  # of the prediction, or the program's own name for what it does

    @property
    def equal(self) -> bool:
        """Whether the program does what was predicted."""
        return self.predicted == self.compiled

    def num_bytes(self, count: int) -> int:
        """Bytes of so many, all executions together."""
        return count * math.prod(self.shape) * self.times * _item_bytes(self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What was predicted and what was compiled, bytes of one device."""

    target: str
    predicted_arguments: dict[str, int]
    argument_bytes: int
    lines: tuple[Line, ...]
    predicted_temporaries: float
    temporary_bytes: int
    # By kind, what a device sends: as the cost model counts it, and as compiled. For a GPU, whose
    # compiler is not predicted array by array.
    sent_bytes: dict[str, tuple[float, float]] | None = None

    @property
    def arguments_equal(self) -> bool:
        """To the byte."""
        return sum(self.predicted_arguments.values()) == self.argument_bytes

    @property
    def collectives_equal(self) -> bool:
        """Every array, its type, shape and number."""
        return all(line.equal for line in self.lines)

    def totals(self) -> dict[str, dict[str, int]]:
        """Counts and bytes by kind, predicted and compiled."""
        found: dict[str, dict[str, int]] = {}
        for line in self.lines:
            entry = found.setdefault(
                line.kind,
                {"predicted": 0, "compiled": 0, "predicted_bytes": 0, "compiled_bytes": 0},
            )
            entry["predicted"] += line.predicted * line.times
            entry["compiled"] += line.compiled * line.times
            entry["predicted_bytes"] += line.num_bytes(line.predicted)
            entry["compiled_bytes"] += line.num_bytes(line.compiled)
        return found

    def as_dict(self) -> dict[str, object]:
        """For ``--json``; only the lines that differ."""
        return {
            "target": self.target,
            "argument_bytes": {
                "predicted": sum(self.predicted_arguments.values()),
                "compiled": self.argument_bytes,
                "by_role": self.predicted_arguments,
            },
            "collectives": self.totals(),
            "equal": {
                "argument_bytes": self.arguments_equal,
                "collectives": self.collectives_equal,
            },
            "temporary_bytes": {
                "predicted": round(self.predicted_temporaries),
                "compiled": self.temporary_bytes,
            },
            **({} if self.sent_bytes is None else {"sent_bytes": self._sent()}),
            "differences": [dataclasses.asdict(line) for line in self.lines if not line.equal],
        }

    def _sent(self) -> dict[str, dict[str, int]]:
        assert self.sent_bytes is not None
        return {
            kind: {"predicted": round(predicted), "compiled": round(compiled)}
            for kind, (predicted, compiled) in self.sent_bytes.items()
        }


def run_config(
    model: ModelConfig, layout: Layout, *, policy: PolicyName, attention: AttentionImplementation
) -> RunConfig:
    """The run whose step a layout describes."""
    if layout.expert > 1:
        raise UnsupportedError(
            f"expert={layout.expert}: the mesh of this training step has no expert axis; use 1"
        )
    if layout.zero == 0:
        raise UnsupportedError("zero=0: use the replica axis in place of fsdp")
    if layout.remat is Recompute.SELECTIVE:
        raise UnsupportedError("remat=selective: fused attention keeps no scores")
    run = pretraining(model)
    training = dataclasses.replace(
        run.training,
        batch_size=layout.batch,
        sequence_length=layout.length,
        accumulation=layout.accumulation,
        remat=Remat(layout.remat.value),
        attention=attention,
        unroll=1 if layout.traits.scans_layers else model.num_layers,
    )
    pipeline = PipelineConfig()
    if layout.chunks > 1:
        pipeline = PipelineConfig(schedule=PipelineSchedule.INTERLEAVED, chunks=layout.chunks)
    return dataclasses.replace(
        run,
        training=training,
        precision=PrecisionConfig(policy=policy),
        pipeline=pipeline,
        mesh=MeshConfig(
            pipe=layout.pipe,
            replica=layout.replica,
            fsdp=layout.fsdp,
            context=layout.context,
            tensor=layout.tensor,
        ),
        sharding=ShardingConfig(zero=layout.zero, sequence_parallel=layout.sequence_parallel),
    )


def _refuse_pipeline(layout: Layout) -> None:
    if layout.pipe > 1:
        raise UnsupportedError(
            f"--compile with {layout.describe()}: calls are predicted over replica, fsdp, context "
            "and tensor; set pipe=1, or leave --compile out for the plan alone"
        )


def _refuse_unpredicted(layout: Layout) -> None:
    """What changes calls in ways that are not predicted array by array."""
    _refuse_pipeline(layout)
    for name, given in (
        ("sequence_parallel", layout.sequence_parallel),
        ("unroll", not layout.traits.scans_layers),
    ):
        if given:
            raise UnsupportedError(
                f"--compile cpu with {name}: its calls are not predicted one by one; leave it "
                "out, or use --compile gpu, which compares bytes by kind"
            )


def compile_on_cpu(model: ModelConfig, layout: Layout) -> Receipt:
    """The step on as many fake CPU devices (``jax_num_cpu_devices``).

    In fp32: XLA's CPU backend widens 16-bit matmuls, and aborts on some 16-bit all-reduces. Which
    arrays are communicated does not depend on it; on a GPU weights and activations travel in bf16.
    """
    _refuse_unpredicted(layout)
    here = jax.devices("cpu")
    if len(here) < layout.devices:
        raise UnsupportedError(
            f"--compile cpu for {layout.devices} devices: this process was started with "
            f"{len(here)} CPU devices; set jax_num_cpu_devices before JAX is used"
        )
    config = run_config(
        model, layout, policy=PolicyName.FP32, attention=AttentionImplementation.XLA
    )
    job = make_job(config, devices=here[: layout.devices])
    # LLVM's optimizations are half of the compile time and change no collective.
    options = {"xla_backend_optimization_level": 0}
    compiled = lower_step(job).compile(compiler_options=options)
    target = f"{layout.devices} CPU devices, fp32"
    return compare(model, layout, compiled, find_device("h200"), target=target)


def compile_for_gpu(
    model: ModelConfig,
    layout: Layout,
    device: Device,
    *,
    attention: AttentionImplementation = AttentionImplementation.HOPPER,
) -> Receipt:
    """The step for GPUs that are not there, bf16, with XLA's own buffer assignment.

    Arguments are predicted to the byte, temporaries within 15%. The GPU compiler gathers weights in
    bf16, scatters gradients instead of all-reducing them, and combines small arrays into one call:
    beside its calls stand the bytes that the cost model counts by kind.
    """
    _refuse_pipeline(layout)
    devices, facts = compile_only_devices(device, layout.devices)
    config = run_config(model, layout, policy=PolicyName.BF16, attention=attention)
    job = make_job(config, devices=devices)
    with compiling_for(facts):
        lowered = lower_step(job, platforms=("cuda",))
    target = f"{layout.devices} {device.name}, bf16, attention {attention.value}"
    compiled = lowered.compile()
    receipt = compare(model, layout, compiled, device, target=target, expected=())
    return dataclasses.replace(receipt, sent_bytes=_sent_bytes(model, layout, compiled, device))


def _sent_bytes(
    model: ModelConfig, layout: Layout, compiled: jax.stages.Compiled, device: Device
) -> dict[str, tuple[float, float]]:
    predicted = [
        (_HLO_KINDS.get(each.kind, each.kind), each.wire_bytes)
        for each in traffic(shape_of(model), layout, device)
    ]
    sent = [(each.kind, each.sent_bytes) for each in collectives(compiled)]

    def total(of: str, calls: list[tuple[str, float]]) -> float:
        return sum(size for kind, size in calls if kind == of)

    kinds = sorted({kind for kind, _ in (*predicted, *sent)})
    return {kind: (total(kind, predicted), total(kind, sent)) for kind in kinds}


_HLO_KINDS = {"permute": "collective-permute"}


def step_of(layout: Layout) -> Step:
    """What of a layout decides the program's communication."""
    return Step(
        rows=layout.batch // layout.accumulation,
        length=layout.length,
        replica=layout.replica,
        fsdp=layout.fsdp,
        context=layout.context,
        tensor=layout.tensor,
        zero=layout.zero,
        accumulation=layout.accumulation,
        recomputes=layout.remat is not Recompute.NONE,
        recomputes_outputs=layout.remat in (Recompute.NAMED, Recompute.FULL),
        recomputes_attention=layout.remat is Recompute.FULL,
    )


def compare(
    model: ModelConfig,
    layout: Layout,
    compiled: jax.stages.Compiled,
    device: Device,
    *,
    target: str,
    expected: Sequence[Call] | None = None,
) -> Receipt:
    """Reads a compiled step and sets the predictions beside it.

    Args:
        expected: calls to compare with; those of the CPU program by default.
    """
    shape, step = shape_of(model), step_of(layout)
    calls = communication(shape, step) if expected is None else expected
    predicted = Counter((call.kind, call.dtype, call.shape, call.times) for call in calls)
    reasons = {(call.kind, call.dtype, call.shape, call.times): call.reason for call in calls}
    found: Counter = Counter()
    for each in collectives(compiled):
        key = (each.kind, each.dtype, each.shape, each.times)
        found[key] += 1
        reasons.setdefault(key, f"compiled: {each.scope[-80:]}")
    analysis = compiled.memory_analysis()
    assert analysis is not None, "CPU and CUDA compilers report their memory"
    return Receipt(
        target=target,
        predicted_arguments=argument_bytes(shape, step),
        argument_bytes=analysis.argument_size_in_bytes,
        lines=tuple(
            Line(
                kind=kind,
                dtype=dtype,
                shape=size,
                times=times,
                predicted=predicted[kind, dtype, size, times],
                compiled=found[kind, dtype, size, times],
                reason=reasons[kind, dtype, size, times],
            )
            for kind, dtype, size, times in sorted({*predicted, *found}, key=str)
        ),
        predicted_temporaries=memory(shape, layout, device).temporaries,
        temporary_bytes=analysis.temp_size_in_bytes,
    )


def _item_bytes(dtype: str) -> int:
    """Of an HLO type: f32, bf16, s32, pred."""
    digits = "".join(char for char in dtype if char.isdigit())
    return int(digits) // 8 if digits else 1
