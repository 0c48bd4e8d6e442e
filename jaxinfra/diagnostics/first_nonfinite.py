"""The first operation of a program whose result is not finite though all that it reads is.

A traced program (a jaxpr) is run operation by operation. Where a result is not finite, its origin
is noted and handed on to what is made of it. So the origin of a NaN in a result is the overflow
that it came from, and not the last operation. An infinity that the program itself writes, such as
an attention mask's, is no fault until a NaN comes of it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """An operation that made the first value that is not finite."""

    operation: str  # JAX's name, such as "dot_general"
    scope: str  # of named scopes, such as "attention/qk_norm"
    source: str  # file, line and function
    inputs: tuple[str, ...]  # shapes and dtypes, with the largest absolute value
    made: str  # what came out

    def describe(self) -> str:
        """In a line."""
        scope = f"{self.scope}: " if self.scope else ""
        reads = ", ".join(self.inputs)
        return f"{scope}{self.operation} of {reads} gives {self.made} ({self.source})"


@dataclasses.dataclass(frozen=True, slots=True)
class _Written:
    """The origin of an infinity that the program writes down itself."""


_WRITTEN = _Written()

type _Mark = Origin | _Written | None
"""None: finite."""

# Operations that only call a program, and where in their parameters that is.
_CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def first_nonfinite(function: Callable[..., Any], *args: Any) -> Origin | None:
    """Runs a function of finite arrays operation by operation; None where its results are finite.

    Its programs within programs are run whole first, and looked into only where what they give is
    not finite.

    >>> import jax.numpy as jnp
    >>> first_nonfinite(lambda x: jnp.sum(jnp.log(x - x)), jnp.ones(2)).operation
    'log'
    """
    traced = jax.make_jaxpr(function)(*args)
    leaves = jax.tree.leaves(args)
    _, marks = _Walk().run(traced, leaves, [None] * len(leaves), scope="")
    return next((mark for mark in marks if isinstance(mark, Origin)), None)


def is_finite(tree: Any) -> bool:
    """Whether every float in a tree is."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return all(bool(jnp.isfinite(leaf).all()) for leaf in floats)


@final
class _Walk:
    """Runs programs; values and their marks side by side."""

    def run(
        self, program: Any, args: Sequence[Any], marks: Sequence[_Mark], *, scope: str
    ) -> tuple[list[Any], list[_Mark]]:
        jaxpr, consts = program.jaxpr, program.consts
        values: dict[Any, tuple[Any, _Mark]] = {}
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            values[variable] = value, None if is_finite(value) else _WRITTEN
        for variable, value, mark in zip(jaxpr.invars, args, marks, strict=True):
            values[variable] = value, mark

        def read(atom: Any) -> tuple[Any, _Mark]:
            if isinstance(atom, jex.Literal):
                finite = np.isfinite(np.asarray(atom.val, np.float64)).all()
                return atom.val, None if finite else _WRITTEN
            return values[atom]

        for eqn in jaxpr.eqns:
            ins, in_marks = zip(*map(read, eqn.invars), strict=True) if eqn.invars else ((), ())
            outs, out_marks = self._apply(eqn, ins, in_marks, scope)
            for variable, value, mark in zip(eqn.outvars, outs, out_marks, strict=True):
                values[variable] = value, mark
        found = [read(atom) for atom in jaxpr.outvars]
        return [value for value, _ in found], [mark for _, mark in found]

    def _apply(
        self, eqn: Any, ins: Sequence[Any], marks: Sequence[_Mark], scope: str
    ) -> tuple[list[Any], list[_Mark]]:
        outs = _bound(eqn, ins)
        bad = [not is_finite(out) for out in outs]
        if not any(bad):
            return outs, [None] * len(outs)
        where = "/".join(part for part in (scope, str(eqn.source_info.name_stack)) if part)
        inner = self._inside(eqn, ins, marks, where)
        if inner is None:
            inner = [self._mark(eqn, ins, marks, out, where) for out in outs]
        known = next((mark for mark in inner if isinstance(mark, Origin)), None)
        # A value that is not finite in the whole and was so by rounding alone in the parts.
        spare = known or next((m for m in marks if isinstance(m, Origin)), _WRITTEN)
        return outs, [(mark or spare) if b else None for b, mark in zip(bad, inner, strict=True)]

    def _inside(
        self, eqn: Any, ins: Sequence[Any], marks: Sequence[_Mark], scope: str
    ) -> list[_Mark] | None:
        """Marks of what a program within gives; None where the operation is none."""
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            return self.run(params[_CALLS[name]], ins, marks, scope=scope)[1]
        if name == "cond":
            branch = params["branches"][int(ins[0])]
            return self.run(branch, ins[1:], marks[1:], scope=scope)[1]
        if name == "scan":
            return self._loop(eqn, ins, marks, scope)
        return None

    def _loop(
        self, eqn: Any, ins: Sequence[Any], marks: Sequence[_Mark], scope: str
    ) -> list[_Mark]:
        """Turn by turn, up to the first in which something goes wrong."""
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        turn = jax.jit(jex.jaxpr_as_fun(body))
        # Constants, then what is carried, then columns: these alone have a dim more outside.
        columns = sum(map(_is_column, eqn.invars, body.jaxpr.invars))
        carried = len(eqn.outvars) - sum(map(_is_column, eqn.outvars, body.jaxpr.outvars))
        first = len(ins) - columns - carried
        args, arg_marks = list(ins), list(marks)
        found: list[_Mark] = [None] * len(eqn.outvars)
        for n in range(length):
            at = length - 1 - n if eqn.params["reverse"] else n
            for i in range(first + carried, len(ins)):
                args[i] = ins[i][at]
                arg_marks[i] = None if is_finite(args[i]) else marks[i]
            outs = turn(*args)
            out_marks: list[_Mark] = [None] * len(outs)
            if not is_finite(outs):
                outs, out_marks = self.run(body, args, arg_marks, scope=scope)
            found = [new or old for new, old in zip(out_marks, found, strict=True)]
            found[:carried] = out_marks[:carried]
            if any(isinstance(mark, Origin) for mark in out_marks):
                break
            args[first : first + carried] = outs[:carried]
            arg_marks[first : first + carried] = out_marks[:carried]
        return found

    def _mark(
        self, eqn: Any, ins: Sequence[Any], marks: Sequence[_Mark], out: Any, scope: str
    ) -> _Mark:
        """Of an operation that has nothing inside."""
        if is_finite(out):
            return None
        if known := [mark for mark in marks if isinstance(mark, Origin)]:
            return known[0]
        if any(marks) and not bool(jnp.isnan(out).any()):
            return _WRITTEN  # the mask's infinity, moved or chosen
        return Origin(
            operation=eqn.primitive.name,
            scope=scope,
            source=_source(eqn),
            inputs=tuple(_described(value) for value in ins),
            made=_made(out),
        )


def _bound(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """An operation's results."""
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _is_column(outside: Any, inside: Any) -> bool:
    return len(outside.aval.shape) > len(inside.aval.shape)


def _source(eqn: Any) -> str:
    text = source_info_util.summarize(eqn.source_info)
    path, _, rest = text.partition(":")
    return f"{Path(path).name}:{rest}"


def _described(value: Any) -> str:
    array = np.asarray(value)
    dims = ",".join(map(str, array.shape))
    text = f"{array.dtype}[{dims}]"
    if not jnp.issubdtype(array.dtype, jnp.inexact) or not array.size:
        return text
    return f"{text} up to {np.nanmax(np.abs(array.astype(np.float64))):.3g}"


def _made(value: Any) -> str:
    array = np.asarray(value).astype(np.float64)
    nans, infinities = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    parts = [f"{nans} NaN"] * bool(nans) + [f"{infinities} infinite"] * bool(infinities)
    return f"{' and '.join(parts)} of {math.prod(array.shape)} elements"
