"""Attention sharded over a mesh by batch and heads: each device calls the kernel on its own shard.

One table (``DIMS``) and one rule (``HeadSplit``) derive the layout of operands and results from the
query's. On Explicit axes the query's type has its layout; on axes that a surrounding ``shard_map``
leaves out, the caller passes it (``MeshAxes``). In both cases the call runs under ``shard_map``. On
Auto axes only the compiler knows the layout, so ``custom_partitioning`` applies the rule. Only two
sums cross devices: dk and dv over query heads of one kv head, and gradients of sinks and a
broadcast bias over the batch or heads.

Dims: B batch, T query, S key, N query heads, K kv heads, G query heads per kv head, H query and key
width, V value width.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.common.varying import results_vary, vary_alike

from .spec import MeshAxes

type Operands = Mapping[str, jax.Array]
type Compute = Callable[[Operands], tuple[jax.Array, ...]]
"""Function from operands by name to a tuple of results, for any batch and number of heads."""

DIMS = {
    "q": "BTNH",
    "k": "BSKH",
    "v": "BSKV",
    "q_segment_ids": "BT",
    "kv_segment_ids": "BS",
    "q_lengths": "B",
    "kv_lengths": "B",
    "sinks": "N",
    "bias": "BNTS",
    "out": "BTNV",
    "lse": "BTN",
    "d_out": "BTNV",
    "d_lse": "BTN",
    "dq": "BTNH",
    "dk": "BSKH",
    "dv": "BSKV",
    "d_sinks": "N",
    "d_bias": "BNTS",
}
"""Dims of each operand and result of an attention kernel; those of a bias may have size 1."""

GRADIENT_OF = {"q": "dq", "k": "dk", "v": "dv", "sinks": "d_sinks", "bias": "d_bias"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadSplit:
    """Mesh axes that shard the batch, the kv heads, and the query heads within one kv head."""

    batch: tuple[str, ...]
    kv: tuple[str, ...]
    group: tuple[str, ...]
    bias_shape: tuple[int, ...] | None

    @classmethod
    def nearest(
        cls, q_spec: PartitionSpec, mesh_shape: Mapping[str, int], operands: Operands
    ) -> "HeadSplit":
        """Returns the split nearest to the query's layout under which each device can run a kernel.

        Batch axes and head axes are kept as long as they divide the dim. Axes of the query heads
        shard the kv heads first; if each device is left with one kv head, the others shard its
        query heads. The caller gathers over axes that do not divide.
        """
        B, _, N, _ = operands["q"].shape
        kv_heads = operands["k"].shape[2]
        batch, _ = _dividing(_axes(q_spec, 0), mesh_shape, B)
        kv, rest = _dividing(_axes(q_spec, 2), mesh_shape, kv_heads)
        group: tuple[str, ...] = ()
        if math.prod(mesh_shape[axis] for axis in kv) == kv_heads:
            group, _ = _dividing(rest, mesh_shape, N // kv_heads)
        bias_shape = operands["bias"].shape if "bias" in operands else None
        return cls(batch=batch, kv=kv, group=group, bias_shape=bias_shape)

    def spec(self, name: str) -> PartitionSpec:
        """Returns the PartitionSpec of an operand or result, by its name in ``DIMS``."""
        axes = {"B": self.batch, "K": self.kv, "N": self.kv + self.group}
        return PartitionSpec(*(axes.get(dim) or None for dim in self._dims(name)))

    def sum_axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes over which a result's shards are partial sums."""
        match name:
            case "dk" | "dv":
                return self.group
            case "d_sinks" | "d_bias":
                dims = self._dims(name)
                heads = () if "N" in dims else self.kv + self.group
                return heads if "B" in dims else self.batch + heads
            case _:
                return ()

    def _dims(self, name: str) -> str:
        if name in ("bias", "d_bias"):
            assert self.bias_shape is not None
            pairs = zip(DIMS[name], self.bias_shape, strict=True)
            return "".join("1" if size == 1 else dim for dim, size in pairs)
        return DIMS[name]


def _axes(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    entry = spec[dim] if dim < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _dividing(
    axes: tuple[str, ...], mesh_shape: Mapping[str, int], size: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits axes after the longest prefix whose devices divide ``size``."""
    count = 1
    for i, axis in enumerate(axes):
        count *= mesh_shape[axis]
        if size % count:
            return axes[:i], axes[i:]
    return axes, ()


def axes_left_to_the_compiler() -> tuple[str, ...]:
    """Returns the mesh axes that a surrounding ``shard_map`` leaves to the compiler, or ()."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    left = (name for name, kind in kinds if kind == AxisType.Auto and mesh.shape[name] > 1)
    return tuple(left) if mesh.manual_axes else ()


def call_traceable(
    compute: Compute, operands: Operands, results: tuple[str, ...], axes: MeshAxes
) -> tuple[jax.Array, ...]:
    """Runs plain JAX code: the compiler partitions Auto axes, ``shard_map`` Explicit ones."""
    if _is_explicit(operands):
        return _by_shard_map(compute, operands, results, axes)
    return compute(operands)


def call_opaque(
    compute: Compute, operands: Operands, results: tuple[str, ...], axes: MeshAxes
) -> tuple[jax.Array, ...]:
    """Runs custom calls under any of jit, vmap, scan, shard_map and sharded arrays.

    vmap folds its dim into the batch; a call with sinks, which have no batch dim, becomes a loop.

    Args:
        compute: function for any batch and number of heads; called on each device's shards.
        operands: by their names in ``DIMS``, "q" and "k" among them.
        results: names in ``DIMS`` of the results of ``compute``.
        axes: mesh axes of batch and heads, if neither types nor the compiler provide them.
    """
    names = tuple(operands)

    @jax.custom_batching.custom_vmap
    def op(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _partitioned(compute, dict(zip(names, arrays, strict=True)), results, axes)

    @op.def_vmap
    def fold(axis_size: int, in_batched: list[bool], *arrays: jax.Array):
        whole = tuple(
            x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, batched in zip(arrays, in_batched, strict=True)
        )
        if all(DIMS[name][0] == "B" for name in (*names, *results)):
            outs = op(*(x.reshape(axis_size * x.shape[1], *x.shape[2:]) for x in whole))
            outs = tuple(x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]) for x in outs)
        else:
            outs = jax.lax.map(lambda one: op(*one), whole)
        return outs, (True,) * len(results)

    # XLA pulls a custom call into the fusion that stores its result in a slice of a loop's stacked
    # residuals, and where the result has another use it then runs the kernel twice.
    return jax.lax.optimization_barrier(op(*operands.values()))


def _partitioned(
    compute: Compute, operands: Operands, results: tuple[str, ...], axes: MeshAxes
) -> tuple[jax.Array, ...]:
    gradient_of = {gradient: name for name, gradient in GRADIENT_OF.items()}
    if set(results) <= set(gradient_of):
        compute = _sealed(compute, like=tuple(gradient_of[result] for result in results))
    compute = results_vary(compute)
    if _is_explicit(operands) or axes_left_to_the_compiler():
        return _by_shard_map(compute, operands, results, axes)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return compute(operands)  # a device's block already
    return _by_compiler(compute, operands, results)


def _is_explicit(operands: Operands) -> bool:
    """Tells whether any operand's type says how it is sharded over Explicit mesh axes."""
    specs = (jax.typeof(x).sharding.spec for x in operands.values())
    return any(entry is not None for spec in specs for entry in spec)


def _on_one_device(
    compute: Compute, split: HeadSplit, names: tuple[str, ...], results: tuple[str, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    def block(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        # Made to vary alike, so that a kernel in plain JAX sees what a custom call sees: its
        # gradients are this device's part, and the only sums are those below.
        values = compute(dict(zip(names, vary_alike(arrays), strict=True)))
        return tuple(
            jax.lax.psum(value, axes) if (axes := split.sum_axes(name)) else value
            for name, value in zip(results, values, strict=True)
        )

    return block


def _by_shard_map(
    compute: Compute, operands: Operands, results: tuple[str, ...], axes: MeshAxes
) -> tuple[jax.Array, ...]:
    """Calls where a trace knows the query's layout; all other operands are brought to it."""
    explicit = _is_explicit(operands)
    mesh, axis_names, q_spec = _explicit_layout(operands) if explicit else _declared_layout(axes)
    split = HeadSplit.nearest(q_spec, mesh.shape, operands)
    in_specs = {name: split.spec(name) for name in operands}
    arrays = tuple(operands.values())
    if explicit:  # of these axes shard_map moves no data by itself, neither in nor out
        arrays = tuple(
            jax.sharding.reshard(x, NamedSharding(mesh, in_specs[name]))
            for name, x in operands.items()
        )
    values = jax.shard_map(
        _on_one_device(compute, split, tuple(operands), results),
        mesh=mesh,
        in_specs=tuple(in_specs.values()),
        out_specs=tuple(split.spec(name) for name in results),
        axis_names=axis_names,
    )(*arrays)
    if not explicit:
        return values
    own = {"out": q_spec, "lse": PartitionSpec(*q_spec[:3])}
    for name, gradient in GRADIENT_OF.items():
        if name in operands:
            own[gradient] = jax.typeof(operands[name]).sharding.spec
    return tuple(
        jax.sharding.reshard(value, NamedSharding(mesh, own[name]))
        for name, value in zip(results, values, strict=True)
    )


def _explicit_layout(operands: Operands) -> tuple[AbstractMesh, set[str], PartitionSpec]:
    sharding = jax.typeof(operands["q"]).sharding
    spec = PartitionSpec(*sharding.spec, *(None,) * (4 - len(sharding.spec)))
    if spec[1] is not None or spec[3] is not None:
        raise UnsupportedError(
            f"query is sharded as {sharding.spec}: its positions or its head width are split. A "
            "kernel sees whole sequences: gather them first, or merge partial results over the "
            "mesh axis (ring attention)"
        )
    kinds = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    return sharding.mesh, {name for name, kind in kinds if kind == AxisType.Explicit}, spec


def _declared_layout(axes: MeshAxes) -> tuple[AbstractMesh, set[str], PartitionSpec]:
    # custom_partitioning fails, or crashes the process, inside a shard_map over a part of the mesh.
    left = axes_left_to_the_compiler()
    batch, heads = (tuple(axis for axis in given if axis in left) for given in axes)
    return jax.sharding.get_abstract_mesh(), set(left), PartitionSpec(batch, None, heads)


def _by_compiler(
    compute: Compute, operands: Operands, results: tuple[str, ...]
) -> tuple[jax.Array, ...]:
    """Calls where only the compiler knows the query's layout."""
    names = tuple(operands)

    def whole(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return compute(dict(zip(names, arrays, strict=True)))

    def partition(mesh, arg_shapes, result_shapes):
        del result_shapes
        q_spec = arg_shapes[names.index("q")].sharding.spec
        split = HeadSplit.nearest(q_spec, mesh.shape, dict(zip(names, arg_shapes, strict=True)))
        return (
            mesh,
            _on_one_device(compute, split, names, results),
            tuple(NamedSharding(mesh, split.spec(name)) for name in results),
            tuple(NamedSharding(mesh, split.spec(name)) for name in names),
        )

    grouped = operands["q"].shape[2] != operands["k"].shape[2]
    rule, whole_dims = _shardy_rule(names, results, grouped=grouped)
    op = custom_partitioning(whole)
    op.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=whole_dims)
    # Only a compiled call is partitioned: outside of jit it would run on gathered arrays.
    return jax.jit(op, inline=True)(*operands.values())


def _shardy_rule(
    names: tuple[str, ...], results: tuple[str, ...], *, grouped: bool
) -> tuple[str, tuple[str, ...]]:
    """An einsum-like rule of which dims are split together, and those that must stay whole."""

    def side(of: tuple[str, ...]) -> str:
        # Query and kv heads are unrelated here unless they are the same. Written as N = (K G), a
        # mesh axis longer than K would split K by a part of the axis, which no PartitionSpec can
        # say; ``HeadSplit.nearest`` relates them instead.
        return ", ".join(
            " ".join("K" if dim == "N" and not grouped else dim for dim in DIMS[name])
            for name in of
        )

    rule = f"{side(names)} -> {side(results)}"
    # Shardy wants them in order of appearance.
    return rule, tuple(dict.fromkeys(letter for letter in rule if letter in "TSHV"))


_sealed_p = Primitive("sealed")
_sealed_p.multiple_results = True
_sealed_p.def_impl(lambda *arrays, function, like: function(*arrays))
_sealed_p.def_abstract_eval(lambda *avals, function, like: [avals[i] for i in like])
mlir.register_lowering(
    _sealed_p,
    mlir.lower_fun(lambda *arrays, function, like: function(*arrays), multiple_results=True),
)


def _sealed(compute: Compute, *, like: tuple[str, ...]) -> Compute:
    """Makes a computation one primitive, whose results have the types of the operands in ``like``.

    A fused backward sums dq in a mutable array. ``custom_partitioning`` lowers what it is given
    without resolving those first, as ``jit`` does, and refuses it ("Cannot lower jaxpr with
    effects", JAX 0.11.2); ``shard_map`` wants to know over which axes such a kernel's results vary.
    A primitive has no effects but its own and says that each gradient has the type of its operand;
    its lowering resolves mutable arrays.
    """

    def call(operands: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        names = tuple(operands)

        def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return compute(dict(zip(names, arrays, strict=True)))

        indices = tuple(names.index(name) for name in like)
        return tuple(_sealed_p.bind(*operands.values(), function=function, like=indices))

    return call
