"""A decoder as serving runs it: each layer's arrays by themselves, projections of one input packed.

Training scans over layers whose parameters are stacked, so that one layer is compiled. In a decode
step, which should only read memory, a loop costs as much again: its turns are launched by the host
one after another, and a weight is cut out of its stack before a library can multiply with it. Here
the step is one straight program, and queries, keys and values are one product, as gate and up are.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfra.config.model import ModelConfig, Stack
from jaxinfra.core.errors import UnsupportedError
from jaxinfra.layers.execution import Execution
from jaxinfra.models.definition import (
    ModelDefinition,
    Parameters,
    by_path,
    define_model,
    nest,
)
from jaxinfra.ops.quantized import (
    QuantizedWeight,
    are_alike,
    as_kernels_read,
    concatenated_columns,
)

_PACKED = {"attention": (("query", "key", "value"), -2), "mlp": (("gate", "up"), -1)}
"""What a layer's ``packed`` is made of, and the dim of the weights that they follow one another in,
which of a bias is the same from the end.
"""


def serving_form(definition: ModelDefinition, execution: Execution) -> ModelDefinition:
    """The same model, its layers each a stack of their own.

    Args:
        execution: how it runs; with ``packed``, projections of one input are one weight.

    Raises:
        UnsupportedError: a model with adapters.
    """
    if definition.lora is not None:
        raise UnsupportedError(
            "the serving form of a model with adapters: its projections are packed; merge the "
            "adapters first (jaxinfra convert)"
        )
    stacks = tuple(
        Stack(pattern=(block,), repeats=1)
        for stack in definition.config.stacks
        for _ in range(stack.repeats)
        for block in stack.pattern
    )
    return define_model(dataclasses.replace(definition.config, stacks=stacks), execution)


def serving_parameters(
    form: ModelDefinition, config: ModelConfig, parameters: Parameters, *, consumes: bool = False
) -> Parameters:
    """Parameters and state for ``form.bind``; copies, but for what lies outside of layers.

    Where one device serves, weights in few bits come in the order in which its kernel reads them.

    Args:
        config: of the stacked model.
        parameters: as that model's ``bind`` takes them.
        consumes: free each stack once all of its layers are cut out: never more is held than the
            parameters and the largest stack twice.
    """
    sources, layers = _weights_by_path(parameters), [*config.layer_places]
    result: dict[tuple[Any, ...], jax.Array | QuantizedWeight] = {}
    cuts: dict[tuple[str, ...], list[_Cut]] = {}
    for path in by_path(form.arrays):
        head, *rest = path.split("/")
        if head != "blocks":
            result[head, *rest] = sources[path]
            continue
        number, *rest = rest
        place, repetition = layers[int(number)]
        names, dim = [rest[-2]], 0
        if rest[-2] == "packed":
            names, dim = _PACKED[rest[-3]]
        stacks = ["/".join(["blocks", str(place), *rest[:-2], name, rest[-1]]) for name in names]
        cut = _Cut(keys=("blocks", int(number), *rest), repetition=repetition, dim=dim)
        cuts.setdefault(tuple(stacks), []).append(cut)
    for stacks, each in cuts.items():
        stacked = [sources[path] for path in stacks]
        for cut in each:
            weight = _cut(stacked, cut.repetition, dim=cut.dim)
            if isinstance(weight, QuantizedWeight) and form.execution.swiglu is not None:
                weight = as_kernels_read(weight)
            result[cut.keys] = weight
        if consumes:
            for leaf in jax.tree.leaves(stacked):
                leaf.delete()
    return nest(result)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """One layer's part of a stack, or of several that are packed."""

    keys: tuple[Any, ...]  # where it goes
    repetition: int
    dim: int  # that several follow one another in


def can_pack(parameters: Parameters) -> bool:
    """Whether projections of one input may be one weight: in few bits, where they are alike."""
    weights = _weights_by_path(parameters)
    for path, weight in weights.items():
        *parents, layer, name, last = ("", "", *path.split("/"))
        names, _ = _PACKED.get(layer, ((), 0))
        if isinstance(weight, QuantizedWeight) and name in names:
            beside = ("/".join([*parents[2:], layer, each, last]) for each in names)
            if not are_alike([weights[each] for each in beside if each in weights]):
                return False
    return True


def _weights_by_path(parameters: Parameters) -> dict[str, Any]:
    """As ``by_path``; a weight in few bits is one leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(
        parameters, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight)
    )
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@functools.partial(jax.jit, static_argnames=("dim",))
def _cut(
    stacked: list[jax.Array | QuantizedWeight], repetition: int, *, dim: int
) -> jax.Array | QuantizedWeight:
    """One repetition of these arrays, one after another, as a stack of one."""
    cut = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, repetition, 1), stacked)
    if len(cut) == 1:
        return cut[0]
    quantized = [each for each in cut if isinstance(each, QuantizedWeight)]
    if quantized:
        assert len(quantized) == len(cut), "can_pack"
        return concatenated_columns(quantized, axis=dim)
    return jnp.concatenate(cut, axis=dim)
