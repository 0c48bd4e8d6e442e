"""A whole decode step with sampling on the host's clock, beside the least time that memory allows.

python -m experiments.bench.serving.decode --out experiments/results/decode-h200.json

The state is donated and stays on the device, and each step takes the tokens of the one before, as a
server calls it; "ms" is the median over rounds of many steps. "floor_ms" is weights and cached keys
and values once at the rate of a copy in the same process. Forms of a model: "scan" has stacked
layers in a loop, "serving" each layer's arrays by themselves and packed. Command buffers: XLA's
default, none, and with kernels of ours in them. --profile adds the longest kernels by name. Rows
"prefill" are whole prompts into an empty cache; their operations are those of weights, of attention
to earlier tokens only, and of one row of logits each.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.stages
from flax import nnx
from jax.experimental.mosaic.gpu import profiler

from experiments.bench.table import Table
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.model import GroupedAttentionConfig
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.presets import MODELS
from jaxinfra.model.cache import after_pass
from jaxinfra.model.definition import ModelDefinition, define_model
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import (
    COMPILER_OPTIONS,
    serving_form,
    serving_parameters,
)
from jaxinfra.numerics.policy import POLICIES, held_as_computed
from jaxinfra.parallel.execution import execution_on
from jaxinfra.serving.engine.weights import NamedArrays
from jaxinfra.serving.placement import serving_placement
from jaxinfra.serving.sampling import GREEDY, SamplingConfig, SamplingNeeds, SamplingRows
from jaxinfra.serving.steps import DecodeState, StepConfig, decode_rows, prefill

SHAPES = {
    "llama3_8b": ((1, 2048), (16, 2048), (64, 2048), (128, 1024)),
    "llama32_1b": ((1, 2048), (64, 2048)),
}
PREFILLS = {"llama3_8b": ((8, 2048),), "llama32_1b": ((1, 128),)}
SMALL = {"tiny": ((2, 32),)}
SAMPLINGS = {
    "greedy": GREEDY,
    "top-p": SamplingConfig(temperature=0.8, top_k=50, top_p=0.95),
}
BUFFERS: dict[str, dict[str, Any]] = {
    "default": {},
    "off": {"xla_gpu_enable_command_buffer": ""},
    "kernels": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN",
        "xla_gpu_graph_min_graph_size": 1,
    },
}
PROFILE = "profile"
STEPS, ROUNDS, SLACK = 40, 3, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A model with random weights in one form."""

    definition: ModelDefinition
    weights: nnx.State
    graphdef: nnx.GraphDef

    @functools.cached_property
    def arrays(self) -> NamedArrays:
        """The weights as the engine passes them: Python would walk through a state."""
        return NamedArrays.of(self.weights)

    def state(self, batch: int, context: int, sampling: SamplingConfig) -> DecodeState:
        """Rows in the midst of generation; numbers, as zeros take less power."""
        decoder = nnx.merge(self.graphdef, self.weights)

        def drawn(shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jax.random.normal(jax.random.key(3), shape, dtype)

        def caches() -> tuple:
            empty = decoder.empty_cache(batch=batch, num_slots=context + SLACK)
            return tuple(
                after_pass(each, {n: drawn(x.shape, x.dtype) for n, x in each.arrays.items()})
                for each in empty
            )

        return DecodeState(
            cache=jax.jit(caches)(),
            positions_B=jnp.full((batch,), context, jnp.int32),
            keys_B=jax.random.split(jax.random.key(1), batch),
            sampling=SamplingRows.of([sampling] * batch),
        )


def forms(
    preset: str,
    wanted: Sequence[str],
    *,
    tensor: int = 1,
) -> Iterator[tuple[str, Form]]:
    """The model in each form, of the same weights, over so many tensor devices."""
    config = MODELS[preset]()
    placement = serving_placement(config, MeshConfig(tensor=tensor)) if tensor > 1 else None
    on = functools.partial(
        execution_on, placement, policy=held_as_computed(POLICIES[PolicyName.BF16])
    )
    definition = define_model(config, on())
    where = None if placement is None else placement.parameters(definition)
    drawn = jax.jit(definition.initialize, out_shardings=where)(jax.random.key(0))

    def form(definition: ModelDefinition, parameters: Any) -> Form:
        graphdef, weights = nnx.split(definition.bind(parameters))
        return Form(definition=definition, weights=weights, graphdef=graphdef)

    if "scan" in wanted:
        yield "scan", form(definition, drawn)
    if "serving" in wanted:
        how = DecodeForm(packed=tensor == 1)
        served = serving_form(definition, on(decode_form=how))
        yield "serving", form(served, serving_parameters(served, drawn))


def floor_bytes(form: Form, batch: int, context: int) -> int:
    """Weights that a token is multiplied with, and the cache, each read once."""
    table = form.definition.table()
    weights = sum(each.size * each.dtype.itemsize for each in table if each.matmul)
    per_token = sum(
        block.mixer.cache.elements * repeats
        for block, repeats in zip(
            form.definition.config.blocks, form.definition.config.repeats, strict=True
        )
    )
    return weights + batch * context * per_token * form.definition.execution.policy.compute.itemsize


def copied() -> float:
    """Bytes/s of a copy, read and written."""
    x = jax.random.normal(jax.random.key(0), (1 << 29,), jnp.float32)
    plus = jax.jit(lambda x: x + 1)
    times = []
    for _ in range(3):
        _, taken = profiler.measure(plus, iterations=5)(x)
        assert taken is not None, "the copy launched no kernel"
        times += taken
    return 2 * x.nbytes / (statistics.median(times) / 1e3)


def step_of(
    form: Form, state: DecodeState, sampling: SamplingConfig, buffers: str
) -> jax.stages.Compiled:
    """The compiled step."""
    config = StepConfig(
        graphdef=form.graphdef,
        num_ids=form.definition.config.vocab_size,
        needs=SamplingNeeds.of([sampling]),
    )
    tokens = jax.ShapeDtypeStruct(state.positions_B.shape, jnp.int32)

    def step(weights: NamedArrays, state: DecodeState, tokens: jax.Array):
        return decode_rows(weights.state, state, tokens, config=config)

    lowered = jax.jit(step, donate_argnums=1).lower(form.arrays, state, tokens)
    return lowered.compile(compiler_options=COMPILER_OPTIONS | BUFFERS[buffers])


def timed(step: jax.stages.Compiled, form: Form, make_state, *, steps: int) -> dict[str, Any]:
    """Host time of a step, and the tokens that the first steps drew."""
    state = make_state()
    tokens = jnp.arange(state.positions_B.size, dtype=jnp.int32)
    first = []
    for _ in range(3):
        tokens, state = step(form.arrays, state, tokens)
        first.append(jax.device_get(tokens)[:4].tolist())
    taken, issued = [], []
    for _ in range(ROUNDS):
        jax.block_until_ready(tokens)
        start = time.perf_counter()
        for _ in range(steps):
            tokens, state = step(form.arrays, state, tokens)
        issued.append((time.perf_counter() - start) / steps)
        jax.block_until_ready(tokens)
        taken.append((time.perf_counter() - start) / steps)
    return {
        "ms": round(1e3 * statistics.median(taken), 4),
        "issue_ms": round(1e3 * statistics.median(issued), 4),
        "tokens": first,
    }


def prefill_flops(form: Form, batch: int, length: int) -> float:
    """Operations of whole prompts."""
    config = form.definition.config
    table = form.definition.table()
    weights = sum(each.size for each in table if each.matmul)
    vocabulary = config.vocab_size * config.model_dim
    total = 2.0 * batch * (length * (weights - vocabulary) + vocabulary)
    for block, repeats in zip(config.blocks, config.repeats, strict=True):
        if isinstance(block.mixer, GroupedAttentionConfig):
            width = block.mixer.num_q_heads * block.mixer.head_dim
            total += 2.0 * batch * repeats * width * length**2
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    """Whole prompts into an empty cache."""

    form: Form
    batch: int
    length: int

    def arguments(self) -> tuple[Any, ...]:
        """Random prompts, drawn from greedily."""
        batch, ids = self.batch, self.form.definition.config.vocab_size
        return (
            self.form.weights,
            jax.random.randint(jax.random.key(5), (batch, self.length), 0, ids, jnp.int32),
            jnp.full((batch,), self.length, jnp.int32),
            jax.random.split(jax.random.key(1), batch),
            SamplingRows.of([GREEDY] * batch),
        )

    def compiled(self) -> jax.stages.Compiled:
        """The program."""
        config = StepConfig(
            graphdef=self.form.graphdef,
            num_ids=self.form.definition.config.vocab_size,
            needs=SamplingNeeds.of([GREEDY]),
        )
        return prefill.lower(*self.arguments(), config=config, num_slots=self.length).compile()

    def measure(self, program: concurrent.futures.Future[jax.stages.Compiled]) -> dict[str, Any]:
        """Host time of a call, several in a row."""
        run, arguments = program.result(), self.arguments()
        tokens, _ = jax.block_until_ready(run(*arguments))
        calls, taken = (4 if self.batch * self.length > 1024 else 40), []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(calls):
                tokens, _ = run(*arguments)
            jax.block_until_ready(tokens)
            taken.append((time.perf_counter() - start) / calls)
        seconds = statistics.median(taken)
        flops = prefill_flops(self.form, self.batch, self.length)
        return {"ms": round(1e3 * seconds, 4), "tflop_s": round(flops / seconds / 1e12, 1)}


def repeatable(form: Form, state: DecodeState, sampling: SamplingConfig) -> jax.stages.Compiled:
    """The step compiled without command buffers, whose kernels the profiler does not see."""
    config = StepConfig(
        graphdef=form.graphdef,
        num_ids=form.definition.config.vocab_size,
        needs=SamplingNeeds.of([sampling]),
    )
    # Within another program nothing is donated, so that the step can be repeated.
    kept = jax.jit(functools.partial(decode_rows, config=config))
    tokens = jax.ShapeDtypeStruct(state.positions_B.shape, jnp.int32)
    options = COMPILER_OPTIONS | BUFFERS["off"]
    return kept.lower(form.weights, state, tokens).compile(compiler_options=options)


def profile(step: jax.stages.Compiled, form: Form, make_state, *, top: int) -> dict[str, Any]:
    """Time and count of a step's kernels by name, the longest first."""
    state = make_state()
    tokens = jnp.arange(state.positions_B.size, dtype=jnp.int32)
    _, launches = profiler.measure(step, aggregate=False)(form.weights, state, tokens)
    assert launches is not None, "the step launched no kernel"
    total: dict[str, list[float]] = collections.defaultdict(list)
    for name, taken in launches:
        total[name].append(taken)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:top]
    return {
        "kernel_ms": round(sum(taken for _, taken in launches), 4),
        "launches": len(launches),
        "kernels": [
            {
                "name": n[:110],
                "count": len(t),
                "ms": round(sum(t), 4),
                "each_us": round(1e3 * statistics.median(t), 2),
            }
            for n, t in ranked
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds in all")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    parser.add_argument("--forms", nargs="+", default=["scan", "serving"])
    parser.add_argument("--buffers", nargs="+", default=[*BUFFERS], choices=[*BUFFERS])
    parser.add_argument("--samplings", nargs="+", default=[*SAMPLINGS], choices=[*SAMPLINGS])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--programs", type=pathlib.Path, help="folder for compiled programs' text")
    parser.add_argument("--small", action="store_true", help="sizes for a check on a CPU")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget, only=args.only)
    copy = None
    if not args.small:
        copy = table.add("copy", lambda: {"gb_s": round(copied() / 1e9, 1)}).get("gb_s")
    for preset, shapes in (SMALL if args.small else SHAPES).items():
        names = [f"{preset} {batch} x {context}" for batch, context in shapes]
        names += [f"{preset} prefill {b} x {t}" for b, t in PREFILLS.get(preset, ())]
        if not any(name.startswith(tuple(args.only)) for name in names):
            continue
        for form_name, form in forms(preset, args.forms):
            measure_form(table, args, copy, preset, form_name, form, shapes)


def measure_form(table, args, copy, preset, form_name, form: Form, shapes) -> None:
    """Rows of one model in one form; programs are compiled side by side first."""
    wanted = {}
    for batch, context in shapes:
        for sampling in args.samplings:
            for buffers in args.buffers:
                name = f"{preset} {batch} x {context}, {sampling}, {form_name}, buffers {buffers}"
                if name.startswith(tuple(args.only)):
                    wanted[name] = (batch, context, sampling, buffers)
            name = f"{preset} {batch} x {context}, {sampling}, {form_name}, profile"
            if args.profile and name.startswith(tuple(args.only)):
                wanted[name] = (batch, context, sampling, PROFILE)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:

        def compiled(batch: int, context: int, sampling: str, buffers: str):
            make = functools.partial(form.state, batch, context, SAMPLINGS[sampling])
            state = jax.eval_shape(make)
            if buffers == PROFILE:
                return repeatable(form, state, SAMPLINGS[sampling])
            return step_of(form, state, SAMPLINGS[sampling], buffers)

        start = time.monotonic()
        programs = {name: pool.submit(compiled, *each) for name, each in wanted.items()}
        prefills = {}
        for batch, length in PREFILLS.get(preset, ()):
            name = f"{preset} prefill {batch} x {length}, {form_name}"
            if name.startswith(tuple(args.only)):
                each = Prefill(form=form, batch=batch, length=length)
                prefills[name] = each, pool.submit(each.compiled)
        concurrent.futures.wait([*programs.values(), *(each for _, each in prefills.values())])
        print(f"compiled {time.monotonic() - start:.1f} s", flush=True)
    for name, (batch, context, sampling, buffers) in wanted.items():
        make = functools.partial(form.state, batch, context, SAMPLINGS[sampling])

        def measure(name=name, batch=batch, context=context, make=make, kind=buffers) -> dict:
            step = programs[name].result()
            if kind == PROFILE:
                return profile(step, form, make, top=24)
            if args.programs is not None:
                args.programs.mkdir(parents=True, exist_ok=True)
                text = step.as_text()
                assert text is not None
                (args.programs / (name.replace(" ", "_").replace(",", "") + ".txt")).write_text(
                    text
                )
            row = timed(step, form, make, steps=2 if args.small else STEPS)
            if copy is not None:
                row["floor_ms"] = round(floor_bytes(form, batch, context) / copy / 1e6, 4)
            return row

        table.add(name, measure)
    for name, (prompts, program) in prefills.items():
        table.add(name, functools.partial(prompts.measure, program))


if __name__ == "__main__":
    main()
