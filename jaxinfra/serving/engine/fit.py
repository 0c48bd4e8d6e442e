"""Number of KV-cache pages that fit into a device's memory beside weights and programs."""

import dataclasses
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxinfra.config.model import (
    AttentionBesideStateConfig,
    BlockConfig,
    ExpertsConfig,
    GroupedAttentionConfig,
    LatentAttentionConfig,
    MixerConfig,
    MlpConfig,
    ModelConfig,
)
from jaxinfra.config.recurrent import (
    MatrixStateConfig,
    SelectiveScanConfig,
    ShortConvolutionConfig,
)
from jaxinfra.errors import DeviceMemoryError, is_out_of_memory
from jaxinfra.serving.engine.plan import SchedulerLimits

JAX_FRACTION = 0.95
"""Share of a GPU's memory that serving commands let JAX allocate."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeeds:
    """Bytes of one device that a server needs besides its KV cache, and the bytes of a page."""

    weight_bytes: int
    temporary_bytes: int  # kept free for the program that needs most: scratch memory and results
    state_bytes: int  # the engine's arrays besides pages
    page_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of pages."""
        return self.weight_bytes + self.temporary_bytes + self.state_bytes

    def pages(self, budget_bytes: float) -> int:
        """Returns how many pages fit into a device's budget beside all else; at least 0."""
        return max(0, int((budget_bytes - self.fixed_bytes) // max(1, self.page_bytes)))


def fitted_limits(
    limits: SchedulerLimits, needs: MemoryNeeds, *, budget_bytes: float
) -> SchedulerLimits:
    """Returns the limits with as many pages as fit, and no more than before.

    Args:
        limits: limits whose pages hold the longest requests, as many as may run.
        budget_bytes: bytes of a device that the server may use.

    Raises:
        DeviceMemoryError: one request of the full context does not fit.
    """
    pages = min(limits.num_pages, needs.pages(budget_bytes))
    one = 1 + limits.table_width  # a page is kept empty
    if pages < one:
        gib = 1 / 2**30
        tokens = max(0, pages - 1) * limits.page_size
        remedy = "spread the model with --mesh, or quantize it"
        if tokens >= limits.page_size:
            remedy = f"give --max-context {tokens}, --cache int8 or more devices (--mesh)"
        raise DeviceMemoryError(
            f"one request of {limits.context:,} tokens does not fit: weights "
            f"{needs.weight_bytes * gib:.2f} GiB, temporaries of programs "
            f"{(needs.temporary_bytes + needs.state_bytes) * gib:.2f} GiB and its pages "
            f"{one * needs.page_bytes * gib:.2f} GiB exceed {budget_bytes * gib:.2f} GiB, the "
            f"share of a device's memory that --memory-fraction leaves; {remedy}"
        )
    return dataclasses.replace(limits, num_pages=pages)


def require_pages(limits: SchedulerLimits, needs: MemoryNeeds, *, budget_bytes: float) -> None:
    """Checks that the given number of pages fits into a device.

    Raises:
        DeviceMemoryError: it does not.
    """
    pages = needs.pages(budget_bytes)
    if limits.num_pages > pages:
        gib = 1 / 2**30
        raise DeviceMemoryError(
            f"{limits.num_pages} pages do not fit: weights {needs.weight_bytes * gib:.2f} GiB, "
            f"temporaries of programs {(needs.temporary_bytes + needs.state_bytes) * gib:.2f} GiB "
            f"and the pages {limits.num_pages * needs.page_bytes * gib:.2f} GiB exceed "
            f"{budget_bytes * gib:.2f} GiB; give --num-pages {pages} or less, or leave it out"
            if pages > 1
            else f"the model does not fit: weights {needs.weight_bytes * gib:.2f} GiB and "
            f"temporaries {(needs.temporary_bytes + needs.state_bytes) * gib:.2f} GiB exceed "
            f"{budget_bytes * gib:.2f} GiB; spread the model with --mesh, or quantize it"
        )


def require_free(device: jax.Device, needs: MemoryNeeds, *, num_pages: int) -> None:
    """Takes what a server needs of a device in one piece, and gives it back for its arrays.

    JAX keeps the piece, so weights that come first do not divide what pages need.

    Raises:
        DeviceMemoryError: the device has less, although JAX may allocate it.
    """
    pages = num_pages * needs.page_bytes
    rows = -(-(needs.fixed_bytes + pages) // _PIECE_ROW)
    place = jax.sharding.SingleDeviceSharding(device)
    piece = jax.jit(lambda: jnp.zeros((rows, _PIECE_ROW), jnp.uint8), out_shardings=place)
    try:
        jax.block_until_ready(piece()).delete()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        gib = 1 / 2**30
        raise DeviceMemoryError(
            f"{device} has not free what JAX may allocate: weights {needs.weight_bytes * gib:.2f} "
            f"GiB, temporaries of programs {(needs.temporary_bytes + needs.state_bytes) * gib:.2f} "
            f"GiB and {num_pages} pages {pages * gib:.2f} GiB; end the other processes that use "
            "it, or give a lower --memory-fraction"
        ) from error


def let_jax_allocate() -> None:
    """Lets JAX allocate ``JAX_FRACTION`` of a GPU, unless its environment variable says otherwise;
    to be called before a device is used.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(JAX_FRACTION))


def memory_limit() -> int | None:
    """Returns the bytes that JAX may allocate on a device here; None for CPUs."""
    return memory_stats(jax.local_devices()[0]).get("bytes_limit")


def memory_stats(device: jax.Device) -> dict[str, int]:
    """Returns a device's memory statistics; empty for CPUs and absent devices."""
    return (device.memory_stats() or {}) if device in jax.local_devices() else {}


def budget_bytes(
    device: jax.Device, *, limit_bytes: int, fraction: float, held_bytes: int = 0
) -> float:
    """Returns the bytes of a device that an engine may use.

    Args:
        limit_bytes: bytes that JAX may allocate.
        fraction: share of them.
        held_bytes: bytes on the device now that belong to the engine.
    """
    others = max(0, memory_stats(device).get("bytes_in_use", 0) - held_bytes)
    return limit_bytes * fraction - others


_PIECE_ROW = 1 << 20
_SCORED_COPIES = 4.5  # of fp32 logits of all tokens, with softmax and sort, as XLA compiles them
_SAMPLED_COPIES = 6  # of fp32 logits of the tokens that are sampled from
_EXPERT_TILE = 128  # rows to which the tokens of an expert are padded


def estimated_temporaries(
    config: ModelConfig, *, rows: int, length: int, num_logits: int, itemsize: int
) -> int:
    """Estimates the scratch bytes of a program from its shapes, so that pages can be counted
    before it is compiled. All of a block's products count, as if none were freed within it.

    Args:
        rows: rows of the program.
        length: tokens per row.
        num_logits: logits per row: 1, or those of all tokens.
        itemsize: bytes of an activation's element.
    """
    tokens = rows * length
    activations = max(_block_elements(config, block, tokens) for block in config.blocks) * itemsize
    copies = _SAMPLED_COPIES if num_logits == 1 else _SCORED_COPIES
    return int(activations + copies * 4 * rows * num_logits * config.vocab_size)


def _block_elements(config: ModelConfig, block: BlockConfig, tokens: int) -> int:
    """Elements of the activations of a block's products, with the residual stream."""
    width = _mixer_width(config, block.mixer)
    elements = tokens * (width + 4 * config.model_dim)
    match block.feed_forward:
        case MlpConfig() as layer:
            return elements + 3 * tokens * layer.hidden_dim
        case ExpertsConfig() as layer:
            routed = tokens * layer.top_k + layer.num_experts * _EXPERT_TILE
            return (
                elements
                + routed * (3 * layer.hidden_dim + 2 * config.model_dim)
                + 3 * tokens * layer.shared_hidden_dim
            )
        case _:
            return elements + 4 * tokens * config.model_dim


def device_bytes(arrays: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Returns the bytes of one device that hold its shards of arrays of these shapes."""
    total = 0
    for leaf in arrays:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        size = leaf.dtype.itemsize
        for each in shape:
            size *= each
        total += size
    return total


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes that a program needs besides its arguments, on each device."""
    stats = compiled.memory_analysis()
    assert stats is not None, "CPUs and GPUs have it"
    return int(stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes)


def _mixer_width(config: ModelConfig, mixer: MixerConfig) -> int:
    """Elements per token of the activations of a mixer's products."""
    match mixer:
        case GroupedAttentionConfig():
            return 2 * (mixer.num_q_heads + mixer.num_kv_heads) * mixer.head_dim
        case LatentAttentionConfig():
            head = 2 * mixer.nope_dim + mixer.rope_dim + mixer.value_dim + 2 * mixer.kv_rank
            width = mixer.num_q_heads * head + (mixer.query_rank or 0)
            if mixer.indexer is not None:
                width += (2 * mixer.indexer.num_heads + 2) * mixer.indexer.head_dim
            return width
        case AttentionBesideStateConfig():
            both = (mixer.attention, mixer.state_space)
            return sum(_mixer_width(config, each) for each in both)
        case ShortConvolutionConfig():
            return 6 * mixer.value_width
        case SelectiveScanConfig():  # in fp32, with the states of a chunk's positions
            return 4 * mixer.num_channels * (4 + 3 * mixer.state_dim)
        case MatrixStateConfig():  # in fp32, with what a chunk's positions are to each other
            keys = mixer.num_value_heads * mixer.key_dim
            return 4 * (2 * keys + 2 * mixer.num_value_heads * mixer.value_dim)
        case _:
            return 4 * config.model_dim
