"""Published and measured figures, with their sources, that predictions are compared with.

Exact values follow from formulas and must be reproduced; times are measurements of others and of
ours, and a prediction's error against each is printed. No case has constants of its own: each GPU
type has one set (``constants/*.json``), revised once with these errors in view.
"""

import dataclasses
from typing import Any

from jaxinfra.config.presets import MODELS
from jaxinfra.config.presets.models import llama3_8b, llama3_70b
from jaxinfra.planning.catalog import gpt
from jaxinfra.planning.flops import megatron_flops
from jaxinfra.planning.from_config import shape_of
from jaxinfra.planning.layout import MEGATRON_2021, MEGATRON_2025, UNROLLED, Layout, Recompute
from jaxinfra.planning.shapes import Dense, Heads, LayerShape, ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """A measured training step."""

    name: str
    source: str
    device: str
    shape: ModelShape
    layout: Layout
    seconds: float
    optimizer: bool = True  # False: loss and gradients only


PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}
"""Parameters of published checkpoints."""

BILLIONS = {
    ("deepseek_v3", "total"): "671.03",
    ("deepseek_v3", "active"): "37.55",
    ("deepseek_v3", "active without input embedding"): "36.63",
}
"""arXiv 2412.19437, in billions as printed."""

KV_BYTES = {
    "llama2_7b": 524_288,
    "llama2_13b": 819_200,
    "llama2_70b": 327_680,
    "llama3_8b": 131_072,
    "llama3_405b": 516_096,
    "deepseek_v3": 70_272,
}
"""KV-cache bytes a token in bf16."""

ZERO_GB = ("120", "31.4", "16.6", "1.9")
"""7.5B parameters on 64 devices, stages 0 to 3, GB as printed (arXiv 1910.02054, figure 1)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MegatronCase:
    """A configuration of arXiv 2205.05198, tables 3 and 5, and figure 7."""

    name: str
    layers: int
    width: int
    heads: int
    tensor: int
    pipe: int
    batch: int
    micro_batch: int
    chunks: int
    tensor_gib: str  # activations with tensor parallelism only
    selective_gib: str  # with sequence parallelism and selective recomputation
    full_s: float  # iteration with full recomputation
    selective_s: float  # with sequence parallelism and selective recomputation

    length: int = 2048


def _case(name: str, *sizes: int, gib: tuple[str, str], seconds: tuple[float, float]):
    layers, width, heads, pipe, batch, micro_batch, chunks = sizes
    return MegatronCase(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        tensor=8,
        pipe=pipe,
        batch=batch,
        micro_batch=micro_batch,
        chunks=chunks,
        tensor_gib=gib[0],
        selective_gib=gib[1],
        full_s=seconds[0],
        selective_s=seconds[1],
    )


MEGATRON = (
    _case("22B", 48, 6144, 64, 1, 4, 4, 1, gib=("59.25", "9.56"), seconds=(1.42, 1.10)),
    _case("175B", 96, 12_288, 96, 8, 64, 1, 3, gib=("66.84", "12.35"), seconds=(18.13, 13.75)),
    _case("530B", 105, 20_480, 128, 35, 280, 1, 3, gib=("114.02", "23.08"), seconds=(49.05, 37.83)),
    _case("1T", 128, 25_600, 160, 64, 512, 1, 1, gib=("131.25", "26.56"), seconds=(94.42, 71.49)),
)

DAYS = (("GPT-3", 300e9, 175e9, 1024, 140e12, "34"), ("1T", 450e9, 1008e9, 3072, 163e12, "84"))
"""Name, tokens, parameters, GPUs, FLOP/s each, days as printed (arXiv 2104.04473, section 5.1)."""

# Layers, width, heads, tensor, pipe, GPUs, batch, TFLOP/s a GPU; micro-batches are not printed:
# 4 sequences without a pipeline, 1 with one.
_SC21 = (
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (36, 4096, 32, 4, 1, 128, 512, 142),
    (48, 8192, 64, 8, 2, 512, 1536, 138),
    (80, 12_288, 96, 8, 8, 1536, 2304, 148),
    (128, 25_600, 160, 8, 64, 3072, 3072, 163),
)


def timed_steps() -> list[TimedStep]:
    """Every measured step, ours included."""
    return [*_recomputation_paper(), *_scaling_paper(), *_h100(), *_h200()]


def _recomputation_paper() -> list[TimedStep]:
    found = []
    for case in MEGATRON:
        shape = gpt(case.name, layers=case.layers, width=case.width, heads=case.heads)
        layout = Layout(
            length=case.length,
            batch=case.batch,
            pipe=case.pipe,
            tensor=case.tensor,
            chunks=case.chunks,
            accumulation=case.batch // case.micro_batch,
            recipe="fp16-adam",
            traits=MEGATRON_2021,
            zero=0,
            remat=Recompute.FULL,
        )
        selective = dataclasses.replace(layout, remat=Recompute.SELECTIVE, sequence_parallel=True)
        for name, each, seconds in (
            ("full recomputation", layout, case.full_s),
            ("sequence parallel, selective", selective, case.selective_s),
        ):
            found.append(
                TimedStep(
                    name=f"{case.name}, {name}",
                    source="arXiv 2205.05198, table 5",
                    device="a100",
                    shape=shape,
                    layout=each,
                    seconds=seconds,
                )
            )
    return found


def _scaling_paper() -> list[TimedStep]:
    found = []
    for layers, width, heads, tensor, pipe, devices, batch, tflops in _SC21:
        replica = devices // (tensor * pipe)
        micro_batch = 4 if pipe == 1 else 1
        seconds = megatron_flops(
            batch=batch, length=2048, layers=layers, width=width, vocab=51_200
        ) / (devices * tflops * 1e12)
        shape = gpt(f"{layers}x{width}", layers=layers, width=width, heads=heads)
        layout = Layout(
            length=2048,
            batch=batch,
            pipe=pipe,
            tensor=tensor,
            replica=replica,
            accumulation=batch // (replica * micro_batch),
            recipe="fp16-adam",
            traits=MEGATRON_2021,
            zero=0,
            remat=Recompute.FULL,
        )
        found.append(
            TimedStep(
                name=f"{layers} layers of {width} on {devices}",
                source="arXiv 2104.04473, table 1",
                device="a100",
                shape=shape,
                layout=layout,
                seconds=seconds,
            )
        )
    return found


def _h100() -> list[TimedStep]:
    common: dict[str, Any] = {
        "length": 8192,
        "batch": 128,
        "zero": 0,
        "recipe": "fp8-transformer-engine",
        "traits": MEGATRON_2025,
        "remat": Recompute.NONE,
    }
    eight = Layout(replica=8, accumulation=16, **common)
    seventy = Layout(
        tensor=4, pipe=8, replica=2, chunks=5, sequence_parallel=True, accumulation=64, **common
    )
    tokens = 128 * 8192
    return [
        TimedStep(
            name="Llama-3-8B fp8 on 8",
            source="NVIDIA, Megatron Bridge performance summary: 14,451 tokens/s a GPU",
            device="h100",
            shape=shape_of(llama3_8b(), name="llama3_8b"),
            layout=eight,
            seconds=tokens / (8 * 14_451),
        ),
        TimedStep(
            name="Llama-3-70B fp8 on 64",
            source="NVIDIA, Megatron Bridge performance summary: 1,602 tokens/s a GPU",
            device="h100",
            shape=shape_of(llama3_70b(), name="llama3_70b"),
            layout=seventy,
            seconds=tokens / (64 * 1602),
        ),
    ]


def _h200() -> list[TimedStep]:
    """This code base's own steps, by ``jaxinfra bench plan_check``."""
    found = []
    for preset, layers, changes, seconds, source in _OURS:
        config = MODELS[preset]()
        if layers is not None:
            config = config.with_layers(layers)
        sizes: dict[str, Any] = {"length": 4096, "batch": 4, **changes}
        layout = Layout(**sizes)
        shape = shape_of(config, name=preset)
        found.append(_own(f"{preset} of {shape.num_layers} layers", shape, layout, seconds, source))
    for layers, changes, seconds in _GRADIENTS:
        shape = dataclasses.replace(_PIPED, layers=(_piped_layer(layers),))
        layout = Layout(length=4096, batch=16, **changes)
        name = f"{layers} layers of 3072, gradients only"
        found.append(_own(name, shape, layout, seconds, _FOUR, optimizer=False))
    return found


def _own(
    name: str,
    shape: ModelShape,
    layout: Layout,
    seconds: float,
    source: str,
    *,
    optimizer: bool = True,
) -> TimedStep:
    rows = f"{layout.accumulation} x {layout.micro_rows} x {layout.length}"
    rows += ", sequence parallel" if layout.sequence_parallel else ""
    rows += f", {layout.chunks} chunks" if layout.chunks > 1 else ""
    form = f"{layout.remat.value}{'' if layout.traits.scans_layers else ' unrolled'}"
    return TimedStep(
        name=f"{name}, {layout.describe()}, {form}, {rows}",
        source=source,
        device="h200",
        shape=shape,
        layout=layout,
        seconds=seconds,
        optimizer=optimizer,
    )


def _piped_layer(layers: int) -> LayerShape:
    heads = Heads(num_q_heads=24, num_kv_heads=8, head_dim=128)
    return LayerShape(attention=heads, feed_forward=Dense(hidden_dim=8192), count=layers)


_PIPED = ModelShape(
    name="3B shape",
    vocab_size=32_000,
    model_dim=3072,
    layers=(_piped_layer(32),),
    tie_embeddings=False,
    max_positions=4096,
)

_ONE = "experiments/results/plan-h200.json"
_FOUR = "experiments/results/plan-h200-x4.json"

# Preset, layers where fewer, what of the layout is not 4 x 4096 tokens and dots, seconds, source.
_OURS: tuple[tuple[str, int | None, dict[str, Any], float, str], ...] = (
    ("llama32_1b", None, {}, 0.2771, _FOUR),
    ("llama32_1b", None, {"remat": Recompute.MLP}, 0.3070, _ONE),
    ("llama32_1b", None, {"remat": Recompute.FULL}, 0.3238, _ONE),
    ("llama32_1b", None, {"remat": Recompute.NONE, "traits": UNROLLED}, 0.2652, _ONE),
    ("llama32_1b", None, {"accumulation": 4}, 0.3284, _ONE),
    ("llama32_1b", None, {"length": 16_384, "batch": 1}, 0.3810, _ONE),
    ("llama32_1b", None, {"length": 1024, "batch": 16}, 0.2542, _ONE),
    ("llama32_3b", None, {"batch": 2, "remat": Recompute.FULL}, 0.4421, _ONE),
    ("small", None, {"length": 1024, "batch": 32}, 0.0552, _ONE),
    ("llama32_1b", None, {"batch": 16, "fsdp": 4}, 0.3051, _FOUR),
    ("llama31_8b", 8, {"batch": 16, "fsdp": 4}, 0.4723, _FOUR),
    ("llama31_8b", 8, {"batch": 16, "tensor": 4}, 0.5358, _FOUR),
    ("llama31_8b", 8, {"batch": 16, "tensor": 4, "sequence_parallel": True}, 0.5818, _FOUR),
)

# Layers, layout, seconds of loss and gradients.
_GRADIENTS: tuple[tuple[int, dict[str, Any], float], ...] = (
    (8, {"accumulation": 16}, 0.8888),
    (32, {"pipe": 4, "accumulation": 16}, 1.0011),
    (32, {"pipe": 4, "chunks": 2, "accumulation": 16}, 1.0180),
    (32, {"fsdp": 4, "accumulation": 4}, 0.9417),
)


GPT_BILLIONS = (
    (24, 2304, "1.7"),
    (36, 4096, "7.5"),
    (48, 8192, "39.1"),
    (80, 12_288, "145.6"),
    (128, 25_600, "1008.0"),
)
"""Layers, width, billions of parameters as printed (arXiv 2104.04473, table 1)."""

NEMO_RATES = (
    ("Llama-3-8B fp8", 14_451, 744.0, (8_030_261_248, 128_256, 4096, 32)),
    ("Llama-3-70B fp8", 1602, 719.0, (70_553_706_496, 128_256, 8192, 80)),
)
"""Name, tokens/s a GPU, TFLOP/s a GPU, (N, V, h, L), sequences of 8,192."""

RECIPE_BYTES = {
    "fp16-adam": "16",
    "bf16-fp32-accumulation": "20",
    "bf16-no-accumulation": "16",
    "fp8-transformer-engine": "16",
    "fp8-lm-o3": "9",
    "fp8-deepseek-v3": "15",
    "fp8-nanotron": "10",
}
"""Bytes a parameter (Hugging Face, Ultra-Scale Playbook; ZeRO's 16)."""
