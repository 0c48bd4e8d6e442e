"""What a device loses in a step, from its trace and from what is known of the traced program."""

import collections
from collections.abc import Iterator

from jaxinfra.diagnostics.delay import Delay
from jaxinfra.diagnostics.waterfall import IDLE, Waterfall
from jaxinfra.hlo.matmul_shapes import MatmulShape
from jaxinfra.runtime.devices import DevicePeak, device_peak
from jaxinfra.training.profile import TracedStep

_SHARE = 0.02
"""Share of a step under which a cause is not worth a line."""
_REACHED = 0.6
"""Share of a device's published FLOP/s that matmuls of good shapes reach under its power limit."""
_REACHED_BYTES = 0.7
"""Share of its published bytes/s that they reach where they are bound by those."""
_LAUNCH_MS = 0.005
"""Of one launch, whatever it computes."""
_SLOW = 2.0
"""Times what it should take, from which a matmul counts as slow."""
_FREE = 0.5
"""Share of a device's memory that, left free, makes recomputation a waste."""
_TILE = 64
"""Sizes of matmuls that are no multiple of it leave parts of the tensor cores idle."""
_FEW_ROWS = 1024
"""Tokens per launch under which micro-batches are the first thing to look at."""
_WIDE = ("f32", "f64")
_RATES = {"f8": 2.0, "s8": 2.0}  # of the bf16 rate, by the beginning of a type's name


def device_delays(waterfall: Waterfall, traced: TracedStep | None = None) -> list[Delay]:
    """Exposed communication by axis, time in which the device has nothing to do, copies, matmuls
    that are slow or wider than they need be, and recomputation that frees memory which nobody uses.

    Args:
        traced: without it nothing is said of the last three.
    """
    least = _SHARE * waterfall.span_ms
    found = list(_communication(waterfall, least))
    idle = waterfall.by_kind().get(IDLE, 0.0)
    if idle >= 2 * least:
        found.append(
            Delay(
                cause="host dispatch",
                ms=idle,
                text="the device waits for its next launch",
                remedy="leave CUDA graphs on (xla_gpu_enable_command_buffer), free the host's "
                "cores, or give a step more tokens",
            )
        )
    copies = waterfall.by_kind().get("copy", 0.0)
    if copies >= 3 * least:
        found.append(
            Delay(
                cause="copies",
                ms=copies,
                text="arrays are copied between layouts or stacked over layers",
                remedy="unroll the layers (training.unroll)",
            )
        )
    if traced is not None:
        found += _matmuls(waterfall, traced, least)
        found += _recomputation(waterfall, traced, least)
    return found


def _communication(waterfall: Waterfall, least: float) -> Iterator[Delay]:
    by_axis = {axes: time.exposed_ms for axes, time in waterfall.by_axis.items()}
    if not by_axis:
        by_axis = {"devices": waterfall.by_kind().get("collective", 0.0)}
    kernels = [each for each in waterfall.kernels if each.kind == "collective"]
    longest = kernels[0].hlo_op if kernels else "collectives"
    for axes, ms in by_axis.items():
        if ms >= least:
            yield Delay(
                cause=f"communication over {axes}",
                ms=ms,
                text=f"nothing runs beside it; the longest is {longest}",
                remedy="set combine thresholds in training.xla_options, make micro-batches "
                "larger, or lay this axis over faster links (jaxinfra plan)",
            )


def matmul_ms(shape: MatmulShape, peak: DevicePeak) -> float:
    """Milliseconds that a matmul of a good shape takes once, with as many FLOPs and bytes."""
    rate = next((rate for name, rate in _RATES.items() if shape["dtype"].startswith(name)), 1.0)
    computing = shape["flops"] / (_REACHED * rate * peak.bf16_flops)
    moving = shape["bytes"] / (_REACHED_BYTES * peak.hbm_bytes_per_s)
    return 1e3 * max(computing, moving) + _LAUNCH_MS


def _matmuls(waterfall: Waterfall, traced: TracedStep, least: float) -> list[Delay]:
    peak = device_peak(traced["device_kind"])
    shapes = {each["instruction"]: each for each in traced["matmuls"]}
    if peak is None or not shapes:
        return []
    ms: dict[str, float] = collections.defaultdict(float)
    launches: dict[str, int] = {}
    for kernel in waterfall.kernels:
        if kernel.hlo_op in shapes:  # some take several kernels, such as a sum of parts
            ms[kernel.hlo_op] += kernel.ms
            launches[kernel.hlo_op] = max(launches.get(kernel.hlo_op, 0), kernel.launches)
    slow: list[tuple[float, str]] = []
    wide: list[tuple[float, str]] = []
    for name, took in ms.items():
        should = matmul_ms(shapes[name], peak) * launches[name] / waterfall.steps
        if took > _SLOW * should:
            kind = wide if shapes[name]["dtype"] in _WIDE else slow
            kind.append((took - should, name))
    found = []
    if (lost := sum(each for each, _ in wide)) >= 2 * least:
        shape = shapes[max(wide)[1]]
        found.append(
            Delay(
                cause=f"matmuls in {shape['dtype']}",
                ms=lost,
                text=f"{len(wide)} of them, the slowest {_described(shape)}",
                remedy="precision.policy=bf16, which multiplies in 16 bits and adds in 32",
            )
        )
    if (lost := sum(each for each, _ in slow)) >= 2 * least:
        _, worst = max(slow)
        shape = shapes[worst]
        rate = shape["flops"] * launches[worst] / waterfall.steps / ms[worst] / 1e9
        found.append(
            Delay(
                cause="slow matmuls",
                ms=lost,
                text=f"{_described(shape)}, runs at {rate:.0f} of {peak.bf16_flops / 1e12:.0f} "
                f"TFLOP/s, and {len(slow) - 1} others at less than half of what they could",
                remedy=_remedy(shape, traced["accumulation"]),
            )
        )
    return found


def _described(shape: MatmulShape) -> str:
    batch = f"{shape['batch']} x " if shape["batch"] > 1 else ""
    sizes = f"[{shape['rows']}, {shape['depth']}] by [{shape['depth']}, {shape['columns']}]"
    return f"{shape['instruction']}, {batch}{sizes} in {shape['dtype']}"


def _remedy(shape: MatmulShape, accumulation: int) -> str:
    if shape["rows"] < _FEW_ROWS and accumulation > 1:
        return (
            f"fewer and larger micro-batches: training.accumulation below {accumulation} gives "
            f"each launch more than {shape['rows']} rows"
        )
    if odd := [size for size in (shape["depth"], shape["columns"]) if size % _TILE]:
        return f"make {', '.join(map(str, odd))} a multiple of {_TILE}, better of {2 * _TILE}"
    if shape["rows"] < _FEW_ROWS:
        return f"give a step more than {shape['rows']} tokens per device"
    return "leave XLA's autotuning on (xla_gpu_autotune_level, xla_gpu_enable_triton_gemm)"


def _recomputation(waterfall: Waterfall, traced: TracedStep, least: float) -> list[Delay]:
    limit, needs = traced["limit_bytes"], traced["step_bytes"]
    again = sum(ms for scope, ms in waterfall.by_scope().items() if scope.endswith(" recomputed"))
    if limit is None or needs > _FREE * limit or again < 2 * least:
        return []
    return [
        Delay(
            cause="recomputation",
            ms=again,
            text=f"activations are computed twice, and the step takes {needs / 2**30:.1f} of "
            f"{limit / 2**30:.1f} GiB",
            remedy="training.remat=auto takes the least that fits",
        )
    ]
