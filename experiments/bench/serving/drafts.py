"""Drafts of a run's multi-token prediction: the tokens per second of one sequence, and its text.

``python -m experiments.bench.serving.drafts RUN --prompts FILE ... --drafts 0 3 5`` continues the
beginning of each file, greedily and with temperature, by an engine without drafts and by others.
It prints JSON lines.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bench.environment import environment
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.program_set import ProgramKey
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.load import LoadedModel, load
from jaxinfra.serving.sampling import SamplingConfig, SamplingRows

CALLS = 100
"""Calls of a program in a row, which the device runs without waiting for the host."""


def tell(**figures: Any) -> None:
    """Prints one JSON line."""
    print(json.dumps(figures), flush=True)


def engine_of(model: LoadedModel, drafts: int, context: int) -> Engine:
    """Returns an engine for one sequence, its pages those of a server on a GPU."""
    options = EngineOptions(
        max_running=1,
        page_size=64,
        max_context=context,
        max_step_tokens=256 + 64,
        chunk_sizes=(256,),
        max_piece_rows=1,
        share_prefixes=False,
        num_drafts=drafts,
    )
    return Engine.of(model, options=options)


def continued(engine: Engine, request: GenerationRequest) -> tuple[list[int], float]:
    """Returns a request's tokens, and the seconds from its first token to its last."""
    engine.submit(request)
    tokens: list[int] = []
    first = 0.0
    while engine.is_busy:
        for progress in engine.step():
            first = first or time.perf_counter()
            tokens += progress.tokens
    return tokens, time.perf_counter() - first


def program_ms(engine: Engine, drafts: int) -> float:
    """Returns the device's time of a step's program, which the host issues ahead."""
    name, length = ("verify", 1 + drafts) if drafts else ("step", 1)
    key = engine.runner.programs.ready(ProgramKey(name=name, rows=1, length=length))
    rows = SamplingRows.of([SamplingConfig(temperature=0.0)], num_biases=300)
    inputs = engine.runner._writer.write((), size=1, length=length, sampling=rows)
    jax.block_until_ready(engine.runner.call(key, inputs))
    start = time.perf_counter()
    jax.block_until_ready([engine.runner.call(key, inputs) for _ in range(CALLS)])
    return (time.perf_counter() - start) / CALLS * 1e3


def main() -> None:
    """Compares engines with and without drafts on the prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3, 5])
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--numerics", default="fast")
    args = parser.parse_args()
    model = load(args.run).with_numerics(args.numerics)
    tell(environment=environment(), numerics=args.numerics)
    context = args.prompt_tokens + args.new_tokens
    engines = {drafts: engine_of(model, drafts, context) for drafts in args.drafts}
    samplings = {"greedy": SamplingConfig(temperature=0.0), "0.8": SamplingConfig(temperature=0.8)}
    requests = {
        (name, file.name): GenerationRequest(
            prompt_ids=tuple(model.prompt(file.read_text())[: args.prompt_tokens]),
            max_new_tokens=args.new_tokens,
            sampling=sampling,
            seed=1,
        )
        for name, sampling in samplings.items()
        for file in args.prompts
    }
    warm = dataclasses.replace(next(iter(requests.values())), max_new_tokens=24)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(lambda engine: continued(engine, warm), engines.values()))
    for drafts, engine in engines.items():
        tell(drafts=drafts, ms=round(program_ms(engine, drafts), 4))
    for (name, file), request in requests.items():
        plain: list[int] = []
        for drafts, engine in engines.items():
            before = dataclasses.replace(engine.counts)
            found = [continued(engine, request) for _ in range(args.rounds)]
            tokens = found[0][0]
            plain = plain or tokens
            pairs = enumerate(zip(plain, tokens, strict=True))
            same = next((i for i, (a, b) in pairs if a != b), len(plain))
            counts = engine.counts
            tell(
                sampling=name,
                file=file,
                drafts=drafts,
                tokens_s=[round((len(each) - 1) / seconds, 1) for each, seconds in found],
                median=round(float(np.median([(len(t) - 1) / s for t, s in found])), 1),
                tokens=len(tokens),
                same=same,
                per_step=round(args.rounds * len(tokens) / (counts.steps - before.steps), 3),
            )


if __name__ == "__main__":
    main()
