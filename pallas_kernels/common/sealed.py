"""A computation as one primitive, which is lowered by tracing it."""

from collections.abc import Callable, Mapping

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_sealed_p = Primitive("sealed")
_sealed_p.multiple_results = True
_sealed_p.def_impl(lambda *arrays, function, like: function(*arrays))
_sealed_p.def_abstract_eval(lambda *avals, function, like: [avals[i] for i in like])
mlir.register_lowering(
    _sealed_p,
    mlir.lower_fun(lambda *arrays, function, like: function(*arrays), multiple_results=True),
)

type Sealed = Callable[[Mapping[str, jax.Array]], tuple[jax.Array, ...]]


def sealed(compute: Sealed, *, like: tuple[str, ...]) -> Sealed:
    """A function of arrays by name whose results have the types of those named in ``like``.

    A fused backward sums dq in a mutable array. ``custom_partitioning`` lowers what it is given
    without resolving those first, as ``jit`` does, and refuses it ("Cannot lower jaxpr with
    effects", JAX 0.11.2); ``shard_map`` wants to know over which axes such a kernel's results vary.
    A primitive has no effects but its own and says that each gradient is as what it is of; its
    lowering resolves mutable arrays.
    """

    def call(operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        names = tuple(operands)

        def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return compute(dict(zip(names, arrays, strict=True)))

        indices = tuple(names.index(name) for name in like)
        return tuple(_sealed_p.bind(*operands.values(), function=function, like=indices))

    return call
