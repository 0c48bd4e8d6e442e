"""Addresses of all layers' arrays, in shared memory: a layer's are looked up by its number."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.hopper.mosaic import plgpu
from pallas_kernels.hopper.threads import Address, address, address_of, assembly, constant, total

_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AddressTable:
    """Of so many layers."""

    names: tuple[str, ...]
    num_layers: int

    def scratch(self) -> Any:
        """Shared memory."""
        return plgpu.SMEM((len(self.names) * self.num_layers * _BYTES // 4,), jnp.int32)

    def refs(self, gmem) -> list[Any]:
        """All arrays, in their order."""
        return [ref for name in self.names for ref in getattr(gmem, name)]

    def write(self, table: Any, refs: list[Any]) -> None:
        """Of one thread."""
        for i, ref in enumerate(refs):
            both = [address(table), address_of(ref).value]
            assembly(None, both, f"st.shared.b64 [$0+{_BYTES * i}], $1;", "r,l", pure=False)

    def address(self, table: Any, name: str, layer: Any) -> Address:
        """Of one layer's array."""
        place = total(
            address(table),
            (layer, _BYTES),
            constant(_BYTES * self.names.index(name) * self.num_layers),
        )
        i64 = ir.IntegerType.get_signless(64)
        return Address(assembly(i64, [place], "ld.shared.b64 $0, [$1];", "=l,r", pure=False))
