"""A whole decode step with weights in few bits beside the same step in bfloat16.

python -m experiments.bench.serving.quantized_decode \\
    --out experiments/results/quantized-decode-h200.json

Llama-3-8B's shapes, random weights, straight layers with packed projections, greedy; embeddings and
the projection onto the vocabulary stay in bfloat16. All formats' steps are compiled first and take
turns then, as ``decode`` times one; "ms" is the median of turns on the host's
clock, "of_bf16" the bf16 step's time over it. Scales are bfloat16. Whether the kernel or XLA
multiplies is the choice of ``implementation="auto"``.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.bench.serving.decode import SAMPLINGS, Form, profile, repeatable, step_of, timed
from experiments.bench.table import Table
from jaxinfra.config.precision import PolicyName
from jaxinfra.config.presets import MODELS
from jaxinfra.model.definition import ModelDefinition, Parameters, by_path, define_model, nest
from jaxinfra.model.execution import DecodeForm
from jaxinfra.model.serving_form import serving_form, serving_parameters
from jaxinfra.numerics.policy import POLICIES, held_as_computed
from jaxinfra.ops.quantized import Activations, WeightCode, WeightFormat, round_weight
from jaxinfra.parallel.execution import execution_on

FORMATS = {
    "bf16": None,
    "int4 g128": WeightFormat(code=WeightCode.INT4, group_rows=128),
    "int8": WeightFormat(code=WeightCode.INT8),
    "fp8": WeightFormat(code=WeightCode.E4M3),
    "w8a8 fp8": WeightFormat(code=WeightCode.E4M3, activations=Activations.E4M3),
    "w8a8 int8": WeightFormat(code=WeightCode.INT8, activations=Activations.INT8),
}
TURNS = 3


@functools.partial(jax.jit, static_argnames=("form", "contracted"))
def _rounded(weight: jax.Array, form: WeightFormat, contracted: int) -> Any:
    """A stacked weight, layer by layer, so that one layer at a time is in fp32."""
    round_one = functools.partial(
        round_weight, form=form, num_inputs=contracted, scale_dtype=jnp.dtype(jnp.bfloat16)
    )
    return jax.lax.map(round_one, weight)


def in_format(
    definition: ModelDefinition, drawn: Parameters, form: WeightFormat | None
) -> Parameters:
    """The parameters with every projection in a format."""
    if form is None:
        return drawn
    rows = {row.path: row.contracted for row in definition.table()}
    leaves: dict[tuple[Any, ...], Any] = {}
    for path, leaf in by_path(drawn).items():
        keys = tuple(int(key) if key.isdigit() else key for key in path.split("/"))
        contracted = rows.get(path, 0)
        leaves[keys] = _rounded(leaf, form, contracted) if contracted else leaf
    return nest(leaves)


def served(preset: str, form: WeightFormat | None) -> Form:
    """The model in its serving form."""
    policy = held_as_computed(POLICIES[PolicyName.BF16])
    config = MODELS[preset]()
    definition = define_model(config, execution_on(policy=policy))
    drawn = jax.jit(definition.initialize)(jax.random.key(0))
    how = execution_on(policy=policy, decode_form=DecodeForm(packed=True))
    straight = serving_form(definition, how)
    parameters = serving_parameters(straight, in_format(definition, drawn, form))
    graphdef, weights = nnx.split(straight.bind(parameters))
    return Form(definition=straight, weights=weights, graphdef=graphdef)


def nbytes(form: Form) -> int:
    """Of all weights."""
    return sum(x.nbytes for x in jax.tree.leaves(form.weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds in all")
    parser.add_argument("--preset", default="llama3_8b")
    parser.add_argument("--shapes", nargs="+", default=["1x2048"], help="rows x context")
    parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=[*FORMATS])
    parser.add_argument(
        "--buffers", default="default", help="as experiments.bench.serving.decode has them"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    table = Table(out=args.out, deadline=time.monotonic() + args.budget)
    greedy = SAMPLINGS["greedy"]
    shapes = [(int(batch), int(context)) for batch, context in (s.split("x") for s in args.shapes)]
    forms = {name: served(args.preset, FORMATS[name]) for name in args.formats}
    states = {
        (name, shape): functools.partial(form.state, shape[0], shape[1], greedy)
        for name, form in forms.items()
        for shape in shapes
    }
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        steps = {
            key: pool.submit(step_of, forms[key[0]], jax.eval_shape(make), greedy, args.buffers)
            for key, make in states.items()
        }
        concurrent.futures.wait(steps.values())
    for shape in shapes:
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(TURNS):
            for name, form in forms.items():
                key = name, shape
                taken = timed(steps[key].result(), form, states[key], steps=args.steps)
                times[name].append(taken["ms"])
        medians = {name: statistics.median(each) for name, each in times.items()}
        for name, form in forms.items():
            row = {
                "ms": medians[name],
                "turns_ms": times[name],
                "of_bf16": round(medians["bf16"] / medians[name], 3) if "bf16" in forms else None,
                "weights_gb": round(nbytes(form) / 1e9, 3),
            }
            table.add(f"{args.preset} {shape[0]} x {shape[1]}, {name}", lambda row=row: row)
            if args.profile:
                make = states[name, shape]
                table.add(
                    f"{args.preset} {shape[0]} x {shape[1]}, {name}, kernels",
                    lambda form=form, make=make: profile(
                        repeatable(form, jax.eval_shape(make), greedy), form, make, top=12
                    ),
                )


if __name__ == "__main__":
    main()
