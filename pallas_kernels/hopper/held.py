"""Numbers that each thread of a warpgroup holds by itself, as an array that loops can carry."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from .machine import LANES, WARPS
from .mosaic import mgpu, mgpu_utils, plgpu, vector


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """So many numbers a thread, fp32 or int32."""

    count: int
    dtype: jnp.dtype

    @property
    def layout(self) -> Any:
        """A thread's numbers are those that no other has anything to do with."""
        return plgpu.Layout.WG_STRIDED((self.count * LANES * WARPS,), 1)

    @property
    def array(self) -> Any:
        """The array as Pallas sees it."""
        shape = (self.count * LANES * WARPS,)
        return plgpu.ShapeDtypeStruct(shape, self.dtype, layout=self.layout)

    def together(self, numbers: list[Any]) -> Any:
        """A thread's numbers, as Mosaic's array."""
        is_signed = None if self.dtype == jnp.float32 else True
        kind = ir.VectorType.get((1,), mgpu_utils.dtype_to_ir_type(self.dtype))
        registers = np.array([vector.broadcast(kind, x) for x in numbers], dtype=object)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=self.layout.to_mgpu(), _is_signed=is_signed
        )

    def apart(self, array: Any) -> list[Any]:
        """A thread's numbers of Mosaic's array, such as an accumulator of WGMMA, in their order."""
        found = []
        for register in array.registers.flat:
            for i in range(ir.VectorType(register.type).shape[0]):
                place = ir.DenseI64ArrayAttr.get([i])
                found.append(vector.extract(register, dynamic_position=[], static_position=place))
        return found
