"""The engine by the host's clock: steps, a batch, shared prefixes, load; random weights.

python -m experiments.bench.serving.serve_engine --preset llama3_8b \
    --out experiments/results/serve-engine-h200.json

Cases. "steps": requests that all decode, "ms" a step with sampling and the host's work, beside
weights and cache over the rate of a copy in the same process. "batch": --requests at once, of
--prompt-tokens and --new-tokens, greedy; "of_roofline" is what their products would take at the
rate of a large matmul, and their decode steps at that of a copy, over the time taken. "prefix":
prompts of a suffix alone, then behind a prefix that pages hold. "load": arrivals at random times at
shares of the batch's rate.
"""

import argparse
import collections
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.harness import copied, options, table_of
from experiments.bench.serving.decode import (
    FORMATS,
    drawn_parameters,
    floor_bytes,
    prefill_flops,
    served,
)
from jaxinfra.model.decoder import Decoder
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.program_set import KEEP
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.sampling import GREEDY, SamplingConfig

SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": SamplingConfig(temperature=0.8),
    "top-p": SamplingConfig(temperature=0.8, top_k=50, top_p=0.95),
}
SHAPES = {
    "llama3_8b": ((1, 2048), (16, 2048), (64, 2048), (128, 1024)),
    "llama32_1b": ((1, 2048), (64, 2048)),
    "qwen35_9b": ((1, 2048), (64, 2048)),
    "gpt_oss_20b": ((1, 2048), (64, 2048)),
    "tiny": ((1, 32), (2, 32)),
}
CASES = ("steps", "batch", "prefix", "load")
PERCENTILES = (50, 95, 99)


class Bench:
    """An engine, and what its work would take at the least."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.rng = np.random.default_rng(0)
        how = {"tensor": args.tensor}
        drawn = drawn_parameters(args.preset, num_layers=args.layers, **how)
        self.form = served(args.preset, FORMATS[args.format], drawn=drawn, **how)
        del drawn
        gc.collect()
        self.copy_rate = self.matmul_rate = float("nan")

    @property
    def model(self) -> Decoder:
        """The model in the form of serving."""
        return nnx.merge(self.form.graphdef, self.form.weights)

    @functools.cached_property
    def engine(self) -> Engine:
        """Made once rates are known, whose arrays would count as its memory."""
        return Engine(self.model, options=options_of(self.args))

    def warm_up(self) -> dict[str, Any]:
        """Compiles what the engine lists."""
        begun, runner = time.perf_counter(), self.engine.runner
        keys = None
        if self.args.few_programs:
            # Decode steps that draw by temperature, and whole prompts, as many as a call has; a
            # prefix is computed alone.
            most = max(rows for rows, _ in self.engine.limits.chunk_shapes)
            fewest = 1 if "prefix" in self.args.cases else most
            steps = [key for key in runner.keys if key.name == "step"]
            keys = [key for key in steps if key.length > 1 and fewest <= key.rows <= most]
            least = self.args.least_rows
            keys += [k for k in steps if k.length == 1 and not k.is_full and k.rows >= least]
            keys += [KEEP] if self.engine.limits.num_snapshots else []
        runner.warm_up(keys=keys)
        programs = runner.programs.num_compiled
        return {"programs": programs, "s": round(time.perf_counter() - begun, 2)}

    def rates(self) -> dict[str, Any]:
        """Measures the present rates of memory and of a large matmul."""
        self.copy_rate = copied()
        x = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.bfloat16)
        _, taken = profiler.measure(jax.jit(jnp.dot), iterations=5)(x, x)
        assert taken is not None, "the product launched no kernel"
        self.matmul_rate = 2 * 8192**3 / (statistics.median(taken) / 1e3)
        return {
            "copy_gb_s": round(self.copy_rate / 1e9, 1),
            "matmul_tflop_s": round(self.matmul_rate / 1e12, 1),
        }

    def prompt(self, length: int) -> tuple[int, ...]:
        """Random ids."""
        return tuple(self.rng.integers(0, self.engine.num_ids, length).tolist())

    def request(self, length: int, new: int, sampling: SamplingConfig = GREEDY):
        """A request of a prompt of its own."""
        ids = self.prompt(length)
        return GenerationRequest(prompt_ids=ids, max_new_tokens=new, sampling=sampling)

    def steps(self, batch: int, context: int, sampling: str) -> dict[str, Any]:
        """Time of a step in which all requests decode."""
        engine, warm, timed = self.engine, self.args.warm_steps, self.args.steps
        lead = warm + timed // 2
        numbers = [
            engine.submit(self.request(context - lead, 4 * timed + warm, SAMPLINGS[sampling]))
            for _ in range(batch)
        ]
        seen = set()
        while len(seen) < batch:
            seen |= {each.request for each in engine.step()}
        for _ in range(warm):
            engine.step()
        taken, host = [], []
        for _ in range(3):
            begun, cpu = time.perf_counter(), time.thread_time()
            for _ in range(timed // 2):
                engine.step()
            taken.append((time.perf_counter() - begun) / (timed // 2))
            host.append((time.thread_time() - cpu) / (timed // 2))
        for number in numbers:
            engine.cancel(number)
        while engine.is_busy:
            engine.step()
        floor = floor_bytes(self.form, batch, context) / self.copy_rate / self.args.tensor
        return {
            "ms": round(1e3 * statistics.median(taken), 4),
            "host_cpu_ms": round(1e3 * statistics.median(host), 4),
            "floor_ms": round(1e3 * floor, 4),
        }

    def drained(self, requests: Sequence[GenerationRequest], rate: float | None = None):
        """All requests to their ends; per request its arrival, and the times of its tokens."""
        engine, arrivals = self.engine, np.zeros(len(requests))
        if rate is not None:
            arrivals = np.cumsum(self.rng.exponential(1 / rate, len(requests)))
        begun = time.perf_counter()
        times: dict[int, list[float]] = collections.defaultdict(list)
        places: dict[int, int] = {}
        waiting = 0
        while waiting < len(requests) or engine.is_busy:
            now = time.perf_counter() - begun
            while waiting < len(requests) and arrivals[waiting] <= now:
                places[engine.submit(requests[waiting])] = waiting
                waiting += 1
            if not engine.is_busy:
                time.sleep(max(0.0, arrivals[waiting] - now))
                continue
            done = engine.step()
            now = time.perf_counter() - begun
            for progress in done:
                times[places[progress.request]] += [now] * len(progress.tokens)
        return arrivals, times, time.perf_counter() - begun

    def batch(self) -> dict[str, Any]:
        """Requests that are all there at the beginning."""
        args, counts = self.args, self.engine.counts
        number = args.requests
        before = counts.steps
        _, times, taken = self.drained(
            [self.request(args.prompt_tokens, args.new_tokens) for _ in range(number)]
        )
        new = sum(len(each) for each in times.values())
        prefill, decode = self.roofline(number)
        return {
            "requests": number,
            "s": round(taken, 3),
            "steps": counts.steps - before,
            "new_tokens_s": round(new / taken, 1),
            "requests_s": round(number / taken, 3),
            "all_tokens_came": new == number * args.new_tokens,
            "roofline_prefill_s": round(prefill, 3),
            "roofline_decode_s": round(decode, 3),
            "of_roofline": round((prefill + decode) / taken, 4),
        }

    def roofline(self, number: int) -> tuple[float, float]:
        """Seconds of products of all prompts, and of reading for all decode steps."""
        args = self.args
        prefill = prefill_flops(self.form, number, args.prompt_tokens) / self.matmul_rate
        running = min(args.running, number)
        context = args.prompt_tokens + args.new_tokens // 2
        steps = number / running * args.new_tokens
        return prefill, steps * floor_bytes(self.form, running, context) / self.copy_rate

    def prefix(self) -> dict[str, Any]:
        """Prompts of a suffix alone, and of the same behind a prefix that is known."""
        args, number = self.args, self.args.prefix_requests
        prefix = self.prompt(args.prefix_tokens)

        def timed(shared: tuple[int, ...]) -> float:
            requests = [
                GenerationRequest(
                    prompt_ids=(*shared, *self.prompt(args.prompt_tokens)), max_new_tokens=1
                )
                for _ in range(number)
            ]
            return self.drained(requests)[2]

        timed(prefix)
        timed(prefix)  # once more, with all that requests behind it need
        counts = self.engine.counts
        before = counts.cached_tokens
        behind = [timed(prefix) for _ in range(3)]
        cached = (counts.cached_tokens - before) / (3 * number)
        alone = [timed(()) for _ in range(3)]
        flops = prefill_flops(self.form, number, args.prompt_tokens)
        ratio = statistics.median(behind) / statistics.median(alone)
        return {
            "requests": number,
            "alone_ms": round(1e3 * statistics.median(alone) / number, 3),
            "behind_ms": round(1e3 * statistics.median(behind) / number, 3),
            "ratio": round(ratio, 4),
            "cached_tokens": round(cached, 1),
            "alone_tflop_s": round(flops / statistics.median(alone) / 1e12, 1),
        }

    def load(self, share: float, requests_s: float) -> dict[str, Any]:
        """Arrivals by chance."""
        args = self.args
        number = max(2, round(share * requests_s * args.load_seconds))
        requests = [self.request(args.prompt_tokens, args.new_tokens) for _ in range(number)]
        arrivals, times, taken = self.drained(requests, share * requests_s)
        first = [1e3 * (times[place][0] - at) for place, at in enumerate(arrivals)]
        each = [1e3 * (t[-1] - t[0]) / max(1, len(t) - 1) for t in times.values()]

        def percentiles(values: list[float]) -> dict[str, float]:
            found = np.percentile(values, PERCENTILES)
            return {f"p{p}": round(float(x), 2) for p, x in zip(PERCENTILES, found, strict=True)}

        return {
            "requests": number,
            "requests_s": round(share * requests_s, 3),
            "s": round(taken, 2),
            "first_token_ms": percentiles(first),
            "per_token_ms": percentiles(each),
        }

    def state(self) -> dict[str, Any]:
        """Whether anything was lost, or compiled late, and the memory it took."""
        if not self.args.few_programs:
            drawn = SamplingConfig(temperature=0.0, logprobs=1)
            asked = self.request(self.args.chunks[-1], 2, drawn)
            self.drained([dataclasses.replace(asked, scores_prompt=True)])  # most logits
        scheduler, stats = self.engine.scheduler, jax.devices()[0].memory_stats() or {}
        return {
            "late_compiles": self.engine.runner.programs.num_late,
            "pages_held": self.engine.limits.num_pages
            - 1
            - scheduler.allocator.num_free
            - scheduler.allocator.num_idle,
            "preemptions": scheduler.num_preemptions,
            "peak_bytes": stats.get("peak_bytes_in_use"),
            "bytes": stats.get("bytes_in_use"),
        }


def options_of(args: argparse.Namespace) -> EngineOptions:
    """The engine's."""
    return EngineOptions(
        max_running=args.running,
        page_size=args.page_size,
        num_pages=args.pages,
        max_context=args.context,
        max_step_tokens=args.step_tokens,
        chunk_sizes=tuple(args.chunks),
        max_piece_rows=args.piece_rows,
    )


def arguments() -> argparse.Namespace:
    parser = options(__doc__, budget=300.0)
    parser.add_argument("--preset", default="llama3_8b", choices=[*SHAPES])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--layers", type=int, help="first layers of the model; all by default")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--tensor", type=int, default=1, help="devices that share each layer")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--pages", type=int)
    parser.add_argument("--context", type=int, default=2176)
    parser.add_argument("--step-tokens", type=int, default=4352)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--piece-rows", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prefix-tokens", type=int, default=2048)
    parser.add_argument("--prefix-requests", type=int, default=32)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--load-seconds", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-steps", type=int, default=8, help="before those that are timed")
    parser.add_argument("--few-programs", action="store_true", help="others compile when needed")
    parser.add_argument("--least-rows", type=int, default=1, help="of few programs' decode steps")
    parser.add_argument("--format", default="bf16", choices=[*FORMATS], help="of weights and cache")
    parser.add_argument("--batches", type=int, nargs="+", help="of steps; all by default")
    parser.add_argument("--samplings", nargs="+", default=["greedy", "temperature", "top-p"])
    args = parser.parse_args()
    if "load" in args.cases and "batch" not in args.cases:
        parser.error("--cases load takes shares of the rate of requests that --cases batch finds")
    return args


def main() -> None:
    args = arguments()
    table, bench = table_of(args), Bench(args)
    table.add("rates", bench.rates)
    table.add("warm up", bench.warm_up)
    row: dict[str, Any] = {}
    if "batch" in args.cases:
        row = table.add(f"batch {args.prompt_tokens} + {args.new_tokens}", bench.batch)
    if "steps" in args.cases:
        for batch, context in SHAPES[args.preset]:
            if args.batches is not None and batch not in args.batches:
                continue
            for sampling in args.samplings:
                name = f"steps {batch} x {context}, {sampling}"
                table.add(name, functools.partial(bench.steps, batch, context, sampling))
    if "prefix" in args.cases:
        table.add(f"prefix {args.prefix_tokens} + {args.prompt_tokens}", bench.prefix)
    if "load" in args.cases and "requests_s" in row:
        for share in args.shares:
            load = functools.partial(bench.load, share, row["requests_s"])
            table.add(f"load {share:.0%}", load)
    table.add("after", bench.state)


if __name__ == "__main__":
    main()
