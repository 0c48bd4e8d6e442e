"""Compiles attention on arrays sharded over Auto axes for four H200s that are not there, and prints
as JSON what each device runs.

    python -m tests.kernels.attention_on_h200s

A process of its own: the CUDA plugin is loaded by hand, before JAX looks for it.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxlib import xla_client

from jaxinfra.planning.devices import find_device
from jaxinfra.planning.receipt import _load, _plugin, compile_only_devices
from pallas_kernels import flash_attention
from pallas_kernels.common.device import compiling_for

B, T, N, H = 4, 256, 8, 64
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def partitioner_for_the_plugin() -> None:
    """What JAX does for a plugin that it loads itself."""
    xla_client.register_custom_call_partitioner(
        custom_partitioning._CUSTOM_PARTITIONING_CALL_NAME,
        custom_partitioning._custom_partitioning_propagate_user_sharding,
        custom_partitioning._custom_partitioning_partition,
        custom_partitioning._custom_partitioning_infer_sharding_from_operands,
        can_side_effecting_have_replicated_sharding=True,
        c_api=_load(str(_plugin()[0])),
    )


def layer(q, k, v, ids=None, **options):
    return flash_attention(
        q, k, v, is_causal=True, implementation="hopper", q_segment_ids=ids, kv_segment_ids=ids,
        **options,
    )  # fmt: skip


def scanned(q, k, v):
    body = jax.checkpoint(lambda x, _: (layer(x, k, v), None))
    return jax.lax.scan(body, q, None, length=3)[0]


CASES = {
    "gqa": (layer, 4, False),
    "packed": (layer, 4, True),
    "mqa": (layer, 1, False),
    "scan": (scanned, 4, False),
}


def main() -> None:
    devices, facts = compile_only_devices(find_device("h200"), 4)
    partitioner_for_the_plugin()
    grid = np.array(devices).reshape(2, 2)
    mesh = Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    found = {}
    for name, (attention, K, packed) in CASES.items():

        def shape(heads, axis):
            sharding = NamedSharding(mesh, PartitionSpec("data", None, axis))
            return jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16, sharding=sharding)

        kv = shape(K, "tensor" if K > 1 else None)
        args = [shape(N, "tensor"), kv, kv]
        if packed:
            ids = NamedSharding(mesh, PartitionSpec("data"))
            args.append(jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=ids))

        def loss(*args, attention=attention):
            return jnp.sum(attention(*args).astype(jnp.float32))

        with compiling_for(facts):
            grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
            text = grad.trace(*args).lower(lowering_platforms=("cuda",)).compile().as_text()
        kernels = [line[:400] for line in text.splitlines() if "mosaic_gpu" in line[:400]]
        blocks = {
            match
            for line in kernels
            for match in re.findall(rf"(?:bf16|f32)\[(\d+),{T},(\d+),{H}\]", line)
        }
        heads = max(int(n) for _, n in blocks)
        found[name] = {
            "kernel_batch": sorted({int(b) for b, _ in blocks}),
            "kernel_heads": [heads],
            "collectives": sorted(set(COLLECTIVE.findall(text))),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
