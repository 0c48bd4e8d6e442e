"""Per-thread registers of a warpgroup, wrapped as one array that Pallas loops can carry."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from .machine import LANES, WARPS
from .mosaic import mgpu, mgpu_utils, plgpu, vector


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ThreadRegisters:
    """Form of an array that holds ``count`` private fp32 or int32 registers of each thread."""

    count: int
    dtype: jnp.dtype

    @property
    def layout(self) -> Any:
        """Register layout of the array, in which each thread owns ``count`` elements."""
        return plgpu.Layout.WG_STRIDED((self.count * LANES * WARPS,), 1)

    @property
    def array(self) -> Any:
        """Shape, dtype and layout of the array, as Pallas declares it."""
        shape = (self.count * LANES * WARPS,)
        return plgpu.ShapeDtypeStruct(shape, self.dtype, layout=self.layout)

    def initial(self, numbers: Callable[[], list[Any]]) -> jax.Array:
        """Returns an array, such as a loop's initial carry, of each thread's ``numbers()``."""

        @plgpu.inline_mgpu(return_type=self.array)
        def start(_):
            return self.wrap(numbers())

        return start()

    def wrap(self, numbers: list[Any]) -> Any:
        """Wraps a thread's list of registers as a Mosaic array."""
        is_signed = None if self.dtype == jnp.float32 else True
        kind = ir.VectorType.get((1,), mgpu_utils.dtype_to_ir_type(self.dtype))
        registers = np.array([vector.broadcast(kind, x) for x in numbers], dtype=object)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=self.layout.to_mgpu(), _is_signed=is_signed
        )

    def registers(self, array: Any) -> list[Any]:
        """Returns this thread's registers of a Mosaic array, such as a WGMMA accumulator."""
        found = []
        for register in array.registers.flat:
            for i in range(ir.VectorType(register.type).shape[0]):
                place = ir.DenseI64ArrayAttr.get([i])
                found.append(vector.extract(register, dynamic_position=[], static_position=place))
        return found
