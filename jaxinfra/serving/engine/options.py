"""Engine options that a user sets; all other limits follow from the model."""

import dataclasses
import enum

from jaxinfra.config.model import ModelConfig
from jaxinfra.config.rope import DynamicScaling, LongRopeScaling
from jaxinfra.errors import ConfigError
from jaxinfra.serving.engine.plan import SchedulerLimits


class Preemption(enum.StrEnum):
    """Method by which a request that lost its pages to another one restores its keys and values."""

    RECOMPUTE = "recompute"  # they are computed again, but for what the prefix tree still has
    HOST = "host"  # the host keeps them


_FINEST_ROWS = 128
"""Difference of the numbers of rows of large programs, whose rows cost more than their weights."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """User options of an engine: how many requests, pages and tokens per step it takes."""

    max_running: int = 16  # most requests that run, and hold pages, at the same time
    page_size: int = 16  # tokens per page
    num_pages: int | None = None  # pages in the pool; None: as many as fit and can be used
    memory_fraction: float = 0.9  # share of the device's memory for weights, programs and pages
    max_context: int | None = None  # most tokens per request; None: the model's positions
    max_step_tokens: int = 512  # most tokens per step
    chunk_sizes: tuple[int, ...] = (16, 64, 256)  # allowed chunk lengths, in tokens per row
    max_piece_rows: int = 4  # most prompts per device call
    share_prefixes: bool = True
    # Copies of layers' states after prefixes, from which requests go on; None: 2 x max_running.
    num_snapshots: int | None = None
    # Draft tokens per step: from the draft model, else from multi-token prediction, else n-grams.
    num_drafts: int = 0
    preemption: Preemption = Preemption.RECOMPUTE
    host_bytes: int = 4 << 30  # host memory for pages, with Preemption.HOST

    def __post_init__(self) -> None:
        counts = {
            name: getattr(self, name)
            for name in ("max_running", "page_size", "max_step_tokens", "max_piece_rows")
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction={self.memory_fraction} must be above 0, at most 1")
        if self.num_snapshots is not None and self.num_snapshots < 0:
            raise ConfigError(f"num_snapshots={self.num_snapshots} must be at least 0, or none")
        if self.num_drafts < 0:
            raise ConfigError(f"num_drafts={self.num_drafts} must be at least 0")
        if (
            not self.chunk_sizes
            or any(
                size < 2 or size in self.chunk_sizes[:place]
                for place, size in enumerate(self.chunk_sizes)
            )
            or sorted(self.chunk_sizes) != [*self.chunk_sizes]
        ):
            raise ConfigError(f"chunk_sizes={self.chunk_sizes} must ascend from at least 2")

    def limits(
        self, config: ModelConfig, *, has_draft: bool = False, batch_shards: int = 1
    ) -> SchedulerLimits:
        """Returns the scheduler's limits for a model under these options.

        Args:
            has_draft: a second model drafts.
            batch_shards: devices that batch rows are sharded over; they divide the number of rows.
        """
        max_running = -(-self.max_running // batch_shards) * batch_shards
        positions = min(config.max_positions, self.max_context or config.max_positions)
        _require_lasting_keys(config, positions)
        pages = -(-positions // self.page_size)
        sizes = self._row_sizes(max_running, batch_shards)
        has_states = any(block.mixer.cache.state for block in config.blocks)
        shares, num_snapshots = self.share_prefixes, 0
        if has_states and shares:
            wanted = self.num_snapshots
            num_snapshots = 2 * max_running if wanted is None else wanted
            shares = num_snapshots > 0
        return SchedulerLimits(
            num_pages=1 + max_running * pages if self.num_pages is None else self.num_pages,
            page_size=self.page_size,
            max_running=max_running,
            max_step_tokens=self.max_step_tokens,
            max_positions=positions,
            row_sizes=sizes,
            chunk_sizes=self.chunk_sizes,
            max_piece_rows=self.max_piece_rows,
            share_prefixes=shares,
            has_states=has_states,
            num_snapshots=num_snapshots,
            long_context=original_context(config),
            num_drafts=self.num_drafts if has_draft or config.mtp else 0,
        )

    def _row_sizes(self, max_running: int, batch_shards: int) -> tuple[int, ...]:
        """Returns the numbers of rows that programs have, ascending, multiples of the shards."""
        sizes = [batch_shards]
        finest = -(-_FINEST_ROWS // batch_shards) * batch_shards
        while sizes[-1] < max_running:
            last = sizes[-1]
            # Padding costs nothing as long as weights are most of what a step reads.
            following = last * (4 if last < 64 else 2) if last < 2 * finest else last + finest
            sizes.append(min(max_running, following))
        beside = (self.max_step_tokens - max_running) // self.chunk_sizes[-1]
        if min(beside, self.max_piece_rows, max_running - 1) // batch_shards in (2, 3):
            sizes.insert(1, 2 * batch_shards)  # of the longest chunks: a call of four has no room
        return tuple(sizes)

    def with_host(
        self, limits: SchedulerLimits, *, page_bytes: int, state_bytes: int
    ) -> SchedulerLimits:
        """Returns limits with the KV-cache pages and states that ``host_bytes`` have room for.

        States get half of the host's memory, pages the rest, each no more than can be used.

        Args:
            page_bytes: bytes of a page over all layers and devices.
            state_bytes: bytes of a sequence's states; 0 in a model without them.

        Raises:
            ConfigError: not one page or state fits.
        """
        if self.preemption is Preemption.RECOMPUTE:
            return limits
        if self.host_bytes < page_bytes + 2 * state_bytes:
            states = f" and two states of {state_bytes}" if state_bytes else ""
            raise ConfigError(
                f"host_bytes={self.host_bytes} has no room for a page of {page_bytes} bytes"
                f"{states}; raise it, or take preemption={Preemption.RECOMPUTE.value!r}"
            )
        # A page of the tree has at most one snapshot, and a request that runs may be preempted.
        most = limits.max_running + limits.num_pages
        num_states = min(most, self.host_bytes // (2 * state_bytes)) if state_bytes else 0
        left_bytes = self.host_bytes - num_states * state_bytes
        # Only pages of a model without attention take no bytes.
        most = limits.max_running * limits.num_pages
        num_pages = left_bytes // page_bytes if page_bytes else most
        return dataclasses.replace(limits, num_host_pages=num_pages, num_host_states=num_states)


def original_context(config: ModelConfig) -> int | None:
    """Returns the context length in tokens up to which LongRoPE uses its short factors; None
    without LongRoPE.
    """
    scalings = [block.mixer.rope and block.mixer.rope.scaling for block in config.blocks]
    found = {each.original_max_positions for each in scalings if type(each) is LongRopeScaling}
    if len(found) > 1:
        raise ConfigError(
            f"LongRoPE with original contexts of {sorted(found)} tokens in one model: generation "
            "computes a row's keys again where it crosses one; give all blocks the same"
        )
    return found.pop() if found else None


def _require_lasting_keys(config: ModelConfig, positions: int) -> None:
    """Refuses contexts in which a further token changes all keys, which the cache has."""
    for block in config.blocks:
        scaling = block.mixer.rope and block.mixer.rope.scaling
        if isinstance(scaling, DynamicScaling) and scaling.original_max_positions < positions:
            raise ConfigError(
                f"a context of {positions} tokens with dynamic rope scaling beyond "
                f"{scaling.original_max_positions}: each further token changes all keys, which are "
                f"cached here; set max_context={scaling.original_max_positions}, or take YaRN"
            )


def options_on(platform: str) -> EngineOptions:
    """Returns a server's default options on a platform, by JAX's name for it.

    On GPUs, chunks are long enough for efficient matmuls, and pages have the size that kernels
    read. CPUs gain little from several prompts in a call, and start sooner with fewer programs.
    """
    if platform != "gpu":
        return EngineOptions(max_piece_rows=1)
    return EngineOptions(
        max_running=64, page_size=64, max_step_tokens=4096 + 64, chunk_sizes=(64, 256, 1024)
    )
