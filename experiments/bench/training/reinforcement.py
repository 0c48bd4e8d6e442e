"""Reinforcement learning on one GPU: the hand-over of weights, the loop, and memory foretold.

``python -m experiments.bench.training.reinforcement`` prints JSON lines:

- ``hand_over``: milliseconds from a step's weights to an engine that may sample with them, of
  Llama 3.2 1B, and the programs that were compiled meanwhile;
- ``loop``: steps of GRPO with some layers of a model, after all programs are compiled. Then the
  engine alone completes the last step's prompts again, and a training step runs alone. ``share`` is
  the time that the last step's tokens take at the engine's rate alone, plus that of a training step
  alone, divided by the time of the last step;
- ``adapters``: a step of Llama 3 8B with adapters, the device's peak in it, and what
  ``jaxinfra memory`` foretells. It comes first: the peak is one of the whole process.
"""

import argparse
import dataclasses
import json
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfra.checkpoint.run_directory import RunDirectory
from jaxinfra.config import codec
from jaxinfra.config.finetune import InitConfig, LoraConfig
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.presets import run_preset
from jaxinfra.config.presets.mixtures import qwen3_30b_a3b
from jaxinfra.config.presets.models import llama3_8b, llama32_1b, qwen3_4b
from jaxinfra.config.rl import RlConfig
from jaxinfra.config.run import RunConfig
from jaxinfra.data.batch import Batch
from jaxinfra.data.tokenizer import bytes_tokenizer
from jaxinfra.diagnostics.memory.rollouts import rollout_memory
from jaxinfra.reinforcement.rollouts import RolloutBatches
from jaxinfra.reinforcement.sampler import Sampler
from jaxinfra.runtime.compile_cache import keep_compiled_programs
from jaxinfra.serving.engine.fit import let_jax_allocate, memory_limit, memory_stats
from jaxinfra.training.job import Job, lower_step, make_job

PROMPT = 63  # characters, each a token
FIRST_TOKENS = 8  # per completion, by which the engine's programs are read onto the GPU
MODELS = {"qwen3_4b": qwen3_4b, "qwen3_30b_a3b": qwen3_30b_a3b}  # of the loop


def tell(part: str, **figures: Any) -> None:
    """Prints one JSON line."""
    print(json.dumps({"part": part, **figures}), flush=True)


def config_of(
    model: ModelConfig, place: Path, *settings: str, lora: LoraConfig | None = None, **rl: Any
) -> RunConfig:
    """Returns the config of a run that learns from random prompts and no reward."""
    prompts = place / "prompts.jsonl"
    lines = ({"prompt": f"{number:>{PROMPT}}"} for number in range(1000))
    prompts.write_text("".join(json.dumps(each) + "\n" for each in lines))
    learn = RlConfig(prompts=str(prompts), reward="zero", **rl)
    init = None if lora is None else InitConfig(path="none", sha256="")
    start = dataclasses.replace(run_preset("tiny"), model=model, rl=learn, lora=lora, init=init)
    named = ["data.tokenizer.kind=bytes", "precision.policy=bf16", "optimizer.muon=none"]
    return codec.normalized(codec.override(start, [*named, *settings]), RunConfig)


def hand_over(place: Path) -> None:
    """Times ``Sampler.renew`` after steps have changed the weights."""
    sizes = ("training.batch_size=64", "training.sequence_length=1024")
    config = config_of(llama32_1b(), place, *sizes, max_new_tokens=512)
    job = make_job(config)
    sampler, tree = Sampler(config, bytes_tokenizer()), job.initialize().tree
    changed = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0001, tree), donate_argnums=0)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    found = []
    for _ in range(6):
        tree = jax.block_until_ready(changed(tree))
        compiled.clear()
        began = time.perf_counter()
        sampler.renew({}, tree)
        called = time.perf_counter()
        jax.block_until_ready(jax.live_arrays())
        ready = time.perf_counter()
        found.append(((called - began) * 1e3, (ready - began) * 1e3, len(compiled)))
        sampler.release()
    tell("hand_over", host_ready_compiled=found)


def compile_ahead(job: Job) -> threading.Thread:
    """Compiles a training step for the cache while the engine's programs are compiled."""

    def work() -> None:
        began = time.perf_counter()
        lower_step(job).compile()
        tell("compiled", seconds=time.perf_counter() - began)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def compile_loop(job: Job, state: Any, sampler: Sampler, contexts: Mapping[int, Any]) -> None:
    """Compiles the programs of the loop side by side, and runs those of the engine."""
    ahead, began = compile_ahead(job), time.perf_counter()
    training = job.config.training
    ids = np.zeros((training.batch_size // training.accumulation, training.sequence_length), "i4")
    weights = ids.astype(np.float32)
    part = Batch(tokens=ids, targets=ids, segment_ids=None, positions=None, weights=weights)
    scored = threading.Thread(target=lambda: job.target_value_step(state.tree, job.put(part)))
    scored.start()
    whole = sampler._rl
    sampler._rl = dataclasses.replace(whole, max_new_tokens=FIRST_TOKENS)
    _engine_rate(sampler, job, state, contexts)
    sampler._rl = whole
    scored.join()
    ahead.join()
    tell("loop", compiled_s=time.perf_counter() - began)


def loop(config: RunConfig, place: Path, *, steps: int) -> None:
    """Runs the loop, then its two phases alone."""
    job = make_job(config)
    state = job.initialize()
    completions = config.training.batch_size
    sizes = {"parameters": job.model.num_parameters, "completions": completions}
    tell("loop", layers=config.model.num_layers, **sizes)
    batches = RolloutBatches(job, RunDirectory(place / "run"), bytes_tokenizer(), say=print)
    (place / "run").mkdir()
    episodes = batches._episodes
    sampler = episodes._player._sampler
    contexts = {place: each.ids for place, each in enumerate(episodes._prompts_of(steps - 1))}
    compile_loop(job, state, sampler, contexts)
    loop_s, tokens = 0.0, 0.0
    for step in range(steps):
        began = time.perf_counter()
        batches.follow(state)
        batch = job.put(next(batches))
        trained = time.perf_counter()
        state, _ = jax.block_until_ready(job.train_step(state, batch))
        ended = time.perf_counter()
        record = batches.read(step + 1)
        loop_s, tokens = ended - began, completions * record["rl/length"]
        figures = {"seconds": loop_s, "step_s": ended - trained, "tokens_per_s": tokens / loop_s}
        tell("loop", step=step, **figures, **record)
    began = time.perf_counter()
    state, _ = jax.block_until_ready(job.train_step(state, batch))
    step_s = time.perf_counter() - began
    tell("loop", step_alone_s=step_s)
    rate = _engine_rate(sampler, job, state, contexts)
    batches.close()
    share = (step_s + tokens / rate) / loop_s
    tell("loop", share=share, engine_alone_tokens_per_s=rate, step_alone_s=step_s, loop_s=loop_s)


def _engine_rate(
    sampler: Sampler, job: Job, state: Any, contexts: Mapping[int, Sequence[int]]
) -> float:
    """Tokens per second of the engine that completes these contexts, with nothing beside it."""
    sampler.renew(job.model.frozen, state.tree)
    began = time.perf_counter()
    ended = sampler.sample(contexts, seed=1, is_over=lambda: False)
    tokens = sum(len(each.ids) for each in ended)
    seconds = time.perf_counter() - began
    sampler.release()
    return tokens / seconds


def _compare(config: RunConfig, **figures: Any) -> None:
    """Tells the peak so far beside what is foretold."""
    peak = memory_stats(jax.local_devices()[0])["peak_bytes_in_use"]
    began = time.perf_counter()
    found = rollout_memory(config, limit_bytes=memory_limit())
    tell(
        "adapters",
        **figures,
        peak=peak,
        foretold=found.bytes,
        ratio=found.bytes / peak,
        phases=found.phases,
        pages=found.pages,
        seconds=time.perf_counter() - began,
    )


def adapters(place: Path) -> None:
    """Samples and trains with adapters of Llama 3 8B once, and compares the peak."""
    sizes = ("training.batch_size=8", "training.sequence_length=1024", "training.remat=full")
    lora = LoraConfig(rank=16)
    config = config_of(
        llama3_8b(), place, *sizes, lora=lora, group_size=8, max_new_tokens=64, max_running=8
    )
    job = make_job(config)
    ahead = compile_ahead(job)
    shapes, places = job.model.frozen, job.frozen_shardings
    job = job.with_frozen(
        jax.jit(
            lambda: jax.tree.map(lambda x: jax.numpy.full(x.shape, 0.01, x.dtype), shapes),
            out_shardings=places,
        )()
    )
    state = job.initialize()
    batches = RolloutBatches(job, RunDirectory(place / "adapters"), bytes_tokenizer(), say=print)
    (place / "adapters").mkdir()
    batches.follow(state)
    batch = job.put(next(batches))
    ahead.join()
    jax.block_until_ready(job.train_step(state, batch))
    batches.close()
    _compare(config, parameters=job.model.num_parameters)


def loop_config(args: argparse.Namespace, place: Path) -> RunConfig:
    """Returns the loop's config: a model with some of its layers, completions in groups of 8."""
    whole = MODELS[args.model]()
    model = dataclasses.replace(
        whole, stacks=(dataclasses.replace(whole.stacks[0], repeats=args.layers),)
    )
    sizes = (
        f"training.batch_size={args.completions}",
        f"training.sequence_length={args.length + PROMPT}",
        f"training.accumulation={args.completions // 8}",
        "training.remat=full",
    )
    lengths = {"max_new_tokens": args.length, "max_running": args.completions}
    return config_of(model, place, *sizes, *args.set, group_size=8, **lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("adapters", "hand_over", "loop")
    parser.add_argument("parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--model", choices=MODELS, default="qwen3_4b", help="of the loop")
    parser.add_argument("--layers", type=int, default=8, help="layers of the loop's model")
    parser.add_argument("--completions", type=int, default=512)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a completion")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=(), help="settings of the loop's run")
    args = parser.parse_args()
    let_jax_allocate()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        keep_compiled_programs(place / "programs")
        for part in sorted(args.parts):
            if part == "hand_over":
                hand_over(place)
            elif part == "adapters":
                adapters(place)
            else:
                loop(loop_config(args, place), place, steps=args.steps)


if __name__ == "__main__":
    main()
