"""The public ``sum_rows``, which validates a call and chooses an implementation.

Dims: D device, R row, N column.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.errors import InputError, UnsupportedError
from pallas_kernels.common.no_gradient import without_gradient
from pallas_kernels.common.row_inputs import RmsNorm

from .hopper import SLOTS, open_hopper, sum_rows_hopper, unsupported
from .reference import RowsCall, sum_rows_reference

type RowSumsImplementation = Literal["hopper", "reference"]

MOST_ROWS = 256
"""Most rows of a call: a block of threads waits for each, and all of them must be resident."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowMailbox:
    """Memory of this device that all devices of an axis write rows to, for one program.

    Each call of ``sum_rows`` returns the mailbox for the next one.
    """

    words: jax.Array | None  # int32, two slots of all devices' rows; None for the reference
    table: jax.Array | None  # int32: addresses of all devices' words, and this device's index
    after: jax.Array  # [R, N], the last call's result: calls run in order
    axis: str = dataclasses.field(metadata=dict(static=True))
    slot: int = dataclasses.field(metadata=dict(static=True))  # of the next call


class SummedRows(NamedTuple):
    """Result of ``sum_rows``."""

    x: jax.Array
    """[R, N]: the residual and all devices' rows."""
    normed: jax.Array
    """[R, N]: x, normalized if there is a norm."""
    mailbox: RowMailbox


def open_mailbox(
    rows: int, width: int, dtype: jnp.dtype, *, axis: str, implementation: RowSumsImplementation
) -> RowMailbox:
    """Makes a mailbox for the calls of ``sum_rows`` in this program, inside ``shard_map``.

    The devices meet at a barrier here, and never in ``sum_rows``. Open one mailbox in a program,
    before its first call.

    Args:
        rows, width, dtype: shape and dtype of the rows of every call.
        axis: mesh axis whose devices add.
        implementation: "hopper", the kernel, or "reference", plain JAX.

    Raises:
        UnsupportedError: the kernel cannot add such rows.

    Examples:
        The reference needs no memory that devices write to:

        >>> mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def last(x):
        ...     box = pallas_kernels.open_mailbox(
        ...         2, 8, x.dtype, axis="tensor", implementation="reference"
        ...     )
        ...     return box.after
        >>> whole = jax.sharding.PartitionSpec()
        >>> f = jax.shard_map(last, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        >>> f(jnp.ones(3)).shape
        (2, 8)
    """
    nothing = jnp.zeros((rows, width), dtype)
    words = table = None
    if _kernel_takes(rows, width, jnp.dtype(dtype), axis, implementation):
        words, table = open_hopper(rows, width, jnp.dtype(dtype), axis)
    return RowMailbox(words=words, table=table, after=nothing, axis=axis, slot=0)


def sum_rows(
    partial: jax.Array, residual: jax.Array, mailbox: RowMailbox, *, norm: RmsNorm | None = None
) -> SummedRows:
    """Adds devices' rows to a residual, and normalizes the sum, inside ``shard_map``.

    ``x = residual + sum over devices of partial``: the all-reduce behind a product whose rows of
    weights devices share, with the sum and the norm that follow it. By the kernel, each GPU writes
    its rows into the others' memory over NVLink and adds what arrives: one launch and one hop. Sums
    are fp32, in the order of the axis, rounded once: all devices get the same bits. The launch
    fails if a GPU does not take part for 20 s.

    Args:
        partial: [R, N], this device's rows, bfloat16 or float16 for the kernel.
        residual: [R, N] in the same dtype, the same on all devices.
        mailbox: of ``open_mailbox`` or of the call before, for this shape.
        norm: norm of x's rows; None: ``normed`` is x.

    Returns:
        x and ``normed`` in partial's dtype, and the mailbox for the next call. All devices must
        make the same calls in the same order. There is no gradient.

    Raises:
        InputError: shapes or dtypes that disagree.
        UnsupportedError: a gradient is taken.

    Examples:
        >>> mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> rows, whole = jnp.ones((2, 8)), jax.sharding.PartitionSpec()
        >>> def add(partial, residual):
        ...     box = pallas_kernels.open_mailbox(
        ...         2, 8, partial.dtype, axis="tensor", implementation="reference"
        ...     )
        ...     return pallas_kernels.sum_rows(partial, residual, box).x
        >>> f = jax.shard_map(add, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        >>> f(rows, rows)[0, 0].item()
        2.0
    """
    call = RowsCall(partial=partial, residual=residual, norm=norm, axis=mailbox.axis)
    shape, dtype = mailbox.after.shape, mailbox.after.dtype
    for name, array in (("partial", partial), ("residual", residual)):
        if array.shape != shape or array.dtype != dtype:
            raise InputError(
                f"{name} is {array.dtype}{list(array.shape)}; the mailbox was opened for "
                f"{dtype}{list(shape)}"
            )
    if norm is not None and norm.scale.shape != shape[1:]:
        raise InputError(f"the norm's scale is {list(norm.scale.shape)}, not {list(shape[1:])}")
    if mailbox.words is None or mailbox.table is None:
        found = sum_rows_reference(call)
    else:
        found = sum_rows_hopper(call, mailbox.words, mailbox.table, mailbox.after, mailbox.slot)
    x, normed = without_gradient(found, "sum_rows has no gradient: it is for generating; use psum")
    mailbox = dataclasses.replace(mailbox, after=x, slot=(mailbox.slot + 1) % SLOTS)
    return SummedRows(x=x, normed=normed, mailbox=mailbox)


def refused_rows(rows: int, width: int, dtype: jnp.dtype, *, axis: str) -> str | None:
    """Returns why ``open_mailbox`` by "hopper" refuses these rows; None if it takes them."""
    if rows > MOST_ROWS:
        return f"{rows} rows: at most {MOST_ROWS}"
    return unsupported(width, jnp.dtype(dtype), axis)


def _kernel_takes(
    rows: int, width: int, dtype: jnp.dtype, axis: str, implementation: RowSumsImplementation
) -> bool:
    """Whether the kernel computes such calls; else the reference does."""
    if implementation == "reference":
        return False
    if implementation != "hopper":
        raise InputError(f"implementation={implementation!r} must be hopper or reference")
    reason = refused_rows(rows, width, dtype, axis=axis)
    if reason is not None:
        raise UnsupportedError(
            f"implementation='hopper' cannot add {rows} rows of {width} {dtype} over {axis}: "
            f"{reason}; use psum"
        )
    return True
