"""Predictions for serving on GPUs: the KV caches that fit, and prefill and decode times.

Weights have the bytes of their stored format; times are rooflines of bytes read and FLOPs.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax

from jaxinfra import axes
from jaxinfra.errors import ConfigError, UnsupportedError, nearest
from jaxinfra.hf import quantization_of
from jaxinfra.model.definition import ParameterInfo, by_path, define_model, is_weight
from jaxinfra.ops.quantized import (
    MOST_ROWS_MEASURED,
    Activations,
    QuantizedWeight,
    kept_for_kernel,
    takes_any_rows,
)
from jaxinfra.parallel.execution import execution_on
from jaxinfra.planning.devices import Device, find_device
from jaxinfra.planning.memory import (
    element_bits,
    kv_bytes,
    kv_bytes_per_token,
    kv_table,
    sequence_state_bytes,
)
from jaxinfra.planning.model import PlannedModel, config_file, is_expert, total_parameters
from jaxinfra.quantize.held import quantized_shapes
from jaxinfra.quantize.recipes import (
    DEFAULT_GROUP,
    GROUPS,
    RECIPES,
    config_of,
    quantization_recipe,
)
from jaxinfra.runtime.files import INFINITY, read_json
from jaxinfra.serving.engine.fit import JAX_FRACTION, MemoryNeeds
from jaxinfra.serving.engine.options import options_on
from jaxinfra.serving.engine.program_set import listed_programs, most_temporaries

PLAIN = "bf16"
WEIGHTS = (PLAIN, *RECIPES)
"""Formats of weights: plain ones, and what ``jaxinfra quantize`` makes."""

_OPTIONS = options_on("gpu")
_TABLES = ("embedding/table", "positions/table")  # of which a token reads a row
_REBUILT = "attention/kv_up/weight"  # of latent attention: decode dequantizes it, then cuts it
_PLAIN_BYTES = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServedArray:
    """One of a served model's arrays, stacked over all layers that have it."""

    stored: jax.ShapeDtypeStruct | QuantizedWeight  # shapes in the engine's stored format
    active: float = 1.0  # fraction that one token uses; below 1 for experts
    num_rows: int | None = None  # rows of a table that tokens look up; None: it is read whole
    is_dequantized: bool = False  # no kernel multiplies it in its stored format
    is_expert: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array in its stored format, over all layers."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.stored))

    def traffic(self, tokens: int) -> float:
        """Returns the bytes of memory traffic for this array in a pass over ``tokens`` tokens.

        The pass reads the array. Where a weight is dequantized first, the pass also writes and
        reads the 16-bit copy.
        """
        if self.num_rows is not None:
            return self.nbytes * min(tokens, self.num_rows) / self.num_rows
        # Expected share of experts that some token is sent to.
        met = 1.0 - (1.0 - self.active) ** tokens
        if not isinstance(self.stored, QuantizedWeight):
            return met * self.nbytes
        plain = self.stored.size * _PLAIN_BYTES
        if self.is_expert:  # as many are dequantized as tokens have choices, or all of a layer
            dequantized = min(tokens * self.active, 1.0)
            return dequantized * (self.nbytes + plain) + met * plain
        if self.is_dequantized and self.stored.format.activations is Activations.INT8:
            # XLA multiplies the codes themselves, of more than one row transposed.
            return self.nbytes * (1.0 if tokens == 1 else 3.0)
        is_many = tokens > MOST_ROWS_MEASURED and not takes_any_rows(self.stored)
        if self.is_dequantized or is_many:
            return self.nbytes + 2.0 * plain
        return self.nbytes


def stored_format(name: str) -> tuple[str, int]:
    """Returns the weight format and group size that a model directory's config names.

    Raises:
        ConfigError: ``jaxinfra quantize`` does not write the format.
    """
    file = config_file(name)
    stored = None if file is None else quantization_of(read_json(file, constants=INFINITY))
    if stored is None:
        return PLAIN, DEFAULT_GROUP
    for each, group in itertools.product(RECIPES, GROUPS):
        written = config_of(quantization_recipe(each, group=group), kept=[])
        if quantization_of({"quantization_config": written}) == stored:
            return each, group
    raise ConfigError(
        f"{file}: weights in {stored}: planning knows the formats that jaxinfra quantize writes; "
        "name the nearest with --weights"
    )


@functools.lru_cache(maxsize=64)
def served_arrays(
    model: PlannedModel, weights: str, group: int, kind: str | None
) -> tuple[ServedArray, ...]:
    """Returns all arrays of a served model, each in its stored format.

    Args:
        group: number of inputs that share a scale, for weights in 4 bits.
        kind: JAX's name of the serving device; None for several devices, which have no kernel for
            quantized weights.

    Raises:
        ConfigError, UnsupportedError: weights that ``jaxinfra quantize`` would not make.
    """
    recipe = None if weights == PLAIN else quantization_recipe(weights, group=group)
    held = by_path(quantized_shapes(model.config, recipe), is_leaf=is_weight)
    table = {info.path: info for info in define_model(model.config, execution_on()).table()}
    is_tied = model.config.tie_embeddings
    return tuple(_served(table[path], leaf, kind, is_tied=is_tied) for path, leaf in held.items())


def _served(info: ParameterInfo, leaf: Any, kind: str | None, *, is_tied: bool) -> ServedArray:
    kept = None
    if isinstance(leaf, QuantizedWeight) and kind is not None:
        kept = kept_for_kernel(leaf, kind)
    # A tied table is multiplied with for the logits.
    is_table = info.path in _TABLES and not (is_tied and info.path == _TABLES[0])
    return ServedArray(
        stored=leaf if kept is None else kept,
        active=info.active,
        num_rows=info.shape[0] if is_table else None,
        is_dequantized=kept is None or info.path.endswith(_REBUILT),
        is_expert=is_expert(info),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Settings of serving one model copy on ``devices`` GPUs, weights and KV cache split evenly.

    Predicted times are rooflines of one device's part, without communication between devices. A
    quantized weight without a kernel adds the time to write and read it in 16 bits.
    """

    devices: int = 1
    weights: str = PLAIN  # or a recipe of ``jaxinfra quantize``
    group: int = DEFAULT_GROUP  # inputs that share a scale, of weights in 4 bits
    cache: str = "bf16"

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ConfigError(
                f"unknown weight format {self.weights!r}{nearest(self.weights, WEIGHTS)}; known: "
                f"{', '.join(WEIGHTS)}"
            )
        quantization_recipe(RECIPES[0], group=self.group)
        element_bits(self.cache, width=1.0)

    @property
    def compute(self) -> str:
        """Format of the matmuls: 8-bit where activations are quantized too (int8 at FP8's rate)."""
        return "fp8" if self.weights.startswith("w8a8") else "bf16"

    def arrays(self, model: PlannedModel, device: Device) -> tuple[ServedArray, ...]:
        """Returns the model's arrays in the formats that they are served in."""
        kind = device.kind if self.devices == 1 else None
        return served_arrays(model, self.weights, self.group, kind)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One pass of prefill or decode: FLOPs and bytes per device, and its time by the roofline."""

    flops: float
    memory_bytes: float
    seconds: float
    bound: str  # compute or memory

    @property
    def intensity(self) -> float:
        """The pass's arithmetic intensity in FLOPs per byte."""
        return self.flops / self.memory_bytes


def ridge(device: Device, compute: str = "bf16") -> float:
    """Returns the roofline's ridge point in FLOPs per byte (Williams et al. 2009)."""
    return device.flops[compute] / device.hbm_bytes_per_s


def attainable(device: Device, intensity: float, compute: str = "bf16") -> float:
    """Returns the FLOP/s that a device's roofline allows at an arithmetic intensity."""
    return min(device.flops[compute], intensity * device.hbm_bytes_per_s)


def weight_bytes(model: PlannedModel, device: Device, serving: Serving) -> int:
    """Returns the bytes of one model copy: codes, scales, zero points and 16-bit weights."""
    return sum(each.nbytes for each in serving.arrays(model, device))


def cache_room(model: PlannedModel, device: Device, serving: Serving) -> float:
    """Returns the bytes left for KV caches on all devices; negative if the weights do not fit."""
    needs = memory_needs(model, device, serving)
    return serving.devices * (device_budget(device) - needs.fixed_bytes)


def device_budget(device: Device) -> float:
    """Returns the bytes of a device that ``jaxinfra serve`` uses by default."""
    share = device.hbm_bytes / find_device(device.name).hbm_bytes  # with --memory less than all
    return share * device.visible_bytes * JAX_FRACTION * _OPTIONS.memory_fraction


def memory_needs(model: PlannedModel, device: Device, serving: Serving) -> MemoryNeeds:
    """Returns what a device holds besides the KV cache, by a server's own formulas."""
    config, options = model.config, _OPTIONS
    limits = options.limits(config)
    temporary = most_temporaries(
        listed_programs(limits, verify_length=None), config, itemsize=_PLAIN_BYTES
    )
    page = options.page_size * kv_bytes_per_token(model, serving.cache)
    page *= cache_copies(model, serving.devices)
    return MemoryNeeds(
        weight_bytes=math.ceil(weight_bytes(model, device, serving) / serving.devices),
        temporary_bytes=temporary,
        state_bytes=math.ceil(
            options.max_running * config.vocab_size * 5  # the history of tokens
            + limits.num_state_slots * sequence_state_bytes(model, serving.cache) / serving.devices
        ),
        page_bytes=math.ceil(page / serving.devices),
    )


def pool_tokens(model: PlannedModel, device: Device, serving: Serving) -> int:
    """Returns the tokens that the KV cache of a server holds by default."""
    usable = _OPTIONS.limits(model.config).num_pages  # by the longest requests, as many as may run
    pages = min(usable, memory_needs(model, device, serving).pages(device_budget(device)))
    return max(0, pages - 1) * _OPTIONS.page_size


def cache_copies(model: PlannedModel, devices: int) -> float:
    """Returns how many copies of each cached element ``devices`` devices hold together.

    KV heads are split over the devices, and repeated if there are fewer heads than devices.
    Latents belong to all heads, so each device holds them.
    """
    heads = [
        size
        for block in model.config.blocks
        for array in block.mixer.cache.arrays
        for size in [dict(zip(array.dims, array.shape, strict=True)).get(axes.KV_HEADS, 1)]
    ]
    return devices / min([devices, *heads])


def cached_bytes(model: PlannedModel, serving: Serving, *, batch: int, context: int) -> float:
    """Returns the bytes of the KV caches of ``batch`` sequences on all devices together."""
    size = kv_bytes(model, batch=batch, context=context, cache_format=serving.cache)
    return size * cache_copies(model, serving.devices)


def max_batch(model: PlannedModel, device: Device, serving: Serving, *, context: int) -> int:
    """Returns how many sequences of ``context`` tokens have caches that fit beside the weights."""
    one = cached_bytes(model, serving, batch=1, context=context)
    return max(int(cache_room(model, device, serving) // one), 0)


def max_context(model: PlannedModel, device: Device, serving: Serving, *, batch: int = 1) -> int:
    """Returns the most tokens per sequence at which the KV caches of ``batch`` sequences fit.

    Layers with windows need no memory beyond their window.
    """
    room = cache_room(model, device, serving)

    def cached(context: int) -> float:
        return cached_bytes(model, serving, batch=batch, context=context)

    return max(bisect.bisect_right(range(1 << 40), room, key=cached) - 1, 0)


def prefill(
    model: PlannedModel, device: Device, serving: Serving, *, batch: int, length: int
) -> Phase:
    """Predicts a prefill pass over ``batch`` prompts; weights are read once for all tokens."""
    flops = model.forward_flops(length, batch=batch)
    read = _read_weights(model, device, serving, tokens=batch * length)
    written = cached_bytes(model, serving, batch=batch, context=length)
    activations = 2.0 * 12 * model.config.num_layers * batch * length * model.config.model_dim
    return _phase(device, serving, flops, read + written + activations)


def decode(
    model: PlannedModel, device: Device, serving: Serving, *, batch: int, context: int
) -> Phase:
    """Predicts a decode step of one token per sequence; it reads all weights and KV caches."""
    flops = model.decode_flops(context, batch=batch)
    read = _read_weights(model, device, serving, tokens=batch)
    cached = cached_bytes(model, serving, batch=batch, context=context)
    return _phase(device, serving, flops, read + cached)


def _read_weights(model: PlannedModel, device: Device, serving: Serving, *, tokens: int) -> float:
    """Returns bytes of weights read in a pass over tokens; few tokens use few experts."""
    return sum(each.traffic(tokens) for each in serving.arrays(model, device))


def slow_weights(
    model: PlannedModel, device: Device, serving: Serving, *, batch: int, context: int
) -> str | None:
    """Returns why a decode step is slower with these weights than in 16 bits; None if it is not."""
    plain = dataclasses.replace(serving, weights=PLAIN)
    ours, theirs = (
        decode(model, device, each, batch=batch, context=context).seconds
        for each in (serving, plain)
    )
    if ours <= theirs:
        return None
    traffic = dict.fromkeys(("experts", "no kernel", "rows"), 0.0)
    for each in serving.arrays(model, device):
        if isinstance(each.stored, QuantizedWeight):
            kind = "no kernel" if each.is_dequantized else "rows"
            traffic["experts" if each.is_expert else kind] += each.traffic(batch)
    reason = {
        "experts": "experts have no kernel that multiplies codes",
        "no kernel": "codes have no kernel "
        + ("on several devices" if serving.devices > 1 else f"for these sizes on {device.name}"),
        "rows": f"the kernel for codes takes at most {MOST_ROWS_MEASURED} tokens per step",
    }[max(traffic, key=traffic.__getitem__)]
    return (
        f"{1e3 * ours:,.1f} ms per token with {serving.weights} weights, {1e3 * theirs:,.1f} with "
        f"{PLAIN}: {reason}, so each step writes and reads a 16-bit copy of the weights"
    )


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
    """Returns the smallest batch whose decode step is compute-bound, or None if no batch is.

    Every sequence adds its own cache to the bytes read, so with long contexts no batch is large
    enough. Without caches, the batch is half the ridge point times the bytes per weight: in bf16,
    295 on an H100 and 206 on an H200.
    """
    compute = serving.compute
    rate, bandwidth = device.flops[compute], device.hbm_bytes_per_s
    for exponent in range(25):
        batch = 1 << exponent
        flops = model.decode_flops(context, batch=batch)
        cached = cached_bytes(model, serving, batch=batch, context=context)
        read = _read_weights(model, device, serving, tokens=batch) + cached
        if flops / rate >= read / bandwidth:
            break
    else:
        return None
    a_sequence = (
        model.decode_flops(context) / rate
        - cached_bytes(model, serving, batch=1, context=context) / bandwidth
    )
    return math.ceil(_read_weights(model, device, serving, tokens=batch) / bandwidth / a_sequence)


def summary(
    model: PlannedModel, device: Device, serving: Serving, *, context: int, batch: int
) -> dict[str, Any]:
    """Returns a served model's predicted sizes and speeds, for the tables and ``--json``."""
    pre = prefill(model, device, serving, batch=batch, length=context)
    step = decode(model, device, serving, batch=batch, context=context)
    return {
        "devices": serving.devices,
        "weights": serving.weights,
        "cache": serving.cache,
        "context": context,
        "batch": batch,
        "weight_bytes": weight_bytes(model, device, serving),
        "pool_tokens": pool_tokens(model, device, serving),
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
    """Compares weight formats by their bytes, the KV cache that fits, and a decode step's time.

    A format that this model cannot have gets an entry ``unsupported`` with the reason instead.
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
    """Compares KV cache formats: how many tokens fit, and the batch that is compute-bound."""
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
    """Predicts decode steps at growing batch sizes, up to the first that does not fit."""
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
