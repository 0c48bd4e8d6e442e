"""A stack of identical modules whose parameters carry a leading layers dim."""

from collections.abc import Callable

import jax
from flax import nnx

from jaxinfra.axes import LAYERS


def stack[M: nnx.Module](make: Callable[[nnx.Rngs], M], *, num_layers: int, rngs: nnx.Rngs) -> M:
    """Builds ``num_layers`` modules from independent keys and stacks their parameters.

    The result is not callable as one layer: split it and scan over the leading dim.
    """

    def split(key: jax.Array) -> tuple[nnx.GraphDef[M], nnx.State]:
        return nnx.split(make(nnx.Rngs(params=key)))

    graphdef, stacked = jax.vmap(split)(jax.random.split(rngs.params(), num_layers))
    module = nnx.merge(graphdef, stacked)
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable) and "axes" in node.get_metadata():
            node.set_metadata(axes=(LAYERS, *node.axes))
    return module
