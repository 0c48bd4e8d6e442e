"""A training step of a small model on one very long sequence over several GPUs.

    python -m experiments.bench.training.context_step \\
        --out experiments/results/context-step-h200.json
    python -m experiments.bench.training.context_step --tokens 1024 --attention xla \\
        --devices 4 # on CPUs

The step, its batches and their order are those of ``jaxinfra train --mesh context=N``; the tokens
are random, one document of all of them.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import numpy as np

from experiments.bench.environment import clocks, environment
from experiments.bench.training.context_parallel import GIB, peak_gib
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import (
    BlockConfig,
    GroupedAttentionConfig,
    MlpConfig,
    ModelConfig,
    stacked,
)
from jaxinfra.config.optimizer import OptimizerConfig
from jaxinfra.config.precision import PolicyName, PrecisionConfig
from jaxinfra.config.presets.runs import tiny
from jaxinfra.config.rope import RopeConfig
from jaxinfra.config.run import AttentionImplementation, ContextMethod, Remat, RunConfig
from jaxinfra.data.batch import Batch
from jaxinfra.model.flops import training_flops_per_token
from jaxinfra.training.job import make_job


def config_of(args: argparse.Namespace, *, num_devices: int) -> RunConfig:
    """About 100M parameters at the defaults."""
    width = args.heads * args.head_width
    block = BlockConfig(
        mixer=GroupedAttentionConfig(
            num_q_heads=args.heads,
            num_kv_heads=args.kv_heads,
            head_dim=args.head_width,
            rope=RopeConfig(theta=1e7),
        ),
        feed_forward=MlpConfig(hidden_dim=4 * width),
    )
    model = ModelConfig(
        vocab_size=args.vocabulary,
        model_dim=width,
        max_positions=args.tokens,
        stacks=stacked(block, num_layers=args.layers),
        tie_embeddings=True,
    )
    base = tiny()
    return dataclasses.replace(
        base,
        model=model,
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=60, final_fraction=0.05),
        mesh=MeshConfig(context=num_devices),
        precision=PrecisionConfig(policy=PolicyName.BF16),
        training=dataclasses.replace(
            base.training,
            batch_size=1,
            accumulation=1,
            sequence_length=args.tokens,
            attention=AttentionImplementation(args.attention),
            context_method=ContextMethod(args.method),
            remat=Remat(args.remat),
        ),
    )


def random_batch(args: argparse.Namespace) -> Batch[np.ndarray]:
    """One row that holds one document."""
    tokens = np.random.default_rng(0).integers(0, args.vocabulary, (1, args.tokens + 1), np.int32)
    return Batch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        segment_ids=np.zeros((1, args.tokens), np.int32),
        positions=np.arange(args.tokens, dtype=np.int32)[None],
        weights=np.ones((1, args.tokens), np.float32),
    )


def main() -> None:
    """Prints one line a step and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_048_576)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--attention", default="hopper")
    parser.add_argument("--method", default="ring", choices=[m.value for m in ContextMethod])
    parser.add_argument("--remat", default="named", choices=[r.value for r in Remat])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--devices", type=int, help="virtual ones of a CPU")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    num_devices = len(jax.devices())
    job = make_job(config_of(args, num_devices=num_devices))
    state, batch = job.initialize(), job.put(random_batch(args))
    start = time.perf_counter()
    compiled = job.train_step.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "every XLA backend has it"
    facts = {
        "num_parameters": job.model.num_parameters,
        "compile_s": time.perf_counter() - start,
        "temp_gib": memory.temp_size_in_bytes / GIB,
    }
    print(facts, flush=True)
    flops = args.tokens * training_flops_per_token(job.model, args.tokens)
    losses, taken = [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        losses.append(float(metrics.loss))
        taken.append(time.perf_counter() - start)
        print(
            f"{taken[-1]:8.2f} s {args.tokens / taken[-1]:10.0f} tokens/s "
            f"{flops / taken[-1] / num_devices / 1e12:6.1f} TFLOP/s/device loss {losses[-1]:.4f} "
            f"peak {peak_gib() or 0:.1f} GiB",
            flush=True,
        )
    if args.out is not None:
        median = statistics.median(taken[1:] or taken)
        result: dict[str, Any] = {
            "environment": environment(),
            "arguments": vars(args) | {"out": None},
            **facts,
            "step_s": taken,
            "losses": losses,
            "tokens_per_s": args.tokens / median,
            "tflops_per_device": flops / median / num_devices / 1e12,
            "peak_gib": peak_gib(),
            "clocks_after": clocks(),
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
