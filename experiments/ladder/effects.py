"""Small kernels, each of which makes one property of the machine visible in its time.

Memory moves 64 bytes at a time, however few of them are asked for; a warp's 32 threads run one
instruction; an SM hides the latency of memory by having many loads in flight (Little's law).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from pallas_kernels.hopper.machine import NUM_PROCESSORS
from pallas_kernels.hopper.registers import write_registers

from .threads import PARAMS, TILED, Tiling

THREADS = 128
SHARED_BYTES = 228 * 1024  # per SM; the hardware reserves 1 KB of it per block
BLOCK_SHARED_BYTES = 227 * 1024
A_NUMBER_EACH = TILED(
    Tiling(((128,), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


def every_nth(x: jax.Array, *, stride: int) -> jax.Array:
    """``x[::stride]`` by neighboring threads: each reads 4 bytes of its own.

    Args:
        x: fp32 [n], n a multiple of 512 * stride.
        stride: distance of neighboring threads' reads, in numbers.
    """
    chunk, n = 4 * THREADS, x.size // stride

    def body(x_gmem, out_gmem):
        rows = pl.ds(lax.axis_index("chunk") * chunk, chunk)
        loaded = plgpu.load(x_gmem.at[rows, 0], layout=A_NUMBER_EACH, optimized=False)
        write_registers(loaded, out_gmem.at[rows])

    return _kernel(body, n, grid=n // chunk)(x.reshape(n, stride))


def copy(x: jax.Array, *, width: int) -> jax.Array:
    """A copy in which a thread moves ``width`` numbers at once, 4 times.

    Args:
        x: fp32 [n], n a multiple of 512 * width.
        width: 1, 2 or 4: loads and stores of 4, 8 or 16 bytes.
    """
    chunk = 4 * THREADS * width

    def body(x_gmem, out_gmem):
        part = pl.ds(lax.axis_index("chunk") * chunk, chunk)
        loaded = plgpu.load(x_gmem.at[part], layout=_wide(width), optimized=False)
        write_registers(loaded, out_gmem.at[part])

    return _kernel(body, x.size, grid=x.size // chunk)(x)


def copy_with_few_warps(x: jax.Array, *, blocks: int, in_flight: int) -> jax.Array:
    """A copy by at most ``blocks`` blocks of 4 warps per SM.

    What keeps others out is shared memory that a block asks for and leaves unused, as a kernel with
    large tiles would.

    Args:
        x: fp32 [n], n a multiple of 512 * in_flight.
        blocks: blocks per SM, 1 to 16.
        in_flight: loads of 16 bytes that a thread issues before it waits for the first.
    """
    chunk = THREADS * 4 * in_flight
    unused = min(SHARED_BYTES // blocks - 2048, BLOCK_SHARED_BYTES - 1024)

    def body(x_gmem, out_gmem, unused_smem):
        del unused_smem

        @plgpu.nd_loop((x.size // chunk,), collective_axes="block")
        def _(loop: plgpu.NDLoopInfo):
            part = pl.ds(loop.index[0] * chunk, chunk)
            loaded = plgpu.load(x_gmem.at[part], layout=_wide(4), optimized=False)
            write_registers(loaded, out_gmem.at[part])

    scratch = (plgpu.SMEM((unused,), jnp.int8),)
    return _kernel(body, x.size, grid=NUM_PROCESSORS * blocks, scratch=scratch)(x)


def iterate(x: jax.Array, counts: jax.Array) -> jax.Array:
    """``x = x / 2 + 1`` as often as each element's count says, one element a thread.

    Pallas speaks of arrays, and an array's elements do not branch; so this loop is written in the
    language below it.

    Args:
        x: fp32 [n], n a multiple of 128.
        counts: int32 [n].
    """

    def body(x_gmem, counts_gmem, out_gmem):
        part = pl.ds(lax.axis_index("chunk") * THREADS, THREADS)
        out_gmem[part] = _loop_each(
            plgpu.load(x_gmem.at[part], layout=A_NUMBER_EACH, optimized=False),
            plgpu.load(counts_gmem.at[part], layout=A_NUMBER_EACH, optimized=False),
        )

    return _kernel(body, x.size, grid=x.size // THREADS)(x, counts)


def iterate_reference(x: jax.Array, counts: jax.Array) -> jax.Array:
    """The closed form: the distance from 2 halves each time."""
    return 2.0 + (x - 2.0) * jnp.exp2(-counts.astype(jnp.float32))


@plgpu.inline_mgpu(
    arg_types=(A_NUMBER_EACH, A_NUMBER_EACH),
    return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, layout=A_NUMBER_EACH),
)
def _loop_each(ctx, x, counts):
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    half, one = mgpu.c(0.5, x.mlir_dtype), mgpu.c(1.0, x.mlir_dtype)
    bounds = iter(counts.registers.flat)

    def each(value, _):
        first = ir.DenseI64ArrayAttr.get([0])
        bound = vector.extract(next(bounds), dynamic_position=[], static_position=first)
        loop = scf.ForOp(mgpu.c(0, i32), bound, mgpu.c(1, i32), [value])
        with ir.InsertionPoint(loop.body):
            halved = arith.mulf(loop.inner_iter_args[0], half)
            scf.yield_([arith.addf(halved, one)])
        return loop.result

    return x.foreach(each, create_array=True)


def _wide(width: int):
    """[n] in vectors of ``width``: a warp has 32 of them side by side."""
    span = 32 * width
    return TILED(
        Tiling(((4 * span,), (span,), (width,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )


def _kernel(body, size: int, *, grid: int, scratch=()):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size,), jnp.float32),
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("block",) if scratch else ("chunk",),
        compiler_params=PARAMS,
    )
