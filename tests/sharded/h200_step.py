"""Compiles a step for four H200s that are not there, and prints as JSON its collectives, and how
many activations it holds with the width outermost.

    python -m tests.sharded.h200_step fsdp=4 [--sequence-parallel] [--o1] [--rounded]
        [--preset NAME]

A process of its own: the CUDA plugin is loaded by hand, before JAX looks for it.
"""

import argparse
import dataclasses
import json

from jaxinfra.config.mesh import ShardingConfig, parse_mesh
from jaxinfra.config.precision import PolicyName, PrecisionConfig, WeightGradients
from jaxinfra.config.presets import MODELS, runs
from jaxinfra.config.run import AttentionImplementation, Remat
from jaxinfra.ops.target import compiling_for
from jaxinfra.parallel.program import collectives
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.gpu_target import compile_only_devices
from jaxinfra.training.job import lower_step, make_job

ROWS, LENGTH, LAYERS, WIDTH = 16, 4096, 4, 2048


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mesh")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--o1", action="store_true")
    parser.add_argument("--rounded", action="store_true", help="weights' gradients in bf16")
    parser.add_argument("--preset", default="llama32_1b", help="whose shapes, of 4 layers")
    args = parser.parse_args()
    devices, facts = compile_only_devices(find_device("h200"), 4)
    run = runs.pretraining(MODELS[args.preset]().with_layers(LAYERS))
    training = dataclasses.replace(
        run.training,
        batch_size=ROWS,
        sequence_length=LENGTH,
        accumulation=1,
        remat=Remat.DOTS,
        attention=AttentionImplementation.HOPPER,
    )
    run = dataclasses.replace(
        run,
        training=training,
        precision=PrecisionConfig(
            policy=PolicyName.BF16,
            weight_gradients=WeightGradients.COMPUTE if args.rounded else WeightGradients.FP32,
        ),
        mesh=parse_mesh(args.mesh),
        sharding=ShardingConfig(sequence_parallel=args.sequence_parallel),
    )
    job = make_job(run, devices=devices)
    with compiling_for(facts):
        lowered = lower_step(job, platforms=("cuda",))
    compiled = lowered.compile({"optimization_level": "O1"} if args.o1 else None)
    found = [
        dataclasses.asdict(each) | {"sent_bytes": each.sent_bytes} for each in collectives(compiled)
    ]
    # The embedding's all-to-all is along the width.
    width_first = [
        line
        for line in (compiled.as_text() or "").splitlines()
        if f"= bf16[{WIDTH},{ROWS // 4},{LENGTH}]" in line and "embedding" not in line
    ]
    print(json.dumps({"collectives": found, "width_first": len(width_first)}))


if __name__ == "__main__":
    main()
