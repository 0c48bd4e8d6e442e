"""Roofline of an operation, and model FLOPs utilization.

``attainable = min(peak, intensity * bandwidth)`` (Williams, Waterman and Patterson 2009), with
``intensity`` the operations for each byte that must move through device memory: every input read
once, every result written once. A multiply and an add count as two.
"""

import dataclasses
from collections.abc import Mapping

from jaxinfra.model.flops import visible_pairs
from jaxinfra.planning.devices import Device
from jaxinfra.planning.inference import attainable, ridge

BACKWARD_OF_FORWARD = 2.5
"""Products of a flash attention backward over those of the forward: 5 to 2, S computed again."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Least work of an operation, whatever its implementation."""

    flops: float
    memory_bytes: float  # least possible traffic through device memory

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.memory_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """An operation that was timed."""

    name: str
    group: str
    work: Work
    seconds: float
    compute: str = "bf16"  # format of the peak it is compared with, a key of ``Device.flops``

    @property
    def flops_per_s(self) -> float:
        """Achieved FLOP/s."""
        return self.work.flops / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Achieved bytes/s of the least traffic; further traffic does not count."""
        return self.work.memory_bytes / self.seconds

    def attainable(self, device: Device) -> float:
        """FLOP/s that the roof allows at this intensity."""
        return attainable(device, self.work.intensity, self.compute)

    def bound(self, device: Device) -> str:
        """Part of the roof that limits the operation: "memory" or "compute"."""
        return "memory" if self.work.intensity < ridge(device, self.compute) else "compute"

    def as_json(self, device: Device) -> dict[str, object]:
        """All figures."""
        return {
            "name": self.name,
            "group": self.group,
            "compute": self.compute,
            "flops": self.work.flops,
            "memory_bytes": self.work.memory_bytes,
            "intensity": self.work.intensity,
            "ms": 1e3 * self.seconds,
            "tflops": self.flops_per_s / 1e12,
            "gb_per_s": self.bytes_per_s / 1e9,
            "attainable_tflops": self.attainable(device) / 1e12,
            "of_attainable": self.flops_per_s / self.attainable(device),
            "bound": self.bound(device),
        }


def with_ceilings(device: Device, *, flops: Mapping[str, float], hbm_bytes_per_s: float) -> Device:
    """The device under measured ceilings in place of the datasheet's."""
    return dataclasses.replace(device, flops=dict(flops), hbm_bytes_per_s=hbm_bytes_per_s)


def mfu(flops: float, *, seconds: float, peak_flops: float, devices: int = 1) -> float:
    """Model FLOPs over what the devices' datasheets promise in that time (PaLM, appendix B).

    Args:
        flops: the model's own; what is recomputed, padded or masked does not count.
        peak_flops: dense, of one device.
    """
    return flops / (seconds * peak_flops * devices)


def matmul_work(M: int, N: int, K: int, *, operand_bytes: int = 2, result_bytes: int = 2) -> Work:
    """[M, K] times [K, N]."""
    size = operand_bytes * K * (M + N) + result_bytes * M * N
    return Work(flops=2.0 * M * N * K, memory_bytes=float(size))


def attention_work(
    *, batch: int, length: int, q_heads: int, kv_heads: int, width: int, causal: bool
) -> Work:
    """Flash attention forward: reads q, k, v, writes the output and fp32 logsumexp."""
    pairs = visible_pairs(length) if causal else length * length
    rows = batch * length
    size = 2 * rows * width * (2 * q_heads + 2 * kv_heads) + 4 * rows * q_heads
    return Work(flops=4.0 * batch * q_heads * pairs * width, memory_bytes=float(size))


def attention_backward_work(
    *, batch: int, length: int, q_heads: int, kv_heads: int, width: int, causal: bool
) -> Work:
    """Reads q, k, v, the output, its gradient and logsumexp; writes dq, dk, dv."""
    forward = attention_work(
        batch=batch, length=length, q_heads=q_heads, kv_heads=kv_heads, width=width, causal=causal
    )
    rows = batch * length
    size = 2 * rows * width * (4 * q_heads + 4 * kv_heads) + 4 * rows * q_heads
    return Work(flops=BACKWARD_OF_FORWARD * forward.flops, memory_bytes=float(size))


def linear_cross_entropy_work(*, tokens: int, width: int, vocab: int) -> Work:
    """Loss and both gradients, three products; bf16 activations and table, its gradient fp32."""
    size = 2 * (2 * tokens * width) + (2 + 4) * vocab * width
    return Work(flops=6.0 * tokens * width * vocab, memory_bytes=float(size))


def elementwise_work(elements: int, *, streams: int, flops_each: float, itemsize: int = 2) -> Work:
    """A pass that reads and writes ``streams`` arrays in all."""
    return Work(flops=flops_each * elements, memory_bytes=float(streams * elements * itemsize))
