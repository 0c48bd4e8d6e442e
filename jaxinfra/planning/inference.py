"""Serving: what fits beside the weights, and prefill and decode by their rooflines."""

import bisect
import dataclasses
import math
from typing import Any

from jaxinfra.errors import ConfigError, UnsupportedError
from jaxinfra.planning.devices import Device
from jaxinfra.planning.kv import element_bits, kv_bytes, kv_bytes_per_token, kv_table
from jaxinfra.planning.model import PlannedModel, total_parameters
from jaxinfra.planning.served import PLAIN, WEIGHTS, ServedArray, require_format, served_arrays
from jaxinfra.quantize.recipes import DEFAULT_GROUP


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """How a model is served: one copy over ``devices`` GPUs, weights and cache split evenly.

    Times are rooflines of one device's share; communication between devices is not in them. Where a
    weight in few bits has no kernel, writing and reading it in 16 bits is in them.
    """

    devices: int = 1
    weights: str = PLAIN  # or a recipe of ``jaxinfra quantize``
    group: int = DEFAULT_GROUP  # inputs that share a scale, of weights in 4 bits
    cache: str = "bf16"

    def __post_init__(self) -> None:
        require_format(self.weights, self.group)
        element_bits(self.cache, width=1.0)

    @property
    def compute(self) -> str:
        """Format of the matmuls: 8 bits where inputs are rounded too, int8 at FP8's rate."""
        return "fp8" if self.weights.startswith("w8a8") else "bf16"

    def arrays(self, model: PlannedModel, device: Device) -> tuple[ServedArray, ...]:
        """What is kept of a model's weights."""
        kind = device.kind if self.devices == 1 else None
        return served_arrays(model, self.weights, self.group, kind)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One pass: its FLOPs and bytes on one device, and the time their roofline allows."""

    flops: float
    memory_bytes: float
    seconds: float
    bound: str  # compute or memory

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.memory_bytes


def ridge(device: Device, compute: str = "bf16") -> float:
    """FLOPs per byte at which memory and arithmetic take equally long (Williams et al. 2009)."""
    return device.flops[compute] / device.hbm_bytes_per_s


def attainable(device: Device, intensity: float, compute: str = "bf16") -> float:
    """FLOP/s at an intensity: the lower of the roof and the slope."""
    return min(device.flops[compute], intensity * device.hbm_bytes_per_s)


def weight_bytes(model: PlannedModel, device: Device, serving: Serving) -> int:
    """All weights of one copy, as an engine keeps them: codes, scales and zero points, and what
    stays in 16 bits.
    """
    return sum(each.nbytes for each in serving.arrays(model, device))


def cache_room(model: PlannedModel, device: Device, serving: Serving) -> float:
    """Bytes left for caches over all devices of a copy; negative where the weights do not fit."""
    whole = serving.devices * (device.hbm_bytes - device.reserved_bytes)
    return whole - weight_bytes(model, device, serving)


def max_batch(model: PlannedModel, device: Device, serving: Serving, *, context: int) -> int:
    """Sequences of ``context`` tokens whose caches fit beside the weights."""
    one = kv_bytes(model, batch=1, context=context, cache_format=serving.cache)
    return max(int(cache_room(model, device, serving) // one), 0)


def max_context(model: PlannedModel, device: Device, serving: Serving, *, batch: int = 1) -> int:
    """Tokens each of ``batch`` sequences may have; layers with windows need none beyond them."""
    room = cache_room(model, device, serving)

    def cached(context: int) -> float:
        return kv_bytes(model, batch=batch, context=context, cache_format=serving.cache)

    return max(bisect.bisect_right(range(1 << 40), room, key=cached) - 1, 0)


def prefill(
    model: PlannedModel, device: Device, serving: Serving, *, batch: int, length: int
) -> Phase:
    """One pass over prompts: weights are read once for all of their tokens."""
    flops = model.forward_flops(length, batch=batch)
    read = _read_weights(model, device, serving, tokens=batch * length)
    written = kv_bytes(model, batch=batch, context=length, cache_format=serving.cache)
    activations = 2.0 * 12 * model.config.num_layers * batch * length * model.config.model_dim
    return _phase(device, serving, flops, read + written + activations)


def decode(
    model: PlannedModel, device: Device, serving: Serving, *, batch: int, context: int
) -> Phase:
    """One new token for each sequence: every weight and every cached token is read."""
    flops = model.decode_flops(context, batch=batch)
    read = _read_weights(model, device, serving, tokens=batch)
    cached = kv_bytes(model, batch=batch, context=context, cache_format=serving.cache)
    return _phase(device, serving, flops, read + cached)


def _read_weights(model: PlannedModel, device: Device, serving: Serving, *, tokens: int) -> float:
    """Bytes of weights that a pass over so many tokens moves: a few tokens meet a few experts."""
    return sum(each.traffic(tokens) for each in serving.arrays(model, device))


def _phase(device: Device, serving: Serving, flops: float, size: float) -> Phase:
    flops, size = flops / serving.devices, size / serving.devices
    compute = serving.compute
    arithmetic = flops / (device.flops[compute] * device.matmul_efficiency[compute])
    traffic = size / (device.hbm_bytes_per_s * device.memory_efficiency)
    return Phase(
        flops=flops,
        memory_bytes=size,
        seconds=max(arithmetic, traffic),
        bound="compute" if arithmetic > traffic else "memory",
    )


def crossover_batch(
    model: PlannedModel, device: Device, serving: Serving, *, context: int
) -> int | None:
    """The least batch whose decode step is compute-bound at the peaks, or None: each sequence
    brings its own cache to read, so with long contexts no batch is large enough.

    Without caches it is the ridge point times the bytes per weight over two: H100 295, H200 206.
    """
    compute = serving.compute
    rate, bandwidth = device.flops[compute], device.hbm_bytes_per_s
    for exponent in range(25):
        batch = 1 << exponent
        flops = model.decode_flops(context, batch=batch)
        cached = kv_bytes(model, batch=batch, context=context, cache_format=serving.cache)
        read = _read_weights(model, device, serving, tokens=batch) + cached
        if flops / rate >= read / bandwidth:
            break
    else:
        return None
    a_sequence = (
        model.decode_flops(context) / rate
        - kv_bytes(model, batch=1, context=context, cache_format=serving.cache) / bandwidth
    )
    return math.ceil(_read_weights(model, device, serving, tokens=batch) / bandwidth / a_sequence)


def summary(
    model: PlannedModel, device: Device, serving: Serving, *, context: int, batch: int
) -> dict[str, Any]:
    """The figures of the tables and of ``--json``."""
    pre = prefill(model, device, serving, batch=batch, length=context)
    step = decode(model, device, serving, batch=batch, context=context)
    return {
        "devices": serving.devices,
        "weights": serving.weights,
        "cache": serving.cache,
        "context": context,
        "batch": batch,
        "weight_bytes": weight_bytes(model, device, serving),
        "weights_fit": cache_room(model, device, serving) > 0,
        "kv_bytes_per_token": kv_bytes_per_token(model, serving.cache),
        "max_batch": max_batch(model, device, serving, context=context),
        "max_context": max_context(model, device, serving),
        "trained_positions": model.config.max_positions,
        "prefill_s": pre.seconds,
        "prefill_intensity": pre.intensity,
        "prefill_bound": pre.bound,
        "decode_s": step.seconds,
        "decode_intensity": step.intensity,
        "decode_bound": step.bound,
        "decode_tokens_per_s": batch / step.seconds,
        "ridge_flops_per_byte": ridge(device, serving.compute),
        "compute_bound_batch": crossover_batch(model, device, serving, context=context),
        "compute_bound_batch_without_cache": crossover_batch(model, device, serving, context=0),
        "kv_table": kv_table(model),
        "by_weights": by_weights(model, device, serving, context=context, batch=batch),
        "by_cache": by_cache(model, device, serving, context=context),
        "by_batch": by_batch(model, device, serving, context=context),
    }


def by_weights(
    model: PlannedModel, device: Device, serving: Serving, *, context: int, batch: int
) -> list[dict[str, Any]]:
    """What is kept, what fits beside it and a decode step with each format of the weights;
    ``unsupported`` says why there is no such model.
    """
    plain = dataclasses.replace(serving, weights=PLAIN)
    slowest = decode(model, device, plain, batch=batch, context=context).seconds
    found: list[dict[str, Any]] = []
    for name in WEIGHTS:
        each = dataclasses.replace(serving, weights=name)
        try:
            size = weight_bytes(model, device, each)
        except (ConfigError, UnsupportedError) as error:
            found.append({"weights": name, "unsupported": str(error)})
            continue
        step = decode(model, device, each, batch=batch, context=context)
        found.append(
            {
                "weights": name,
                "weight_bytes": size,
                "bits_per_weight": 8 * size / total_parameters(model),
                "max_batch": max_batch(model, device, each, context=context),
                "decode_s": step.seconds,
                "over_bf16": slowest / step.seconds,
            }
        )
    return found


def by_cache(
    model: PlannedModel, device: Device, serving: Serving, *, context: int
) -> list[dict[str, Any]]:
    """What fits beside the weights with each format of the cache, and when decode turns."""
    forms = [dataclasses.replace(serving, cache=name) for name in ("bf16", "fp8", "int8", "int4")]
    return [
        {
            "cache": each.cache,
            "max_batch": max_batch(model, device, each, context=context),
            "max_context": max_context(model, device, each),
            "compute_bound_batch": crossover_batch(model, device, each, context=context),
        }
        for each in forms
    ]


def by_batch(
    model: PlannedModel, device: Device, serving: Serving, *, context: int
) -> list[dict[str, Any]]:
    """A decode step of growing batches, as many as fit and the first that does not."""
    most = max_batch(model, device, serving, context=context)
    sizes = [1 << exponent for exponent in range(17)]
    beyond = [size for size in sizes if size > most][:1]
    found: list[dict[str, Any]] = []
    for batch in sorted({size for size in sizes if size < most} | {max(most, 1)} | {*beyond}):
        step = decode(model, device, serving, batch=batch, context=context)
        found.append(
            {
                "batch": batch,
                "fits": batch <= most,
                "seconds": step.seconds,
                "tokens_per_s": batch / step.seconds,
                "intensity": step.intensity,
                "bound": step.bound,
            }
        )
    return found
