"""Casts that XLA for GPUs would drop from a traced program.

It takes a cast to fewer bits of float and the cast back for nothing done, and follows numbers
through what only lays them out. A barrier stops it.
"""

import jax.extend.core
import jax.numpy as jnp

LAYS_OUT = {
    "bitcast_convert_type", "broadcast_in_dim", "concatenate", "copy", "dynamic_slice",
    "dynamic_update_slice", "layout_constraint", "pad", "reshape", "rev", "slice", "squeeze",
    "transpose",
}  # fmt: skip
"""Through which a number stays what it is."""
KERNELS = {"mpmd_map", "pallas_call"}
"""What XLA does not look into."""


def casts_dropped(jaxpr: jax.extend.core.Jaxpr, *, most_bytes: int = 2) -> list:
    """Casts back that meet a number that was just cast to at most so many bytes."""
    return _dropped(jaxpr, [False] * len(jaxpr.invars), most_bytes)[0]


def _dropped(jaxpr, shortened: list[bool], most_bytes: int) -> tuple[list, list[bool]]:
    """The casts, and which results are numbers just shortened; ``shortened`` are arguments."""
    open_ = {v for v, is_open in zip(jaxpr.invars, shortened, strict=True) if is_open}
    found = []

    def is_open(variable) -> bool:
        return isinstance(variable, jax.extend.core.Var) and variable in open_

    for equation in jaxpr.eqns:
        reads = [is_open(v) for v in equation.invars]
        name = equation.primitive.name
        inner = [] if name in KERNELS else list(jax.extend.core.jaxprs_in_params(equation.params))
        for each in inner:
            body = getattr(each, "jaxpr", each)
            # A condition's number, or constants of a loop's test, come before what bodies read.
            given = [False] * len(body.invars) + reads
            more, results = _dropped(
                body, given[-len(body.invars) :] if body.invars else [], most_bytes
            )
            found += more
            if len(results) == len(equation.outvars):
                open_ |= {v for v, short in zip(equation.outvars, results, strict=True) if short}
        if name == "convert_element_type":
            (x,), (y,) = equation.invars, equation.outvars
            if reads[0] and _bytes(y) > _bytes(x):
                found.append(equation)
            if 0 < _bytes(y) < _bytes(x) and _bytes(y) <= most_bytes:
                open_.add(y)
        elif name in LAYS_OUT and any(reads):
            open_ |= set(equation.outvars)
    return found, [is_open(v) for v in jaxpr.outvars]


def _bytes(variable) -> int:
    """Of a float; 0 of anything else."""
    dtype = variable.aval.dtype
    return dtype.itemsize if jnp.issubdtype(dtype, jnp.floating) else 0
