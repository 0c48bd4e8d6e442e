"""How a stage leaves out what it does not do in a tick: three ways, on one GPU that is one stage.

    python -m experiments.bench.pipeline_ticks            # the 3B shapes of `bench pipeline`

``loop`` is the executor's: a loop of one turn or none. ``cond`` is ``lax.cond``, through which XLA
may copy what is carried. ``masked`` does everything in every tick and throws away what was not due:
one of two actions here, more than that in a pipeline, whose stages also wait.
"""

import argparse
import json
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.bench.environment import environment
from experiments.bench.pipeline import Variant, add_sizes, measure, prepare, text_of
from jaxinfra.config.mesh import MeshConfig
from jaxinfra.config.pipeline import PipelineSchedule
from jaxinfra.parallel.pipeline import executor


def _cond(predicate: jax.Array, function: Callable[[Any], Any], carry: Any) -> Any:
    return jax.lax.cond(predicate, function, lambda carry: carry, carry)


def _masked(predicate: jax.Array, function: Callable[[Any], Any], carry: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(predicate, new, old), function(carry), carry)


_FORMS = {"alone": None, "loop": executor._when, "cond": _cond, "masked": _masked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_sizes(parser, layers=8)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    args = parser.parse_args()
    args.trace, args.chunks = None, 2
    prepared = []
    with ThreadPoolExecutor(max_workers=len(_FORMS)) as pool:
        for name, form in _FORMS.items():
            variant = Variant(
                name=name,
                mesh=MeshConfig(),
                num_layers=args.layers,
                micro_batches=args.micro_batches,
                rows=args.micro_batches * args.rows,
                schedule=None if form is None else PipelineSchedule.ONE_F_ONE_B,
            )
            with mock.patch.object(executor, "_when", form or executor._when):
                prepared.append(prepare(args, variant, pool))
    shardings = jax.tree.map(lambda x: x.sharding, prepared[0].parameters)
    initialize = jax.jit(prepared[0].initialize, out_shardings=shardings)
    parameters = initialize(jax.random.key(0))
    rows = []
    for each in prepared:
        rows.append(measure(args, each, parameters))
        rows[-1]["ms_a_micro_batch"] = 1e3 * rows[-1]["step_s"] / args.micro_batches
        print(text_of(rows[-1]), flush=True)
        if args.out:
            report = {"environment": environment(), "rows": rows}
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
