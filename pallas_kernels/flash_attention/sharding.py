"""How attention is split over a mesh: by batch and by heads, each device calling the kernel on its
own block.

A custom call hides its computation from the partitioner, so the split is declared here, once, for
each kind of mesh axes: Auto (``custom_partitioning`` with a Shardy rule, because the layout is
known only to the compiler), Explicit (``shard_map``, because the layout is in the type), and Auto
inside a ``shard_map`` over other axes (the caller declares it, nobody else can). Only two sums
cross devices: dk and dv where the query heads of one kv head are split, and the gradient
of sinks over the batch.

Dims: B batch, T query, S key, N query heads, K kv heads, G query heads per kv head, H query and key
width, V value width.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.common.errors import UnsupportedError
from pallas_kernels.common.varying import results_vary, vary_alike

type Kernel = Callable[[dict[str, jax.Array]], tuple[jax.Array, ...]]
"""Arrays by name to results in an agreed order."""

DIMS = {
    "q": "BTNH",
    "k": "BSKH",
    "v": "BSKV",
    "q_scale": "BTN",
    "k_scale": "BJK",
    "v_t": "BKVP",
    "v_scale": "BJK",
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
"""Dims of each operand and result of an attention kernel; those of a bias may have size 1. Of FP8
operands J counts blocks of keys, P keys padded to whole blocks."""

GRADIENT_OF = {"q": "dq", "k": "dk", "v": "dv", "sinks": "d_sinks", "bias": "d_bias"}


class MeshAxes(NamedTuple):
    """Mesh axes that split the batch and the query heads, as the caller declares them."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Mesh axes that split the batch, the kv heads, and the query heads of one kv head."""

    batch: tuple[str, ...]
    kv: tuple[str, ...]
    group: tuple[str, ...]
    bias_shape: tuple[int, ...] | None

    def spec(self, name: str) -> PartitionSpec:
        """How an operand or result lies on the mesh."""
        axes = {"B": self.batch, "K": self.kv, "N": self.kv + self.group}
        return PartitionSpec(*(axes.get(dim) or None for dim in self._dims(name)))

    def sum_axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes over which the blocks of a result are partial sums."""
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


def make_layout(
    q_spec: PartitionSpec, mesh_shape: Mapping[str, int], operands: Mapping[str, jax.Array]
) -> Layout:
    """The layout nearest to the query's that the kernel can keep.

    Axes of the batch and of the heads stay while they divide them; a query head's axes split first
    the kv heads, then, if each device is left with one kv head, the queries that share it. What
    does not divide is gathered by the caller.
    """
    q_spec = PartitionSpec(*q_spec, *(None,) * (4 - len(q_spec)))
    B, _, N, _ = operands["q"].shape
    kv_heads = operands["k"].shape[2]
    batch, _ = _prefix(_axes(q_spec[0]), mesh_shape, B)
    kv, rest = _prefix(_axes(q_spec[2]), mesh_shape, kv_heads)
    group: tuple[str, ...] = ()
    if math.prod(mesh_shape[axis] for axis in kv) == kv_heads:
        group, _ = _prefix(rest, mesh_shape, N // kv_heads)
    bias_shape = operands["bias"].shape if "bias" in operands else None
    return Layout(batch=batch, kv=kv, group=group, bias_shape=bias_shape)


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _prefix(
    axes: tuple[str, ...], mesh_shape: Mapping[str, int], size: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits axes after the longest prefix whose devices divide ``size``."""
    count = 1
    for i, axis in enumerate(axes):
        count *= mesh_shape[axis]
        if size % count:
            return axes[:i], axes[i:]
    return axes, ()


def has_explicit_layout(operands: Mapping[str, jax.Array]) -> bool:
    """Whether the type of any operand says how it is split over mesh axes."""
    specs = (jax.typeof(x).sharding.spec for x in operands.values())
    return any(entry is not None for spec in specs for entry in spec)


def axes_left_to_the_compiler() -> tuple[str, ...]:
    """Mesh axes that a ``shard_map`` around this trace leaves out; () outside of any."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    left = (name for name, kind in kinds if kind == AxisType.Auto and mesh.shape[name] > 1)
    return tuple(left) if mesh.manual_axes else ()


def partitioned(
    kernel: Kernel, operands: dict[str, jax.Array], results: tuple[str, ...], axes: MeshAxes
) -> tuple[jax.Array, ...]:
    """Calls a kernel so that arrays split over batch and heads are not gathered.

    Args:
        kernel: works on any batch and any heads; called on each device's block.
        operands: by their names in ``DIMS``, "q" and "k" among them.
        results: names in ``DIMS`` of what the kernel returns.
        axes: the layout, where neither the arrays' types nor the compiler can tell it.
    """
    if set(results) <= set(GRADIENT_OF.values()):
        kernel = _sealed(kernel, results)
    kernel = results_vary(kernel)
    if has_explicit_layout(operands):
        return over_explicit_axes(kernel, operands, results)
    if axes_left_to_the_compiler():
        return _over_declared_axes(kernel, operands, results, axes)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return kernel(operands)  # a device's block already
    return _over_auto_axes(kernel, operands, results)


def _local(
    kernel: Kernel, layout: Layout, names: tuple[str, ...], results: tuple[str, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    def on_one_device(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        # Made to vary alike, so that a kernel in plain JAX sees what a custom call sees: its
        # gradients are this device's part, and the only sums are those below.
        values = kernel(dict(zip(names, vary_alike(arrays), strict=True)))
        return tuple(
            jax.lax.psum(value, axes) if (axes := layout.sum_axes(name)) else value
            for name, value in zip(results, values, strict=True)
        )

    return on_one_device


def _over_declared_axes(
    kernel: Kernel, operands: dict[str, jax.Array], results: tuple[str, ...], axes: MeshAxes
) -> tuple[jax.Array, ...]:
    # custom_partitioning fails, or crashes the process, inside a shard_map over a part of the mesh.
    left = axes_left_to_the_compiler()
    batch, heads = (tuple(axis for axis in given if axis in left) for given in axes)
    mesh = jax.sharding.get_abstract_mesh()
    layout = make_layout(PartitionSpec(batch, None, heads), mesh.shape, operands)
    return jax.shard_map(
        _local(kernel, layout, tuple(operands), results),
        in_specs=tuple(layout.spec(name) for name in operands),
        out_specs=tuple(layout.spec(name) for name in results),
        axis_names=set(left),
    )(*operands.values())


def over_explicit_axes(
    kernel: Kernel, operands: dict[str, jax.Array], results: tuple[str, ...]
) -> tuple[jax.Array, ...]:
    """``partitioned`` where types say how arrays are split; all are moved to the query's layout."""
    sharding = jax.typeof(operands["q"]).sharding
    spec = PartitionSpec(*sharding.spec, *(None,) * (4 - len(sharding.spec)))
    if spec[1] is not None or spec[3] is not None:
        raise UnsupportedError(
            f"query is sharded as {sharding.spec}: its positions or its head width are split. A "
            "kernel sees whole sequences: gather them first, or merge partial results over the "
            "mesh axis (ring attention)"
        )
    mesh = sharding.mesh
    layout = make_layout(spec, mesh.shape, operands)
    names = tuple(operands)
    in_specs = tuple(layout.spec(name) for name in names)
    # shard_map moves no data of Explicit axes by itself, neither in nor out.
    arrays = tuple(
        jax.sharding.reshard(operands[name], NamedSharding(mesh, in_spec))
        for name, in_spec in zip(names, in_specs, strict=True)
    )
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    values = jax.shard_map(
        _local(kernel, layout, names, results),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=tuple(layout.spec(name) for name in results),
        axis_names={name for name, kind in axes if kind == AxisType.Explicit},
    )(*arrays)
    own = {"out": sharding, "lse": NamedSharding(mesh, PartitionSpec(*spec[:3]))}
    own |= {
        GRADIENT_OF[name]: jax.typeof(x).sharding
        for name, x in operands.items()
        if name in GRADIENT_OF
    }
    return tuple(
        jax.sharding.reshard(value, own[name]) for name, value in zip(results, values, strict=True)
    )


def _over_auto_axes(
    kernel: Kernel, operands: dict[str, jax.Array], results: tuple[str, ...]
) -> tuple[jax.Array, ...]:
    names = tuple(operands)
    grouped = operands["q"].shape[2] != operands["k"].shape[2]

    def whole(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return kernel(dict(zip(names, arrays, strict=True)))

    def partition(mesh, arg_shapes, result_shapes):
        del result_shapes
        q_spec = arg_shapes[names.index("q")].sharding.spec
        layout = make_layout(q_spec, mesh.shape, dict(zip(names, arg_shapes, strict=True)))
        return (
            mesh,
            _local(kernel, layout, names, results),
            tuple(NamedSharding(mesh, layout.spec(name)) for name in results),
            tuple(NamedSharding(mesh, layout.spec(name)) for name in names),
        )

    rule, whole_dims = _shardy_rule(names, results, grouped=grouped)
    op = custom_partitioning(whole)
    op.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=whole_dims)
    # Only a compiled call is partitioned: outside of jit it would run on gathered arrays.
    return jax.jit(op, inline=True)(*operands.values())


_gradient_p = Primitive("attention_gradient")
_gradient_p.multiple_results = True
_gradient_p.def_impl(lambda *arrays, function, like: function(*arrays))
_gradient_p.def_abstract_eval(lambda *avals, function, like: [avals[i] for i in like])
mlir.register_lowering(
    _gradient_p,
    mlir.lower_fun(lambda *arrays, function, like: function(*arrays), multiple_results=True),
)


def _sealed(kernel: Kernel, results: tuple[str, ...]) -> Kernel:
    """A kernel of gradients as one primitive, which is lowered by tracing it.

    A fused backward sums dq in a mutable array. ``custom_partitioning`` lowers what it is given
    without resolving those first, as ``jit`` does, and refuses it ("Cannot lower jaxpr with
    effects", JAX 0.11.2); ``shard_map`` wants to know over which axes such a kernel's results vary.
    A primitive has no effects but its own and says that each gradient is as what it is of; its
    lowering resolves mutable arrays.
    """
    of = {gradient: name for name, gradient in GRADIENT_OF.items()}

    def call(operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        names = tuple(operands)

        def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            return kernel(dict(zip(names, arrays, strict=True)))

        like = tuple(names.index(of[result]) for result in results)
        return tuple(_gradient_p.bind(*operands.values(), function=function, like=like))

    return call


def _shardy_rule(
    names: tuple[str, ...], results: tuple[str, ...], *, grouped: bool
) -> tuple[str, tuple[str, ...]]:
    """An einsum-like rule of which dims are split together, and those that must stay whole."""

    def side(of: tuple[str, ...]) -> str:
        # Query and kv heads are unrelated here unless they are the same. Written as N = (K G), a
        # mesh axis longer than K would split K by a part of the axis, which no PartitionSpec can
        # say; ``make_layout`` relates them instead.
        return ", ".join(
            " ".join("K" if dim == "N" and not grouped else dim for dim in DIMS[name])
            for name in of
        )

    rule = f"{side(names)} -> {side(results)}"
    # Shardy wants them in order of appearance.
    return rule, tuple(dict.fromkeys(letter for letter in rule if letter in "TSHVJP"))
