"""What ``jaxinfra memory --serve`` predicts of an engine, beside the device's peak as it serves.

    python -m experiments.bench.serving_memory --out experiments/results/serving-memory-h200.json

A model of random weights in the compute dtype, as a server loads a published one, becomes an
engine, which answers as many requests as run at a time, and one that asks for the scores of its
prompt. The weights are drawn as they come from a directory ("loaded"), from which an engine makes
its own form as in ``jaxinfra serve``, or in that form ("direct"). The engine finds its programs in
the cache of those compiled for the prediction.
"""

import argparse
import concurrent.futures
import functools
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.environment import environment
from experiments.bench.random_text import random_tokenizer
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.presets import MODELS
from jaxinfra.data.tokenizer import Tokenizer
from jaxinfra.diagnostics.memory.serving import ServingCase, serving_memory
from jaxinfra.models.definition import ModelDefinition, Parameters, define_model
from jaxinfra.numerics.policy import POLICIES, held_as_computed
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import EngineOptions
from jaxinfra.serving.engine.program_list import ProgramKey
from jaxinfra.serving.engine.requests import GenerationRequest
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.placement import serving_placement
from jaxinfra.serving.sampling import SamplingConfig
from jaxinfra.training.job import keep_compiled_programs
from jaxinfra.training.recompute import step_bytes


def random_weights(definition: ModelDefinition) -> Parameters:
    """Normal of deviation 0.02, array by array, so that little more than they is ever held."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    leaves, tree = jax.tree.flatten(definition.shapes)
    drawn = []
    for number, leaf in enumerate(leaves):
        parts = leaf.shape[0] if leaf.size > 2**29 else 1
        whole = jnp.zeros(leaf.shape, leaf.dtype) if parts > 1 else None
        key = jax.random.key(number)
        if whole is None:
            whole = draw(key, leaf.shape, leaf.dtype)
        else:
            put = jax.jit(lambda x, i, v: x.at[i].set(v), donate_argnums=0)
            part = draw(key, leaf.shape[1:], leaf.dtype)
            for place in range(parts):
                whole = put(whole, place, part)
        drawn.append(jax.block_until_ready(whole))
    return jax.tree.unflatten(tree, drawn)


def requests_of(engine: Engine, *, prompt: int, new: int) -> list[GenerationRequest]:
    """As many as run at a time, and one more that asks for its prompt's scores."""
    rng, asked = np.random.default_rng(0), []
    settings = SamplingConfig(temperature=0.8, top_k=50, logprobs=5)
    for number in range(engine.limits.max_running):
        ids = tuple(rng.integers(1, engine.num_ids, prompt).tolist())
        asked.append(
            GenerationRequest(prompt_ids=ids, max_new_tokens=new, sampling=settings, seed=number)
        )
    scored = SamplingConfig(logprobs=1)
    first = asked[0].prompt_ids
    asked.append(
        GenerationRequest(prompt_ids=first, max_new_tokens=1, sampling=scored, scores_prompt=True)
    )
    return asked


def compiled(case: ServingCase) -> dict[ProgramKey, Any]:
    """The programs that ``requests_of`` need, all at once: steps of one token, and full chunks."""
    runner, longest = case.runner(), max(case.engine.chunk_sizes)
    keys = [
        key
        for key in runner.keys
        if (key.name == "step" and key.is_full and key.length == 1)
        or (key.name in ("step", "score") and key.length == longest)
    ]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = {key: pool.submit(runner.lowered(key).compile) for key in keys}
    return {key: each.result() for key, each in found.items()}


def served(
    case: ServingCase,
    form: str,
    tokenizer: Tokenizer,
    *,
    prompt: int,
    new: int,
) -> dict[str, Any]:
    """Makes the engine, lets it answer, and counts the device's bytes on the way."""
    definition = (
        case.form
        if form == "direct"
        else define_model(case.model, execution_on(policy=case.policy))
    )
    loaded = LoadedModel(
        definition=definition,
        parameters=random_weights(definition),
        tokenizer=tokenizer,
        config=None,
        step=None,
        placement=serving_placement(case.model, case.mesh),
    )
    row: dict[str, Any] = {"form": form, "drawn": _bytes()}
    if form == "direct":
        engine = Engine(loaded.decoder, options=case.engine)
    else:
        engine = Engine.of(loaded, options=case.engine, consumes=True)
    row["made"] = _bytes()
    answers = engine.run(requests_of(engine, prompt=prompt, new=new))
    ends = [str(each.end) for answer in answers for each in answer if each.end is not None]
    row |= {"served": _bytes(), "ends": ends, "computed_tokens": engine.counts.computed_tokens}
    return row


def main() -> None:
    """Predicts, serves, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.serving_memory", description=__doc__
    )
    parser.add_argument("--preset", default="llama3_8b", choices=sorted(MODELS))
    parser.add_argument("--policy", default=PolicyName.BF16.value)
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=24, help="tokens of each answer")
    parser.add_argument(
        "--forms",
        nargs="*",
        choices=["direct", "loaded"],
        default=["loaded"],
        help="of the weights at first: the engine's own, or as a directory is loaded; or none",
    )
    parser.add_argument("--roles", action="store_true", help="by the command, once more")
    parser.add_argument("--cache", type=Path, help="keep compiled programs there")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s: {text}", flush=True)

    place = Path(tempfile.mkdtemp())
    keep_compiled_programs(args.cache or place / "cache")
    case = ServingCase(
        model=MODELS[args.preset](),
        policy=held_as_computed(POLICIES[PolicyName(args.policy)]),
        engine=EngineOptions(max_running=args.max_running, max_context=args.max_context),
        is_straight=jax.default_backend() == "gpu",
    )
    programs = compiled(case)
    totals = {str(key): step_bytes(each) for key, each in programs.items()}
    program, needs = max(totals.items(), key=lambda item: item[1])
    say(f"compiled {len(programs)} programs; predicted {needs:,} bytes, by {program}")
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "environment": environment(),
        "preset": args.preset,
        "engine": {"pages": case.limits.num_pages, "context": case.limits.max_positions},
        "predicted_bytes": needs,
        "program": program,
        "programs": totals,
        "rows": rows,
    }
    if args.roles:
        found = serving_memory(case)
        assert found.bytes == needs, f"the command says {found.bytes}"
        result["by_role"] = found.report.by_role()
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    tokenizer = Tokenizer.load(random_tokenizer(place, case.model.vocab_size))
    for form in args.forms:
        row = served(case, form, tokenizer, prompt=args.prompt, new=args.new)
        peak = row["served"]["peak_bytes_in_use"]
        row["predicted_over_peak"] = needs / peak - 1 if peak else None
        rows.append(row)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        beside = f"peak {peak:,} bytes, predicted {needs / peak - 1:+.2%}" if peak else ""
        say(f"{form}: {len(row['ends'])} requests, {row['computed_tokens']:,} tokens; {beside}")
        gc.collect()


def _bytes() -> dict[str, int]:
    stats = jax.devices()[0].memory_stats() or {}
    return {name: int(stats.get(name, 0)) for name in ("bytes_in_use", "peak_bytes_in_use")}


if __name__ == "__main__":
    main()
