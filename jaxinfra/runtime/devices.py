"""Published peak FLOP/s and bandwidths of devices (vendor datasheets, dense)."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DevicePeak:
    """Peak FLOP/s and bandwidths of one kind of device."""

    bf16_flops: float  # dense tensor-core FLOP/s
    hbm_bytes_per_s: float
    hbm_bytes: int
    visible_bytes: int  # that CUDA reports in all, of which JAX takes its share
    link_bytes_per_s: float  # NVLink, one direction, all links of one device


_PEAKS: dict[str, DevicePeak] = {
    "A100-SXM4-80GB": DevicePeak(
        bf16_flops=312e12,
        hbm_bytes_per_s=2.039e12,
        hbm_bytes=80 * 10**9,
        visible_bytes=int(79.2 * 2**30),
        link_bytes_per_s=300e9,
    ),
    "H100": DevicePeak(
        bf16_flops=989.4e12,
        hbm_bytes_per_s=3.35e12,
        hbm_bytes=80 * 10**9,
        visible_bytes=int(79.2 * 2**30),
        link_bytes_per_s=450e9,
    ),
    "H200": DevicePeak(
        bf16_flops=989.4e12,
        hbm_bytes_per_s=4.8e12,
        hbm_bytes=141 * 10**9,
        visible_bytes=int(139.8 * 2**30),
        link_bytes_per_s=450e9,
    ),
    "B200": DevicePeak(
        bf16_flops=2250e12,
        hbm_bytes_per_s=8.0e12,
        hbm_bytes=180 * 10**9,
        visible_bytes=int(178.3 * 2**30),
        link_bytes_per_s=900e9,
    ),
}


REFERENCE_PEAK = _PEAKS["H200"]
"""Peak for comparing costs with each other where a device is not in the table."""


def device_peak(device_kind: str) -> DevicePeak | None:
    """Returns the peaks of a JAX ``device_kind`` such as "NVIDIA H200"; None if not listed."""
    return next((peak for name, peak in _PEAKS.items() if name in device_kind), None)
