"""GPUs that are not there: the CUDA plugin compiles for a topology from a description of the chip.

The entry points are private to JAX and to its plugin (seen to work in 0.11.2), so all of them are
here, and each absence is an error that says what is missing.
"""

import functools
import importlib.util
import logging
from pathlib import Path
from typing import Any

from jaxlib import xla_client

from jaxinfra.errors import UnsupportedError
from jaxinfra.ops.target import Facts
from jaxinfra.planning.devices import Device

_PLUGINS = (("jax_plugins.xla_cuda13", 13000), ("jax_plugins.xla_cuda12", 12090))

# Of the description, what differs between the chips of constants/*.json.
_CHIPS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}


def compile_only_devices(device: Device, count: int) -> tuple[list[Any], Facts]:
    """Devices to build a mesh of and compile for, and the facts that kernels are chosen by.

    Raises:
        UnsupportedError: no CUDA plugin, one already in use, or a chip without a description here.
    """
    if device.name not in _CHIPS:
        raise UnsupportedError(
            f"--compile gpu for {device.name}: chips described here are {', '.join(_CHIPS)}"
        )
    plugin, cuda = _plugin()
    api = _load(str(plugin))
    nodes = max(count // device.node_devices, 1)
    layout = f"{nodes}x1x{count // nodes}"
    topology = xla_client.make_c_api_device_topology(
        api, layout, target_config=_description(device), topology=layout
    )
    facts = Facts(kind=_CHIPS[device.name], is_gpu=True, capability=(9, 0), cuda=cuda)
    return list(topology._make_compile_only_devices()), facts


def _plugin() -> tuple[Path, int]:
    for name, cuda in _PLUGINS:
        found = importlib.util.find_spec("jax_plugins")
        spec = importlib.util.find_spec(name) if found is not None else None
        if spec is not None and spec.submodule_search_locations:
            library = Path(next(iter(spec.submodule_search_locations))) / "xla_cuda_plugin.so"
            if library.exists():
                return library, cuda
    raise UnsupportedError(
        "--compile gpu needs the CUDA plugin, which is missing: install jaxinfra[cuda] (a GPU "
        "is not needed), or use --compile cpu"
    )


@functools.cache
def _load(library: str) -> Any:
    """The plugin's interface. JAX finds an installed plugin too and must then not load it again, so
    this runs before JAX starts its backends.
    """
    if xla_client.pjrt_plugin_loaded("cuda"):
        raise UnsupportedError(
            "--compile gpu: JAX has loaded the CUDA plugin already; compile before anything else "
            "uses JAX, in a process of its own"
        )
    api = xla_client.load_pjrt_plugin_dynamically("cuda", library)
    xla_client.initialize_pjrt_plugin("cuda")
    # It would say that the plugin is loaded already.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)
    return api


def _description(device: Device) -> str:
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {device.num_sms}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(device.hbm_bytes_per_s)}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {device.hbm_bytes}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{_CHIPS[device.name]}"
"""
