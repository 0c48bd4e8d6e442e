"""Published and measured figures, with their sources, that predictions are compared with.

Exact values follow from formulas and must be reproduced; times are measurements of others and of
ours, and a prediction's error against each is printed. No case has constants of its own: each GPU
type has one set (``constants/*.json``), revised once with these errors in view.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.presets import MODELS
from jaxinfra.config.presets.models import megatron_gpt
from jaxinfra.config.run import Remat
from jaxinfra.planning.layout import UNROLLED, Layout, Traits, lay_out
from jaxinfra.planning.model import PlannedModel, find_model, plan_model

MEGATRON_2021 = Traits(
    fused_attention=False,
    dropout=True,
    overlap=False,
    casts_weights=False,
    fused_loss=False,
    loss_kernel=False,
    scans_layers=False,
    saves_fp32=False,
    sums_apart=False,
)
"""Megatron-LM of arXiv 2104.04473 and 2205.05198."""

MEGATRON_2021_SELECTIVE = dataclasses.replace(MEGATRON_2021, recomputes_scores=True)
"""Megatron-LM with selective recomputation (Korthikanti et al. 2022)."""

MEGATRON_2025 = Traits(
    casts_weights=False,
    loss_kernel=False,
    scans_layers=False,
    saves_fp32=False,
    overlaps_tensor=True,
    sums_apart=False,
)
"""Megatron-Core with Transformer Engine: fused attention, overlapped collectives."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """A measured training step."""

    name: str
    source: str
    device: str
    model: PlannedModel
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


class MegatronCase(NamedTuple):
    """A configuration of arXiv 2205.05198, tables 3 and 5, and figure 7: tensor=8, length 2,048."""

    name: str
    layers: int
    width: int
    heads: int
    pipe: int
    batch: int
    micro_batch: int
    chunks: int
    # With tensor parallelism and full recomputation; with selective, and sequence parallelism.
    activation_gib: tuple[str, str]  # the first with nothing recomputed
    seconds: tuple[float, float]


MEGATRON = (
    MegatronCase("22B", 48, 6144, 64, 1, 4, 4, 1, ("59.25", "9.56"), (1.42, 1.10)),
    MegatronCase("175B", 96, 12_288, 96, 8, 64, 1, 3, ("66.84", "12.35"), (18.13, 13.75)),
    MegatronCase("530B", 105, 20_480, 128, 35, 280, 1, 3, ("114.02", "23.08"), (49.05, 37.83)),
    MegatronCase("1T", 128, 25_600, 160, 64, 512, 1, 1, ("131.25", "26.56"), (94.42, 71.49)),
)

DAYS = (("GPT-3", 300e9, 175e9, 1024, 140e12, "34"), ("1T", 450e9, 1008e9, 3072, 163e12, "84"))
"""Name, tokens, parameters, GPUs, FLOP/s each, days as printed (arXiv 2104.04473, section 5.1)."""

SCALING = (
    (24, 2304, 24, 1, 1, 32, 512, 137, "1.7"),
    (36, 4096, 32, 4, 1, 128, 512, 142, "7.5"),
    (48, 8192, 64, 8, 2, 512, 1536, 138, "39.1"),
    (80, 12_288, 96, 8, 8, 1536, 2304, 148, "145.6"),
    (128, 25_600, 160, 8, 64, 3072, 3072, 163, "1008.0"),
)
"""Layers, width, heads, tensor, pipe, GPUs, batch, TFLOP/s a GPU, billions of parameters as printed
(arXiv 2104.04473, table 1); micro-batches are not printed: 4 sequences without a pipeline, else 1.
"""


def timed_steps() -> list[TimedStep]:
    """Every measured step, ours included."""
    return [*_recomputation_paper(), *_scaling_paper(), *_h100(), *_h200()]


_PLAIN: dict[str, Any] = {"traits": MEGATRON_2021, "remat": Remat.NONE}
_FULL = _PLAIN | {"remat": Remat.FULL}
_SELECTIVE = _PLAIN | {"traits": MEGATRON_2021_SELECTIVE, "sequence_parallel": True}

ACTIVATION_FORMS = (("tensor parallel", _PLAIN), ("sequence parallel, selective", _SELECTIVE))
"""Names and layouts of ``MegatronCase.activation_gib``."""


def megatron_case(case: MegatronCase, form: dict[str, Any]) -> tuple[PlannedModel, Layout]:
    """The case's model, and its layout in one of its forms."""
    layout = _a100(
        batch=case.batch,
        accumulation=case.batch // case.micro_batch,
        pipe=case.pipe,
        tensor=8,
        chunks=case.chunks,
        **form,
    )
    return plan_model(megatron_gpt(case.width, case.layers, case.heads)), layout


def _recomputation_paper() -> Iterator[TimedStep]:
    forms = (("full recomputation", _FULL), ("sequence parallel, selective", _SELECTIVE))
    for case in MEGATRON:
        for (name, form), seconds in zip(forms, case.seconds, strict=True):
            model, layout = megatron_case(case, form)
            yield TimedStep(
                name=f"{case.name}, {name}",
                source="arXiv 2205.05198, table 5",
                device="a100",
                model=model,
                layout=layout,
                seconds=seconds,
            )


def _scaling_paper() -> Iterator[TimedStep]:
    for layers, width, heads, tensor, pipe, devices, batch, tflops, _ in SCALING:
        replica = devices // (tensor * pipe)
        accumulation = batch // (replica * (4 if pipe == 1 else 1))
        flops = megatron_flops(batch=batch, length=2048, layers=layers, width=width, vocab=51_200)
        sizes: dict[str, Any] = {"tensor": tensor, "pipe": pipe, "replica": replica}
        yield TimedStep(
            name=f"{layers} layers of {width} on {devices}",
            source="arXiv 2104.04473, table 1",
            device="a100",
            model=plan_model(megatron_gpt(width, layers, heads)),
            layout=_a100(batch=batch, accumulation=accumulation, **sizes, **_FULL),
            seconds=flops / (devices * tflops * 1e12),
        )


def megatron_flops(*, batch: int, length: int, layers: int, width: int, vocab: int) -> float:
    """96 B s l h^2 (1 + s/(6h) + V/(16 l h)): a step with full recomputation (arXiv 2104.04473,
    equation 3).
    """
    return (
        96.0
        * batch
        * length
        * layers
        * width**2
        * (1 + length / (6 * width) + vocab / (16 * layers * width))
    )


def _a100(**choices: Any) -> Layout:
    return lay_out(length=2048, recipe="fp16-adam", zero=0, **choices)


def _h100() -> Iterator[TimedStep]:
    pipeline = {"tensor": 4, "pipe": 8, "replica": 2, "chunks": 5, "sequence_parallel": True}
    cases: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
        ("Llama-3-8B fp8 on 8", "llama3_8b", 8, 14_451, {"replica": 8, "accumulation": 16}),
        ("Llama-3-70B fp8 on 64", "llama3_70b", 64, 1602, {**pipeline, "accumulation": 64}),
    )
    for name, preset, devices, rate, choices in cases:
        layout = lay_out(
            length=8192,
            batch=128,
            zero=0,
            recipe="fp8-transformer-engine",
            traits=MEGATRON_2025,
            remat=Remat.NONE,
            **choices,
        )
        yield TimedStep(
            name=name,
            source=f"NVIDIA, Megatron Bridge performance summary: {rate:,} tokens/s a GPU",
            device="h100",
            model=find_model(preset),
            layout=layout,
            seconds=128 * 8192 / (devices * rate),
        )


def _h200() -> Iterator[TimedStep]:
    """This code base's own steps, by ``jaxinfra bench plan_check``."""
    for preset, layers, changes, seconds, source in _OURS:
        config = MODELS[preset]() if layers is None else MODELS[preset]().with_layers(layers)
        # Measured when weights were gathered twice by default.
        layout = lay_out(**{"length": 4096, "batch": 4, "keep_gathered": False, **changes})
        yield _own(f"{preset} of {config.num_layers} layers", config, layout, seconds, source)
    for layers, changes, seconds in _GRADIENTS:
        layout = lay_out(length=4096, batch=16, keep_gathered=False, **changes)
        step = _own(f"{layers} layers of 3072, gradients only", _piped(layers), layout, seconds)
        yield dataclasses.replace(step, optimizer=False)


_ONE = "experiments/results/plan-h200.json"
_FOUR = "experiments/results/plan-h200-x4.json"
_COPIES = "experiments/results/parallel-fsdp-h200-x2.json"
_KERNELS = "experiments/results/collective-matmul-h200-x2.json"


def _own(
    name: str, config: ModelConfig, layout: Layout, seconds: float, source: str = _FOUR
) -> TimedStep:
    rows = f"{layout.accumulation} x {layout.micro_rows} x {layout.length}"
    rows += ", sequence parallel" if layout.sequence_parallel else ""
    rows += f", {layout.chunks} chunks" if layout.chunks > 1 else ""
    form = f"{layout.remat.value}{'' if layout.traits.scans_layers else ' unrolled'}"
    return TimedStep(
        name=f"{name}, {layout.describe()}, {form}, {rows}",
        source=source,
        device="h200",
        model=plan_model(config),
        layout=layout,
        seconds=seconds,
    )


def _piped(layers: int) -> ModelConfig:
    """A shape of 3B parameters with 32 layers."""
    heads = GroupedAttentionConfig(num_q_heads=24, num_kv_heads=8, head_dim=128, rope=None)
    block = BlockConfig(mixer=heads, feed_forward=MlpConfig(hidden_dim=8192))
    return ModelConfig(
        vocab_size=32_000,
        model_dim=3072,
        max_positions=4096,
        stacks=stacked(block, num_layers=layers),
        tie_embeddings=False,
    )


_KEPT = {"keep_gathered": True, "traits": UNROLLED}
# Preset, layers where fewer, what of the layout is not 4 x 4096 tokens and dots, seconds, source.
_OURS: tuple[tuple[str, int | None, dict[str, Any], float, str], ...] = (
    ("llama32_1b", None, {}, 0.2771, _FOUR),
    ("llama32_1b", None, {"remat": Remat.MLP}, 0.3070, _ONE),
    ("llama32_1b", None, {"remat": Remat.FULL}, 0.3238, _ONE),
    ("llama32_1b", None, {"remat": Remat.NONE, "traits": UNROLLED}, 0.2652, _ONE),
    ("llama32_1b", None, {"accumulation": 4}, 0.3284, _ONE),
    ("llama32_1b", None, {"length": 16_384, "batch": 1}, 0.3810, _ONE),
    ("llama32_1b", None, {"length": 1024, "batch": 16}, 0.2542, _ONE),
    ("llama32_3b", None, {"batch": 2, "remat": Remat.FULL}, 0.4421, _ONE),
    ("small", None, {"length": 1024, "batch": 32}, 0.0552, _ONE),
    ("llama32_1b", None, {"batch": 16, "fsdp": 4}, 0.3051, _FOUR),
    ("llama31_8b", 8, {"batch": 16, "fsdp": 4}, 0.4723, _FOUR),
    ("llama31_8b", 8, {"batch": 16, "tensor": 4}, 0.5358, _FOUR),
    ("llama31_8b", 8, {"batch": 16, "tensor": 4, "sequence_parallel": True}, 0.5818, _FOUR),
    ("llama32_1b", None, {"batch": 8, "fsdp": 2, **_KEPT}, 0.2610, _COPIES),
    ("llama31_8b", 8, {"batch": 8, "fsdp": 2}, 0.4431, _KERNELS),
    ("llama31_8b", 8, {"batch": 8, "tensor": 2, "sequence_parallel": True}, 0.4473, _KERNELS),
)

# Layers, layout, seconds of loss and gradients.
_GRADIENTS: tuple[tuple[int, dict[str, Any], float], ...] = (
    (8, {"accumulation": 16}, 0.8888),
    (32, {"pipe": 4, "accumulation": 16}, 1.0011),
    (32, {"pipe": 4, "chunks": 2, "accumulation": 16}, 1.0180),
    (32, {"fsdp": 4, "accumulation": 4}, 0.9417),
)

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
