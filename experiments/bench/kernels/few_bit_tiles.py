"""Tiles of a product of one row with a weight in few bits that are worth timing.

Little is known of what such a product waits for, so tiles differ in what may matter: how many bytes
of the weight are on their way, how many warps turn codes into numbers, over how many blocks K is
split, and whether blocks share a multiprocessor. Beside them are tiles of the kernel in which no
block waits for another: K is split over warps.
"""

import dataclasses

from pallas_kernels.hopper.machine import NUM_PROCESSORS, SMEM_BYTES
from pallas_kernels.quantized_matmul.config import (
    GROUPS,
    WIDTH,
    ProductShape,
    QuantizedConfig,
    config_for,
    configs,
)
from pallas_kernels.quantized_matmul.sliced_config import SlicedConfig, sliced_configs

LEAST_BLOCKS = 90
MOST_SPLIT = 2  # clusters of four blocks were slower at every product that was timed
NUM_TILINGS = 2
LEAST_STAGES = 4
_HALF = SMEM_BYTES // 2 - 1024  # of a multiprocessor, less what the system keeps of each block
_PART_BYTES = 16 * 1024  # read in the time that another block's sums take


def worth_timing(shape: ProductShape) -> list[QuantizedConfig | SlicedConfig]:
    """The default tiles, of the tilings that leave least to the busiest multiprocessor two and
    four warpgroups, or two where two blocks share one, and those that split K over warps.
    """
    found: dict[tuple[int, int], list[QuantizedConfig]] = {}
    for config in configs(shape):
        residents = -(-num_blocks(config, shape) // NUM_PROCESSORS)
        is_many = residents > 2 or num_blocks(config, shape) < LEAST_BLOCKS
        is_many = is_many or config.split > MOST_SPLIT
        if is_many or config.groups not in GROUPS[1 : 4 - residents]:
            continue
        fitting = _in_room(config, shape, SMEM_BYTES if residents == 1 else _HALF)
        if fitting is not None:
            found.setdefault((config.tiles, config.split), []).append(fitting)
    tilings = sorted(found.values(), key=lambda each: busiest_bytes(each[0], shape))
    few = [config for tiling in tilings[:NUM_TILINGS] for config in tiling]
    chosen = config_for(shape)
    few = few if chosen is None else [chosen, *few]
    return list(dict.fromkeys([*few, *sliced_configs(shape)]))


def num_blocks(config: QuantizedConfig, shape: ProductShape) -> int:
    """Blocks of all clusters."""
    return shape.N // (WIDTH * config.tiles) * config.split


def busiest_bytes(config: QuantizedConfig, shape: ProductShape) -> int:
    """What the busiest multiprocessor reads, and as if for each part of K."""
    residents = -(-num_blocks(config, shape) // NUM_PROCESSORS)
    block = shape.K // config.split * WIDTH * config.tiles * shape.bits // 8
    return residents * block + _PART_BYTES * config.split


def _in_room(config: QuantizedConfig, shape: ProductShape, room: int) -> QuantizedConfig | None:
    """With as many stages as fit; None where those are too few to read ahead."""
    least = min(LEAST_STAGES, config.steps(shape))
    for stages in range(config.stages, least - 1, -config.groups):
        fewer = dataclasses.replace(config, stages=stages)
        if fewer.shared_bytes(shape) <= room:
            return fewer
    return None
