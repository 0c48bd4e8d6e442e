"""Compiles a step for four H200s that are not there, and prints as JSON its collectives, how many
activations it holds with the width outermost, of all-to-alls how many products of shared experts
the schedule puts beside them, which products in layers are XLA's, how many kernels are ours and
which of them are fused with the store of their result, how many updates turn what they update, and
which reduce-scatters end before the last layer's backward pass.

    python -m tests.sharded.h200_step fsdp=4 [--sequence-parallel] [--o1] [--rounded] [--kept]
        [--preset NAME] [--experts] [--fp8 SCALING]

A process of its own: the CUDA plugin is loaded by hand, before JAX looks for it.
"""

import argparse
import dataclasses
import json
import re

import jax

from experiments.bench.training.overlap import covered_by
from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.mesh import ShardingConfig, parse_mesh
from jaxinfra.config.model import ExpertsConfig, stacked
from jaxinfra.config.precision import (
    Fp8Matmuls,
    Fp8Scaling,
    PolicyName,
    PrecisionConfig,
    WeightGradients,
)
from jaxinfra.config.presets import MODELS, runs
from jaxinfra.config.run import AttentionImplementation, Remat
from jaxinfra.hlo.program import CompiledInstruction, collectives, compiled_instructions
from jaxinfra.ops.quantized import compiling_for
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.receipt import compile_only_devices
from jaxinfra.training.job import lower_step, make_job
from jaxinfra.training.xla_options import Options

ROWS, LENGTH, LAYERS, WIDTH = 16, 4096, 4, 2048
EXPERTS = ExpertsConfig(num_experts=16, top_k=4, hidden_dim=1024, shared_hidden_dim=2048)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mesh")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--o1", action="store_true")
    parser.add_argument("--rounded", action="store_true", help="weights' gradients in bf16")
    parser.add_argument(
        "--kept", action="store_true", help="gathered weights stay, layers are unrolled"
    )
    parser.add_argument("--preset", default="llama32_1b", help="whose shapes, of 4 layers")
    parser.add_argument("--experts", action="store_true", help="with shared ones, in place of mlp")
    parser.add_argument("--fp8", choices=list(Fp8Scaling), help="projections in 8 bits")
    args = parser.parse_args()
    devices, facts = compile_only_devices(find_device("h200"), 4)
    model = MODELS[args.preset]().with_layers(LAYERS)
    if args.experts:
        (block,) = model.blocks
        routed = dataclasses.replace(block, feed_forward=EXPERTS)
        # Of a loop over four such layers XLA's compiler of jaxlib 0.11.2 aborts at O1.
        model = dataclasses.replace(model, stacks=stacked(routed, num_layers=2))
    run = runs.pretraining(model)
    training = dataclasses.replace(
        run.training,
        batch_size=ROWS,
        sequence_length=LENGTH,
        accumulation=1,
        remat=Remat.DOTS,
        attention=AttentionImplementation.HOPPER,
        unroll=LAYERS if args.kept else run.training.unroll,
    )
    run = dataclasses.replace(
        run,
        training=training,
        precision=PrecisionConfig(
            policy=PolicyName.BF16,
            weight_gradients=WeightGradients.COMPUTE if args.rounded else WeightGradients.FP32,
            fp8=Fp8Matmuls(scaling=Fp8Scaling(args.fp8)) if args.fp8 else None,
        ),
        mesh=parse_mesh(args.mesh),
        exchange=ExchangeConfig(room_factor=1.5),
        sharding=ShardingConfig(sequence_parallel=args.sequence_parallel, keep_gathered=args.kept),
    )
    job = make_job(run, devices=devices)
    with compiling_for(facts):
        lowered = lower_step(job, platforms=("cuda",))
    options: Options = {"optimization_level": "O1"} if args.o1 else {}
    compiled = lowered.compile(options or None)
    instructions, _ = compiled_instructions(compiled)
    found = [
        dataclasses.asdict(each)
        | {
            "sent_bytes": each.sent_bytes,
            "covered_by": covered_by(instructions, each.instruction),
        }
        for each in collectives(compiled)
    ]
    # The embedding's all-to-all is along the width.
    width_first = [
        line
        for line in (compiled.as_text() or "").splitlines()
        if f"= bf16[{WIDTH},{ROWS // 4},{LENGTH}]" in line and "embedding" not in line
    ]
    printed = {
        "collectives": found,
        "width_first": len(width_first),
        "shared_beside": shared_beside(compiled),
        "products": xla_products(compiled),
        "turned_updates": len(
            re.findall(r"transpose_fusion[\w.]* = \(f32", compiled.as_text() or "")
        ),
        "reduced_early": reduced_early(compiled),
        "kernels": len(kernels(instructions)),
        "fused": fused_with_stores(instructions),
    }
    print(json.dumps(printed))


def shared_beside(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Products of shared experts between the start and the end of each all-to-all, by its name."""
    beside: dict[str, int] = {}
    running: set[str] = set()
    for each in compiled_instructions(compiled)[0]:
        if each.opcode == "all-to-all-start":
            running.add(each.name)
            beside[each.name] = 0
        elif each.opcode == "all-to-all-done":
            running.difference_update(re.findall(r"%([\w.-]+)", each.rest))
        elif each.name.startswith("gemm") and re.search(r"shared\)*/[^\"]*dot_general", each.rest):
            beside |= {name: beside[name] + 1 for name in running}
    return beside


def reduced_early(compiled: jax.stages.Compiled) -> list[str]:
    """Reduce-scatters of more than 1 MiB that end before the last attention's backward pass."""
    instructions = compiled_instructions(compiled)[0]
    attention = [i for i, e in enumerate(instructions) if "attention_backward" in e.rest]
    large = {
        each.instruction
        for each in collectives(compiled)
        if each.kind == "reduce-scatter" and each.sent_bytes > 2**20
    }
    return sorted(each.name for each in instructions[: max(attention)] if ended(each, large))


def ended(instruction: CompiledInstruction, started: set[str]) -> bool:
    """Whether it is the end of one of these."""
    names = re.findall(r"%([\w.-]+)", instruction.rest)
    return instruction.opcode.endswith("-done") and not started.isdisjoint(names)


def kernels(instructions: list[CompiledInstruction]) -> list[CompiledInstruction]:
    """Calls of our kernels."""
    return [each for each in instructions if 'custom_call_target="mosaic_gpu' in each.rest]


def fused_with_stores(instructions: list[CompiledInstruction]) -> list[str]:
    """Names of kernels in a fusion that stores to a slice of an array."""
    stores = {each.computation for each in instructions if each.opcode == "dynamic-update-slice"}
    return sorted(each.op_name for each in kernels(instructions) if each.computation in stores)


def xla_products(compiled: jax.stages.Compiled) -> list[str]:
    """Names of the products in layers that are XLA's."""
    names = (
        re.search(r'op_name="([^"]*)"', each.rest)
        for each in compiled_instructions(compiled)[0]
        if each.opcode == "dot" or each.name.startswith("gemm")
    )
    return [name[1] for name in names if name is not None and "(layer)" in name[1]]


if __name__ == "__main__":
    main()
